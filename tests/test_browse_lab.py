"""A person looks through a hostile run in a real JupyterLab while it grows, and through 100,000 rows.

Needs Chromium and playwright. Screenshots are left in out/screenshots: look at them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_tools import Lab, running_chromium, running_lab, write_notebook

from artnb.browser import Browser, widget
from artnb.store import Run
from artnb.types import Trajectory, TrajectoryGroup, Turn

pytestmark = pytest.mark.slow

SHOTS = Path(__file__).resolve().parent.parent / "out" / "screenshots"
HOSTILE = (
    '<img src=x onerror="window.HURT=(window.HURT||[]).concat(1)"><script>window.HURT=[2]</script>'
    '<b onclick="1" style="color:red">bold</b>'
)
"""As in the experiments that found out where a notebook lets markup through."""

SETUP = """
import asyncio, json, math, random
import artnb as nb

HOSTILE = %r
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Finds a page. " + HOSTILE,
          "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}}]
PICTURE = ("data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAoAAAAKCAYAAACNMs+9AAAAFUlEQVR42mNk+M9Qz0AEYBxVSF+"
           "FAAhKDveksOjmAAAAAElFTkSuQmCC")

def reply(prompt, version):
    rng = random.Random(prompt + str(version))
    word = rng.choice(["north", "south", "the boat", "a lamp"])
    return f"Go {word}. {HOSTILE}"

async def rollout(model, scenario):
    level, rng = scenario.task["level"], random.Random()
    right = rng.random() < 1.1 - 0.8 * math.exp(-model.policy_version / 6) - 0.5 * level
    def call(name, arguments):
        return {"id": name, "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    fine, broken = call("c1", json.dumps({"query": HOSTILE, "top_k": 3})), call("c2", '{"query": ' + HOSTILE)
    thought = f"I look it up. {HOSTILE}"
    pictures = [{"type": "image_url", "image_url": {"url": PICTURE}},
                {"type": "image_url", "image_url": {"url": "https://example.com/pixel.png?" + HOSTILE}}]
    messages = [
        {"role": "system", "content": "You walk through a maze and may look things up. " * 14},
        {"role": "user", "content": [{"type": "text", "text": f"{scenario.id}: where to? {HOSTILE}"},
            *(pictures if scenario.id == HOSTILE else [])]},
        {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [fine]},
        {"role": "tool", "tool_call_id": "c1", "name": "look_up", "content": json.dumps({"page": HOSTILE})},
        {"role": "assistant", "content": None, "tool_calls": [broken]},
        {"role": "tool", "tool_call_id": "c2", "name": "look_up", "content": "error: " + HOSTILE},
    ]
    asked = [{"role": "user", "content": f"{scenario.id} {rng.random()}"}]
    answer = await model.client.chat.completions.create(model=model.name, messages=asked, max_tokens=200)
    trajectory = nb.Trajectory([*messages, *asked, answer.choices[0]], tools=TOOLS)
    if rng.random() < 0.03:
        raise ValueError(f"the door is shut {HOSTILE}")
    trajectory.reward = 0.8 * right + 0.2 * round(rng.random(), 2)
    trajectory.metrics = {"reward/right": float(right), "reward/brief": rng.random()}
    trajectory.metrics["steps_walked"] = rng.randint(1, 30)
    trajectory.metadata["note"] = HOSTILE
    trajectory.log(f"walked {HOSTILE}")
    return trajectory

SCENARIOS = [nb.Scenario(id=f"maze {i}" if i else HOSTILE, task={"level": i / 8}) for i in range(8)]
model = nb.Model(run="maze", root="runs", backend=nb.FakeBackend(script=reply))
async def train(steps, group_size):
    for step in model.run.steps(model.run.step + steps):
        groups = await nb.gather(rollout, SCENARIOS, model=model, group_size=group_size, progress=False)
        await nb.train_step(model, groups)
await train(16, 16)
print("gathered", model.run.step)
"""
SHOW = "browser = nb.browse(model.run, model=model); browser"
TRAIN = """
while not (model.run.path / "enough").exists():
    await train(1, 4)
    await asyncio.sleep(0.2)
print("the loop ended")
"""
ROWS = ".ab-rows .ab-row"
ACTIVE_CELL = "window.jupyterapp.shell.currentWidget.content.activeCellIndex"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with running_chromium() as browser:
        yield browser


def shot(page: Any, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.locator(".artnb-browse").first.screenshot(path=SHOTS / f"{name}.png")


def matched(page: Any, condition: str) -> None:
    number = "Number(document.querySelector('.artnb-browse').dataset.matched)"
    page.wait_for_function(f"() => {{ const n = {number}; return {condition}; }}")


def test_a_hostile_run_is_looked_through_while_it_grows(chromium: Any, tmp_path: Path):
    with running_lab(tmp_path) as address:
        page = chromium.new_page(viewport={"width": 1300, "height": 2000})
        lab = Lab(page)
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        write_notebook(tmp_path / "browse.ipynb", [SETUP % HOSTILE, SHOW, TRAIN])
        lab.open(address, "browse.ipynb")
        for _ in range(3):
            lab.run_cell()
        lab.wait("Number(document.querySelector('.artnb-browse')?.dataset.count || 0) >= 2048")
        look_through(page)
        read_one(page)
        compare_and_judge(page)
        lab.command("apputils:change-theme", "{theme: 'JupyterLab Dark'}")
        lab.wait("document.querySelector('.artnb-browse').dataset.theme === 'dark'")
        page.wait_for_timeout(400)
        shot(page, "browse_compare_dark")
        before = page.evaluate("Number(document.querySelector('.artnb-browse').dataset.count)")
        lab.wait(
            f"Number(document.querySelector('.artnb-browse').dataset.count) > {before}"
        )  # the loop goes on
        (tmp_path / "runs" / "maze" / "enough").touch()
        page.locator(".jp-OutputArea-output", has_text="the loop ended").wait_for()
        tokens_and_tabs(page)
        assert page.locator(".jp-OutputArea-output", has_text="Static copy: maze").count() == 1
        assert page.evaluate("window.HURT") is None
        assert len(page.locator(".jp-Notebook .jp-CodeCell").all()) in (3, 4)  # no key reached the notebook
        outside = [url for url in requests if not url.startswith((address, "data:", "blob:", "about:"))]
        assert not outside
        assert not lab.errors
    run = Run.read("maze", tmp_path / "runs")
    kinds = [event["kind"] for event in run.events()]
    assert kinds.count("override") == 1 and kinds.count("bookmark") == 1
    assert (tmp_path / "kept.jsonl").read_text().count("\n") == 2


def look_through(page: Any) -> None:
    """Filter, sort, fold, choose columns."""
    total = page.evaluate("Number(document.querySelector('.artnb-browse').dataset.count)")
    page.locator(f"{ROWS}.ab-group").first.wait_for()
    shot(page, "browse_table")
    page.get_by_label("Filter trajectories").fill("step:3 rewrad<1")
    page.get_by_role("alert").get_by_text("rewrad").first.wait_for()
    shot(page, "browse_filter_error")
    page.get_by_label("Filter trajectories").fill("step:3 reward<0.5")
    matched(page, f"n > 0 && n < {total} / 8")
    page.get_by_role("button", name="☰ grouped").click()
    page.get_by_role("button", name="reward", exact=True).click()
    page.get_by_role("columnheader", name="reward ▼").wait_for()
    page.wait_for_timeout(400)
    values = page.locator(f"{ROWS} .ab-value").all_inner_texts()
    numbers = [float(value) for value in values]
    assert len(numbers) > 5 and numbers == sorted(numbers, reverse=True)
    page.get_by_label("Filter trajectories").fill('text:"the boat"')
    matched(page, f"n > 0 && n < {total}")
    page.get_by_label("Filter trajectories").fill("")
    matched(page, f"n >= {total}")
    assert page.locator(ROWS).count() < 60
    page.get_by_role("button", name="Columns ▾").click()
    page.get_by_label("version").first.check()
    shot(page, "browse_columns")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="?").click()
    page.wait_for_timeout(150)
    shot(page, "browse_help")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="☰ grouped").click()


def read_one(page: Any) -> None:
    """By keys alone: from the filter into the table, open one, read it."""
    page.get_by_label("Filter trajectories").fill('step:2 scored "<img src"')
    matched(page, "n > 5 && n < 17")
    page.get_by_label("Filter trajectories").press("Enter")
    active = page.evaluate(ACTIVE_CELL)
    for key in ("Home", "j", "j", "ArrowDown", "k", "Enter"):
        page.keyboard.press(key)
    assert page.evaluate(ACTIVE_CELL) == active  # the keys were the table's, not the notebook's
    detail = page.locator(".ab-right")
    detail.get_by_role("tab", name="Chat").wait_for()
    assert detail.get_by_text(HOSTILE).count() >= 4  # seen, as text
    assert detail.locator(".ab-call").count() == 2 and detail.locator(".ab-broken").count() == 1
    assert detail.locator(".ab-call").first.locator(".ab-result").count() == 1  # a call with its result
    assert detail.locator(".ab-picture img").count() == 1  # the stored one; the address is text
    assert detail.get_by_text("https://example.com/pixel.png").count() == 1
    detail.get_by_text("Reasoning,").first.click()
    shot(page, "browse_chat")
    page.keyboard.press("]")
    page.keyboard.press("Escape")
    detail.wait_for(state="hidden")


def compare_and_judge(page: Any) -> None:
    """Select two with the space bar, compare; override a reward and keep a bookmark; export."""
    page.keyboard.press("/")
    page.get_by_label("Filter trajectories").fill("step:2 scored maze")
    matched(page, "n > 50 && n < 113")
    page.get_by_label("Filter trajectories").press("Enter")
    for key in ("Home", "j", "j", " ", "j", " "):
        page.keyboard.press(key)
    page.get_by_text("2 selected").wait_for()
    page.get_by_role("button", name="Export ▾").click()
    page.get_by_label("File, beside the notebook").fill("kept.jsonl")
    page.get_by_role("button", name="Write").click()
    page.get_by_text("Wrote 2 trajectories").wait_for()
    page.locator(".ab-table").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="✎ Override").click()
    page.get_by_label("Reward", exact=True).fill("0.125")
    page.get_by_label("Reason").fill(f"it guessed {HOSTILE}")
    page.get_by_role("button", name="Set", exact=True).click()
    page.get_by_text("A person set the reward to 0.125").wait_for()
    page.get_by_role("button", name="☆ Bookmark").click()
    page.get_by_label("Note (may be empty)").fill("show this to the others")
    page.get_by_role("button", name="Keep").click()
    page.get_by_role("button", name="★ Bookmarked").wait_for()
    shot(page, "browse_overridden")
    page.locator(".ab-turnbar").get_by_role("button", name="replay").last.click()
    page.wait_for_function(
        "() => !(document.querySelector('.ab-replay')?.innerText ?? 'Sampling').startsWith('Sampling')"
    )
    assert "replayed with the current policy" in page.locator(".ab-replay").inner_text()
    page.locator(".ab-table").focus()
    page.keyboard.press("c")
    page.get_by_text("◆ first difference").first.wait_for()
    shot(page, "browse_compare")


def tokens_and_tabs(page: Any) -> None:
    page.get_by_role("button", name="Compare ▾").or_(
        page.get_by_role("button", name="open").first
    ).first.click()
    detail = page.locator(".ab-right")
    detail.get_by_role("tab", name="Tokens").click()
    detail.locator(".ab-t").nth(30).wait_for()
    detail.locator(".ab-t:not(.ab-context)").nth(20).hover()
    detail.get_by_text("engine −").first.wait_for()
    shot(page, "browse_tokens_dark")
    detail.get_by_role("tab", name="Facts").click()
    shot(page, "browse_facts_dark")
    page.get_by_role("button", name="▲▼ Best & worst").click()
    page.get_by_text("Best and worst of each group").wait_for()
    shot(page, "browse_groups_dark")


# ---- the page without JupyterLab: what does not depend on it ---------------------------------------


class Place:
    """The widget's module in an empty page; its questions go to a Browser of this process."""

    def __init__(self, page: Any, browser: Browser) -> None:
        self.page, self.browser = page, browser
        self.asked: list[dict[str, Any]] = []
        made = widget._widget_class()
        page.expose_function("toKernel", lambda message: self.asked.append(message))
        page.set_content(f"<!doctype html><style>{made._css}</style><div id=place></div>")
        page.evaluate(
            """async (code) => {
              const module = await import(URL.createObjectURL(new Blob([code], {type: "text/javascript"})));
              window.ears = [];
              const on = (_, ear) => window.ears.push(ear);
              const model = {send: (message) => window.toKernel(message), on, off() {}};
              module.default.render({model, el: document.getElementById("place")});
            }""",
            made._esm,
        )

    def until(self, condition: str, seconds: float = 60) -> None:
        """Pass messages on until this JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, condition
            self.page.wait_for_timeout(10)
            while self.asked:
                self.browser._hear(None, self.asked.pop(0))
            while self.browser._outbox:
                message = json.loads(json.dumps(self.browser._outbox.popleft()))
                self.page.evaluate("(m) => window.ears.forEach((ear) => ear(m))", message)


class Drawn:
    """An environment that breaks its contract: what it draws is not escaped."""

    def render(self, trajectory: Trajectory) -> str:
        return f"<p>the board</p>{HOSTILE}<script>parent.HURT = 3; top.HURT = 4</script>"


def test_an_environments_drawing_is_shut_in(chromium: Any):
    page = chromium.new_page(viewport={"width": 1200, "height": 900})
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    place = Place(page, Browser(many(1, 2), environment=Drawn()))
    place.until("document.querySelector('.ab-rows .ab-row input') !== null")
    page.locator(f"{ROWS}:has(input)").first.click()
    place.until("document.querySelector('[role=tab]') !== null")
    page.get_by_role("tab", name="Environment").click()
    page.frame_locator(".ab-frame").get_by_text("the board").wait_for(timeout=20_000)
    place.until("document.querySelector('.ab-frame') !== null")
    assert page.evaluate("window.HURT") is None
    assert not [url for url in requests if not url.startswith(("data:", "blob:", "about:"))]
    place.browser.close()


def many(groups: int, size: int) -> list[TrajectoryGroup]:
    turn = Turn((1,), (2, 3), (-0.5, -0.1), 0, "stop", {"role": "assistant", "content": "x"})
    return [
        TrajectoryGroup([Trajectory([turn], reward=(i + j) % 7 / 6) for j in range(size)], f"task {i}")
        for i in range(groups)
    ]


def test_100_000_rows_are_scrolled_through_and_few_exist(chromium: Any):
    page = chromium.new_page(viewport={"width": 1200, "height": 900})
    place = Place(page, Browser(many(5_000, 20)))
    place.until("Number(document.querySelector('.artnb-browse')?.dataset.matched || 0) === 100000")
    page.get_by_role("button", name="Unfold all").click()
    place.until("document.querySelectorAll('.ab-rows .ab-row.ab-row input').length > 3")
    for share in (0.5, 0.999, 0.25):
        table = page.locator(".ab-table")
        table.evaluate("(table, share) => { table.scrollTop = share * table.scrollHeight; }", share)
        place.until(
            "[...document.querySelectorAll('.ab-rows .ab-row')].every((row) => row.innerText !== '…')"
            " && document.querySelector('.ab-rows .ab-row') !== null"
        )
        assert 5 < page.locator(ROWS).count() < 60
    page.locator(".ab-table").focus()
    page.keyboard.press("End")
    place.until("document.querySelector('.ab-active')?.innerText.includes('✓ scored') === true")
    place.browser.close()


def test_16_000_tokens_are_drawn_at_once(chromium: Any):
    page = chromium.new_page(viewport={"width": 1200, "height": 900})
    n = 16_000
    turn = Turn(
        (1,) * 100,
        tuple(i % 200 for i in range(n)),
        (-0.5,) * n,
        0,
        "stop",
        {"role": "assistant", "content": "x"},
    )
    place = Place(page, Browser([TrajectoryGroup([Trajectory([turn], reward=1.0)], "long")]))
    place.until("document.querySelector('.ab-rows .ab-row input') !== null")
    page.locator(f"{ROWS}:has(input)").first.click()
    place.until("document.querySelector('[role=tab]') !== null")
    page.get_by_role("tab", name="Tokens").click()
    place.until("document.querySelectorAll('.ab-tokens .ab-t').length > 16000")
    taken = page.evaluate("Number(document.querySelector('.ab-tokenview').dataset.milliseconds)")
    assert 0 < taken < 1000  # the benchmark measures it on an idle machine; here others may be at work
    page.locator(".ab-tokens .ab-t").nth(500).hover()
    assert "engine −0.5 (p 0.607)" in page.locator(".ab-reading").inner_text()
    place.browser.close()
