"""A chat in a real JupyterLab: it streams, stops, uses the environment, and stays readable without a kernel.

Needs Chromium and playwright. Screenshots are left in out/screenshots: look at them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_tools import Lab, running_chromium, running_lab, write_notebook

from artnb.store import Run

pytestmark = pytest.mark.slow

SHOTS = Path(__file__).resolve().parent.parent / "out" / "screenshots"
HOSTILE = '<img src=x onerror="window.HURT=1"><script>window.HURT=2</script>'

SETUP = """
import asyncio, json, re
import artnb as nb

HOSTILE = %r

def agent(prompt, version):
    question = prompt.rpartition("<|im_start|>user")[2]
    if "hurt me" in question:
        return f"As you like: {HOSTILE}"
    if "long story" in question:
        return "Once upon a time there was a fox. " * 60
    told = re.search(r"<tool_response>\\n.*: (.+)\\n", question)
    if told:
        return f"<answer>{told[1]}</answer>"
    item = re.search(r"the (\\w+)\\?", question)
    call = {"name": "price", "arguments": {"item": item[1] if item else HOSTILE}}
    return f"<tool_call>\\n{json.dumps(call)}\\n</tool_call>"

async def rollout(model, scenario):
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": "long story"}], max_tokens=20)
    return nb.Trajectory([{"role": "user", "content": "?"}, reply.choices[0]], reward=float(len(seen) %% 2))

seen = []
backend = nb.FakeBackend(script=agent, delay=1.5, max_context=30_000)
model = nb.Model(run="talk", root="runs", backend=backend)
env = nb.load_environment("tool_lookup", style="tools", max_tokens=1000)
"""
SHOW = "talk = nb.chat(model, env)"
TRAIN = """
for step in model.run.steps(400):
    groups = await nb.gather(rollout, ["a", "b"], model=model, group_size=2, progress=False,
                             reward=lambda t: float(seen.append(1) or len(seen) % 2))
    await nb.train_step(model, groups)
print("the loop ended at step", model.run.step)
"""
SAY = 'await talk.say("How much is the moon?")'
ENTRIES = "Number(document.querySelector('.artnb-talk')?.dataset.entries || 0)"
READY = "document.querySelector('.artnb-talk')?.dataset.busy === 'false'"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_chromium() as chromium:
        yield chromium


def shot(lab: Lab, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    lab.page.locator(".artnb-talk").screenshot(path=SHOTS / f"{name}.png")


def below(lab: Lab, cells: int) -> None:
    """Select the cell so many below the chat's, which a click into the chat has selected."""
    for _ in range(cells):
        lab.page.evaluate("() => window.jupyterapp.commands.execute('notebook:move-cursor-down')")


def speak(page: Any, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.get_by_label("Your message").press("Enter")


def test_a_person_talks_while_the_policy_trains(browser: Any, tmp_path: Path):
    with running_lab(tmp_path) as address:
        page = browser.new_page(viewport={"width": 1100, "height": 1500})
        lab = Lab(page)
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        write_notebook(tmp_path / "talk.ipynb", [SETUP % HOSTILE, SHOW, TRAIN, SAY])
        lab.open(address, "talk.ipynb")
        lab.run_cell()
        lab.run_cell()
        lab.wait(READY)
        opening = page.evaluate(ENTRIES)
        assert opening > 3 and page.get_by_role("button", name="■ Stop").is_disabled()

        # the environment's own question, its tool, and the reward
        page.get_by_role("button", name="Let it answer").click()
        lab.wait(f"{READY} && {ENTRIES} === {opening} + 3")
        page.get_by_text("reward 1").first.wait_for()
        assert (
            page.locator(".artnb-talk-call", has_text="price(").count() == 3
        )  # two worked examples, one call

        # hostile words are seen, as text, and nothing happens
        speak(page, f"please hurt me {HOSTILE}")
        lab.wait(f"{READY} && {ENTRIES} === {opening} + 5")
        assert page.evaluate("window.HURT") is None
        assert page.locator(".artnb-talk").get_by_text(HOSTILE).count() >= 2

        # tokens come one by one; Stop takes the unanswered message back
        page.evaluate("() => { window.SEEN = new Set(); }")
        speak(page, "tell me a long story")
        lab.wait(
            "(window.SEEN.add(document.querySelector('[data-pending] .artnb-talk-text').textContent),"
            " window.SEEN.size >= 4)"
        )
        shot(lab, "talk_streaming")
        page.get_by_role("button", name="■ Stop").click()
        lab.wait(
            f"{READY} && document.querySelector('.artnb-talk textarea').value === 'tell me a long story'"
        )
        assert page.evaluate(ENTRIES) == opening + 5

        # beside a training loop
        below(lab, 1)
        lab.run_cell()
        page.get_by_label("Your message").fill("How much is the sun?")
        page.get_by_role("button", name="Send", exact=True).click()
        lab.wait(f"{READY} && {ENTRIES} === {opening} + 9")
        lab.command("apputils:change-theme", "{theme: 'JupyterLab Dark'}")
        lab.wait("document.querySelector('.artnb-talk').dataset.theme === 'dark'")
        page.wait_for_timeout(500)
        shot(lab, "talk_dark")
        page.get_by_role("combobox", name="Policy").focus()
        lab.wait(
            "[...document.querySelectorAll('.artnb-talk option')].some((one) => /^step_/.test(one.value))"
        )
        page.get_by_role("combobox", name="Policy").select_option("base")
        page.get_by_role("combobox", name="Scenario").select_option(index=2)
        lab.wait(f"{READY} && {ENTRIES} === {opening}")
        page.get_by_role("button", name="Let it answer").click()
        lab.wait(f"{READY} && {ENTRIES} === {opening} + 3")
        assert page.locator(".artnb-talk-head", has_text="base").count() >= 2
        (tmp_path / "runs" / "talk" / "STOP").touch()
        page.locator(".jp-OutputArea-output", has_text="the loop ended at step").wait_for()

        # the same conversation from a cell, and what is left without a kernel
        below(lab, 2)
        lab.run_cell()
        lab.wait(f"{READY} && {ENTRIES} === {opening} + 7")
        page.locator(".jp-OutputArea-output", has_text="answer of policy base").wait_for()
        lab.command("docmanager:save")
        page.wait_for_timeout(1500)
        assert not [url for url in requests if not url.startswith((address, "data:", "blob:"))]
        assert not lab.errors
        lab.open(address, "talk.ipynb")
        lab.wait("document.querySelector('.artnb-talk')?.dataset.theme === 'dark'")  # a second view
        lab.wait(f"{READY} && {ENTRIES} === {opening} + 7")
        lab.command("kernelmenu:shutdown")
        page.wait_for_timeout(2000)
        lab.open(address, "talk.ipynb")
        static = page.locator("details", has_text="Static copy of the chat")
        static.first.locator("summary").first.click()
        page.get_by_text("moon: not sold here").first.wait_for()
        page.screenshot(path=SHOTS / "talk_reopened.png")
        assert not page.locator(".artnb-talk").count()
        assert page.evaluate("window.HURT") is None
        page.close()
    kept = [t for t in Run.read("talk", tmp_path / "runs").trajectories(split="chat")]
    assert [len(t.turns) for t in kept] == [5, 4] and {turn.policy_version for turn in kept[1].turns} == {-1}
