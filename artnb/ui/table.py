"""How is training going? A live table of steps with its reward curve, in one place of the notebook."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from artnb.ui.curve import curve_svg, sparkline, thinned
from artnb.ui.display import Live
from artnb.ui.html import esc, table_html, visible
from artnb.ui.snapshot import ABOUT_STEP, is_step, is_supervised, number_text, reward_of
from artnb.ui.text import table_text

_MOST_ROWS, _MOST_EARLIER, _MOST_POINTS = 30, 200, 500
_COLUMNS = {
    "± std": "reward_std",
    "entropy": "entropy",
    "KL": "kl_k3",
    "|Δ logprob|": "logprob_gap_mean",
    "seconds": "seconds",
    "notes": "notes",
}
"""Title -> metric of the columns after the mean reward."""
_SUPERVISED_COLUMNS = {"kind": "kind", "loss": "loss", "mean logprob": "mean_logprob"}
"""The same, of the columns before it in a run with supervised steps."""


class RewardTable:
    """A row for each training step and the curve of the mean reward, drawn again after each step.

    Supervised steps stand in it as kind ``sft``, with the mean logprob of their tokens and no reward.

    run: its earlier steps are shown first, so a resumed notebook tells the whole story.
    baselines: rewards to draw as dashed lines; numbers or Evaluations.

    >>> table = RewardTable(title="toy", enabled=False)
    >>> table.add({"step": 0, "reward_mean": 0.25})
    >>> table.rewards
    [(0, 0.25)]
    """

    def __init__(
        self,
        run: Any = None,
        *,
        baselines: Mapping[str, Any] | None = None,
        title: str = "Training",
        enabled: bool = True,
    ) -> None:
        self.title = title
        levels = {name: getattr(value, "mean_reward", value) for name, value in (baselines or {}).items()}
        self.baselines = {name: float(level) for name, level in levels.items() if level is not None}
        self.records: list[dict[str, Any]] = []
        self._live = Live(title, enabled=enabled)
        if run is not None:
            self.records = [dict(r) for r in run.metrics() if is_step(r)]

    @property
    def rewards(self) -> list[tuple[int, float]]:
        """(step, mean reward) of every scored step."""
        pairs = [(r.get("step", i), reward_of(r)) for i, r in enumerate(self.records)]
        return [(step, reward) for step, reward in pairs if reward is not None]

    def add(self, result: Any) -> None:
        """Add one step: what ``train_step`` or ``sft_step`` returned, or a mapping of metrics.

        A repeated step replaces the earlier one.
        """
        record = _record(result)
        self.records = [r for r in self.records if r.get("step") != record.get("step")] + [record]
        self._draw()

    def show(self) -> RewardTable:
        """Draw the table now; the notebook keeps this drawing."""
        self._draw()
        return self

    def curve(self) -> str:
        """The curve alone, as an SVG string."""
        points = thinned(self.rewards, _MOST_POINTS)
        return curve_svg([{"name": "mean reward", "points": points}], self.baselines)

    def _draw(self) -> None:
        last = _row(self.records[-1], self._columns()) if self.records else {}
        line = ", ".join(
            f"{name} {number_text(value)}" for name, value in last.items() if value not in (None, "")
        )
        text = str(self) if self._live.mode == "html" else f"{self.title}: {line}"
        self._live.finish(self._repr_html_(), text)

    def _columns(self) -> dict[str, str]:
        """Title -> metric, in the order in which they stand."""
        has_supervised = any(map(is_supervised, self.records))
        about = {"step": "step", **(_SUPERVISED_COLUMNS if has_supervised else {})}
        return {**about, "mean reward": "mean_reward", **_COLUMNS}

    def _split(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
        """Earlier and latest rows to show; of many earlier ones every so-manieth, which is the third."""
        earlier, latest = self.records[:-_MOST_ROWS], self.records[-_MOST_ROWS:]
        every = math.ceil(len(earlier) / _MOST_EARLIER) or 1
        columns = self._columns()
        return [_row(r, columns) for r in earlier[::every]], [_row(r, columns) for r in latest], every

    def _repr_html_(self) -> str:
        hidden, latest, every = self._split()
        rewards = self.rewards
        highest = max([reward for _, reward in rewards] + [1e-9])
        for row in [*hidden, *latest]:
            row[""] = "▅" * round(max(0.0, row["mean reward"] or 0.0) / highest * 12)
        columns = list(self._columns())
        columns.insert(columns.index("mean reward") + 1, "")
        table = table_html(latest, columns)
        if hidden:
            shown = f", every {every}th" if every > 1 else ""
            summary = f"<summary>{len(self.records) - len(latest)} earlier steps{shown}</summary>"
            table = f"<details>{summary}{table_html(hidden, columns)}</details>{table}"
        chart = self.curve() if rewards else ""
        return f"<div><b>{esc(self.title)}</b><div>{chart}</div>{table}</div>"

    def __repr__(self) -> str:
        line = sparkline([reward for _, reward in thinned(self.rewards, _MOST_EARLIER)])
        earlier, latest, _ = self._split()
        return "\n".join([visible(f"{self.title} {line}").rstrip(), table_text([*earlier, *latest])])


def _record(result: Any) -> dict[str, Any]:
    if isinstance(result, Mapping):
        return dict(result)
    return dict(result.metrics) | {name: getattr(result, name, None) for name in ABOUT_STEP}


def _row(record: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    notes = [f"skipped: {record['skipped']}"] if record.get("skipped") else []
    if not notes:
        notes += [f"{count} × {reason}" for reason, count in (record.get("dropped") or {}).items() if count]
    notes += ["⚠ warning"] * bool(record.get("warnings"))
    values = dict(record) | {
        "kind": "sft" if is_supervised(record) else "train",
        "mean_logprob": -record["nll"] if "nll" in record else None,
        "mean_reward": reward_of(record),
        "notes": "; ".join(notes),
    }
    return {title: values.get(name) for title, name in columns.items()}
