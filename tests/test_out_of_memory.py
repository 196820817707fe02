"""A step that does not fit is taken again in smaller pieces; if none fits, nothing has happened."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import row
from steps import copied, open_model, play
from test_trainer import conversations, gradients, make_trainer, relative_error
from test_undo import state_of

import artnb as nb
from artnb.backends import out_of_memory
from artnb.backends import trainer as trainer_module
from artnb.backends.out_of_memory import SHORTEST_ROW, ShortenedRowWarning, is_out_of_memory, shorten
from artnb.backends.scoring import score_rows
from artnb.backends.trainer_peft import PeftTrainer
from artnb.config import TrainConfig
from artnb.errors import OutOfMemory
from artnb.logprobs import CHUNK
from artnb.packing import PackedBatch

pytestmark = pytest.mark.usefixtures("one_thread")

LONGEST_ALONE = 75
"""No row of ``conversations`` has more tokens that are computed."""


def narrow(trainer: PeftTrainer, most: int, *, in_backward: bool = False) -> list[int]:
    """Let this trainer's memory run out above ``most`` tokens; returns the sizes that it then tries."""
    hidden, seen = trainer.hidden, []

    def limited(batch: PackedBatch) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return hidden(batch)
        seen.append(batch.tokens)
        if batch.tokens > most and not in_backward:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return hidden(batch)

    def backward(module: Any, inputs: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if in_backward and states.requires_grad and states.shape[-2] > most:
            states.register_hook(run_out)

    def run_out(grad: torch.Tensor) -> None:
        assert any(p.grad is not None for p in trainer.parameters.values()), "a part has its gradient already"
        raise RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
        )

    trainer.hidden = limited  # type: ignore[method-assign]
    trainer.model.get_decoder().layers[0].register_forward_hook(backward)
    return seen


def by_name(trainer: PeftTrainer) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in trainer.parameters.items() if p.grad is not None}


# ---- what counts ---------------------------------------------------------------------------------


def failure(work: Callable[[], Any]) -> BaseException:
    with pytest.raises((RuntimeError, MemoryError, ValueError)) as caught:
        work()
    return caught.value


def test_failed_allocations_are_told_from_other_errors():
    too_many = 2**60
    assert is_out_of_memory(failure(lambda: torch.empty(too_many, dtype=torch.uint8)))
    assert is_out_of_memory(failure(lambda: bytearray(too_many)))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(failure(lambda: torch.ones(2, 3) @ torch.ones(2, 3)))
    assert not is_out_of_memory(ValueError("can't allocate memory"))


def test_other_errors_pass_through(tiny_model):
    trainer = make_trainer(tiny_model)

    def broken(batch: PackedBatch) -> torch.Tensor:
        raise RuntimeError("shapes do not match")

    trainer.hidden = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="shapes do not match"):
        trainer.forward_backward(conversations(), TrainConfig(), denominator=7.0)


# ---- smaller micro-batches -----------------------------------------------------------------------


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("config", [TrainConfig(), TrainConfig(kl_coef=0.3, entropy_coef=0.1)])
@pytest.mark.parametrize("most", [100, LONGEST_ALONE])
def test_the_gradient_is_that_of_a_step_that_fits(tiny_model, most, config, in_backward):
    rows = conversations()
    expected = gradients(make_trainer(tiny_model), rows, config)
    trainer = make_trainer(tiny_model)
    tried = narrow(trainer, most, in_backward=in_backward)
    _, sizes = trainer.forward_backward(rows, config, denominator=7.0)
    assert relative_error(by_name(trainer), expected) < 1e-5
    assert sizes["out_of_memory_retries"] >= 1 and max(tried) > most
    assert sizes["microbatch_tokens_used"] == trainer.pieces.microbatch_tokens < 2 * most
    assert sizes["packed_tokens"] == sum(tried[-_batches(sizes, tried) :]), "of the last attempt only"


def _batches(sizes: dict[str, float], tried: list[int]) -> int:
    """How many of the last sizes add up to the packed tokens."""
    for count in range(1, len(tried) + 1):
        if sum(tried[-count:]) >= sizes["packed_tokens"]:
            return count
    raise AssertionError(f"{tried} hold fewer than {sizes['packed_tokens']} tokens")


def test_what_fitted_is_remembered_and_fewer_tokens_may_still_be_asked_for(tiny_model):
    trainer, rows = make_trainer(tiny_model), conversations()
    narrow(trainer, 100)
    _, first = trainer.forward_backward(rows, TrainConfig(), denominator=7.0)
    _, second = trainer.forward_backward(rows, TrainConfig(), denominator=7.0)
    assert first["out_of_memory_retries"] > 0 == second["out_of_memory_retries"]
    assert first["microbatch_tokens_used"] == second["microbatch_tokens_used"]
    _, third = trainer.forward_backward(rows, TrainConfig(microbatch_tokens=10), denominator=7.0)
    assert third["microbatch_tokens_used"] == 10


def test_an_untroubled_step_tries_once(tiny_model):
    _, sizes = make_trainer(tiny_model).forward_backward(conversations(), TrainConfig(), denominator=7.0)
    assert sizes["out_of_memory_retries"] == 0 and sizes["microbatch_tokens_used"] == 4096


def test_the_gradient_of_earlier_calls_is_kept(tiny_model):
    rows, config = conversations(), TrainConfig()
    expected = gradients(make_trainer(tiny_model), rows, config)
    trainer = make_trainer(tiny_model)
    trainer.forward_backward(rows[:3], config, denominator=7.0)
    narrow(trainer, LONGEST_ALONE, in_backward=True)
    _, sizes = trainer.forward_backward(rows[3:], config, denominator=7.0)
    assert sizes["out_of_memory_retries"] >= 1
    assert relative_error(by_name(trainer), expected) < 1e-5
    before = {name: gradient.clone() for name, gradient in by_name(trainer).items()}
    narrow(trainer, 10, in_backward=True)
    with pytest.raises(OutOfMemory):
        trainer.forward_backward(rows[3:], config, denominator=7.0)
    assert all(torch.equal(gradient, before[name]) for name, gradient in by_name(trainer).items())


def test_nothing_of_the_failed_attempt_is_held(tiny_model):
    """An error's traceback would keep the activations alive, so that the next attempt failed as well."""
    trainer, held, alive = make_trainer(tiny_model), [], []
    narrow(trainer, 100, in_backward=True)
    hidden = trainer.hidden

    def watch(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            held.append(weakref.ref(output))  # the graph keeps it for the backward pass

    def counted(batch: PackedBatch) -> torch.Tensor:
        alive.append(sum(each() is not None for each in held))
        return hidden(batch)

    trainer.model.get_decoder().layers[0].mlp.gate_proj.register_forward_hook(watch)
    trainer.hidden = counted  # type: ignore[method-assign]
    _, sizes = trainer.forward_backward(conversations(), TrainConfig(), denominator=7.0)
    assert sizes["out_of_memory_retries"] >= 1 and len(held) > 2 and max(alive) == 0


def test_rows_by_themselves_where_not_even_the_comparison_of_packed_rows_fits(tiny_model):
    rows = conversations()
    expected = gradients(make_trainer(tiny_model), rows, TrainConfig())
    trainer = make_trainer(tiny_model)
    hidden = trainer.hidden

    def limited(batch: PackedBatch) -> torch.Tensor:
        if batch.tokens > LONGEST_ALONE:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return hidden(batch)

    trainer.hidden = limited  # type: ignore[method-assign]
    _, sizes = trainer.forward_backward(rows, TrainConfig(), denominator=7.0)
    assert relative_error(by_name(trainer), expected) < 1e-5
    assert trainer.packing is None and sizes["microbatch_tokens_used"] == 1


# ---- fewer logits at once, and then no more ------------------------------------------------------


def long_rows() -> list[Any]:
    mask = [False] * 10 + [True] * 200
    return [row([3 + (i * t) % 250 for t in range(210)], mask, name=f"row {i}") for i in (1, 2)]


def narrow_logits(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    scored, chunks = trainer_module.sampled_logprobs, []

    def limited(hidden: torch.Tensor, *given: Any, chunk: int, **options: Any) -> Any:
        if torch.is_grad_enabled():
            chunks.append(chunk)
            if min(chunk, len(hidden)) > most:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return scored(hidden, *given, chunk=chunk, **options)

    monkeypatch.setattr(trainer_module, "sampled_logprobs", limited)
    return chunks


def test_single_rows_are_scored_in_smaller_chunks(tiny_model, monkeypatch):
    expected = gradients(make_trainer(tiny_model), long_rows(), TrainConfig())
    trainer, chunks = make_trainer(tiny_model), narrow_logits(monkeypatch, 60)
    _, sizes = trainer.forward_backward(long_rows(), TrainConfig(), denominator=7.0)
    assert relative_error(by_name(trainer), expected) < 1e-5
    assert chunks == [CHUNK, CHUNK, 100, 50, 50] and sizes["out_of_memory_retries"] == 3
    trainer.forward_backward(long_rows(), TrainConfig(), denominator=7.0)
    assert chunks[5:] == [50, 50], "it is remembered"


def test_a_row_that_does_not_fit_by_itself_is_named_and_nothing_is_remembered(tiny_model, monkeypatch):
    trainer = make_trainer(tiny_model)
    before = trainer.pieces
    narrow_logits(monkeypatch, 8)
    with pytest.raises(OutOfMemory) as caught:
        trainer.forward_backward(long_rows(), TrainConfig(), denominator=7.0)
    message = str(caught.value)
    assert "trajectory 'row " in message and "210 tokens, 200 of them sampled" in message
    assert f"{CHUNK}, 100, 50, 25 positions" in message and "4096, 2" in message
    for advice in ("max_tokens", "prompts", "microbatch_tokens", "gradient_checkpointing", "load_in_4bit"):
        assert advice in message
    assert "CUDA out of memory." in message, "and the allocator's own words"
    assert trainer.pieces == before and by_name(trainer) == {}


# ---- rows without their ends ---------------------------------------------------------------------


def row_of(prompt: int, reply: int, name: str, *, advantage: float = 1.0) -> Any:
    ids = [3 + (len(name) * t) % 250 for t in range(prompt + reply)]
    return row(ids, [False] * prompt + [True] * reply, advantage=advantage, name=name)


def without_end(whole: Any, tokens: int) -> Any:
    """The row of which ``tokens`` are computed, by hand."""
    kept = {n: getattr(whole, n)[: tokens + 1] for n in ("ids_T", "logprobs_T", "advantages_T", "weights_T")}
    return dataclasses.replace(whole, is_sampled_T=whole.is_sampled_T[: tokens + 1], **kept)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("config", [TrainConfig(), TrainConfig(kl_coef=0.3, loss="gspo")])
def test_a_row_that_does_not_fit_loses_its_end_and_the_rest_has_the_same_gradient(
    tiny_model, config, in_backward
):
    long, short = row_of(40, 600, "long"), row_of(30, 100, "short", advantage=-1.0)
    expected = gradients(make_trainer(tiny_model), [without_end(long, 479), short], config)
    trainer = make_trainer(tiny_model)
    narrow(trainer, 500, in_backward=in_backward)
    with pytest.warns(ShortenedRowWarning, match=r"1 of 2 rows.*'long' of group 0 keeps 440 of 600 sampled"):
        _, sizes = trainer.forward_backward([long, short], config, denominator=7.0)
    assert (sizes["rows_shortened"], sizes["tokens_dropped"]) == (1.0, 160.0)
    assert relative_error(by_name(trainer), expected) < 1e-5
    with pytest.warns(ShortenedRowWarning, match="keeps 440 of 600"):
        _, sizes = trainer.forward_backward([short, long], config, denominator=7.0)
    assert sizes["out_of_memory_retries"] == 0, "it is remembered"
    assert (sizes["rows_shortened"], sizes["tokens_dropped"]) == (1.0, 160.0), "and told again"


def test_a_row_is_shortened_again_and_again_but_keeps_a_sampled_token(tiny_model):
    trainer, far = make_trainer(tiny_model), row_of(290, 310, "far")
    narrow(trainer, 300)
    with pytest.warns(ShortenedRowWarning, match="keeps 1 of 310"):
        trainer.forward_backward([far], TrainConfig(), denominator=7.0)
    assert trainer.pieces.row_tokens == 290
    hopeless = row_of(310, 290, "hopeless")
    before, held = {n: g.clone() for n, g in by_name(trainer).items()}, trainer.pieces
    with pytest.raises(OutOfMemory, match=r"'hopeless'.* 600 tokens, 290 of them .*its first 290 tokens"):
        trainer.forward_backward([hopeless], TrainConfig(), denominator=7.0)
    assert all(torch.equal(gradient, before[name]) for name, gradient in by_name(trainer).items())
    assert trainer.pieces == held


def test_no_row_is_cut_to_less_than_the_shortest(tiny_model):
    trainer, whole = make_trainer(tiny_model), row_of(10, 590, "whole")
    tried = narrow(trainer, SHORTEST_ROW - 1)
    with pytest.raises(OutOfMemory, match=f"its first 449, 336, {SHORTEST_ROW} tokens"):
        trainer.forward_backward([whole], TrainConfig(), denominator=7.0)
    assert min(tried) == SHORTEST_ROW and by_name(trainer) == {}


def test_context_after_the_last_sampled_token_is_no_loss(tiny_model):
    rows = [row([3 + t % 250 for t in range(700)], [False] * 40 + [True] * 200 + [False] * 460)]
    assert shorten(rows, 300).places == []
    assert shorten(rows, 100).rows[0].sampled_tokens == 61
    assert shorten(rows, 100).tokens_dropped == 139
    assert shorten(rows, 5).rows[0].sampled_tokens == 1


def test_after_some_calls_that_fitted_twice_the_size_is_tried(tiny_model, monkeypatch):
    monkeypatch.setattr(trainer_module, "GROW_AFTER", 3)
    trainer, rows = make_trainer(tiny_model), conversations()
    hidden = trainer.hidden
    narrow(trainer, 100)

    def used(count: int) -> list[tuple[float, float]]:
        found = []
        for _ in range(count):
            _, sizes = trainer.forward_backward(rows, TrainConfig(), denominator=7.0)
            found.append((sizes["microbatch_tokens_used"], sizes["out_of_memory_retries"] > 0))
        return found

    first = used(1)[0][0]
    assert used(4) == [(first, False)] * 3 + [(pytest.approx(first, rel=0.5), True)], "in vain"
    trainer.hidden = hidden  # there is memory again
    second = trainer.pieces.microbatch_tokens
    assert used(8) == [(second, False)] * 3 + [(2 * second, False)] * 4 + [(4 * second, False)]


# ---- a whole step --------------------------------------------------------------------------------


@pytest.fixture
def model(tiny_model, tmp_path):
    with open_model(tiny_model, tmp_path) as opened:
        yield opened


async def test_a_step_tells_of_its_retries_and_learns_the_same(model, tiny_model, tmp_path):
    with open_model(tiny_model, tmp_path, "twin") as twin:
        groups = await play(model)
        expected = await nb.train_step(twin, copied(groups), learning_rate=1e-2)
        assert expected.metrics["out_of_memory_retries"] == 0 and expected.warnings == []
        narrow(model.backend.trainer, 70)
        with pytest.warns(UserWarning, match=r"memory ran out .* same gradient"):
            result = await nb.train_step(model, groups, learning_rate=1e-2)
        assert result.metrics["out_of_memory_retries"] >= 1
        assert result.metrics["microbatch_tokens_used"] < 4096
        assert result.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-5)
        assert result.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-5, abs=1e-7)


async def test_a_step_tells_how_much_of_its_data_it_left_out(model, monkeypatch):
    monkeypatch.setattr(out_of_memory, "SHORTEST_ROW", 8)
    groups = await play(model)
    most = max(len(t.turns[0].prompt_ids) for t in groups.trajectories) + 2
    trainer = model.backend.trainer
    narrow(trainer, most)
    with pytest.warns(UserWarning) as warned:
        result = await nb.train_step(model, groups, minibatches=2)
    lost, rows = result.metrics["tokens_dropped"], result.metrics["rows_shortened"]
    assert 0 < lost < result.metrics["tokens"] and 2 <= rows <= result.metrics["samples"]
    (told,) = [w for w in result.warnings if "left out" in w]
    assert f"{lost:.0f} of {result.metrics['tokens']:.0f} sampled tokens" in told
    assert not any("same gradient" in w for w in result.warnings)
    named = [str(w.message) for w in warned if issubclass(w.category, ShortenedRowWarning)]
    assert len(named) == 2 and all("trajectory '" in text for text in named)
    assert rows == sum(int(text.split(" for ")[1].split()[0]) for text in named), "of both updates"
    assert model.run.metrics()[-1]["tokens_dropped"] == lost, "and on disk"


async def test_a_hopeless_step_is_undone_and_the_model_goes_on(model):
    await nb.train_step(model, await play(model), learning_rate=1e-2)
    groups, before = await play(model), state_of(model)
    backend = model.backend
    hidden = backend.trainer.hidden
    narrow(backend.trainer, 5)
    with pytest.raises(OutOfMemory, match=r"trajectory '.*' of group"):
        await nb.train_step(model, groups, minibatches=2)
    after = state_of(model)
    assert before.keys() == after.keys() and before["version"] == after["version"]
    for name in ("adapter", "moments", "served", "trained"):
        assert all(map(torch.equal, before[name], after[name])), name
    assert after["gradients"] == [] and after["run"] == before["run"]
    backend.trainer.hidden = hidden
    again = await play(model)
    assert {t.turns[0].policy_version for t in again.trajectories} == {1}
    result = await nb.train_step(model, again)
    assert result.policy_version == 2 and result.metrics["out_of_memory_retries"] == 0


# ---- reading rows for their logprobs -------------------------------------------------------------


def narrow_reading(trainer: PeftTrainer, most: int) -> list[int]:
    """Let memory run out above ``most`` tokens also where nothing is learned."""
    hidden, seen = trainer.hidden, []

    def limited(batch: PackedBatch) -> torch.Tensor:
        seen.append(batch.tokens)
        if batch.tokens > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return hidden(batch)

    trainer.hidden = limited  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("most", [100, LONGEST_ALONE])
def test_rows_that_do_not_fit_together_are_read_in_smaller_pieces(tiny_model, base, most):
    rows, config = conversations(), TrainConfig()
    expected = score_rows(make_trainer(tiny_model), rows, config, base=base)
    trainer = make_trainer(tiny_model)
    tried = narrow_reading(trainer, most)
    found = score_rows(trainer, rows, config, base=base)
    assert max(tried) > most, "it was tried in larger ones"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-5, rtol=1e-5)
    del tried[:]
    assert score_rows(trainer, rows, config, base=base) == found and max(tried) <= most, "it is remembered"


def test_a_row_that_cannot_be_read_by_itself_is_named_and_never_shortened(tiny_model):
    trainer, long = make_trainer(tiny_model), row_of(40, 600, "long")
    tried, before = narrow_reading(trainer, 500), trainer.pieces
    with pytest.raises(OutOfMemory) as caught:
        score_rows(trainer, [row_of(30, 100, "short"), long], TrainConfig())
    message = str(caught.value)
    assert "trajectory 'long' of group 0" in message and "640 tokens, 600 of them sampled" in message
    assert "read for its logprobs by itself" in message and "load_in_4bit" in message
    assert "trained on" not in message and "gradient_checkpointing" not in message
    assert trainer.pieces == before and trainer.peft_model.active_adapters
    assert 639 in tried and not any(500 < size < 639 for size in tried), "no end was left out"


async def test_a_distillation_whose_teacher_cannot_read_a_row_takes_no_step(model):
    groups, before = await play(model), state_of(model)
    narrow_reading(model.backend.trainer, 5)
    with pytest.raises(OutOfMemory, match=r"trajectory '.*' of group \d does not fit .* read for its"):
        await nb.distill_step(model, groups, "base")
    del model.backend.trainer.hidden  # there is memory again
    after = state_of(model)
    assert before["version"] == after["version"] and before["run"] == after["run"]
    result = await nb.distill_step(model, groups, "base")
    assert result.policy_version == 1 and result.metrics["out_of_memory_retries"] == 0


def test_under_a_real_limit_of_memory(tmp_path, tiny_tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        intermediate_size=12_288,  # little work and many activations
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.05,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(tmp_path)
    script = Path(__file__).with_name("memory_limit_process.py")
    fixed = {
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),  # tensors go back to the system
        "MALLOC_ARENA_MAX": "1",  # a thread's own arena would reserve 64 MB of the limit at any time
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(script), str(tmp_path)]
    run = subprocess.run(command, env=os.environ | fixed, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["needed_mb"] > 100
    assert found["first"]["out_of_memory_retries"] == 1, (
        "half is enough, once the failed attempt is let go of"
    )
    assert found["first"]["microbatch_tokens_used"] == found["first"]["packed_tokens"] / 2
    assert found["error"] < 1e-5
    assert found["next"]["out_of_memory_retries"] == 0
    assert re.search(r"'long' of group 0 keeps [345]\d\d .*of 640 sampled tokens", found["warning"])
    assert found["shortened"]["rows_shortened"] == 1 and found["of_the_rest"] < 1e-5
    assert 100 < found["shortened"]["tokens_dropped"] < 400
    assert "trajectory 'late'" in found["message"] and "644 tokens, 4 of them" in found["message"]
    assert found["untouched"] and found["after"] < 1e-5
