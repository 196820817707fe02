"""All weights learn: the gradient is autograd's, the engine gets every weight, and the base is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from reference_models import error_of, load, logprobs_of, request
from steps import copied, open_model, play
from test_decoder import FAMILIES, build
from test_trainer import (
    OBJECTIVES,
    conversations,
    gradients,
    plain_logprobs,
    plain_loss,
    relative_error,
    step,
)

import artnb as nb
from artnb.backends import attention
from artnb.backends.local import LocalBackend
from artnb.backends.stack import Stack, check_full_fits, trains_all
from artnb.backends.trainer_full import FullTrainer
from artnb.config import LoraConfig, TrainConfig
from artnb.errors import CheckpointError, ConfigurationError, RunMismatch
from artnb.packing import pack

pytestmark = pytest.mark.usefixtures("one_thread")

FULL = {"full_finetuning": True}
PROMPT = tuple(range(30, 70))


def make_trainer(folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 5) -> FullTrainer:
    """A trainer whose weights have learned something already."""
    trainer = FullTrainer(load(folder, dtype=dtype, implementation="artnb"))
    generator = torch.Generator().manual_seed(seed)
    for master in trainer.parameters.values():
        master.data.add_(0.02 * torch.randn(master.shape, generator=generator))
    trainer.merge()
    return trainer


def plain_gradients(model: Any, base: Any, rows: list[Any], config: TrainConfig) -> dict[str, torch.Tensor]:
    """Row by row, eager attention, all logits, torch's autograd."""
    model.requires_grad_(True)
    for each in rows:
        with torch.no_grad():
            of_base = plain_logprobs(base, each)[0] if config.kl_coef else None
        plain_loss(model, each, config, of_base).backward()
    return {n: p.grad for n, p in model.named_parameters() if not n.endswith("bias") and p.grad is not None}


def as_plain(folder: Path, trainer: FullTrainer, dtype: torch.dtype) -> Any:
    """transformers' model with this trainer's weights."""
    model = load(folder, dtype=dtype)
    for name, parameter in model.named_parameters():
        parameter.data = trainer.parameters[name].data.to(dtype, copy=True)
    return model


# ---- the gradient --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_of_every_weight_is_the_plain_models(tiny_model, name):
    trainer, rows = make_trainer(tiny_model), conversations()
    ours = gradients(trainer, rows, OBJECTIVES[name])
    plain, base = as_plain(tiny_model, trainer, torch.float64), load(tiny_model, dtype=torch.float64)
    theirs = plain_gradients(plain, base, rows, OBJECTIVES[name])
    assert ours.keys() == {n for n, _ in plain.named_parameters()}, "embedding, norms and linear layers"
    assert relative_error(ours, theirs) < 1e-5
    for weight, expected in theirs.items():
        assert float(torch.cosine_similarity(ours[weight].flatten(), expected.float().flatten(), 0)) > 0.9999


@pytest.mark.parametrize("family", ["llama, biases, tied", "qwen3", "olmo2"])
def test_other_families_too_tied_or_not(family):
    plain, ours = build(FAMILIES[family][0])
    found = gradients(FullTrainer(ours), conversations(200), TrainConfig())
    theirs = plain_gradients(plain.double(), None, conversations(200), TrainConfig())
    assert ("lm_head.weight" in found) == (not plain.config.tie_word_embeddings)
    assert relative_error(found, theirs) < 1e-5


def test_packing_and_microbatches_leave_the_gradient_alone(tiny_model):
    trainer, rows = make_trainer(tiny_model), conversations()
    expected = gradients(trainer, rows, TrainConfig())
    for limit, share in ((10, True), (150, True), (150, False)):
        config = TrainConfig(microbatch_tokens=limit, share_prefixes=share)
        assert relative_error(gradients(trainer, rows, config), expected) < 1e-5


def test_bfloat16_adds_micro_batches_up_in_float32(tiny_model):
    trainer, exact = make_trainer(tiny_model, dtype=torch.bfloat16), make_trainer(tiny_model)
    config = TrainConfig(microbatch_tokens=1, share_prefixes=False)
    found = gradients(trainer, conversations(groups=20), config)
    assert {g.dtype for g in found.values()} == {torch.float32}
    assert any(not torch.equal(g, g.bfloat16().float()) for g in found.values())
    expected = gradients(exact, conversations(groups=20), config)
    for name, gradient in found.items():
        assert float(torch.cosine_similarity(gradient.flatten(), expected[name].flatten(), 0)) > 0.98, name


def test_gradient_checkpointing_changes_nothing(tiny_model):
    rows = conversations()
    plain = FullTrainer(load(tiny_model, implementation="artnb"))
    again = FullTrainer(load(tiny_model, implementation="artnb"), gradient_checkpointing=True)
    calls: list[int] = []
    again.model.get_decoder().layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    expected, checked = gradients(plain, rows, TrainConfig()), 6
    assert relative_error(gradients(again, rows, TrainConfig()), expected) < 1e-6
    assert len(calls) == checked + 2, "forward, and once more in the backward pass"


def test_what_a_failed_backward_left_behind_is_not_added(tiny_model):
    trainer, rows = make_trainer(tiny_model), conversations()
    expected = gradients(trainer, rows, TrainConfig())
    for layer in trainer.layers:
        layer.layer.weight.grad = torch.ones_like(layer.merged)
    assert relative_error(gradients(trainer, rows, TrainConfig()), expected) == 0


# ---- the update ----------------------------------------------------------------------------------


def test_the_update_is_adamw_on_float32_copies(tiny_model):
    config = TrainConfig(learning_rate=1e-4, weight_decay=0.1, max_grad_norm=0.5)
    trainer = make_trainer(tiny_model, dtype=torch.bfloat16)
    copies = [p.detach().clone().requires_grad_() for p in trainer.parameters.values()]
    reference = torch.optim.AdamW(copies, lr=1e-4, betas=config.betas, eps=config.eps, weight_decay=0.1)
    for _ in range(3):
        found = gradients(trainer, conversations(), config)
        for parameter, gradient in zip(copies, found.values(), strict=True):
            parameter.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_(copies, 0.5)
        reference.step()
        trainer.optim_step(config)
    for layer, expected in zip(trainer.layers, copies, strict=True):
        assert torch.allclose(layer.master, expected, atol=1e-7)
        assert layer.layer.weight.dtype == torch.bfloat16
        assert torch.equal(layer.layer.weight, layer.master.bfloat16()), "rounded anew"


def test_the_base_is_kept_for_the_kl_and_comes_back(tiny_model):
    trainer, rows, plain = make_trainer(tiny_model), conversations(), load(tiny_model)
    for _ in range(3):
        trainer.forward_backward(rows, TrainConfig(kl_coef=0.1), denominator=7.0)
        trainer.optim_step(TrainConfig(learning_rate=0.01))
    ids = list(range(30, 60))
    expected = logprobs_of(plain, (30,), tuple(ids[1:])).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    trained = trainer.score(ids)
    with trainer.as_base():
        assert torch.allclose(trainer.score(ids), expected, atol=1e-5)
    assert torch.equal(trainer.score(ids), trained) and not torch.allclose(trained, expected, atol=0.1)
    state = plain.state_dict()
    for name, weight in trainer.base_weights().items():
        assert torch.equal(weight, state[f"{name}.weight"])
    for batch in pack(rows, max_tokens=4096):
        assert not torch.allclose(trainer._base_logprobs(batch), trainer.logprobs(batch)[0], atol=0.1)


def test_rounding_hides_small_updates_and_says_so(tiny_model):
    untrained = FullTrainer(load(tiny_model, dtype=torch.bfloat16, implementation="artnb"))
    assert untrained.rounding_lost == 0.0
    for size, lost in ((1e-7, 1.0), (1.0, 0.0)):
        for master in untrained.parameters.values():
            master.data.add_(size)
        untrained.merge()
        assert untrained.rounding_lost == pytest.approx(lost, abs=0.1)


# ---- keeping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_trainer_goes_on_bit_for_bit_in_another_one(tiny_model, tmp_path, dtype):
    first = make_trainer(tiny_model, dtype=dtype)
    step(first)
    first.save(tmp_path)
    merged = {n: w.clone() for n, w in first.merged_weights().items()}
    kept = first.snapshot()
    losses = [step(first), step(first)]
    second = make_trainer(tiny_model, dtype=dtype, seed=6)
    step(second)
    assert all(torch.equal(w, merged[n]) for n, w in second.weights_of(tmp_path).items()), "served as saved"
    second.load(tmp_path)
    assert all(torch.equal(w, merged[n]) for n, w in second.merged_weights().items())
    assert [step(second), step(second)] == losses
    first.restore(kept)
    assert [step(first), step(first)] == losses


def test_transformers_loads_what_was_saved(tmp_path):
    _, ours = build(FAMILIES["llama, biases, tied"][0])
    trainer = FullTrainer(ours)
    gradients(trainer, conversations(200), TrainConfig())
    trainer.optim_step(TrainConfig(learning_rate=0.01))
    trainer.save(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = list(range(40, 60))
    expected = logprobs_of(model, (40,), tuple(ids[1:])).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert torch.allclose(trainer.score(ids), expected, atol=1e-4)


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tiny_model, tmp_path):
    _, other = build(FAMILIES["qwen3"][0])
    FullTrainer(other).save(tmp_path)
    trainer = make_trainer(tiny_model)
    before = {n: w.clone() for n, w in trainer.merged_weights().items()}
    with pytest.raises(CheckpointError):
        trainer.load(tmp_path)
    assert all(torch.equal(w, before[n]) for n, w in trainer.merged_weights().items())


# ---- with an engine ------------------------------------------------------------------------------


def test_a_model_learns_is_sampled_from_and_goes_on_after_a_restart(tiny_model, tmp_path):
    def opened(run: str = "full") -> nb.Model:
        return open_model(tiny_model, tmp_path, run, lora=None, trainer_kwargs=FULL)

    async def steps(model: nb.Model, groups: Any) -> list[float]:
        result = await nb.train_step(model, groups, learning_rate=1e-3, kl_coef=0.1, max_staleness=9)
        again = await nb.train_step(model, copied(groups), learning_rate=1e-3, kl_coef=0.1, max_staleness=9)
        return [result.metrics["loss"], again.metrics["loss"], again.metrics["probe_gap_max"]]

    with opened() as model:
        assert "all weights" in repr(model)
        planned = model.plan(context=64)
        assert planned.held["trained weights"] == planned.plan.setting.bytes_of("trained weights")
        assert "adapter" not in repr(planned)
        groups = asyncio.run(play(model))
        first = asyncio.run(steps(model, copied(groups)))
        assert first[2] < 1e-4
        expected = as_plain(tiny_model, model.backend.trainer, torch.float32)
        sampled = {}
        for policy, plain in {"current": expected, "base": load(tiny_model)}.items():
            asked = request(PROMPT, max_tokens=6)
            sampled[policy] = asyncio.run(model.backend.sample(asked, policy=policy))
            assert error_of(plain, asked, sampled[policy]) < 1e-4
        assert sampled["current"].policy_version == 2
        at_once = asyncio.run(steps(model, copied(groups)))
    with opened("again") as model:
        asyncio.run(steps(model, copied(groups)))
    with opened("again") as model:  # resumed
        assert model.policy_version == 2
        assert asyncio.run(steps(model, copied(groups))) == at_once
        saved = asyncio.run(model.backend.sample(request(PROMPT), policy="step_000002"))
        assert saved.policy_version == 2 and error_of(expected, request(PROMPT), saved) < 1e-4
    with pytest.raises(RunMismatch):
        open_model(tiny_model, tmp_path, "again")
    saved_at = max((tmp_path / "full" / "checkpoints").glob("step_*"))
    with open_model(
        tiny_model, tmp_path, "from it", lora=None, trainer_kwargs=FULL, init_from=saved_at
    ) as model:
        assert model.policy_version == 0
        for name, weight in model.backend.trainer.merged_weights().items():
            assert not torch.equal(weight, model.backend.trainer.base_weights()[name]), name


def test_the_engine_keeps_what_was_published_while_weights_change(tiny_model):
    async def go() -> None:
        backend = LocalBackend(tiny_model, LoraConfig(), dtype="float32", trainer_kwargs=FULL)
        try:
            asked = request(PROMPT, max_tokens=4)
            await backend.forward_backward(conversations(), TrainConfig(), loss_denominator=7.0)
            await backend.optim_step(TrainConfig(learning_rate=0.05))
            assert error_of(load(tiny_model), asked, await backend.sample(asked)) < 1e-4, "not published yet"
            proof = await backend.publish_weights(1)
            assert proof.changed and proof.probe_max < 1e-4
            assert error_of(load(tiny_model), asked, await backend.sample(asked)) > 0.1
            published = as_plain(tiny_model, backend.trainer, torch.float32)
            await backend.forward_backward(conversations(), TrainConfig(), loss_denominator=7.0)
            await backend.optim_step(TrainConfig(learning_rate=0.05))
            for policy, plain in (("base", load(tiny_model)), ("current", published)):
                assert error_of(plain, asked, await backend.sample(asked, policy=policy)) < 1e-4, policy
        finally:
            await backend.close()

    asyncio.run(go())


def test_vllm_serves_every_weight_and_the_base_again(tiny_tokenizer, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.12,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    options = {"dtype": "float32", "engine": "vllm", "trainer_kwargs": FULL}
    backend = LocalBackend(tmp_path, LoraConfig(), engine_kwargs={"kv_bytes": 64 << 20}, **options)

    async def go() -> None:
        asked = request(PROMPT, max_tokens=6)
        await backend.forward_backward(conversations(), TrainConfig(), loss_denominator=7.0)
        await backend.optim_step(TrainConfig(learning_rate=0.01))
        proof = await backend.publish_weights(1)
        assert proof.changed and proof.probe_max < 1e-3
        trained = as_plain(tmp_path, backend.trainer, torch.float32)
        for policy, plain in (("current", trained), ("base", load(tmp_path)), ("current", trained)):
            assert error_of(plain, asked, await backend.sample(asked, policy=policy)) < 1e-3, policy
        wrong = {n: w + 1 for n, w in backend.trainer.merged_weights().items()}
        found = await asyncio.wrap_future(backend.engine.call(lambda: backend.engine.holds(wrong)))
        assert set(found) == set(wrong), "each weight is compared"
        await backend.close()

    asyncio.run(go())


# ---- what is refused -----------------------------------------------------------------------------


def test_a_model_that_is_too_large_is_refused_unloaded(tiny_model, monkeypatch):
    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", None)
    count = sum(p.numel() for p in load_config(tiny_model).parameters())
    check_full_fits(tiny_model, torch.bfloat16, {}, count * 36)
    check_full_fits(tiny_model, torch.bfloat16, {"optimizer": "adamw_8bit"}, count * 24)
    with pytest.raises(ConfigurationError, match=r"of 36 bytes .* Train an adapter instead"):
        check_full_fits(tiny_model, torch.bfloat16, {}, count * 36 - 1)
    with pytest.raises(ConfigurationError, match="44 bytes"):
        LocalBackend(tiny_model, LoraConfig(), dtype="float32", trainer_kwargs=FULL, memory_bytes=count * 40)


def load_config(folder: Path) -> Any:
    attention.register()
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize(
    ("stack", "lora", "options", "message"),
    [
        (Stack("peft", "torch", "cpu"), LoraConfig(rank=4), ({}, {}), "leave lora out"),
        (Stack("unsloth", "vllm", "cuda"), LoraConfig(), ({}, {}), 'trainer="peft"'),
        (Stack("unsloth", "torch", "cpu"), LoraConfig(), ({"load_in_4bit": True}, {}), "4 bit"),
        (Stack("peft", "vllm", "cpu"), LoraConfig(), ({}, {"publish": "lora"}), "merged"),
    ],
)
def test_what_does_not_go_together_is_refused(stack, lora, options, message):
    trainer, engine = options
    with pytest.raises(ConfigurationError, match=message):
        trains_all(stack, lora, FULL | trainer, engine)
    assert not trains_all(stack, lora, trainer, engine)
