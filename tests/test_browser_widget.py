"""How the trajectory browser answers a page, what stays of it without one, and that its page is harmless."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import threading
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kernel_tools import OLD_KERNELS, REPOSITORY, environment, running_kernel
from steps import SCENARIOS, attempt, open_fake, play

import artnb as nb
from artnb.browser import Browser, widget
from artnb.browser.answers import MOST_BYTES, in_parts
from artnb.browser.static_view import browser_html, browser_text
from artnb.store import Run
from artnb.ui import live_widget

HOSTILE = '<img src=x onerror="alert(1)"><script>alert(2)</script>'
STATIC = Path(widget.__file__).parent.parent / "ui" / "static"
SOURCES = [STATIC / "theme.js", *sorted(STATIC.glob("browser*.js"))]


class Wire:
    """The end of the wire that is in the kernel."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(json.loads(json.dumps(message, allow_nan=False)))

    def close(self) -> None:
        self.sent.clear()


class Page:
    """What the front end does with messages, in Python."""

    def __init__(self, browser: Browser, wire: Wire) -> None:
        self.browser, self.wire = browser, wire
        self.last = 0

    def tell(self, kind: str, /, **content: Any) -> None:
        self.browser._hear(None, {"type": kind, "view": "one", **content})

    async def ask(self, what: str, /, **asked: Any) -> Any:
        """The data of the answer; raises AssertionError with the words of one that is an error."""
        self.last += 1
        self.tell("ask", id=self.last, what=what, **asked)
        return await self.answer(self.last)

    async def answer(self, number: int) -> Any:
        parts: list[dict[str, Any]] = []
        async with asyncio.timeout(20):
            while True:
                parts = [m for m in self.wire.sent if m.get("id") == number]
                if parts and (parts[0]["type"] == "answer" or len(parts) == parts[0]["of"]):
                    break
                await asyncio.sleep(0.01)
        assert all(part["view"] == "one" for part in parts)
        assert "error" not in parts[0], parts[0].get("error")
        if parts[0]["type"] == "answer":
            return parts[0]["data"]
        return json.loads("".join(part["text"] for part in sorted(parts, key=lambda part: part["seq"])))

    async def message(self, kind: str) -> dict[str, Any]:
        async with asyncio.timeout(20):
            while not (found := [m for m in self.wire.sent if m["type"] == kind]):
                await asyncio.sleep(0.01)
        return found[-1]


@contextlib.asynccontextmanager
async def shown(what: Any, *, model: Any = None) -> AsyncIterator[Page]:
    """A browser whose task runs in this loop, before a page that is ready."""
    browser, wire = Browser(what, model=model), Wire()
    browser.widget = wire
    browser._loop = browser._answers.loop = asyncio.get_running_loop()
    browser._start()
    page = Page(browser, wire)
    page.tell("ready")
    try:
        yield page
    finally:
        browser.close()


def groups_by_hand() -> nb.Groups:
    """Two groups, with something hostile wherever a model, a tool or a user may write."""
    made = nb.Groups()
    for scenario in ("maze", HOSTILE):
        trajectories = [attempt(reward, scenario_id=scenario) for reward in (0.0, 0.5, 1.0)]
        for trajectory in trajectories:
            trajectory.messages_and_choices.insert(0, {"role": "user", "content": f"say {HOSTILE}"})
            trajectory.log(HOSTILE)
            trajectory.metrics["reward/right"] = trajectory.reward or 0.0
        made.append(nb.TrajectoryGroup(trajectories, scenario))
    made[1][0].error = nb.Failure("ValueError", HOSTILE, f"Traceback\n{HOSTILE}")
    return made


async def test_a_browser_whose_cell_is_run_again_ends(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("ARTNB_UI", "live")
    cell = ["first"]
    monkeypatch.setattr(live_widget, "cell_id", lambda: cell[0])
    monkeypatch.setattr(widget, "make_widget", lambda *_: Wire())
    monkeypatch.setattr(widget, "show_widget", lambda _: None)
    monkeypatch.setattr(widget, "Live", lambda *_, **__: None)
    with open_fake(tmp_path) as model:
        made = [nb.browse(model.run) for _ in range(4)]
        for place, browser in zip(("first", "first", "second", None), made, strict=True):
            cell[0] = place
            browser._ipython_display_()
            browser._hear(None, {"type": "ready", "view": str(id(browser))})
            await asyncio.sleep(0)
        tasks = [browser._task for browser in made]
        await asyncio.wait(tasks[:1], timeout=5)
        assert [task.done() for task in tasks] == [True, False, False, False]  # two cells may show one run
        assert made[0].widget is None and made[1].widget is not None
        made[2]._hear(None, {"type": "gone", "view": str(id(made[2]))})  # its output was cleared
        await asyncio.wait([tasks[2]], timeout=5)
        assert tasks[2].done() and made[2].widget is None and not tasks[3].done()
        cell[0] = "third"
        made[0]._ipython_display_()  # shown again, it answers again
        made[0]._hear(None, {"type": "ready", "view": "again"})
        assert (await Page(made[0], made[0].widget).ask("facts"))["name"] == "demo"
        for browser in made:
            browser.close()
        assert not live_widget._in_cells and not any(one in made for one in live_widget._latest.values())


# ---- answers ------------------------------------------------------------------------------------


async def test_a_page_is_answered_whatever_it_asks():
    async with shown(groups_by_hand()) as page:
        facts = await page.ask("facts")
        assert facts["count"] == 6 and facts["groups"] == 2 and not facts["can_replay"]
        told = await page.ask("query", filter="", sort=[["reward", "desc"]], tree=False)
        assert told["count"] == told["matched"] == 6
        rows = (await page.ask("page", query=told["query"], start=0, count=100))["rows"]
        assert [row["reward"] for row in rows][:3] == [1.0, 1.0, 0.5]
        best = rows[0]["key"]
        trajectory = await page.ask("trajectory", trajectory=best)
        assert trajectory["histories"][0]["entries"][0]["text"] == f"say {HOSTILE}"  # unescaped: text nodes
        tokens = await page.ask("tokens", trajectory=best, history=0, start=0)
        assert tokens["ids"] == [1, 2, 3, 65, 66] and tokens["sampled"] == [0, 0, 0, 1, 1]
        compared = await page.ask("compare", ids=[best, rows[3]["key"]])
        assert len(compared["columns"]) == 2
        assert json.loads(await page.ask("messages", trajectory=best, history=0))[0]["role"] == "user"
        assert json.loads(await page.ask("json", trajectory=best))["id"] == best
        assert "$OPENAI_API_KEY" in await page.ask("curl", trajectory=best, turn=0)
        assert await page.ask("same_scenario", trajectory=best)


async def test_the_tree_unfolds_what_is_asked_for(tmp_path: Path):
    with open_fake(tmp_path) as model:
        await play(model)
        async with shown(model.run) as page:
            folded = await page.ask("query", tree=True, expanded=[])
            (step,) = (await page.ask("page", query=folded["query"], start=0, count=9))["rows"]
            assert (step["kind"], step["key"], step["trajectories"]) == ("step", "step:0", 12)
            open_ = await page.ask("query", tree=True, expanded=[step["key"]])
            assert open_["count"] == 1 + len(SCENARIOS)
            everything = await page.ask("query", tree=True, expanded=["*"])
            assert everything["count"] == 1 + len(SCENARIOS) + 12
            assert await page.ask("extremes", step=0)


async def test_a_filter_that_is_wrong_is_told_in_words():
    async with shown(groups_by_hand()) as page:
        told = await page.ask("query", filter="rewrad<3")
        assert "rewrad" in told["error"] and told["at"] == 0
        assert (await page.ask("query", filter="maze"))["matched"] == 3


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"what": "rm"}, "knows no question 'rm'"),
        ({"what": "page", "query": "1"}, "KeyError"),
        ({"what": "replay", "trajectory": "x", "turn": 0}, "model"),
    ],
)
async def test_a_question_that_cannot_be_answered_is_told_so(asked: dict[str, Any], words: str):
    async with shown(groups_by_hand()) as page:
        with pytest.raises(AssertionError, match=words):
            await page.ask(asked.pop("what"), **asked)
        page.browser._hear(None, "nonsense")
        assert (await page.ask("facts"))["count"] == 6  # and it goes on


async def test_hearing_a_page_never_waits_for_the_disk():
    async with shown(groups_by_hand()) as page:
        with page.browser.source._lock:  # as while a body is being read
            thread = threading.Thread(target=page.tell, args=("ask",), kwargs={"id": 9, "what": "facts"})
            thread.start()
            thread.join(5)
            assert not thread.is_alive()
            await asyncio.sleep(0.1)
            assert not [m for m in page.wire.sent if m.get("id") == 9]
        assert (await page.answer(9))["count"] == 6


def test_a_long_answer_comes_in_parts():
    data = {"texts": ["\U0001f600 <b>"] * 60_000}
    messages = in_parts({"id": 1, "view": "a"}, data)
    assert len(messages) == messages[0]["of"] > 3
    assert max(len(json.dumps(message)) for message in messages) < 2 * MOST_BYTES
    assert json.loads("".join(message["text"] for message in messages)) == data
    assert in_parts({"id": 1}, [1]) == [{"type": "answer", "id": 1, "data": [1]}]


# ---- a run that grows, and what a person does ------------------------------------------------------


async def test_a_page_hears_that_the_run_grew(tmp_path: Path):
    with open_fake(tmp_path) as model:
        await play(model)
        async with shown(model.run) as page:
            assert (await page.ask("facts"))["count"] == 12
            await nb.train_step(model, await play(model))
            async with asyncio.timeout(20):
                while (await page.message("grown"))["facts"]["count"] < 24:
                    await asyncio.sleep(0.05)


async def test_nobody_is_told_before_a_page_is_there(tmp_path: Path):
    with open_fake(tmp_path) as model:
        async with shown(model.run) as page:
            page.tell("gone")
            await play(model)
            await asyncio.sleep(3 * widget.LOOK_SECONDS)
            assert not [m for m in page.wire.sent if m["type"] == "grown"]


async def test_overrides_and_bookmarks_are_in_the_journal(tmp_path: Path):
    with open_fake(tmp_path) as model:
        name = (await play(model)).trajectories[0].id
        async with shown(model.run) as page:
            told = await page.ask("override", trajectory=name, reward=0.25, why=f" wrong {HOSTILE} ")
            assert told["kept"] == "run" and told["override"]["reason"] == f"wrong {HOSTILE}"
            await page.ask("bookmark", trajectory=name, note="look")
            seen = await page.ask("trajectory", trajectory=name)
            assert seen["override"]["reward"] == 0.25 and seen["bookmark"]["note"] == "look"
            with pytest.raises(AssertionError, match="reward"):
                await page.ask("override", trajectory=name, reward="nan", why="x")
        kinds = [event["kind"] for event in model.run.events()]
        assert kinds.count("override") == kinds.count("bookmark") == 1
    again = Browser(Run.read("demo", tmp_path))
    assert again.source.trajectory(name)["override"]["reward"] == 0.25


async def test_a_turn_is_replayed_in_the_loop_of_the_model(tmp_path: Path):
    with open_fake(tmp_path) as model:
        name = (await play(model)).trajectories[0].id
        async with shown(model.run, model=model) as page:
            assert (await page.ask("facts"))["can_replay"]
            told = await page.ask("replay", trajectory=name, turn=0)
            assert told["id"] != name and told["entries"][-1]["sampled"]
            assert (await page.ask("trajectory", trajectory=told["id"]))["facts"]["split"] == "replay"
        assert not any(t.id == told["id"] for t in model.run.trajectories(split="train"))


async def test_a_selection_is_exported(tmp_path: Path):
    async with shown(groups_by_hand()) as page:
        query = await page.ask("query", filter="maze")
        path = tmp_path / "kept.jsonl"
        told = await page.ask("export", ids=[], query=query["query"], kind="jsonl", path=str(path))
        assert told["count"] == 3 and len(path.read_text().splitlines()) == 3
        rows = (await page.ask("page", query=query["query"], start=0, count=9))["rows"]
        told = await page.ask("export", ids=[rows[0]["key"]], query="", kind="jsonl", path=str(path))
        assert told["count"] == 1


# ---- what stays ---------------------------------------------------------------------------------


def test_the_static_copy_shows_the_best_and_the_worst_as_text():
    source = Browser(groups_by_hand()).source
    page = browser_html(source)
    assert "6 trajectories, 2 groups" in browser_text(source) and "6 trajectories, 2 groups" in page
    tags = set(re.findall(r"<\s*/?\s*([a-zA-Z]+)", page))
    assert tags <= set(
        ["div", "b", "small", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre"]
    )
    assert "&lt;img" in page and "Best" in page and "Worst" in page and "Failed" in page
    assert page.index("reward 1 ") < page.index("reward 0 ")
    assert len(page) < 40_000
    assert browser_html(source, is_folded=True).startswith("<details><summary><small>Static copy")


async def test_a_saved_copy_of_a_long_run_stays_small(tmp_path: Path):
    with open_fake(tmp_path) as model:
        talk = [{"role": "user", "content": "x" * 50_000}] * 60

        async def rollout(model: Any, scenario: nb.Scenario) -> nb.Trajectory:
            return nb.Trajectory(list(talk), reward=1.0)

        await nb.gather(rollout, SCENARIOS, model=model, group_size=4, progress=False)
        page = nb.browse(model.run)._repr_html_()
        assert len(page) < 200_000 and "messages left out" in page


async def test_the_static_view_takes_over_when_no_page_answers(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(widget, "PATIENCE_SECONDS", -1.0)
    browser = Browser(groups_by_hand())
    browser.widget, browser._shown = Wire(), 1.0
    browser._fall_back()
    assert "did not show the trajectory browser" in browser._note
    assert "did not show" in browser_html(browser.source, note=browser._note)
    browser._hear(None, {"type": "ready", "view": "late"})
    browser._fall_back()
    assert browser._note == ""


def test_it_prints_as_text_and_refuses_what_it_cannot_browse(tmp_path: Path):
    assert "6 trajectories" in repr(nb.browse(groups_by_hand()))
    with pytest.raises(nb.ConfigurationError):
        nb.browse(3)
    with pytest.raises(nb.ConfigurationError):
        nb.browse(tmp_path / "no such run")


# ---- the page -----------------------------------------------------------------------------------


def test_the_page_sets_text_only_and_loads_nothing():
    assert len(SOURCES) == len(widget._SCRIPTS)
    forbidden = (
        *("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "import(", "fetch(", "http"),
        *("XMLHttpRequest", "new Function", ".href", "@import", " url(", ":url(", "createContextualFragment"),
    )
    for path in [*SOURCES, STATIC / "browser.css"]:
        text = path.read_text(encoding="utf-8")
        assert not [word for word in forbidden if word in text.replace("http-equiv", "")], path.name
    frames = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    assert frames.count("srcdoc") == 1 and 'sandbox: ""' in frames and "default-src 'none'" in frames


def test_the_widget_holds_all_its_code():
    made = widget._widget_class()
    assert "class Table" in made._esm and "export default" in made._esm and ".artnb-browse" in made._css
    assert len(made._esm) + len(made._css) < 120_000
    names = re.findall(r"^(?:class|function|async function|const) (\w+)", made._esm, re.MULTILINE)
    assert len(names) == len(set(names))  # the files share one module


# ---- a kernel -----------------------------------------------------------------------------------

SHOW = """
import artnb as nb
model = nb.Model(run="shown", root="runs", backend=nb.FakeBackend(delay=0.05))
async def rollout(model, scenario):
    messages = [{"role": "user", "content": scenario.id}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=8)
    return nb.Trajectory([*messages, reply.choices[0]], reward=1.0)
scenarios = [nb.Scenario(id=f"task {i}") for i in range(4)]
await nb.gather(rollout, scenarios, model=model, group_size=2, progress=False)
browser = nb.browse(model.run)
browser._ipython_display_()
print("comm", browser.widget.comm.comm_id)
"""
WAIT = """
import asyncio, time
print("waiting")
started = time.monotonic()
while not heard and time.monotonic() < started + 20:
    await nb.gather(rollout, scenarios, model=model, group_size=4, progress=False)
print("heard", len(heard))
"""
LISTEN = """
heard = []
send = browser.widget.send
browser.widget.send = lambda message, *more: (heard.append(message["type"]), send(message, *more))[1]
"""


OLD_WIDGETS = {"6.17.1": "anywidget==0.9.21", "7.3.0": "anywidget"}


def test_a_page_is_answered_while_a_cell_runs(tmp_path: Path):
    answered_while_a_cell_runs(tmp_path, sys.executable)


@pytest.mark.slow
@pytest.mark.parametrize("version", OLD_KERNELS)
def test_a_page_is_answered_on_older_kernels(tmp_path: Path, version: str):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*OLD_KERNELS[version], OLD_WIDGETS[version], *project["dependencies"]]
    answered_while_a_cell_runs(tmp_path, environment(f"browse-{version}", wanted))


def answered_while_a_cell_runs(folder: Path, python: Path | str) -> None:
    with running_kernel(folder, python, ARTNB_UI="live") as kernel:
        comm = re.search(r"comm (\w+)", kernel.run(SHOW))[1]  # type: ignore[index]
        kernel.run(LISTEN)
        cell = kernel.start(WAIT)
        cell.prints("waiting")
        content = {"type": "ask", "id": 1, "view": "v", "what": "facts"}
        kernel.click(comm, {"method": "custom", "content": content})
        cell.prints("heard 1")
        answers = [m for m in kernel.messages if m["msg_type"] == "comm_msg"]
        told = [m["content"]["data"].get("content") or {} for m in answers]
        (answer,) = [one for one in told if one.get("type") == "answer"]
        assert answer["data"]["name"] == "shown" and answer["data"]["count"] >= 8
