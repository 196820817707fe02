"""What may be typed into the browser's filter, and which rows does it keep?

Words separated by spaces; a row has to fit all of them. ``-`` before a word turns it around::

    step:12  step:3..9  step:1,2,5     numbers: equal to one of these, or in a range
    reward<0.5  turns>=3  reward!=1    numbers compared
    tool:search  scenario:maze         texts that contain this, in any case
    split=train  error!=ValueError     texts that are exactly this, or are not
    error  override  bookmark          rows that have one
    failed  scored  unscored  rolled_back      the status
    reward:none                        rows in which it is missing
    maze   "text to find"              in id, scenario, seat, error, tools, gather or note
    text:"the boat"                    in the messages: read from disk, one trajectory after another

A part of the reward or a metric is named like ``reward/format`` or ``metric/moves``, or by its last part
where that is no other column's name. Quotes keep spaces in a name or a value together: ``"metric/a b"<3``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from artnb.browser.rows import STATUSES, Coded, Mask, Table

_ALIASES = {"tool": "tools", "message": "text", "policy": "version", "policy_version": "version"}
_STATUS_WORDS = {name.replace(" ", "_"): name for name in STATUSES}
_SEARCHED = ("id", "scenario", "seat", "error", "tools", "gather", "note")
_OPERATOR = re.compile(r"<=|>=|!=|[:=<>]")
_LONGEST = 2000
_COMPARE: dict[str, Callable[[np.ndarray, float], Mask]] = {
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}


class FilterError(ValueError):
    """A filter that cannot be understood; ``at`` is the index of the character where it goes wrong."""

    def __init__(self, message: str, at: int) -> None:
        super().__init__(message)
        self.at = at


@dataclass
class Filter:
    """What was typed, understood."""

    needles: list[tuple[str, bool]] = field(default_factory=list)
    """Texts to look for in messages; True: that must not be there."""
    terms: list[Callable[[Table], Mask]] = field(default_factory=list)

    def mask(self, table: Table) -> Mask:
        """True for rows that fit everything but the needles."""
        kept = np.ones(table.count, bool)
        for term in self.terms:
            kept &= term(table)
        return kept


@dataclass(frozen=True)
class _Word:
    name: str
    operator: str
    value: str
    is_quoted: bool
    """The name was in quotes: it is no flag then."""
    is_negated: bool
    at: int


def parse_filter(written: str, table: Table) -> Filter:
    """Understand a filter; names of columns are those of the table. Raises FilterError."""
    if len(written) > _LONGEST:
        raise FilterError(f"the filter is longer than {_LONGEST:,} characters", _LONGEST)
    found = Filter()
    for word in _words(written):
        name = _ALIASES.get(word.name, word.name)
        if word.operator and name == "text":
            if word.operator != ":" or not word.value:
                raise FilterError('write text:"what to find" to search the messages', word.at)
            found.needles.append((word.value, word.is_negated))
            continue
        term = _column_term(word, name, table) if word.operator else _bare_term(word, name, table)
        found.terms.append(_negated(term) if word.is_negated else term)
    return found


def _words(written: str) -> list[_Word]:
    words, at = list[_Word](), 0
    while at < len(written):
        if written[at].isspace():
            at += 1
            continue
        start = at
        is_negated = written[at] == "-" and at + 1 < len(written) and not written[at + 1].isspace()
        at += is_negated
        is_quoted = written[at] == '"'
        name, at = _piece(written, at, stop=_OPERATOR)
        operator = match[0] if (match := _OPERATOR.match(written, at)) else ""
        value = ""
        if operator:
            if not name:
                raise FilterError(f"there is no column before {operator!r} at character {at + 1}", at)
            value, at = _piece(written, at + len(operator), stop=None)
        words.append(_Word(name, operator, value, is_quoted, is_negated, start))
    return words


def _piece(written: str, at: int, stop: re.Pattern[str] | None) -> tuple[str, int]:
    """A name or a value that begins here, and where it ends."""
    if written[at : at + 1] == '"':
        end = written.find('"', at + 1)
        if end < 0:
            raise FilterError(f"the quote at character {at + 1} is not closed", at)
        return written[at + 1 : end], end + 1
    end = at
    while end < len(written) and not written[end].isspace() and not (stop and stop.match(written, end)):
        end += 1
    return written[at:end], end


def _negated(term: Callable[[Table], Mask]) -> Callable[[Table], Mask]:
    return lambda table: ~term(table)


def _bare_term(word: _Word, name: str, table: Table) -> Callable[[Table], Mask]:
    if not word.is_quoted and name in _STATUS_WORDS:
        if name == "rolled_back":
            return lambda table: table.rolled_back()
        wanted = _STATUS_WORDS[name]
        return lambda table: _exactly(table.coded("status"), {wanted})
    if not word.is_quoted and name in (
        "error",
        "override",
        "bookmark",
        "note",
        "tools",
        "parent",
        "advantage",
    ):
        return lambda table: _is_there(table, name)
    needle = word.name.casefold()

    def contains(table: Table) -> Mask:
        kept = np.zeros(table.count, bool)
        for column in _SEARCHED:
            kept |= _containing(table.coded(column), [needle])
        return kept

    return contains


def _column_term(word: _Word, name: str, table: Table) -> Callable[[Table], Mask]:
    key = _column(word, name, table)
    if word.value == "" and not word.operator.endswith("="):
        raise FilterError(f"{word.name}{word.operator} at character {word.at + 1} needs a value", word.at)
    if word.operator in (":", "=", "!=") and word.value.casefold() == "none":
        is_turned = word.operator == "!="
        return lambda table: _is_there(table, key) == is_turned
    if table.kind(key) == "number":
        return _number_term(word, key)
    if table.kind(key) == "flag":
        return _flag_term(word, key)
    return _text_term(word, key)


def _number_term(word: _Word, key: str) -> Callable[[Table], Mask]:
    if word.operator in _COMPARE:
        limit, compare = _as_number(word, word.value), _COMPARE[word.operator]
        return lambda table: compare(table.numeric(key), limit)
    ranges = []
    for part in word.value.split(","):
        low, dots, high = part.partition("..")
        if dots:
            ranges.append(
                (_as_number(word, low) if low else -np.inf, _as_number(word, high) if high else np.inf)
            )
        else:
            ranges.append((_as_number(word, part),) * 2)
    if word.operator == "!=":
        return lambda table: ~_in_ranges(table.numeric(key), ranges)
    return lambda table: _in_ranges(table.numeric(key), ranges)


def _in_ranges(values: np.ndarray, ranges: list[tuple[float, float]]) -> Mask:
    kept = np.zeros(len(values), bool)
    for low, high in ranges:
        if low == high:
            kept |= np.isclose(values, low, rtol=1e-6, atol=1e-9)
        else:
            kept |= (values >= low) & (values <= high)
    return kept


def _flag_term(word: _Word, key: str) -> Callable[[Table], Mask]:
    truth = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
    wanted = truth.get(word.value.casefold())
    if wanted is None or word.operator not in (":", "=", "!="):
        raise FilterError(
            f"{word.name} is yes or no: write {word.name}:yes (character {word.at + 1})", word.at
        )
    return lambda table: (table.numeric(key) > 0) == (wanted != (word.operator == "!="))


def _text_term(word: _Word, key: str) -> Callable[[Table], Mask]:
    wanted = word.value.split(",")
    if word.operator in _COMPARE:
        raise FilterError(
            f"{word.name} is text, which {word.operator!r} cannot compare: write {word.name}:word "
            f"(character {word.at + 1})",
            word.at,
        )
    if word.operator == ":":
        return lambda table: _containing(table.coded(key), [one.casefold() for one in wanted if one])
    return lambda table: _exactly(table.coded(key), set(wanted)) == (word.operator == "=")


def _as_number(word: _Word, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise FilterError(
            f"{word.name} is a number, and {value!r} is none (character {word.at + 1})", word.at
        ) from None


def _column(word: _Word, name: str, table: Table) -> str:
    """The key of the column that is meant. Raises FilterError with the nearest ones."""
    if table.kind(name) is not None:
        return name
    ends = [key for key in table.measured if name in (key.partition("/")[2], key.rpartition("/")[2])]
    if len(ends) == 1:
        return ends[0]
    where = f"at character {word.at + 1}"
    if ends:
        raise FilterError(f"{word.name!r} {where} may be {' or '.join(ends)}", word.at)
    known = [column["key"] for column in table.columns()] + ["text"]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    raise FilterError(
        f"there is no column {word.name!r} ({where}){guess} Put it in quotes to search for it, or take one "
        f"of: {', '.join(known)}",
        word.at,
    )


def _is_there(table: Table, key: str) -> Mask:
    if table.kind(key) == "number":
        return ~np.isnan(table.numeric(key))
    if table.kind(key) == "flag":
        return table.numeric(key) > 0
    return ~_exactly(table.coded(key), {""})


def _containing(coded: Coded, needles: list[str]) -> Mask:
    fits = [any(needle in value.casefold() for needle in needles) for value in coded.values]
    return np.array(fits, bool)[coded.codes] if fits else np.zeros(len(coded.codes), bool)


def _exactly(coded: Coded, wanted: set[str]) -> Mask:
    return np.isin(coded.codes, [coded.places[value] for value in wanted if value in coded.places])
