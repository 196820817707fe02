"""Does a key ever reach an output, a log, a run's folder, a checkpoint or an exported notebook?

A canary is planted in every channel that keys come through: an argument, the environment, a request's
headers sent back by a server in its error, the text of an exception, a tool's error. Then everything that a
run has written is searched.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ENVIRONMENT, ARGUMENT = "cnry-environment-5f0c2a91", "cnry-argument-77d1e3b8"
CANARIES = (ENVIRONMENT, ARGUMENT)

CELLS = [
    """
import asyncio, json, logging, os
from pathlib import Path
import artnb as nb
from artnb.judging.loopback import LoopbackJudge, Says, answer

logging.basicConfig(level=logging.DEBUG, filename="debug.log")
KEY = Path("key.txt").read_text()
model = nb.Model(run="canary", root="runs", backend=nb.FakeBackend(script=["yes", "no"]))
server = model.serve()
server
""",
    """
async def rollout(model, scenario):
    if scenario == "fails":
        raise ConnectionError(f"GET /?key={os.environ['EXAMPLE_API_KEY']}: refused")
    messages = [{"role": "user", "content": "a question"}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
    return nb.Trajectory([*messages, reply.choices[0]])

quiet = {"model": model, "progress": False}
groups = await nb.gather(rollout, ["fine", "fails"], group_size=2, max_failures=9, **quiet)
groups
""",
    """
def repeats_the_header(asked):
    problem = {"message": f"no such thing: {asked.headers}", "type": "invalid_request_error"}
    return Says(status=400, raw=json.dumps({"error": problem}))

with LoopbackJudge(repeats_the_header) as judge:
    judge.api_key = KEY
    try:
        await nb.judge(groups, judge="x", base_url=judge.base_url, api_key=KEY, attempts=2, **quiet)
    except nb.ArtnbError as error:
        print(error)
""",
    """
def scores(asked):
    return Says(answer({name: i / 2 for i, name in enumerate(asked.attempts)}))

with LoopbackJudge(scores) as judge:
    judge.api_key = KEY
    judged = await nb.judge(groups, judge="x", base_url=judge.base_url, api_key=KEY, **quiet)
await nb.train_step(model, judged)
model.run.note("a note")
nb.Dashboard(model.run)
""",
    "judged.trajectories[0]",
    "print(model.run.report())",
    "nb.doctor()",
    "model.close()",
]


def holders(folder: Path, canary: str) -> list[str]:
    """Files that hold the canary, plain or as a header writes it."""
    spellings = [canary, canary[::-1], base64.b64encode(canary.encode()).decode()]
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file()
        and path.name != "key.txt"
        and any(spelling.encode() in path.read_bytes() for spelling in spellings)
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a notebook ran whose channels hold canaries, with its outputs and its export."""
    folder = tmp_path_factory.mktemp("canaries")
    cells = [nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "in.ipynb")
    (folder / "key.txt").write_text(ARGUMENT)
    run = subprocess.run(
        [sys.executable, "-m", "papermill", "in.ipynb", "out.ipynb", "-k", "python3"],
        cwd=folder,
        env={**os.environ, "EXAMPLE_API_KEY": ENVIRONMENT, "OPENAI_API_KEY": ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=120,
    )
    (folder / "stdout.txt").write_text(run.stdout)
    (folder / "stderr.txt").write_text(run.stderr)
    assert run.returncode == 0, run.stderr[-3000:]
    html = [sys.executable, "-m", "nbconvert", "--to", "html", "out.ipynb"]
    subprocess.run(html, cwd=folder, check=True, capture_output=True, timeout=120)
    return folder


@pytest.mark.parametrize("canary", CANARIES)
def test_nothing_that_is_written_holds_a_key(written: Path, canary: str):
    names = {path.name for path in written.rglob("*") if path.is_file()}
    assert {"out.ipynb", "out.html", "debug.log", "events.jsonl", "metrics.jsonl"} <= names, names
    assert holders(written, canary) == []


def test_a_key_that_is_written_would_be_found(written: Path, tmp_path: Path):
    (tmp_path / "leak.jsonl").write_text(f'{{"key": "{ENVIRONMENT}"}}')
    assert holders(tmp_path, ENVIRONMENT) == ["leak.jsonl"]
    text = "".join(path.read_text(errors="replace") for path in written.rglob("*.jsonl"))
    assert "[EXAMPLE_API_KEY]: refused" in text, "the failure itself is kept, with the key's name"
