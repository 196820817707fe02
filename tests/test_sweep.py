"""Sweeps: one notebook run a point, finished ones skipped, failed ones shown, cut-off ones resumed."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from test_batch_runs import write_notebook

import artnb as nb
from artnb.errors import ConfigurationError, Interrupted, RunFailed
from artnb.store import RunFolder
from artnb.sweep import Sweep, SweepPoint

GRID = [{"trouble": "none"}, {"trouble": "error"}]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_notebook(tmp_path_factory.mktemp("toy") / "toy.ipynb")


async def swept(toy: Path, root: Path, grid: Any = GRID, **options: Any) -> Sweep:
    given = {"root": root, "progress": False, "parameters": {"steps": 3}} | options
    return await nb.sweep(str(toy), grid, **given)


async def test_points_are_run_compared_and_not_run_twice(toy, tmp_path):
    first = await swept(toy, tmp_path)
    good, bad = first.points
    assert (good.status, bad.status) == ("complete", "failed")
    assert bad.error == "ValueError: the dice fell off the table"
    assert good.run.trained_steps == 3 and bad.run.trained_steps == 2
    assert first.best is good and nb.last() is first
    assert good.notebook.is_file() and "step 2: mean reward" in good.notebook.with_suffix(".log").read_text()
    with pytest.raises(RunFailed, match=r"1 of 2 points.*trouble=error failed \(ValueError: the dice"):
        first.assert_ok()

    written = [point.notebook.stat().st_mtime_ns for point in first.points]
    again = await swept(toy, tmp_path)
    assert [point.notebook.stat().st_mtime_ns for point in again.points] == written
    assert again.rows() == first.rows()

    retried = await swept(toy, tmp_path, retry_failed=True)  # fails again, at the step where its run stands
    changed = [
        point.notebook.stat().st_mtime_ns != at for point, at in zip(retried.points, written, strict=True)
    ]
    assert changed == [False, True] and retried.points[1].run.trained_steps == 2

    assert [(row["point"], row["trouble"], row["steps"]) for row in first.rows()] == [
        (1, "none", 3),
        (2, "error", 2),
    ]
    page = first._repr_html_()
    assert ">1: none " in page and ">2: error " in page  # the curves' labels
    assert page.count("<polyline") == 2 and "the dice fell off the table" in page
    assert "loaded anew for every point" in page and "loaded anew for every point" in repr(first)


async def test_more_steps_go_on_and_other_parameters_are_refused(toy, tmp_path):
    await swept(toy, tmp_path, GRID[:1])
    more = await swept(toy, tmp_path, GRID[:1], parameters={"steps": 5})
    assert [record["step"] for record in more.points[0].run.metrics()] == [0, 1, 2, 3, 4]
    opened = [event["step"] for event in more.points[0].run.events() if event["kind"] == "opened"]
    assert opened == [0, 3]
    with pytest.raises(ConfigurationError, match="other values of delay"):
        await swept(toy, tmp_path, GRID[:1], parameters={"steps": 5, "delay": 0.1})


@pytest.mark.slow
async def test_a_point_that_takes_too_long_fails(toy, tmp_path):
    found = await swept(toy, tmp_path, [{"trouble": "hang"}], timeout=8)
    assert found.points[0].status == "failed" and found.points[0].error == "took longer than 8 s"


@pytest.mark.slow
async def test_an_interrupted_sweep_keeps_what_is_done_and_goes_on(toy, tmp_path):
    slow = [{"delay": 0.0}, {"delay": 0.2}]
    folder = tmp_path / "sweep" / "delay=0.2"

    def press() -> None:
        while RunFolder(folder).trained_steps < 2:
            pressed.wait(0.1)
        signal.raise_signal(signal.SIGINT)

    pressed = threading.Event()
    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(Interrupted, match="1 of 2 points are finished") as caught:
        await swept(toy, tmp_path, slow, parameters={"steps": 25})
    assert [point.status for point in caught.value.partial.points] == ["complete", "interrupted"]
    run = caught.value.partial.points[1].run
    done = run.trained_steps
    assert 2 <= done < 25
    found = await swept(toy, tmp_path, slow, parameters={"steps": 25})
    assert [point.status for point in found.points] == ["complete", "complete"]
    assert [e["step"] for e in run.events() if e["kind"] == "opened"] == [0, done]


@pytest.mark.parametrize(
    ("grid", "options", "message"),
    [
        ({"learning_rat": [1]}, {}, "did you mean 'learning_rate'"),
        ({"trouble": ["none"]}, {"parameters": {"stepz": 1}}, "did you mean 'steps'"),
        ({"trouble": "none"}, {}, "must be a list of values"),
        ({"run_name": ["a"]}, {}, "run_name are the sweep's own"),
        ({}, {}, "the grid is empty"),
        ([{"steps": 1}, {"steps": 1}], {"parameters": {}}, "the same point twice"),
        ({"trouble": ["none"]}, {"name": "a/b"}, "cannot name a run"),
    ],
)
async def test_a_grid_that_cannot_work_is_refused_before_anything_runs(toy, tmp_path, grid, options, message):
    with pytest.raises(ConfigurationError, match=message):
        await swept(toy, tmp_path, grid, **options)
    assert not list(tmp_path.glob("*/*"))


async def test_a_folder_that_is_a_run_is_no_sweep(toy, tmp_path):
    nb.Run.open("sweep", tmp_path).close()
    with pytest.raises(ConfigurationError, match="is a run, not a sweep"):
        await swept(toy, tmp_path)


def test_points_may_vary_different_parameters(tmp_path):
    points = [SweepPoint(n, {n: 1}, RunFolder(tmp_path / n), tmp_path / n) for n in ("a", "b")]
    rows = Sweep("x", tmp_path, points).rows()
    assert [(row["a"], row["b"]) for row in rows] == [(1, None), (None, 1)]


def test_what_a_model_or_an_error_says_is_escaped(tmp_path):
    attack = "<img src=x onerror=alert(1)>"
    point = SweepPoint(attack, {attack: attack}, RunFolder(tmp_path / "x"), tmp_path / "x", "failed", attack)
    page = Sweep(attack, tmp_path, [point])._repr_html_()
    assert "<img" not in page and page.count("&lt;img") >= 3
