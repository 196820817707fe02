"""How does a tracker get a run that it did not follow, or not to its end? From the run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from artnb.errors import ConfigurationError
from artnb.store.folder import RunFolder
from artnb.trackers.base import Tracker
from artnb.trackers.following import following, method_for

_BATCH = 50


@dataclass(frozen=True)
class Uploaded:
    """What ``upload`` handed to a tracker."""

    rollouts: int = 0
    steps: int = 0
    evaluations: int = 0
    events: int = 0


def upload(run: RunFolder, tracker: Tracker) -> Uploaded:
    """Hand everything that a run's folder holds to a tracker; blocks until it is sent.

    What a service has already is not sent twice: call it after an outage, after a crash, or again.

    Raises ConfigurationError when the tracker cannot start, Unreachable when its service stops answering.
    """
    if tracker.follows is not None:
        raise ConfigurationError(
            f"{tracker!r} follows the run at {tracker.follows} now. Close its model first, or make another."
        )
    tracker.start({"name": run.name, "path": str(run.path), "again": True})
    counts = dict.fromkeys(("rollout", "step", "evaluation", "event"), 0)
    try:
        for number, (method, record) in enumerate(_records(run)):
            getattr(tracker, method)(record)
            counts[method] += 1
            if number % _BATCH == 0:
                tracker.flush()
        tracker.flush()
    finally:
        tracker.finish()
    return Uploaded(counts["rollout"], counts["step"], counts["evaluation"], counts["event"])


def _records(run: RunFolder) -> Iterator[tuple[str, Any]]:
    about = following(run)
    yield "event", about | {"time": about.get("created", 0.0)}
    for stored in run.stored():
        yield "rollout", stored
    for metrics in run.metrics():
        yield method_for("metrics", metrics), metrics
    for event in run.events():
        yield method_for("event", event), event
