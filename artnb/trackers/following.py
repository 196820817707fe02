"""How does a run tell its trackers what happens, and never wait for them?

Each tracker has a lane: a bounded queue and one daemon thread. A full queue drops rollouts, and counts them;
a service that does not answer is asked again, later and later; a tracker that fails is told of once and
switched off. The run folder has everything in any case: ``upload`` feeds a tracker from it.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from artnb.errors import ArtnbError, ConfigurationError
from artnb.secrets import redact
from artnb.store.folder import STEP_KINDS
from artnb.store.run import Run
from artnb.store.trajectories import Stored
from artnb.trackers.base import Tracker, Unreachable

_BATCH = 200
_LINGER_SECONDS = 0.2
"""How long a record may wait for others to be sent with it."""
_MOST_RECORDS = 5_000
_MOST_TOKENS = 4_000_000
"""What may wait in a lane; tokens take about 70 bytes each."""
_FIRST_DELAY, _LONGEST_DELAY = 1.0, 60.0
_CLOSE_SECONDS = 10.0

_Record = tuple[str, Any, int]
"""Name of the tracker's method, its argument, tokens in it."""


class Lane:
    """One tracker, what waits for it, and the thread that hands it over."""

    def __init__(self, tracker: Tracker, tell: Callable[[str], None]) -> None:
        self.tracker = tracker
        self.sent = self.dropped = 0
        self.is_off = False
        self._tell = tell
        self._waiting: deque[_Record] = deque()
        self._tokens = 0
        self._in_hand = 0
        self._is_closing = False
        self._is_outage = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"artnb-{tracker!r}"[:60], daemon=True)
        self._thread.start()

    @property
    def unsent(self) -> int:
        """Records that wait or are on their way."""
        return len(self._waiting) + self._in_hand

    def put(self, method: str, record: Any, tokens: int = 0) -> None:
        """Let the tracker have a record soon; returns at once."""
        with self._changed:
            if self.is_off or self._is_closing:
                return
            room = _MOST_RECORDS if method == "rollout" else 2 * _MOST_RECORDS
            is_full = len(self._waiting) >= room or (tokens and self._tokens + tokens > _MOST_TOKENS)
            if not is_full:
                self._waiting.append((method, record, tokens))
                self._tokens += tokens
            else:
                self.dropped += 1
            self._changed.notify_all()

    def close(self, deadline: float) -> None:
        """Hand over what waits until ``deadline`` (of ``time.monotonic``), then give up and say so."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if not self.is_off and (left := self.unsent + self.dropped):
            self._tell(
                f"{self.tracker!r}: {left} records of this run were not sent. The run folder has them: "
                "artnb.upload(run, tracker) sends what is missing."
            )
        self.is_off = True

    def _work(self) -> None:
        try:
            self._deliver()
        finally:
            try:
                self.tracker.finish()
            except Exception as error:
                self._switch_off(error)
            self.tracker.follows = None

    def _deliver(self) -> None:
        told_of_drops = False
        while batch := self._next():
            for method, record, _ in batch:
                if not self._hand_over(partial(getattr(self.tracker, method), record)):
                    return
            if not self._hand_over(self.tracker.flush):
                return
            self.sent += len(batch)
            self._in_hand, self._is_outage = 0, False
            if self.dropped and not told_of_drops:
                told_of_drops = True
                self._tell(
                    f"{self.tracker!r} is slower than the run: {self.dropped} records were left out so far. "
                    "artnb.upload(run, tracker) sends them from the run folder."
                )

    def _next(self) -> list[_Record]:
        """The next records, or none when the lane closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            if not self._is_closing:
                self._changed.wait_for(
                    lambda: len(self._waiting) >= _BATCH or self._is_closing, _LINGER_SECONDS
                )
            batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
            self._tokens -= sum(tokens for _, _, tokens in batch)
            self._in_hand = len(batch)
            return batch

    def _hand_over(self, call: Callable[[], None]) -> bool:
        """Call until it succeeds; False when there is no use in going on."""
        delay = _FIRST_DELAY
        while not self.is_off:
            was_closing = self._is_closing
            try:
                call()
            except Unreachable as error:
                if was_closing:
                    return False
                if not self._is_outage:
                    self._is_outage = True
                    self._tell(
                        f"{self.tracker!r} cannot be reached: {redact(str(error))}. The run goes on and "
                        "keeps everything in its folder; what waits is sent once the service answers."
                    )
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closing, delay)
                delay = min(2 * delay, _LONGEST_DELAY)
            except Exception as error:
                self._switch_off(error)
                return False
            else:
                return True
        return False

    def _switch_off(self, error: Exception) -> None:
        with self._changed:
            self.is_off = True
            self._waiting.clear()
            self._in_hand = 0
        reason = (
            redact(str(error))
            if isinstance(error, ArtnbError)
            else f"{type(error).__name__}: {redact(str(error))}"
        )
        self._tell(
            f"{self.tracker!r} is switched off for the rest of this run: {reason}. The run goes on; its "
            "folder has everything: artnb.upload(run, tracker) sends what is missing."
        )

    def __repr__(self) -> str:
        state = "off, " if self.is_off else ""
        return f"{self.tracker!r} ({state}{self.sent} sent, {self.unsent} waiting, {self.dropped} left out)"


class Trackers:
    """All trackers of one run.

    ``Trackers(...)`` starts them and raises what one of them raises; ``follow`` connects them to the run.
    """

    def __init__(self, trackers: Iterable[Tracker], *, name: str, path: Path) -> None:
        self._about = {"name": name, "path": str(path)}
        self._run: Run | None = None
        self._lanes: list[Lane] = []
        self._started = self._start(trackers, [])

    def _start(self, trackers: Iterable[Tracker], known: Sequence[Tracker]) -> list[Tracker]:
        """Start those that are not known yet; all of them or none."""
        wanted = _checked(trackers)
        fresh = [tracker for tracker in wanted if tracker not in known]
        for tracker in fresh:
            if tracker.follows is not None:
                raise ConfigurationError(
                    f"{tracker!r} already follows the run at {tracker.follows}. Make another one for this "
                    "run, or wait until that one has let go of it."
                )
        for number, tracker in enumerate(fresh):
            try:
                tracker.start(self._about)
            except BaseException:
                for started in fresh[:number]:
                    started.finish()
                raise
        return fresh

    def follow(self, run: Run) -> None:
        """From now on every record of this run reaches the trackers."""
        self._run = run
        for tracker in self._started:
            self._open(tracker, run)
        self._started = []
        if self.hear not in run.listeners:
            run.listeners.append(self.hear)
            atexit.register(self.finish)

    def _open(self, tracker: Tracker, run: Run) -> None:
        tracker.follows, tracker.tell = str(run.path), self._tell
        lane = Lane(tracker, self._tell)
        lane.put("event", following(run) | {"time": time.time(), "step": run.step})
        self._lanes.append(lane)

    def replace(self, trackers: Iterable[Tracker]) -> None:
        """Follow with these from now on: equal ones stay, new ones start, others finish."""
        assert self._run is not None
        wanted = list(trackers)
        running = [lane.tracker for lane in self._lanes if not lane.is_off]
        fresh = self._start(wanted, running)
        gone = [lane for lane in self._lanes if lane.is_off or lane.tracker not in wanted]
        self._close(gone, _CLOSE_SECONDS)
        for tracker in fresh:
            self._open(tracker, self._run)

    def hear(self, kind: str, record: Any) -> None:
        """What ``Run.listeners`` are called with; returns at once and never raises."""
        for lane in list(self._lanes):
            if kind == "rollouts":
                for stored in record:
                    lane.put("rollout", _as_it_is_now(stored), _tokens(stored))
            else:
                lane.put(method_for(kind, record), record)

    def finish(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Hand over what waits, for at most ``seconds``, and let go of the run. May be called again."""
        for tracker in self._started:  # and never followed: the model could not be made
            tracker.finish()
        self._started = []
        self._close(self._lanes, seconds)
        if self._run is not None and self.hear in self._run.listeners:
            self._run.listeners.remove(self.hear)
        atexit.unregister(self.finish)

    def _close(self, lanes: Iterable[Lane], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for lane in list(lanes):
            lane.close(deadline)
            self._lanes.remove(lane)

    def _tell(self, message: str) -> None:
        if self._run is not None:
            # a run that is closed or was taken over keeps no more events; the user still hears it
            with contextlib.suppress(ArtnbError, OSError):
                self._run.record_event("warning", message=message)
        warnings.warn(message, stacklevel=2)

    def __len__(self) -> int:
        return len(self._lanes)

    def __repr__(self) -> str:
        return "; ".join(map(repr, self._lanes)) or "none"


def _checked(trackers: Iterable[Tracker]) -> list[Tracker]:
    if isinstance(trackers, Tracker) or not isinstance(trackers, Iterable):
        raise ConfigurationError(f"trackers must be a list, got {trackers!r}. Pass [{trackers!r}].")
    wanted = list(trackers)
    for tracker in wanted:
        if not isinstance(tracker, Tracker):
            raise ConfigurationError(f"a tracker must be an artnb.Tracker, got {type(tracker).__name__}")
    if any(tracker in wanted[:index] for index, tracker in enumerate(wanted)):
        raise ConfigurationError("the same tracker is given twice")
    return wanted


def following(run: Any) -> dict[str, Any]:
    """The first event of a tracker: what run this is."""
    about = {
        name: value for name, value in run.description().items() if name in ("name", "created", "identity")
    }
    return {"kind": "following", **about}


def method_for(kind: str, record: Mapping[str, Any]) -> str:
    """The tracker's method for a line of metrics.jsonl or events.jsonl."""
    if kind == "metrics" and record.get("kind") in STEP_KINDS:
        return "step"
    return "evaluation" if record.get("kind") == "evaluation" else "event"


def _as_it_is_now(stored: Stored) -> Stored:
    """A trajectory may still be rescored by the notebook; the tracker gets what the run folder got."""
    trajectory = stored.trajectory
    return replace(stored, trajectory=replace(trajectory, metrics=dict(trajectory.metrics)))


def _tokens(stored: Stored) -> int:
    return sum(len(turn.prompt_ids) + len(turn.completion_ids) for turn in stored.trajectory.turns)
