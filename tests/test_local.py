"""One model in this process is sampled and trained, and whoever samples knows under which weights."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import error_of, load, request, row

from artnb.backends import local
from artnb.backends.base import Backend
from artnb.backends.local import LocalBackend
from artnb.config import LoraConfig, TrainConfig
from artnb.errors import (
    CheckpointError,
    ConfigurationError,
    PromptTooLong,
    PublicationError,
    RequestError,
)

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = 1e-4
CONFIG = TrainConfig(learning_rate=0.02)
PROMPT = tuple(range(30, 90))

Make = Callable[..., LocalBackend]


@pytest.fixture
async def make(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Make]:
    made: list[LocalBackend] = []

    def backend(**options: Any) -> LocalBackend:
        options = {"dtype": "float32", "checkpoint": lambda name: tmp_path / name, **options}
        made.append(LocalBackend(tiny_model, options.pop("lora", LoraConfig(rank=4)), **options))
        return made[-1]

    yield backend
    for each in made:
        await each.close()


@pytest.fixture
def plain(tiny_model: Path) -> Any:
    return load(tiny_model)


def with_weights(plain: Any, weights: dict[str, torch.Tensor]) -> Any:
    """transformers' model under another policy's linear weights."""
    model = copy.deepcopy(plain)
    for name, weight in weights.items():
        model.get_submodule(name).weight.copy_(weight)
    return model


def rows(seed: int = 0) -> list[Any]:
    mask = [False] * 20 + [True] * 6
    return [
        row([*range(10, 30), *range(40 + seed + i, 46 + seed + i)], mask, advantage=(-1.0) ** i, name=str(i))
        for i in range(4)
    ]


async def train(backend: LocalBackend, seed: int = 0) -> float:
    """One update that is not published yet; returns its loss."""
    measured = await backend.forward_backward(rows(seed), CONFIG, loss_denominator=6.0)
    await backend.optim_step(CONFIG)
    return measured["loss"]


async def checkpoint(backend: LocalBackend, folder: Path) -> Path:
    folder.mkdir()
    await backend.save(folder)
    return folder


async def in_time(work: Awaitable[Any], seconds: float = 60.0) -> Any:
    return await asyncio.wait_for(work, seconds)


# ---- what it is ----------------------------------------------------------------------------------


async def test_it_is_a_backend_that_describes_itself(make):
    backend = make(base_name="tiny")
    assert isinstance(backend, Backend)
    about = backend.describe()
    assert about["identity"]["base_model"] == "tiny"
    assert about["identity"]["adapter"] == {"rank": 4, "alpha": 16.0, "targets": "all-linear"}
    assert (about["dtype"], about["device"]) == ("float32", "cpu")
    assert about["trainable_parameters"] == sum(4 * sum(x.base.shape) for x in backend.trainer.layers)
    assert json.loads(json.dumps(about)) == about
    assert backend.policy_version == 0 and backend.max_context == 2048


async def test_the_tokenizer_is_part_of_the_identity(make):
    one, two = make(), make()
    assert one.describe()["identity"] == two.describe()["identity"]
    two.tokenizer.chat_template += " "
    assert one.describe()["identity"]["tokenizer"] != two.describe()["identity"]["tokenizer"]


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
async def test_it_takes_the_type_that_the_machine_multiplies(make, monkeypatch, native, expected):
    monkeypatch.setattr(local, "multiplies_bfloat16", lambda: native)
    backend = make(dtype=None)
    assert backend.dtype == backend.trainer.model.dtype == backend.engine.cache.dtype == expected
    assert all(p.dtype == torch.float32 for p in backend.trainer.parameters.values())


async def test_bfloat16_samples_trains_and_publishes(make):
    backend = make(dtype="bfloat16")
    await train(backend)
    proof = await backend.publish_weights(1)
    assert proof.changed and proof.probe_mean <= proof.tolerance
    result = await backend.sample(request(PROMPT, max_tokens=3))
    assert (len(result.completion_ids), result.policy_version) == (3, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float17"}, "bfloat16, float16, float32"),
        ({"engine_kwargs": {"max_runing": 3}}, "max_runing"),
        ({"engine_kwargs": {"prefill_tokens": 0}}, "prefill_tokens"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_and_leaves_no_thread(tiny_model, options, message):
    before = threading.active_count()
    with pytest.raises(ConfigurationError, match=message):
        LocalBackend(tiny_model, LoraConfig(), **options)
    assert threading.active_count() == before


# ---- policies ------------------------------------------------------------------------------------


async def test_sampling_reaches_the_engine(make, plain):
    backend = make(engine_kwargs={"max_running": 3})
    asked = [request(PROMPT[: 5 + i], max_tokens=6) for i in range(7)]
    results = await in_time(asyncio.gather(*(backend.sample(each) for each in asked)))
    assert max(error_of(plain, a, r) for a, r in zip(asked, results, strict=True)) < EXACT
    with pytest.raises(PromptTooLong):
        await backend.sample(request((5,) * 3000))
    with pytest.raises(RequestError, match="empty"):
        await backend.sample(request(()))


async def test_each_policy_keeps_its_own_weights_whatever_is_trained_meanwhile(make, plain, tmp_path):
    backend = make()
    asked = request(PROMPT, max_tokens=6)
    await train(backend)
    await backend.publish_weights(1)
    first = {n: w.clone() for n, w in backend.trainer.merged_weights().items()}
    await checkpoint(backend, tmp_path / "step_000001")
    await train(backend, seed=1)
    await backend.publish_weights(2)
    second = {n: w.clone() for n, w in backend.trainer.merged_weights().items()}
    await train(backend, seed=2)  # not published
    base = {n: w.clone() for n, w in backend.trainer.base_weights().items()}
    expected = {"current": (2, second), "base": (-1, base), "step_000001": (1, first)}
    for policy in ("base", "current", "step_000001", "current", "base", "step_000001", "current"):
        result = await in_time(backend.sample(asked, policy=policy))
        version, weights = expected[policy]
        assert result.policy_version == version
        assert not backend.engine.decoder.holds(weights), "bit for bit"
        assert error_of(with_weights(plain, weights), asked, result) < EXACT
    assert backend.policy_version == 2


async def test_a_checkpoint_that_is_not_there_is_an_error_of_its_request(make):
    with pytest.raises(CheckpointError, match="step_000009"):
        await make().sample(request(PROMPT), policy="step_000009")


async def test_a_policy_is_served_right_while_another_is_published(make, plain):
    """Requests for the base keep coming, so that the engine exchanges weights around each publication."""
    backend, weights = make(), {}
    weights[0] = weights[-1] = {n: w.clone() for n, w in backend.trainer.base_weights().items()}
    seen, stop = [], asyncio.Event()

    async def ask(policy: str, number: int) -> None:
        while not stop.is_set():
            asked = request((*PROMPT, number), max_tokens=3)
            seen.append((policy, asked, await backend.sample(asked, policy=policy)))

    askers = [asyncio.create_task(ask(p, 100 + i)) for i, p in enumerate(["base", "current", "base"])]
    for version in range(1, 6):
        await in_time(train(backend, seed=version))
        weights[version] = {n: w.clone() for n, w in backend.trainer.merged_weights().items()}
        proof = await in_time(backend.publish_weights(version))
        assert proof.probe_max < EXACT
        result = await in_time(backend.sample(request(PROMPT)))
        assert result.policy_version == backend.policy_version == version
    stop.set()
    await in_time(asyncio.gather(*askers))
    models = {version: with_weights(plain, held) for version, held in weights.items()}
    for policy, asked, result in seen[::3]:
        assert (result.policy_version == -1) == (policy == "base")
        assert error_of(models[result.policy_version], asked, result) < EXACT
    assert {policy for policy, *_ in seen} == {"base", "current"}


async def test_sampling_and_training_share_the_thread_without_deadlock(make):
    backend = make(engine_kwargs={"max_running": 4})

    async def talk(number: int) -> list[int]:
        prompt, versions = PROMPT[: 10 + number], []
        for _ in range(6):
            result = await backend.sample(request(prompt, max_tokens=5))
            versions.append(result.policy_version)
            prompt = (*prompt, *result.completion_ids, 7)
        return versions

    async def learn() -> None:
        for version in range(1, 5):
            await train(backend, seed=version)
            await backend.publish_weights(version)

    *talks, _ = await in_time(asyncio.gather(*(talk(i) for i in range(12)), learn()))
    assert all(versions == sorted(versions) for versions in talks)


async def test_cancelling_a_sample_frees_the_engine(make):
    backend = make(engine_kwargs={"max_running": 1})
    long = asyncio.create_task(backend.sample(request(PROMPT, max_tokens=1900)))
    short = asyncio.create_task(backend.sample(request(PROMPT, max_tokens=2)))
    while not backend.engine.counters["sampled_tokens"]:
        await asyncio.sleep(0.001)
    long.cancel()
    await in_time(short)
    assert long.cancelled()
    assert backend.engine.counters["sampled_tokens"] < 1900


# ---- publishing ----------------------------------------------------------------------------------


async def test_a_publication_is_proved_and_tells_whether_anything_changed(make):
    backend = make()
    proof = await backend.publish_weights(1)
    assert not proof.changed, "an untrained adapter is the base"
    await train(backend)
    proof = await backend.publish_weights(2)
    assert proof.changed and proof.policy_version == backend.policy_version == 2
    assert proof.probe_max < EXACT < proof.tolerance
    assert abs(proof.rounding_lost) < 1e-3, "float32 loses nothing"
    assert proof.seconds > 0


@pytest.mark.parametrize("how", ["one weight", "the forward"])
async def test_a_tampered_engine_is_found_out_and_the_old_policy_stays(make, plain, monkeypatch, how):
    backend = make()
    await train(backend)
    await backend.publish_weights(1)
    published = {n: w.clone() for n, w in backend.trainer.merged_weights().items()}
    await train(backend, seed=1)
    decoder = backend.engine.decoder
    if how == "one weight":
        original = decoder.load

        def tampered(weights: dict[str, torch.Tensor]) -> bool:
            name = next(iter(weights))
            wrong = weights[name].clone()
            wrong[0, 0] = torch.nextafter(wrong[0, 0], torch.tensor(9.0))
            return original({**weights, name: wrong})

        monkeypatch.setattr(decoder, "load", tampered)
    else:
        logits = decoder.logits
        monkeypatch.setattr(decoder, "logits", lambda hidden: logits(hidden) * 1.1)
    with pytest.raises(PublicationError):
        await in_time(backend.publish_weights(2))
    monkeypatch.undo()
    assert backend.policy_version == 1
    asked = request(PROMPT, max_tokens=4)
    result = await in_time(backend.sample(asked))
    assert result.policy_version == 1
    assert error_of(with_weights(plain, published), asked, result) < EXACT


async def test_weights_that_are_not_numbers_are_not_published(make):
    backend = make()
    backend.trainer.layers[2].b.data.fill_(float("nan"))
    backend.trainer.merge()
    with pytest.raises(PublicationError):
        await in_time(backend.publish_weights(1))
    assert (await in_time(backend.sample(request(PROMPT)))).policy_version == 0


# ---- undoing and keeping -------------------------------------------------------------------------


async def test_restoring_undoes_update_publication_and_version(make, plain):
    backend = make()
    await train(backend)
    await backend.publish_weights(1)
    held = {n: w.clone() for n, w in backend.trainer.merged_weights().items()}
    kept = await backend.snapshot()
    losses = [await train(backend), await train(backend, seed=1)]
    await backend.publish_weights(2)
    await backend.forward_backward(rows(), CONFIG, loss_denominator=6.0)
    await backend.restore(kept)
    assert backend.policy_version == 1
    asked = request(PROMPT, max_tokens=4)
    for policy in ("current", "base", "current"):
        result = await in_time(backend.sample(asked, policy=policy))
        if policy == "current":
            assert result.policy_version == 1
            assert not backend.engine.decoder.holds(held)
            assert error_of(with_weights(plain, held), asked, result) < EXACT
    assert [await train(backend), await train(backend, seed=1)] == losses


async def test_a_cancelled_gradient_leaves_nothing_once_restored(make):
    backend = make()
    kept = await backend.snapshot()
    loss = await train(backend)
    await backend.restore(kept)
    many = TrainConfig(microbatch_tokens=30, share_prefixes=False)
    work = asyncio.create_task(backend.forward_backward(rows() * 40, many, loss_denominator=6.0))
    await asyncio.sleep(0.05)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await in_time(backend.restore(kept))
    assert await train(backend) == loss


async def test_another_backend_goes_on_from_a_checkpoint_bit_for_bit(make, tmp_path):
    first = make(seed=3)
    await train(first)
    await first.publish_weights(1)
    await first.sample(request(PROMPT, max_tokens=9))
    folder = await checkpoint(first, tmp_path / "step_000001")
    asked = request(PROMPT, max_tokens=12)
    expected = [await train(first, seed=1), (await first.sample(asked)).completion_ids]

    second = make(seed=4)
    await train(second, seed=5)
    await second.load(folder, policy_version=1)
    assert second.policy_version == 1
    assert [await train(second, seed=1), (await second.sample(asked)).completion_ids] == expected
    assert {p.name for p in folder.iterdir()} >= {"adapter_model.safetensors", "optimizer.safetensors"}
    assert not [p for p in folder.rglob("*") if p.suffix in (".pt", ".pkl", ".bin")], "no pickle"


async def test_another_runs_adapter_can_be_the_start(make, tmp_path):
    first = make()
    await train(first)
    await first.publish_weights(1)
    folder = await checkpoint(first, tmp_path / "step_000001")
    second = make()
    await second.load_adapter(folder)
    assert second.policy_version == 0
    assert not second.engine.decoder.holds(first.trainer.merged_weights())
    assert second.trainer.optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("text", ["{", "{}", '{"policy_version": 1, "engine_random": [3, [1, 2], null]}'])
async def test_a_damaged_checkpoint_is_refused_before_anything_changes(make, tmp_path, text):
    backend = make()
    await train(backend)
    await backend.publish_weights(1)
    folder = await checkpoint(backend, tmp_path / "step_000001")
    (folder / "backend.json").write_text(text)
    await train(backend)
    held = {n: w.clone() for n, w in backend.trainer.merged_weights().items()}
    with pytest.raises(CheckpointError):
        await in_time(backend.load(folder, policy_version=1))
    assert all(torch.equal(w, held[n]) for n, w in backend.trainer.merged_weights().items())
    with pytest.raises((CheckpointError, RequestError)):
        (folder / "backend.json").unlink()
        await in_time(backend.sample(request(PROMPT), policy="step_000001"))
    assert (await in_time(backend.sample(request(PROMPT)))).policy_version == 1


# ---- the end -------------------------------------------------------------------------------------


async def test_closing_cancels_what_runs_and_may_be_repeated(make):
    backend = make(engine_kwargs={"max_running": 2})
    waiting = [asyncio.create_task(backend.sample(request(PROMPT, max_tokens=1900))) for _ in range(5)]
    await asyncio.sleep(0.05)
    await in_time(backend.close())
    await in_time(backend.close())
    for each in waiting:
        with pytest.raises(asyncio.CancelledError):
            await in_time(each)
    with pytest.raises(RequestError, match="closed"):
        await backend.sample(request(PROMPT))
    with pytest.raises(RequestError, match="closed"):
        await backend.forward_backward(rows(), CONFIG, loss_denominator=6.0)
    assert backend.describe()["parameters"] > 0, "a closed model can still be shown"
    assert not [t for t in threading.enumerate() if t.name.startswith("artnb-compute") and t.is_alive()]
