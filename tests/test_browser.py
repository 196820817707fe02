"""A live dashboard in a real JupyterLab: it follows a training loop, and its buttons steer the loop.

Needs Chromium and playwright. Screenshots are left in out/screenshots: look at them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_tools import Lab, running_lab, write_notebook

from artnb.store import Run

pytestmark = pytest.mark.slow

SHOTS = Path(__file__).resolve().parent.parent / "out" / "screenshots"
HOSTILE = '<img src=x onerror="window.HURT=1"><script>window.HURT=2</script>'

SETUP = """
import asyncio, math, random
import artnb as nb

HOSTILE = %r

class Telling(nb.FakeBackend):
    # FakeBackend with the measurements of a real trainer, made up from its version.
    async def forward_backward(self, samples, config, *, loss_denominator):
        told = await super().forward_backward(samples, config, loss_denominator=loss_denominator)
        k, noise = self.policy_version, random.Random(self.policy_version).random
        return told | {
            "entropy": 1.6 * math.exp(-k / 40) + 0.1 * noise(), "kl_k1": 0.004 * noise(),
            "kl_k3": 0.003 + 0.004 * noise(), "effective_sample_size": 0.9 + 0.08 * noise(),
            "ratio_p05": 0.8 + 0.05 * noise(), "ratio_p50": 1.0, "ratio_p95": 1.2 + 0.05 * noise(),
            "logprob_gap_mean": 0.02 + 0.01 * noise(), "logprob_gap_max": 0.2 + 0.1 * noise(),
            "fraction_capped": 0.02 * noise(),
            "learning_rate": config.learning_rate,
        }

async def rollout(model, scenario):
    messages = [{"role": "user", "content": scenario.id}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=64)
    trajectory = nb.Trajectory([*messages, reply.choices[0]])
    skill = 1.05 - 0.9 * math.exp(-model.policy_version / 12)
    right = random.random() < skill * (1.25 - scenario.task["level"])
    parts = {"reward/right": float(right), "reward/brief": random.random()}
    trajectory.metrics = parts | {"success": float(right)}
    trajectory.reward = 0.9 * right + 0.1 * (parts["reward/brief"] > 0.95)
    return trajectory

SCENARIOS = [nb.Scenario(id=f"task {i}" if i else HOSTILE, task={"level": i / 8}) for i in range(8)]
model = nb.Model(run="browser", root="runs", backend=Telling(delay=0.01), keep_checkpoints=40)
model.run.note(HOSTILE)
"""
SHOW = "nb.Dashboard(model.run, baselines={'random player': 0.12, HOSTILE: 0.3})"
TRAIN = """
for step in model.run.steps(400):
    groups = await nb.gather(rollout, SCENARIOS, model=model, group_size=6, progress=False)
    await nb.train_step(model, groups, learning_rate=1e-4)
    if step % 10 == 0:
        await nb.evaluate(rollout, SCENARIOS, model=model, attempts=2, progress=False)
    await asyncio.sleep(0.1)
print("the loop ended at step", model.run.step)
"""
STEPS = "Number(document.querySelector('.artnb')?.dataset.steps || 0)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=arguments)
        yield chromium
        chromium.close()


def shot(lab: Lab, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    lab.page.locator(".artnb").screenshot(path=SHOTS / f"{name}.png")


def lead(lab: Lab, address: str, folder: Path, cells: list[str]) -> None:
    write_notebook(folder / "live.ipynb", cells)
    lab.open(address, "live.ipynb")
    for _ in cells:
        lab.run_cell()


def test_it_follows_a_loop_and_steers_it_by_click(browser: Any, tmp_path: Path):
    with running_lab(tmp_path) as address:
        page = browser.new_page(viewport={"width": 1300, "height": 3000})
        lab = Lab(page)
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        lead(lab, address, tmp_path, [SETUP % HOSTILE, SHOW, TRAIN])
        lab.wait(f"{STEPS} >= 3")
        page.get_by_role("button", name="‖ Pause").click()
        page.get_by_role("button", name="▶ Go on").wait_for()
        page.wait_for_timeout(1500)  # the step under way ends
        paused_at = lab.page.evaluate(STEPS)
        page.wait_for_timeout(1500)
        assert lab.page.evaluate(STEPS) == paused_at
        page.get_by_role("button", name="▶ Go on").click()
        change(lab, "learning_rate", "3e-4")
        change(lab, "group_size", "4")
        change(lab, "kl_coef", "-1")
        page.get_by_text("must be a number >= 0").wait_for()
        page.get_by_label("Note for the run's journal").fill(f"looks good {HOSTILE}")
        page.get_by_role("button", name="Add note").click()
        lab.wait(f"{STEPS} >= {paused_at + 14}")
        shot(lab, "dashboard_light")
        lab.command("apputils:change-theme", "{theme: 'JupyterLab Dark'}")
        lab.wait("document.querySelector('.artnb').dataset.theme === 'dark'")
        page.wait_for_timeout(500)
        shot(lab, "dashboard_dark")
        roll_back(lab)
        page.get_by_role("button", name="■ Stop after this step").click()
        ended = page.locator(".jp-OutputArea-output", has_text="the loop ended at step")
        ended.wait_for()
        reached = int(re.search(r"at step (\d+)", ended.inner_text())[1])  # type: ignore[index]
        lab.wait(f"{STEPS} === {reached}")
        page.locator(".artnb-state", has_text="■ no loop is running").wait_for()
        page.locator(".jp-OutputArea-output img[src^='data:image/png']").wait_for()
        assert 3 < reached < 400
        assert page.evaluate("window.HURT") is None
        assert page.locator(".artnb").get_by_text(HOSTILE).count() >= 1  # seen, as text
        assert not [url for url in requests if not url.startswith((address, "data:", "blob:"))]
        assert not lab.errors
    run = Run.read("browser", tmp_path / "runs")
    asked = [e["control"] for e in run.events() if e["kind"] == "control"]
    assert asked == ["pause", "resume", "learning_rate", "group_size", "roll_back", "stop"]
    assert [e["text"] for e in run.events() if e["kind"] == "note"][-1].startswith("looks good")
    rates = [record["learning_rate"] for record in run.metrics()]
    assert rates[0] == 1e-4 and rates[-1] == 3e-4
    assert run.metrics()[0]["trajectories"] == 48 and run.metrics()[-1]["trajectories"] == 32


def change(lab: Lab, setting: str, value: str) -> None:
    lab.page.get_by_label("Setting to change from the next step").select_option(setting)
    lab.page.get_by_label("Its value from the next step").fill(value)
    lab.page.get_by_role("button", name="Set", exact=True).click()
    lab.page.wait_for_timeout(600)


def roll_back(lab: Lab) -> None:
    """Click, confirm, and see the curve fall back to the step that was chosen."""
    target = lab.page.get_by_label("Step to roll back to")
    step = int(target.locator("option").nth(1).get_attribute("value") or "0") - 1
    target.select_option(str(step))
    lab.page.get_by_role("button", name="↶ Roll back").click()
    lab.page.get_by_role("button", name=f"Really, to step {step}?").click()
    lab.page.get_by_text(re.compile(f"Went back from step \\d+ to step {step}")).first.wait_for()
    lab.page.wait_for_timeout(700)
    shot(lab, "dashboard_rolled_back")


def test_charts_are_read_zoomed_and_chosen_by_mouse_and_keys(browser: Any, tmp_path: Path):
    short = TRAIN.replace("steps(400)", "steps(30)").replace("await asyncio.sleep(0.1)", "pass")
    with running_lab(tmp_path) as address:
        page = browser.new_page(viewport={"width": 1300, "height": 3200})
        lab = Lab(page)
        lead(lab, address, tmp_path, [SETUP % HOSTILE, SHOW, short])
        lab.wait(f"{STEPS} === 30")
        page.wait_for_timeout(1000)
        chart = page.locator(".artnb-chart").first
        plot, at = chart.locator(".u-over"), chart.locator(".artnb-at")
        assert at.inner_text() == "step 29"
        box = plot.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
        lab.wait("/step 1[3-6]/.test(document.querySelector('.artnb-at').textContent)")
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 60, steps=5)
        page.mouse.up()
        show_all = page.get_by_role("button", name="Show all steps")
        show_all.wait_for()
        shot(lab, "dashboard_zoomed")
        page.mouse.move(box["x"] + 3, box["y"] + 40)  # the left edge is now a later step
        lab.wait("/step 1[2-7]/.test(document.querySelector('.artnb-at').textContent)")
        page.mouse.dblclick(box["x"] + 80, box["y"] + 40)
        show_all.wait_for(state="hidden")
        page.mouse.move(0, 0)
        chart.focus()
        page.keyboard.press("Home")
        lab.wait("document.querySelector('.artnb-at').textContent === 'step 0'")
        page.keyboard.press("ArrowRight")
        lab.wait("document.querySelector('.artnb-at').textContent === 'step 1'")
        page.keyboard.press("+")
        show_all.wait_for()
        page.keyboard.press("0")
        show_all.wait_for(state="hidden")
        before = picture(page)
        page.get_by_label("Log scale").check()
        page.wait_for_timeout(300)
        logged = picture(page)
        assert logged != before
        page.get_by_label("Smoothing").focus()
        for _ in range(16):
            page.keyboard.press("ArrowRight")
        page.wait_for_timeout(300)
        assert picture(page) != logged
        shot(lab, "dashboard_log_smooth")
        page.get_by_label("Log scale").uncheck()
        page.get_by_text("Choose charts").click()
        loss = page.locator(".artnb-chart figcaption", has_text=re.compile("^Loss"))
        assert loss.is_visible()
        page.get_by_label("Loss", exact=True).uncheck()
        loss.wait_for(state="hidden")
        page.get_by_label("Loss", exact=True).check()
        loss.wait_for()
        strip = page.locator(".artnb-strip")
        strip.focus()
        page.keyboard.press("ArrowLeft")
        assert "Step 29" in page.locator(".artnb-strip-reading").inner_text()
        page.keyboard.press("ArrowLeft")
        assert "Step 28" in page.locator(".artnb-strip-reading").inner_text()
        page.locator(".artnb-key", has_text="best so far").press("Enter")
        assert page.locator(".artnb-key", has_text="best so far").get_attribute("aria-pressed") == "false"
        shot(lab, "dashboard_choices")
        assert not lab.errors


def picture(page: Any) -> str:
    """The pixels of the reward chart."""
    return page.evaluate("document.querySelector('.artnb-chart canvas').toDataURL()")


def test_several_runs_are_compared_and_a_cell_that_is_run_again_leaves_no_task(browser: Any, tmp_path: Path):
    short = TRAIN.replace("steps(400)", "steps(12)").replace("await asyncio.sleep(0.1)", "pass")
    second = (
        "model = nb.Model(run='with <b>lower</b> rate', root='runs', backend=Telling(delay=0.01), seed=1)"
    )
    compare = "d = nb.Dashboard(['browser', 'with <b>lower</b> rate'], root='runs')\nd"
    count = "print('tasks', sum('_keep_up' in repr(t) for t in asyncio.all_tasks()))"
    with running_lab(tmp_path) as address:
        page = browser.new_page(viewport={"width": 1300, "height": 2600})
        lab = Lab(page)
        cells = [SETUP % HOSTILE, short, second.replace("<b>lower</b>", "a lower"), short]
        lead(lab, address, tmp_path, [*cells, compare.replace("<b>lower</b>", "a lower"), count])
        lab.wait(f"{STEPS} === 12")
        page.wait_for_timeout(1000)
        assert page.locator(".artnb-name").inner_text() == "2 runs"
        keys = page.locator(".artnb-chart").first.locator(".artnb-key")
        assert [keys.nth(i).locator("span").inner_text() for i in range(2)] == [
            "browser",
            "with a lower rate",
        ]
        page.get_by_label("Run whose buttons").select_option("1")
        page.get_by_label("Note for the run's journal").fill("the second")
        page.get_by_role("button", name="Add note").click()
        page.locator(".artnb-events").get_by_text("Note: the second").wait_for()
        shot(lab, "dashboard_compared")
        lab.command("apputils:change-theme", "{theme: 'JupyterLab Dark'}")
        lab.wait("document.querySelector('.artnb').dataset.theme === 'dark'")
        page.wait_for_timeout(500)
        shot(lab, "dashboard_compared_dark")
        for _ in range(2):
            lab.command("notebook:move-cursor-up")
        page.wait_for_timeout(500)
        lab.run_cell()
        page.wait_for_timeout(4000)
        lab.wait(f"{STEPS} === 12")
        lab.run_cell()
        page.locator(".jp-OutputArea-output", has_text="tasks 1").wait_for()
        assert not lab.errors
    events = Run.read("with a lower rate", tmp_path / "runs").events()
    assert [e["text"] for e in events if e["kind"] == "note"] == ["the second"]


def test_it_says_so_where_widgets_are_not_shown(browser: Any, tmp_path: Path):
    deaf = """
import artnb.dashboard.widget as w
heard = w.Dashboard._hear
w.Dashboard._hear = lambda self, _, message, *more: message.get("type") == "ready" or heard(self, _, message)
"""  # what the widget says first gets lost
    with running_lab(tmp_path) as address:
        lab = Lab(browser.new_page(viewport={"width": 1300, "height": 1200}))
        lead(lab, address, tmp_path, [SETUP % HOSTILE, deaf + SHOW, TRAIN])
        static = lab.page.locator(".jp-OutputArea-output", has_text="This front end did not show")
        static.wait_for()
        lab.wait("/step [3-9]/.test(document.querySelectorAll('.jp-OutputArea')[1].innerText)")
        assert lab.page.evaluate("window.HURT") is None
        assert HOSTILE in static.inner_text()
        lab.page.screenshot(path=SHOTS / "fallback.png")
        lab.page.get_by_role("button", name="Stop after this step").click()
        lab.page.locator(".jp-OutputArea-output", has_text="the loop ended at step").wait_for()
