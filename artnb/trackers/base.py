"""What may a tracker hear of a run? Rollouts, steps, evaluations, events; this one does nothing with them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from artnb.errors import ArtnbError
from artnb.store.trajectories import Stored


class Unreachable(ArtnbError):
    """A tracker's service does not answer now and may later."""


class Tracker:
    """Hears of a run and keeps nothing: override what you want to know.

    ``start`` is called where the Model is made, before anything is loaded: what it raises stops the cell.
    Everything else happens in a thread of the tracker's own, one call at a time and in order, and never
    stops a run. A method that raises ``Unreachable`` is called again with the same record, later and later;
    after any other error the tracker hears no more of this run, and the user is told once.

    Trackers that are equal (``==``) are one: a cell that is run again keeps the one that runs already.
    """

    def start(self, run: Mapping[str, Any]) -> None:
        """Get ready, or raise ConfigurationError or MissingDependency.

        ``run`` has its ``name`` and ``path``. With ``again`` True some of what follows may have been sent
        before, by this process or another. Every start that succeeds is followed by ``finish`` in the end,
        and may be by another start.
        """

    def rollout(self, stored: Stored) -> None:
        """One finished trajectory, with its step, split, gather and attempt."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        """The record of a finished training step, as in metrics.jsonl."""

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """A finished evaluation: ``name``, ``step``, ``mean_reward``, ``low``, ``high``, ``n``, ..."""

    def event(self, event: Mapping[str, Any]) -> None:
        """An event of the run's journal; the first, of kind ``following``, says what the run is."""

    def flush(self) -> None:
        """Send what the calls before have left unsent. Called whenever nothing more is waiting."""

    def finish(self) -> None:
        """Nothing more will come: let go of connections."""

    tell: Callable[[str], None] = staticmethod(warnings.warn)
    """Says something to the user that stops nothing; a followed run keeps it in its journal as well."""
    follows: str | None = None
    """Path of the run that this tracker follows now."""
