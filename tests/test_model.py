"""The model in the kernel: made once, resumed, continued, given back."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from steps import LORA, SCENARIOS, group, open_fake, open_model, play

import artnb as nb
from artnb.chat_template import UnknownTemplateWarning
from artnb.model import _live
from artnb.store.owner import read_owner

pytestmark = pytest.mark.usefixtures("one_thread")


def adapter_of(model):
    return [p.detach().clone() for p in model.backend.trainer.parameters.values()]


def is_owned(root, run="demo"):
    return read_owner(Path(root) / run / "owner.json") is not None


class FailingBackend(nb.FakeBackend):
    """A FakeBackend that fails when it is told to load."""

    async def load(self, folder, *, policy_version):
        raise nb.CheckpointError("out of luck")


# Running the cell again


def test_the_same_cell_returns_the_same_model(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_model(tiny_model, "runs") as model:
        assert open_model(tiny_model, "runs") is model
        assert open_model(tiny_model, "runs", lora=nb.LoraConfig(rank=4)) is model
        assert not model.backend._closed and len(_live) == 1


def test_a_changed_configuration_closes_the_old_model_and_builds_a_new_one(tiny_model, tmp_path):
    with open_model(tiny_model, tmp_path) as old:
        new = open_model(tiny_model, tmp_path, engine_kwargs={"max_running": 4})
        assert new is not old and old.backend._closed and not new.backend._closed
        assert "closed" in repr(old) and is_owned(tmp_path)
        old.close()  # as a stale variable in another cell would
        assert (
            is_owned(tmp_path) and open_model(tiny_model, tmp_path, engine_kwargs={"max_running": 4}) is new
        )
        new.close()
    assert not is_owned(tmp_path)


def test_another_way_to_write_the_same_folder_does_not_make_a_second_model(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with open_fake(tmp_path) as old:
        with open_fake(tmp_path / "link" / ".." / tmp_path.name) as new:
            assert old.backend.closed and new.run.path == old.run.path


def test_closing_twice_is_fine_and_gives_the_run_back(tmp_path):
    model = open_fake(tmp_path)
    assert is_owned(tmp_path)
    model.close()
    model.close()
    assert model.backend.closed and not is_owned(tmp_path) and not _live
    assert "closed" in repr(model) and "closed" in model._repr_html_()


def test_leaving_the_with_block_closes_also_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), open_fake(tmp_path) as model:
        1 / 0  # noqa: B018
    assert model.backend.closed and not is_owned(tmp_path)


async def test_a_closed_model_says_so(tiny_model, tmp_path):
    with open_model(tiny_model, tmp_path) as model:
        groups = await play(model)
    with pytest.raises(nb.ArtnbError, match="closed"):
        await nb.train_step(model, groups)
    with pytest.raises(nb.ArtnbError, match=r"closed\. Run the cell that makes its model"):
        await play(model, max_failures=None)


def test_it_tells_what_it_is(tiny_model, tmp_path):
    with open_model(tiny_model, tmp_path) as model:
        for shown in (repr(model), model._repr_html_()):
            for fact in ("tiny-llama", "demo", "rank 4", "float32", "2048 tokens"):
                assert fact in shown
        assert model.describe()["policy_version"] == 0 and model.name == "demo"


# Resuming and continuing


async def test_resuming_picks_up_version_step_and_adapter(tiny_model, tmp_path):
    with open_model(tiny_model, tmp_path) as model:
        await nb.train_step(model, await play(model), learning_rate=1e-2)
        await nb.train_step(model, [])  # skipped: a step, not a version
        adapter = adapter_of(model)
    with open_model(tiny_model, tmp_path) as model:
        assert (model.run.step, model.policy_version, model.backend.engine.version) == (2, 1, 1)
        assert all(map(torch.equal, adapter, adapter_of(model)))
        assert list(model.run.steps(3)) == [2]
        assert {t.turns[0].policy_version for t in (await play(model)).trajectories} == {1}


@pytest.mark.parametrize("as_folder", [False, True])
async def test_another_runs_adapter_is_continued_with_a_fresh_optimizer(tiny_model, tmp_path, as_folder):
    with open_model(tiny_model, tmp_path, "first") as first:
        await nb.train_step(first, await play(first), learning_rate=1e-2)
        adapter, source = adapter_of(first), first.run.latest_checkpoint().path
    with open_model(tiny_model, tmp_path, "second", init_from=source if as_folder else "first") as second:
        assert all(map(torch.equal, adapter, adapter_of(second)))
        assert (second.policy_version, second.run.step) == (0, 0)
        assert second.backend.trainer.optimizer.state_dict()["state"] == {}
        assert any(e["kind"] == "initialised" and e["source"] == str(source) for e in second.run.events())
        await nb.train_step(second, await play(second), learning_rate=1e-2)
        trained = adapter_of(second)
    with open_model(tiny_model, tmp_path, "second", init_from="first") as again:
        assert again.policy_version == 1 and all(map(torch.equal, trained, adapter_of(again)))


async def test_an_adapter_that_does_not_fit_is_refused(tiny_model, tmp_path):
    with open_model(tiny_model, tmp_path, "first") as first:
        await nb.train_step(first, await play(first))
        folder = first.run.latest_checkpoint().path
    with pytest.raises(nb.RunMismatch, match=r"first was made with adapter\.rank 4 \(now 2\)"):
        open_model(tiny_model, tmp_path, "second", lora=nb.LoraConfig(rank=2), init_from="first")
    with pytest.raises(nb.CheckpointError, match=r"is \(4, 64\), this model's is \(2, 64\)"):
        open_model(tiny_model, tmp_path, "second", lora=nb.LoraConfig(rank=2), init_from=folder)
    with pytest.raises(nb.CheckpointError, match="neither a run"):
        open_fake(tmp_path, "second", init_from="nowhere")
    assert not (tmp_path / "second").exists()
    with open_fake(tmp_path, "empty"), pytest.raises(nb.CheckpointError, match="no checkpoint yet"):
        open_fake(tmp_path, "second", init_from="empty")
    assert not is_owned(tmp_path, "second") and not _live


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"lora": nb.LoraConfig(rank=2)}, r"adapter\.rank 4 \(now 2\)"),
        ({"lora": nb.LoraConfig(rank=4, targets=("q_proj",))}, r"adapter\.targets 'all-linear'"),
        ({"base": "other"}, r"base_model '.*tiny-llama.*' \(now '.*other"),
    ],
)
def test_another_model_under_the_runs_name_is_refused(tiny_model, tmp_path, changes, difference):
    open_model(tiny_model, tmp_path).close()
    base = changes.pop("base", None)
    if base is not None:
        (tmp_path / base).symlink_to(tiny_model)
    with pytest.raises(nb.RunMismatch, match=difference):
        open_model(tmp_path / base if base else tiny_model, tmp_path, **changes)
    assert not is_owned(tmp_path)
    open_model(tiny_model, tmp_path).close()


def test_the_fake_backend_has_an_identity_too(tmp_path):
    open_fake(tmp_path).close()
    with pytest.raises(nb.RunMismatch, match="base_model 'fake'"):
        open_fake(tmp_path, backend=nb.FakeBackend(base_model="other"))


async def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_serves(tmp_path):
    with open_fake(tmp_path, backend=nb.FakeBackend()) as model:
        for version in range(2):
            await nb.train_step(model, [group(0, 1, version=version)])
        newest = model.run.latest_checkpoint().path
    file = newest / "fake.json"
    file.write_bytes(file.read_bytes().replace(b"2", b"3"))  # the same size
    with pytest.raises(nb.CheckpointError, match=r"fake\.json is not what was written\. Remove that folder"):
        open_fake(tmp_path)
    assert not is_owned(tmp_path)
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    with open_fake(tmp_path) as model:
        assert (model.run.step, model.policy_version) == (1, 1)
        assert [r["step"] for r in model.run.metrics()] == [0]


def test_a_checkpoint_that_train_step_did_not_write_is_refused(tmp_path):
    with open_fake(tmp_path) as model:
        model.run.save_checkpoint(1, lambda folder: (folder / "notes").write_text("x"), {})
    with pytest.raises(nb.CheckpointError, match="does not say its policy version"):
        open_fake(tmp_path)
    assert not is_owned(tmp_path)


# What fails leaves nothing open


async def test_a_failed_construction_gives_everything_back(tmp_path):
    with open_fake(tmp_path) as model:
        await nb.train_step(model, [group(0, 1)])
    backend = FailingBackend()
    with pytest.raises(nb.CheckpointError, match="out of luck"):
        open_fake(tmp_path, backend=backend)
    assert backend.closed and not is_owned(tmp_path) and not _live


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine_kwargs": {"max_runing": 3}}, "max_runing"),
        ({"dtype": "float8"}, "dtype must be one of"),
        ({"keep_checkpoints": 0}, "keep_checkpoints must be >= 1"),
        ({"run": "a/b"}, "cannot name a run"),
    ],
)
def test_a_parameter_that_cannot_work_leaves_nothing_open(tiny_model, tmp_path, options, message):
    with pytest.raises(nb.ConfigurationError, match=message):
        open_model(tiny_model, tmp_path, **options)
    assert not _live and "artnb" not in " ".join(thread.name for thread in threading.enumerate())
    assert not (tmp_path / "demo").exists()


def test_without_torch_it_names_what_to_install(tmp_path):
    script = """
import sys
sys.modules["torch"] = None
import artnb as nb
try:
    nb.Model(root=sys.argv[1])
except nb.MissingDependency as error:
    print(error)
"""
    answer = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert 'pip install "artnb[cpu]"' in answer.stdout, answer.stderr
    assert not list(tmp_path.iterdir())


# Two processes

OTHER = textwrap.dedent("""
    import sys
    import artnb as nb
    from artnb.store import owner

    owner.HEARTBEAT_SECONDS = 0.1
    model = nb.Model(run="demo", root=sys.argv[1], backend=nb.FakeBackend())
    print(model.run.step, flush=True)
    sys.stdin.readline()
    try:
        nb.run(nb.train_step(model, []))
    except nb.RunInUse as error:
        print(error, flush=True)
""")


def other_process(root):
    command = [sys.executable, "-c", OTHER, str(root)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_run_has_one_writing_process_and_can_be_taken_over(tiny_model, tmp_path):
    with other_process(tmp_path) as process:
        assert process.stdout.readline() == "0\n"
        started = time.monotonic()
        with pytest.raises(nb.RunInUse, match=rf"process {process.pid} .*takeover=True"):
            nb.Model(tmp_path / "no such model", "demo", root=tmp_path)  # refused before anything is loaded
        with pytest.raises(nb.RunInUse):
            open_fake(tmp_path)
        assert time.monotonic() - started < 2
        with open_fake(tmp_path, takeover=True) as model:
            assert any(e["kind"] == "took_over" for e in model.run.events())
            assert json.loads((model.run.path / "owner.json").read_text())["pid"] == os.getpid()
            time.sleep(0.5)  # the other process learns of it at its next heartbeat
            process.stdin.write("\n")
            process.stdin.flush()
            assert "was taken over by process" in process.stdout.readline()
            assert model.run.step == 0


# Clients


async def test_calls_of_the_sync_client_in_a_rollouts_thread_are_recorded(tmp_path):
    def ask(model, scenario):
        messages = [{"role": "user", "content": scenario.id}]
        model.sync_client.chat.completions.create(model=model.name, messages=messages)
        return 1.0

    async def rollout(model, scenario):
        return await asyncio.to_thread(ask, model, scenario)

    with open_fake(tmp_path, backend=nb.FakeBackend(script=["hello"])) as model:
        groups = await nb.gather(rollout, SCENARIOS, model=model, group_size=2, progress=False)
        for trajectory in groups.trajectories:
            assert trajectory.reward == 1.0 and len(trajectory.turns) == 1
            assert trajectory.messages()[-1]["content"] == "hello"
        assert model.sync_client is model.sync_client
    names = [thread.name for thread in threading.enumerate()]
    for _ in range(100):
        if "artnb-sync-client" not in names:
            break
        time.sleep(0.02)
        names = [thread.name for thread in threading.enumerate()]
    assert "artnb-sync-client" not in names


async def test_the_sync_client_on_the_loops_own_thread_is_an_error_not_a_deadlock(tmp_path):
    with open_fake(tmp_path) as model, pytest.raises(RuntimeError, match="would block the event loop"):
        model.sync_client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x"}])


def test_serving_needs_the_token_and_ends_with_the_model(tmp_path):
    def models_of(server, token):
        request = urllib.request.Request(f"{server.url}/models", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return [entry["id"] for entry in json.load(answer)["data"]]

    with open_fake(tmp_path) as model:
        server = model.serve()
        assert "demo" in models_of(server, server.api_key)
        assert server.url.startswith("http://127.0.0.1:") and server.api_key not in repr(server)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            models_of(server, "guessed")
    with pytest.raises(urllib.error.URLError):
        models_of(server, server.api_key)


# A script


def test_run_runs_a_primitive_from_a_script(tmp_path):
    with open_fake(tmp_path) as model:
        assert len(nb.run(play(model, group_size=2))) == len(SCENARIOS)


async def test_run_inside_a_loop_says_what_to_do():
    with pytest.raises(nb.ConfigurationError, match="use `await`"):
        nb.run(asyncio.sleep(0))


def test_the_adapters_shape_is_the_one_asked_for(tiny_model, tmp_path):
    with open_model(tiny_model, tmp_path, lora=nb.LoraConfig(rank=3, targets=("q_proj", "v_proj"))) as model:
        names = {name.split(".")[-3] for name in model.backend.trainer.parameters}
        assert names == {"q_proj", "v_proj"}
        assert {p.shape[0] for n, p in model.backend.trainer.parameters.items() if "lora_A" in n} == {3}
    assert LORA.rank == 4


def test_variables_of_the_chat_template_reach_it_and_a_repr_says_what_is_not_guaranteed(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}{{ mood }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant{{ mood }}>{% endif %}"
    )
    with pytest.warns(UnknownTemplateWarning):
        model = open_model(folder, tmp_path, template_kwargs={"mood": "!"})
    with model:
        ids = model.app.renderer.render([{"role": "user", "content": "hi"}])
        assert "<user!>hi" in model.backend.tokenizer.decode(ids)
        assert "not guaranteed" in repr(model)
