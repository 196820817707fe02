"""What can go wrong, as one tree of exceptions.

ArtnbError
├── MissingDependency      a package is not installed; the message names the extra
├── ConfigurationError     a parameter cannot work; raised before anything slow starts
├── RequestError           a sampling request the engine refuses
│   ├── PromptTooLong      more tokens than the engine's context holds
│   └── NonFiniteLogits    the model produced NaN or infinity for this request
├── RunInUse               another live process writes this run
├── RunMismatch            the run on disk belongs to another model, tokenizer or adapter
├── CheckpointError        a checkpoint is missing, incomplete or does not fit
├── StalePolicy            trajectories sampled under another policy version
├── OutOfMemory            one trajectory alone does not fit into memory
├── NothingToTrain         no group left to learn from (only with strict=True)
├── RunFailed              a run did not come out as run.assert_ok demands
├── ToolServerError        an MCP server did not start, has ended, or does not answer
├── PublicationError       engine and trainer disagree after publishing weights
└── Stopped                a primitive ended early; finished work is on .partial
    ├── TooManyFailures    more rollouts failed than max_failures allows
    └── Interrupted        the user pressed ■
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class ArtnbError(Exception):
    """Base of every error that artnb raises on purpose."""


class MissingDependency(ArtnbError, ImportError):
    """An optional package is needed here and is not installed."""


class ConfigurationError(ArtnbError, ValueError):
    """A parameter cannot work as given."""


class RequestError(ArtnbError):
    """The engine refuses or fails one sampling request; others go on."""


class PromptTooLong(RequestError, ValueError):
    """The prompt and the tokens asked for do not fit the engine's context."""


class NonFiniteLogits(RequestError):
    """The model produced NaN or infinite logits for a request."""


class RunInUse(ArtnbError):
    """Another live process is writing this run."""


class RunMismatch(ArtnbError):
    """The run on disk was made with another model, tokenizer or adapter shape."""


class CheckpointError(ArtnbError):
    """A checkpoint is missing, incomplete, or does not fit this model."""


class StalePolicy(ArtnbError):
    """Trajectories were sampled under a policy version that may not be trained on now."""


class NothingToTrain(ArtnbError):
    """Every group was dropped; the message lists the reasons and counts."""


class OutOfMemory(ArtnbError):
    """A training step does not fit into memory, in however small pieces; it was not taken."""


class RunFailed(ArtnbError):
    """A run did not come out as ``run.assert_ok`` demands; the message says in what."""


class PublicationError(ArtnbError):
    """The engine does not serve the weights that the trainer holds."""


class ToolServerError(ArtnbError):
    """An MCP server did not start, has ended, does not answer in time, or does not speak MCP."""


class Stopped(ArtnbError):
    """A primitive ended before its work was complete.

    partial: what was finished, of the type the primitive returns.
    """

    def __init__(self, message: str, partial: Any = None) -> None:
        super().__init__(message)
        self.partial = partial


class TooManyFailures(Stopped):
    """More rollouts failed than ``max_failures`` allows."""


class Interrupted(Stopped):
    """The user interrupted a primitive; model, run and kernel stay usable."""


def require(name: str, *, extra: str, why: str) -> ModuleType:
    """Import an optional package, or say which extra brings it.

    >>> require("json", extra="cpu", why="to read a file").__name__
    'json'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != name.split(".")[0]:
            raise  # the package is there; something that it needs is not
        raise MissingDependency(
            f'{name} is needed {why}. Install it with: pip install "artnb[{extra}]"'
        ) from error
