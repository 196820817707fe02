"""How does a run look as a table: in pandas, in parquet, in a cell?"""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artnb.errors import require
from artnb.store.codec import encode
from artnb.store.journal import replacing

if TYPE_CHECKING:
    import pandas

    from artnb.store.folder import RunFolder
    from artnb.store.trajectories import Stored

COLUMNS = (
    "step",
    "split",
    "scenario_id",
    "group",
    "attempt",
    "seat",
    "reward",
    "turns",
    "completion_tokens",
    "error",
    "policy_version",
    "seconds",
    "id",
)
_ROWS_AT_ONCE = 500


def trajectory_row(stored: Stored) -> dict[str, Any]:
    """The columns of one trajectory; ``metric/<name>`` follow them."""
    trajectory = stored.trajectory
    turns = trajectory.turns
    values = (
        stored.step,
        stored.split,
        trajectory.scenario_id,
        f"{stored.gather_id}/{trajectory.scenario_id}/{trajectory.seat}".rstrip("/"),
        stored.attempt,
        trajectory.seat,
        trajectory.reward,
        len(turns),
        sum(len(turn.completion_ids) for turn in turns),
        trajectory.error.type if trajectory.error else None,
        min((turn.policy_version for turn in turns), default=None),
        trajectory.seconds,
        trajectory.id,
    )
    row = dict(zip(COLUMNS, values, strict=True))
    return row | {f"metric/{name}": value for name, value in trajectory.metrics.items()}


def metrics_frame(run: RunFolder) -> pandas.DataFrame:
    """One row a metrics record."""
    pd = require("pandas", extra="cpu", why="to make a frame")
    return pd.DataFrame([_without_surrogates(record) for record in run.metrics()])


def trajectories_frame(run: RunFolder) -> pandas.DataFrame:
    """One row a trajectory, in the order in which they were written."""
    pd = require("pandas", extra="cpu", why="to make a frame")
    rows = [_without_surrogates(trajectory_row(stored)) for stored in run.stored()]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=list(COLUMNS))


def _without_surrogates(record: dict[str, Any]) -> dict[str, Any]:
    """pandas 3 keeps texts as UTF-8, which has no lone surrogates: they become their escapes."""

    def text(value: Any) -> Any:
        return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value

    return {text(name): text(value) for name, value in record.items()}


def export_parquet(run: RunFolder, path: Path) -> Path:
    """The columns of trajectories_frame, ``metrics`` and the whole ``trajectory`` as JSON text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        write_parquet(run.stored(), beside)
    return path


def write_parquet(stored: Iterable[Stored], path: Path) -> int:
    """Write trajectories, some hundred at a time in memory, to a parquet file; returns how many."""
    pa = require("pyarrow", extra="parquet", why="to write parquet")
    parquet = require("pyarrow.parquet", extra="parquet", why="to write parquet")
    integers = {"step", "attempt", "turns", "completion_tokens", "policy_version"}
    schema = pa.schema(
        [
            (c, pa.int64() if c in integers else pa.float64() if c in ("reward", "seconds") else pa.string())
            for c in COLUMNS
        ]
        + [("metrics", pa.string()), ("trajectory", pa.string())]
    )
    count = 0
    with parquet.ParquetWriter(path, schema) as writer:
        rows: list[dict[str, Any]] = []
        for one in stored:
            row = {c: v for c, v in trajectory_row(one).items() if c in COLUMNS}
            text = {
                "metrics": encode(one.trajectory.metrics),
                "trajectory": encode(one.trajectory.to_json()),
            }
            rows.append(_without_surrogates(row | text))
            count += 1
            if len(rows) == _ROWS_AT_ONCE:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                rows = []
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return count


def run_html(run: RunFolder) -> str:
    """A run in a cell: where it is, how far it is, the last reward."""
    metrics = run.metrics()
    rewards = [r["reward_mean"] for r in metrics if isinstance(r.get("reward_mean"), float)]
    latest = run.latest_checkpoint()
    rows = {
        "folder": str(run.path),
        "training steps": str(run.trained_steps),
        "latest checkpoint": latest.name if latest else "none",
        "last mean reward": f"{rewards[-1]:.3f}" if rewards else "none",
    }
    cells = "".join(f"<tr><th>{k}</th><td>{html.escape(v)}</td></tr>" for k, v in rows.items())
    return f"<table><caption>run {html.escape(run.name)}</caption>{cells}</table>"
