"""How does any Python record become one line of strict JSON, and come back equal?

Ordinary values are ordinary JSON. What JSON cannot say is written as an object with one ``$`` key:

    {"$float": "nan"}         nan, inf and -inf
    {"$int": "0x1f..."}       an integer of thousands of digits
    {"$text": [.., ..]}       a string in which two lone surrogates stand side by side
    {"$object": [[k, v]]}     a dict that would otherwise be read as one of these forms
    {"$deep": [[parent, key, value]]}   values nested deeper than JSON readers follow, as a flat list

Tuples become lists, numpy scalars and arrays become numbers and lists, sets become sorted lists, and
any other object becomes its ``repr``. Lines are pure ASCII: neither a terminal escape nor a bidi mark
that a model wrote reaches the terminal of a person who reads the file with ``cat``.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Mapping
from typing import Any

MARKERS = ("$float", "$int", "$text", "$object", "$deep")
_MARKER = re.compile("|".join(re.escape(f'"{marker}"') for marker in MARKERS))
_SURROGATE_PAIR = re.compile("([\ud800-\udbff])(?=[\udc00-\udfff])")
_DEEPEST = 100  # levels of nesting that are written as they are
_LARGEST = 10**4000  # Python refuses to print larger integers in decimal by default


def encode(record: Mapping[str, Any]) -> str:
    """One line of JSON without its newline.

    >>> encode({"reward": float("nan"), "text": "é"})
    '{"reward":{"$float":"nan"},"text":"\\\\u00e9"}'
    """
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, default=_plain, separators=(",", ":"))
        text.encode()  # refuses lone surrogates
        if not _has_marker(text):
            if text.isascii():
                return text
            return json.dumps(record, allow_nan=False, default=_plain, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError):
        text = ""  # the careful way says what json cannot
    return json.dumps(_careful(record, ()), allow_nan=False, separators=(",", ":"))


def decode(line: str | bytes) -> Any:
    """What ``encode`` wrote. Raises ValueError when the line is not JSON.

    >>> decode('{"reward":{"$float":"inf"}}')
    {'reward': inf}
    """
    text = line.decode() if isinstance(line, bytes) else line
    hook = _restore if _has_marker(text) else None
    try:
        return json.loads(text, object_hook=hook)
    except RecursionError:
        return _in_fresh_thread(text, hook)


def _has_marker(text: str) -> bool:
    return '"$' in text and _MARKER.search(text) is not None


def _in_fresh_thread(text: str, hook: Any) -> Any:
    """Read with an empty call stack: the caller's was nearly full."""
    answers: list[Any] = []

    def read() -> None:
        try:
            answers.append(json.loads(text, object_hook=hook))
        except RecursionError as error:
            answers.append(ValueError(f"JSON nested too deeply: {error}"))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    if isinstance(answers[0], ValueError):
        raise answers[0]
    return answers[0]


def _plain(value: Any) -> Any:
    """A JSON value for an object that json does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if type(value).__module__ in ("numpy", "torch") and hasattr(value, "tolist"):
        return value.tolist()
    return repr(value)


def _careful(value: Any, above: tuple[int, ...]) -> Any:
    """``value`` in the forms of the module's docstring; ``above`` are the ids of the containers around."""
    if value is None or isinstance(value, (str, int, float)):
        return _scalar(value)
    if not isinstance(value, (dict, list, tuple)):
        return _careful(_plain(value), above)
    if id(value) in above:
        return "<circular>"
    if len(above) >= _DEEPEST:
        return {"$deep": _flatten(value)}
    inside = (*above, id(value))
    if not isinstance(value, dict):
        return [_careful(item, inside) for item in value]
    pairs = [[_key(key), _careful(item, inside)] for key, item in value.items()]
    if any(not isinstance(key, str) or key in MARKERS for key, _ in pairs):
        return {"$object": pairs}
    return {key: item for key, item in pairs}


def _key(key: Any) -> Any:
    return _scalar(key) if isinstance(key, str) else str(key)


def _scalar(value: str | int | float | None) -> Any:
    if isinstance(value, str) and _SURROGATE_PAIR.search(value):
        cuts = [match.end() for match in _SURROGATE_PAIR.finditer(value)]
        return {"$text": [value[a:b] for a, b in zip([0, *cuts], [*cuts, len(value)], strict=True)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(float(value))}
    if isinstance(value, int) and abs(value) >= _LARGEST:
        return {"$int": hex(value)}
    return value


def _flatten(value: Any) -> list[list[Any]]:
    """Nodes of a tree, parents first: [index of the parent, key in it, scalar or ["{}"] or ["[]"]]."""
    nodes: list[list[Any]] = []
    waiting: list[tuple[int, Any, Any, tuple[int, ...]]] = [(-1, None, value, ())]
    while waiting:
        parent, key, item, above = waiting.pop()
        if item is not None and not isinstance(item, (dict, list, tuple, str, int, float)):
            item = _plain(item)
        if not isinstance(item, (dict, list, tuple)):
            nodes.append([parent, key, _scalar(item)])
            continue
        if id(item) in above:
            nodes.append([parent, key, "<circular>"])
            continue
        index, path = len(nodes), (*above[-_DEEPEST:], id(item))
        inside: list[tuple[Any, Any]]
        if isinstance(item, dict):
            nodes.append([parent, key, ["{}"]])
            inside = [(_key(k), v) for k, v in item.items()]
        else:
            nodes.append([parent, key, ["[]"]])
            inside = [(None, v) for v in item]
        waiting += [(index, k, v, path) for k, v in reversed(inside)]
    return nodes


def _unflatten(nodes: list[list[Any]]) -> Any:
    values: list[Any] = []
    for parent, key, item in nodes:
        value = ({} if item[0] == "{}" else []) if isinstance(item, list) else item
        values.append(value)
        if parent >= 0:
            container = values[parent]
            if isinstance(container, dict):
                container[key] = value
            else:
                container.append(value)
    return values[0]


def _restore(found: dict[str, Any]) -> Any:
    if len(found) != 1:
        return found
    ((marker, value),) = found.items()
    if marker == "$float":
        return float(value)
    if marker == "$int":
        return int(value, 16)
    if marker == "$text":
        return "".join(value)
    if marker == "$object":
        return {key: item for key, item in value}
    return _unflatten(value) if marker == "$deep" else found
