"""How do runs read in a terminal? The text twins of ``ui.html``, drawn from the same snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from artnb.types import Trajectory, TrajectoryGroup
from artnb.ui.html import visible
from artnb.ui.snapshot import (
    groups_snapshot,
    is_supervised,
    number_text,
    reward_of,
    seconds_text,
    step_snapshot,
    trajectory_snapshot,
)


def table_text(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Rows as an aligned table.

    >>> print(table_text([{"step": 1, "reward": 0.25}, {"step": 10, "reward": None}]))
    step  reward
       1   0.250
      10       –
    """
    kept = list(rows)
    names = list(columns) if columns is not None else list(dict.fromkeys(k for row in kept for k in row))
    cells = [[visible(number_text(row.get(name))) for name in names] for row in kept]
    is_text = [all(isinstance(row.get(name, ""), str) for row in kept) for name in names]
    heads = [visible(name) for name in names]
    widths = [max(len(name), *(len(r[i]) for r in cells)) for i, name in enumerate(heads)] if cells else []

    def line(values: Sequence[str]) -> str:
        padded = [v.ljust(w) if t else v.rjust(w) for v, w, t in zip(values, widths, is_text, strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(heads), *map(line, cells)]) if cells else "  ".join(heads)


def trajectory_text(trajectory: Trajectory) -> str:
    """One trajectory, turn by turn."""
    view = trajectory_snapshot(trajectory)
    reward = "not scored" if view["reward"] is None else number_text(view["reward"])
    lines = [
        f"{view['scenario_id'] or 'trajectory'} · reward {reward} · {view['turns']} turns, "
        f"{view['tokens']:,} sampled tokens"
    ]
    if view["error"]:
        lines.append(f"failed with {view['error']['type']}: {view['error']['message']}")
    for index, entries in enumerate(view["histories"]):
        if index:
            lines.append(f"-- history {index + 1} of {len(view['histories'])} --")
        lines += [_entry_text(entry) for entry in entries]
    if view["metrics"]:
        lines.append(", ".join(f"{k} {number_text(v)}" for k, v in view["metrics"].items()))
    return visible("\n".join(lines))


def _entry_text(entry: Mapping[str, Any]) -> str:
    body = "\n".join([*([entry["text"]] if entry["text"] else []), *(f"→ {c}" for c in entry["calls"])])
    indented = body.replace("\n", "\n    ")
    return f"[{entry['role']}] {indented}"


def groups_text(groups: Iterable[TrajectoryGroup]) -> str:
    """What ``gather`` returned: rewards by group, and failures by kind."""
    view = groups_snapshot(groups)
    facts = [f"{len(view['rows'])} groups", f"{view['trajectories']} trajectories"]
    facts.append(f"mean reward {number_text(view['mean'])}")
    facts += [f"{view[name]} {name}" for name in ("failed", "unscored") if view[name]]
    if view["seconds"]:
        facts.append(seconds_text(view["seconds"]))
    if view["status"] != "complete":
        facts.append(view["status"])
    columns = ["scenario_id", "trajectories", "mean", "lowest", "highest", "failed", "tokens"]
    lines = [", ".join(facts), table_text(view["rows"], columns)]
    lines += [f"{f['count']} × {f['type']}: {f['message']}" for f in view["failures"]]
    return visible("\n".join(lines))


def step_line(result: Any) -> str:
    """The outcome of one training step in a line, from a StepResult or a mapping of its metrics.

    >>> step_line({"step": 3, "reward_mean": 0.25, "seconds": 4.0})
    'step 3: mean reward 0.250, 4.0 s'
    """
    record = result if isinstance(result, Mapping) else {**result.metrics, **vars(result)}
    if is_supervised(record):
        facts = [f"supervised, loss {number_text(record.get('loss'))}"]
    else:
        facts = [f"mean reward {number_text(reward_of(record))}"]
    if record.get("seconds") is not None:
        facts.append(seconds_text(record["seconds"]))
    if record.get("skipped"):
        facts.append(f"skipped: {record['skipped']}")
    return visible(f"step {record.get('step')}: {', '.join(facts)}")


def step_text(result: Any) -> str:
    """One training step, from a StepResult or a mapping of its metrics."""
    view = step_snapshot(result)
    lines = [f"step {view['step']}" if view["step"] is not None else "step"]
    if view["policy_version"] is not None:
        lines[0] += f", policy version {view['policy_version']}"
    if view["is_supervised"]:
        lines[0] += ", supervised"
    if view["skipped"]:
        lines.append(f"skipped: {view['skipped']}")
    lines += [f"warning: {warning}" for warning in view["warnings"]]
    if view["dropped"]:
        lines.append("left out: " + ", ".join(f"{n} × {reason}" for reason, n in view["dropped"].items()))
    for name, rows in view["sections"].items():
        lines.append(f"{name}: " + ", ".join(f"{label} {value}" for label, value in rows))
    return visible("\n".join(lines))
