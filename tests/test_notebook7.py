"""Notebook 7 and JupyterLab, from a live dashboard to what is left of it after a restart.

Needs Chromium and playwright. Screenshots are left in out/screenshots: look at them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from lab_tools import Lab, running_chromium, running_lab, write_notebook

pytestmark = pytest.mark.slow

SHOTS = Path(__file__).resolve().parent.parent / "out" / "screenshots"
HOSTILE = '<img src=x onerror="window.HURT=1">'
CELLS = [
    f"""
import asyncio
import artnb as nb
from artnb import compatibility, servers

async def rollout(model, scenario):
    messages = [{{"role": "user", "content": scenario.id}}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=8)
    return nb.Trajectory([*messages, reply.choices[0]], reward=len(reply.choices[0].message.content) / 60)

SCENARIOS = [nb.Scenario(f"task {{i}}") for i in range(3)] + [nb.Scenario({HOSTILE!r})]
model = nb.Model(run="seven", root="runs", backend=nb.FakeBackend())
model.run.note({HOSTILE!r})
found = servers.find(compatibility.installed())
print("page:", found.page == found.cells, [finding.what for finding in servers.findings(found)])
""",
    "nb.Dashboard(model.run, baselines={'random player': 0.1})",
    """
for step in model.run.steps(6):
    groups = await nb.gather(rollout, SCENARIOS, model=model, group_size=4, progress=False)
    await nb.train_step(model, groups)
    await asyncio.sleep(0.3)
groups
""",
    "nb.browse(model.run)",
    "model.close()",
]
STEPS = "Number(document.querySelector('.artnb')?.dataset.steps || 0)"


@pytest.mark.parametrize("app", ["notebook", "lab"])
def test_a_dashboard_lives_and_leaves_a_readable_notebook(app: str, tmp_path: Path):
    write_notebook(tmp_path / "live.ipynb", CELLS)
    SHOTS.mkdir(parents=True, exist_ok=True)
    with running_lab(tmp_path, app=app) as address, running_chromium() as browser:
        lab = Lab(browser.new_page(viewport={"width": 1300, "height": 4200}))
        lab.open(address, "live.ipynb", app=app)
        lab.page.wait_for_timeout(1000)
        theirs = list(lab.errors)  # Notebook 7 stumbles over a setting of its own
        for _ in CELLS[:-1]:
            lab.run_cell()
        lab.wait(f"{STEPS} === 6")
        lab.wait("document.querySelector('.artnb-browse')")
        assert "page: True []" in lab.page.inner_text("body"), "doctor found the server, and anywidget in it"
        lab.page.wait_for_timeout(1500)
        lab.page.screenshot(path=SHOTS / f"{app}_live.png")
        assert lab.page.evaluate("window.HURT") is None
        lab.run_cell()
        lab.page.wait_for_timeout(1500)
        lab.save()
        lab.restart()
        check_what_is_left(lab, tmp_path / "live.ipynb", f"{app}_restarted")
        lab.page.close()
        again = Lab(browser.new_page(viewport={"width": 1300, "height": 4200}))
        again.open(address, "live.ipynb", app=app)
        check_what_is_left(again, tmp_path / "live.ipynb", f"{app}_reopened")
        assert lab.errors == theirs


def check_what_is_left(lab: Lab, path: Path, name: str) -> None:
    lab.page.wait_for_selector("summary:has-text('seven')")
    lab.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    lab.page.wait_for_timeout(500)
    lab.page.screenshot(path=SHOTS / f"{name}.png")
    text = lab.page.inner_text("body")
    assert "seven: " in text and "6 steps" in text, "the dashboard's static copy"
    assert "trajectories" in text and "4 groups" in text, "what gather returned"
    assert HOSTILE in text and lab.page.evaluate("window.HURT") is None
    saved: Any = nbformat.read(path, as_version=4)
    assert path.stat().st_size < 2_000_000 and "widgets" not in saved.metadata
