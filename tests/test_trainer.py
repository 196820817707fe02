"""The trainer's gradient is the one that transformers, peft and autograd give without any of its tricks."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from reference_models import linear_weights, load, logprobs_of, row

from artnb.backends.trainer_peft import PeftTrainer
from artnb.config import LoraConfig, TrainConfig
from artnb.errors import CheckpointError, ConfigurationError
from artnb.loss import objective, token_loss
from artnb.packing import pack
from artnb.types import Sample

pytestmark = pytest.mark.usefixtures("one_thread")

Gradients = dict[str, torch.Tensor]


def make_trainer(
    folder: Path, *, dtype: torch.dtype = torch.float32, rank: int = 4, size: float = 0.1, **lora: Any
) -> PeftTrainer:
    """A trainer whose adapter has learned something already."""
    model = load(folder, dtype=dtype, implementation="artnb")
    trainer = PeftTrainer(model, LoraConfig(rank=rank, **lora))
    generator = torch.Generator().manual_seed(5)
    for layer in trainer.layers:
        layer.b.data.copy_(size * torch.randn(layer.b.shape, generator=generator))
    trainer.merge()
    return trainer


def conversations(vocabulary: int = 250, *, groups: int = 3, long: int = 40) -> list[Sample]:
    """Groups of rows that share a prompt; some of two turns with text of a tool between them."""
    source = random.Random(0)

    def words(count: int) -> list[int]:
        return source.choices(range(3, vocabulary), k=count)

    rows, system = [], words(20)
    for group in range(groups):
        prompt = system + words(long)
        for member in range(3):
            first, between, second = words(5 + member), words(4), words(3)
            ids = prompt + first + (between + second if group != 1 else [])
            sampled = [False] * len(prompt) + [True] * len(first)
            sampled += ([False] * 4 + [True] * 3) if group != 1 else []
            rows.append(
                row(
                    ids,
                    sampled,
                    advantage=source.uniform(-1, 1),
                    logprob=-5.0 + member,
                    weight=1.0 + member,
                    temperature=(1.0, 0.7, 1.3)[group % 3],
                    name=f"{group}/{member}",
                )
            )
    return rows


def gradients(trainer: PeftTrainer, rows: list[Sample], config: TrainConfig) -> Gradients:
    trainer.optimizer.zero_grad()
    trainer.forward_backward(rows, config, denominator=7.0)
    found = {n: p.grad.clone() for n, p in trainer.parameters.items() if p.grad is not None}
    assert found.keys() == trainer.parameters.keys(), "every factor gets a gradient"
    return found


def plain_gradients(
    folder: Path, trainer: PeftTrainer, rows: list[Sample], config: TrainConfig, dtype: torch.dtype
) -> Gradients:
    """Row by row, eager attention, peft's own layers, all logits."""
    lora = trainer.peft_model.peft_config["default"]
    model = peft.get_peft_model(
        load(folder, dtype=dtype),
        peft.LoraConfig(r=lora.r, lora_alpha=lora.lora_alpha, target_modules=lora.target_modules),
    )
    names = {f"base_model.model.{n}".replace(".weight", ".default.weight"): n for n in trainer.parameters}
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.data = trainer.parameters[names[name]].data.to(dtype)

    for each in rows:
        with torch.no_grad(), model.disable_adapter():
            base = plain_logprobs(model, each)[0] if config.kl_coef else None
        plain_loss(model, each, config, base).backward()
    return {names[n]: p.grad for n, p in model.named_parameters() if p.grad is not None}


def plain_logprobs(model: Any, each: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies of a row's sampled tokens, from all of its logits."""
    logits = model(input_ids=torch.tensor([each.ids_T]), use_cache=False).logits[0, :-1]
    logp = (logits / each.temperature).log_softmax(-1)[torch.tensor(each.is_sampled_T[1:])]
    targets = _picked(each.ids_T, each, torch.long)[:, None]
    return logp.gather(1, targets)[:, 0], -(logp.exp() * logp).sum(-1)


def plain_loss(model: Any, each: Sample, config: TrainConfig, base: torch.Tensor | None) -> torch.Tensor:
    """A row's part of the objective, by torch's own operations; base: logprobs of the base model."""
    ours, entropy = plain_logprobs(model, each)
    loss, _ = token_loss(
        ours,
        _picked(each.logprobs_T, each, ours.dtype),
        _picked(each.advantages_T, each, ours.dtype),
        torch.zeros(len(ours), dtype=torch.long),
        entropy,
        config,
        base,
    )
    return objective(loss, _picked(each.weights_T, each, ours.dtype), 7.0)


def _picked(values: tuple[Any, ...], each: Sample, as_type: torch.dtype) -> torch.Tensor:
    return torch.tensor([v for v, own in zip(values, each.is_sampled_T, strict=True) if own]).to(as_type)


def relative_error(ours: Gradients, theirs: Gradients) -> float:
    """Of the whole gradient, as one long vector."""
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[n].double() - g.double()).square().sum()) for n, g in theirs.items())
    return (difference / sum(float(g.double().square().sum()) for g in theirs.values())) ** 0.5


OBJECTIVES = {
    "cispo": TrainConfig(),
    "ppo": TrainConfig(loss="ppo", clip_low=0.5, clip_high=2.0),
    "gspo": TrainConfig(loss="gspo", clip_low=0.5, clip_high=2.0),
    "kl and entropy": TrainConfig(kl_coef=0.3, entropy_coef=0.1),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_of_every_factor_is_the_plain_models(tiny_model, name):
    trainer, rows = make_trainer(tiny_model), conversations()
    ours = gradients(trainer, rows, OBJECTIVES[name])
    theirs = plain_gradients(tiny_model, trainer, rows, OBJECTIVES[name], torch.float64)
    assert relative_error(ours, theirs) < 1e-5
    for factor, expected in theirs.items():
        assert float(torch.cosine_similarity(ours[factor].flatten(), expected.float().flatten(), 0)) > 0.999
        assert float((ours[factor] - expected).norm() / expected.norm()) < 1e-3, factor


def test_packing_sharing_and_microbatches_leave_the_gradient_alone(tiny_model):
    trainer, rows = make_trainer(tiny_model), conversations()
    apart = [gradients(trainer, [each], TrainConfig()) for each in rows]
    expected = {name: sum(g[name] for g in apart) for name in apart[0]}
    for limit in (10, 64, 150, 4096):
        for share in (True, False):
            config = TrainConfig(microbatch_tokens=limit, share_prefixes=share)
            assert relative_error(gradients(trainer, rows, config), expected) < 1e-5


def test_packing_leaves_the_gradient_of_the_real_model_alone(bundled):
    trainer = make_trainer(bundled, rank=2, size=0.02)
    rows = conversations(40_000, groups=1, long=30)[:2]
    shared = gradients(trainer, rows, TrainConfig())
    apart = gradients(trainer, rows, TrainConfig(share_prefixes=False, microbatch_tokens=60))
    assert relative_error(shared, apart) < 1e-5
    theirs = plain_gradients(bundled, trainer, rows, TrainConfig(), torch.float32)
    assert relative_error(shared, theirs) < 1e-4
    for factor, expected in theirs.items():
        assert float(torch.cosine_similarity(shared[factor].flatten(), expected.flatten(), 0)) > 0.999, factor


def test_sizes_tell_what_sharing_saved(tiny_model):
    trainer, rows = make_trainer(tiny_model), conversations()
    _, shared = trainer.forward_backward(rows, TrainConfig(), denominator=1.0)
    _, apart = trainer.forward_backward(rows, TrainConfig(share_prefixes=False), denominator=1.0)
    assert shared["row_tokens"] == apart["row_tokens"] == apart["packed_tokens"]
    assert shared["packed_tokens"] < 0.5 * shared["row_tokens"]
    assert shared["loss"] == pytest.approx(apart["loss"], abs=1e-5)


def test_kl_to_the_base_is_measured_with_the_adapter_off(tiny_model):
    trainer, rows = make_trainer(tiny_model), conversations()
    statistics, _ = trainer.forward_backward(rows, TrainConfig(kl_coef=0.1), denominator=1.0)
    batches = pack(rows, max_tokens=4096)
    plain = load(tiny_model)
    for batch, measured in zip(batches, statistics, strict=True):
        ours = trainer.logprobs(batch)[0].detach()
        base = []
        for index in batch.rows_R:
            each = rows[index]
            all_logits = logprobs_of(plain, each.ids_T[:1], each.ids_T[1:]) / each.temperature
            picked = all_logits.log_softmax(-1).gather(1, torch.tensor(each.ids_T[1:])[:, None])[:, 0]
            base.append(picked[torch.tensor(each.is_sampled_T[1:])])
        difference = torch.cat(base) - ours
        assert torch.allclose(measured["kl_base"], difference.exp() - difference - 1, atol=1e-4)
    assert trainer.peft_model.active_adapters == ["default"]
    assert all(p.requires_grad for p in trainer.parameters.values()), "switching off is not for good"


def test_an_untrained_adapter_is_the_base(tiny_model):
    trainer = PeftTrainer(load(tiny_model, implementation="artnb"), LoraConfig())
    ids = list(range(30, 60))
    expected = logprobs_of(load(tiny_model), (30,), tuple(ids[1:]))
    expected = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert torch.allclose(trainer.score(ids), expected, atol=1e-5)
    assert trainer.rounding_lost == 0.0
    base, merged = trainer.base_weights(), trainer.merged_weights()
    assert base.keys() == linear_weights(load(tiny_model)).keys(), "all linear layers but the output"
    assert all(torch.equal(merged[name], base[name]) for name in base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_never_touches_the_base(tiny_model, dtype):
    trainer = make_trainer(tiny_model, dtype=dtype)
    original = load(tiny_model, dtype=dtype).state_dict()
    for _ in range(4):
        trainer.forward_backward(conversations(), TrainConfig(kl_coef=0.1), denominator=7.0)
        trainer.optim_step(TrainConfig(learning_rate=0.1))
    for name, weight in trainer.base_weights().items():
        assert torch.equal(weight, original[f"{name}.weight"])
    assert torch.equal(trainer.model.get_output_embeddings().weight, original["model.embed_tokens.weight"])
    for layer in trainer.layers:
        layer.b.data.zero_()
    trainer.merge()
    for name, weight in trainer.merged_weights().items():
        assert torch.equal(weight, original[f"{name}.weight"]), "no drift"


def test_chosen_layers_only_are_adapted(tiny_model):
    trainer = make_trainer(tiny_model, targets=("q_proj", "v_proj"))
    assert {layer.name.rpartition(".")[2] for layer in trainer.layers} == {"q_proj", "v_proj"}
    assert (
        relative_error(
            gradients(trainer, conversations(), TrainConfig()),
            plain_gradients(tiny_model, trainer, conversations(), TrainConfig(), torch.float64),
        )
        < 1e-5
    )


@pytest.mark.parametrize("targets", [("nothing",), ("embed_tokens",), ("q_proj", "lm_head")])
def test_targets_that_cannot_be_trained_are_refused(tiny_model, targets):
    with pytest.raises(ConfigurationError, match="LoRA targets"):
        make_trainer(tiny_model, targets=targets)


def test_an_adapters_seed_decides_its_start(tiny_model):
    def start(seed: int) -> torch.Tensor:
        trainer = PeftTrainer(load(tiny_model, implementation="artnb"), LoraConfig(seed=seed))
        return trainer.layers[0].a.detach()

    state = torch.get_rng_state()
    assert torch.equal(start(1), start(1))
    assert not torch.equal(start(1), start(2))
    assert torch.equal(torch.get_rng_state(), state), "and leaves the user's random numbers alone"


# ---- the update ----------------------------------------------------------------------------------


def test_the_update_is_adamw_with_a_clipped_gradient(tiny_model):
    config = TrainConfig(learning_rate=0.01, weight_decay=0.1, max_grad_norm=0.5)
    trainer = make_trainer(tiny_model)
    copies = [p.detach().clone().requires_grad_() for p in trainer.parameters.values()]
    reference = torch.optim.AdamW(copies, lr=0.01, betas=config.betas, eps=config.eps, weight_decay=0.1)
    for _ in range(3):
        found = gradients(trainer, conversations(), config)
        for parameter, gradient in zip(copies, found.values(), strict=True):
            parameter.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(copies, 0.5)
        reference.step()
        metrics = trainer.optim_step(config)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert float(norm) > 0.5, "the clip is at work"
        for ours, theirs in zip(trainer.parameters.values(), copies, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)
        for layer in trainer.layers:
            assert torch.equal(layer.merged, layer.merged_with(layer.a, layer.b)), "merged anew"


def test_several_calls_add_up_to_one_update(tiny_model):
    once, thrice = make_trainer(tiny_model), make_trainer(tiny_model)
    rows, config = conversations(), TrainConfig(learning_rate=0.01)
    once.forward_backward(rows, config, denominator=7.0)
    for group in range(3):
        thrice.forward_backward(rows[3 * group : 3 * group + 3], config, denominator=7.0)
    once.optim_step(config)
    thrice.optim_step(config)
    for ours, theirs in zip(thrice.parameters.values(), once.parameters.values(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)
    assert all(p.grad is None for p in thrice.parameters.values())


def test_a_gradient_that_is_not_finite_changes_nothing(tiny_model):
    trainer = make_trainer(tiny_model)
    before = trainer.snapshot()
    bad = row([5, 6, 7], [False, True, True], advantage=float("nan"))
    trainer.forward_backward([bad], TrainConfig(), denominator=1.0)
    with pytest.raises(FloatingPointError, match="nan"):
        trainer.optim_step(TrainConfig(learning_rate=0.1))
    assert all(p.grad is None for p in trainer.parameters.values())
    for ours, theirs in zip(trainer.parameters.values(), before[0], strict=True):
        assert torch.equal(ours, theirs)


def test_learning_raises_what_was_rewarded(tiny_model):
    trainer = make_trainer(tiny_model)
    good, bad = ([*range(10, 30), token, token] for token in (40, 50))
    mask = [False] * 20 + [True] * 2
    rows = [row(good, mask, advantage=1.0), row(bad, mask, advantage=-1.0)]

    def odds() -> float:
        return float(trainer.score(good)[-2:].sum() - trainer.score(bad)[-2:].sum())

    before = odds()
    for _ in range(5):
        trainer.forward_backward(rows, TrainConfig(loss="reinforce"), denominator=4.0)
        trainer.optim_step(TrainConfig(learning_rate=0.01))
    assert odds() > before + 1.0


def test_a_cancelled_gradient_is_dropped(tiny_model):
    trainer, cancelled = make_trainer(tiny_model), threading.Event()
    cancelled.set()
    statistics, sizes = trainer.forward_backward(
        conversations(), TrainConfig(), denominator=1.0, cancelled=cancelled
    )
    assert statistics == [] and sizes["packed_tokens"] == 0
    assert all(p.grad is None for p in trainer.parameters.values())


def test_bfloat16_hides_small_updates_and_says_so(tiny_model):
    assert make_trainer(tiny_model, dtype=torch.bfloat16, size=1.0).rounding_lost < 0.02
    assert make_trainer(tiny_model, dtype=torch.bfloat16, size=1e-7).rounding_lost > 0.9
    assert abs(make_trainer(tiny_model, dtype=torch.float32, size=1e-4).rounding_lost) < 0.02


# ---- keeping -------------------------------------------------------------------------------------


def step(trainer: PeftTrainer) -> float:
    """One update; returns its loss."""
    _, sizes = trainer.forward_backward(conversations(), TrainConfig(), denominator=7.0)
    trainer.optim_step(TrainConfig(learning_rate=0.01))
    return sizes["loss"]


def test_a_restored_trainer_repeats_its_steps_bit_for_bit(tiny_model):
    trainer = make_trainer(tiny_model)
    step(trainer)
    kept = trainer.snapshot()
    merged = {n: w.clone() for n, w in trainer.merged_weights().items()}
    losses = [step(trainer), step(trainer)]
    trainer.forward_backward(conversations(), TrainConfig(), denominator=7.0)
    trainer.restore(kept)
    assert all(torch.equal(w, merged[n]) for n, w in trainer.merged_weights().items())
    assert all(p.grad is None for p in trainer.parameters.values())
    assert [step(trainer), step(trainer)] == losses
    trainer.restore(kept)
    assert [step(trainer), step(trainer)] == losses, "a snapshot can be used again"


def test_a_saved_trainer_goes_on_bit_for_bit_in_another_one(tiny_model, tmp_path):
    first = make_trainer(tiny_model)
    step(first)
    first.save(tmp_path)
    merged = {n: w.clone() for n, w in first.merged_weights().items()}
    losses = [step(first), step(first)]
    second = make_trainer(tiny_model, size=0.3)
    step(second)
    second.load(tmp_path)
    assert all(torch.equal(w, merged[n]) for n, w in second.merged_weights().items())
    assert [step(second), step(second)] == losses


def test_a_fresh_trainer_saves_and_loads_without_moments(tiny_model, tmp_path):
    first = make_trainer(tiny_model)
    first.save(tmp_path)
    second = make_trainer(tiny_model)
    step(second)
    second.load(tmp_path)
    assert step(second) == step(first) and step(second) == step(first)


def test_an_adapter_loads_without_its_optimizer(tiny_model, tmp_path):
    first = make_trainer(tiny_model)
    step(first)
    first.save(tmp_path)
    second = make_trainer(tiny_model, size=0.3)
    step(second)
    second.load(tmp_path, optimizer=False)
    assert torch.equal(second.layers[3].b, first.layers[3].b)
    assert second.optimizer.state_dict()["state"] == {}


def test_a_saved_adapter_is_read_by_peft_and_served_without_loading(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model)
    trainer.save(tmp_path)
    model = peft.PeftModel.from_pretrained(load(tiny_model), tmp_path)
    ids = list(range(40, 60))
    expected = logprobs_of(model, (40,), tuple(ids[1:])).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert torch.allclose(trainer.score(ids), expected, atol=1e-4)
    merged = {n: w.clone() for n, w in trainer.merged_weights().items()}
    step(trainer)
    served = trainer.weights_of(tmp_path)
    assert all(torch.equal(served[name], weight) for name, weight in merged.items())
    assert not torch.equal(trainer.layers[0].merged, merged[trainer.layers[0].name])


@pytest.mark.parametrize("damage", ["missing", "torn", "another rank", "other layers", "moments"])
def test_a_checkpoint_that_does_not_fit_changes_nothing(tiny_model, tmp_path, damage):
    source = make_trainer(
        tiny_model,
        rank=8 if damage == "another rank" else 4,
        targets=("q_proj",) if damage == "other layers" else "all-linear",
    )
    step(source)
    source.save(tmp_path)
    adapter, moments = tmp_path / "adapter_model.safetensors", tmp_path / "optimizer.safetensors"
    if damage == "missing":
        adapter.unlink()
    elif damage == "torn":
        adapter.write_bytes(adapter.read_bytes()[:-100])
    elif damage == "moments":
        moments.write_bytes(moments.read_bytes()[:500])
    trainer = make_trainer(tiny_model)
    step(trainer)
    before = trainer.snapshot()
    with pytest.raises(CheckpointError):
        trainer.load(tmp_path)
    for ours, theirs in zip(trainer.parameters.values(), before[0], strict=True):
        assert torch.equal(ours, theirs)
    assert len(trainer.optimizer.state_dict()["state"]) == len(trainer.parameters)


def test_moments_of_another_shape_are_refused(tiny_model, tmp_path):
    source, trainer = make_trainer(tiny_model, rank=8), make_trainer(tiny_model)
    step(source)
    step(trainer)
    source.save(tmp_path)
    foreign = (tmp_path / "optimizer.safetensors").read_bytes()
    trainer.save(tmp_path)
    (tmp_path / "optimizer.safetensors").write_bytes(foreign)
    with pytest.raises(CheckpointError, match="optimizer"):
        trainer.load(tmp_path)
