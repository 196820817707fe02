"""What does an agent read of an MCP tool's result? Its text, page by page, and its images."""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any

from artnb.types import Message

READ_MORE = "read_more"
_LONGEST_KEPT = 2_000_000
"""Characters of a result that can be paged through; what is beyond is said to be left out."""
_MOST_KEPT = 20_000_000
"""Characters of all results that are kept for further pages; the oldest go first."""
_LARGEST_IMAGE, _MOST_IMAGES = 4_000_000, 8
"""Base64 characters of an image, and images of a result, that are kept."""
_IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_NAME = re.compile(r"[^a-zA-Z0-9_-]")
_LONGEST_NAME = 64
_SCHEMAS = ("properties", "$defs", "definitions", "patternProperties")
"""Keywords of JSON Schema whose values are schemas by name."""


@dataclass(frozen=True)
class ToolResult:
    """What a call gave: ``content`` goes into a message of role ``tool``."""

    text: str
    images: tuple[dict[str, Any], ...] = ()
    """OpenAI parts: ``{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}``."""
    is_error: bool = False
    """The tool said that it failed; why stands in ``text``."""

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """The text, or a list of parts when there are images."""
        return [{"type": "text", "text": self.text}, *self.images] if self.images else self.text


def result_of(answer: Any) -> ToolResult:
    """Read the SDK's ``CallToolResult``: texts in order, and a note in the place of each image."""
    texts, images = list[str](), list[dict[str, Any]]()
    for block in answer.content:
        kind, text = getattr(block, "type", "content"), getattr(block, "text", None)
        resource = getattr(block, "resource", None)
        if isinstance(text, str):
            texts.append(text)
        elif kind == "image":
            texts.append(_take_image(block, images))
        elif isinstance(said := getattr(resource, "text", None), str):
            texts.append(said)
        else:
            uri = getattr(block, "uri", None) or getattr(resource, "uri", None)
            texts.append(f"[{kind}: {uri}]" if uri else f"[{kind}]")
    if not texts and answer.structured_content is not None:
        texts.append(json.dumps(answer.structured_content, ensure_ascii=False))
    text = "\n".join(texts)
    if len(text) > _LONGEST_KEPT:
        text = f"{text[:_LONGEST_KEPT]} […{len(text) - _LONGEST_KEPT:,} characters left out]"
    is_error = bool(answer.is_error)
    is_said = not is_error or text.startswith("Error")
    return ToolResult(text if is_said else f"Error: {text}", tuple(images), is_error)


def _take_image(block: Any, images: list[dict[str, Any]]) -> str:
    """Add an image to the others, and the note that stands for it in the text."""
    kind, size = str(block.mime_type).lower(), len(block.data)
    if kind not in _IMAGE_TYPES:
        return f"[image of type {kind[:50]}: left out]"
    if size > _LARGEST_IMAGE or len(images) == _MOST_IMAGES:
        return f"[{kind}, {size * 3 // 4:,} bytes: left out, too large or too many]"
    images.append({"type": "image_url", "image_url": {"url": f"data:{kind};base64,{block.data}"}})
    return f"[{kind}, {size * 3 // 4:,} bytes]"


def as_text(messages: Sequence[Message]) -> list[Message]:
    """The messages for a model that reads text only: without images, whose notes stay."""
    return [
        {**message, "content": "\n".join(part["text"] for part in content if part.get("type") == "text")}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


class Pages:
    """Results longer than a page of so many characters, kept so that an agent can ask for the next one."""

    definition: Mapping[str, Any] = {
        "type": "function",
        "function": {
            "name": READ_MORE,
            "description": "The next page of a result that was cut; of use only where a result says so.",
            "parameters": {
                "type": "object",
                "properties": {
                    "result_id": {"type": "string", "description": "as the cut result names it"},
                    "page": {"type": "integer", "minimum": 1, "default": 2},
                },
                "required": ["result_id"],
            },
        },
    }

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._kept: OrderedDict[str, list[str]] = OrderedDict()
        self._size = 0

    def first(self, result: ToolResult) -> ToolResult:
        """The result, or its first page and how to get the next; the same text has always the same id."""
        if len(result.text) <= self._longest:
            return result
        name = hashlib.sha256(result.text.encode("utf-8", "replace")).hexdigest()[:8]
        if name not in self._kept:
            self._kept[name] = _split(result.text, self._longest)
            self._size += len(result.text)
            while self._size > _MOST_KEPT:
                _, oldest = self._kept.popitem(last=False)
                self._size -= sum(map(len, oldest))
        self._kept.move_to_end(name)
        return ToolResult(self._page(name, 1), result.images, result.is_error)

    def read(self, arguments: Mapping[str, Any]) -> ToolResult:
        """What ``read_more`` answers."""
        name, page = arguments.get("result_id"), arguments.get("page", 2)
        if not isinstance(name, str) or name not in self._kept:
            return ToolResult("Error: no such result is kept; call its tool again", is_error=True)
        if isinstance(page, bool) or not isinstance(page, int) or not 1 <= page <= len(self._kept[name]):
            return ToolResult(f"Error: page must be 1 to {len(self._kept[name])}", is_error=True)
        return ToolResult(self._page(name, page))

    def _page(self, name: str, page: int) -> str:
        pages = self._kept[name]
        note = f"[page {page} of {len(pages)}"
        if page < len(pages):
            note += f'; for the next call {READ_MORE} with {{"result_id": "{name}", "page": {page + 1}}}'
        return f"{pages[page - 1]}\n{note}]"


def _split(text: str, longest: int) -> list[str]:
    """Pages that end at the end of a line, where one ends in their last fifth; together they are the text."""
    pages, start = [], 0
    while start < len(text):
        end = min(start + longest, len(text))
        if end < len(text):
            line_end = text.rfind("\n", end - longest // 5, end)
            end = end if line_end < 0 else line_end + 1
        pages.append(text[start:end])
        start = end
    return pages


def definitions_of(tools: Sequence[Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """OpenAI name -> (the server's name, OpenAI definition) of each of the SDK's tools.

    Signs that OpenAI allows in no name become ``_``; of two tools with one name the second gets a number.
    """
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for tool in tools:
        plain = name = _NAME.sub("_", tool.name)[:_LONGEST_NAME] or "tool"
        number = 2
        while name in found:
            name, number = f"{plain[: _LONGEST_NAME - 3]}_{number}", number + 1
        parameters = {"type": "object", "properties": {}} | _without_titles(tool.input_schema)
        function = {"name": name, "description": cleandoc(tool.description or ""), "parameters": parameters}
        found[name] = (tool.name, {"type": "function", "function": function})
    return found


def _without_titles(schema: Any) -> Any:
    """A JSON schema without the titles that generators repeat every name in: a prompt pays for each."""
    if isinstance(schema, list):
        return [_without_titles(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(one) for name, one in value.items()}
        if key in _SCHEMAS and isinstance(value, dict)
        else value
        if key in ("default", "const", "enum", "examples")
        else _without_titles(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }
