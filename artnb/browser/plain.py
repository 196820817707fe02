"""How does anything that a model, a tool or a user wrote become a value that JSON and a screen can hold?"""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Mapping
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")


def number(value: Any) -> float | int | None:
    """A finite number, or None for whatever else it is.

    >>> number(0.5), number(float("nan")), number("x"), number(True)
    (0.5, None, None, 1)
    """
    if type(value).__module__ in ("numpy", "torch") and hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, numbers.Real):
        return None
    if isinstance(value, numbers.Integral):
        return whole if abs(whole := int(value)) < 2**53 else None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def text(value: Any) -> str:
    """Text that every transport takes: a lone surrogate is written as its name.

    >>> text("a\\ud800b"), text(None), text(3)
    ('a‹U+D800›b', '', '3')
    """
    found = "" if value is None else value if isinstance(value, str) else str(value)
    if found.isascii():
        return found
    return _SURROGATE.sub(lambda m: f"‹U+{ord(m[0]):04X}›", found)


class Cutter:
    """Shortens texts and counts what it leaves out; together they hold at most ``total`` characters."""

    def __init__(self, longest: int, total: int) -> None:
        self.longest = longest
        self.left = total
        self.cut = 0
        """Characters left out so far."""

    def __call__(self, value: Any, longest: int | None = None) -> str:
        given = value if isinstance(value, str) else text(value)
        keep = max(0, min(len(given), longest or self.longest, self.left))
        self.left -= keep
        self.cut += len(given) - keep
        return text(given if keep == len(given) else given[:keep])


def pretty(value: Any, longest: int = 200_000) -> str:
    """JSON for people, or the best that can be said of a value that JSON cannot hold.

    Structures nested so deep that writing them fails are described.
    """
    try:
        written = json.dumps(value, ensure_ascii=False, indent=2, default=_other)
    except (ValueError, TypeError, RecursionError) as error:
        written = f"(cannot be written: {type(error).__name__})"
    return text(written[:longest]) + (f" … {len(written) - longest:,} more" if len(written) > longest else "")


def mapping(value: Any) -> Mapping[str, Any]:
    """The mapping, or an empty one for whatever else it is."""
    return value if isinstance(value, Mapping) else {}


def sequence(value: Any) -> list[Any]:
    """The list, or an empty one for whatever else it is."""
    return list(value) if isinstance(value, (list, tuple)) else []


def _other(value: Any) -> Any:
    if type(value).__module__ in ("numpy", "torch") and hasattr(value, "tolist"):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else repr(value)
