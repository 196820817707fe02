"""Is an answer right, and what is it worth? Typed values compared after normalising, then ART-E's ladder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime

from artnb import Trajectory
from artnb_environments.email_search.questions import DONT_KNOW

_WORD = r"\w+"
_YEAR = "january february march april may june july august september october november december"
_MONTHS = _YEAR.split()
_MONTH = "|".join(f"{month[:3]}(?:{month[3:]})?" for month in _MONTHS)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,15})(?:\.\d{1,15})?(?![\w-])"
_NUMBER = rf"(?<![\w.,-]){_DIGITS}"
_MONEY = rf"(?:\$|usd)\s*({_DIGITS})|({_NUMBER})\s*(?:\$|usd|us dollars|dollars)"
_DAY_MONTH = rf"\b(\d{{1,2}})(?:st|nd|rd|th)?(?: of)? ({_MONTH})\.?(?:,? (\d{{4}}))?\b"
_MONTH_DAY = rf"\b({_MONTH})\.? (\d{{1,2}})(?:st|nd|rd|th)?(?:,? (\d{{4}}))?\b"
_ISO = r"\b(\d{4})-(\d{2})-(\d{2})\b"
_UNKNOWN = re.compile(r"\b(do not|don['’]?t|does not|cannot|can['’]?t) (know|say|tell)\b", re.I)
_FEW_WORDS = 8
LONGEST_ANSWER = 2000
"""Characters of an answer that are read; a longer one is wrong."""


def values_in(kind: str, text: str, names: Sequence[str] = ()) -> set[str]:
    """All values of one type in a text, in one spelling each.

    >>> sorted(values_in("money", "$4,310 or 4310.00 dollars, not $99"))
    ['4310', '99']
    >>> values_in("date", "on March 3rd, 2025") == values_in("date", "2025-03-03")
    True

    A ``phrase`` is all of the text. ``names``: the people there are, for ``person``; a last name alone
    stands for its bearer.
    """
    text = text.lower()
    if kind == "money":
        found = [first or second for first, second in re.findall(_MONEY, text)]
        bare = re.findall(_NUMBER, text)
        # Beside an amount in dollars a large number is another amount, unless it may be a year.
        large = [n for n in bare if float(n.replace(",", "")) >= 100 and not re.fullmatch(r"20\d\d", n)]
        return set(map(_number, [*found, *large] if found else bare))
    if kind == "int":
        return set(map(_number, re.findall(_NUMBER, text)))
    if kind == "date":
        return _dates(text)
    if kind == "code":
        return {f"{letters}-{digits}" for letters, digits in re.findall(r"\b([a-z]{2})[- ]?(\d{4})\b", text)}
    if kind == "place":
        return set(re.findall(r"\broom (\w+)", text))
    if kind == "phrase":
        return {" ".join(re.findall(r"\w+", text))} - {""}
    words = set(re.findall(r"\w+", text))
    return {name.lower() for name in names if name.lower().split()[-1] in words}


def _number(text: str) -> str:
    return f"{float(text.replace(',', '')):.2f}".removesuffix(".00")


def _dates(text: str) -> set[str]:
    """``YYYY-MM-DD``, with ``*`` for a year that is not said."""
    found = {(year, int(month), int(day)) for year, month, day in re.findall(_ISO, text)}
    for day, month, year in re.findall(_DAY_MONTH, text):
        found.add((year, _month(month), int(day)))
    for month, day, year in re.findall(_MONTH_DAY, text):
        found.add((year, _month(month), int(day)))
    return {f"{year or '*'}-{month:02}-{day:02}" for year, month, day in found}


def _month(word: str) -> int:
    return next(i for i, month in enumerate(_MONTHS, 1) if month.startswith(word[:3]))


def says_unknown(answer: str) -> bool:
    """True for an answer such as "I don't know"."""
    return bool(_UNKNOWN.search(answer))


def is_correct(answer: str, truth: str, kind: str, context: str, names: Sequence[str] = ()) -> bool:
    """Whether the answer holds the true value and no other of its type.

    Values that stand in ``context``, the question and the parts of a sum, may be repeated. Where nobody
    knows (truth "I don't know"), the answer must say so and offer no value.
    """
    if len(answer) > LONGEST_ANSWER:
        return False
    if kind == "phrase" and truth != DONT_KNOW:
        return _holds_phrase(answer, truth)
    found = values_in(kind, answer, names)
    if truth == DONT_KNOW and kind == "phrase":  # any other words could be a value
        return says_unknown(answer) and len(answer.split()) <= _FEW_WORDS
    if truth == DONT_KNOW:
        return says_unknown(answer) and not found - values_in(kind, context, names)
    (true,) = values_in(kind, truth, names)
    same = {true, "*" + true[4:]} if kind == "date" else {true}
    rivals = found - same - values_in(kind, context, names)
    return bool(found & same) and not rivals and not says_unknown(answer)


def _holds_phrase(answer: str, truth: str) -> bool:
    """Whether the words of the truth stand in the answer, in order and side by side, among few others."""
    said, true = (f" {' '.join(re.findall(_WORD, text.lower()))} " for text in (answer, truth))
    return (
        true.strip() != "" and true in said and len(said) <= 3 * len(true) + 60 and not says_unknown(answer)
    )


def precision_recall(given: Iterable[str], true: Iterable[str]) -> tuple[float, float]:
    """Of the sources; nothing given where there is nothing is right."""
    named, needed = set(given), set(true)
    if not named or not needed:
        return float(named == needed), float(named == needed)
    shared = len(named & needed)
    return shared / len(named), shared / len(needed)


def ladder(
    outcome: str,
    *,
    partial: float,
    source_f1: float = 0.0,
    given: int = 0,
    needed: int = 0,
    turns_left: float = 0.0,
) -> float:
    """ART-E's reward: every outcome has a range of its own, and partial credit (0 to 0.4) moves within it.

    A right answer gives 1 + 0.3 for the sources' F1 + up to 0.1 for naming no more of them than needed
    (ART: 0.1 / sources, for questions with one) + up to 0.1 for the share of turns that were left.
    """
    if outcome == "correct":
        return 1.0 + 0.3 * source_f1 + 0.1 * min(1.0, max(needed, 1) / max(given, 1)) + 0.1 * turns_left
    return {"unreadable": -2.0, "unknown_tool": -1.9, "bad_arguments": -1.8, "wrong": -1.0, "none": 0.0}[
        outcome
    ] + partial


def by_level(trajectories: Iterable[Trajectory]) -> dict[int, dict[str, float]]:
    """Level -> mean of every metric, and ``n``."""
    levels: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        levels.setdefault(int(trajectory.metrics["level"]), []).append(trajectory)
    return {
        level: {name: sum(t.metrics[name] for t in some) / len(some) for name in some[0].metrics}
        | {"n": float(len(some))}
        for level, some in sorted(levels.items())
    }


def is_day(text: str) -> bool:
    """Whether a text is a day that exists, as ``YYYY-MM-DD``."""
    try:
        return datetime.strptime(text, "%Y-%m-%d").strftime("%Y-%m-%d") == text
    except ValueError:
        return False
