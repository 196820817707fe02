"""Which exact tokens did the model read and sample, and what is known of each?

The tokens of a history are its rows, as training sees them: a turn whose prompt goes on from the tokens of
an earlier row extends it, any other begins a row of its own.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from artnb.browser.plain import mapping, sequence, text

MOST_TOKENS = 20_000
VALUES = ("logprob", "trainer_logprob", "ratio", "advantage", "entropy", "weight")
_RECORDED = {
    "trainer_logprob": "trainer_logprobs",
    "advantage": "advantages",
    "entropy": "entropies",
    "weight": "weights",
}
_LONGEST_TOKEN = 200
_HEX = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Row:
    """A row that grows with the turns that extend it."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.turn: list[int] = []
        """Number of the turn that sampled the token, -1 where it was read."""
        self.place: list[int] = []
        """Place among all sampled tokens of the trajectory, -1 where it was read."""

    def continues_in(self, prompt: Sequence[int]) -> bool:
        return len(prompt) >= len(self.ids) and prompt[: len(self.ids)] == self.ids

    def append(self, prompt: Sequence[int], completion: Sequence[int], turn: int, place: int) -> None:
        context = len(prompt) - len(self.ids)
        self.ids = [*prompt, *completion]
        self.turn += [-1] * context + [turn] * len(completion)
        self.place += [-1] * context + list(range(place, place + len(completion)))


def turns_of(history: Mapping[str, Any]) -> list[tuple[list[int], list[int], list[Any]]]:
    """Prompt ids, sampled ids and logprobs of each turn, the prompts whole again."""
    found: list[tuple[list[int], list[int], list[Any]]] = []
    before: list[int] = []
    for item in map(mapping, sequence(history.get("messages_and_choices"))):
        if "turn" not in item:
            continue
        turn = mapping(item["turn"])
        prompt, completion = _ids(turn.get("prompt_ids")), _ids(turn.get("completion_ids"))
        if turn.get("extends_previous"):
            prompt = before + prompt
        before = prompt + completion
        found.append((prompt, completion, sequence(turn.get("logprobs"))))
    return found


def _ids(value: Any) -> list[int]:
    return [one if isinstance(one, int) else -1 for one in sequence(value)]


def token_view(
    trajectory: Mapping[str, Any],
    history: int,
    start: int,
    count: int,
    record: Any,
    why_no_record: str,
    tokenizer: Any,
    why_no_texts: str,
) -> dict[str, Any]:
    """See ``Source.tokens``. ``record`` is a TokenRecord or None; the reasons say why one is not there."""
    every = [trajectory, *map(mapping, sequence(trajectory.get("additional_histories")))]
    turns = [turns_of(one) for one in every]
    if not 0 <= history < len(turns):
        raise LookupError(f"there are {len(turns)} histories, and no number {history}")
    first = sum(len(own) for own in turns[:history])
    place = sum(len(completion) for own in turns[:history] for _, completion, _ in own)
    rows, logprobs = _rows(turns[history], first, place)
    ids = [i for row in rows for i in row.ids]
    turn = [t for row in rows for t in row.turn]
    places = np.array([p for row in rows for p in row.place], np.intp)
    count = max(0, min(count, MOST_TOKENS))
    part = slice(max(0, start), max(0, start) + count)
    sampled_in_all = sum(len(completion) for own in turns for _, completion, _ in own)
    values, missing = _values(places[part], place, logprobs, record, why_no_record, sampled_in_all)
    texts = None if tokenizer is None else token_texts(tokenizer, ids[part])
    if texts is None:
        missing["text"] = why_no_texts
    begins = list(itertools.accumulate((len(row.ids) for row in rows), initial=0))[:-1]
    return {
        "history": history,
        "start": part.start,
        "total": len(ids),
        "hidden": len(ids) - len(ids[part]),
        "rows": begins,
        "ids": ids[part],
        "texts": texts,
        "sampled": [int(t >= 0) for t in turn[part]],
        "turn": turn[part],
        "values": {name: _json(found) for name, found in values.items()},
        "ranges": {name: _range(found) for name, found in values.items()},
        "missing": missing,
    }


def _rows(
    turns: Sequence[tuple[list[int], list[int], list[Any]]], first: int, place: int
) -> tuple[list[_Row], list[Any]]:
    rows, logprobs = list[_Row](), list[Any]()
    for number, (prompt, completion, own) in enumerate(turns):
        fits = [row for row in reversed(rows) if row.continues_in(prompt)]
        row = max(fits, key=lambda one: len(one.ids), default=None)
        if row is None:
            row = _Row()
            rows.append(row)
        row.append(prompt, completion, first + number, place + len(logprobs))
        logprobs += (own + [None] * len(completion))[: len(completion)]
    return rows, logprobs


def _values(
    places: Any, before: int, logprobs: Sequence[Any], record: Any, why_none: str, total: int
) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {"logprob": _spread(_numbers(logprobs), places, before)}
    missing: dict[str, str] = {}
    for name, field in _RECORDED.items():
        array = getattr(record, field, None)
        if array is not None and len(array) == total:
            values[name] = _spread(np.asarray(array, np.float64), places, 0)
        elif record is None:
            missing[name] = why_none
        elif array is None:
            missing[name] = "the step did not measure it"
        else:
            missing[name] = f"the step recorded {len(array)} tokens, the trajectory has {total}"
    if "trainer_logprob" in values:
        with np.errstate(over="ignore"):
            values["ratio"] = np.exp(values["trainer_logprob"] - values["logprob"])
    else:
        missing["ratio"] = missing["trainer_logprob"]
    return {name: values[name] for name in VALUES if name in values}, missing


def _numbers(values: Sequence[Any]) -> Any:
    return np.array([v if isinstance(v, (int, float)) else math.nan for v in values], np.float64)


def _spread(values: Any, places: Any, before: int) -> Any:
    """The value of every token, NaN where it was read and not sampled."""
    found = np.full(len(places), np.nan)
    own = places >= 0
    found[own] = values[places[own] - before]
    return found


def _json(values: Any) -> list[float | None]:
    finite = np.isfinite(values)
    rounded = np.round(np.where(finite, values, 0.0), 5).tolist()
    return [v if is_there else None for v, is_there in zip(rounded, finite.tolist(), strict=True)]


def _range(values: Any) -> list[float] | None:
    kept = values[np.isfinite(values)]
    return [round(float(q), 5) for q in np.quantile(kept, [0.02, 0.98])] if len(kept) else None


# ---- texts ------------------------------------------------------------------------------------------


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token says by itself; bytes of an incomplete character are written as ⟨e2⟩."""
    alphabet = _byte_alphabet() if _is_byte_level(tokenizer) else None
    known = {one: text(_token_text(tokenizer, one, alphabet)[:_LONGEST_TOKEN]) for one in dict.fromkeys(ids)}
    return [known[one] for one in ids]


def _token_text(tokenizer: Any, one: int, alphabet: Mapping[str, int] | None) -> str:
    try:
        name = tokenizer.convert_ids_to_tokens(one) if hasattr(tokenizer, "convert_ids_to_tokens") else None
        if name is None:
            return _decoded(tokenizer, one)
        if one in (getattr(tokenizer, "added_tokens_decoder", None) or {}):
            return str(name)
        if match := _HEX.fullmatch(name):
            return _bytes_text(bytes([int(match[1], 16)]))
        if alphabet is not None and all(character in alphabet for character in name):
            return _bytes_text(bytes(alphabet[character] for character in name))
        return str(name).replace("▁", " ")
    except (IndexError, KeyError, OverflowError, TypeError, ValueError):  # an id of another vocabulary
        return f"⟨id {one}⟩"


def _decoded(tokenizer: Any, one: int) -> str:
    said = tokenizer.decode([one])
    return f"⟨id {one}⟩" if "�" in said or not said else str(said)


def _bytes_text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        pass
    found = ""
    for piece in re.split(rb"([\x80-\xff]+)", raw):
        try:
            found += piece.decode()
        except UnicodeDecodeError:
            found += "".join(f"⟨{byte:02x}⟩" for byte in piece)
    return found


def _is_byte_level(tokenizer: Any) -> bool:
    """True for the tokenizers that write a space as Ġ and every byte as a character of its own."""
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        return False
    space = tokenizer.convert_tokens_to_ids("Ġ")
    return space is not None and space != getattr(tokenizer, "unk_token_id", None)


@lru_cache(1)
def _byte_alphabet() -> dict[str, int]:
    """How byte-level tokenizers write bytes: printable ones as they are, the others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
