"""Hostile texts through everything that artnb draws: nothing of them is markup, and all of them is seen."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hostile import HUGE, PAYLOADS, is_hidden, problems, text_of, unseen
from lab_tools import Lab, running_chromium, running_lab, write_notebook

import artnb as nb
from artnb.compatibility import Finding
from artnb.dashboard.protocol import Stream
from artnb.doctor import Diagnosis
from artnb.evaluate import Estimate, Evaluation
from artnb.measure import Comparison as PlanComparison
from artnb.train import StepResult
from artnb.ui import Progress

PACKAGE = Path(nb.__file__).parent
STATIC = PACKAGE / "ui" / "static"
SHOTS = PACKAGE.parent / "out" / "screenshots"


def sayable(text: str) -> str:
    """No tokenizer takes a lone surrogate."""
    return re.sub("[\ud800-\udfff]", "\x7f", text)


def hostile_trajectory(p: str, reward: float | None, version: int = 0) -> nb.Trajectory:
    """Every field that takes a text holds the payload."""
    call = {"id": p, "type": "function", "function": {"name": p, "arguments": json.dumps({p: p})}}
    unread = {"id": "2", "type": "function", "function": {"name": "x", "arguments": p}}
    message = {"role": "assistant", "content": p, "reasoning_content": p, "tool_calls": [call, unread]}
    turn = nb.Turn((1, 2), (3, 4), (-0.5, -0.5), version, "stop", message)
    items = [
        {"role": "system", "content": p},
        {"role": "user", "content": [{"type": "text", "text": p}, {"type": p}]},
        turn,
        {"role": "tool", "tool_call_id": p, "name": p, "content": p},
        {"role": p, "content": p},
    ]
    trajectory = nb.Trajectory(
        items, reward=reward, scenario_id=p, seat=p, logs=[p], metadata={p: p, "judge": p}
    )
    trajectory.metrics = {p: 0.5, f"reward/{p}": 0.25, "success": 1.0}
    trajectory.explanation = p
    trajectory.additional_histories.append(nb.History([{"role": "user", "content": p}]))
    return trajectory


async def hostile_run(root: Path, p: str) -> tuple[nb.Model, dict[str, Any]]:
    """A model whose run has seen the payload in every place, and things to draw by name; close the model."""
    backend = nb.FakeBackend(script=lambda prompt, version: sayable(p), base_model=p)
    model = nb.Model(run="hostile", root=root, backend=backend)

    async def rollout(model: Any, scenario: nb.Scenario) -> nb.Trajectory:
        if scenario.task["fails"]:
            raise RuntimeError(p)
        trajectory = hostile_trajectory(p, scenario.task["reward"], model.policy_version)
        trajectory.scenario_id = ""
        return trajectory

    rewards = iter([0.0, 1.0, 0.5])
    scenarios = [nb.Scenario(p, task={"fails": False, "reward": next(rewards)}) for _ in range(2)]
    scenarios.append(nb.Scenario(p + "2", task={"fails": True}))
    options: dict[str, Any] = {"model": model, "progress": False, "max_failures": 9}
    groups = await nb.gather(rollout, scenarios, group_size=2, **options)
    trained = [nb.TrajectoryGroup([hostile_trajectory(p, r) for r in (0.0, 1.0)])]
    step = await nb.train_step(model, trained)
    evaluation = await nb.evaluate(rollout, scenarios[:2], name=p, **options)
    model.run.note(p)
    model.run.record_event("warning", text=p, reason=p, message=p, source=p)
    model.run.append_metrics(
        {"kind": "evaluation", "name": p, "step": 1, "mean_reward": 0.5, p: 0.5, "note": p}
    )
    told = StepResult(3, 4, {p: 0.5, "reward_mean": 0.5}, {p: 2}, p, [p])
    return model, {"groups": groups, "step": step, "told": told, "evaluation": evaluation}


def plan_of(p: str) -> Any:
    planned = nb.plan()
    return replace(planned, setting=replace(planned.setting, base=p))


def judge_report(p: str) -> Any:
    from artnb.judge_report import JudgeReport

    estimates = [Estimate(0.5, 0.4, 0.6)] * 4
    return JudgeReport((p,), 1, 1, {p: 1}, 2, *estimates, 0.1, 0.0, 10.0, 0.5, 1.0)


def generated(p: str) -> Any:
    from artnb.scenarios import GeneratedScenarios

    return GeneratedScenarios([nb.Scenario(p, task={"task": p, "difficulty": 1})])


def drawings(model: nb.Model, p: str, made: dict[str, Any]) -> dict[str, Any]:
    """Name of a class with an HTML form -> an object of it that holds the payload."""
    from artnb.benchmark import Contender
    from artnb.judging.summary import JudgedGroups
    from artnb.sweep import Sweep, SweepPoint

    run, groups, evaluation = model.run, made["groups"], made["evaluation"]
    trajectory = hostile_trajectory(p, 0.5)
    parameters = nb.parameters(run_name=p or "x", extra={"text": p}, text=p)
    planned = plan_of(p)
    facts = {"packages": {p: p, "x": p}}
    point = SweepPoint(
        "hostile", {p: p}, nb.Run.read("hostile", run.path.parent), Path(p[:50]), "failed", p, note=p
    )
    return {
        "Trajectory": trajectory,
        "TrajectoryGroup": nb.TrajectoryGroup([trajectory], scenario_id=p),
        "Groups": groups,
        "StepResult": made["told"],
        "Evaluation": evaluation,
        "Comparison": nb.compare([evaluation, Evaluation(p, 0.5, 0.4, 0.6, 3, metrics={p: 0.5})]),
        "Benchmark": nb.Benchmark(
            p, p, 2, [Contender(p, p, evaluation), Contender(p, p, evaluation, failure=p)]
        ),
        "RewardTable": nb.RewardTable(run, baselines={p: 0.5}, title=p, enabled=False),
        "Report": nb.report(run, notebook=p, baselines={p: evaluation}, parameters=parameters, metrics=[p]),
        "Model": model,
        "RunFolder": run,
        "Plan": planned,
        "PlanComparison": PlanComparison(planned, {p: 1 << 30}, None, None),
        "Diagnosis": Diagnosis(facts, [Finding("problem", p, p)]),
        "Dashboard": nb.Dashboard(run, baselines={p: 0.5}),
        "Browser": nb.browse(run),
        "Sweep": Sweep(p, run.path, [point]),
        "JudgedGroups": JudgedGroups([p], 1, 1, {p: 1}, criteria=[{"name": p, "part": 0.5}]),
        "JudgeReport": judge_report(p),
        "GeneratedScenarios": generated(p),
        "Progress": Progress(2, p, enabled=False),
        "metrics frame": run.metrics_frame(),
        "trajectories frame": run.trajectories_frame(),
    }


def html_of(thing: Any) -> str:
    return thing._html(f"stopped: {thing.title}") if isinstance(thing, Progress) else thing._repr_html_()


DRAWN_BY_PANDAS = ("metrics frame", "trajectories frame")
CUT_SHORT = {*DRAWN_BY_PANDAS, "Model", "RunFolder"}
"""Do not show all of a long text, or show no text of others'."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("ARTNB_UI", "none")


async def drawn(root: Path, p: str) -> tuple[dict[str, str], dict[str, str]]:
    """Everything that is drawn of a hostile run: HTML and text by name."""
    model, made = await hostile_run(root, p)
    with model:
        talk = nb.chat(model)
        reply = await talk.say(sayable(p))
        things = drawings(model, p, made) | {"Talk": talk, "Reply": reply}
        pages = {name: html_of(thing) for name, thing in things.items()}
        pages["report"] = model.run.report().read_text(encoding="utf-8")
    texts = {name: repr(thing) for name, thing in things.items()}
    return pages, texts


@pytest.mark.parametrize("kind", PAYLOADS)
async def test_a_payload_is_text_in_everything_that_is_drawn(kind, tmp_path):
    p, wrong = PAYLOADS[kind], {}
    pages, texts = await drawn(tmp_path, p)
    for name, html in pages.items():
        found = [] if name in DRAWN_BY_PANDAS else problems(html)
        found += [] if name in CUT_SHORT else [f"not seen: {piece}" for piece in unseen(p, text_of(html))]
        if found:
            wrong[name] = found[:4]
    assert not wrong
    assert "default-src 'none'" in pages["report"]
    told = {name: [hex(ord(c)) for c in text if is_hidden(c)] for name, text in texts.items()}
    assert not {name: found for name, found in told.items() if found and name not in DRAWN_BY_PANDAS}


def test_nothing_that_draws_itself_as_html_was_left_out():
    drawing = {
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and any(getattr(f, "name", "") == "_repr_html_" for f in node.body)
    }
    here = Path(__file__).read_text(encoding="utf-8")
    assert not {name for name in drawing if f'"{name}":' not in here}


async def test_what_goes_to_the_widgets_is_plain_json(tmp_path):
    p = "".join(PAYLOADS.values())
    model, _ = await hostile_run(tmp_path, p)
    with model:
        dashboard, browser = nb.Dashboard(model.run, baselines={p: 0.5}), nb.browse(model.run)
        repr(dashboard), repr(browser)
        view = dashboard.view
        messages = Stream().everything(view.head, view.tables)
        query = browser.source.query("", [], False)["query"]
        rows = browser.source.page(query, 0, 100)["rows"]
        messages += [{"rows": rows}, *(browser.source.trajectory(row["key"]) for row in rows)]
    text = json.dumps(messages)
    assert json.loads(text) == messages and text.isascii()
    assert json.dumps(PAYLOADS["image"])[1:-1] in text and json.dumps(PAYLOADS["terminal"])[1:-1] in text


async def test_ten_megabytes_are_cut_with_a_note(tmp_path):
    part = HUGE[:1_000_000]
    turn = nb.Turn((1, 2), (3, 4), (-0.5, -0.5), 0, "stop", {"role": "assistant", "content": HUGE})
    large = nb.Trajectory([{"role": "user", "content": HUGE}, turn], reward=1.0, logs=[part])
    with nb.Model(run="large", root=tmp_path, backend=nb.FakeBackend()) as model:

        async def rollout(model: Any, scenario: Any) -> nb.Trajectory:
            if scenario == "fails":
                raise RuntimeError(part)
            return large

        groups = await nb.gather(rollout, ["one", "fails"], model=model, max_failures=9, progress=False)
        model.run.note(part)
        things = [
            large,
            *groups.trajectories,
            groups,
            nb.Dashboard(model.run),
            nb.browse(model.run),
            model.run,
        ]
        pages = [thing._repr_html_() for thing in things]
        pages.append(model.run.report().read_text(encoding="utf-8"))
    assert max(map(len, pages)) < 1_000_000
    assert not [html for html in pages if problems(html)]
    assert "more characters" in text_of(pages[0])


@pytest.mark.parametrize("name", nb.available_environments())
@pytest.mark.parametrize("kind", PAYLOADS)
def test_an_environment_s_own_rendering_escapes_too(name, kind):
    environment = nb.load_environment(name)
    if environment.render is not None:
        html = environment.render(hostile_trajectory(PAYLOADS[kind], 0.5))
        assert not problems(html)


def test_a_frame_holds_texts_as_they_are_and_pandas_escapes_them_when_asked():
    import pandas

    frame = pandas.DataFrame({PAYLOADS["image"]: [PAYLOADS["script"]]})
    assert "<script" not in frame._repr_html_() and "<img" not in frame._repr_html_()
    styled = frame.style.format(escape="html").format_index(escape="html", axis=1).to_html()
    assert "<script" not in styled and "<img" not in styled
    makers = [
        path for path in PACKAGE.rglob("*.py") if re.search(r"\.style\b", path.read_text(encoding="utf-8"))
    ]
    assert not makers, "a Styler escapes nothing by itself"


MARKUP = re.compile(
    r"(innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|setHTML|srcdoc"
    r"|createContextualFragment|DOMParser)|set(Timeout|Interval)\(\s*['\"`]"
)


def test_no_script_of_ours_makes_markup_of_a_text():
    scripts = [path for path in STATIC.glob("*.js") if not path.name.startswith("uPlot")]
    assert len(scripts) > 2
    for path in scripts:
        source = path.read_text(encoding="utf-8")
        found = set(MARKUP.findall(source))
        if 'sandbox: ""' in source and "default-src 'none'" in source:
            found -= {("srcdoc", "")}  # a frame in which nothing runs and nothing loads
        assert not found, path.name
    assert MARKUP.search("a.innerHTML = b")


def test_no_code_of_ours_shows_markdown_or_latex():
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert not re.search(
            r"text/(markdown|latex)|import (Markdown|Latex)|_repr_(markdown|latex)_", source
        ), path


# In a browser

POKE = """() => {
  for (const element of document.querySelectorAll("*")) {
    if (element.tagName === "DETAILS") element.open = true;
    for (const name of ["mouseover", "focus", "toggle", "begin"]) element.dispatchEvent(new Event(name));
    if (element.tagName === "A") element.click();
  }
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, dict[str, str]]:
    """Every page of every payload, as a browser can load it."""
    folder, found = tmp_path_factory.mktemp("hostile"), {}
    before = os.environ.get("ARTNB_UI")
    os.environ["ARTNB_UI"] = "none"
    try:
        for number, (kind, payload) in enumerate(PAYLOADS.items()):
            html, _ = asyncio.run(drawn(folder / str(number), payload))
            found[kind] = {name: one.encode("utf-8", "replace").decode() for name, one in html.items()}
    finally:
        os.environ.pop("ARTNB_UI") if before is None else os.environ.update(ARTNB_UI=before)
    return found


def poke(page: Any, html: str) -> int:
    """Show a page, do to everything in it what a reader may do, and count what ran."""
    page.goto("about:blank")
    page.set_content(html, wait_until="domcontentloaded")
    page.wait_for_timeout(40)
    page.evaluate(POKE)
    page.wait_for_timeout(20)  # a link's script runs after the click
    return int(page.evaluate("window.HURT || 0"))


@pytest.mark.slow
def test_nothing_runs_and_nothing_is_fetched_in_a_real_browser(pages):
    with running_chromium() as browser:
        page = browser.new_page()
        fetched: list[str] = []
        page.route("**/*", lambda route: (fetched.append(route.request.url), route.abort()))
        ran = {kind: poke(page, payload) for kind, payload in PAYLOADS.items() if payload == sayable(payload)}
        assert {"script", "image", "svg", "closes what is open", "link", "details"} <= {
            k for k, n in ran.items() if n
        }
        fetched.clear()
        for kind, of_kind in pages.items():
            for html in ("".join(h for name, h in of_kind.items() if name != "report"), of_kind["report"]):
                assert not poke(page, html), kind
                assert not unseen(sayable(PAYLOADS[kind]), page.inner_text("body")), kind
        assert not fetched


@pytest.mark.slow
def test_nothing_runs_in_a_notebook_that_nbconvert_exports(pages):
    import nbformat
    from nbconvert import HTMLExporter

    cells = []
    for of_kind in pages.values():
        shown = [{"text/html": html} for name, html in of_kind.items() if name != "report"]
        outputs = [nbformat.v4.new_output("display_data", data=bundle) for bundle in shown]
        cells.append(nbformat.v4.new_code_cell("show()", outputs=outputs))
    exported, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=cells))
    with running_chromium() as browser:
        page = browser.new_page()
        page.route("**/*", lambda route: route.abort())  # MathJax and RequireJS, from elsewhere
        assert not poke(page, exported)
        text = page.inner_text("body")
        assert not [kind for kind, payload in PAYLOADS.items() if unseen(sayable(payload), text)]


@pytest.mark.slow
def test_nothing_runs_in_jupyterlab(pages, tmp_path):
    shown = ["".join(html for name, html in one.items() if name != "report") for one in pages.values()]
    (tmp_path / "pages.json").write_text(json.dumps(shown))
    show = (
        "import json\nfrom IPython.display import HTML, display\nfor html in json.load(open('pages.json')): "
    )
    write_notebook(tmp_path / "hostile.ipynb", [show + "display(HTML(html))"])
    with running_lab(tmp_path) as address, running_chromium() as browser:
        lab = Lab(browser.new_page())
        lab.open(address, "hostile.ipynb")
        lab.run_cell()
        lab.wait(f"document.querySelectorAll('.jp-RenderedHTML').length >= {len(shown)}")
        lab.page.wait_for_timeout(3000)  # MathJax may want to typeset
        lab.page.evaluate(POKE.replace('"*"', '".jp-OutputArea-output *"'))
        assert not lab.page.evaluate("window.HURT")
        lab.page.screenshot(path=SHOTS / "hostile_lab.png")
