"""Packed rows that read each other are found on real rows, and then computed one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from reference_models import load, row
from test_trainer import conversations, gradients, make_trainer, relative_error

from artnb.backends import trainer as trainer_module
from artnb.backends.attention import TreePlan
from artnb.backends.packing_check import PackingWarning, check_packing
from artnb.backends.trainer_peft import PeftTrainer
from artnb.config import LoraConfig, TrainConfig

pytestmark = pytest.mark.usefixtures("one_thread")

Tree = Sequence[tuple[int, int, int]]


def reads_siblings(segments: Tree, device: Any = None) -> TreePlan:
    """Each segment sees the one before it of the same parent as well."""
    last: dict[int, int] = {}
    changed = []
    for number, (start, length, parent) in enumerate(segments):
        changed.append((start, length, last.get(parent, parent) if parent >= 0 else parent))
        last[parent] = number
    return TreePlan(changed, device)


def reads_strangers(segments: Tree, device: Any = None) -> TreePlan:
    """Each root sees the root before it."""
    changed, root = [], -1
    for number, (start, length, parent) in enumerate(segments):
        changed.append((start, length, root if parent < 0 else parent))
        root = number if parent < 0 else root
    return TreePlan(changed, device)


def forgets_parents(segments: Tree, device: Any = None) -> TreePlan:
    """A shared prefix is not seen by those who share it."""
    return TreePlan([(start, length, -1) for start, length, _ in segments], device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_that_is_true_passes(tiny_model, dtype):
    trainer = make_trainer(tiny_model, dtype=dtype)
    _, sizes = trainer.forward_backward(conversations(), TrainConfig(), denominator=7.0)
    assert trainer.packing is not None and trainer.packing.is_true and trainer.packing.rows == 4
    assert sizes["rows_unpacked"] == 0.0 and sizes["packing_error"] == trainer.packing.error
    assert sizes["packed_tokens"] < sizes["row_tokens"]


@pytest.mark.parametrize("plan", [reads_siblings, reads_strangers, forgets_parents])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_way_to_read_the_wrong_rows_is_found(tiny_model, monkeypatch, plan, dtype):
    trainer = make_trainer(tiny_model, dtype=dtype)
    monkeypatch.setattr(trainer_module, "TreePlan", plan)
    with pytest.warns(PackingWarning, match="computed one by one"):
        check = trainer.verify_packing(conversations())
    assert check is not None and check.error > 2 * check.tolerance


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_transformers_own_attention_ignores_the_plan_and_still_trains_right(tiny_model, implementation):
    trainer = PeftTrainer(load(tiny_model, implementation=implementation), LoraConfig(rank=4))
    expected = gradients(make_trainer(tiny_model, size=0.0), conversations(), TrainConfig())
    with pytest.warns(PackingWarning):
        _, sizes = trainer.forward_backward(conversations(), TrainConfig(), denominator=7.0)
    assert sizes["rows_unpacked"] == 1.0 and sizes["packed_tokens"] == sizes["row_tokens"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        assert relative_error(gradients(trainer, conversations(), TrainConfig()), expected) < 1e-5


def test_a_single_row_has_nothing_to_be_compared_with(tiny_model):
    trainer, rows = make_trainer(tiny_model), conversations()
    trainer.forward_backward([rows[0], rows[0]], TrainConfig(), denominator=7.0)
    assert trainer.packing is None
    trainer.forward_backward(rows, TrainConfig(), denominator=7.0)
    assert trainer.packing is not None, "the first step that can be checked is"


def test_rows_are_compared_at_temperature_1(tiny_model):
    """A low temperature would blow rounding up into a difference."""
    trainer = make_trainer(tiny_model)
    rows = [row([*range(3, 30), last, 5], [False] * 27 + [True] * 2, temperature=1e-3) for last in (7, 8)]
    check = check_packing(rows, partial(first_of, trainer.logprobs), torch.float32)
    assert check is not None and check.error < 1e-4


def first_of(function: Callable[..., tuple[torch.Tensor, torch.Tensor]], *given: Any) -> torch.Tensor:
    return function(*given)[0]
