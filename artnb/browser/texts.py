"""Which tokenizer tells what token ids say? The model's, else the run's own if it is on this machine."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

from artnb.browser.plain import mapping
from artnb.bundled import BUNDLED, cache_root
from artnb.errors import MissingDependency, require


class TokenTexts:
    """A tokenizer, looked for once and only when it is asked for. Nothing is downloaded."""

    def __init__(self, run: Any, model: Any) -> None:
        self._run, self._model = run, model
        self._lock = threading.Lock()
        self._found: tuple[Any, str] | None = None

    @property
    def is_likely(self) -> bool:
        """False where there is surely no tokenizer."""
        if self._model is not None:
            return True
        return self._run is not None if self._found is None else self._found[0] is not None

    def tokenizer(self) -> tuple[Any, str]:
        """The tokenizer, or None and why there is none."""
        if self._model is not None:
            return self._model.tokenizer, ""
        with self._lock:
            if self._found is None:
                self._found = _recorded(self._run)
            return self._found


def _recorded(run: Any) -> tuple[Any, str]:
    if run is None:
        return None, "no tokenizer is at hand: pass model= to see texts of tokens"
    try:
        identity = mapping(run.description().get("identity"))
    except (OSError, ValueError) as error:
        return None, f"run.json cannot be read: {error}"
    base = identity.get("base_model")
    if not isinstance(base, str) or not base:
        return None, "the run does not say which model it was made with: pass model="
    try:
        tokenizer = _load(base)
    except MissingDependency as error:
        return None, str(error)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        return None, f"the tokenizer of {base} is not on this machine ({reason}): pass model="
    if identity.get("tokenizer") not in (None, digest(tokenizer)):
        return None, f"the tokenizer of {base} on this machine is not the one of the run: pass model="
    return tokenizer, ""


def _load(base: str) -> Any:
    transformers = require("transformers", extra="cpu", why="to show texts of tokens")
    folder = Path(base)
    if base == BUNDLED:
        converted = sorted(cache_root().glob(f"{BUNDLED}-*"))
        folder = converted[-1] if converted else folder
    where = str(folder) if folder.is_dir() else base
    return transformers.AutoTokenizer.from_pretrained(where, local_files_only=True)


def digest(tokenizer: Any) -> str:
    """What a run records of its tokenizer (``LocalBackend.describe``)."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    template = tokenizer.chat_template or ""
    return hashlib.sha256(repr((vocabulary, template)).encode()).hexdigest()[:16]
