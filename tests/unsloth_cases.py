"""On Unsloth's CPU backend the trainer computes what it computes on transformers and peft alone.

Not collected by itself: Unsloth changes packages for the whole process, so ``test_trainer_unsloth``
runs this file in one of its own. What a process without Unsloth computed lies in $REFERENCE.
"""

from __future__ import annotations

import unsloth  # before the packages that it changes

# isort: split
import json
import os
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from reference_models import load as load_plain
from reference_models import logprobs_of
from safetensors.torch import load_file
from test_trainer import OBJECTIVES, conversations, gradients, relative_error, step
from test_trainer import make_trainer as make_plain
from unsloth_zoo.cpu.runtime import cpu_bnb_4bit_supported

from artnb.backends import trainer_unsloth
from artnb.backends.packing_check import PackingWarning
from artnb.backends.stack import Stack, load_model
from artnb.backends.trainer_full import FullTrainer
from artnb.backends.trainer_unsloth import UnslothTrainer
from artnb.config import LoraConfig, TrainConfig
from artnb.errors import CheckpointError, ConfigurationError
from artnb.packing import pack

pytestmark = pytest.mark.usefixtures("one_thread")

REFERENCE = Path(os.environ["REFERENCE"])


def make_trainer(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    rank: int = 4,
    size: float = 0.1,
    load: dict[str, Any] | None = None,
    checkpointing: bool = False,
    **options: Any,
) -> UnslothTrainer:
    """The adapter of ``test_trainer.make_trainer`` on a model that Unsloth loaded."""
    model, _ = trainer_unsloth.load(folder, dtype=dtype, gradient_checkpointing=checkpointing, **(load or {}))
    trainer = UnslothTrainer(model, LoraConfig(rank=rank), gradient_checkpointing=checkpointing, **options)
    generator = torch.Generator().manual_seed(5)
    for layer in trainer.layers:
        layer.b.data.copy_(size * torch.randn(layer.b.shape, generator=generator))
    trainer.merge()
    return trainer


def least_cosine(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Of the worst factor."""
    assert ours.keys() == theirs.keys()
    return min(
        float(torch.cosine_similarity(ours[n].double().flatten(), theirs[n].double().flatten(), 0))
        for n in theirs
    )


# ---- the same results as a process without Unsloth ---------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_and_loss_are_those_of_a_process_without_unsloth(tiny_model, name):
    trainer, rows = make_trainer(tiny_model), conversations()
    ours = gradients(trainer, rows, OBJECTIVES[name])
    expected = load_file(REFERENCE / f"{name}.safetensors")
    assert least_cosine(ours, expected) > 0.9999
    assert relative_error(ours, expected) < 1e-5
    trainer.optimizer.zero_grad()
    _, sizes = trainer.forward_backward(rows, OBJECTIVES[name], denominator=7.0)
    losses = json.loads((REFERENCE / "losses.json").read_text())
    assert sizes["loss"] == pytest.approx(losses[name], rel=1e-5)
    assert sizes["packed_tokens"] < 0.5 * sizes["row_tokens"], "prefixes were shared"
    assert sizes["rows_unpacked"] == 0.0


def test_three_updates_end_at_the_same_adapter(tiny_model):
    trainer = make_trainer(tiny_model)
    for _ in range(3):
        step(trainer)
    expected = load_file(REFERENCE / "adapter_model.safetensors")
    for name, parameter in trainer.parameters.items():
        assert torch.allclose(parameter, expected[f"base_model.model.{name}"], atol=1e-5), name


def test_a_checkpoint_made_without_unsloth_goes_on_here(tiny_model):
    trainer = make_trainer(tiny_model, size=0.3)
    step(trainer)
    trainer.load(REFERENCE)
    losses = json.loads((REFERENCE / "losses.json").read_text())["next"]
    assert [step(trainer), step(trainer)] == pytest.approx(losses, abs=1e-4)


def test_a_checkpoint_made_here_goes_on_without_unsloth(tiny_model, tmp_path):
    first, second = make_trainer(tiny_model), make_plain(tiny_model, size=0.3)
    step(first)
    first.save(tmp_path)
    second.load(tmp_path)
    for ours, theirs in zip(first.parameters.values(), second.parameters.values(), strict=True):
        assert torch.equal(ours, theirs)
    assert [step(second), step(second)] == pytest.approx([step(first), step(first)], abs=1e-4)
    again = peft.PeftModel.from_pretrained(load_plain(tiny_model), tmp_path)
    assert logprobs_of(again, (40,), (41, 42)).isfinite().all()


def test_an_untrained_adapter_is_the_base_and_starts_as_pefts_does(tiny_model):
    state = torch.get_rng_state()
    ours = make_trainer(tiny_model, size=0.0)
    assert torch.equal(torch.get_rng_state(), state), "the user's random numbers are left alone"
    theirs = make_plain(tiny_model, size=0.0)
    for name, parameter in theirs.parameters.items():
        assert torch.equal(ours.parameters[name], parameter), name
    assert ours.rounding_lost == 0.0
    base, merged = ours.base_weights(), ours.merged_weights()
    assert base.keys() == theirs.base_weights().keys()
    assert all(torch.equal(merged[name], base[name]) for name in base)
    assert all(torch.equal(base[name], w) for name, w in theirs.base_weights().items())


def test_the_real_model_has_the_same_gradient(bundled):
    rows = conversations(40_000, groups=1, long=30)
    ours = gradients(make_trainer(bundled, rank=2, size=0.02), rows, TrainConfig())
    theirs = gradients(make_plain(bundled, rank=2, size=0.02), rows, TrainConfig())
    assert least_cosine(ours, theirs) > 0.999
    assert relative_error(ours, theirs) < 1e-3


def test_bfloat16_points_the_same_way(tiny_model):
    ours = make_trainer(tiny_model, dtype=torch.bfloat16)
    assert ours.dtype == torch.bfloat16 and ours.layers[0].a.dtype == torch.float32
    theirs = make_plain(tiny_model)
    rows = conversations()
    assert least_cosine(gradients(ours, rows, TrainConfig()), gradients(theirs, rows, TrainConfig())) > 0.99
    assert ours.packing is not None and ours.packing.is_true


def test_all_weights_have_the_gradient_of_a_process_without_unsloth(tiny_model):
    model, _ = trainer_unsloth.load(tiny_model, dtype=torch.float32)
    ours = FullTrainer(model)
    assert ours.parameters.keys() == {n for n, _ in load_plain(tiny_model).named_parameters()}
    found = gradients(ours, conversations(), TrainConfig())
    assert relative_error(found, load_file(REFERENCE / "full.safetensors")) < 1e-5


# ---- packing -----------------------------------------------------------------------------------


def test_packing_sharing_and_microbatches_leave_the_gradient_alone(tiny_model):
    trainer, rows = make_trainer(tiny_model), conversations()
    apart = [gradients(trainer, [each], TrainConfig()) for each in rows]
    expected = {name: sum(g[name] for g in apart) for name in apart[0]}
    for limit, share in [(10, True), (150, True), (150, False), (4096, True), (4096, False)]:
        config = TrainConfig(microbatch_tokens=limit, share_prefixes=share)
        assert relative_error(gradients(trainer, rows, config), expected) < 1e-5


@pytest.mark.parametrize("theirs", ["sdpa", "eager"])
def test_an_attention_that_ignores_the_plan_is_noticed_and_rows_are_unpacked(tiny_model, theirs):
    trainer, rows = make_trainer(tiny_model, load={"attn_implementation": theirs}), conversations()
    with pytest.warns(PackingWarning, match="one by one"):
        _, sizes = trainer.forward_backward(rows, TrainConfig(), denominator=7.0)
    assert sizes["rows_unpacked"] == 1.0 and sizes["packed_tokens"] == sizes["row_tokens"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", PackingWarning)
        ours = gradients(trainer, rows, TrainConfig())
    assert relative_error(ours, load_file(REFERENCE / "cispo.safetensors")) < 1e-5


# ---- reference logprobs and weights ------------------------------------------------------------


def test_base_logprobs_are_taken_with_the_adapter_off(tiny_model):
    trainer, untrained = make_trainer(tiny_model), make_plain(tiny_model, size=0.0)
    for batch in pack(conversations(), max_tokens=4096):
        base = trainer._base_logprobs(batch)
        assert not base.requires_grad
        assert torch.allclose(base, untrained.logprobs(batch)[0], atol=1e-5)
        assert not torch.allclose(base, trainer.logprobs(batch)[0], atol=1e-2)
    assert all(p.requires_grad for p in trainer.parameters.values()), "switching off is not for good"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_effective_weights_are_pefts_bit_for_bit(tiny_model, tmp_path, dtype):
    ours, theirs = make_trainer(tiny_model, dtype=dtype), make_plain(tiny_model, dtype=dtype)
    expected = {name: weight.clone() for name, weight in theirs.merged_weights().items()}
    assert all(torch.equal(ours.merged_weights()[name], weight) for name, weight in expected.items())
    assert ours.rounding_lost == pytest.approx(theirs.rounding_lost, abs=1e-6)
    ours.save(tmp_path)
    step(ours)
    assert all(torch.equal(ours.weights_of(tmp_path)[name], w) for name, w in expected.items())
    assert not torch.equal(ours.layers[0].merged, expected[ours.layers[0].name])
    if dtype == torch.float32:
        ours.load(tmp_path)
        ids = list(range(40, 60))
        assert torch.allclose(ours.score(ids), theirs.score(ids), atol=1e-5), "and what it samples from"


def test_merged_layers_are_pefttrainers(tiny_model):
    ours, theirs, rows = make_trainer(tiny_model, merged=True), make_plain(tiny_model), conversations()
    expected = gradients(theirs, rows, TrainConfig())
    found = gradients(ours, rows, TrainConfig())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [step(ours), step(ours)] == [step(theirs), step(theirs)]


def test_a_restored_trainer_repeats_its_steps_bit_for_bit(tiny_model):
    trainer = make_trainer(tiny_model)
    step(trainer)
    kept = trainer.snapshot()
    losses = [step(trainer), step(trainer)]
    trainer.restore(kept)
    assert [step(trainer), step(trainer)] == losses


# ---- options -----------------------------------------------------------------------------------


def test_gradient_checkpointing_computes_layers_again_and_changes_nothing(tiny_model):
    trainer, calls = make_trainer(tiny_model, checkpointing=True), []
    trainer.model.get_decoder().layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    found = gradients(trainer, conversations(), TrainConfig(kl_coef=0.3, entropy_coef=0.1))
    assert relative_error(found, load_file(REFERENCE / "kl and entropy.safetensors")) < 1e-5
    checked, base, forward, again = 6, 1, 1, 1
    assert len(calls) == checked + base + forward + again


def test_a_4_bit_base_is_trained_and_served(tiny_model):
    trainer = make_trainer(tiny_model, load={"load_in_4bit": True})
    weight = trainer.layers[0].layer.base_layer.weight
    assert weight.dtype == torch.uint8 and trainer.layers[0].base.shape == (64, 64)
    before, rows = weight.clone(), conversations()
    shared = gradients(trainer, rows, TrainConfig())
    apart = gradients(trainer, rows, TrainConfig(share_prefixes=False, microbatch_tokens=1))
    assert trainer.packing is not None and trainer.packing.is_true
    assert relative_error(shared, apart) < 1e-5
    full_precision = load_file(REFERENCE / "cispo.safetensors")
    assert 0.5 < least_cosine(shared, full_precision) < 0.9999, "another base, though not a far one"
    trainer.optim_step(TrainConfig(learning_rate=1e-2))
    assert torch.equal(weight, before)

    served = load_plain(tiny_model)
    for name, merged in trainer.merged_weights().items():
        served.get_submodule(name).weight.data = merged
    ids = list(range(40, 70))
    expected = logprobs_of(served, (ids[0],), tuple(ids[1:]))
    expected = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert torch.allclose(trainer.score(ids), expected, atol=1e-4), "what is served is what is trained"
    with pytest.raises(ConfigurationError, match="4-bit"):
        UnslothTrainer(trainer.model, LoraConfig(), merged=True)


def test_4_bits_that_unsloth_silently_leaves_out_are_refused(tiny_model, monkeypatch):
    monkeypatch.setenv("UNSLOTH_CPU_LOAD_IN_4BIT", "0")
    cpu_bnb_4bit_supported.cache_clear()
    with pytest.raises(ConfigurationError, match="4-bit"):
        trainer_unsloth.load(tiny_model, load_in_4bit=True)
    cpu_bnb_4bit_supported.cache_clear()


def test_8_bit_moments_train_are_saved_and_loaded(tiny_model, tmp_path):
    rows, config = conversations(), TrainConfig(learning_rate=1e-3)
    small, exact = (make_trainer(tiny_model, rank=64, optimizer=o) for o in ("adamw_8bit", "adamw"))
    for trainer in (small, exact):
        for _ in range(2):
            trainer.forward_backward(rows, config, denominator=7.0)
            trainer.optim_step(config)
    kinds = {t.dtype for s in small.optimizer.state.values() for k, t in s.items() if k == "state1"}
    assert kinds == {torch.uint8, torch.float32}, "8 bits for large factors, 32 for small ones"
    moved = {n: p.detach() for n, p in small.parameters.items()}
    assert least_cosine(moved, {n: p.detach() for n, p in exact.parameters.items()}) > 0.999
    small.save(tmp_path)
    kept = small.snapshot()

    def go_on(trainer: UnslothTrainer) -> list[torch.Tensor]:
        trainer.forward_backward(rows, config, denominator=7.0)
        trainer.optim_step(config)
        return [p.detach().clone() for p in trainer.parameters.values()]

    expected = go_on(small)
    small.restore(kept)
    assert all(map(torch.equal, go_on(small), expected))
    small.load(tmp_path)
    assert all(map(torch.equal, go_on(small), expected))
    with pytest.raises(CheckpointError, match="another one"):
        exact.load(tmp_path)


def test_what_it_cannot_do_is_refused(tiny_model):
    with pytest.raises(ConfigurationError, match="float16"):
        trainer_unsloth.load(tiny_model, dtype=torch.float16)
    model, _ = trainer_unsloth.load(tiny_model, dtype=torch.float32)
    for targets in [("q_proj", "lm_head"), ("embed_tokens",), ("nothing",)]:
        with pytest.raises(ConfigurationError, match="LoRA targets"):
            UnslothTrainer(model, LoraConfig(targets=targets))
    with pytest.raises(ConfigurationError, match="optimizer"):
        UnslothTrainer(model, LoraConfig(), optimizer="sgd")  # type: ignore[arg-type]


def test_attention_that_is_more_than_causal_softmax_is_refused_unloaded(tmp_path):
    """Unsloth would load such models, and the attention that runs would not be theirs."""
    window = transformers.MistralConfig(sliding_window=64, max_position_embeddings=512)
    capped = transformers.Gemma2Config()
    for config, message in ((window, "sliding-window"), (capped, "sliding|caps")):
        config.save_pretrained(tmp_path)
        with pytest.raises(ConfigurationError, match=message):
            load_model(Stack("unsloth", "torch", "cpu"), tmp_path, torch.float32, LoraConfig(), {}, {})


def test_on_a_cpu_the_layers_are_transformers_and_pefts(tiny_model):
    """What the docstring of trainer_unsloth says of this backend; an update of Unsloth may change it."""
    assert unsloth.DEVICE_TYPE == "cpu"
    trainer = make_trainer(tiny_model)
    assert trainer.model.config._attn_implementation == "artnb"
    for module in trainer.model.get_decoder().modules():
        source = getattr(module.forward, "__func__", module.forward).__code__.co_filename
        assert "unsloth" not in source.lower(), f"{type(module).__name__}: {source}"
