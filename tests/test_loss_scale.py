"""Gradients in float16 neither vanish nor overflow, and no rows are left out of an update for it."""

from __future__ import annotations

import pytest
import torch
from test_trainer import conversations, gradients, make_trainer, relative_error

from artnb.backends import loss_scale
from artnb.backends.loss_scale import LARGEST, LossScale
from artnb.config import TrainConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def scaled(parameter: torch.nn.Parameter, factor: float) -> LossScale:
    scale = LossScale([parameter], enabled=True)
    scale.factor = factor
    return scale


def test_an_overflow_is_computed_again_at_a_factor_that_fits():
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    scale, calls = scaled(weight, 2.0**16), []
    weight.grad = torch.tensor([5.0])

    def compute() -> tuple[torch.Tensor, str]:
        calls.append(1)
        half = (weight * 3.0).to(torch.float16)  # its gradient passes through float16
        return (half.float() * 10.0).sum(), "rest"

    loss, rest = scale.backward(compute)
    assert float(loss.detach()) == 30.0 and rest == "rest"
    assert scale.factor == 2.0**12, "10 * 2**12 is the largest that float16 holds"
    assert len(calls) == 5
    assert weight.grad.item() == 35.0, "added to what was there"


def test_small_gradients_survive_by_the_factor():
    weight = torch.nn.Parameter(torch.tensor([1.0]))

    def gradient(factor: float) -> float:
        weight.grad = None
        scale = scaled(weight, factor)
        scale.backward(lambda: ((weight.to(torch.float16)).float().sum() * 2.0**-30, None))
        return float(weight.grad)

    assert gradient(1.0) == 0.0 and gradient(2.0**16) == 2.0**-30


def test_a_loss_that_is_not_finite_is_left_to_whoever_takes_the_step():
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    scale = scaled(weight, 2.0**16)
    scale.backward(lambda: (weight.sum() * float("nan"), None))
    assert scale.factor == 2.0**16 and not weight.grad.isfinite()


def test_the_factor_grows_again_after_a_while(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROW_AFTER", 3)
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    scale = scaled(weight, LARGEST / 2)
    for expected in (LARGEST / 2, LARGEST / 2, LARGEST, LARGEST, LARGEST, LARGEST):
        scale.backward(lambda: (weight.sum(), None))
        assert scale.factor == expected


def test_a_float16_model_has_the_gradient_of_the_float32_one(tiny_model):
    half, full = make_trainer(tiny_model, dtype=torch.float16), make_trainer(tiny_model)
    assert half.loss_scale.enabled and not full.loss_scale.enabled
    config = TrainConfig(kl_coef=0.3, entropy_coef=0.1)
    found, expected = (gradients(trainer, conversations(), config) for trainer in (half, full))
    assert relative_error(found, expected) < 0.02
    half.loss_scale.factor = 2.0**40  # every gradient overflows, at first
    assert relative_error(gradients(half, conversations(), config), expected) < 0.02
    assert half.loss_scale.factor <= LARGEST
    half.optim_step(TrainConfig(learning_rate=1e-3))


def test_a_nan_in_float16_changes_nothing(tiny_model):
    trainer = make_trainer(tiny_model, dtype=torch.float16)
    before = trainer.snapshot()
    trainer.forward_backward(conversations(), TrainConfig(), denominator=0.0)
    with pytest.raises(FloatingPointError):
        trainer.optim_step(TrainConfig(learning_rate=0.1))
    assert all(map(torch.equal, trainer.parameters.values(), before[0]))
