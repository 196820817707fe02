"""The page about a whole run: complete, escaped, small, and good to read without its style."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_batch_runs import plain_text
from test_ui import ATTACKS, hostile

import artnb as nb
from artnb.cli import main
from artnb.report_html import MOST_BYTES, page_html
from artnb.report_view import look
from artnb.types import Failure, Trajectory
from artnb.ui.html import esc

STEPS = 4


async def shop(root: Path, **options: Any) -> nb.Run:
    """A finished run of the tool lookup with a scripted policy that learns."""
    env = nb.load_environment("tool_lookup", max_tokens=64)
    held = env.scenarios("test", n=6)

    def reply(prompt: str, version: int) -> str:
        last = prompt.rsplit("<|im_start|>user\n", 1)[1]
        if version < 1 or (version < 3 and len(last) % 2):
            return "<b>I do not know</b>"
        asked = re.search(r"the (\w+)\?", last)
        return f"<call>{asked[1]}</call>" if asked else f"<answer>{re.search('[0-9]+', last)[0]}</answer>"

    with nb.Model(run="shop", root=root, backend=nb.FakeBackend(script=reply), **options) as model:
        before = await nb.evaluate(env.rollout, held, model=model, name="before", policy="base")
        for step in model.run.steps(STEPS):
            scenarios = env.scenarios("train", n=3, seed=step)
            groups = await nb.gather(env.rollout, scenarios, model=model, group_size=3, progress=False)
            await nb.train_step(model, groups, learning_rate=nb.schedule(1e-3, step, STEPS, floor=0.5))
        after = await nb.evaluate(env.rollout, held, model=model, name="after")
        model.run.note("looks <i>good</i>")
        scores = {"a": {"reward": 1.0}, "b": {"reward": 0.0}}
        spent = {"dollars": 0.25, "is_priced": True, "requests": 7, "input_tokens": 900, "output_tokens": 80}
        unscored = [{"scenario_id": "x", "why": "the judge never answered"}]
        model.run.record_event("judged", step=3, scores=scores, unscored=unscored, spent=spent)
        model.run.record_event("judge_report", rows=[{"judge": "x", "pairs ordered rightly": "0.900"}])
        baselines = {"oracle": nb.evaluate_baseline(env, "oracle", held)}
        parameters = nb.parameters(steps=STEPS, run_name="shop")
        nb.report(
            model.run, notebook="x", before=before, after=after, baselines=baselines, parameters=parameters
        )
    return model.run


@pytest.mark.filterwarnings("ignore")
async def test_a_page_says_everything_and_where_it_is(tmp_path, capsys):
    run = await shop(tmp_path)
    path = run.report()
    assert capsys.readouterr().out.strip() == str(path) and path == run.path / "report.html"
    text = " ".join(plain_text(path.read_text(encoding="utf-8")).split())
    after = run.result()["evaluation"]["after"]
    for said in (
        "complete, 4 of 4 steps",
        f"after {after['mean_reward']:.3g} (",  # with its interval
        "baseline oracle",
        "learning_rate 0.001 → 0.0005",  # as scheduled
        "loss cispo",
        "temperature 1",
        "max_tokens 64",
        "From step 3, where all scored the same",
        "<b>I do not know</b>",  # as text
        "The smallest agent task",  # the environment's card
        "looks <i>good</i>",
        "the judge never answered",
        "pairs ordered rightly 0.900",
        "judge: dollars 0.250",
        "torch",
        "cores",
        "run_name shop",
    ):
        assert said in text, said


@pytest.mark.filterwarnings("ignore")
async def test_the_environment_may_be_given_and_the_place_chosen(tmp_path):
    run = await shop(tmp_path)
    env = nb.load_environment("tool_lookup", max_tokens=64, examples=1)
    path = nb.Run.read("shop", tmp_path).report(tmp_path / "new" / "page.html", environment=env)
    text = " ".join(plain_text(path.read_text(encoding="utf-8")).split())
    assert "examples 1" in text and path == tmp_path / "new" / "page.html"
    assert not (run.path / "report.html").exists()
    found = " ".join(plain_text(page_html(look(run))).split())
    assert "max_tokens 64" in found  # the variant, as the scenarios' names tell it


def test_the_command_writes_it(tmp_path, capsys):
    with nb.Run.open("a", tmp_path) as run:
        run.append_metrics({"kind": "train", "step": 0, "reward_mean": 0.5})
    assert main(["report", str(run.path)]) == 0
    assert capsys.readouterr().out.strip() == str(run.path / "report.html")
    assert main(["report", str(tmp_path / "b")]) == 1


def test_a_run_without_anything_has_a_page(tmp_path):
    with nb.Run.open("empty", tmp_path) as run:
        text = plain_text(page_html(look(run)))
    assert "No finished step yet" in text and "0 steps" in text


def test_a_best_and_a_worst_trajectory_are_shown_and_failures_by_kind(tmp_path):
    with nb.Run.open("a", tmp_path) as run:
        for index, reward in enumerate((0.2, 0.9, 0.5, 0.1, 0.4, 0.3, 0.7)):
            one = Trajectory(
                [{"role": "user", "content": f"said {reward}"}], reward=reward, scenario_id="toy/1"
            )
            run.append_trajectory(one, step=0, split="train", gather_id="g", attempt=index)
        for kind in ("KeyError", "KeyError", "OSError"):
            one = Trajectory([], error=Failure(kind, f"{kind} happened"), scenario_id="toy/1")
            run.append_trajectory(one, step=0, split="train", gather_id="g", attempt=9)
        run.append_metrics({"kind": "train", "step": 0, "reward_mean": 0.4})
        page = look(run)
    shown = {title: [t.reward for t in kept] for title, kept in page.trajectories.items()}
    assert shown["Best of step 0"] == [0.9, 0.7, 0.5]
    assert shown["Worst of step 0"] == [0.1, 0.2, 0.3]
    assert len(shown["Failed in step 0"]) == 2
    assert "said 0.9" in page_html(page) and "OSError happened" in page_html(page)


class Reader(HTMLParser):
    """Elements and attributes of a page, as a browser would see them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def check_safe(page: str) -> None:
    """Nothing that executes, nothing from elsewhere, and the policy before all else."""
    tags = Reader(page).tags
    names = {tag for tag, _ in tags}
    assert not names & {
        "script",
        "img",
        "iframe",
        "object",
        "embed",
        "link",
        "base",
        "form",
        "video",
        "audio",
    }
    policies = [a["content"] for tag, a in tags if tag == "meta" and a.get("http-equiv")]
    (policy,) = policies
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    assert "script-src" not in policy
    for tag, attributes in tags:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        for name in ("href", "src", "action", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert page.index("Content-Security-Policy") < page.index("<style")
    assert "url(" not in page and "@import" not in page


@pytest.mark.parametrize("attack", [*ATTACKS, "a\u202eb\x1b[31m", "</style><script>alert(1)</script>"])
def test_hostile_text_is_visible_and_harmless_everywhere(tmp_path, attack):
    with nb.Run.open("a", tmp_path, identity={"base_model": attack, "adapter": {attack: attack}}) as run:
        one = hostile(attack)
        one.error = None
        run.append_trajectory(one, step=0, split="train", gather_id="g", attempt=0)
        run.append_trajectory(hostile(attack), step=0, split="train", gather_id="g", attempt=1)
        run.append_trajectory(hostile(attack), step=0, split=attack, gather_id=attack, attempt=1)
        run.record_event("configured", step=0, train={attack: attack})
        run.record_event("model", load_seconds=1.0, about={attack: attack}, sampling={attack: attack})
        run.record_event("judged", step=0, scores={}, unscored=[{"why": attack}], spent={})
        run.record_event("warning", message=attack)
        run.note(attack)
        metrics = {"reward_mean": 0.5, "kl_k3": 5.0, attack: 1.0, f"cost {attack}": 2.0}
        run.append_metrics(
            {"kind": "train", "step": 0, "skipped": attack, "warnings": [attack], **metrics},
        )
        interval = {"mean_reward": 0.5, "low": 0.4, "high": 0.6, "n": 3, "metrics": {attack: 1.0}}
        run.write_result(
            {
                "evaluation": {"before": interval, "after": interval, "baselines": {attack: interval}},
                "parameters": {attack: attack},
                "versions": {attack: attack},
                "machine": {attack: attack},
                "steps": 1,
            }
        )
        page = page_html(look(run, nb.Environment(attack, {attack: attack}, None, None, card=attack)))
    check_safe(page)
    assert page.count(esc(attack)) >= 25


def test_a_page_of_a_huge_run_stays_under_a_megabyte(tmp_path):
    wide = "\u202e" * 9_000  # twelve bytes each once it is visible
    items = [{"role": "user", "content": wide, "tool_calls": [{"function": {"name": wide[:900]}}] * 9}] * 40
    with nb.Run.open("a", tmp_path) as run:
        for attempt in range(7):
            one = Trajectory(
                items, reward=attempt / 7, scenario_id=wide, logs=[wide] * 30, metadata={"x": 1},
                metrics={f"{i}{wide[:50]}": 1.0 for i in range(300)},
            )  # fmt: skip
            run.append_trajectory(one, step=1499, split="train", gather_id="g", attempt=attempt)
        for i in range(200):
            run.record_event("warning", message=wide[:2000] + str(i))
            run.record_event("judged", step=i, scores={}, unscored=[{"why": wide[:900]}], spent={})
            run.record_event("configured", step=i, train={f"{i}{wide[:200]}": wide[:2000]})
        numbers = {f"reward/part{i}": 0.123456 for i in range(40)} | {"cost": 1.0}
        for name in (
            "loss",
            "entropy",
            "kl_k1",
            "kl_k3",
            "grad_norm",
            "learning_rate",
            "seconds",
            "reward_std",
        ):
            numbers[name] = 0.123456
        run._metrics.append(
            *(
                {"kind": "train", "step": i, "reward_mean": i / 1500, "warnings": [wide[:400]], **numbers}
                for i in range(1500)
            )
        )
        text = page_html(look(run, nb.Environment("e", {}, None, None, card=wide)))
    assert len(text.encode()) < MOST_BYTES
    check_safe(text)
    plain = plain_text(text)
    assert "would not fit here" in plain and "Every 15th step" in plain
    assert "1,499" in plain  # the latest step is there
