"""What does a page about a whole run say? Everything in it as plain values, from the run's folder alone."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from artnb.dashboard.view import TOLD, View, event_words
from artnb.environments import available_environments, load_environment
from artnb.report import machine, outcome, versions
from artnb.types import Trajectory
from artnb.ui.intervals import interval_text
from artnb.ui.snapshot import number_text, seconds_text

BEST, WORST = 3, 3
"""Trajectories of the last step that are shown turn by turn."""
_FAILED = 2


@dataclass
class RunPage:
    """The content of a report, in the order in which it is read."""

    name: str
    status: str
    facts: dict[str, str]
    alarms: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    """A step each: ``step``, ``values``, ``skipped``, ``warnings``."""
    charts: list[dict[str, Any]]
    baselines: dict[str, float]
    evaluations: list[dict[str, Any]]
    """``name``, ``mean``, ``low``, ``high``, ``n`` and means of metrics, as the notebook named them."""
    checks: list[dict[str, Any]]
    """The same for every evaluation that was gathered, with its step."""
    trajectories: dict[str, list[Trajectory]]
    environment: dict[str, Any] | None
    configuration: dict[str, dict[str, Any]]
    judged: list[dict[str, Any]]
    """A row for each call of ``judge``."""
    judge_reports: list[dict[str, Any]]
    """How far a judge agreed with known rewards, as ``judge_report`` found."""
    costs: dict[str, Any]
    events: list[dict[str, str]]
    versions: dict[str, str]
    machine: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def look(run: Any, environment: Any = None) -> RunPage:
    """Read a run; ``environment`` is an Environment, or None to find the one that its scenarios name."""
    view = View(run)
    while view.look():  # a look reads for a tenth of a second
        pass
    events, result = run.events(), run.result() or {}
    rows, description = view.rows, run.description()
    trajectories = _episodes(run, rows)
    told = outcome(events, run.trained_steps)
    made_here = "machine" not in result
    page = RunPage(
        name=run.name,
        status=_status_words(told, view.head["status"]),
        facts=_facts(rows, told, description, result),
        alarms=view.head["alarms"],
        rows=rows,
        charts=view.head["charts"],
        baselines={name: level for name, level in view.head["baselines"].items() if level is not None},
        evaluations=list(_evaluations(result)),
        checks=sorted(view.tables["checks"].values(), key=lambda check: check["step"]),
        trajectories=trajectories,
        environment=_environment(environment, trajectories),
        configuration=_configuration(events, description, result, trajectories),
        judged=[_judged(event) for event in events if event.get("kind") == "judged"],
        judge_reports=[r for e in events if e.get("kind") == "judge_report" for r in e.get("rows") or ()],
        costs=_costs(events, rows),
        events=[_event(event) for event in events if event.get("kind") in TOLD],
        versions=result.get("versions") or _recorded_versions(events) or versions(),
        machine=machine() if made_here else result["machine"],
    )
    if made_here:
        page.notes.append("The machine is the one that wrote this page; the run's result names none.")
    return page


def _status_words(told: Mapping[str, Any], writer: str) -> str:
    steps, asked = told["steps"], told["steps_asked"]
    of = f"{steps} of {asked} steps" if asked is not None else f"{steps} steps"
    if told["status"] == "complete":
        return f"complete, {of}"
    if writer == "crashed":
        return f"its process died, {of}"
    return f"running, {of}" if writer == "running" else f"{told['status']}, {of}"


def _facts(
    rows: Sequence[Mapping[str, Any]],
    told: Mapping[str, Any],
    description: Mapping[str, Any],
    result: Mapping[str, Any],
) -> dict[str, str]:
    rewards = [(row["step"], row["values"]["reward_mean"]) for row in rows if "reward_mean" in row["values"]]
    facts = {"training steps": str(told["steps"])}
    if told["steps_asked"] is not None:
        facts["training steps"] += f" of {told['steps_asked']}"
    if rewards:
        best = max(rewards, key=lambda pair: pair[1])
        facts["mean reward"] = f"{number_text(rewards[0][1])} → {number_text(rewards[-1][1])}"
        facts["best step"] = f"{number_text(best[1])} at step {best[0]}"
    named = result.get("evaluation") or {}
    for name in ("before", "after"):
        if named.get(name):
            facts[f"evaluation {name}"] = interval_text(named[name], "mean_reward")
    seconds = sum(
        row["values"].get("seconds_gather", 0.0) + row["values"].get("seconds", 0.0) for row in rows
    )
    if seconds:
        facts["time in steps"] = seconds_text(seconds)
    if tokens := sum(row["values"].get("tokens_sampled", 0.0) for row in rows):
        facts["sampled tokens"] = number_text(int(tokens))
    if base := (description.get("identity") or {}).get("base_model"):
        facts["base model"] = str(base)
    facts["started"] = time_text(description.get("created"))
    return facts


def time_text(seconds: Any) -> str:
    """Unix seconds as a date that means the same everywhere.

    >>> time_text(0), time_text(None)
    ('1970-01-01 00:00 UTC', '–')
    """
    if not isinstance(seconds, int | float):
        return "–"
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _evaluations(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    evaluation = result.get("evaluation") or {}
    named = {name: evaluation.get(name) for name in ("before", "after")}
    named |= {f"baseline {name}": value for name, value in (evaluation.get("baselines") or {}).items()}
    for name, value in named.items():
        if value:
            about = {"name": name, "mean": value.get("mean_reward")}
            yield {**about, **{k: value.get(k) for k in ("low", "high", "n")}, **(value.get("metrics") or {})}


def _episodes(run: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Trajectory]]:
    """The best and the worst of the last step, one of each of the first, and some that failed."""
    steps = [row["step"] for row in rows] or [0]
    last = list(run.trajectories(step=steps[-1], split="train"))
    scored = sorted((t for t in last if t.is_scored), key=lambda t: -(t.reward or 0.0))
    if scored and scored[0].reward == scored[-1].reward:
        found = {f"From step {steps[-1]}, where all scored the same": scored[:1]}
    else:
        best = scored[:BEST]
        worst = scored[len(best) :][-WORST:][::-1]
        found = {f"Best of step {steps[-1]}": best, f"Worst of step {steps[-1]}": worst}
    found[f"Failed in step {steps[-1]}"] = _kinds_of_failure(last)
    if steps[0] != steps[-1]:
        first = sorted(
            (t for t in run.trajectories(step=steps[0], split="train") if t.is_scored),
            key=lambda t: -(t.reward or 0.0),
        )
        found[f"Best and worst of step {steps[0]}"] = [*first[:1], *first[1:][-1:]]
    return {title: kept for title, kept in found.items() if kept}


def _kinds_of_failure(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    by_kind = {t.error.type: t for t in trajectories if t.error}
    return list(by_kind.values())[:_FAILED]


def _environment(given: Any, trajectories: Mapping[str, Sequence[Trajectory]]) -> dict[str, Any] | None:
    if given is not None:
        return {"name": given.name, "card": given.card, "variant": dict(given.variant)}
    scenario = next((t.scenario_id for kept in trajectories.values() for t in kept if t.scenario_id), "")
    named = re.match(r"(\w+)(?:\(([^/]*)\))?/", scenario)
    if named is None or named[1] not in available_environments():
        return None
    changed = dict(one.split("=", 1) for one in (named[2] or "").split(",") if "=" in one)
    return {"name": named[1], "card": load_environment(named[1]).card, "variant": changed}


def _configuration(
    events: Sequence[Mapping[str, Any]],
    description: Mapping[str, Any],
    result: Mapping[str, Any],
    trajectories: Mapping[str, Sequence[Trajectory]],
) -> dict[str, dict[str, Any]]:
    identity = dict(description.get("identity") or {})
    adapter = identity.pop("adapter", None)
    sessions = [event for event in events if event.get("kind") == "model"]
    model = identity | dict(sessions[-1].get("about") or {} if sessions else {})
    loads = [s for event in sessions if (s := event.get("load_seconds")) is not None]
    if loads:
        model["loading took"] = ", ".join(map(seconds_text, loads))
    if adapter is None and identity:
        model["adapter"] = "none: all weights learn"
    applied = next((turn.sampling for kept in trajectories.values() for t in kept for turn in t.turns), {})
    sampling = (sessions[-1].get("sampling") if sessions else None) or {}
    found = {
        "Model": model,
        "Adapter (LoRA)": dict(adapter or {}),
        "Training step": _training(events),
        "Sampling, unless a request says otherwise": sampling,
        "Sampling, as the engine applied it in the last step": dict(applied),
        "The notebook's parameters": dict(result.get("parameters") or {}),
    }
    return {title: facts for title, facts in found.items() if facts}


def _training(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every setting of ``train_step``; of one that changed, its values from the first step to the last."""
    values: dict[str, list[Any]] = {}
    for event in events:
        if event.get("kind") == "configured":
            for name, value in (event.get("train") or {}).items():
                values.setdefault(name, []).append(value)
    return {name: _changes(kept) for name, kept in values.items()}


def _changes(values: Sequence[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    if len(values) <= 3 or not all(isinstance(v, int | float) for v in values):
        return " → ".join(number_text(v) for v in values[-3:])
    ends, reached = [values[0], values[-1]], [min(values), max(values)]
    between = "" if sorted(ends) == reached else f", between {' and '.join(map(number_text, reached))}"
    return f"{' → '.join(map(number_text, ends))}{between}"


def _judged(event: Mapping[str, Any]) -> dict[str, Any]:
    spent = event.get("spent") or {}
    tokens = [spent.get(name) for name in ("input_tokens", "output_tokens")]
    return {
        "step": event.get("step"),
        "trajectories scored": len(event.get("scores") or ()),
        "groups unscored": len(event.get("unscored") or ()),
        "why": "; ".join(dict.fromkeys(str(one.get("why")) for one in event.get("unscored") or ())),
        "requests": spent.get("requests"),
        "from cache": spent.get("cached"),
        "tokens read": tokens[0],
        "tokens written": tokens[1],
        "dollars": spent.get("dollars") if spent.get("is_priced", True) else None,
    }


def _costs(events: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over the run of what was recorded as a cost."""
    sums: dict[str, float] = {}
    for row in rows:
        for name, value in row["values"].items():
            if value is not None and "cost" in name.split("/")[-1]:
                sums[name] = sums.get(name, 0.0) + value
    judged = [_judged(event) for event in events if event.get("kind") == "judged"]
    dollars = [row["dollars"] for row in judged if row["dollars"] is not None]
    if judged:
        read, written = (sum(row[f"tokens {name}"] or 0 for row in judged) for name in ("read", "written"))
        sums |= {"judge: tokens read": read, "judge: tokens written": written}
        sums |= {"judge: dollars": sum(dollars)} if dollars else {}
    return sums


def _event(event: Mapping[str, Any]) -> dict[str, str]:
    return {"time": time_text(event.get("time")), "what": event_words(event)["text"]}


def _recorded_versions(events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    opened = [event.get("versions") or {} for event in events if event.get("kind") == "opened"]
    return dict(opened[-1]) if opened else {}
