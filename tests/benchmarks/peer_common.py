"""What do the scripts share that run a stack by itself? A watch on memory, and where a gradient is put."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class PeakMemory:
    """Most memory while it watches, above what there was at its start.

    size: what is watched, the resident bytes if nothing is said. seconds: between two looks.
    """

    def __init__(self, size: Callable[[], int] | None = None, seconds: float = 0.02) -> None:
        self._size, self._seconds, self._peak = size or _resident, seconds, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        self._base = self._size()  # with the thread that watches, and its stack

    def _watch(self) -> None:
        while not self._ended.wait(self._seconds):
            self._peak = max(self._peak, self._size())

    def stop(self) -> int:
        self._ended.set()
        self._thread.join()
        return max(self._peak, self._base) - self._base


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def write_gradient(path: str, gradients: Mapping[str, Any]) -> None:
    """Gradients by the name of their factor, ``model.layers.0.mlp.up_proj.lora_A.weight``, in float32."""
    from safetensors.torch import save_file

    save_file({name: gradient.detach().float().contiguous() for name, gradient in gradients.items()}, path)
