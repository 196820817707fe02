"""Which tokens a step trains on: trajectories become rows by exact prefix extension.

Tokens are taken from the turns as the engine saw and sampled them; nothing is rendered again. How
rows become arrays is in ``packing``.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from artnb.advantage import FAILED, Dropped, advantages, blend, credit_baseline
from artnb.config import TrainConfig
from artnb.draw import draw
from artnb.errors import ConfigurationError, StalePolicy
from artnb.packing import PackedBatch, Segment, pack
from artnb.types import Sample, Trajectory, TrajectoryGroup, Turn

__all__ = [
    "PackedBatch",
    "Rows",
    "Segment",
    "Span",
    "check_complete",
    "check_staleness",
    "loss_denominator",
    "minibatches",
    "pack",
    "supervised_samples",
    "to_samples",
    "unrewarded_samples",
]

# Reasons that count turns: their tokens stay context where a later turn continues them.
GREEDY = "turn sampled greedily (temperature 0)"
NO_PROMPT = "turn without a prompt token"
LOGPROB_NOT_FINITE = "turn with a logprob that is not finite"
# A reason that counts trajectories: all text by hand, or all turns left out for the reasons above.
NO_TURN = "trajectory without a turn to train on"
# A reason that counts rows.
NOT_DRAWN = "not drawn (max_samples)"


NOTES = ("trajectories", "trajectories_split", "turns", "turns_truncated_support", "turns_cut_by_length")


Span = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt, and of the completion to learn after it."""


class Rows(NamedTuple):
    """What a step trains on, what it leaves out, and what is worth knowing about it."""

    samples: list[Sample]
    dropped: Dropped
    """Reason -> count, the reasons of ``advantage`` and of this file together."""
    notes: dict[str, int]
    """``trajectories``: how many have rows, before max_samples; ``trajectories_split``: more than
    one row each; ``turns``: how many carry a loss; ``turns_truncated_support``: sampled with top_p,
    top_k, min_p or in a structured form, which biases the ratio; ``turns_cut_by_length``: stopped by
    max_tokens."""
    groups: Sequence[TrajectoryGroup] = ()
    """Whose turns these are; empty for examples."""

    @property
    def skipped(self) -> str | None:
        """Why there is nothing to learn from, in words; None where there is."""
        reasons = ", ".join(f"{count} × {reason}" for reason, count in self.dropped.items()) or "no groups"
        return None if self.samples else f"nothing to learn from: {reasons}"


@dataclass
class _Row:
    """A row that later turns of its trajectory may extend."""

    trajectory: tuple[int, str]
    """Group index and trajectory id."""
    temperature: float
    ids: tuple[int, ...] = ()
    is_sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    turns: list[tuple[int, ...]] = field(default_factory=list)

    def continues_in(self, turn: Turn) -> bool:
        return turn.prompt_ids[: len(self.ids)] == self.ids

    def append(self, turn: Turn, advantage: float, places: Sequence[int]) -> None:
        context = len(turn.prompt_ids) - len(self.ids)
        sampled = len(turn.completion_ids)
        self.ids = turn.ids
        self.is_sampled += [False] * context + [True] * sampled
        self.logprobs += [0.0] * context + list(turn.logprobs)
        self.advantages += [0.0] * context + [advantage] * sampled
        self.turns.append(tuple(places))

    def to_sample(self, weight: float) -> Sample:
        group, trajectory_id = self.trajectory
        return Sample(
            ids_T=self.ids,
            is_sampled_T=tuple(self.is_sampled),
            logprobs_T=tuple(self.logprobs),
            advantages_T=tuple(self.advantages),
            weights_T=tuple([weight if sampled else 0.0 for sampled in self.is_sampled]),
            trajectory_id=trajectory_id,
            group=group,
            temperature=self.temperature,
            turns=tuple(filter(None, self.turns)),
        )


def to_samples(groups: Sequence[TrajectoryGroup], config: TrainConfig, *, step: int = 0) -> Rows:
    """Turn scored groups into the rows that one step trains on.

    A turn extends the longest row of its trajectory whose tokens begin its prompt, else it opens a
    new row; each sampled token carries loss once. ``step`` and ``config.seed`` decide which rows
    ``config.max_samples`` keeps.
    """
    return _to_rows(groups, *advantages(groups, config), config, step)


def unrewarded_samples(groups: Sequence[TrajectoryGroup], config: TrainConfig, *, step: int = 0) -> Rows:
    """The rows of all trajectories that did not fail, scored or not, every advantage being 1."""
    by_group = [{t.id: 1.0 for t in group if t.error is None} for group in groups]
    failed = sum(t.error is not None for group in groups for t in group)
    return _to_rows(groups, by_group, {FAILED: failed}, config.replace(credit_weight=0.0), step)


def _to_rows(
    groups: Sequence[TrajectoryGroup],
    by_group: Sequence[dict[str, float]],
    reasons: Dropped,
    config: TrainConfig,
    step: int,
) -> Rows:
    """Rows of the trajectories that have an advantage."""
    dropped, notes = Counter(reasons), Counter(dict.fromkeys(NOTES, 0))
    rows: list[_Row] = []
    for index, (group, group_advantages) in enumerate(zip(groups, by_group, strict=True)):
        baseline = credit_baseline(group) if config.credit_weight > 0 else 0.0
        for trajectory in group:
            if trajectory.id not in group_advantages:
                continue
            found = _trainable(trajectory, dropped)
            turns = [turn for turn, _ in found]
            _note(turns, notes)
            advantage = group_advantages[trajectory.id]
            turn_advantages = [blend(advantage, t.credit, baseline, config.credit_weight) for t in turns]
            own = _rows(turns, turn_advantages, (index, trajectory.id), [places for _, places in found])
            dropped[NO_TURN] += not own
            rows += own
    return _weighed_and_drawn(rows, dropped, notes, config, step)._replace(groups=groups)


def supervised_samples(examples: Sequence[Sequence[Span]], config: TrainConfig, *, step: int = 0) -> Rows:
    """Turn examples into rows whose completions are learned alike: with advantage 1 at temperature 1.

    Logprobs of 0 stand for those of a sampling policy, of which there is none. Rows are made, weighed
    and drawn as in ``to_samples``; a sample's ``group`` is the index of its example.
    """
    dropped, notes = Counter[str](), Counter(dict.fromkeys(NOTES, 0))
    rows: list[_Row] = []
    for index, spans in enumerate(examples):
        turns = [
            Turn(prompt, completion, (0.0,) * len(completion), 0, "stop", {})
            for prompt, completion in dict.fromkeys(spans)
            if prompt and completion
        ]
        notes["turns"] += len(turns)
        dropped[NO_PROMPT] += sum(not prompt for prompt, _ in spans)
        rows += _rows(turns, [1.0] * len(turns), (index, str(index)), [()] * len(turns))
    return _weighed_and_drawn(rows, dropped, notes, config, step)


def loss_denominator(samples: Iterable[Sample], config: TrainConfig) -> float:
    """By what the weighted sum of token losses is divided: once for all rows of one update."""
    samples = list(samples)
    if config.aggregate == "constant":
        return float(config.constant_tokens * len({_trajectory(s) for s in samples}))
    return math.fsum(weight for s in samples for weight in s.weights_T)


def minibatches(samples: Sequence[Sample], n: int) -> list[list[Sample]]:
    """Share the rows among at most ``n`` updates: whole trajectories, even in sampled tokens.

    Fewer than ``n`` when there are fewer trajectories. Rows keep their order.
    """
    rows: dict[tuple[int, str], list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        rows[_trajectory(sample)].append(index)
    tokens = {key: sum(samples[i].sampled_tokens for i in indices) for key, indices in rows.items()}
    shares: list[list[int]] = [[] for _ in range(min(n, len(rows)))]
    loads = [0] * len(shares)
    for key in sorted(rows, key=lambda key: -tokens[key]):
        lightest = loads.index(min(loads))
        shares[lightest] += rows[key]
        loads[lightest] += max(tokens[key], 1)
    return [[samples[i] for i in sorted(share)] for share in shares]


def check_complete(groups: Sequence[TrajectoryGroup]) -> None:
    """Refuse the groups of a ``gather`` that ended early. Raises ConfigurationError."""
    status = getattr(groups, "status", "complete")
    if status != "complete":
        raise ConfigurationError(
            f"these groups are partial: gather's status is {status!r}. Gather again, or pass "
            "allow_partial=True"
        )


def check_staleness(
    groups: Sequence[TrajectoryGroup], version: int, allowed: int, *, unscored: bool = False
) -> int:
    """The age of the oldest turn, in policy versions. Raises StalePolicy for one older than ``allowed``.

    Looks at scored trajectories; with ``unscored`` at all that did not fail.
    """
    used = [t for group in groups for t in group if t.is_scored or (unscored and t.error is None)]
    versions = {turn.policy_version for t in used for turn in t.turns}
    if min(versions, default=0) < 0:
        raise StalePolicy(
            "these trajectories hold turns of the untrained base model, which the adapter cannot learn "
            "from. Gather from the current policy; append another model's replies as plain messages."
        )
    foreign = sorted(v for v in versions if not 0 <= version - v <= allowed)
    if foreign:
        raise StalePolicy(
            f"these trajectories were sampled under policy version {', '.join(map(str, foreign))}, the model "
            f"is at version {version} and max_staleness is {allowed}. Run the gather cell again, or pass a "
            "larger max_staleness."
        )
    return max((version - v for v in versions), default=0)


def _trajectory(sample: Sample) -> tuple[int, str]:
    return sample.group, sample.trajectory_id


def _trainable(trajectory: Trajectory, dropped: Counter[str]) -> list[tuple[Turn, list[int]]]:
    """The turns that can carry a loss, each once however many histories hold it, with all its places."""
    found: list[tuple[Turn, list[int]]] = []
    seen: dict[tuple[object, ...], list[tuple[Turn, list[int]]]] = defaultdict(list)
    for place, turn in enumerate(trajectory.turns):
        alike = seen[len(turn.prompt_ids), turn.completion_ids, turn.logprobs]  # all pairs would be slow
        known = next((places for one, places in alike if one == turn), None)
        if known is not None:
            known.append(place)
        if not turn.completion_ids or known is not None:
            continue
        alike.append((turn, [place]))
        if not turn.prompt_ids:
            dropped[NO_PROMPT] += 1
        elif _temperature(turn) <= 0:
            dropped[GREEDY] += 1
        elif not all(map(math.isfinite, turn.logprobs)):
            dropped[LOGPROB_NOT_FINITE] += 1
        else:
            found.append(alike[-1])
    return found


def _note(turns: Sequence[Turn], notes: Counter[str]) -> None:
    notes["turns"] += len(turns)
    notes["turns_truncated_support"] += sum(map(_is_truncated, turns))
    notes["turns_cut_by_length"] += sum(turn.finish_reason == "length" for turn in turns)


def _temperature(turn: Turn) -> float:
    value = turn.sampling.get("temperature")
    return 1.0 if value is None else float(value)


def _is_truncated(turn: Turn) -> bool:
    get = turn.sampling.get
    cuts = (get("top_p") or 1.0) < 1 or (get("top_k") or 0) > 0 or (get("min_p") or 0.0) > 0
    return cuts or bool(get("structured"))  # a form allows few tokens at each place


def _rows(
    turns: Sequence[Turn],
    turn_advantages: Sequence[float],
    trajectory: tuple[int, str],
    places: Sequence[Sequence[int]],
) -> list[_Row]:
    """places: of each turn in ``trajectory.turns``."""
    rows: list[_Row] = []
    for turn, advantage, own in zip(turns, turn_advantages, places, strict=True):
        temperature = _temperature(turn)
        open_rows = [r for r in reversed(rows) if r.temperature == temperature and r.continues_in(turn)]
        row = max(open_rows, key=lambda r: len(r.ids), default=None)
        if row is None:
            row = _Row(trajectory, temperature)
            rows.append(row)
        row.append(turn, advantage, own)
    return rows


def _weighed_and_drawn(
    rows: Sequence[_Row], dropped: Counter[str], notes: Counter[str], config: TrainConfig, step: int
) -> Rows:
    rows_of = Counter(row.trajectory for row in rows)
    notes["trajectories"] = len(rows_of)
    notes["trajectories_split"] = sum(count > 1 for count in rows_of.values())
    samples = _draw(_weigh(rows, config), config, step)
    dropped[NOT_DRAWN] = len(rows) - len(samples)
    return Rows(samples, dict(+dropped), dict(notes))


def _draw(samples: list[Sample], config: TrainConfig, step: int) -> list[Sample]:
    """At most ``config.max_samples`` rows, those with large advantages sooner and weighing less."""
    if config.max_samples is None or len(samples) <= config.max_samples:
        return samples
    generator = random.Random(f"{config.seed}/{step}")
    drawn = draw([_influence(sample) for sample in samples], config.max_samples, generator)
    return [
        replace(samples[index], weights_T=tuple(factor * weight for weight in samples[index].weights_T))
        for index, factor in drawn
    ]


def _influence(sample: Sample) -> float:
    return math.fsum(w * abs(a) for w, a in zip(sample.weights_T, sample.advantages_T, strict=True))


def _weigh(rows: Sequence[_Row], config: TrainConfig) -> list[Sample]:
    """Loss weights: 1, or the same total for each trajectory with a mean of 1 over all tokens."""
    if config.aggregate != "trajectory":
        return [row.to_sample(1.0) for row in rows]
    tokens: Counter[tuple[int, str]] = Counter()
    for row in rows:
        tokens[row.trajectory] += sum(row.is_sampled)
    share = sum(tokens.values()) / max(len(tokens), 1)
    return [row.to_sample(share / tokens[row.trajectory]) for row in rows]
