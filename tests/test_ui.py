"""What a person sees: escaped, readable without scripts, and quiet where nobody looks."""

from __future__ import annotations

import io
import re
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import pytest

import artnb as nb
from artnb.cli import list_runs
from artnb.errors import ConfigurationError
from artnb.report import report
from artnb.types import Failure, Groups, History, Trajectory, TrajectoryGroup, Turn
from artnb.ui import Live, Progress, RewardTable, detect
from artnb.ui.curve import curve_svg, sparkline
from artnb.ui.html import esc, groups_html, progress_html, step_html, table_html, trajectory_html
from artnb.ui.text import groups_text, step_text, trajectory_text

ATTACKS = [
    "<script>alert(1)</script>",
    '<img src=x onerror="alert(1)">',
    "</pre><svg onload=alert(1)>",
    "' onmouseover='alert(1)",
]


def turn(text: str, **more) -> Turn:
    message = {"role": "assistant", "content": text, **more}
    return Turn((1, 2), (3, 4), (-0.5, -1.5), 7, "length", message, credit=0.25)


def trajectory(text: str = "hello", **more) -> Trajectory:
    items = [{"role": "user", "content": text}, turn(text)]
    return Trajectory(items, reward=0.5, scenario_id="toy/1", seconds=1.0, **more)


def hostile(text: str) -> Trajectory:
    call = {"function": {"name": text, "arguments": {text: text}}}
    items = [
        {"role": text, "content": [{"type": "text", "text": text}, {"type": text}]},
        turn(text, reasoning_content=text, tool_calls=[call]),
        {"role": "tool", "content": {text: text}},
    ]
    return Trajectory(
        items,
        reward=1.0,
        metrics={text: 1.0},
        logs=[text],
        scenario_id=text,
        seat=text,
        error=Failure(text, text, text),
        additional_histories=[History([{"role": "user", "content": text}])],
    )


class Tags(io.StringIO):
    """The tags and attributes of a page, as the parser of a browser would see them."""

    def __init__(self, page: str) -> None:
        from html.parser import HTMLParser

        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        parser = HTMLParser()
        parser.handle_starttag = self.see  # type: ignore[method-assign]
        parser.feed(page)

    def see(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.add(name)
        self.attributes |= {key for key, _ in attributes}


@pytest.mark.parametrize("attack", ATTACKS)
def test_it_escapes_everything_that_a_model_wrote(attack):
    bad = hostile(attack)
    table = RewardTable(title=attack, baselines={attack: 0.5}, enabled=False)
    table.add({"step": 0, "reward_mean": 0.5, "skipped": attack})
    table.add({"kind": "sft", "step": 1, "loss": attack, "nll": 1.0, "dropped": {attack: 1}})
    pages = [
        trajectory_html(bad),
        groups_html([TrajectoryGroup([bad], scenario_id=attack)]),
        step_html({"step": attack, attack: 1.0, "skipped": attack, "dropped": {attack: 2}}),
        table_html([{attack: attack}]),
        progress_html(attack, 0.5, [attack]),
        curve_svg([{"name": attack, "points": [(0, 1)]}], {attack: 1.0}, x_label=attack, y_label=attack),
        table._repr_html_(),
    ]
    for page in pages:
        seen = Tags(page)
        assert not seen.names & {"script", "img"}, page
        assert not {name for name in seen.attributes if name.startswith("on")}, page
        assert "alert(1)" in page


def test_it_makes_control_and_direction_characters_visible():
    assert esc("a\x1b[31m\u202eb") == "a‹U+001B›[31m‹U+202E›b"
    assert esc("line\n\tnext 👩‍🚀") == "line\n\tnext 👩‍🚀"


def test_it_shows_a_trajectory_turn_by_turn():
    page = trajectory_html(trajectory(metrics={"win": 1.0}, logs=["a line"]))
    for piece in ("toy/1", "hello", "0.5", "2 tokens", "mean logprob -1.00", "policy 7", "win", "a line"):
        assert piece in page
    assert "cut off by max_tokens" in page and "credit 0.25" in page
    assert "[assistant] hello" in trajectory_text(trajectory())


def test_it_shows_a_failure_with_its_traceback():
    failed = trajectory(error=Failure("ValueError", "no board", "Traceback: line 3"))
    page = trajectory_html(failed)
    assert "<details>" in page and "Traceback: line 3" in page and "none (failed)" in page
    assert "ValueError: no board" in trajectory_text(failed)


def test_it_cuts_very_long_messages_and_says_so():
    page = trajectory_html(trajectory("x" * 100_000))
    assert len(page) < 30_000 and "92,000 more characters" in page


def test_it_tells_unscored_from_zero():
    group = TrajectoryGroup([Trajectory(reward=None), Trajectory(reward=0.0)], scenario_id="s")
    assert "1 unscored" in groups_text([group])
    assert "mean reward 0" in groups_text([group])
    assert "not scored" in trajectory_text(Trajectory())


def test_it_summarises_groups_and_counts_failures_by_kind():
    bad = Failure("TimeoutError", "too slow", "trace")
    members = [trajectory(), Trajectory(error=bad), Trajectory(error=bad)]
    groups = Groups([TrajectoryGroup(members, scenario_id="toy/1")])
    groups.status, groups.seconds = "stopped", 75.0
    text, page = groups_text(groups), groups_html(groups)
    assert "2 × TimeoutError: too slow" in text and "1 min 15 s" in text and "stopped" in text
    assert "(2 times)" in page and "2 failed" in page


def test_it_shows_a_step_in_plain_words():
    metrics = {"reward_mean": 0.25, "kl_k3": 0.01, "train_seconds": 3.0, "odd_figure": 4}
    result = SimpleNamespace(
        metrics=metrics, step=3, policy_version=4, dropped={"equal rewards": 2}, skipped=None
    )
    pieces = ("step 3", "mean reward", "KL to the sampling policy", "odd figure", "2 × equal rewards")
    for shown in (step_html(result), step_text(result)):
        assert not [piece for piece in pieces if piece not in shown]
    assert "skipped: nothing" in step_text({"step": 1, "skipped": "nothing"})


def test_it_draws_a_curve_that_is_valid_xml_and_leaves_out_nan():
    points = [(0, 0.1), (1, float("nan")), (2, 0.9)]
    svg = curve_svg([{"name": "reward", "points": points}], {"random": 0.5, "greedy": 0.52})
    root = ElementTree.fromstring(svg)
    assert svg.count("<circle") == 2
    assert "currentColor" in svg and "nan" not in svg
    labels = [float(y) for y in re.findall(r'<text x="518" y="([\d.]+)"', svg)]
    assert len(labels) == 3
    assert min(abs(a - b) for a in labels for b in labels if a != b) >= 13
    assert root.attrib["role"] == "img"


@pytest.mark.parametrize("points", [[], [(0, 0.5)], [(0, 1.0), (1, 1.0)], [(5, -3.0), (6, 1e6)]])
def test_it_draws_any_curve(points):
    ElementTree.fromstring(curve_svg([{"name": "r", "points": points}]))
    assert len(sparkline([y for _, y in points])) == len(points)


def test_it_keeps_the_story_of_a_resumed_run():
    run = SimpleNamespace(
        metrics=lambda: [
            {"kind": "train", "step": 0, "reward_mean": 0.1},
            {"kind": "evaluation", "reward_mean": 0.9},
        ]
    )
    table = RewardTable(run, baselines={"random": SimpleNamespace(mean_reward=0.3)}, enabled=False)
    table.add({"step": 1, "reward_mean": 0.5})
    table.add({"step": 1, "reward_mean": 0.6})
    assert table.rewards == [(0, 0.1), (1, 0.6)]
    assert "<svg" in table._repr_html_() and "random" in table._repr_html_()
    assert "▁" in repr(table)


def test_it_asks_the_environment_variable_first(monkeypatch):
    monkeypatch.setenv("ARTNB_UI", "none")
    assert detect() == "none"
    monkeypatch.setenv("ARTNB_UI", "widget")
    with pytest.raises(ConfigurationError, match="html, text or none"):
        detect()
    monkeypatch.delenv("ARTNB_UI")
    assert detect() == "text"


def test_it_says_nothing_when_off(monkeypatch, capsys):
    monkeypatch.setenv("ARTNB_UI", "none")
    with Progress(2, "gather") as progress:
        progress.update(1)
    Live("x", keep_text=True).finish("<b>x</b>", "x")
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_it_draws_one_line_in_a_terminal(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("ARTNB_UI", "text")
    with Progress(4, "gather") as progress:
        for done in range(5):
            progress.update(done, failed=1, mean_reward=0.5, tokens=100)
    assert screen.getvalue().count("\n") == 1
    assert screen.getvalue().count("\r") == 2  # the first and the last: the others came too soon
    assert "gather: 4/4, 1 failed, mean reward 0.500" in screen.getvalue()


def test_it_is_sparse_in_a_log(monkeypatch, capsys):
    monkeypatch.setenv("ARTNB_UI", "text")
    progress = Progress(1000, "gather")
    for done in range(1000):
        progress.update(done)
    progress.update(1000)
    progress.finish("interrupted")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[-1].endswith("interrupted")


@pytest.fixture
def shown(monkeypatch):
    """What a kernel's displays were told, in order: (``display`` or ``update``, bundle)."""
    shown: list[tuple[str, dict[str, str]]] = []

    class Handle:
        def update(self, bundle, raw):
            shown.append(("update", bundle))

    def display(bundle, raw, display_id):
        shown.append(("display", bundle))
        return Handle()

    monkeypatch.setenv("ARTNB_UI", "html")
    monkeypatch.setattr("IPython.display.display", display)
    return shown


def test_it_updates_one_display_in_a_kernel(shown):
    progress = Progress(100, "gather")
    started = time.monotonic()
    for done in range(100):
        progress.update(done, mean_reward=0.5)
        time.sleep(0.012)
    progress.finish()
    most = 3 + (time.monotonic() - started) / 0.5
    assert shown[0][0] == "display" and [kind for kind, _ in shown[1:]] == ["update"] * (len(shown) - 1)
    assert len(shown) <= most
    assert set(shown[-1][1]) == {"text/html", "text/plain"}


def test_a_loop_leaves_one_progress_line_a_cell(shown, monkeypatch):
    shell = SimpleNamespace(execution_count=7)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    for _ in range(3):
        for title in ("gather train", "gather test"):
            Progress(2, title).finish()
    assert [kind for kind, _ in shown] == ["display"] * 2 + ["update"] * 4
    shell.execution_count = 8
    Progress(2, "gather train").finish()
    assert shown[-1][0] == "display"


def test_progress_of_gathers_that_run_at_once_stands_apart(shown, monkeypatch):
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(execution_count=9))
    pair = [Progress(2, "gather train") for _ in range(2)]
    for progress in pair:
        progress.update(1)
    for progress in pair:
        progress.finish()
    assert [kind for kind, _ in shown] == ["display", "display", "update", "update"]


def test_a_step_shows_its_warnings():
    result = SimpleNamespace(metrics={"loss": 0.5}, step=1, policy_version=2, warnings=["<b>odd</b>"])
    assert "⚠ &lt;b&gt;odd" in step_html(result) and "warning: <b>odd</b>" in step_text(result)
    table = RewardTable(enabled=False)
    table.add(result)
    table.add({"step": 2, "dropped": {"equal rewards": 3}})
    assert "⚠ warning" in repr(table) and "3 × equal rewards" in repr(table)


def test_a_notebook_without_html_still_reads_well():
    from IPython.lib.pretty import pretty

    one = trajectory("hello")
    assert pretty(one) == trajectory_text(one)
    group = TrajectoryGroup([one], scenario_id="first")
    assert pretty(group) == groups_text([group])
    assert pretty(Groups([group])) == repr(Groups([group]))


# Supervised steps

WARM_UP = {"kind": "sft", "step": 0, "loss": 2.25, "nll": 2.5, "entropy": 1.0}
REINFORCED = {"kind": "train", "step": 1, "loss": -0.125, "reward_mean": 0.75, "reward_std": 0.25}


@pytest.fixture
def warmed_up(tmp_path: Path):
    """A run with a supervised step, a reinforced one, and an evaluation's line."""
    with nb.Run.open("demo", tmp_path) as run:
        for record in (WARM_UP, REINFORCED, {"kind": "evaluation", "step": 2, "reward_mean": 0.9}):
            run.append_metrics(record)
        yield run


def rows_of(page: str) -> list[dict[str, str]]:
    """The cells of a page's tables, by the heads of their columns."""
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", page)
    lines = re.findall(r"<tr>(<td.*?)</tr>", page)
    return [dict(zip(heads, re.findall(r"<td[^>]*>([^<]*)</td>", line), strict=True)) for line in lines]


def test_a_table_marks_supervised_steps_and_leaves_their_reward_blank(warmed_up):
    table = RewardTable(warmed_up, enabled=False)
    first, second = rows_of(table._repr_html_())
    assert (first["step"], first["kind"]) == ("0", "sft")
    assert (first["loss"], first["mean logprob"]) == ("2.25", "-2.5")
    assert (first["mean reward"], first["± std"], first[""]) == ("–", "–", "")
    assert (second["kind"], second["mean logprob"], second["mean reward"]) == ("train", "–", "0.750")
    assert table.rewards == [(1, 0.75)] and table.curve().count("<circle") == 1
    head, warm_up, _ = repr(table).splitlines()[1:]
    assert head.split()[:3] == ["step", "kind", "loss"]
    assert warm_up.split() == ["0", "sft", "2.25", "-2.5", "–", "–", "1", "–", "–", "–"]


def test_a_table_without_supervised_steps_has_no_columns_for_them():
    table = RewardTable(enabled=False)
    table.add(REINFORCED)
    assert "kind" not in repr(table) and "logprob</th>" not in table._repr_html_().replace("|Δ logprob|", "")


@pytest.mark.parametrize("draw", [step_html, step_text])
def test_the_result_of_a_supervised_step_says_so(draw):
    about = {"step": 0, "policy_version": 1}
    assert "supervised" in draw(SimpleNamespace(metrics={"loss": 2.0, "nll": 2.0}, **about))
    assert "supervised" in draw(WARM_UP)
    assert "supervised" not in draw(SimpleNamespace(metrics={"loss": 2.0, "reward_mean": 0.0}, **about))


def test_a_report_keeps_a_place_for_a_supervised_step(warmed_up):
    made = report(warmed_up, notebook="x")
    assert made.record["reward_by_step"] == [None, 0.75]
    assert made.record["supervised_steps"] == [{"step": 0, "loss": 2.25, "nll": 2.5}]
    assert warmed_up.result()["reward_by_step"] == [None, 0.75]


def test_the_list_of_runs_counts_supervised_steps(warmed_up):
    (row,) = list_runs(warmed_up.path.parent)
    assert (row["steps"], row["supervised"], row["last sft loss"], row["last reward"]) == (2, 1, 2.25, 0.75)
    warmed_up.roll_back(1)
    (row,) = list_runs(warmed_up.path.parent)
    assert (row["steps"], row["supervised"], row["last reward"]) == (1, 1, None)


async def test_what_a_supervised_step_returns_is_its_line_in_the_table(tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    table = RewardTable(enabled=False)
    with nb.Model(run="demo", root=tmp_path, backend=nb.FakeBackend()) as model:
        table.add(await nb.sft_step(model, [talk]))
        assert "sft" in repr(table) and repr(table) == repr(RewardTable(model.run, enabled=False))
