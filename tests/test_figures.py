"""A run as a plotly figure, as a PNG, and as what stays in a saved notebook."""

from __future__ import annotations

import asyncio
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from steps import SCENARIOS, open_fake, play, rollout

import artnb as nb
from artnb.dashboard.panels import panels
from artnb.dashboard.png import views_png
from artnb.dashboard.twin import thinned, twin_html
from artnb.dashboard.view import View
from artnb.store import Run
from artnb.ui import display

HOSTILE = '<a href="javascript:alert(1)">$x_1$</a>_\u202e'


class Measuring(nb.FakeBackend):
    async def forward_backward(self, samples: Any, config: Any, **options: Any) -> dict[str, float]:
        told = await super().forward_backward(samples, config, **options)
        return told | {"entropy": 1.0 / (1 + self.policy_version), "kl_k3": 0.001}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two finished runs, ``one`` of six steps and ``two`` of four."""
    folder = tmp_path_factory.mktemp("figures")

    async def train(name: str, steps: int) -> None:
        with open_fake(folder, name, backend=Measuring(seed=steps)) as model:
            for step in model.run.steps(steps):
                await nb.train_step(model, await play(model))
                if step % 3 == 0:
                    await nb.evaluate(rollout, SCENARIOS, model=model, attempts=2, progress=False)

    asyncio.run(train("one", 6))
    asyncio.run(train("two", 4))
    yield folder


def view_of(root: Path, name: str, **levels: float) -> View:
    view = View(Run.read(name, root), levels)
    view.look_at_everything()
    return view


def image(png: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(png))


# ---- plotly -------------------------------------------------------------------------------------


def test_the_figure_holds_the_runs_numbers(root: Path):
    run = Run.read("one", root)
    drawn = run.figure()
    curves = {trace.name: trace for trace in drawn.data if trace.name}
    rewards = [record["reward_mean"] for record in run.metrics()]
    assert list(curves["mean reward"].x) == list(range(6))
    assert list(curves["mean reward"].y) == pytest.approx(rewards)
    assert list(curves["entropy"].y) == pytest.approx([1 / (1 + k) for k in range(6)])
    checks = curves["evaluation, 95 %"]
    assert len(checks.x) == 2 and all(size > 0 for size in checks.error_y["array"])
    titles = {note.text for note in drawn.layout.annotations}
    assert {"Mean reward", "Entropy a token", "Seconds of a step, stacked"} <= titles


def test_a_figure_compares_runs_in_colours_and_dashes(root: Path):
    one, two = (Run.read(name, root) for name in ("one", "two"))
    drawn = one.figure(["reward", "entropy"], others=[two])
    lines = [trace for trace in drawn.data if trace.mode == "lines"]
    assert [(trace.name, len(trace.x)) for trace in lines] == [("one", 6), ("two", 4)] * 2
    looks = {trace.name: (trace.line.color, trace.line.dash) for trace in lines}
    assert looks["one"][0] != looks["two"][0] and looks["one"][1] != looks["two"][1]


def test_names_are_words_in_every_drawing(root: Path):
    drawn = Run.read("one", root).figure(["entropy"])
    assert "<" not in drawn.to_json().replace("<br>", "").replace("<extra>", "")
    view = view_of(root, "one", **{HOSTILE: 0.5})
    assert image(views_png([view])).size[0] == 760  # a dollar sign would have begun a formula
    page = twin_html([view])
    assert "<a " not in page and "&lt;a href" in page


def test_an_unknown_metric_names_those_there_are(root: Path):
    run = Run.read("one", root)
    for draw in (run.figure, run.png):
        with pytest.raises(nb.ConfigurationError, match=r"'nonsense'; charts: reward, .*entropy"):
            draw(["nonsense"])
    assert len(run.figure(["grad_norm"]).data) == 1


def test_a_figure_widget_is_refused_in_batch(root: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(nb.ConfigurationError, match=r"run\.figure\(\) or run\.png\(\)"):
        Run.read("one", root).figure_widget()
    monkeypatch.setenv("ARTNB_UI", "live")
    widget = Run.read("one", root).figure_widget(["entropy"])
    assert type(widget).__name__ == "FigureWidget" and len(widget.data) == 1


def test_a_run_without_steps_has_an_empty_figure(tmp_path: Path):
    with open_fake(tmp_path) as model:
        assert len(model.run.figure().data) == 0
        assert image(model.run.png()).size[0] == 900


# ---- the image ----------------------------------------------------------------------------------


def test_the_png_is_small_and_shows_the_curve(root: Path):
    png = Run.read("one", root).png()
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and len(png) < 120_000
    alone, together = (views_png([view_of(root, n) for n in names]) for names in (["one"], ["one", "two"]))
    assert alone != together
    colours = {pixel for _, pixel in image(together).convert("RGB").getcolors(1 << 24)}
    assert {(47, 127, 224), (224, 122, 31)} <= colours  # a curve of each run


def test_several_runs_have_a_panel_for_each_metric(root: Path):
    views = [view_of(root, name) for name in ("one", "two")]
    shown = panels(views)
    assert shown[0].title == "Mean reward" and [c.label for c in shown[0].curves] == ["one", "two"]
    assert all(panel.is_compared and len(panel.curves) <= 2 for panel in shown)
    assert {run for _, run in shown[0].checks} == {0, 1}


def test_a_long_curve_is_thinned_and_keeps_its_end():
    points = [(step, float(step)) for step in range(10_000)]
    kept = thinned(points)
    assert len(kept) <= 401 and kept[-1] == points[-1]
    assert thinned(points[:3]) == points[:3] and thinned([]) == []


# ---- what stays ---------------------------------------------------------------------------------


class Screen:
    """The displays of a notebook, by the order in which they came."""

    def __init__(self) -> None:
        self.bundles: list[dict[str, Any]] = []

    def display(self, bundle: dict[str, Any], **_: Any) -> Any:
        self.bundles.append(bundle)
        return Handle(self, len(self.bundles) - 1)


class Handle:
    def __init__(self, screen: Screen, place: int) -> None:
        self.screen, self.place = screen, place

    def update(self, bundle: dict[str, Any], **_: Any) -> None:
        self.screen.bundles[self.place] = bundle


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A notebook that runs as a batch."""
    import IPython.display

    made = Screen()
    monkeypatch.setattr(IPython.display, "display", made.display)
    monkeypatch.setenv("ARTNB_UI", "html")
    return made


async def test_a_batch_keeps_a_table_and_an_image_that_end_as_the_run_did(
    tmp_path: Path, screen: Screen, monkeypatch: pytest.MonkeyPatch
):
    ends: list[Any] = []

    def register(call: Any) -> Any:
        ends.append(call)
        return lambda: ends.remove(call)

    monkeypatch.setattr("artnb.dashboard.widget.after_each_cell", register)
    with open_fake(tmp_path) as model:
        dashboard = nb.Dashboard(model.run)
        dashboard._ipython_display_()
        for _ in model.run.steps(3):
            await nb.train_step(model, await play(model))
        ends[0](None)
        (page,) = (bundle["text/html"] for bundle in screen.bundles if "text/html" in bundle)
        (picture,) = (bundle for bundle in screen.bundles if "image/png" in bundle)
        assert "no loop is running, 3 steps" in page and "<svg" not in page and "<table" in page
        assert len(picture["image/png"]) < 200_000 and "3 steps" in picture["text/plain"]
        model.run.note("later")
        ends[0](KeyError(HOSTILE))
        (page,) = (bundle["text/html"] for bundle in screen.bundles if "text/html" in bundle)
        assert "The last cell ended with KeyError" in page and "<a " not in page
        dashboard.close()
        assert not ends and not model.run.on_step


def test_the_image_needs_matplotlib_and_says_so(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    from artnb.dashboard.png import can_draw

    assert not can_draw()


def test_a_terminal_gets_no_image(capsys: pytest.CaptureFixture[str]):
    display.Picture().draw(b"png", "words")
    assert capsys.readouterr().out == ""
