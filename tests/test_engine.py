"""The engine samples what transformers alone would, whatever joins, leaves, grows or fails meanwhile."""

from __future__ import annotations

import copy
import dataclasses
import logging
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from reference_models import Engine, error_of, linear_weights, load, logprobs_of, prompts, request

from artnb.backends.base import SampleRequest
from artnb.backends.engine_torch import TorchEngine
from artnb.config import SamplingConfig
from artnb.errors import NonFiniteLogits, PromptTooLong, RequestError

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = 1e-4
"""Largest difference of logprobs between engine and transformers, both in fp32."""
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""Keys and values of one token of the tiny model."""


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Any:
    return load(tiny_model)


@pytest.fixture(scope="module")
def other(plain: Any) -> Any:
    """The same model with other linear weights: another policy."""
    model = copy.deepcopy(plain)
    generator = torch.Generator().manual_seed(1)
    for weight in linear_weights(model).values():
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.05)
    return model


@pytest.fixture(scope="module")
def make(tiny_model: Path, tiny_tokenizer: Any, plain: Any, other: Any) -> Callable[..., Engine]:
    model = load(tiny_model, implementation="artnb")
    broken = {name: torch.full_like(weight, float("nan")) for name, weight in linear_weights(plain).items()}
    policies = {
        "current": (linear_weights(plain), 0),
        "other": (linear_weights(other), 7),
        "broken": (broken, 3),
    }

    def engine(**options: Any) -> Engine:
        made = Engine(model, tiny_tokenizer, policies, **options)
        made.load(*policies["current"][:1], "current", 0)
        return made

    return engine


# ---- the same distribution as transformers' ------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_of_transformers_for_mixed_lengths(make, plain, temperature):
    asked = [
        request(prompt, max_tokens=1 + i % 13, temperature=temperature)
        for i, prompt in enumerate(prompts(20, longest=300))
    ]
    for each, result in zip(asked, make().answers(*asked), strict=True):
        assert error_of(plain, each, result) < EXACT
        assert len(result.completion_ids) == each.sampling.max_tokens
        assert (result.finish_reason, result.policy_version) == ("length", 0)


def test_greedy_takes_the_most_likely_token_and_reports_its_logprob(make, plain):
    asked = request((5, 6, 7), max_tokens=12, temperature=0)
    (result,) = make().answers(asked)
    rows = logprobs_of(plain, asked.prompt_ids, result.completion_ids)
    assert list(result.completion_ids) == rows.argmax(-1).tolist()
    assert error_of(plain, asked, result) < EXACT


def test_truncated_sampling_reports_the_truncated_distribution(make, plain):
    asked = request((5, 6, 7), max_tokens=30, top_k=3, seed=1)
    (result,) = make().answers(asked)
    best = logprobs_of(plain, asked.prompt_ids, result.completion_ids).topk(3)
    for token, logprob, ids, values in zip(
        result.completion_ids, result.logprobs, best.indices.tolist(), best.values, strict=True
    ):
        assert token in ids
        assert logprob == pytest.approx(float(values.log_softmax(-1)[ids.index(token)]), abs=EXACT)


def test_alternatives_are_the_most_likely_tokens_in_order(make, plain):
    asked = request((9, 8), max_tokens=5, top_logprobs=4)
    (result,) = make().answers(asked)
    best = logprobs_of(plain, asked.prompt_ids, result.completion_ids).topk(4)
    assert [[i for i, _ in top] for top in result.top_logprobs] == best.indices.tolist()
    assert [p for top in result.top_logprobs for _, p in top] == pytest.approx(
        best.values.flatten().tolist(), abs=EXACT
    )


def test_a_listener_hears_each_token_as_it_is_sampled(make):
    heard: list[int] = []
    asked = request((5, 6, 7), max_tokens=9, seed=3)
    engine = make()
    future = engine.submit(dataclasses.replace(asked, on_token=heard.append))
    engine.stepper.step(5)
    assert 1 <= len(heard) < 9 and not future.done()
    engine.stepper.run()
    assert heard == list(future.result(timeout=0).completion_ids)
    (unheard,) = engine.answers(asked)
    assert list(unheard.completion_ids) == heard


def test_score_is_the_logprob_of_each_token_after_the_first(make, plain):
    ids = prompts(1, longest=60, seed=4)[0]
    expected = logprobs_of(plain, ids[:1], ids[1:]).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert torch.allclose(make().score(ids), expected, atol=EXACT)


@given(
    seed=st.integers(0, 10**6),
    max_running=st.sampled_from([1, 2, 5, 40]),
    prefill_tokens=st.sampled_from([1, 2, 5, 33, 2048]),
    slots=st.sampled_from([1, 2, 4, 64]),
)
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_workload_is_sampled_exactly(make, plain, seed, max_running, prefill_tokens, slots):
    """Branching prompts, later turns, late arrivals and cancellations in engines of any size."""
    source = random.Random(seed)
    engine = make(
        max_running=max_running, prefill_tokens=prefill_tokens, kv_bytes=TOKEN_BYTES * 256 * max(slots, 3)
    )
    stems = prompts(3, longest=150, seed=seed)
    asked, futures, finished = [], [], 0

    def ask(prompt: tuple[int, ...]) -> None:
        longest = min(source.choice([1, 5, 30, 120]), engine.max_context - len(prompt))
        asked.append(request(prompt, max_tokens=longest))
        futures.append(engine.submit(asked[-1]))

    for _ in range(source.randint(1, 12)):
        stem = source.choice(stems)
        ask(
            stem[: source.randint(1, len(stem))]
            + tuple(source.choices(range(3, 259), k=source.randint(0, 9)))
        )
        engine.stepper.step(source.randint(0, 4))
    if len(futures) > 3:
        futures[1].cancel()
    engine.stepper.run()
    for first, future in list(zip(asked, futures, strict=True))[:4]:
        if not future.cancelled():
            ask((*first.prompt_ids, *future.result().completion_ids, 11, 12))
    engine.stepper.run()
    for each, future in zip(asked, futures, strict=True):
        if not future.cancelled():
            finished += 1
            assert error_of(plain, each, future.result(timeout=0)) < EXACT
    assert finished >= len(futures) - 1
    assert not any(slot.busy for slot in engine.cache.slots)


# ---- prefixes and turns --------------------------------------------------------------------------


def test_identical_prompts_are_computed_once_and_sampled_apart(make, plain):
    prompt = tuple(range(10, 210))
    asked = [request(prompt, max_tokens=6) for _ in range(8)]
    engine = make()
    results = engine.answers(*asked)
    assert engine.counters["prompt_tokens"] == 8 * len(prompt)
    assert engine.counters["computed_prompt_tokens"] == len(prompt) - 1 + 8, "the last token runs for each"
    assert len({result.completion_ids for result in results}) == 8
    assert max(error_of(plain, a, r) for a, r in zip(asked, results, strict=True)) < EXACT


def test_nested_prefixes_are_each_computed_once(make, plain):
    system, examples = tuple(range(3, 103)), [tuple(range(110 + i, 210 + i)) for i in range(3)]
    asked = [request((*system, *examples[i % 3], 250 - i), max_tokens=4) for i in range(12)]
    engine = make()
    results = engine.answers(*asked)
    assert engine.counters["computed_prompt_tokens"] == 100 + 3 * 100 + 12
    assert max(error_of(plain, a, r) for a, r in zip(asked, results, strict=True)) < EXACT


def test_a_latecomer_joins_the_prefix_of_those_before(make):
    engine = make()
    crowd = tuple(range(3, 103))
    engine.answers(request((*crowd, 200)))
    engine.answers(request((*crowd, 201)))
    before = engine.counters["computed_prompt_tokens"]
    engine.answers(request((*crowd, 202)))
    assert engine.counters["computed_prompt_tokens"] - before == 1


def test_a_group_that_trickles_in_shares_its_prompt(make):
    engine = make(max_running=2)
    prompt = tuple(range(3, 203))
    engine.answers(*[request(prompt, max_tokens=1 + i) for i in range(8)])
    assert engine.counters["computed_prompt_tokens"] < 2 * len(prompt) + 8


def test_the_next_turn_computes_only_what_is_new(make, plain):
    engine = make()
    prompt = prompts(1, longest=90, seed=5)[0]
    (first,) = engine.answers(request(prompt, max_tokens=20))
    before = engine.counters["computed_prompt_tokens"]
    second = request((*prompt, *first.completion_ids, 30, 31, 32), max_tokens=20)
    (result,) = engine.answers(second)
    assert engine.counters["computed_prompt_tokens"] - before == 4, "three new ones and the last sampled one"
    assert error_of(plain, second, result) < EXACT


def test_a_group_keeps_its_shared_prompt_into_the_second_turn(make, plain):
    engine = make()
    prompt = tuple(range(20, 170))
    firsts = engine.answers(*[request(prompt, max_tokens=7) for _ in range(6)])
    before = engine.counters["computed_prompt_tokens"]
    asked = [request((*prompt, *r.completion_ids, 40, 41), max_tokens=7) for r in firsts]
    results = engine.answers(*asked)
    assert engine.counters["computed_prompt_tokens"] - before == 6 * 3
    assert max(error_of(plain, a, r) for a, r in zip(asked, results, strict=True)) < EXACT


def test_no_prefix_is_computed_for_conversations_that_only_went_by(make):
    engine = make()
    for start in (10, 100):
        text = tuple(range(start, start + 60))
        for _ in range(3):
            (result,) = engine.answers(request(text, max_tokens=2))
            text += (*result.completion_ids, *range(start, start + 60))
    before = engine.counters["computed_prompt_tokens"]
    engine.answers(request((200, 201, 202)))
    assert engine.counters["computed_prompt_tokens"] - before == 3


def test_a_prompt_longer_than_a_prefill_is_computed_in_parts(make, plain):
    engine = make(prefill_tokens=7)
    asked = [request(tuple(range(10, 10 + n)), max_tokens=5) for n in (1, 2, 8, 40, 43)]
    results = engine.answers(*asked)
    assert max(error_of(plain, a, r) for a, r in zip(asked, results, strict=True)) < EXACT


def test_a_prefill_that_leaves_one_token_of_room_mixes_up_nobody(make, plain):
    engine = make(prefill_tokens=5)
    asked = [request(prompt, max_tokens=3) for prompt in [(50,), (60, 61, 62), (70, 71, 72, 73, 74, 75)]]
    results = engine.answers(*asked)
    assert max(error_of(plain, a, r) for a, r in zip(asked, results, strict=True)) < EXACT


# ---- room ----------------------------------------------------------------------------------------


def test_sequences_grow_past_the_room_they_started_with(make, plain):
    engine = make()
    asked = [request(prompt, max_tokens=300) for prompt in prompts(3, longest=20, seed=6)]
    results = engine.answers(*asked)
    assert engine.cache.capacity == 512
    assert max(error_of(plain, a, r) for a, r in zip(asked, results, strict=True)) < EXACT


def crowded(make: Callable[..., Engine]) -> Engine:
    """Four slots of 256 tokens, two of 512, or one of 1024."""
    return make(max_running=4, kv_bytes=TOKEN_BYTES * 1024)


def test_growth_that_costs_slots_loses_no_request_and_no_token(make, plain):
    engine = crowded(make)
    asked = [request(prompt, max_tokens=400, seed=i) for i, prompt in enumerate(prompts(5, longest=9))]
    results = engine.answers(*asked)
    assert engine.cache.capacity == 512 and len(engine.cache.slots) == 2
    for each, result in zip(asked, results, strict=True):
        assert len(result.completion_ids) == 400
        assert error_of(plain, each, result) < EXACT
        (alone,) = make().answers(each)
        assert alone.completion_ids == result.completion_ids, "what was sampled before the pause is kept"


def test_weights_are_not_exchanged_while_a_paused_request_waits(make, plain, other):
    engine = crowded(make)
    futures = [engine.ask(prompt, max_tokens=400) for prompt in prompts(4, longest=9)]
    while len(engine.cache.slots) == 4:
        engine.stepper.step()
    called = engine.call(lambda: engine.load(linear_weights(other), "current", 1))
    late = engine.ask((4, 5), max_tokens=3)
    engine.stepper.run()
    assert called.result(timeout=0) is True
    for prompt, future in zip(prompts(4, longest=9), futures, strict=True):
        assert future.result(timeout=0).policy_version == 0
        assert error_of(plain, request(prompt), future.result(timeout=0)) < EXACT
    assert late.result(timeout=0).policy_version == 1
    assert error_of(other, request((4, 5)), late.result(timeout=0)) < EXACT


def test_one_request_at_a_time_is_enough(make, plain):
    asked = [request(prompt, max_tokens=5) for prompt in prompts(6)]
    results = make(max_running=1).answers(*asked)
    assert max(error_of(plain, a, r) for a, r in zip(asked, results, strict=True)) < EXACT


def test_thousands_may_wait(make, plain):
    engine = make(max_running=128)
    asked = [request(prompt, max_tokens=2) for prompt in prompts(2000, longest=12)]
    results = engine.answers(*asked)
    assert engine.counters["sampled_tokens"] == 4000
    assert max(error_of(plain, asked[i], results[i]) for i in range(0, 2000, 97)) < EXACT


@pytest.mark.parametrize("option", ["max_running", "prefill_tokens", "kv_bytes"])
def test_an_engine_without_room_is_refused(make, option):
    with pytest.raises(ValueError, match=option):
        make(**{option: 0})


def test_a_prompt_that_cannot_fit_is_refused_with_the_limit(make):
    engine = make()
    with pytest.raises(PromptTooLong, match=r"2041 tokens and 8 .* 2048"):
        engine.ask((5,) * 2041, max_tokens=8)
    with pytest.raises(PromptTooLong, match="1024"):
        crowded(make).ask((5,) * 1000, max_tokens=25)
    assert len(crowded(make).answers(request((5,) * 1000, max_tokens=24))[0].completion_ids) == 24


def test_an_empty_prompt_is_refused(make):
    with pytest.raises(RequestError, match="empty"):
        make().ask(())


def test_a_form_that_it_cannot_force_is_refused(make):
    asked = SampleRequest((3,), SamplingConfig(), structured={"choice": ["up", "down"]})
    with pytest.raises(RequestError, match="vLLM"):
        make().submit(asked)


# ---- where a completion ends ---------------------------------------------------------------------


def test_a_stop_token_ends_the_completion_and_is_kept(make):
    engine = make()
    (free,) = engine.answers(request((3, 4, 5), max_tokens=40, seed=1))
    stop = free.completion_ids[17]
    (stopped,) = engine.answers(request((3, 4, 5), max_tokens=40, seed=1, stop_ids=(stop, 1000)))
    end = free.completion_ids.index(stop) + 1
    assert stopped.completion_ids == free.completion_ids[:end]
    assert stopped.finish_reason == "stop"


def test_a_stop_token_in_the_last_place_is_a_stop(make):
    engine = make()
    (free,) = engine.answers(request((3, 4, 5), max_tokens=3, seed=1))
    (stopped,) = engine.answers(request((3, 4, 5), max_tokens=3, seed=1, stop_ids=(free.completion_ids[2],)))
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("text", ["</call>", "終わり🏁", "x"])
def test_a_stop_string_ends_the_completion_across_tokens(make, tiny_tokenizer, monkeypatch, text):
    ending = tiny_tokenizer(text, add_special_tokens=False).input_ids
    script = [*range(60, 90), *ending, 60, 61]
    engine = make()
    _say(engine, monkeypatch, script)
    (result,) = engine.answers(request((3,), max_tokens=60, stop=("never", text)))
    assert list(result.completion_ids) == script[: 30 + len(ending)]
    assert result.finish_reason == "stop"


def test_text_that_only_resembles_a_stop_string_goes_on(make, tiny_tokenizer, monkeypatch):
    script = tiny_tokenizer("</cal </cal1> < /call>", add_special_tokens=False).input_ids
    engine = make()
    _say(engine, monkeypatch, script)
    (result,) = engine.answers(request((3,), max_tokens=len(script), stop=("</call>",)))
    assert (list(result.completion_ids), result.finish_reason) == (script, "length")


def _say(engine: Engine, monkeypatch: pytest.MonkeyPatch, script: list[int]) -> None:
    """Let the model be sure of this text, whatever the context."""
    words = iter(script)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        sure = torch.full((len(hidden), 259), -100.0)
        sure[:, next(words)] = 100.0
        return sure

    monkeypatch.setattr(engine.decoder, "logits", logits)


# ---- seeds ---------------------------------------------------------------------------------------


def test_a_seed_decides_the_completion_whatever_runs_beside(make):
    alone, crowd = make(seed=1), make(seed=2, max_running=20)
    seeded = request(tuple(range(30, 90)), max_tokens=30, seed=123)
    beside = [request(prompt, max_tokens=30) for prompt in prompts(12)]
    (a,), (b, *_) = alone.answers(seeded), crowd.answers(seeded, *beside)
    (again,) = alone.answers(seeded)
    assert a.completion_ids == b.completion_ids == again.completion_ids
    assert a.logprobs == pytest.approx(b.logprobs, abs=EXACT)
    (different,) = alone.answers(request(seeded.prompt_ids, max_tokens=30, seed=124))
    assert different.completion_ids != a.completion_ids


def test_requests_without_seed_follow_the_engines_own(make):
    asked = [request(prompt, max_tokens=9) for prompt in prompts(4)]

    def ids(seed: int) -> list[tuple[int, ...]]:
        return [r.completion_ids for r in make(seed=seed).answers(*asked)]

    assert ids(5) == ids(5)
    assert ids(5) != ids(6)


# ---- cancellation --------------------------------------------------------------------------------


def test_a_cancelled_request_gives_its_slot_to_the_next_at_once(make, plain):
    engine = make(max_running=2)
    long, kept, waiting = (engine.ask((i, i + 1), max_tokens=500) for i in (10, 20, 30))
    engine.stepper.step(5)
    assert [r.future for r in engine._running] == [long, kept]
    assert long.cancel()
    engine.stepper.step()
    assert [r.future for r in engine._running] == [kept, waiting]
    engine.stepper.run()
    assert long.cancelled()
    for start, future in ((20, kept), (30, waiting)):
        assert error_of(plain, request((start, start + 1)), future.result(timeout=0)) < EXACT


def test_a_request_that_is_cancelled_while_it_waits_never_runs(make):
    engine = make()
    future = engine.ask((3, 4))
    assert future.cancel()
    engine.stepper.run()
    assert engine.counters["sampled_tokens"] == 0


def test_cancelling_in_the_middle_of_a_prefill_leaves_nothing_behind(make, plain):
    engine = make(prefill_tokens=10)
    prompt = tuple(range(40, 140))
    first = engine.ask(prompt)
    engine.stepper.step(3)
    first.cancel()
    again = request(prompt, max_tokens=6)
    (result,) = engine.answers(again)
    assert error_of(plain, again, result) < EXACT


# ---- policies and commands -----------------------------------------------------------------------


def test_each_policy_answers_with_its_own_weights_and_version(make, plain, other):
    engine = make()
    order = ["current", "other", "current", "other", "other", "current"]
    futures = [engine.ask((7, 8, 9 + i), policy=name, max_tokens=6) for i, name in enumerate(order)]
    engine.stepper.run()
    for i, (name, future) in enumerate(zip(order, futures, strict=True)):
        model, version = (plain, 0) if name == "current" else (other, 7)
        result = future.result(timeout=0)
        assert result.policy_version == version
        assert error_of(model, request((7, 8, 9 + i)), result) < EXACT
    assert not engine.decoder.holds(linear_weights(other if engine.served == "other" else plain))


def test_no_key_of_another_policy_is_reused(make, other):
    engine = make()
    prompt = tuple(range(10, 110))
    engine.answers(*[request(prompt, max_tokens=4) for _ in range(4)])
    futures = [engine.ask(prompt, policy="other", max_tokens=4) for _ in range(4)]
    engine.stepper.run()
    for future in futures:
        assert error_of(other, request(prompt), future.result(timeout=0)) < EXACT


def test_a_policy_that_cannot_be_had_fails_its_own_requests_only(make, plain):
    engine = make()
    lost, fine = engine.ask((3, 4), policy="step_000099"), engine.ask((5, 6))
    engine.stepper.run()
    with pytest.raises(RequestError, match="step_000099"):
        lost.result(timeout=0)
    assert error_of(plain, request((5, 6)), fine.result(timeout=0)) < EXACT


def test_weights_that_were_loaded_by_half_are_never_served(make, plain, monkeypatch):
    engine = make()
    original = engine.decoder.load

    def half(weights: Any) -> bool:
        original(dict(list(weights.items())[:5]))
        raise MemoryError("no room for the rest")

    monkeypatch.setattr(engine.decoder, "load", half)
    lost = engine.ask((3, 4), policy="other")
    engine.stepper.run()
    assert isinstance(lost.exception(timeout=0), RequestError)
    monkeypatch.setattr(engine.decoder, "load", original)
    (result,) = engine.answers(request((5, 6)))
    assert error_of(plain, request((5, 6)), result) < EXACT


def test_a_command_runs_between_requests_and_before_waiting_ones(make):
    engine = make(max_running=1)
    order: list[str] = []
    first = engine.ask((3,), max_tokens=4)
    engine.stepper.step(2)
    engine.call(lambda: order.append("command"))
    second = engine.ask((4,), max_tokens=4)
    first.add_done_callback(lambda _: order.append("first"))
    second.add_done_callback(lambda _: order.append("second"))
    engine.stepper.run()
    assert order == ["first", "command", "second"]


def test_a_cancelled_command_does_not_run_and_upsets_nothing(make, caplog):
    engine = make()
    done: list[int] = []
    engine.call(lambda: done.append(1)).cancel()
    during = engine.call(lambda: during.cancel())
    failing = engine.call(lambda: 1 // 0)
    engine.stepper.run()
    assert not done
    assert during.result(timeout=0) is False, "what runs already is not cancelled any more"
    assert isinstance(failing.exception(timeout=0), ZeroDivisionError)
    assert not caplog.records


# ---- failures ------------------------------------------------------------------------------------


def test_not_a_number_is_an_error_that_names_the_request_while_others_go_on(make, plain):
    engine = make()
    prompt = tuple(range(10, 90))
    bad = [engine.ask(prompt, policy="broken", request_id=f"rollout-{i}") for i in range(3)]
    nameless = engine.ask((5,), policy="broken")
    good = engine.ask((7, 8), max_tokens=300)
    engine.stepper.run()
    for i, future in enumerate(bad):
        with pytest.raises(NonFiniteLogits, match=f"rollout-{i}"):
            future.result(timeout=0)
    assert isinstance(nameless.exception(timeout=0), NonFiniteLogits)
    assert error_of(plain, request((7, 8)), good.result(timeout=0)) < EXACT
    engine.ask(prompt[40:], policy="broken", request_id="last")
    engine.stepper.run()
    asked = [request((*prompt[:i], 9), max_tokens=90) for i in range(0, 60, 9)]
    results = engine.answers(*asked)
    assert max(error_of(plain, a, r) for a, r in zip(asked, results, strict=True)) < EXACT


def test_one_request_may_fail_within_a_batch(make, plain, monkeypatch):
    engine = make()
    asked = [request((i, i + 1), max_tokens=6, request_id=f"r{i}") for i in (10, 20, 30)]
    futures = [engine.submit(each) for each in asked]
    engine.stepper.step(2)
    original = engine.decoder.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        logits = original(hidden)
        logits[1, 5] = float("inf")
        return logits

    monkeypatch.setattr(engine.decoder, "logits", poisoned)
    engine.stepper.step()
    monkeypatch.setattr(engine.decoder, "logits", original)
    engine.stepper.run()
    with pytest.raises(NonFiniteLogits, match="r20"):
        futures[1].result(timeout=0)
    for i in (0, 2):
        assert error_of(plain, asked[i], futures[i].result(timeout=0)) < EXACT


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("when", [0, 1, 4])
def test_a_step_that_fails_fails_its_requests_and_leaves_no_half_written_key(
    make, plain, monkeypatch, caplog, layer, when
):
    engine = make()
    prompt = tuple(range(10, 90))
    futures = [engine.ask((*prompt, i), max_tokens=9) for i in range(3)]
    engine.stepper.step(when)
    broken = engine.decoder.layers[layer]

    def out_of_memory(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(broken, "forward", out_of_memory)
    with caplog.at_level(logging.ERROR):
        engine.stepper.step()
    monkeypatch.undo()
    engine.stepper.run()
    for future in futures:
        with pytest.raises(RequestError, match="out of memory"):
            future.result(timeout=0)
    assert not any(slot.busy for slot in engine.cache.slots)
    asked = [request((*prompt, i, *range(100, 150)), max_tokens=9) for i in range(3)]
    results = engine.answers(*asked)
    assert max(error_of(plain, a, r) for a, r in zip(asked, results, strict=True)) < EXACT


# ---- threads -------------------------------------------------------------------------------------


@pytest.fixture
def threaded(tiny_model: Path, tiny_tokenizer: Any, plain: Any) -> Iterator[TorchEngine]:
    policies = {"current": (linear_weights(plain), 0)}
    with ThreadPoolExecutor(1) as compute:
        model = load(tiny_model, implementation="artnb")
        engine = TorchEngine(model, tiny_tokenizer, policies.__getitem__, compute, max_running=4)
        yield engine
        engine.close()


def test_close_cancels_running_waiting_and_just_arrived_requests(threaded):
    futures = [threaded.submit(request((3, 4 + i), max_tokens=1500)) for i in range(40)]
    command = threaded.call(lambda: None)
    threaded.close()
    threaded.close()
    for future in (*futures, command):
        with pytest.raises(CancelledError):
            future.result(timeout=20)
    with pytest.raises(RequestError, match="closed"):
        threaded.submit(request((3,)))


def test_an_idle_engine_closes_and_one_that_never_ran_too(make):
    engine = make()
    future = engine.ask((3, 4))
    engine.close()
    engine.stepper.run()
    assert future.cancelled()
    make().close()


def test_requests_from_many_threads_are_all_answered(threaded, plain):
    results: dict[int, Any] = {}

    def ask(number: int) -> None:
        for turn in range(3):
            future = threaded.submit(request((number, turn + 3), max_tokens=5))
            if turn == 1:
                future.cancel()
            else:
                results[number, turn] = future.result(timeout=30)  # type: ignore[index]

    threads = [threading.Thread(target=ask, args=(3 + i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=40)
    assert len(results) == 24
    for (number, turn), result in results.items():  # type: ignore[misc]
        assert error_of(plain, request((number, turn + 3)), result) < EXACT


# ---- the real model ------------------------------------------------------------------------------


def test_the_real_model_answers_and_agrees_with_transformers(bundled):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled)
    model = load(bundled, dtype=torch.bfloat16, implementation="artnb")
    weights = linear_weights(model)
    engine = Engine(model, tokenizer, {"current": (weights, 0)}, max_running=8)
    asked = []
    for question in ("What is the capital of France?", "Say hello.", "What is 2 + 2?"):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        asked.append(request(ids, max_tokens=10, temperature=0, stop_ids=(tokenizer.eos_token_id,)))
    results = engine.answers(*asked)
    assert "Paris" in tokenizer.decode(results[0].completion_ids)
    sampled = request(asked[1].prompt_ids, max_tokens=24, seed=3)
    results += engine.answers(sampled)
    reference = load(bundled, dtype=torch.float32)
    for each, result in zip((*asked, sampled), results, strict=True):
        rows = logprobs_of(reference, each.prompt_ids, result.completion_ids)
        expected = rows.gather(1, torch.tensor(result.completion_ids)[:, None])[:, 0]
        assert float((expected - torch.tensor(result.logprobs)).abs().mean()) < 0.1, "bf16 against fp32"


def test_sampling_settings_reach_the_engine_unchanged():
    """The request's own settings are the ones that count: nothing is cut or warmed by default."""
    assert not SamplingConfig().truncates and SamplingConfig().temperature == 1.0
