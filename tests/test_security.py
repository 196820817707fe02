"""What may a stranger do: who listens, what is accepted, where a name may lead, what a file may run?"""

from __future__ import annotations

import http.client
import json
import os
import pickle
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from steps import open_fake, open_model

import artnb as nb
from artnb import serve as serving


def listening() -> list[str]:
    """Addresses on which this process accepts connections, as the kernel tells (Linux)."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(entry))
        except OSError:  # closed meanwhile
            continue
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                words = bytes.fromhex(local.partition(":")[0])
                address = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.append(socket.inet_ntop(family, address))
    return found


PAIR = [nb.Scenario("x"), nb.Scenario("y")]


async def play(model: nb.Model, scenario: nb.Scenario) -> nb.Trajectory:
    messages = [{"role": "user", "content": scenario.id}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
    return nb.Trajectory(
        [*messages, reply.choices[0]], reward=len(reply.choices[0].message.content or "") % 2
    )


async def test_nothing_listens_until_one_asks_and_then_on_loopback_alone(tmp_path: Path):
    before = listening()
    with open_fake(tmp_path, backend=nb.FakeBackend(script=["a", "bb"])) as model:
        groups = await nb.gather(play, PAIR, model=model, group_size=2, progress=False)
        await nb.train_step(model, groups)
        await nb.evaluate(play, [nb.Scenario("z")], model=model, progress=False)
        nb.Dashboard(model.run)
        nb.browse(model.run)
        nb.chat(model)
        assert listening() == before
        with model.serve():
            assert listening() == [*before, "127.0.0.1"]
        assert listening() == before


def request(server: Any, body: bytes, *, length: int | None = None, token: str | None = None) -> int:
    """The status of a raw request; ``length`` lies about the body's."""
    url = urlsplit(server.url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=30)
    try:
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Authorization", f"Bearer {server.api_key if token is None else token}")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body) if length is None else length))
        connection.endheaders()
        connection.send(body)
        return connection.getresponse().status
    finally:
        connection.close()


def ask(model: nb.Model, **more: Any) -> bytes:
    messages = [{"role": "user", "content": "hi"}]
    return json.dumps({"model": model.name, "messages": messages, "max_tokens": 4, **more}).encode()


def test_the_server_bounds_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "_MAX_BODY", 1000)
    with open_fake(tmp_path, backend=nb.FakeBackend(script=["a"])) as model, model.serve() as server:
        assert request(server, ask(model)) == 200
        assert request(server, ask(model, padding="x" * 2000)) == 413
        assert request(server, b"\xff\xfe nonsense") == 400
        assert request(server, b"[" * 900) == 400
        for token in ("", "x", server.api_key[:-1], server.api_key + "x", "é"):
            assert request(server, ask(model), token=token.encode("utf-8").decode("latin-1")) == 401
        assert request(server, ask(model)) == 200


def test_the_server_bounds_how_many_call_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "_MOST_CONNECTIONS", 3)
    backend = nb.FakeBackend(script=["a"], delay=60.0)
    with open_fake(tmp_path, backend=backend) as model, model.serve() as server:
        slow = [threading.Thread(target=_hang, args=(server, ask(model)), daemon=True) for _ in range(2)]
        for thread in slow:
            thread.start()
        deadline = time.monotonic() + 20
        while backend.active < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert backend.active == 2
        assert request(server, ask(model)) == 503


def _hang(server: Any, body: bytes) -> None:
    try:
        request(server, body)
    except (OSError, http.client.HTTPException):  # the server was closed meanwhile
        return


BAD_NAMES = ["../up", "a/b", "..", ".", "", "a\\b", "/etc/passwd", "a\0b", "nul\n", "x" * 300]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_no_name_leads_out_of_the_root(tmp_path: Path, name: str):
    root = tmp_path / "runs"
    root.mkdir()
    with pytest.raises(nb.ArtnbError):
        nb.Model(run=name, root=root, backend=nb.FakeBackend())
    with pytest.raises(nb.ArtnbError):
        nb.load_environment(name)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


async def test_no_policy_s_name_leads_out_of_the_run(tmp_path: Path):
    import openai

    with open_fake(tmp_path, backend=nb.FakeBackend(script=["a"])) as model:
        for policy in ("../../x", "step_000001/../../x", "/etc", "step_1\n", "step_000001\0"):
            with pytest.raises(openai.NotFoundError):
                await model.client.chat.completions.create(
                    model=f"{model.name}@{policy}", messages=[{"role": "user", "content": "hi"}]
                )


class _Runs:
    """Unpickled, it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


async def test_a_stranger_s_checkpoint_runs_no_code(tiny_model: Path, tmp_path: Path):
    """Pickles beside, and in place of, what is read are never loaded."""
    with open_model(tiny_model, tmp_path / "a") as model:
        groups = await nb.gather(play, PAIR, model=model, group_size=4, progress=False)
        for number, trajectory in enumerate(groups.trajectories):
            trajectory.reward = float(number % 2)
        await nb.train_step(model, groups)
        given = model.run.latest_checkpoint()
        assert given is not None
        strange = tmp_path / "strange"
        shutil.copytree(given.path, strange)
    mark = tmp_path / "ran"
    evil = pickle.dumps(_Runs(mark))
    for name in ("adapter_model.bin", "optimizer.pt", "pytorch_model.bin", "training_args.bin", "state.pkl"):
        (strange / name).write_bytes(evil)
    with open_model(tiny_model, tmp_path / "b", init_from=strange):
        pass
    assert not mark.exists()
    for weights in strange.glob("*.safetensors"):
        weights.write_bytes(evil)
    with pytest.raises(nb.CheckpointError), open_model(tiny_model, tmp_path / "c", init_from=strange):
        pass
    assert not mark.exists()
    pickle.loads(evil)
    assert mark.exists(), "it would have run"
