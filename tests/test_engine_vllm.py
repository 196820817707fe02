"""vLLM samples what transformers alone would, under the policy that was asked for."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import ByHand, Stepper, error_of, linear_weights, load, logprobs_of, prompts, request

from artnb.backends.base import SampleRequest, SampleResult
from artnb.backends.engine_vllm import VllmEngine
from artnb.backends.vllm_weights import Adapter
from artnb.errors import ConfigurationError, NonFiniteLogits, PromptTooLong, RequestError

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = 1e-3
"""Largest difference of logprobs between vLLM and transformers, both in fp32."""

IN_PART = 128
"""Prompt tokens that the engine of most tests reads in one step."""

Policies = dict[str, tuple[Any, int]]
Make = Callable[..., "Engine"]


class Engine(ByHand, VllmEngine):
    """An engine that takes steps by hand, serving the policies it is given."""

    def __init__(self, folder: Path, tokenizer: Any, policies: Policies, **options: Any) -> None:
        self.stepper, self.policies = Stepper(), policies
        super().__init__(folder, tokenizer, policies.__getitem__, self.stepper, **options)

    def answer(self, prompt: tuple[int, ...], **options: Any) -> SampleResult:
        return self.answers(request(prompt, **options))[0]

    def end(self) -> None:
        self.close()
        self.stepper.run()


@pytest.fixture(scope="module")
def small(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama in fp32 whose head size vLLM's CPU attention knows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.12,
        bos_token_id=tiny_tokenizer.bos_token_id,
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("small-llama")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(small: Path) -> Any:
    return load(small)


@pytest.fixture(scope="module")
def adapter(plain: Any) -> Adapter:
    """Random factors for some of the layers: parts of fused matrices and whole ones."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, weight in linear_weights(plain).items():
        if name.endswith(("q_proj", "v_proj", "up_proj", "down_proj")):
            tensors[f"{name}.lora_A.weight"] = 0.2 * torch.randn(4, weight.shape[1], generator=generator)
            tensors[f"{name}.lora_B.weight"] = 0.2 * torch.randn(weight.shape[0], 4, generator=generator)
    return Adapter(tensors, rank=4, alpha=6.0)


@pytest.fixture(scope="module")
def other(small: Path, adapter: Adapter) -> Any:
    """The model under the adapter, merged."""
    model = load(small)
    for name in adapter.layers:
        a, b = (adapter.tensors[f"{name}.lora_{x}.weight"] for x in "AB")
        model.get_submodule(name).weight.add_(b @ a, alpha=adapter.alpha / adapter.rank)
    return model


def named(model: Any, layers: list[str]) -> Mapping[str, torch.Tensor]:
    weights = linear_weights(model)
    return {name: weights[name] for name in layers}


@pytest.fixture(scope="module")
def engine(small: Path, tiny_tokenizer: Any, plain: Any, other: Any, adapter: Adapter) -> Iterator[Engine]:
    """The engine of all tests but the last: making one takes seconds."""
    layers = adapter.layers
    policies: Policies = {
        "base": (named(plain, layers), -1),
        "current": (named(plain, layers), 0),
        "other": (named(other, layers), 7),
        "broken": ({layers[0]: torch.full_like(linear_weights(plain)[layers[0]], float("nan"))}, 3),
        "adapted": (adapter, 9),
    }
    before = torch.get_rng_state(), random.getstate(), torch.set_num_threads, sys.excepthook
    made = Engine(
        small,
        tiny_tokenizer,
        policies,
        max_running=64,
        kv_bytes=64 << 20,
        dtype=torch.float32,
        enable_lora=True,
        lora_rank=4,
        block_size=32,
        max_num_batched_tokens=IN_PART,
    )
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), torch.set_num_threads, sys.excepthook)
    yield made
    made.end()


@pytest.fixture(autouse=True)
def as_new(request: pytest.FixtureRequest) -> None:
    """Every test finds its engine serving the base model, with the same seed."""
    if "engine" in request.fixturenames:
        made = request.getfixturevalue("engine")
        made.load(made.policies["current"][0], "current", 0)
        made.random.seed(0)
        made.counters.update(dict.fromkeys(made.counters, 0))


# ---- the same distribution as transformers' ------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_are_those_of_transformers_for_mixed_lengths(engine, plain, temperature):
    asked = [
        request(prompt, max_tokens=1 + i % 13, temperature=temperature)
        for i, prompt in enumerate(prompts(20, longest=300))
    ]
    for each, result in zip(asked, engine.answers(*asked), strict=True):
        assert error_of(plain, each, result) < EXACT
        assert len(result.completion_ids) == each.sampling.max_tokens
        assert (result.finish_reason, result.policy_version) == ("length", 0)


def test_greedy_takes_the_most_likely_token(engine, plain):
    result = engine.answer((5, 6, 7), max_tokens=12, temperature=0)
    rows = logprobs_of(plain, (5, 6, 7), result.completion_ids)
    assert list(result.completion_ids) == rows.argmax(-1).tolist()


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.2}])
def test_truncated_sampling_reports_the_truncated_distribution(engine, plain, cut):
    asked = request((5, 6, 7), max_tokens=30, seed=1, temperature=0.8, **cut)
    (result,) = engine.answers(asked)
    from artnb.backends.sampler import processed

    rows = logprobs_of(plain, asked.prompt_ids, result.completion_ids)
    rows = processed(rows, [asked.sampling] * len(rows)).log_softmax(-1)
    expected = rows.gather(1, torch.tensor(result.completion_ids)[:, None])[:, 0]
    assert result.logprobs == pytest.approx(expected.tolist(), abs=EXACT)


def test_alternatives_are_the_most_likely_tokens_in_order(engine, plain):
    asked = [request((9, 8), max_tokens=5, top_logprobs=4), request((9, 8), max_tokens=5)]
    result, without = engine.answers(*asked)
    best = logprobs_of(plain, (9, 8), result.completion_ids).topk(4)
    assert [[i for i, _ in top] for top in result.top_logprobs] == best.indices.tolist()
    assert [p for top in result.top_logprobs for _, p in top] == pytest.approx(
        best.values.flatten().tolist(), abs=EXACT
    )
    assert without.top_logprobs == ()


def test_a_listener_hears_each_token_as_it_is_sampled(engine):
    heard: list[int] = []
    asked = request((5, 6, 7), max_tokens=9, seed=3)
    future = engine.submit(dataclasses.replace(asked, on_token=heard.append))
    engine.stepper.step(5)
    assert 1 <= len(heard) < 9 and not future.done()
    engine.stepper.run()
    assert heard == list(future.result(timeout=0).completion_ids)
    (unheard,) = engine.answers(asked)
    assert list(unheard.completion_ids) == heard


def test_score_is_the_logprob_of_each_token_after_the_first(engine, plain):
    ids = prompts(1, longest=60, seed=4)[0]
    expected = logprobs_of(plain, ids[:1], ids[1:]).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    for _ in range(2):  # cached keys change nothing
        assert torch.allclose(engine.score(ids), expected, atol=EXACT)
    with pytest.raises(PromptTooLong):
        engine.score((5,) * 1024)


def test_prompts_longer_than_a_step_are_read_in_parts(engine, plain):
    asked = [
        request(tuple(range(3 + i, 253)) * 4, max_tokens=6, seed=seed, temperature=temperature)
        for i, (seed, temperature) in enumerate([(1, 1.0), (None, 1.0), (None, 0.0), (2, 0.7), (3, 1.0)])
    ]
    assert min(len(each.prompt_ids) for each in asked) > 7 * IN_PART
    results = engine.answers(*asked)
    assert engine.counters["steps"] > 5 * 7
    for each, result in zip(asked, results, strict=True):
        assert error_of(plain, each, result) < EXACT
    ids = asked[0].prompt_ids
    expected = logprobs_of(plain, ids[:1], ids[1:]).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert torch.allclose(engine.score(ids), expected, atol=EXACT)


def test_hundreds_may_wait_and_share_their_prefixes(engine, plain):
    shared = tuple(range(3, 203))
    asked = [request((*shared, *tail), max_tokens=2) for tail in prompts(300, longest=12)]
    results = engine.answers(*asked)
    assert max(error_of(plain, asked[i], results[i]) for i in range(0, 300, 37)) < EXACT
    assert engine.counters["sampled_tokens"] == 600
    assert engine.counters["prompt_tokens"] == sum(len(each.prompt_ids) for each in asked)
    assert engine.counters["computed_prompt_tokens"] < 300 * (200 - 192 + 12) + 200
    assert all(result.queued >= 0 and result.seconds >= result.queued for result in results)


# ---- what is refused -----------------------------------------------------------------------------


def test_a_prompt_that_cannot_fit_is_refused_with_the_limit(engine):
    with pytest.raises(PromptTooLong, match=r"1017 tokens and 8 .* 1024"):
        engine.ask((5,) * 1017, max_tokens=8)
    assert len(engine.answer((5,) * 1016, max_tokens=8).completion_ids) == 8


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [((), {}, "empty"), ((3,), {"temperature": 0.001}, "temperature"), ((3,), {"top_logprobs": 99}, "99")],
)
def test_what_vllm_cannot_do_is_an_error(engine, prompt, options, message):
    with pytest.raises(RequestError, match=message):
        engine.answer(prompt, **options)


def test_unknown_options_are_named(small, tiny_tokenizer):
    with pytest.raises(ConfigurationError, match="no_such_option"):
        Engine(small, tiny_tokenizer, {}, no_such_option=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_running": 0}, "max_running"),
        ({"kv_bytes": 0}, "kv_bytes"),
        ({"lora_rank": 4096}, "rank 512"),
        ({"max_context": 4096}, "cannot be made"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(small, tiny_tokenizer, options, message):
    with pytest.raises(ConfigurationError, match=message):
        Engine(small, tiny_tokenizer, {}, **options)


# ---- where a completion ends ---------------------------------------------------------------------


def test_a_stop_token_ends_the_completion_and_is_kept(engine):
    free = engine.answer((3, 4, 5), max_tokens=40, seed=1)
    stop = free.completion_ids[17]
    stopped = engine.answer((3, 4, 5), max_tokens=40, seed=1, stop_ids=(stop, 258))
    end = free.completion_ids.index(stop) + 1
    assert stopped.completion_ids == free.completion_ids[:end]
    assert len(stopped.logprobs) == end and stopped.finish_reason == "stop"


def test_the_models_own_end_token_ends_nothing_unless_asked(engine, tiny_tokenizer):
    free = engine.answer((3, 4), max_tokens=600, seed=1)
    assert tiny_tokenizer.eos_token_id in free.completion_ids[:-1]
    assert len(free.completion_ids) == 600


@pytest.mark.parametrize("text", ["</call>", "終わり🏁", "<|im_start|>"])
def test_a_stop_string_ends_the_completion_with_the_token_that_completes_it(engine, tiny_tokenizer, text):
    script = f"left or right {text} and more"
    form = {"choice": [script]}
    asked = SampleRequest((3,), request((3,), max_tokens=60, stop=("never", text)).sampling, structured=form)
    (result,) = engine.answers(asked)
    written = tiny_tokenizer.decode(result.completion_ids)
    assert written == f"left or right {text}" and result.finish_reason == "stop"
    assert len(result.logprobs) == len(result.completion_ids)


def test_text_that_only_resembles_a_stop_string_goes_on(engine, tiny_tokenizer):
    script = "</cal </cal1> < /call>"
    sampling = request((3,), max_tokens=60, stop=("</call>",)).sampling
    (result,) = engine.answers(SampleRequest((3,), sampling, structured={"choice": [script]}))
    assert tiny_tokenizer.decode(result.completion_ids[:-1]) == script
    assert result.completion_ids[-1] == tiny_tokenizer.eos_token_id


# ---- structured output ---------------------------------------------------------------------------


def structured(form: Mapping[str, Any], **sampling: Any) -> SampleRequest:
    return SampleRequest((3, 4), request((3, 4), max_tokens=80, **sampling).sampling, structured=form)


def test_structured_outputs_have_the_form_asked_for(engine, tiny_tokenizer):
    import json
    import re

    end = tiny_tokenizer.eos_token_id
    schema = {
        "type": "object",
        "properties": {"move": {"enum": ["up", "down"]}, "sure": {"type": "boolean"}},
        "required": ["move", "sure"],
        "additionalProperties": False,
    }
    forms = [{"choice": ["red", "blue"]}, {"regex": "[0-9]{3}-[a-f]{2}"}, {"json_schema": schema}]
    for form in forms * 3:
        (result,) = engine.answers(structured(form))
        written = form, tiny_tokenizer.decode(result.completion_ids)
        assert result.finish_reason == "stop" and result.completion_ids[-1] == end, written
        text = tiny_tokenizer.decode(result.completion_ids[:-1])
        if "choice" in form:
            assert text in ("red", "blue")
        elif "regex" in form:
            assert re.fullmatch(r"[0-9]{3}-[a-f]{2}", text)
        else:
            answer = json.loads(text)
            assert answer["move"] in ("up", "down") and isinstance(answer["sure"], bool)


@pytest.mark.parametrize(
    "form", [{}, {"regex": "a", "choice": ["a"]}, {"grammar": "a"}, {"regex": "("}, {"json_schema": 3}]
)
def test_a_form_that_makes_no_sense_is_an_error(engine, form):
    with pytest.raises(RequestError, match="refuses"):
        engine.answers(structured(form))
    assert engine.answer((3,)).finish_reason == "length", "others go on"


# ---- seeds ---------------------------------------------------------------------------------------


def test_a_seed_decides_the_completion_whatever_runs_beside(engine):
    seeded = request(tuple(range(30, 90)), max_tokens=30, seed=123)
    beside = [request(prompt, max_tokens=30) for prompt in prompts(12)]
    (a,), (b, *_) = engine.answers(seeded), engine.answers(seeded, *beside)
    assert a.completion_ids == b.completion_ids
    assert a.logprobs == pytest.approx(b.logprobs, abs=EXACT)
    assert engine.answer(seeded.prompt_ids, max_tokens=30, seed=124).completion_ids != a.completion_ids


def test_a_seed_decides_the_completion_however_the_prompt_is_cut(engine):
    prompt = tuple(range(3, 203))
    in_parts = engine.answer(prompt, max_tokens=20, seed=9)
    assert engine.counters["computed_prompt_tokens"] == 200 > IN_PART
    remembered = engine.answer(prompt, max_tokens=20, seed=9)
    assert engine.counters["computed_prompt_tokens"] < 200 + IN_PART
    assert remembered.completion_ids == in_parts.completion_ids


def test_requests_without_seed_follow_the_engines_random_state(engine):
    state = engine.random.getstate()

    def ids() -> list[tuple[int, ...]]:
        return [engine.answer(prompt, max_tokens=9).completion_ids for prompt in prompts(4)]

    first, second = ids(), ids()
    engine.random.setstate(state)
    assert ids() == first != second


# ---- cancellation and commands -------------------------------------------------------------------


def test_a_cancelled_request_leaves_vllm_before_the_next_step(engine, plain):
    long, kept = engine.ask((10, 11), max_tokens=500), engine.ask((20, 21), max_tokens=40)
    engine.stepper.step(5)
    assert engine.llm.get_num_unfinished_requests() == 2
    assert long.cancel()
    engine.stepper.step()
    assert engine.llm.get_num_unfinished_requests() == 1
    waiting = engine.ask((30, 31))
    waiting.cancel()
    engine.stepper.run()
    assert error_of(plain, request((20, 21)), kept.result(timeout=0)) < EXACT
    assert engine.counters["sampled_tokens"] == 40 and not engine.llm.has_unfinished_requests()


def test_a_command_runs_between_requests_and_before_waiting_ones(engine):
    order: list[str] = []
    first = engine.ask((3,), max_tokens=4)
    engine.stepper.step(2)
    engine.call(lambda: order.append("command"))
    second = engine.ask((4,), max_tokens=4)
    first.add_done_callback(lambda _: order.append("first"))
    second.add_done_callback(lambda _: order.append("second"))
    failing = engine.call(lambda: 1 // 0)
    engine.stepper.run()
    assert order == ["first", "command", "second"]
    assert isinstance(failing.exception(timeout=0), ZeroDivisionError)


def test_sleep_says_that_a_cpu_has_nothing_to_free(engine):
    assert engine.sleep() is False and engine.wake() is False


def test_vllm_is_ready_to_free_its_cache_when_it_is_put_to_sleep(engine, monkeypatch):
    engine.answer((3, 4), max_tokens=4)
    monkeypatch.setattr(VllmEngine, "sleeps", True)  # as on a GPU, up to the allocator that a CPU lacks
    with pytest.raises(RuntimeError, match="not supported on CPU"):
        engine.sleep()
    assert engine.llm.is_sleeping() and engine.llm.wake_up()
    assert len(engine.answer((3, 4), max_tokens=4).completion_ids) == 4


# ---- policies ------------------------------------------------------------------------------------


def test_merged_weights_change_the_policy_and_the_base_comes_back_bit_for_bit(engine, plain, other):
    ids = tuple(range(10, 80))
    before, base = engine.score(ids), engine.policies["base"][0]
    weights = engine.policies["other"][0]
    assert engine.holds(base) == [] and set(engine.holds(weights)) == set(weights)
    assert engine.load(weights, "current", 1) is True
    assert engine.holds(weights) == [] and set(engine.holds(base)) == set(base)
    asked = [request(ids, max_tokens=6) for _ in range(4)]
    for each, result in zip(asked, engine.answers(*asked), strict=True):
        assert error_of(other, each, result) < EXACT and result.policy_version == 1
    assert engine.load(weights, "current", 2) is False, "nothing changed"
    assert engine.load(base, "base", -1) is True
    assert torch.equal(engine.score(ids), before)
    assert engine.load({}, "base", -1) is False, "layers that are not given are the base model's"
    engine.load(weights, "current", 3)
    assert engine.load({}, "base", -1) is True
    assert torch.equal(engine.score(ids), before)


def test_one_wrong_column_is_found(engine):
    name, weight = next(iter(engine.policies["base"][0].items()))
    wrong = weight.clone()
    wrong[0] += 1e-3
    assert engine.holds({name: wrong}) == [name]


def test_layers_that_do_not_exist_are_refused(engine):
    with pytest.raises(ConfigurationError, match="no_such"):
        engine.load({"model.layers.0.no_such": torch.zeros(2, 2)}, "current", 1)


def test_each_policy_answers_with_its_own_weights_and_version(engine, plain, other):
    order = ["current", "other", "current", "base", "adapted", "other", "adapted"]
    prompt = tuple(range(10, 110))  # the same one, so that a key kept too long would show
    futures = [engine.ask(prompt, policy=name, max_tokens=6) for name in order]
    engine.stepper.run()
    for name, future in zip(order, futures, strict=True):
        model = other if name in ("other", "adapted") else plain
        result = future.result(timeout=0)
        assert result.policy_version == engine.policies[name][1]
        assert error_of(model, request(prompt), result) < EXACT


def test_a_policy_that_cannot_be_had_fails_its_own_requests_only(engine, plain):
    lost, fine = engine.ask((3, 4), policy="step_000099"), engine.ask((5, 6))
    engine.stepper.run()
    with pytest.raises(RequestError, match="step_000099"):
        lost.result(timeout=0)
    assert error_of(plain, request((5, 6)), fine.result(timeout=0)) < EXACT


def test_weights_that_were_loaded_by_half_are_never_served(engine, plain, monkeypatch):
    original = engine._weights.complete

    def half(weights: Any) -> Iterator[Any]:
        yield from list(original(weights))[:3]
        raise MemoryError("no room for the rest")

    monkeypatch.setattr(engine._weights, "complete", half)
    lost = engine.ask((3, 4), policy="other")
    engine.stepper.run()
    assert isinstance(lost.exception(timeout=0), RequestError)
    monkeypatch.undo()
    asked = request((5, 6))
    (result,) = engine.answers(asked)
    assert error_of(plain, asked, result) < EXACT


def test_an_adapter_is_the_policy_that_its_merged_weights_are(engine, other, adapter):
    ids = tuple(range(10, 80))
    before = engine.score(ids)
    assert engine.load(adapter, "current", 4) is True
    assert engine.load(adapter, "current", 5) is False, "the same factors under another version"
    assert engine.holds(adapter) == []
    adapted = engine.score(ids)
    larger = {n: t * 2 if n.endswith("B.weight") else t for n, t in adapter.tensors.items()}
    assert set(engine.holds(Adapter(larger, 4, 6.0))) == set(adapter.layers)
    merged = engine.policies["other"][0]
    engine.load(merged, "current", 5)
    assert torch.allclose(adapted, engine.score(ids), atol=EXACT)
    assert (adapted - before).abs().mean() > 0.1
    assert set(engine.holds(adapter)) == set(adapter.layers)


def test_only_the_newest_adapter_is_kept_and_none_leaves_a_file(engine, adapter, plain):
    folders = set(os.listdir("/dev/shm"))
    for version in range(3):
        engine.load(adapter, "current", version)
        assert len(engine.llm.list_loras()) == 1
    assert set(os.listdir("/dev/shm")) == folders
    zero = {n: torch.zeros_like(t) if "lora_B" in n else t for n, t in adapter.tensors.items()}
    assert engine.load(Adapter(zero, 4, 6.0), "current", 3) is True
    assert engine.load(Adapter({}, 4, 6.0), "base", -1) is False, "neither changes the base model"
    assert not engine.llm.list_loras()
    asked = request((5, 6))
    assert error_of(plain, asked, engine.answers(asked)[0]) < EXACT


# ---- failures ------------------------------------------------------------------------------------


def test_not_a_number_is_an_error_that_names_the_request(engine, plain):
    bad = engine.ask((7, 8, 9), policy="broken", request_id="rollout-7")
    nameless = engine.ask((7, 8), policy="broken")
    good = engine.ask((7, 8))
    engine.stepper.run()
    with pytest.raises(NonFiniteLogits, match="rollout-7"):
        bad.result(timeout=0)
    assert isinstance(nameless.exception(timeout=0), NonFiniteLogits)
    assert error_of(plain, request((7, 8)), good.result(timeout=0)) < EXACT


def test_a_step_that_fails_fails_its_requests_and_leaves_no_half_written_key(
    engine, plain, monkeypatch, caplog
):
    prompt = tuple(range(10, 90))
    futures = [engine.ask((*prompt, i), max_tokens=9) for i in range(3)]

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._runner.get_model(), "compute_logits", out_of_memory)
    engine.stepper.step()
    monkeypatch.undo()
    engine.stepper.run()
    assert "failed a step" in caplog.text
    for future in futures:
        with pytest.raises(RequestError, match="out of memory"):
            future.result(timeout=0)
    asked = [request((*prompt, i), max_tokens=9) for i in range(3)]
    results = engine.answers(*asked)
    assert max(error_of(plain, a, r) for a, r in zip(asked, results, strict=True)) < EXACT


def test_the_benchmark_sets_the_client_beside_vllm_alone(small, repository, monkeypatch, capsys, engine):
    from test_benchmarks import run

    arguments = ["--engine", "vllm", "--quick", "--json", "--concurrent", "4", "--model", str(small)]
    _, figures = run(repository, "engine", arguments, monkeypatch, capsys)
    assert figures["engine"] == "vllm" and figures["publish_seconds_vllm"] > 0
    for row in figures["rows"]:
        assert row["client_over_raw_vllm"] > 0 and row["raw_vllm_tokens_per_second"] > 0
    assert figures["client_over_raw_vllm"] == min(row["client_over_raw_vllm"] for row in figures["rows"])


# ---- the end, and the bundled model --------------------------------------------------------------


def test_engines_share_a_process_and_outlive_each_other(engine, plain, small, tiny_tokenizer):
    second = Engine(
        small, tiny_tokenizer, {}, kv_bytes=16 << 20, max_context=256, max_running=32, dtype=torch.float32
    )
    made = (engine, second)
    asked = [request(prompt, max_tokens=12) for prompt in prompts(24)]
    futures = [[each.submit(one) for one in asked] for each in made]
    # As two models have it, each on its own compute thread. A thread hears of torch.set_num_threads with
    # its first torch operation: before that, vLLM would count one number of threads and use another.
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        list(threads.map(lambda each: each.stepper.run(), made))
    for answers in futures:
        for one, future in zip(asked, answers, strict=True):
            assert error_of(plain, one, future.result(timeout=0)) < EXACT
    second.end()
    assert torch.distributed.is_initialized()
    assert engine.load(engine.policies["other"][0], "current", 1) is True
    assert len(engine.answer((3, 4)).completion_ids) == 8


def test_a_closed_engine_frees_its_memory_and_refuses(engine):
    weights = weakref.ref(engine._runner.get_model().model.layers[0].mlp.gate_up_proj)
    cache = weakref.ref(engine._runner.kv_caches[0])
    running, waiting = engine.ask((3, 4), max_tokens=500), engine.ask((3, 4), policy="other")
    engine.stepper.step(3)
    called = engine.call(lambda: None)
    engine.close()
    engine.close()
    engine.stepper.run()
    with pytest.raises(RequestError, match="closed"):
        engine.ask((3, 4))
    assert running.cancelled() and waiting.cancelled() and called.cancelled()
    gc.collect()
    assert weights() is None and cache() is None


@pytest.fixture(scope="module")
def bundled_engine(bundled: Path) -> Iterator[Engine]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled)
    made = Engine(bundled, tokenizer, {}, kv_bytes=256 << 20, max_context=1024, dtype=torch.bfloat16)
    yield made
    made.end()


def test_the_bundled_model_agrees_with_transformers_and_publishes_merged_weights(bundled, bundled_engine):
    engine = bundled_engine
    assert engine.publish == "merged" and engine.max_context == 1024
    model = load(bundled, dtype=torch.float32)
    ids = engine.tokenizer("The quick brown fox jumps over the lazy dog. 3 + 4 = 7.").input_ids
    asked = [request(tuple(ids[:n]), max_tokens=12) for n in (3, 8, 17)]
    for each, result in zip(asked, engine.answers(*asked), strict=True):
        rows = logprobs_of(model, each.prompt_ids, result.completion_ids)
        expected = rows.gather(1, torch.tensor(result.completion_ids)[:, None])[:, 0]
        assert (expected - torch.tensor(result.logprobs)).abs().mean() < 0.1
    before = engine.score(ids)
    base = {n: w.to(torch.bfloat16) for n, w in linear_weights(model).items()}
    generator = torch.Generator().manual_seed(0)
    new = {n: w + 0.02 * torch.randn(w.shape, generator=generator).to(w.dtype) for n, w in base.items()}
    assert engine.load(new, "current", 1) is True and engine.holds(new) == []
    assert (engine.score(ids) - before).abs().mean() > 0.05
    assert engine.load(base, "current", 2) is True and engine.holds(base) == []
    assert torch.equal(engine.score(ids), before)
