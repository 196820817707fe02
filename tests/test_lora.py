"""A merged LoRA layer computes what peft's three products do, forwards and backwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from test_trainer import conversations, gradients, make_trainer, plain_gradients, relative_error

from artnb.backends.lora import MergedLora, merged_layers
from artnb.config import TrainConfig

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(torch.nn.Module):
    """Two linear layers, the first with a bias."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = torch.nn.Linear(24, 40, dtype=dtype)
            self.second = torch.nn.Linear(40, 16, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def adapted(dtype: torch.dtype = torch.float32, rank: int = 4) -> tuple[Any, list[MergedLora]]:
    """A net under peft with a random adapter, and its merged layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=rank, lora_alpha=6, target_modules=["first", "second"])
        model = peft.get_peft_model(Net(dtype), config)
    layers = list(merged_layers(model))
    generator = torch.Generator().manual_seed(2)
    for layer in layers:
        layer.a.data = layer.a.data.to(torch.promote_types(dtype, torch.float32))
        layer.b.data = 0.1 * torch.randn(layer.b.shape, generator=generator, dtype=layer.a.dtype)
        layer.merge()
    return model, layers


def peft_itself(ours: Any, rank: int = 4) -> Any:
    """The same base and adapter in peft's own layers, in float32."""
    config = peft.LoraConfig(r=rank, lora_alpha=6, target_modules=["first", "second"])
    model = peft.get_peft_model(Net(torch.float32), config)
    for name, parameter in model.named_parameters():
        parameter.data = dict(ours.named_parameters())[name].data.float().clone()
    return model


@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24)])
@pytest.mark.parametrize("rank", [1, 4])
def test_output_and_all_gradients_are_pefts(shape, rank):
    ours, _ = adapted(rank=rank)
    theirs = peft_itself(ours, rank)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    grads = []
    for model in (ours, theirs):
        leaf = x.clone().requires_grad_()
        model(leaf).square().sum().backward()
        grads.append(
            {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | {"x": leaf.grad}
        )
    assert torch.allclose(ours(x), theirs(x), atol=1e-5)
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) == 5, "x and two factors of each layer"
    for name, expected in grads[1].items():
        error = (grads[0][name] - expected).norm() / expected.norm()
        assert float(error) < 1e-5, name


def test_gradients_in_bfloat16_point_the_same_way():
    ours, _ = adapted(torch.bfloat16)
    theirs = peft_itself(ours)
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(3))
    ours(x.bfloat16()).float().square().sum().backward()
    theirs(x).square().sum().backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.dtype == torch.float32
            cosine = torch.cosine_similarity(parameter.grad.flatten(), expected[name].grad.flatten(), dim=0)
            assert float(cosine) > 0.995, name


def test_the_adapter_can_be_switched_off():
    ours, _ = adapted()
    x = torch.randn(3, 24)
    with ours.disable_adapter():
        assert torch.equal(ours(x), Net(torch.float32)(x))
    assert not torch.allclose(ours(x), Net(torch.float32)(x), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_merging_forms_base_plus_update_and_leaves_its_inputs_alone(dtype):
    _, layers = adapted(dtype)
    for layer in layers:
        before = [layer.base.clone(), layer.a.clone(), layer.b.clone()]
        for _ in range(3):
            layer.merge()
        expected = (layer.base.double() + layer.scale * layer.b.double() @ layer.a.double()).to(dtype)
        step = 2**-7 if dtype == torch.bfloat16 else 1e-6
        assert torch.allclose(layer.merged.double(), expected.double(), rtol=step, atol=1e-7)
        assert torch.equal(layer.merged, layer.merged_with(layer.a, layer.b))
        assert all(torch.equal(a, b) for a, b in zip(before, (layer.base, layer.a, layer.b), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_of_zero_is_the_base_bit_for_bit(dtype):
    _, layers = adapted(dtype)
    for layer in layers:
        layer.b.data.zero_()
        assert layer.merge() == (0.0, 0.0)
        assert torch.equal(layer.merged, layer.base)


def test_merging_tells_how_much_of_the_update_the_stored_weight_shows():
    for dtype, size, share in [
        (torch.float32, 1e-3, 1.0),
        (torch.bfloat16, 1.0, 1.0),
        (torch.bfloat16, 1e-7, 0.0),
    ]:
        _, layers = adapted(dtype)
        for layer in layers:
            layer.b.data *= size / float((layer.scale * layer.b.data @ layer.a.data).abs().mean())
            total, kept = layer.merge()
            assert kept / total == pytest.approx(share, abs=0.02)


def test_layers_are_found_under_the_models_own_names():
    _, layers = adapted()
    assert [layer.name for layer in layers] == ["first", "second"]
    assert [layer.scale for layer in layers] == [1.5, 1.5]


def mixtral(shape: dict[str, Any]) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4))


def qwen3_moe(shape: dict[str, Any]) -> Any:
    """Its first layer is dense."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, head_dim=8, mlp_only_layers=[0]))


@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
def test_of_a_mixture_the_linear_layers_are_adapted_and_the_experts_are_not(tmp_path: Path, make):
    shape = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.12,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        make(shape).save_pretrained(tmp_path)
    trainer, rows = make_trainer(tmp_path), conversations()
    adapted = [layer.name.removeprefix("model.layers.") for layer in trainer.layers]
    assert adapted == [f"{layer}.self_attn.{each}_proj" for layer in (0, 1) for each in "qkvo"]
    ours = gradients(trainer, rows, TrainConfig())
    theirs = plain_gradients(tmp_path, trainer, rows, TrainConfig(), torch.float32)
    assert relative_error(ours, theirs) < 1e-5
