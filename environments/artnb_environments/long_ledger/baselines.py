"""How good is bookkeeping without a model? Numbers at random, the last part alone, and exact notes."""

from __future__ import annotations

import random
from collections.abc import Callable

from artnb import Scenario, Trajectory
from artnb_environments.long_ledger.episode import Episode
from artnb_environments.long_ledger.ledger import book, notes_of
from artnb_environments.long_ledger.rollout import part_text

Policy = Callable[[Episode, random.Random], tuple[str, tuple[int, ...]]]
"""The notes after this part, and the answer that they and the part give."""


def anything(episode: Episode, draw: random.Random) -> tuple[str, tuple[int, ...]]:
    """No notes, and numbers from 10 to 99."""
    return "", tuple(draw.randint(10, 99) for _ in episode.ledger.asked)


def last_part(episode: Episode, draw: random.Random) -> tuple[str, tuple[int, ...]]:
    """No notes; what the last part itself says, else a number from 10 to 99."""
    known = book({}, episode.ledger.parts[episode.part])
    return "", tuple(known.get(name, draw.randint(10, 99)) for name in episode.ledger.asked)


def exact(episode: Episode, draw: random.Random) -> tuple[str, tuple[int, ...]]:
    """The balance of every account."""
    balances = episode.ledger.after(episode.part + 1)
    return notes_of(balances), tuple(balances[name] for name in episode.ledger.asked)


def play(policy: Policy, scenario: Scenario) -> Trajectory:
    """One episode of a policy, without a model."""
    episode, draw = Episode.of(scenario), random.Random(f"baseline/{scenario.seed}")
    trajectory = Trajectory(scenario_id=scenario.id)
    while not episode.ended_by:
        notes, answer = policy(episode, draw)
        said = ", ".join(map(str, answer)) if episode.is_last else notes
        trajectory.messages_and_choices += [
            {"role": "user", "content": part_text(episode)},
            {"role": "assistant", "content": said},
        ]
        if episode.is_last:
            episode.answer(answer)
        else:
            episode.note(notes)
    return episode.score(trajectory)


def _player(policy: Policy) -> Callable[[Scenario], Trajectory]:
    return lambda scenario: play(policy, scenario)


baselines: dict[str, Callable[[Scenario], Trajectory]] = {
    "random": _player(anything),
    "last_part": _player(last_part),
    "oracle": _player(exact),
}
