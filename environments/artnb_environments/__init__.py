"""How do the bundled environments make scenarios? From seeds that no two splits have in common."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from artnb import ConfigurationError, Scenario

SPLITS = ("train", "validation", "test")
SEED_RANGE = 2**40

V = TypeVar("V")


def split_seeds(split: str, n: int, seed: int = 0) -> list[int]:
    """``n`` different seeds of a split; seeds of different splits differ modulo 3.

    >>> [seed % 3 for seed in split_seeds("validation", 4)]
    [1, 1, 1, 1]

    A longer list starts with the shorter one.
    """
    if split not in SPLITS:
        raise ConfigurationError(f"split must be one of {', '.join(SPLITS)}; got {split!r}")
    if n < 0:
        raise ConfigurationError(f"n must be 0 or more, got {n}")
    draw = random.Random(f"{split}/{seed}")
    seeds: dict[int, None] = {}
    while len(seeds) < n:
        seeds[draw.randrange(SEED_RANGE) * len(SPLITS) + SPLITS.index(split)] = None
    return list(seeds)


def make_scenarios(
    name: str,
    split: str,
    n: int,
    seed: int,
    variant: Any,
    start: Callable[[int], Mapping[str, Any]] = lambda seed: {},
) -> list[Scenario]:
    """Scenarios whose task holds every option of ``variant`` and what ``start(seed)`` adds.

    The id names the options that differ from their defaults, so that two variants never share one.
    """
    options = dataclasses.asdict(variant)
    defaults = dataclasses.asdict(type(variant)())
    changed = ",".join(f"{k}={v}" for k, v in options.items() if v != defaults[k])
    prefix = f"{name}({changed})" if changed else name
    return [
        Scenario(f"{prefix}/{split}/{one}", split, one, options | dict(start(one)))
        for one in split_seeds(split, n, seed)
    ]


def variant_of(scenario: Scenario, variant: type[V]) -> V:
    """The options that a scenario was made with."""
    names = [option.name for option in dataclasses.fields(variant)]  # type: ignore[arg-type]
    return variant(**{name: scenario.task[name] for name in names})


def require_one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Refuse an option's value that is not among the allowed ones."""
    if value not in allowed:
        raise ConfigurationError(f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}")


def require(condition: bool, message: str) -> None:
    """Refuse a value for the reason given."""
    if not condition:
        raise ConfigurationError(message)


def read_tagged(
    text: str | None, tag: str, pattern: str, *, cut_off: bool = False, keep_case: bool = False
) -> str | None:
    """The content of a reply that is exactly one tag, or None.

    >>> read_tagged("<move>left</move>", "move", "left|right")
    'left'

    The engine cuts the text before a stop string, so the closing tag may be missing, except in a
    reply that was ``cut_off`` at its token limit: that one never came to its end.
    """
    end = f"</{tag}>" if cut_off else f"(?:</{tag}>)?"
    found = re.fullmatch(rf"\s*<{tag}>\s*({pattern})\s*{end}\s*", text or "", re.IGNORECASE)
    if not found:
        return None
    return found.group(1) if keep_case else found.group(1).lower()
