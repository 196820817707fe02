"""Who goes back when training collapses and nobody is looking? A guard, which warns or acts as it was told.

It watches what the dashboard's alarms watch (``dashboard.alarms``), evaluations, and updates that are not
finite. To act it asks as a person would: ``run.ask("roll_back", ...)`` and a lower learning rate.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from artnb.dashboard.alarms import KINDS
from artnb.dashboard.view import View
from artnb.errors import CheckpointError, ConfigurationError
from artnb.store import Run
from artnb.store.controls import Target
from artnb.store.folder import reward_to_rank

if TYPE_CHECKING:
    from artnb.batch import Rows

NOT_FINITE = "not finite"
"""A gradient of NaN or infinity: no update, and no alarm's row either."""
COLLAPSE = (
    *("collapse", "entropy collapse", "drift", "engine and trainer disagree", "judge trouble"),
    *("invalid answers", "failures", "gradient", NOT_FINITE),
)
_GOING_BACK = "Going back"


@dataclass(frozen=True)
class Guard:
    """What is done when training goes wrong: ``off``, ``warn``, or ``act``, which goes back by itself.

    alarms: kinds to listen to, of the dashboard's, and ``not finite``. evaluation_drop: how far the mean
    reward of ``evaluate`` may fall below the best before it; None does not look. to: where ``act`` goes
    back to after the step under way, "best" or a step. learning_rate_factor: what the learning rate is
    multiplied with then, 1 for no change. limit: how often it goes back in a run; after that it warns.

    With ``act`` a step whose gradient is not finite is recorded as skipped, and the loop goes on. Going
    back happens between two steps of a loop over ``run.steps``. Raises ConfigurationError.
    """

    mode: Literal["off", "warn", "act"] = "warn"
    alarms: tuple[str, ...] = COLLAPSE
    evaluation_drop: float | None = None
    to: Target = "best"
    learning_rate_factor: float = 0.5
    limit: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "alarms", (self.alarms,) if isinstance(self.alarms, str) else self.alarms)
        unknown = [kind for kind in self.alarms if kind not in (*KINDS, NOT_FINITE)]
        if self.mode not in ("off", "warn", "act"):
            raise ConfigurationError(f"a guard's mode is 'off', 'warn' or 'act'; got {self.mode!r}")
        if unknown:
            raise ConfigurationError(
                f"there is no alarm {unknown[0]!r}. There are: {', '.join((*KINDS, NOT_FINITE))}"
            )
        if self.evaluation_drop is not None and not self.evaluation_drop >= 0:
            raise ConfigurationError(f"evaluation_drop must be >= 0 or None, got {self.evaluation_drop!r}")
        if not 0 < self.learning_rate_factor <= 1 or self.limit < 0:
            raise ConfigurationError("learning_rate_factor must be in (0, 1], and limit >= 0")


class Guarding:
    """A guard at work on a run."""

    def __init__(self, guard: Guard | None, run: Run) -> None:
        self.guard = guard or Guard("off")
        self.run = run
        self._view = View(run)
        self._known: set[str] = set()
        """Kinds that the step before gave reason for."""
        self._rate: float | None = None
        self._times_back = sum(
            event["kind"] == "alarm" and event["done"].startswith(_GOING_BACK) for event in run.events()
        )
        self._best_evaluation = max(run.ranks("evaluation").values(), default=-math.inf)
        run.listeners.append(self._hear)

    @property
    def acts(self) -> bool:
        return self.guard.mode == "act"

    async def step(self, take: Callable[[Rows], Awaitable[Any]], rows: Rows, learning_rate: float) -> Any:
        """Take a step on these rows and look at what came of it; its warnings say what is wrong.

        One whose gradient is not finite is skipped by a guard that acts, and raises FloatingPointError
        otherwise.
        """
        self._rate, problem = learning_rate, None
        try:
            result = await take(rows)
        except FloatingPointError as error:
            if not self.acts or NOT_FINITE not in self.guard.alarms:
                raise
            problem = str(error)
            dropped = {**rows.dropped, NOT_FINITE: len(rows.samples)}
            result = await take(rows._replace(samples=[], dropped=dropped))
        result.warnings += self._after_step(problem)
        return result

    def _after_step(self, problem: str | None) -> list[str]:
        if self.guard.mode == "off":
            return []
        self._view.look_at_everything()
        texts = {a["kind"]: a["text"] for a in self._view.head["alarms"] if a["kind"] in self.guard.alarms}
        if problem is not None:
            texts[NOT_FINITE] = problem
        new = [kind for kind in texts if kind not in self._known]
        self._known = set(texts)
        wanted = list(texts) if self.acts and self._times_back < self.guard.limit else new
        return [self._tell(wanted, [texts[kind] for kind in wanted])] if wanted else []

    def _hear(self, kind: str, record: Any) -> None:
        if kind != "event" or record["kind"] not in ("evaluation", "rolled_back"):
            return
        if record["kind"] == "rolled_back":
            self._best_evaluation = max(self.run.ranks("evaluation").values(), default=-math.inf)
            return
        reward, drop = reward_to_rank(record, "evaluation"), self.guard.evaluation_drop
        if reward is None:
            return
        fallen = self._best_evaluation - reward
        self._best_evaluation = max(self._best_evaluation, reward)
        if self.guard.mode != "off" and drop is not None and fallen > drop:
            text = f"The evaluation's mean reward is {reward:.3g}; it has been {reward + fallen:.3g}."
            warnings.warn(self._tell(["evaluation"], [text]), stacklevel=2)

    def _tell(self, kinds: Sequence[str], texts: Sequence[str]) -> str:
        """Write it down, act if that is wanted, and return it in words."""
        done = self._act() if self.acts else ""
        self.run.record_event("alarm", step=self.run.step, alarms=list(kinds), texts=list(texts), done=done)
        return " ".join([f"{', '.join(kinds)}: {' '.join(texts)}", *([done] if done else [])])

    def _act(self) -> str:
        if self._times_back >= self.guard.limit:
            return f"It went back {self._times_back} times already (limit): look at it."
        try:
            checkpoint = self.run.checkpoint(self.guard.to)
        except CheckpointError as error:
            return f"It cannot go back: {error}."
        self.run.ask("roll_back", checkpoint.step, by="guard")
        self._times_back += 1
        words = f"{_GOING_BACK} to step {checkpoint.step}"
        if self._rate is not None and self.guard.learning_rate_factor < 1:
            rate = self.guard.learning_rate_factor * self._rate
            self.run.ask("learning_rate", rate, by="guard")
            words += f" with a learning rate of {rate:.3g}"
        return words + "."
