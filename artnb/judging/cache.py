"""Has this question been answered before? Valid answers by the hash of all that decides them, on disk.

``judge_cache/ab/abcdef....json`` in the run folder: the answer as it came, and what it took. Files are
written beside and renamed, so that several kernels may share a folder; any of them may be deleted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from artnb.judging.referee import Reply
from artnb.store.codec import decode, encode
from artnb.store.journal import write_atomically


class Cache:
    """Answers under ``folder``; with None nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @staticmethod
    def key(body: Mapping[str, Any], identity: Mapping[str, Any], sample: int) -> str:
        """Hash of the request, of whom it goes to, and of which sample of several it is."""
        text = json.dumps([body, identity, sample], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def get(self, key: str) -> Reply | None:
        """The answer kept under this key; a file that cannot be read counts as none."""
        if self.folder is None:
            return None
        try:
            record = decode(self._path(key).read_bytes())
            return Reply(**record["reply"])
        except (OSError, ValueError, TypeError, KeyError):  # none, torn, or another version's
            return None

    def put(self, key: str, reply: Reply) -> None:
        """Keep an answer that was found valid."""
        if self.folder is None:
            return
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, encode({"reply": dataclasses.asdict(reply)}) + "\n")

    def _path(self, key: str) -> Path:
        assert self.folder is not None, "only a cache with a folder has files"
        return self.folder / key[:2] / f"{key}.json"
