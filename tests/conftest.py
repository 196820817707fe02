"""Fixtures that several rooms share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tiny import make_tiny_tokenizer, write_tiny_model

# A shell that starts this in the background has it ignore ctrl-c, and so would every process under test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Run by tests in processes of their own: importing them here would let Unsloth patch this process.
collect_ignore = [
    "unsloth_cases.py",
    "unsloth_gpu_attention.py",
    "plan_process.py",
    "stack_loop.py",
    "memory_limit_process.py",
]

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("artnb", deadline=None)
settings.load_profile("artnb")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout that these tests belong to."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """See tiny.make_tiny_tokenizer."""
    return make_tiny_tokenizer()


@pytest.fixture(scope="session")
def tiny_model(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of tiny.write_tiny_model's."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-llama"), tiny_tokenizer)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and threads that wait for each other slow the machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def bundled() -> Path:
    """Folder of the bundled model, converted on this machine's first use."""
    from artnb.bundled import bundled_model

    return bundled_model()
