"""Is the judge right? Its scores beside rewards known to be true, and beside its own second opinion."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from artnb.errors import ConfigurationError
from artnb.evaluate import Estimate, estimate
from artnb.judge import judge
from artnb.types import Groups, Trajectory, TrajectoryGroup
from artnb.ui.html import esc, table_html
from artnb.ui.snapshot import number_text
from artnb.ui.text import table_text

Truth = Callable[[Trajectory], "float | None"]


@dataclass(frozen=True)
class JudgeReport:
    """How far a judge can be trusted; intervals are 95 %, over groups."""

    judges: tuple[str, ...]
    groups: int
    scored: int
    """Groups that got a verdict."""
    unscored: dict[str, int]
    """Why the others got none."""
    samples: int
    pairwise: Estimate
    """Share of pairs of attempts of unlike truth that it orders rightly; ties count half, 0.5 is a coin."""
    rank_correlation: Estimate
    """Spearman's, within groups in which truth and scores both differ."""
    first_place_bonus: Estimate
    """What an attempt gains by standing first, against its mean score over the other places."""
    consistency: Estimate
    """Share of pairs of attempts that two samples order alike; ties count half."""
    spread: float | None
    """Mean standard deviation of an attempt's score over the samples."""
    invalid_rate: float
    """Share of answers that could not be used."""
    tokens_per_group: float
    dollars_per_group: float | None
    seconds: float

    def rows(self) -> list[dict[str, Any]]:
        cost = "no price given" if self.dollars_per_group is None else f"${self.dollars_per_group:.4f}"
        facts = {
            "pairs ordered rightly": str(self.pairwise),
            "rank correlation": str(self.rank_correlation),
            "bonus of the first place": str(self.first_place_bonus),
            "pairs ordered alike twice": str(self.consistency),
            "spread of a score": "–" if self.spread is None else number_text(self.spread),
            "answers of no use": f"{self.invalid_rate:.1%}",
            "groups with a verdict": f"{self.scored} of {self.groups}",
            **(
                {"no verdict": "; ".join(f"{n} × {w}" for w, n in self.unscored.items())}
                if self.unscored
                else {}
            ),
            "tokens a group": f"{self.tokens_per_group:,.0f}",
            "cost a group": cost,
        }
        return [{"judge": ", ".join(self.judges), **facts}]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        (row,) = self.rows()
        return table_text([{"": name, "value": value} for name, value in row.items()])

    def _repr_html_(self) -> str:
        (row,) = self.rows()
        note = f"95 % intervals over groups; {self.samples} samples in different orders"
        return table_html([{"": n, "value": v} for n, v in row.items()]) + f"<small>{esc(note)}</small>"


async def judge_report(
    groups: Iterable[TrajectoryGroup], *, truth: Truth | None = None, samples: int = 3, **options: Any
) -> JudgeReport:
    """Let a judge score groups whose true rewards are known, several times over, and compare.

    truth: gives the true reward of a trajectory, None where there is none; without it the rewards that the
    trajectories have are the truth. Other options go to ``judge``. Nothing is trained and the groups stay as
    they are. Raises ConfigurationError when no group has two attempts of unlike truth.
    """
    listed, known = list(groups), truth or (lambda trajectory: trajectory.reward)
    if samples < 2:
        raise ConfigurationError(
            f"samples must be at least 2 to see whether the judge agrees with itself, got {samples}"
        )
    true = {
        t.id: value for group in listed for t in group if t.error is None and (value := known(t)) is not None
    }
    if not any(len({true[t.id] for t in group if t.id in true}) > 1 for group in listed):
        raise ConfigurationError(
            "no group has two attempts whose true rewards differ: there is nothing to compare the judge with"
        )
    judged = await judge(listed, samples=samples, weight=1.0, **options)
    report = _report(judged, true, samples)
    run = getattr(options.get("model"), "run", None)
    if run is not None:
        run.record_event("judge_report", step=run.step, rows=report.rows())
    return report


def _report(judged: Groups, true: dict[str, float], samples: int) -> JudgeReport:
    facts = judged.judging
    told = [[t for t in group if "scores" in (t.metadata.get("judge") or {})] for group in judged]
    scored = [members for members in told if members]
    count = max(1, facts.groups)
    return JudgeReport(
        judges=tuple(facts.judges),
        groups=facts.groups,
        scored=len(scored),
        unscored=facts.unscored,
        samples=samples,
        pairwise=estimate([_agreements(members, true) for members in scored]),
        rank_correlation=estimate([_correlation(members, true) for members in scored]),
        first_place_bonus=estimate([_bonuses(members) for members in scored]),
        consistency=estimate([_alike(members) for members in scored]),
        spread=facts.mean_spread,
        invalid_rate=facts.spent.invalid / max(1, facts.spent.requests),
        tokens_per_group=(facts.spent.input_tokens + facts.spent.output_tokens) / count,
        dollars_per_group=facts.spent.dollars / count if facts.spent.is_priced else None,
        seconds=facts.seconds,
    )


def _order(a: float, b: float) -> int:
    return (a > b + 1e-9) - (b > a + 1e-9)


def _agreements(members: Sequence[Trajectory], true: dict[str, float]) -> list[float]:
    """1, 0.5 or 0 for each pair of unlike truth: ordered rightly, a tie, wrongly."""
    found = []
    for a, b in itertools.combinations([t for t in members if t.id in true], 2):
        right = _order(true[a.id], true[b.id])
        if right:
            said = _order(a.metadata["judge"]["score"], b.metadata["judge"]["score"])
            found.append((1 + right * said) / 2)
    return found


def _correlation(members: Sequence[Trajectory], true: dict[str, float]) -> list[float]:
    kept = [t for t in members if t.id in true]
    truths, scores = [true[t.id] for t in kept], [t.metadata["judge"]["score"] for t in kept]
    if len(set(truths)) < 2 or len(set(scores)) < 2:
        return []
    return [statistics.correlation(_ranks(truths), _ranks(scores))]


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, equal values sharing their mean rank."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) + 1) / 2 for v in values]


def _bonuses(members: Sequence[Trajectory]) -> list[float]:
    found = []
    for told in (t.metadata["judge"] for t in members):
        first = [s for s, place in zip(told["scores"], told["positions"], strict=True) if place == 0]
        rest = [s for s, place in zip(told["scores"], told["positions"], strict=True) if place != 0]
        if first and rest:
            found.append(statistics.fmean(first) - statistics.fmean(rest))
    return found


def _alike(members: Sequence[Trajectory]) -> list[float]:
    """For each pair of attempts and each two samples: 1 when ordered alike, 0.5 when one is a tie, 0."""
    found = []
    for a, b in itertools.combinations((t.metadata["judge"]["scores"] for t in members), 2):
        orders = [_order(x, y) for x, y in zip(a, b, strict=False)]
        found += [
            1.0 if x == y else 0.5 if 0 in (x, y) else 0.0 for x, y in itertools.combinations(orders, 2)
        ]
    return found
