"""Which policy is best, and what does it cost? The same held-out scenarios for all who play them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from artnb.environments import Environment
from artnb.errors import ConfigurationError, Stopped, require
from artnb.evaluate import Estimate, Evaluation, estimate, policy_of, summarise
from artnb.gather import gather
from artnb.judging.referees import endpoint
from artnb.prompted import prompted
from artnb.secrets import how_to_set
from artnb.session import remember
from artnb.types import Groups, Scenario, Trajectory, TrajectoryGroup
from artnb.ui.html import esc, table_html, visible
from artnb.ui.text import table_text

SUCCESS = ("success", "correct", "win", "right", "solved")
"""Metrics that say whether an episode came out, by preference."""
POLICY, BASELINE, ENDPOINT = "policy", "baseline", "endpoint"


@dataclass(frozen=True)
class Contender:
    """How one of them did. None stands for what was not measured."""

    name: str
    kind: str
    """``policy`` of the model in this kernel, ``baseline`` of the environment, or ``endpoint``."""
    evaluation: Evaluation
    success: Estimate | None = None
    completed: float | None = None
    """Share of the episodes that ended without an error."""
    turns: float | None = None
    seconds: float | None = None
    """Of an episode, mean, while the others were played beside it."""
    tokens_read: float | None = None
    tokens_written: float | None = None
    """Of an episode, mean; every request counts its whole prompt."""
    dollars: float | None = None
    """Of 1,000 episodes."""
    difference: Estimate | None = None
    """Its mean reward less the first contender's on the same scenarios; None for the first."""
    failure: str = ""
    """Why it has no figures."""

    def row(self) -> dict[str, Any]:
        """The figures as one row of a table."""
        return {
            "policy": self.name,
            "kind": self.kind,
            "success": None if self.success is None else str(self.success),
            "mean reward": str(self.evaluation.reward),
            "against the first": None if self.difference is None else str(self.difference),
            "n": self.evaluation.n,
            "completed": self.completed,
            "turns": self.turns,
            "seconds": self.seconds,
            "tokens read": self.tokens_read,
            "tokens written": self.tokens_written,
            "$ / 1,000 runs": self.dollars,
            "note": self.failure or self.evaluation.note,
        }


@dataclass
class Benchmark:
    """Contenders on the same scenarios; see ``benchmark``."""

    environment: str
    metric: str
    """The environment's metric that counts as success; empty where it has none."""
    scenarios: int
    contenders: list[Contender] = field(default_factory=list)
    status: str = "complete"

    def __getitem__(self, name: str) -> Contender:
        return next(one for one in self.contenders if one.name == name)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each contender, without the columns that nobody has."""
        rows = [one.row() for one in self.contenders]
        names = [n for n in (rows[0] if rows else ()) if any(row[n] not in (None, "") for row in rows)]
        return [{name: row[name] for name in names} for row in rows]

    def frame(self) -> Any:
        """The rows as a ``pandas.DataFrame``, estimates in columns ``_mean``, ``_low`` and ``_high``."""
        pandas = require("pandas", extra="cpu", why="for a frame")
        rows = []
        for one in self.contenders:
            row = one.row()
            estimates = {"success": one.success, "mean reward": one.evaluation.reward}
            for name, value in {**estimates, "against the first": one.difference}.items():
                del row[name]
                value = value or Estimate(None, None, None)
                row |= {f"{name}_{part}": getattr(value, part) for part in ("mean", "low", "high")}
            rows.append(row)
        return pandas.DataFrame(rows).set_index("policy")

    def figure(self) -> Any:
        """Mean rewards with their intervals as a ``plotly.graph_objects.Figure``."""
        require("plotly", extra="figures", why="to draw a figure")
        import plotly.graph_objects as go

        shown = [one for one in self.contenders if one.evaluation.mean_reward is not None]
        means = [one.evaluation.mean_reward or 0.0 for one in shown]
        ends = [
            (one.evaluation.low, one.evaluation.high) if one.evaluation.low is not None else (mean, mean)
            for one, mean in zip(shown, means, strict=True)
        ]
        bars = {
            "type": "data",
            "symmetric": False,
            "array": [float(high or 0.0) - mean for (_, high), mean in zip(ends, means, strict=True)],
            "arrayminus": [mean - float(low or 0.0) for (low, _), mean in zip(ends, means, strict=True)],
        }
        names = [esc(visible(one.name)) for one in shown]
        drawn = go.Figure(go.Bar(x=means, y=names, orientation="h", error_x=bars))
        drawn.update_yaxes(autorange="reversed")
        drawn.update_layout(
            title=esc(f"{self.environment}, {self.scenarios} held-out scenarios, 95 % intervals"),
            xaxis_title="mean reward",
            template="plotly_white",
        )
        return drawn

    def to_json(self) -> dict[str, Any]:
        rows = [one.row() for one in self.contenders]
        return {"environment": self.environment, "metric": self.metric, "status": self.status, "rows": rows}

    def _caption(self) -> str:
        success = f"success is the metric {self.metric!r}; " if self.metric else ""
        partial = "" if self.status == "complete" else f" Partial: {self.status}."
        return f"{self.environment}, {self.scenarios} scenarios; {success}95 % intervals.{partial}"

    def __repr__(self) -> str:
        return f"{table_text(self.rows())}\n{visible(self._caption())}"

    def _repr_html_(self) -> str:
        return f"<div>{table_html(self.rows())}<small>{esc(self._caption())}</small></div>"


async def benchmark(
    models: Sequence[Any],
    environment: Environment,
    *,
    model: Any = None,
    n: int = 100,
    split: str = "test",
    seed: int = 0,
    attempts: int = 1,
    metric: str | None = None,
    price: Mapping[str, tuple[float, float]] | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    options: Mapping[str, Any] | None = None,
    concurrency: int = 32,
    timeout: float | None = None,
    progress: bool = True,
) -> Benchmark:
    """Let policies, baselines and other models play the same ``n`` held-out scenarios.

    models: who plays, the first being the one that the others are compared with. ``"current"``, ``"base"``
        and checkpoints such as ``"step_000012"`` are policies of ``model``; names of the environment's
        baselines play without a model; a Model plays its current policy; any other name is a model behind
        the OpenAI-compatible endpoint ``base_url`` (None: OpenAI's own), which needs an environment that is
        written as a dialogue.
    metric: what counts as success; None takes the environment's own, such as ``win`` or ``correct``.
    price: name -> dollars for a million tokens read and written. api_key: read with
        ``artnb.secret("OPENAI_API_KEY")`` if None. options: further fields of an endpoint's requests.
    concurrency, timeout: episodes at once, seconds for each; see ``gather``.

    Nothing is trained. A contender whose every episode fails stands there with the reason, and the others
    go on. Raises ConfigurationError before anything is played; after ■ Interrupted, the finished
    contenders being on ``.partial``.
    """
    if not models:
        raise ConfigurationError("benchmark needs at least one model, policy or baseline")
    players = [
        _player(one, environment, model, base_url=base_url, api_key=api_key, options=options or {})
        for one in models
    ]
    named = Counter(player.name for player in players)
    if twice := [name for name, count in named.items() if count > 1]:
        raise ConfigurationError(f"{twice[0]!r} was given twice")
    found = Benchmark(environment.name, _success_metric(environment, metric), n)
    scenarios = environment.scenarios(split, n, seed)
    first: list[TrajectoryGroup] = []
    for player in players:
        try:
            groups = await player.play(
                scenarios,
                group_size=attempts,
                split=split,
                concurrency=concurrency,
                timeout=timeout,
                progress=progress,
                max_failures=None,
            )
        except Stopped as error:
            found.status = getattr(error.partial, "status", "stopped")
            _add(found, player, error.partial, first, attempts, price or {})
            error.partial = remember(found)
            raise
        _add(found, player, groups, first, attempts, price or {})
        first = first or list(groups)
    run = getattr(model, "run", None)
    if run is not None:
        run.record_event("benchmark", step=run.step, split=split, **found.to_json())
    return remember(found)


@dataclass(frozen=True)
class _Player:
    name: str
    kind: str
    environment: Environment
    model: Any = None
    rollout: Any = None

    async def play(self, scenarios: Sequence[Scenario], **options: Any) -> Groups:
        if self.kind == BASELINE:
            played = [
                TrajectoryGroup([self.environment.play(self.name, one).finish()], scenario_id=one.id)
                for one in scenarios
            ]
            return Groups(played)
        return await gather(self.rollout or self.environment.rollout, scenarios, model=self.model, **options)


def _player(who: Any, environment: Environment, model: Any, **of_endpoint: Any) -> _Player:
    if not isinstance(who, str):
        if not hasattr(who, "client"):
            raise ConfigurationError(f"a model, or the name of one, is wanted; got {type(who).__name__}")
        return _Player(str(who.name), POLICY, environment, who)
    if who in ("current", "base") or who.startswith("step_"):
        if model is None:
            raise ConfigurationError(f"{who!r} is a policy of a model: pass model=")
        return _Player(who, POLICY, environment, model if who == "current" else policy_of(model, who))
    if who in environment.policies:
        return _Player(who, BASELINE, environment)
    known = ", ".join(("current", "base", "step_NNNNNN", *environment.policies))
    if environment.dialogue is None:
        raise ConfigurationError(
            f"{who!r} is none of {known}, and no other model can play {environment.name}: it is not "
            "written as a dialogue"
        )
    options = dict(of_endpoint.pop("options"))
    try:
        client = endpoint(who, **of_endpoint).client
    except ConfigurationError as error:
        how = how_to_set("OPENAI_API_KEY")
        raise ConfigurationError(
            f"{who!r} is none of {known}; as a model behind an endpoint it needs a key: {how}, or pass "
            "api_key="
        ) from error
    return _Player(who, ENDPOINT, environment, None, prompted(environment.dialogue, client, who, **options))


def _success_metric(environment: Environment, asked: str | None) -> str:
    if asked is not None:
        return asked
    return next((name for name in SUCCESS if name in environment.metrics), "")


def _add(
    found: Benchmark,
    player: _Player,
    groups: Groups,
    first: Sequence[TrajectoryGroup],
    attempts: int,
    price: Mapping[str, tuple[float, float]],
) -> None:
    """Work out one contender's figures."""
    version = getattr(player.model, "policy_version", None) if player.kind == POLICY else None
    facts = {"attempts": attempts, "scenarios": len(groups), "policy_version": version}
    evaluation = summarise(player.name, groups, seconds=groups.seconds, status=groups.status, **facts)
    played = [t for group in groups for t in group]
    ended = [t for t in played if t.error is None]
    reasons = Counter(f"{t.error.type}: {t.error.message}" for t in played if t.error is not None)
    if not ended:
        why = reasons.most_common(1)[0][0] if reasons else "nothing was played"
        found.contenders.append(Contender(player.name, player.kind, evaluation, failure=why))
        return
    counts = [_tokens(t) for t in ended] if player.kind != BASELINE else []
    read, written = (fmean(column) for column in zip(*counts, strict=True)) if counts else (None, None)
    dollars = None
    if read is not None and written is not None and player.name in price:
        per_read, per_written = price[player.name]
        dollars = 1000 * (read * per_read + written * per_written) / 1e6
    found.contenders.append(
        Contender(
            player.name,
            player.kind,
            evaluation,
            success=evaluation.intervals.get(found.metric),
            completed=len(ended) / len(played),
            turns=fmean(_turns(t) for t in ended),
            seconds=None if player.kind == BASELINE else fmean(_seconds(t) for t in ended),
            tokens_read=read,
            tokens_written=written,
            dollars=dollars,
            difference=_difference(groups, first) if first else None,
        )
    )


def _difference(groups: Sequence[TrajectoryGroup], first: Sequence[TrajectoryGroup]) -> Estimate:
    """Paired by scenario, over those that both have scored."""
    means = [
        {
            group.scenario_id: fmean(rewards)
            for group in side
            if (rewards := [float(t.reward) for t in group if t.is_scored and t.reward is not None])
        }
        for side in (groups, first)
    ]
    both = [means[0][name] - means[1][name] for name in means[0] if name in means[1]]
    return estimate([[one, one] for one in both])  # a difference is no share, also where all are 0 or 1


def _turns(trajectory: Trajectory) -> float:
    played = len(trajectory.turns) or sum(m["role"] == "assistant" for m in trajectory.messages())
    return float(trajectory.metrics.get("turns", played))


def _seconds(trajectory: Trajectory) -> float:
    return float(trajectory.metrics.get("seconds", trajectory.seconds or 0.0))


def _tokens(trajectory: Trajectory) -> tuple[float, float]:
    turns = trajectory.turns
    if turns:
        return float(sum(len(t.prompt_ids) for t in turns)), float(sum(len(t.completion_ids) for t in turns))
    return trajectory.metrics.get("tokens_read", 0.0), trajectory.metrics.get("tokens_written", 0.0)
