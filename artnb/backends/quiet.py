"""How does transformers load without progress widgets? Those come empty out of a saved notebook."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Hide the bars of weights being read and converted; downloads from a hub keep theirs."""
    import_tqdm()
    from huggingface_hub import utils as hub
    from transformers.utils import logging

    gguf: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    was_on, hub_was_off, bar = (
        logging.is_progress_bar_enabled(),
        hub.are_progress_bars_disabled(),
        getattr(gguf, "tqdm", None),
    )
    logging.disable_progress_bar()  # the hub's as well
    if not hub_was_off:
        hub.enable_progress_bars()
    gguf.tqdm = lambda items, *_, **__: items  # it asks tqdm.auto, past that switch
    try:
        yield
    finally:
        gguf.tqdm = bar
        if was_on:
            logging.enable_progress_bar()
        if hub_was_off:
            hub.disable_progress_bars()


def import_tqdm() -> None:
    """Import what transformers imports anyway, without its advice to install widgets."""
    with warnings.catch_warnings(), contextlib.suppress(ModuleNotFoundError):  # then so is transformers
        warnings.filterwarnings("ignore", message="IProgress not found")
        importlib.import_module("tqdm.auto")
