"""What a step records of each sampled token: the trainer's numbers, at the token's place, with the step."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference_models import load, logprobs_of
from steps import attempt, copied, group, open_fake, open_model, play
from test_out_of_memory import narrow

import artnb as nb
from artnb.backends.base import StepStats, TokenValues
from artnb.batch import to_samples
from artnb.browser.source import source_of
from artnb.errors import ArtnbError
from artnb.step_tokens import token_records
from artnb.store.token_records import TokenRecord, read_token_records, write_token_records
from artnb.types import Turn

pytestmark = pytest.mark.usefixtures("one_thread")


def turn(prompt: Sequence[int], completion: Sequence[int], **fields: Any) -> Turn:
    logprobs = fields.pop("logprobs", (-0.5,) * len(completion))
    about = {"policy_version": 0, "finish_reason": "stop", "message": {"role": "assistant"}}
    return Turn(tuple(prompt), tuple(completion), logprobs, **{**about, **fields})


def record(*values: float, entropies: bool = True) -> TokenRecord:
    array = np.array(values)
    return TokenRecord(array, array * 2, array * 3, array * 4 if entropies else None)


def same(found: TokenRecord, expected: TokenRecord) -> bool:
    one, other = found.arrays(), expected.arrays()
    return one.keys() == other.keys() and all(
        one[name].dtype == np.float32 and np.array_equal(one[name], other[name], equal_nan=True)
        for name in one
    )


def tokens_folder(model: nb.Model) -> list[str]:
    folder = model.run.path / "tokens"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# ---- the file --------------------------------------------------------------------------------------


def test_it_reads_what_was_written(tmp_path):
    records = {
        "a": record(0.5, float("nan"), -2.0),
        'x"/\ud800 <b>': record(1.0, entropies=False),
        "empty": record(),
    }
    write_token_records(tmp_path, 12, records)
    found = read_token_records(str(tmp_path), 12)
    assert list(found) == list(records) and all(same(found[name], records[name]) for name in records)
    assert os.listdir(tmp_path / "tokens") == ["step_000012.safetensors"]
    assert read_token_records(tmp_path, 11) == {}
    write_token_records(tmp_path, 12, {"b": record(1.0)})
    assert list(read_token_records(tmp_path, 12)) == ["b"]
    write_token_records(tmp_path, 12, {})
    assert os.listdir(tmp_path / "tokens") == [] and read_token_records(tmp_path, 12) == {}


def test_the_file_holds_numbers_and_json_alone(tmp_path):
    write_token_records(tmp_path, 0, {"a": record(0.5, 1.0)})
    content = (tmp_path / "tokens" / "step_000000.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert json.loads(header["__metadata__"]["trajectories"]) == ["a"]
    assert {about["dtype"] for name, about in header.items() if name != "__metadata__"} == {"F32"}
    assert len(content) == 8 + length + 4 * 2 * 4


@pytest.mark.parametrize("damage", [lambda b: b[:40], lambda b: b"no", lambda b: b.replace(b"[", b"(", 1)])
def test_a_damaged_file_is_named(tmp_path, damage):
    write_token_records(tmp_path, 3, {"a": record(0.5)})
    path = tmp_path / "tokens" / "step_000003.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ArtnbError, match=r"step_000003.safetensors is damaged"):
        read_token_records(tmp_path, 3)


def test_a_record_has_one_number_a_token():
    with pytest.raises(ValueError, match=r"shape \(T,\)"):
        TokenRecord(np.ones(2), np.ones(2), np.ones(3))


# ---- where the values of a row belong --------------------------------------------------------------


def values_of(samples: Sequence[Any], *, mask: bool = False) -> list[TokenValues]:
    """Made-up values: -id of the token, and entropies a thousand times that; odd ids are masked."""
    found = []
    for sample in samples:
        own = np.array([i for i, s in zip(sample.ids_T, sample.is_sampled_T, strict=True) if s], np.float32)
        found.append(TokenValues(-own, 1000 * own, own % 2 == 1 if mask else None))
    return found


def test_rows_of_one_trajectory_are_put_together_in_the_order_of_its_turns():
    """Four turns in two rows, of which one carries no loss, and one stands in two histories."""
    first = turn([1, 2], [10, 11])
    apart = turn([5, 6], [20])  # no extension of anything: a row of its own
    greedy = turn([1, 2, 10, 11, 3], [30, 31, 32], sampling={"temperature": 0.0})
    last = turn([1, 2, 10, 11, 3, 30, 31, 32, 4], [40, 41])
    one = nb.Trajectory([first, apart, greedy, last], reward=1.0, id="one")
    one.additional_histories.append(nb.History([first, turn([7], [50])]))
    other = nb.Trajectory([turn([1, 2], [60])], reward=0.0, id="other")
    config = nb.TrainConfig()
    rows = to_samples([nb.TrajectoryGroup([one, other])], config)
    assert len(rows.samples) == 4
    found = token_records(rows, [(rows.samples, values_of(rows.samples))])
    nan = float("nan")
    expected = [-10, -11, -20, nan, nan, nan, -40, -41, -10, -11, -50]
    np.testing.assert_array_equal(found["one"].trainer_logprobs, np.float32(expected))
    np.testing.assert_array_equal(found["one"].entropies, -1000 * np.float32(expected))
    half = np.where(np.isnan(expected), nan, 0.5)
    np.testing.assert_array_equal(found["one"].advantages, np.float32(half))
    np.testing.assert_array_equal(found["one"].weights, np.float32(2 * half))
    np.testing.assert_array_equal(found["other"].trainer_logprobs, np.float32([-60]))
    np.testing.assert_array_equal(found["other"].advantages, np.float32([-0.5]))
    assert len(found["one"].weights) == one.completion_tokens


def test_a_shortened_row_leaves_its_end_unknown():
    one = nb.Trajectory([turn([1], [10, 11]), turn([1, 10, 11, 2], [20, 21, 22])], reward=1.0, id="one")
    other = nb.Trajectory([turn([1], [60])], reward=0.0, id="other")
    rows = to_samples([nb.TrajectoryGroup([one, other])], nb.TrainConfig())
    for kept in range(1, 6):
        of_one, of_other = values_of(rows.samples)
        short = TokenValues(of_one.logprobs[:kept], of_one.entropies[:kept])
        found = token_records(rows, [(rows.samples, [short, of_other])])
        for array in found["one"].arrays().values():
            assert np.isnan(array).tolist() == [False] * kept + [True] * (5 - kept)
        assert found["one"].trainer_logprobs[:kept].tolist() == [-10, -11, -20, -21, -22][:kept]


def test_masked_tokens_weigh_nothing_and_rows_that_were_not_drawn_are_unknown():
    config = nb.TrainConfig(max_samples=2, seed=1, aggregate="trajectory")
    one = nb.Trajectory([turn([1], [10, 11]), turn([2], [20]), turn([3], [31])], reward=1.0, id="one")
    other = nb.Trajectory([turn([1], [60])], reward=0.0, id="other")
    rows = to_samples([nb.TrajectoryGroup([one, other])], config)
    assert len(rows.samples) == 2
    found = token_records(rows, [(rows.samples, values_of(rows.samples, mask=True))])
    drawn = {i: (s.weights_T[k], s.trajectory_id) for s in rows.samples for k, i in enumerate(s.ids_T)}
    assert found.keys() == {name for _, name in drawn.values()}
    weights = {"one": [10, 11, 20, 31], "other": [60]}
    for name, ids in weights.items():
        if name in found:
            expected = [drawn[i][0] * (i % 2 == 0) if i in drawn else float("nan") for i in ids]
            np.testing.assert_array_equal(found[name].weights, np.float32(expected))
    assert any(np.isnan(r.weights).any() or name not in found for name, r in found.items()) or len(found) < 2


def test_the_first_of_trajectories_with_one_id_counts():
    groups = [
        nb.TrajectoryGroup([attempt(1.0, id="a"), attempt(0.0)]),
        nb.TrajectoryGroup([attempt(0.0, id="a", completion=5), attempt(1.0)]),
    ]
    rows = to_samples(groups, nb.TrainConfig())
    found = token_records(rows, [(rows.samples, values_of(rows.samples))])
    assert len(found) == 3 and found["a"].advantages.tolist() == [0.5, 0.5]


# ---- of real steps ---------------------------------------------------------------------------------


@pytest.fixture
def model(tiny_model, tmp_path):
    with open_model(tiny_model, tmp_path) as opened:
        yield opened


def reference(folder: Path, one: Turn, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies by transformers, all logits."""
    logp = logprobs_of(load(folder), one.prompt_ids, one.completion_ids).div(temperature).log_softmax(-1)
    own = logp.gather(1, torch.tensor(one.completion_ids)[:, None])[:, 0]
    return own, -(logp.exp() * logp).sum(-1)


async def test_the_values_are_those_of_the_policy_before_the_step(tiny_model, tmp_path):
    options = {"learning_rate": 1e-2, "aggregate": "trajectory", "microbatch_tokens": 64}
    with open_model(tiny_model, tmp_path, sampling=nb.SamplingConfig(temperature=0.7)) as model:
        groups = await play(model)
        await nb.train_step(model, groups, **options)
    found = read_token_records(model.run.path, 0)
    samples = {s.trajectory_id: s for s in to_samples(groups, nb.TrainConfig(aggregate="trajectory")).samples}
    assert found.keys() == samples.keys() and len(found) >= 8
    for one in groups.trajectories:
        if one.id not in found:
            continue
        logprobs, entropies = reference(tiny_model, one.turns[0], 0.7)
        start = len(one.turns[0].prompt_ids)
        np.testing.assert_allclose(found[one.id].trainer_logprobs, logprobs, atol=1e-4)
        np.testing.assert_allclose(found[one.id].entropies, entropies, atol=1e-4)
        np.testing.assert_allclose(found[one.id].advantages, samples[one.id].advantages_T[start:], rtol=1e-6)
        np.testing.assert_allclose(found[one.id].weights, samples[one.id].weights_T[start:], rtol=1e-6)
        assert one.turns[0].sampling["temperature"] == 0.7
    assert tokens_folder(model) == ["step_000000.safetensors"]


async def test_the_browser_colours_tokens_by_what_a_real_step_recorded(tiny_model, tmp_path):
    """The engine's logprobs beside the trainer's, their ratio, advantages, entropies and weights."""
    with open_model(tiny_model, tmp_path) as model:
        first = await play(model)
        await nb.train_step(model, first, learning_rate=5e-2, minibatches=2)
        source = source_of(model)
        recorded = read_token_records(model.run.path, 0)
        ratios, shown_ones = [], 0
        for one in first.trajectories:
            shown = source.tokens(one.id)
            start, values = len(one.turns[0].prompt_ids), shown["values"]
            assert shown["ids"] == list(one.turns[0].ids) and len(shown["texts"]) == shown["total"]
            np.testing.assert_allclose(values["logprob"][start:], one.turns[0].logprobs, atol=1e-4)
            if one.id not in recorded:
                assert shown["missing"]["ratio"]
                continue
            own, shown_ones = recorded[one.id], shown_ones + 1
            assert not shown["missing"]
            for name, array in (
                ("trainer_logprob", own.trainer_logprobs),
                ("advantage", own.advantages),
                ("entropy", own.entropies),
                ("weight", own.weights),
            ):
                assert values[name][:start] == [None] * start
                np.testing.assert_allclose(values[name][start:], array, atol=1e-3)
            expected = np.exp(own.trainer_logprobs - np.float32(one.turns[0].logprobs))
            np.testing.assert_allclose(values["ratio"][start:], expected, atol=1e-3)
            ratios += values["ratio"][start:]
            assert source.trajectory(one.id)["facts"]["advantage"] == pytest.approx(
                own.advantages.mean(), abs=1e-4
            )
    assert shown_ones >= 8 and max(abs(ratio - 1) for ratio in ratios) > 1e-3  # the second update's rows


async def test_every_row_is_recorded_once_over_several_updates(model, tiny_model):
    """The rows of the second update are read by the policy that the first one left."""
    groups = await play(model)
    await nb.train_step(model, groups, learning_rate=5e-2, minibatches=2)
    found = read_token_records(model.run.path, 0)
    assert found.keys() == {s.trajectory_id for s in to_samples(groups, nb.TrainConfig()).samples}
    gaps = [
        float(np.abs(found[t.id].trainer_logprobs - np.float32(t.turns[0].logprobs)).max())
        for t in groups.trajectories
        if t.id in found
    ]
    assert all(np.isfinite(gaps)) and min(gaps) < 1e-4 and max(gaps) > 1e-3


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    return {name: v for name, v in metrics.items() if "second" not in name and "memory" not in name}


async def test_gradient_and_metrics_are_bit_equal_with_and_without(tiny_model, tmp_path):
    seen = {}
    for recorded in (True, False):
        with open_model(tiny_model, tmp_path, f"recorded {recorded}") as model:
            groups = await play(model) if recorded else copied(groups)  # noqa: F821
            trainer = model.backend.trainer
            rows = to_samples(groups, nb.TrainConfig()).samples
            config = nb.TrainConfig(kl_coef=0.1, entropy_coef=0.01, mask="token", record_tokens=recorded)
            trainer.forward_backward(rows, config, denominator=7.0)
            gradient = {name: p.grad.clone() for name, p in trainer.parameters.items()}
            trainer.optimizer.zero_grad(set_to_none=True)
            result = await nb.train_step(model, groups, config)
            seen[recorded] = gradient, comparable(result.metrics), trainer.policy()
            assert bool(tokens_folder(model)) is recorded
    assert seen[True][0].keys() == seen[False][0].keys()
    assert all(torch.equal(g, seen[False][0][name]) for name, g in seen[True][0].items())
    assert seen[True][1] == seen[False][1]
    for name, factors in seen[True][2].items():
        assert all(map(torch.equal, factors, seen[False][2][name]))


async def test_a_step_in_smaller_pieces_records_the_last_attempt(model):
    """Also of rows that lose their ends."""
    groups = await play(model)
    whole, samples = {}, to_samples(groups, nb.TrainConfig()).samples
    measured = await model.backend.forward_backward(samples, nb.TrainConfig(), loss_denominator=7.0)
    whole = [v.logprobs for v in measured.tokens]
    model.backend.trainer.optimizer.zero_grad(set_to_none=True)
    longest = max(len(s.ids_T) for s in samples)
    narrow(model.backend.trainer, longest)
    again = await model.backend.forward_backward(samples, nb.TrainConfig(), loss_denominator=7.0)
    assert again["out_of_memory_retries"] >= 1
    for one, other in zip(again.tokens, whole, strict=True):
        np.testing.assert_allclose(one.logprobs, other, atol=1e-5)


async def test_distillation_records_and_examples_do_not(model):
    groups = await play(model)
    await nb.train_step(model, groups, learning_rate=2e-2)
    groups = await play(model)
    await nb.distill_step(model, groups, "base")
    await nb.sft_step(model, [groups[0][0]])
    assert tokens_folder(model) == ["step_000000.safetensors", "step_000001.safetensors"]
    found = read_token_records(model.run.path, 1)
    assert found.keys() == {t.id for t in groups.trajectories}
    sampled = np.concatenate([np.float32(t.turns[0].logprobs) for t in groups.trajectories])
    trained = np.concatenate([found[t.id].trainer_logprobs for t in groups.trajectories])
    advantages = np.concatenate([found[t.id].advantages for t in groups.trajectories])
    np.testing.assert_allclose(sampled, trained, atol=1e-4)
    assert advantages.std() > 0.01, "a number of each token's own"


# ---- whole or nothing with the step ----------------------------------------------------------------


class Telling(nb.FakeBackend):
    """Says what its trainer made of each token: always what the engine sampled it with, less its step."""

    async def forward_backward(self, samples, config, *, loss_denominator):
        measured = StepStats(
            await super().forward_backward(samples, config, loss_denominator=loss_denominator)
        )
        measured.tokens = [
            TokenValues(
                np.float32(list(itertools.compress(s.logprobs_T, s.is_sampled_T))) - self.policy_version
            )
            for s in samples
        ]
        return measured


@pytest.fixture
def fake(tmp_path):
    with open_fake(tmp_path, backend=Telling()) as opened:
        yield opened


async def test_a_backend_that_says_nothing_of_tokens_leaves_no_file(tmp_path):
    with open_fake(tmp_path) as model:
        await nb.train_step(model, [group(0, 1)])
        assert tokens_folder(model) == [] and read_token_records(model.run.path, 0) == {}


async def test_a_skipped_step_leaves_no_file(fake):
    await nb.train_step(fake, [group(1, 1)])
    assert fake.run.step == 1 and tokens_folder(fake) == []


@pytest.mark.parametrize("where", ["publish_weights", "save", "seal", "metrics"])
async def test_an_undone_step_leaves_no_file(fake, where, monkeypatch):
    async def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    def raises(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    one = group(0, 1)
    if where in ("publish_weights", "save"):
        monkeypatch.setattr(fake.backend, where, fails)
    elif where == "seal":
        monkeypatch.setattr("artnb.store.checkpoints.fsync_folder", raises)
    else:
        monkeypatch.setattr(fake.run, "append_metrics", raises)
    with pytest.raises(RuntimeError, match="no"):
        await nb.train_step(fake, [one])
    assert tokens_folder(fake) == [] and fake.run.step == 0 and fake.run.checkpoints() == []
    monkeypatch.undo()
    await nb.train_step(fake, [one])
    assert read_token_records(fake.run.path, 0).keys() == {t.id for t in one}
    assert tokens_folder(fake) == ["step_000000.safetensors"]


async def test_a_full_disk_undoes_the_step(fake, monkeypatch):
    def full(*_: Any, **__: Any) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save", full)
    with pytest.raises(nb.CheckpointError, match=r"step_000000\.safetensors: No space left on device"):
        await nb.train_step(fake, [group(0, 1)])
    assert tokens_folder(fake) == [] and fake.run.step == fake.policy_version == 0


async def test_a_step_that_was_rolled_back_and_repeated_has_the_new_records(fake):
    first, again = group(0, 1), group(0, 1)
    await nb.train_step(fake, [first])
    fake.run.roll_back(0)
    assert read_token_records(fake.run.path, 0).keys() == {t.id for t in first}
    await nb.train_step(fake, [again], max_staleness=1)
    assert read_token_records(fake.run.path, 0).keys() == {t.id for t in again}
    fake.run.roll_back(0)
    await nb.train_step(fake, [first], max_staleness=2, record_tokens=False)
    assert tokens_folder(fake) == [], "what it held was of a step that does not count any more"


async def test_a_kill_leaves_the_records_of_finished_steps_alone(tmp_path):
    """Between the checkpoint's rename and the records', and before either."""
    with open_fake(tmp_path, backend=Telling()) as model:
        await nb.train_step(model, [group(0, 1)])
        folder = model.run.path / "tokens"
    done = folder / "step_000000.safetensors"
    content = done.read_bytes()
    done.rename(folder / ".step_000000.0123456789ab.tmp")
    (folder / ".step_000001.0123456789ab.tmp").write_bytes(content[:10])
    with open_fake(tmp_path, backend=Telling()) as model:
        assert model.run.step == 1
        assert tokens_folder(model) == ["step_000000.safetensors"] and done.read_bytes() == content
