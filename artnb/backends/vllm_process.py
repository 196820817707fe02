"""What does vLLM do to the whole process, and what of it is undone?"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from artnb.errors import ConfigurationError

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process
    "VLLM_NO_USAGE_STATS": "1",  # and nothing about it leaves
    "VLLM_LOGGING_LEVEL": "ERROR",
}

alone = threading.RLock()
"""Held while an engine works: vLLM keeps the forward pass that is under way in a variable of a module,
so that two engines, each on a thread of its own, take turns."""
_engines: weakref.WeakSet[Any] = weakref.WeakSet()


def opened(llm: Any) -> None:
    """Remember an engine of vLLM's until ``shut_down``."""
    _engines.add(llm)


def shut_down(llm: Any) -> None:
    """End an engine of vLLM's.

    vLLM then takes down the process groups, which all engines of a process share: the last one does.
    """
    module: Any = sys.modules["vllm.v1.engine.core"]
    take_down = module.cleanup_dist_env_and_memory
    with quiet(), alone:
        _engines.discard(llm)
        if _engines:
            module.cleanup_dist_env_and_memory = lambda: None
        try:
            llm.engine_core.shutdown()
        finally:
            module.cleanup_dist_env_and_memory = take_down


def set_environment() -> None:
    """Variables that vLLM reads when it is imported or made, set where absent."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise ConfigurationError("vLLM must run in this process: unset VLLM_ENABLE_V1_MULTIPROCESSING")


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Make a vLLM engine without a trace elsewhere: it would seed every random generator, take
    ``torch.set_num_threads`` away, put ``[rank0]`` before the lines of every traceback, and listen on
    more than the loopback interface."""
    import numpy

    set_num_threads, drawn = torch.set_num_threads, (random.getstate(), numpy.random.get_state())
    hook = sys.excepthook
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface is None and sys.platform.startswith("linux"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with torch.random.fork_rng():
        try:
            yield
        finally:
            torch.set_num_threads, sys.excepthook = set_num_threads, hook
            random.setstate(drawn[0])
            numpy.random.set_state(drawn[1])
            if interface is None:
                os.environ.pop("GLOO_SOCKET_IFNAME", None)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Import vLLM, or make an engine, without its advice to its own developers."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide vLLM's warnings about what is meant to be, such as layers that keep their weights."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(max(level, logging.ERROR))
    try:
        yield
    finally:
        logger.setLevel(level)
