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
model = nb.Model(run="browser", root="runs", backend=Telling(delay=0.01))
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


def test_it_follows_a_loop_and_stops_it_by_click(browser: Any, tmp_path: Path):
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
        page.get_by_label("Learning rate from the next step").fill("3e-4")
        page.get_by_role("button", name="Set", exact=True).click()
        page.get_by_label("Note for the run's journal").fill(f"looks good {HOSTILE}")
        page.get_by_role("button", name="Add note").click()
        lab.wait(f"{STEPS} >= {paused_at + 14}")
        shot(lab, "dashboard_light")
        lab.command("apputils:change-theme", "{theme: 'JupyterLab Dark'}")
        lab.wait("document.querySelector('.artnb').dataset.theme === 'dark'")
        page.wait_for_timeout(500)
        shot(lab, "dashboard_dark")
        page.get_by_role("button", name="■ Stop after this step").click()
        ended = page.locator(".jp-OutputArea-output", has_text="the loop ended at step")
        ended.wait_for()
        reached = int(re.search(r"at step (\d+)", ended.inner_text())[1])  # type: ignore[index]
        lab.wait(f"{STEPS} === {reached}")
        assert 3 < reached < 400
        assert page.evaluate("window.HURT") is None
        assert page.locator(".artnb").get_by_text(HOSTILE).count() >= 1  # seen, as text
        assert not [url for url in requests if not url.startswith((address, "data:", "blob:"))]
        assert not lab.errors
    run = Run.read("browser", tmp_path / "runs")
    asked = [e["control"] for e in run.events() if e["kind"] == "control"]
    assert asked == ["pause", "resume", "learning_rate", "stop"]
    assert [e["text"] for e in run.events() if e["kind"] == "note"][-1].startswith("looks good")
    rates = [record["learning_rate"] for record in run.metrics()]
    assert rates[0] == 1e-4 and rates[-1] == 3e-4


def test_it_says_so_where_widgets_are_not_shown(browser: Any, tmp_path: Path):
    deaf = "import artnb.dashboard.widget as w; w.Dashboard._hear = lambda *_: None\n"  # 'ready' gets lost
    with running_lab(tmp_path) as address:
        lab = Lab(browser.new_page(viewport={"width": 1300, "height": 1200}))
        lead(lab, address, tmp_path, [SETUP % HOSTILE, deaf + SHOW, TRAIN])
        static = lab.page.locator(".jp-OutputArea-output", has_text="This front end did not show")
        static.wait_for()
        lab.wait("/step [3-9]/.test(document.querySelectorAll('.jp-OutputArea')[1].innerText)")
        assert lab.page.evaluate("window.HURT") is None
        assert HOSTILE in static.inner_text()
        lab.page.screenshot(path=SHOTS / "fallback.png")
