"""A page that is loaded again in a real JupyterLab: the views come back, dark where the page is dark, and a
zoom into a long run asks for the steps that were left out.

Needs Chromium and playwright. Screenshots are left in out/screenshots: look at them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lab_tools import Lab, running_chromium, running_lab, write_notebook

pytestmark = pytest.mark.slow

SHOTS = Path(__file__).resolve().parent.parent / "out" / "screenshots"
STEPS = 4000
CELLS = [
    f"""
import json, math, random
import artnb as nb
from artnb.store import Run

long = Run.open("long", "runs", identity={{"base_model": "none"}})
names = [f"measured {{i}}" for i in range(24)] + ["loss", "entropy", "kl_k3", "grad_norm", "learning_rate"]
def line(step):
    reward = 1 - math.exp(-step / 900) + random.gauss(0, 0.05)
    about = {{"kind": "train", "step": step, "session": 1, "time": 1.0, "reward_mean": reward}}
    return json.dumps(about | {{name: random.random() for name in names}})
(long.path / "metrics.jsonl").write_text("\\n".join(map(line, range({STEPS}))) + "\\n")

async def rollout(model, scenario):
    messages = [{{"role": "user", "content": scenario.id}}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=8)
    return nb.Trajectory([*messages, reply.choices[0]], reward=len(reply.choices[0].message.content) / 60)

model = nb.Model(run="small", root="runs", backend=nb.FakeBackend())
""",
    "nb.Dashboard(long)",
    "nb.browse(model.run)",
    "talk = nb.chat(model)",
    """
for step in model.run.steps(3):
    tasks = [nb.Scenario("a"), nb.Scenario("b")]
    groups = await nb.gather(rollout, tasks, model=model, group_size=4, progress=False)
    await nb.train_step(model, groups)
await talk.say("good evening")
print("all", "done")
""",
]
VIEWS = (".artnb", ".artnb-browse", ".artnb-talk")
DRAWN = "Number(document.querySelector('.artnb')?.dataset.steps || 0)"
IS_DARK = """(view) => {
  const element = document.querySelector(view);
  const [red, green, blue] = getComputedStyle(element).backgroundColor.match(/[\\d.]+/g).map(Number);
  return element.dataset.theme === "dark" && red + green + blue < 384;
}"""


def test_the_views_come_back_dark_and_a_zoom_brings_the_rest(tmp_path: Path):
    SHOTS.mkdir(parents=True, exist_ok=True)
    write_notebook(tmp_path / "live.ipynb", CELLS)
    with running_lab(tmp_path) as address, running_chromium() as chromium:
        page = chromium.new_page(viewport={"width": 1300, "height": 4600})
        lab = Lab(page)
        lab.open(address, "live.ipynb")
        for _ in CELLS:
            lab.run_cell()
        page.locator(".jp-OutputArea-output", has_text="all done").wait_for()
        lab.wait(f"{DRAWN} > 100")
        lab.command("apputils:change-theme", "{theme: 'JupyterLab Dark'}")
        lab.wait("document.querySelector('.artnb').dataset.theme === 'dark'")
        page.wait_for_timeout(1500)  # the choice of the theme is saved
        lab.save()
        page.reload()
        for view in VIEWS:
            page.wait_for_function(
                f"() => document.querySelector('{view}') && !document.querySelector('{view}').hidden"
            )
        lab.wait(f"{DRAWN} > 100")
        page.wait_for_timeout(1000)
        page.screenshot(path=SHOTS / "reloaded_dark.png")
        for view in VIEWS:
            assert page.evaluate(IS_DARK, view), view
        assert "good evening" in page.locator(".artnb-talk").inner_text()
        saved = page.locator(".jp-Notebook").inner_text()
        assert "small: 25 trajectories" in saved, "the static copy, as it was when the last cell ended"
        zoom_in(lab)
        assert not lab.errors


def zoom_in(lab: Lab) -> None:
    page: Any = lab.page
    before = page.evaluate(DRAWN)
    assert before < STEPS / 2 and f"of {STEPS:,} steps are drawn" in page.locator(".artnb-hint").inner_text()
    box = page.locator(".artnb-chart .u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 70, steps=5)
    page.mouse.up()
    lab.wait(f"{DRAWN} > {before + 100}")
    page.wait_for_timeout(500)
    page.locator(".artnb").screenshot(path=SHOTS / "zoomed_detail_dark.png")
    page.get_by_role("button", name="Show all steps").click()
    page.wait_for_timeout(300)
