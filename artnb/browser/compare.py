"""Where do attempts part ways, and which ones are worth laying side by side?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from artnb.browser.plain import number, text
from artnb.browser.rows import Rows, Table
from artnb.browser.tokens import turns_of

_TOLD = ("role", "text", "reasoning")


def common_entries(columns: Sequence[Sequence[Mapping[str, Any]]]) -> int:
    """How many entries all conversations share from their start."""
    count = 0
    for several in zip(*columns, strict=False):
        if any(_said(one) != _said(several[0]) for one in several[1:]):
            break
        count += 1
    return count


def first_divergence(columns: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """For each conversation: the entry where it leaves the others, and the character in its text.

    ``entry`` is None where a conversation ended before; ``in`` names the part of the entry that differs.
    """
    place = common_entries(columns)
    there = [entries[place] for entries in columns if place < len(entries)]
    part, at = "role", 0
    for name in (*_TOLD, "calls"):
        texts = [_part(entry, name) for entry in there]
        if len(set(texts)) > 1:
            part, at = name, _common_characters(texts)
            break
    return [
        {"entry": place if place < len(entries) else None, "at": at, "in": part if len(there) > 1 else None}
        for entries in columns
    ]


def _said(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(_part(entry, name) for name in (*_TOLD, "calls"))


def _part(entry: Mapping[str, Any], name: str) -> str:
    if name == "calls":
        return "\n".join(f"{call['name']}({call['arguments']})" for call in entry["calls"])
    return str(entry[name])


def _common_characters(texts: Sequence[str]) -> int:
    low, high = min(texts), max(texts)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))


def common_tokens(trajectories: Sequence[Mapping[str, Any]]) -> int:
    """How many exact tokens the last turns of the main histories share from their start."""
    rows = []
    for trajectory in trajectories:
        turns = turns_of(trajectory)
        rows.append([*turns[-1][0], *turns[-1][1]] if turns else [])
    shortest = min(map(len, rows), default=0)
    return next((i for i in range(shortest) if len({row[i] for row in rows}) > 1), shortest)


def outcomes(table: Table, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Columns in which these trajectories differ."""
    found = []
    for column in table.columns():
        values = [table.value(column["key"], row) for row in rows]
        if column["key"] != "id" and any(value != values[0] for value in values[1:]):
            found.append({"column": column["key"], "title": column["title"], "values": values})
    return found


def scenario_history(table: Table, row: int) -> dict[str, Any]:
    """See ``Source.same_scenario``."""
    alike = ~table.rolled_back()
    for name in ("scenario", "seat", "split"):
        coded = table.texts[name]
        alike = alike & (coded.codes == coded.codes[row])
    rows = np.flatnonzero(alike)
    scenario = table.value("scenario", row)
    if not len(rows) or scenario is None:
        return {"scenario": scenario, "first": None, "last": None, "steps": []}
    steps, rewards = table.numbers["step"][rows], table.numeric("reward")
    listed = []
    for step in np.unique(steps):
        mine = rows[steps == step]
        own = rewards[mine]
        own = own[np.isfinite(own)]
        listed.append(
            {
                "step": int(step),
                "count": len(mine),
                "mean": number(float(own.mean())) if len(own) else None,
                "ids": [table.id_of(int(one)) for one in mine[:64]],
            }
        )
    first, last = (rows[steps == listed[place]["step"]] for place in (0, -1))
    return {
        "scenario": scenario,
        "first": table.id_of(_typical(rewards, first)),
        "last": table.id_of(_typical(rewards, last)),
        "steps": listed,
    }


def _typical(rewards: np.ndarray, rows: Rows) -> int:
    """The row whose reward is nearest to the mean; the first one where nobody was scored."""
    own = rewards[rows]
    is_scored = np.isfinite(own)
    if not is_scored.any():
        return int(rows[0])
    distance = np.where(is_scored, np.abs(own - own[is_scored].mean()), np.inf)
    return int(rows[np.argmin(distance)])


def group_extremes(table: Table, rows: Rows) -> list[dict[str, Any]]:
    """Each group of these rows with its best and its worst trajectory, in the order of their means."""
    keys, places = table.groups()
    rewards = table.numeric("reward")
    found = []
    for place in dict.fromkeys(places[rows].tolist()):
        mine = rows[places[rows] == place]
        scored = mine[np.isfinite(rewards[mine])]
        own = rewards[scored]
        found.append(
            {
                "group": text(keys[place]),
                "scenario": table.value("scenario", int(mine[0])),
                "seat": table.value("seat", int(mine[0])),
                "split": table.value("split", int(mine[0])),
                "count": len(mine),
                "scored": len(scored),
                "mean": number(float(own.mean())) if len(scored) else None,
                "best": table.id_of(int(scored[np.argmax(own)])) if len(scored) else None,
                "worst": table.id_of(int(scored[np.argmin(own)])) if len(scored) else None,
                "rows": mine,
            }
        )
    return sorted(found, key=lambda one: (one["mean"] is None, one["mean"] or 0.0))
