"""How is a saved notebook repaired that GitHub calls invalid? Its widget state goes, its outputs stay.

Progress bars and other widgets leave ``metadata.widgets`` in a saved file. Colab saves it without the level
named ``state``, and GitHub and nbconvert then refuse the whole notebook: "the 'state' key is missing from
metadata.widgets". Widgets never come back without their kernel, so nothing readable is lost.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artnb.errors import ConfigurationError
from artnb.store.journal import write_atomically

_WIDGET_TYPES = (
    "application/vnd.jupyter.widget-view+json",
    "application/vnd.jupyter.widget-state+json",
)


@dataclass(frozen=True)
class CleanedNotebook:
    """What ``clean_notebook`` did to a file; empty ``changes`` mean that it was left untouched."""

    path: Path
    changes: tuple[str, ...]
    """In words, one for each kind of change."""
    bytes_before: int
    bytes_after: int

    def __repr__(self) -> str:
        if not self.changes:
            return f"{self.path}: nothing to repair"
        sizes = f"{self.bytes_before:,} bytes before, {self.bytes_after:,} after"
        return "\n".join([f"{self.path}: {sizes}", *(f"  {change}" for change in self.changes)])


def clean_notebook(path: str | Path) -> CleanedNotebook:
    """Take the widget state out of a saved notebook; its static outputs stay as they are.

    Mends "Invalid Notebook: the 'state' key is missing from metadata.widgets". An output that is nothing
    but a widget is taken out; one with text, HTML or an image beside it keeps those. The file is written
    as a whole or not at all, and not when there is nothing to repair. The repr of what is returned tells
    what changed. Raises ConfigurationError for a file that is no notebook, OSError for one that cannot be
    read or written.
    """
    path = Path(path).resolve()  # of a link, what it points to is replaced, not the link
    raw = path.read_bytes()
    notebook, text = _read(path, raw)
    counts = Counter(_repair(notebook))
    if not counts:
        return CleanedNotebook(path, (), len(raw), len(raw))
    written = _as_text(notebook, text)
    mode = path.stat().st_mode
    write_atomically(path, written)
    path.chmod(mode)
    changes = tuple(f"{count} × {change}" if count > 1 else change for change, count in counts.items())
    return CleanedNotebook(path, changes, len(raw), len(written.encode()))


def _read(path: Path, raw: bytes) -> tuple[dict[str, Any], str]:
    try:
        text = raw.decode("utf-8-sig")
        notebook = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not a notebook: it is not JSON ({error})") from error
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise ConfigurationError(
            f"{path} is not a notebook of format 4: it has no list of cells. An older notebook becomes one "
            "when Jupyter opens and saves it."
        )
    return notebook, text


def _repair(notebook: dict[str, Any]) -> Iterator[str]:
    """Change the notebook in place; yields a line for each change."""
    metadata = notebook.get("metadata")
    if isinstance(metadata, dict) and metadata.pop("widgets", None) is not None:
        yield "the state of widgets removed from the notebook's metadata"
    for cell in notebook["cells"]:
        about = cell.get("metadata")
        colab = about.get("colab") if isinstance(about, dict) else None
        if isinstance(colab, dict) and colab.pop("referenced_widgets", None) is not None:
            yield "a cell's list of widgets removed"
        if isinstance(cell.get("outputs"), list):
            yield from _repair_outputs(cell)


def _repair_outputs(cell: dict[str, Any]) -> Iterator[str]:
    kept = []
    for output in cell["outputs"]:
        shown = output.get("data") if isinstance(output, dict) else None
        widgets = [kind for kind in _WIDGET_TYPES if kind in shown] if isinstance(shown, dict) else []
        for kind in widgets:
            del output["data"][kind]
        if widgets and not output["data"]:
            yield "an output that was nothing but a widget removed"
            continue
        if widgets:
            yield "a widget taken out of an output whose other forms stay"
        kept.append(output)
    cell["outputs"] = kept


def _as_text(notebook: dict[str, Any], before: str) -> str:
    """The notebook as JSON, indented as the file was."""
    indented = re.match(r"\{\r?\n([ \t]*)", before)
    indent = indented[1] if indented else None
    separators = None if indented or ": " in before[:200] else (",", ":")
    text = json.dumps(notebook, indent=indent, ensure_ascii=False, separators=separators)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a character that a model cut in two
        text = json.dumps(notebook, indent=indent, separators=separators)
    return text + "\n" * before.endswith("\n")
