"""The backend without a model keeps every promise of a backend."""

import asyncio

import pytest

from artnb.backends.base import Backend, SampleRequest
from artnb.backends.fake import FakeBackend
from artnb.config import SamplingConfig, TrainConfig
from artnb.errors import CheckpointError, PromptTooLong
from artnb.types import Sample

PROMPT = tuple(b"hello")


def request(**options):
    top = options.pop("top_logprobs", 0)
    return SampleRequest(PROMPT, SamplingConfig(**options), stop_ids=(257,), top_logprobs=top)


def row(advantage):
    return Sample((1, 2), (False, True), (0.0, -1.0), (0.0, advantage), (0.0, 1.0), "t", 0)


def test_it_is_a_backend():
    assert isinstance(FakeBackend(), Backend)


def test_its_tokens_spell_any_text():
    tokenizer = FakeBackend().tokenizer
    text = "<|im_start|>user\nÜber 二<|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == "user\nÜber 二\n"
    assert tokenizer.apply_chat_template(
        [{"role": "user", "content": "{a}"}], tokenize=False, add_generation_prompt=True
    ) == ("<|im_start|>user\n{a}<|im_end|>\n<|im_start|>assistant\n")


async def test_replies_follow_the_script_in_turn():
    backend = FakeBackend(script=["one", "two"])
    results = [await backend.sample(request()) for _ in range(3)]
    assert [backend.tokenizer.decode(r.completion_ids) for r in results] == [
        "one<|im_end|>",
        "two<|im_end|>",
        "one<|im_end|>",
    ]


async def test_a_scripted_function_reads_the_prompt_and_the_version():
    backend = FakeBackend(script=lambda prompt, version: f"{prompt}{version}")
    await backend.publish_weights(3)
    result = await backend.sample(request())
    assert backend.tokenizer.decode(result.completion_ids) == "hello3<|im_end|>"
    assert result.policy_version == 3


async def test_a_seeded_request_is_reproducible_and_others_vary():
    backend = FakeBackend()
    seeded = [await backend.sample(request(seed=1)) for _ in range(2)]
    assert seeded[0].completion_ids == seeded[1].completion_ids
    assert seeded[0].logprobs == seeded[1].logprobs
    free = {(await backend.sample(request())).completion_ids for _ in range(8)}
    assert len(free) > 1


async def test_length_and_stop_strings_end_a_reply():
    backend = FakeBackend(script=["abcdef"])
    cut = await backend.sample(request(max_tokens=3))
    assert (bytes(cut.completion_ids), cut.finish_reason) == (b"abc", "length")
    stopped = await backend.sample(request(stop=("cd", "e")))
    assert (bytes(stopped.completion_ids), stopped.finish_reason) == (b"abcd", "stop")
    exact = await backend.sample(request(max_tokens=7))
    assert exact.completion_ids[-1] == 257 and exact.finish_reason == "stop"


async def test_logprobs_match_the_tokens_and_alternatives_begin_with_the_sampled_one():
    result = await FakeBackend().sample(request(top_logprobs=3))
    assert len(result.logprobs) == len(result.completion_ids) == len(result.top_logprobs)
    for token, logprob, others in zip(
        result.completion_ids, result.logprobs, result.top_logprobs, strict=True
    ):
        assert others[0] == (token, logprob) and len(others) == 3 and logprob <= 0


async def test_an_over_long_request_is_refused():
    with pytest.raises(PromptTooLong, match="holds 8 tokens, 9 were asked for"):
        await FakeBackend(max_context=8).sample(request(max_tokens=4))


async def test_cancelling_frees_the_slot():
    backend = FakeBackend(delay=60)
    task = asyncio.create_task(backend.sample(request()))
    await asyncio.sleep(0)
    assert backend.active == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (backend.active, backend.cancelled) == (0, 1)


async def test_a_step_moves_the_version_and_says_whether_anything_changed():
    backend, config = FakeBackend(), TrainConfig()
    stats = await backend.forward_backward([row(2.0), row(-1.0)], config, loss_denominator=2.0)
    assert stats["loss"] == -0.5 and stats["tokens"] == 2
    assert (await backend.optim_step(config))["grad_norm"] > 0
    publication = await backend.publish_weights(1)
    assert publication.changed and backend.policy_version == 1
    assert (await backend.optim_step(config))["grad_norm"] == 0
    assert not (await backend.publish_weights(2)).changed


async def test_other_policies_are_reached_by_name():
    backend = FakeBackend()
    await backend.publish_weights(1)
    assert (await backend.sample(request(), policy="base")).policy_version == -1
    assert (await backend.sample(request(), policy="step_000000")).policy_version == 0
    for unknown in ("step_000009", "latest"):
        with pytest.raises(CheckpointError, match=unknown):
            await backend.sample(request(), policy=unknown)


async def test_what_it_saves_it_loads(tmp_path):
    backend = FakeBackend()
    await backend.forward_backward([row(1.0)], TrainConfig(), loss_denominator=1.0)
    await backend.optim_step(TrainConfig())
    await backend.save(tmp_path)
    fresh = FakeBackend()
    await fresh.load(tmp_path, policy_version=4)
    assert fresh.policy_version == 4
    assert (await fresh.sample(request(), policy="step_000004")).policy_version == 4
    with pytest.raises(CheckpointError, match="no checkpoint"):
        await fresh.load(tmp_path / "nowhere", policy_version=1)


async def test_it_closes_twice():
    backend = FakeBackend()
    await backend.close()
    await backend.close()
    assert backend.closed and backend.describe()["identity"]["base_model"] == "fake"


async def test_it_goes_back_to_a_snapshot():
    backend, config = FakeBackend(), TrainConfig()
    before = await backend.snapshot()
    await backend.forward_backward([row(1.0)], config, loss_denominator=1.0)
    await backend.optim_step(config)
    await backend.publish_weights(1)
    await backend.forward_backward([row(1.0)], config, loss_denominator=1.0)
    await backend.restore(before)
    assert backend.policy_version == 0
    assert (await backend.optim_step(config))["grad_norm"] == 0
    assert not (await backend.publish_weights(1)).changed


async def test_an_adapter_is_taken_over_as_version_zero(tmp_path):
    backend = FakeBackend()
    await backend.publish_weights(3)
    await backend.save(tmp_path)
    await backend.load_adapter(tmp_path)
    assert backend.policy_version == 0
    with pytest.raises(CheckpointError, match="no checkpoint"):
        await backend.load_adapter(tmp_path / "nowhere")
