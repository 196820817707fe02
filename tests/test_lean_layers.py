"""Lean layers give transformers' own results and gradients, and keep far less for the backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import load
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

from artnb.backends import trainer_peft
from artnb.backends.attention import TreePlan
from artnb.backends.lean_layers import make_lean
from artnb.backends.lora import MergedLora, merged_layers
from artnb.backends.trainer_peft import PeftTrainer
from artnb.config import LoraConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def norm(dtype: torch.dtype, *, trained: bool = False) -> LlamaRMSNorm:
    module = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    generator = torch.Generator().manual_seed(1)
    module.weight.data = torch.rand(64, generator=generator).to(dtype) + 0.5
    return module.requires_grad_(trained)


def gated(activation: str, dtype: torch.dtype = torch.float32) -> tuple[Any, list[MergedLora]]:
    """A gated feed-forward of transformers under peft, and its merged layers."""
    import peft

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        module = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=80, hidden_act=activation)).to(dtype)
        net = torch.nn.Sequential(module.requires_grad_(False))
        names = ["gate_proj", "up_proj", "down_proj"]
        model = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=names))
        layers = list(merged_layers(model))
        for layer in layers:
            layer.b.data = torch.randn_like(layer.b) * 0.1
            layer.merge()
    return model, layers


def passed(module: Any, x: torch.Tensor, *wanted: torch.Tensor) -> list[torch.Tensor]:
    """Output, and the gradients of the input and of ``wanted``."""
    x = x.clone().requires_grad_()
    output = module(x)
    up = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, (x, *wanted), up)]


def inputs(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(4)).to(dtype)


@pytest.mark.parametrize("trained", [False, True])
def test_a_norm_and_its_gradients_are_those_of_transformers(trained):
    module = norm(torch.float64, trained=trained)
    wanted = [module.weight] if trained else []
    expected = passed(module, inputs(torch.float64), *wanted)
    make_lean(module, [])
    assert "forward" in vars(module)
    for ours, theirs in zip(passed(module, inputs(torch.float64), *wanted), expected, strict=True):
        # transformers computes in float32 whatever it is given
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_norm_in_bfloat16_loses_no_more_than_transformers():
    exact = passed(norm(torch.float64), inputs(torch.bfloat16).double())[1]
    theirs = passed(norm(torch.bfloat16), inputs(torch.bfloat16))[1]
    module = norm(torch.bfloat16)
    make_lean(module, [])
    ours = passed(module, inputs(torch.bfloat16))[1]
    assert (ours - exact).norm() <= 1.05 * (theirs - exact).norm()


def test_a_gated_feed_forward_and_its_gradients_stay():
    model, layers = gated("silu")
    wanted = [p for layer in layers for p in (layer.a, layer.b)]
    expected = passed(model, inputs(torch.float32), *wanted)
    with model.disable_adapter():
        without = model(inputs(torch.float32))
    make_lean(model, layers)
    assert "forward" in vars(model.base_model.model[0])
    for ours, theirs in zip(passed(model, inputs(torch.float32), *wanted), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    with model.disable_adapter():
        assert torch.equal(model(inputs(torch.float32)), without)


def test_another_activation_is_left_alone():
    model, layers = gated("gelu")
    make_lean(model, layers)
    assert "forward" not in vars(model.base_model.model[0])


def test_a_norm_that_computes_something_else_is_left_alone():
    class Shifted(LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x

    module = Shifted(64)
    make_lean(module, [])
    assert "forward" not in vars(module)


def kept(folder: Path) -> int:
    """Bytes that a model of transformers under an adapter keeps for the backward pass."""
    trainer = PeftTrainer(load(folder, dtype=torch.bfloat16, implementation="artnb"), LoraConfig(rank=4))
    constant = {p.data_ptr() for p in trainer.model.parameters()} | {
        p.merged.data_ptr() for p in trainer.layers
    }
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in constant:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    alive = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        ids = torch.arange(3, 203)[None]
        alive.append(trainer.model.get_decoder()(ids, use_cache=False, plan=TreePlan([(0, 200, -1)])))
    return sum(sizes.values())


def test_a_model_keeps_a_third_less(tiny_model, monkeypatch):
    lean = kept(tiny_model)
    monkeypatch.setattr(trainer_peft, "make_lean", lambda model, layers: None)
    assert lean < 0.67 * kept(tiny_model)
