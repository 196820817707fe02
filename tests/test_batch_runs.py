"""Notebooks that run without anybody before them: exit codes, what the journal says, what is left to read."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

import artnb as nb
from artnb.clean import clean_notebook
from artnb.cli import main
from artnb.errors import ConfigurationError, RunFailed
from artnb.report import RESULT_TYPE
from artnb.store import RunFolder
from artnb.store.owner import is_stale, read_owner

PATIENCE = 120.0
PARAMETERS = """\
run_name = "toy"
out_dir = "."
steps = 3
learning_rate = 1e-3
delay = 0.0
trouble = "none"
"""
CHECK = """\
import artnb as nb
p = nb.parameters(globals(), extra={"delay": 0.0, "trouble": ""})
p
"""
TRAIN = """\
import os, signal, time
import warnings

warnings.simplefilter("ignore")
model = nb.Model(run=p.run_name, root=p.out_dir, backend=nb.FakeBackend(delay=p.delay))

async def rollout(model, scenario):
    messages = [{"role": "user", "content": "<b>say</b> something"}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=6)
    played = nb.Trajectory([*messages, reply.choices[0]], scenario_id=scenario.id)
    played.reward = len(set(played.turns[0].completion_ids)) / 6
    return played

table = nb.RewardTable(model.run)
for step in model.run.steps(p.steps):
    if step == 2 and p.trouble == "error":
        raise ValueError("the dice fell off the table")
    if step == 2 and p.trouble == "kill" and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 2 and p.trouble == "hang":
        time.sleep(1000)
    if step == 2 and p.trouble == "stop":
        model.run.ask("stop")
    groups = await nb.gather(rollout, [nb.Scenario(id="toy/train/1")], model=model, group_size=4)
    table.add(await nb.train_step(model, groups, learning_rate=p.learning_rate))
"""
REPORT = """\
nb.report(model.run, notebook="toy", parameters=p)
"""
END = """\
model.run.report()
model.close()
model.run.assert_ok(p.steps)
"""


def write_notebook(path: Path) -> Path:
    """A training notebook without a model: a tenth of a second a step."""
    cells = [nbformat.v4.new_code_cell(source) for source in (PARAMETERS, CHECK, TRAIN, REPORT, END)]
    cells[0].metadata["tags"] = ["parameters"]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(notebook, path)
    return path


class Batch:
    """A papermill process, its run and the notebook it leaves."""

    def __init__(self, folder: Path, *arguments: str, **parameters: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.notebook = folder / "done.ipynb"
        self.run = RunFolder(folder / "toy")
        self.log_file = folder / "log.txt"
        given = [part for name, value in parameters.items() for part in ("-p", name, str(value))]
        source = write_notebook(folder / "toy.ipynb")
        command = [
            *(sys.executable, "-m", "papermill", str(source), str(self.notebook), "--cwd", str(folder)),
            *("-k", "python3", "--no-progress-bar", "--log-output", *arguments, *given),
        ]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ARTNB_", "JPY_", "VSCODE_"))}
        with open(self.log_file, "w") as log:
            self.process = subprocess.Popen(command, env=inherited, stdout=log, stderr=log)

    def ends(self) -> int:
        """Wait for its end; the exit code."""
        return self.process.wait(PATIENCE)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def steps(self) -> list[int]:
        return [record["step"] for record in self.run.metrics()]

    def page(self) -> nbformat.NotebookNode:
        return nbformat.read(self.notebook, as_version=4)


def until(is_reached: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not is_reached():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Batch]]:
    """All of them at once: most of their time is spent on starting kernels."""
    root = tmp_path_factory.mktemp("batches")
    found = {
        "success": Batch(root / "success"),
        "error": Batch(root / "error", trouble="error"),
        "misspelt": Batch(root / "misspelt", learning_rat=1e-4),
        "timeout": Batch(root / "timeout", "--execution-timeout", "15", trouble="hang"),
        "kill": Batch(root / "kill", trouble="kill"),
        "stop": Batch(root / "stop", trouble="stop", steps=5),
        "term": Batch(root / "term", steps=500, delay=0.05),
    }
    yield found
    for batch in found.values():
        if batch.process.poll() is None:
            batch.process.kill()
            batch.process.wait()


# ---- exit codes and journals --------------------------------------------------------------------


def test_a_run_that_comes_out_ends_with_zero_and_a_result(batches):
    batch = batches["success"]
    assert batch.ends() == 0, batch.log
    assert batch.steps == [0, 1, 2]
    result = batch.run.result()
    assert (result["status"], result["steps"], result["steps_asked"]) == ("complete", 3, 3)
    assert len(result["reward_by_step"]) == 3 and result["notebook"] == "toy"
    batch.run.assert_ok()


def test_the_result_stands_in_the_notebook_once(batches):
    batches["success"].ends()
    outputs = [output for cell in batches["success"].page().cells for output in cell.get("outputs", [])]
    shown = [output["data"] for output in outputs if RESULT_TYPE in output.get("data", {})]
    assert len(shown) == 1
    assert shown[0][RESULT_TYPE]["reward_by_step"] == batches["success"].run.result()["reward_by_step"]
    assert "text/html" in shown[0] and "text/plain" in shown[0]


def test_the_log_has_a_line_for_each_step(batches):
    batches["success"].ends()
    assert len(re.findall(r"^step [012]: mean reward [\d.]+, ", batches["success"].log, re.MULTILINE)) == 3


def test_an_error_in_a_cell_ends_with_one_and_still_leaves_a_result(batches):
    batch = batches["error"]
    assert batch.ends() == 1
    assert batch.steps == [0, 1]
    result = batch.run.result()
    assert (result["status"], result["steps"], result["steps_asked"]) == ("incomplete", 2, 3)
    assert result["last_error"] == "ValueError: the dice fell off the table"
    assert read_owner(batch.run.path / "owner.json") is None  # given back


def test_a_misspelt_parameter_ends_with_one_before_anything_starts(batches):
    batch = batches["misspelt"]
    assert batch.ends() == 1
    assert "did you mean 'learning_rate'" in batch.log
    assert not batch.run.path.exists()


def test_a_timeout_ends_with_an_error_and_leaves_what_was_done(batches):
    batch = batches["timeout"]
    assert batch.ends() != 0
    assert batch.steps == [0, 1]
    with pytest.raises(RunFailed, match="2 of 3 steps"):
        batch.run.assert_ok()


def test_a_dead_kernel_ends_with_an_error_whatever_papermills_metadata_say(batches):
    batch = batches["kill"]
    assert batch.ends() != 0
    assert batch.steps == [0, 1]
    assert batch.run.result() is None  # nobody was left to write it
    with pytest.raises(RunFailed, match="2 of 3 steps"):
        batch.run.assert_ok()


def test_a_killed_run_is_finished_by_the_same_command(batches):
    killed = batches["kill"]
    killed.ends()
    until(lambda: _is_free(killed.run), "the kernel to end")
    again = Batch(killed.run.path.parent, trouble="kill")
    assert again.ends() == 0, again.log
    assert again.steps == [0, 1, 2] and again.run.result()["status"] == "complete"


def test_a_run_that_was_stopped_reports_and_ends_with_an_error(batches):
    batch = batches["stop"]
    assert batch.ends() == 1
    assert "it took 3 of 5 steps: it was stopped (asked for)" in batch.log
    result = batch.run.result()
    assert (result["notebook"], result["status"]) == ("toy", "stopped")  # its report cell ran


@pytest.mark.slow
def test_ctrl_c_gives_the_run_back_and_the_same_command_goes_on(tmp_path):
    batch = Batch(tmp_path / "int", steps=500, delay=0.05)
    until(lambda: len(batch.steps) >= 2, "two steps")
    batch.process.send_signal(signal.SIGINT)
    assert batch.ends() != 0
    until(lambda: _is_free(batch.run), "the kernel to end")
    done = batch.run.trained_steps
    assert batch.steps == list(range(done)) and done >= 2
    again = Batch(tmp_path / "int", steps=done + 2)
    assert again.ends() == 0, again.log
    assert again.steps == list(range(done + 2))


def test_a_terminated_run_goes_on_under_the_same_name(batches):
    batch = batches["term"]
    until(lambda: len(batch.steps) >= 2, "two steps")
    batch.process.send_signal(signal.SIGTERM)
    assert batch.ends() != 0
    until(lambda: _is_free(batch.run), "the kernel to end")
    done = batch.run.trained_steps
    assert done >= 2
    again = Batch(batch.run.path.parent, steps=done + 2)
    assert again.ends() == 0, again.log
    assert again.steps == list(range(done + 2))
    assert again.run.result()["status"] == "complete"


def _is_free(run: RunFolder) -> bool:
    owner = read_owner(run.path / "owner.json")
    return owner is None or is_stale(owner)


# ---- what is left to read -----------------------------------------------------------------------


def test_a_batch_notebook_is_small_and_has_no_widgets(batches):
    batches["success"].ends()
    page = batches["success"].page()
    assert "widgets" not in page.metadata
    outputs = [output for cell in page.cells for output in cell.get("outputs", [])]
    assert not any("widget" in kind for output in outputs for kind in output.get("data", {}))
    assert batches["success"].notebook.stat().st_size < 200_000


def test_the_exported_page_reads_without_style_and_scripts(batches):
    from nbconvert import HTMLExporter

    batches["success"].ends()
    exported, _ = HTMLExporter().from_filename(str(batches["success"].notebook))
    text = plain_text(exported)
    for step, reward in enumerate(batches["success"].run.result()["reward_by_step"]):
        assert re.search(rf"step {step}: mean reward {reward:.3f}", text)
    assert "Training" in text and "mean reward" in text and "report.html" in text
    for lost in ("Error displaying", "not able to be represented", "FloatProgress", "data-mime-type"):
        assert lost not in text


def plain_text(page: str) -> str:
    """What is left where styles, scripts and pictures are taken out, as GitHub does."""
    for gone in ("style", "script", "svg", "head"):
        page = re.sub(rf"<{gone}\b.*?</{gone}>", "", page, flags=re.DOTALL | re.IGNORECASE)
    return html.unescape(re.sub(r"<[^>]+>", " ", page))


def test_nothing_of_ours_uses_a_bar_that_github_refuses(repository):
    for path in (repository / "artnb").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) tqdm", path.read_text(encoding="utf-8"), re.MULTILINE), path


def test_a_notebook_of_many_steps_stays_under_two_megabytes():
    table = nb.RewardTable(enabled=False)
    table.records = [
        {"step": i, "reward_mean": i / 5000, "reward_std": 0.1, "entropy": 1.0, "kl_k3": 0.1, "seconds": 2.0}
        for i in range(5000)
    ]
    lines = 5000 * len("step 4999: mean reward 0.500, 10.2 s\n")
    assert len(table._repr_html_()) + len(repr(table)) + lines < 2_000_000


# ---- assert_ok ----------------------------------------------------------------------------------


def trained(run: nb.Run, *rewards: float, asked: int | None = None, **metrics: Any) -> None:
    for step in run.steps(len(rewards) if asked is None else asked):
        if step == len(rewards):
            return
        run.append_metrics({"kind": "train", "step": step, "reward_mean": rewards[step], **metrics})


def test_a_finished_run_is_ok(tmp_path):
    with nb.Run.open("a", tmp_path) as run:
        trained(run, 0.1, 0.2)
        run.assert_ok()
        run.assert_ok(2, alarms=("serious", "collapse"), min_reward=0.2)


def test_a_run_without_a_step_is_not_ok(tmp_path):
    with nb.Run.open("a", tmp_path) as run, pytest.raises(RunFailed, match="no training step"):
        run.assert_ok()


def test_too_few_steps_are_not_ok_whoever_asks(tmp_path):
    with nb.Run.open("a", tmp_path) as run:
        trained(run, 0.1, 0.2, asked=5)
        with pytest.raises(RunFailed, match="2 of 5 steps: its loop ended early"):
            run.assert_ok()
        with pytest.raises(RunFailed, match="2 of 3 steps"):
            nb.Run.read("a", tmp_path).assert_ok(3)
        run.assert_ok(2)


def test_a_stopped_run_says_who_stopped_it(tmp_path):
    with nb.Run.open("a", tmp_path) as run:
        for step in run.steps(5):
            run.append_metrics({"kind": "train", "step": step, "reward_mean": 0.5})
            (run.path / "STOP").touch()
        with pytest.raises(RunFailed, match=r"1 of 5 steps: it was stopped \(STOP file\)"):
            run.assert_ok()
    assert run.result()["status"] == "stopped"
    with nb.Run.open("a", tmp_path) as run:  # going on makes it whole
        run.roll_back(0)
        trained(run, *[0.5] * 5)
        run.assert_ok()
    assert run.result()["status"] == "complete"


def test_only_the_chosen_alarms_count(tmp_path):
    with nb.Run.open("a", tmp_path) as run:
        trained(run, 0.1, 0.2, kl_k3=9.0)
        run.assert_ok()
        run.assert_ok(alarms=("collapse", "staleness"))
        for kinds in ("drift", ("collapse", "drift"), "serious", "any"):
            with pytest.raises(RunFailed, match="drift at step 1"):
                run.assert_ok(alarms=kinds)
        with pytest.raises(ConfigurationError, match=r"no alarm 'drfit'.*drift"):
            run.assert_ok(alarms=("drfit",))


def test_every_alarm_can_be_chosen(repository):
    from artnb.dashboard.alarms import KINDS

    source = (repository / "artnb" / "dashboard" / "alarms.py").read_text(encoding="utf-8")
    assert set(re.findall(r"return Alarm\(\s*\"([^\"]+)\"", source)) == set(KINDS)


def test_a_reward_below_the_minimum_is_not_ok(tmp_path):
    with nb.Run.open("a", tmp_path) as run:
        trained(run, 0.9, 0.2)
        with pytest.raises(RunFailed, match=r"the last step is 0\.200, 0\.500 was wanted"):
            run.assert_ok(min_reward=0.5)
        after = nb.Evaluation("after", 0.6, 0.5, 0.7, 10)
        nb.report(run, notebook="toy", after=after)
        run.assert_ok(min_reward=0.5)
        with pytest.raises(RunFailed, match=r"the evaluation after training is 0\.600"):
            run.assert_ok(min_reward=0.7)
        run.append_metrics({"kind": "train", "step": 2, "reward_mean": 0.1})
        with pytest.raises(RunFailed, match=r"the last step is 0\.100"):  # that evaluation is of step 2
            run.assert_ok(2, min_reward=0.5)


# ---- result.json --------------------------------------------------------------------------------


def test_a_report_is_not_overwritten_when_the_run_closes(tmp_path):
    with nb.Run.open("a", tmp_path) as run:
        trained(run, 0.1, 0.2)
        run.save_checkpoint(2, lambda folder: (folder / "weights").touch(), {})
        nb.report(run, notebook="mine")
    assert run.result()["notebook"] == "mine"
    with nb.Run.open("a", tmp_path) as run:  # nothing new happens
        trained(run, 0.1, 0.2)
    assert run.result()["notebook"] == "mine"


def test_steps_after_the_report_make_it_outdated(tmp_path):
    with nb.Run.open("a", tmp_path) as run:
        trained(run, 0.1)
        nb.report(run, notebook="mine")
        run.append_metrics({"kind": "train", "step": 1, "reward_mean": 0.3})
    assert run.result()["notebook"] is None
    assert run.result()["reward_by_step"] == [0.1, 0.3]


def test_looking_at_a_run_leaves_no_result(tmp_path):
    with nb.Run.open("a", tmp_path) as run:
        run.note("only looking")
    assert run.result() is None


def test_an_error_goes_into_the_result_without_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("EXAMPLE_API_KEY", "sk-very-secret-value")
    with pytest.raises(ValueError, match="refused"), nb.Run.open("a", tmp_path) as run:
        for step in run.steps(3):
            run.append_metrics({"kind": "train", "step": step, "reward_mean": 0.5})
            raise ValueError("refused: sk-very-secret-value")
    assert run.result()["last_error"].startswith("ValueError: refused: ")
    assert "sk-very-secret-value" not in (run.path / "result.json").read_text()


# ---- clean_notebook -----------------------------------------------------------------------------


def saved_notebook(path: Path, **more: Any) -> dict[str, Any]:
    """As Colab saves one: widget ids without their state, and a bar beside a table."""
    view = "application/vnd.jupyter.widget-view+json"
    outputs = [
        {"output_type": "display_data", "metadata": {}, "data": {view: {"model_id": "a"}}},
        {
            "output_type": "display_data",
            "metadata": {},
            "data": {view: {"model_id": "b"}, "text/plain": ["100%"], "text/html": "<table>kept</table>"},
        },
        {"output_type": "stream", "name": "stdout", "text": "hällo \U0001f600\n"},
    ]
    cell = {
        "cell_type": "code",
        "execution_count": 1,
        "id": "one",
        "source": "x",
        "outputs": outputs,
        "metadata": {"colab": {"referenced_widgets": ["a"], "base_uri": "x"}},
    }
    notebook = {
        "cells": [cell],
        "metadata": {"widgets": {"application/vnd.jupyter.widget-state+json": {"a": {}}}, "kept": 1, **more},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path.write_text(json.dumps(notebook, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return notebook


def test_a_notebook_that_nbconvert_refuses_is_repaired(tmp_path):
    from nbconvert import HTMLExporter

    path = tmp_path / "saved.ipynb"
    before = saved_notebook(path)
    with pytest.raises(KeyError, match="state"):
        HTMLExporter().from_filename(str(path))
    told = nb.clean_notebook(path)
    assert "kept" in HTMLExporter().from_filename(str(path))[0]
    after = json.loads(path.read_text(encoding="utf-8"))
    bare, beside, stream = before["cells"][0]["outputs"]
    del beside["data"]["application/vnd.jupyter.widget-view+json"]
    assert after["cells"][0]["outputs"] == [beside, stream]
    assert after["metadata"] == {"kept": 1} and after["cells"][0]["metadata"]["colab"] == {"base_uri": "x"}
    assert path.read_text(encoding="utf-8").startswith('{\n  "cells"')  # indented as it was
    assert len(told.changes) == 4 and told.bytes_after < told.bytes_before
    assert "nothing but a widget" in repr(told) and bare not in after["cells"][0]["outputs"]


def test_a_clean_notebook_is_left_alone(tmp_path):
    path = tmp_path / "saved.ipynb"
    saved_notebook(path)
    clean_notebook(path)
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert clean_notebook(path).changes == ()
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_a_repair_that_cannot_be_written_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "saved.ipynb"
    saved_notebook(path)
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        clean_notebook(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["saved.ipynb"]


def test_a_repair_keeps_links_modes_and_halves_of_characters(tmp_path):
    path, link = tmp_path / "saved.ipynb", tmp_path / "link.ipynb"
    notebook = saved_notebook(path)
    notebook["cells"][0]["source"] = "'\ud83d'"
    path.write_text(json.dumps(notebook))
    path.chmod(0o640)
    link.symlink_to(path)
    assert clean_notebook(link).changes
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    assert json.loads(path.read_text())["cells"][0]["source"] == "'\ud83d'"


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"worksheets": []}', '{"cells": 3}', "\xff"])
def test_what_is_no_notebook_is_refused(tmp_path, text, capsys):
    path = tmp_path / "x.ipynb"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigurationError, match="not a notebook"):
        clean_notebook(path)
    assert main(["clean-notebook", str(path)]) == 1
    assert main(["clean-notebook", str(tmp_path / "missing.ipynb")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_the_command_tells_what_it_changed(tmp_path, capsys):
    paths = [tmp_path / "a.ipynb", tmp_path / "b.ipynb"]
    for path in paths:
        saved_notebook(path)
    assert main(["clean-notebook", *map(str, paths)]) == 0
    assert capsys.readouterr().out.count("state of widgets removed") == 2
