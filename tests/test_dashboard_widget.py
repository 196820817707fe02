"""How a dashboard reaches the screen, what comes back from there, and when it goes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from dashboard_tools import HOSTILE, Browser, train, whole
from steps import open_fake

import artnb as nb
from artnb.dashboard import widget
from artnb.store import Run
from artnb.ui import live_widget

# ---- the widget ---------------------------------------------------------------------------------


class Wire:
    """The end of the wire that is in the kernel."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def close(self) -> None:
        """The widget is gone."""


def shown(run: Any, **options: Any) -> tuple[nb.Dashboard, Wire]:
    dashboard, wire = nb.Dashboard(run, **options), Wire()
    dashboard.widget = wire
    return dashboard, wire


def tell(dashboard: nb.Dashboard) -> None:
    dashboard._look()
    for message in dashboard._news():
        dashboard.widget.send(message)


async def test_a_view_that_comes_gets_everything_and_the_others_agree(tmp_path: Path):
    with open_fake(tmp_path) as model:
        await train(model, 2)
        dashboard, wire = shown(model.run)
        tell(dashboard)
        assert wire.sent == []  # nobody looks
        browsers = []
        for name in ("one", "two"):
            browsers.append(Browser())
            dashboard._hear(None, {"type": "ready", "view": name})
            await train(model, 1)
            tell(dashboard)
            assert all(browser.take(message) for message in wire.sent for browser in browsers)
            wire.sent.clear()
        assert browsers[0].tables == browsers[1].tables and len(browsers[0].tables["steps"]) == 4


async def test_a_long_run_comes_as_an_outline_and_in_full_where_somebody_zooms_in(tmp_path: Path):
    with Run.open("long", tmp_path, identity={"base_model": "none"}) as run:
        values = {f"measured {i}": 1 / (i + 3) for i in range(36)}
        lines = [
            json.dumps(
                {"kind": "train", "step": s, "session": 1, "time": 1.0, "reward_mean": s / 4000} | values
            )
            for s in range(4000)
        ]
        (tmp_path / "long" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        dashboard, wire = shown(run)
        browser = Browser()
        dashboard._hear(None, {"type": "ready", "view": "one"})

        def hear() -> int:
            wire.sent.clear()
            tell(dashboard)
            assert all(map(browser.take, wire.sent))
            return sum(len(json.dumps(message)) for message in wire.sent)

        assert 100_000 < hear() < 1_000_000
        known = sorted(int(step) for step in browser.tables["steps"])
        assert browser.head["steps"] == 4000 and known[0] == 0 and known[-50:] == list(range(3950, 4000))
        assert len(known) < 1500 and max(b - a for a, b in itertools.pairwise(known)) < 20
        dashboard._hear(None, {"type": "detail", "run": 0, "first": 1000.4, "last": 1200.6, "view": "one"})
        assert dashboard._is_asked and 0 < hear() < 1_000_000
        assert {str(step) for step in range(1001, 1201)} <= set(browser.tables["steps"])
        dashboard._hear(None, {"type": "detail", "run": 0, "first": "all", "last": None, "view": "one"})
        assert hear() == 0


async def test_a_run_that_races_is_drawn_four_times_a_second(tmp_path: Path):
    with Run.open("fast", tmp_path, identity={"base_model": "none"}) as run:
        dashboard, wire = shown(run)
        dashboard._loop = asyncio.get_running_loop()
        dashboard._hear(None, {"type": "ready", "view": "one"})
        dashboard._start()
        browser, until = Browser(), asyncio.get_running_loop().time() + 1.5
        while asyncio.get_running_loop().time() < until:
            run.append_metrics({"kind": "train", "step": run.step, "reward_mean": 0.5})
            await asyncio.sleep(0.01)
        pictures = [message for message in wire.sent if not message["more"]]
        assert 2 <= len(pictures) <= 7 and all(map(browser.take, wire.sent))
        assert len(browser.tables["steps"]) > 3 * len(pictures)  # nothing is left out
        dashboard.close()


async def test_a_click_only_writes_into_the_journal(tmp_path: Path):
    with open_fake(tmp_path) as model:
        dashboard, _ = shown(model.run)
        for control in (
            {"control": "pause"},
            {"control": "learning_rate", "value": 1e-4},
            {"control": "stop"},
        ):
            dashboard._hear(None, {"type": "control", **control})
        dashboard._hear(None, {"type": "note", "text": HOSTILE})
        dashboard._hear(None, {"type": "control", "control": "learning_rate", "value": -1})
        dashboard._hear(None, {"type": "control", "control": "rm"})
        dashboard._hear(None, "nonsense")
        kept = [(e["kind"], e.get("control")) for e in model.run.events() if e["kind"] in ("control", "note")]
        assert kept == [
            ("control", "pause"),
            ("control", "learning_rate"),
            ("control", "stop"),
            ("note", None),
        ]
        assert "(learning rate) must be" in dashboard._answers[-2] and "'rm'" in dashboard._answers[-1]
        view = whole(model.run)
        asked = {"stop": True, "paused": False, "roll_back": None, "settings": {"learning_rate": 1e-4}}
        assert view.head["controls"] == asked


async def test_a_run_of_another_process_hears_only_stop(tmp_path: Path):
    with open_fake(tmp_path) as model:
        dashboard, _ = shown(Run.read("demo", tmp_path))
        dashboard._hear(None, {"type": "control", "control": "pause"})
        assert "only stop" in dashboard._answers[-1] and not model.run.controls.paused
        dashboard._hear(None, {"type": "control", "control": "stop"})
        assert list(model.run.steps(5)) == []


async def test_the_static_view_takes_over_when_nobody_answers(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(widget, "PATIENCE_SECONDS", -1.0)
    with open_fake(tmp_path) as model:
        dashboard, _ = shown(model.run)
        dashboard._shown = 1.0
        dashboard._fall_back()
        assert "did not show the live dashboard" in dashboard._note
        dashboard._hear(None, {"type": "ready", "view": "late"})
        dashboard._fall_back()
        assert dashboard._note == ""


async def test_static_and_text_views_escape_and_tell(tmp_path: Path):
    with open_fake(tmp_path) as model:
        await train(model, 2)
        model.run.note(HOSTILE)
        dashboard = nb.Dashboard(model.run, baselines={HOSTILE: 0.5})
        page = dashboard._repr_html_()
        assert "<script" not in page and "<img" not in page and "&lt;img" in page
        assert "demo: running, 2 steps, mean reward" in repr(dashboard)


def test_a_dashboard_of_something_else_is_refused():
    with pytest.raises(nb.ConfigurationError, match=r"Dashboard\(model.run\)"):
        nb.Dashboard(3)


def test_the_page_sets_text_only_and_loads_nothing():
    folder = Path(widget.__file__).parent.parent / "ui" / "static"
    for name in (
        "theme.js",
        "page.js",
        "chart.js",
        "strip.js",
        "controls.js",
        "dashboard.js",
        "dashboard.css",
    ):
        text = (folder / name).read_text(encoding="utf-8")
        for forbidden in (
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            "import(",
            "fetch(",
        ):
            assert forbidden not in text, (name, forbidden)
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "") and "@import" not in text
    assert "Permission is hereby granted" in (folder / "uPlot.LICENSE.txt").read_text()


def test_the_widget_holds_all_its_code():
    made = widget._widget_class()
    assert "uPlot=function" in made._esm and "export default" in made._esm and ".artnb-strip" in made._css
    assert len(made._esm) < 120_000


# ---- several runs, and cells that are run again ---------------------------------------------------


async def test_two_runs_share_a_widget_and_each_hears_its_own_clicks(tmp_path: Path):
    with open_fake(tmp_path, "a") as first, open_fake(tmp_path, "b") as second:
        for model in (first, second):
            await train(model, 2)
        dashboard, wire = shown(["a", "b"], root=tmp_path)
        assert dashboard.views[1].run is second.run  # the live one, which hears more than stop
        dashboard._hear(None, {"type": "ready", "view": "one"})
        tell(dashboard)
        browsers = [Browser(), Browser()]
        for message in wire.sent:
            assert message["runs"] == 2 and browsers[message["run"]].take(message)
        assert [browser.head["name"] for browser in browsers] == ["a", "b"]
        dashboard._hear(None, {"type": "control", "control": "roll_back", "value": 1, "run": 1})
        assert second.run.controls.roll_back == 1 and first.run.controls.roll_back is None
        assert "goes back after its present step" in dashboard._answers[-1]
        page = dashboard._repr_html_()
        assert page.count("<details>") == 2 and "<svg" in page


def test_a_name_without_a_run_is_an_error(tmp_path: Path):
    with pytest.raises(nb.ConfigurationError, match="there is no run"):
        nb.Dashboard(["nothing"], root=tmp_path)


async def test_a_dashboard_whose_cell_is_run_again_ends(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("ARTNB_UI", "live")
    cell = ["first"]
    monkeypatch.setattr(live_widget, "cell_id", lambda: cell[0])
    monkeypatch.setattr(widget, "show_widget", lambda _: None)
    monkeypatch.setattr(widget, "Slot", lambda: None)
    monkeypatch.setattr(widget, "Live", lambda *_, **__: None)
    monkeypatch.setattr(widget, "Picture", lambda: None)
    with open_fake(tmp_path) as model:
        made = [nb.Dashboard(model.run) for _ in range(4)]
        for place, dashboard in zip(("first", "first", "second", None), made, strict=True):
            cell[0] = place
            dashboard._ipython_display_()
            dashboard._hear(None, {"type": "ready", "view": str(id(dashboard))})
            await asyncio.sleep(0)
        tasks = [dashboard._task for dashboard in made]
        await asyncio.sleep(0.3)
        assert [task.done() for task in tasks] == [True, False, False, False]  # two cells may show one run
        made[2]._hear(None, {"type": "gone", "view": str(id(made[2]))})  # its output was cleared
        await asyncio.wait([tasks[2]], timeout=5)
        assert tasks[2].done() and not tasks[3].done()
        for dashboard in made:
            dashboard.close()
        assert not live_widget._in_cells and not any(one in made for one in live_widget._latest.values())


def test_screens_of_one_cell_stay_until_it_is_run_again(monkeypatch: Any):
    cell, number, left = ["first"], [1], list[str]()
    monkeypatch.setattr(live_widget, "cell_id", lambda: cell[0])
    monkeypatch.setattr(live_widget, "cell_number", lambda: number[0])
    screens = {name: Wire() for name in "abc"}

    def show(name: str) -> None:
        live_widget.take_place(screens[name], name, lambda: left.append(name))

    for name in ("a", "b"):
        show(name)
    assert left == []  # two of one cell
    cell[0], number[0] = "second", 2
    show("b")
    cell[0], number[0] = "first", 3
    show("c")
    assert left == ["a"]  # b stands in the second cell as well
    for name, screen in screens.items():
        live_widget.leave_place(screen, name)
    assert not live_widget._in_cells and not live_widget._latest


async def test_a_session_shorter_than_a_heartbeat_hears_what_was_clicked(monkeypatch: Any):
    from artnb import session as sessions

    turns = []

    @contextlib.contextmanager
    def pump() -> Any:
        yield lambda: turns.append(True)

    monkeypatch.setattr(sessions, "comm_pump", pump)
    async with sessions.session(lambda: None):
        pass
    assert turns == [True]
