"""A training step happens as a whole or not at all, and a run goes on where it stood."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from steps import copied, group, open_fake, open_model, play

import artnb as nb
from artnb.store import checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")  # sums over two threads are other sums
LEARN = {"learning_rate": 1e-2}


@pytest.fixture
def model(tiny_model, tmp_path):
    with open_model(tiny_model, tmp_path) as opened:
        yield opened


@pytest.fixture
def twin(tiny_model, tmp_path):
    """The same model again, which nothing disturbs."""
    with open_model(tiny_model, tmp_path, "twin") as opened:
        yield opened


@pytest.fixture
def fake(tmp_path):
    with open_fake(tmp_path) as opened:
        yield opened


def state_of(model):
    """Everything that a step changes: adapter, optimizer, what the engine serves, and the run."""
    backend = model.backend
    moments = backend.trainer.optimizer.state_dict()["state"]
    probe = list(range(3, 40))
    return {
        "adapter": [p.detach().clone() for p in backend.trainer.parameters.values()],
        "moments": [moments[i][name].clone() for i in sorted(moments) for name in sorted(moments[i])],
        "gradients": [p.grad for p in backend.trainer.parameters.values() if p.grad is not None],
        "served": [backend.engine.call(lambda: backend.engine.score(probe)).result()],
        "trained": [backend._compute.submit(lambda: backend.trainer.score(probe)).result()],
        "version": (model.policy_version, backend.engine.version),
        "run": (model.run.step, model.run.metrics()),
        "files": tuple(sorted(str(p) for p in (model.run.path / "checkpoints").glob("*"))),
    }


def assert_same(state, other):
    for name, value in state.items():
        if isinstance(value, list):
            assert len(value) == len(other[name]), name
            assert all(map(torch.equal, value, other[name])), name
        else:
            assert value == other[name], name


def disturb_at(moment, model, monkeypatch, disturb):
    """Call ``disturb`` on the event loop when a step comes to this moment."""
    loop = asyncio.get_running_loop()
    if moment == "seal":
        seal = checkpoints.seal

        def disturbed_seal(*arguments):
            loop.call_soon_threadsafe(disturb)
            time.sleep(0.05)
            seal(*arguments)

        monkeypatch.setattr(checkpoints, "seal", disturbed_seal)
        return
    original = getattr(model.backend, moment)

    async def disturbed(*arguments, **options):
        loop.call_soon(disturb)
        return await original(*arguments, **options)

    monkeypatch.setattr(model.backend, moment, disturbed)


@pytest.mark.parametrize("moment", ["forward_backward", "optim_step", "publish_weights", "save", "seal"])
@pytest.mark.parametrize("way", ["cancel", "interrupt"])
async def test_a_step_that_is_cut_short_leaves_no_trace_and_can_be_repeated(
    model, twin, monkeypatch, moment, way
):
    first = await play(model)
    for one in (model, twin):
        await nb.train_step(one, copied(first), **LEARN)
    groups, before = await play(model), state_of(model)
    task = asyncio.ensure_future(nb.train_step(model, groups, microbatch_tokens=64, **LEARN))
    with monkeypatch.context() as patch:
        disturb_at(moment, model, patch, task.cancel if way == "cancel" else _press_stop)
        with pytest.raises(asyncio.CancelledError if way == "cancel" else nb.Interrupted) as caught:
            await task
    if way == "interrupt":
        assert "the policy is the one before it" in str(caught.value) and caught.value.partial is None
    assert_same(before, state_of(model))
    again = await nb.train_step(model, groups, microbatch_tokens=64, **LEARN)
    other = await nb.train_step(twin, copied(groups), microbatch_tokens=64, **LEARN)
    assert again.metrics["loss"] == other.metrics["loss"]
    after, undisturbed = state_of(model), state_of(twin)
    for name in ("adapter", "moments", "served", "trained"):
        assert all(map(torch.equal, after[name], undisturbed[name])), name


def _press_stop():
    signal.raise_signal(signal.SIGINT)


async def test_a_time_limit_around_a_step_undoes_it(model, monkeypatch):
    groups, before = await play(model), state_of(model)
    train = model.backend.trainer.forward_backward
    monkeypatch.setattr(
        model.backend.trainer, "forward_backward", lambda *a, **k: (time.sleep(0.2), train(*a, **k))[1]
    )
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await nb.train_step(model, groups)
    assert_same(before, state_of(model))


async def test_a_second_cancellation_waits_for_the_undoing(fake, monkeypatch):
    ended = []
    restore = fake.backend.restore

    async def slow_restore(snapshot):
        task.cancel()
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.05)
        await restore(snapshot)
        ended.append(True)

    monkeypatch.setattr(fake.backend, "restore", slow_restore)
    task = asyncio.ensure_future(nb.train_step(fake, [group(0, 1)]))
    disturb_at("publish_weights", fake, monkeypatch, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended and fake.policy_version == 0


def leftovers(model):
    return list(model.run.path.rglob(".step_*"))


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_checkpoint_is_not_torn_away_while_it_is_written(fake, monkeypatch, is_first):
    if not is_first:  # the first step also keeps the policy before it
        await nb.train_step(fake, [group(0, 1)])
        fake.rollback(0)
    ended = []
    save = fake.backend.save

    async def slow_save(folder):
        task.cancel()
        await asyncio.sleep(0.05)
        await save(folder)  # into a folder that is still there
        ended.append(True)

    monkeypatch.setattr(fake.backend, "save", slow_save)
    task = asyncio.ensure_future(nb.train_step(fake, [group(0, 1)]))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended and fake.policy_version == 0
    assert not fake.run.checkpoints() and not leftovers(fake)


async def test_an_interrupt_that_comes_too_late_is_still_heard(fake, monkeypatch):
    append = fake.run.append_metrics

    def append_and_interrupt(record):
        append(record)
        _press_stop()

    with monkeypatch.context() as patch:
        patch.setattr(fake.run, "append_metrics", append_and_interrupt)
        with pytest.raises(nb.Interrupted, match="just after the step was finished") as caught:
            await nb.train_step(fake, [group(0, 1)])
    assert caught.value.partial.policy_version == 1
    assert fake.run.step == 1 and fake.policy_version == 1 and len(fake.run.checkpoints()) == 1


# Errors


async def test_a_gradient_that_is_not_finite_undoes_the_updates_before_it(model, monkeypatch):
    groups, before = await play(model), state_of(model)
    optim_step, calls = model.backend.trainer.optim_step, []

    def spoilt(config):
        calls.append(1)
        if len(calls) == 2:
            for parameter in model.backend.trainer.parameters.values():
                parameter.grad.fill_(float("nan"))
        return optim_step(config)

    with monkeypatch.context() as patch:
        patch.setattr(model.backend.trainer, "optim_step", spoilt)
        with pytest.raises(FloatingPointError, match="the gradient's norm is nan"):
            await nb.train_step(model, groups, minibatches=2, **LEARN)
    assert len(calls) == 2
    assert_same(before, state_of(model))
    assert (await nb.train_step(model, groups, minibatches=2, **LEARN)).policy_version == 1


async def test_engine_and_trainer_that_disagree_undo_the_step(model, monkeypatch):
    groups, before = await play(model), state_of(model)
    with monkeypatch.context() as patch:
        patch.setattr(model.backend.trainer, "score", lambda ids: torch.zeros(len(ids) - 1))
        with pytest.raises(nb.PublicationError, match="differ by"):
            await nb.train_step(model, groups, **LEARN)
    assert_same(before, state_of(model))


@contextlib.contextmanager
def files_of_at_most(size):
    """A disk that is nearly full: longer files cannot be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_full_disk_undoes_the_step_and_it_can_be_repeated(model, is_first):
    if not is_first:  # the first step also keeps the policy before it
        await nb.train_step(model, await play(model), **LEARN)
        model.rollback(0)
    groups, before = await play(model), state_of(model)
    with files_of_at_most(20_000), pytest.raises(nb.CheckpointError, match=r"File too large|free space"):
        await nb.train_step(model, groups, **LEARN)
    assert_same(before, state_of(model))
    assert not leftovers(model)
    assert (await nb.train_step(model, groups, **LEARN)).policy_version == 1
    model.run.latest_checkpoint().verify()


async def test_a_checkpoint_without_its_metrics_is_taken_back(fake):
    groups, metrics = [group(0, 1)], fake.run.path / "metrics.jsonl"
    metrics.mkdir()  # nothing can be appended to it
    with pytest.raises(OSError, match=r"cannot write .*metrics\.jsonl"):
        await nb.train_step(fake, groups)
    metrics.rmdir()
    assert fake.run.step == 0 and fake.policy_version == 0 and fake.run.checkpoints() == []
    assert (await nb.train_step(fake, groups)).policy_version == 1
    assert len(fake.run.metrics()) == len(fake.run.checkpoints()) == 1


async def test_a_checkpoint_that_cannot_be_put_in_place_undoes_the_step(fake, monkeypatch):
    def refuse(source, target):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(nb.CheckpointError, match="Input/output error"):
            await nb.train_step(fake, [group(0, 1)])
    assert fake.run.step == 0 and fake.policy_version == 0 and fake.run.metrics() == []
    assert (await nb.train_step(fake, [group(0, 1)])).policy_version == 1


async def test_a_run_that_was_taken_over_is_not_written(fake):
    owner = json.loads((fake.run.path / "owner.json").read_text())
    (fake.run.path / "owner.json").write_text(json.dumps(owner | {"id": "other"}))
    fake.run._owner._renew()
    with pytest.raises(nb.RunInUse, match="was taken over"):
        await nb.train_step(fake, [group(0, 1)])
    assert fake.policy_version == 0


# Resuming


async def test_a_resumed_run_has_the_loss_of_one_that_never_stopped(tiny_model, tmp_path, twin):
    model = open_model(tiny_model, tmp_path)
    for _ in range(3):
        groups = await play(twin)
        undisturbed = await nb.train_step(twin, groups, **LEARN)
        result = await nb.train_step(model, copied(groups), **LEARN)
        assert (result.step, result.policy_version) == (undisturbed.step, undisturbed.policy_version)
        for name in ("loss", "grad_norm", "entropy"):
            assert result.metrics[name] == undisturbed.metrics[name], name
        model.close()
        model = open_model(tiny_model, tmp_path)
    resumed, never_stopped = state_of(model), state_of(twin)
    for name in ("adapter", "moments", "served", "trained"):
        assert all(map(torch.equal, resumed[name], never_stopped[name])), name
    assert [r["step"] for r in model.run.metrics()] == [0, 1, 2]
    model.close()


CHILD = textwrap.dedent("""
    import asyncio, json, sys, time
    from pathlib import Path

    base, root, file, tests = sys.argv[1:]
    sys.path.insert(0, tests)
    from steps import open_model
    import artnb as nb

    steps = json.loads(Path(file).read_text())
    groups = [[nb.TrajectoryGroup.from_json(group) for group in step] for step in steps]

    async def main():
        model = open_model(base, root)
        await nb.train_step(model, groups[0], learning_rate=1e-2)
        train = model.backend.trainer.forward_backward

        def slowly(*arguments, **options):
            print("training", flush=True)
            time.sleep(0.5)
            return train(*arguments, **options)

        model.backend.trainer.forward_backward = slowly
        try:
            await nb.train_step(model, groups[1], learning_rate=1e-2)
        except nb.Interrupted:
            print("interrupted", model.run.step, model.policy_version, flush=True)
        model.backend.trainer.forward_backward = train
        result = await nb.train_step(model, groups[1], learning_rate=1e-2)
        print(result.metrics["loss"].hex(), flush=True)
        time.sleep(60)

    asyncio.run(main())
""")


async def test_a_process_that_is_interrupted_and_then_killed_loses_nothing(tiny_model, tmp_path, twin):
    recorded, results = [], []
    for _ in range(3):
        groups = await play(twin)
        recorded.append([one.to_json() for one in groups])
        results.append(await nb.train_step(twin, groups, **LEARN))
    file = tmp_path / "groups.json"
    file.write_text(json.dumps(recorded))
    command = [
        sys.executable,
        "-c",
        CHILD,
        str(tiny_model),
        str(tmp_path),
        str(file),
        str(Path(__file__).parent),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted 1 1\n"
        assert process.stdout.readline() == results[1].metrics["loss"].hex() + "\n"
        with pytest.raises(nb.RunInUse, match=f"process {process.pid}"):
            open_model(tiny_model, tmp_path)
        process.kill()
    with open_model(tiny_model, tmp_path) as model:
        assert (model.run.step, model.policy_version) == (2, 2)
        groups = [nb.TrajectoryGroup.from_json(record) for record in recorded[2]]
        result = await nb.train_step(model, groups, **LEARN)
        assert result.metrics["loss"] == results[2].metrics["loss"]
        assert_same({"adapter": state_of(twin)["adapter"]}, state_of(model))


async def test_a_kill_between_checkpoint_and_metrics_loses_no_metrics(tmp_path):
    with open_fake(tmp_path) as model:
        for version in range(2):
            await nb.train_step(model, [group(0, 1, version=version)])
        path, lines = model.run.path / "metrics.jsonl", model.run.metrics()
    text = path.read_text().splitlines(keepends=True)
    path.write_text(text[0])
    with open_fake(tmp_path) as model:
        assert model.run.step == 2 and [r["step"] for r in model.run.metrics()] == [0, 1]
        assert model.run.metrics()[1]["reward_mean"] == lines[1]["reward_mean"]
        await nb.train_step(model, [group(0, 1, version=2)])
    with open_fake(tmp_path) as model:
        assert [r["step"] for r in model.run.metrics()] == [0, 1, 2]


async def test_a_second_step_while_one_is_under_way_is_refused_and_the_first_is_whole(model, twin):
    groups = await play(model)
    first = asyncio.create_task(nb.train_step(model, groups, **LEARN))
    await asyncio.sleep(0)
    with pytest.raises(nb.RunInUse, match="under way"):
        await nb.train_step(model, copied(groups), **LEARN)
    other = await nb.train_step(twin, copied(groups), **LEARN)  # another model's is none of its business
    result = await first
    assert result.metrics["loss"] == other.metrics["loss"] and model.run.step == 1
    again = await nb.train_step(model, await play(model), **LEARN)
    assert again.policy_version == 2, "and the next one may come"
