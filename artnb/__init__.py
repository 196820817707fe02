"""Train a language-model agent by reinforcement learning inside one notebook.

``gather`` rollouts, reward them, ``train_step``: each is one cell, on a ``Model`` in this kernel.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from artnb.config import LoraConfig, SamplingConfig, TrainConfig
from artnb.doctor import doctor
from artnb.environments import Environment, available_environments, load_environment
from artnb.errors import (
    ArtnbError,
    CheckpointError,
    ConfigurationError,
    Interrupted,
    MissingDependency,
    NonFiniteLogits,
    NothingToTrain,
    OutOfMemory,
    PromptTooLong,
    PublicationError,
    RequestError,
    RunInUse,
    RunMismatch,
    StalePolicy,
    Stopped,
    TooManyFailures,
)
from artnb.evaluate import Evaluation, compare, evaluate, evaluate_baseline
from artnb.gather import gather
from artnb.parameters import parameters
from artnb.plan import plan
from artnb.report import report
from artnb.rewards import Reward
from artnb.schedule import schedule
from artnb.session import last
from artnb.store import Run
from artnb.types import (
    Failure,
    Groups,
    History,
    Scenario,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from artnb.ui import RewardTable

if TYPE_CHECKING:
    from artnb.backends.fake import FakeBackend
    from artnb.dashboard import Dashboard
    from artnb.distill import distill_step
    from artnb.model import Model, run
    from artnb.sft import sft_step
    from artnb.train import StepResult, train_step

__version__ = "0.1.0"

__all__ = [
    "ArtnbError",
    "CheckpointError",
    "ConfigurationError",
    "Dashboard",
    "Environment",
    "Evaluation",
    "Failure",
    "FakeBackend",
    "Groups",
    "History",
    "Interrupted",
    "LoraConfig",
    "MissingDependency",
    "Model",
    "NonFiniteLogits",
    "NothingToTrain",
    "OutOfMemory",
    "PromptTooLong",
    "PublicationError",
    "RequestError",
    "Reward",
    "RewardTable",
    "Run",
    "RunInUse",
    "RunMismatch",
    "SamplingConfig",
    "Scenario",
    "StalePolicy",
    "StepResult",
    "Stopped",
    "TooManyFailures",
    "TrainConfig",
    "Trajectory",
    "TrajectoryGroup",
    "Turn",
    "available_environments",
    "compare",
    "distill_step",
    "doctor",
    "evaluate",
    "evaluate_baseline",
    "gather",
    "last",
    "load_environment",
    "parameters",
    "plan",
    "report",
    "run",
    "schedule",
    "sft_step",
    "train_step",
]

# These pull in numpy or openai, so they are imported when first used.
_LATER = {
    "Dashboard": "artnb.dashboard",
    "FakeBackend": "artnb.backends.fake",
    "Model": "artnb.model",
    "StepResult": "artnb.train",
    "distill_step": "artnb.distill",
    "run": "artnb.model",
    "sft_step": "artnb.sft",
    "train_step": "artnb.train",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'artnb' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
