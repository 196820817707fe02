"""How does a model load without what helps nobody? Progress widgets, which come empty out of a saved
notebook, and remarks of packages about kernels that were built for other machines."""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Hide the bars of weights being read and converted; downloads from a hub keep theirs."""
    import_tqdm()
    from huggingface_hub import utils as hub
    from transformers.utils import logging as bars

    gguf: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    was_on, hub_was_off, bar = (
        bars.is_progress_bar_enabled(),
        hub.are_progress_bars_disabled(),
        getattr(gguf, "tqdm", None),
    )
    bars.disable_progress_bar()  # the hub's as well
    if not hub_was_off:
        hub.enable_progress_bars()
    gguf.tqdm = lambda items, *_, **__: items  # it asks tqdm.auto, past that switch
    try:
        yield
    finally:
        gguf.tqdm = bar
        if was_on:
            bars.enable_progress_bar()
        if hub_was_off:
            hub.disable_progress_bars()


_REMARKS = ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops")
"""Loggers of packages that peft and Unsloth import."""


@contextlib.contextmanager
def without_remarks() -> Iterator[None]:
    """Import peft or Unsloth: of what these import in turn, only errors are heard."""

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    for name in _REMARKS:  # a filter, because Unsloth sets levels anew
        logging.getLogger(name).addFilter(is_error)
    try:
        yield
    finally:
        for name in _REMARKS:
            logging.getLogger(name).removeFilter(is_error)


def import_tqdm() -> None:
    """Import what transformers imports anyway, without its advice to install widgets."""
    with warnings.catch_warnings(), contextlib.suppress(ModuleNotFoundError):  # then so is transformers
        warnings.filterwarnings("ignore", message="IProgress not found")
        importlib.import_module("tqdm.auto")
