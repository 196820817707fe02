"""Train a language-model agent by reinforcement learning inside one notebook.

``gather`` rollouts, reward them, ``train_step``: each is one cell, on a ``Model`` in this kernel.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from artnb import criteria, scenarios
from artnb.ask import ask
from artnb.benchmark import Benchmark, benchmark
from artnb.clean import clean_notebook
from artnb.config import LoraConfig, SamplingConfig, TrainConfig
from artnb.dialogue import Dialogue, rollout_of
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
    RunFailed,
    RunInUse,
    RunMismatch,
    StalePolicy,
    Stopped,
    ToolServerError,
    TooManyFailures,
)
from artnb.evaluate import Evaluation, compare, evaluate, evaluate_baseline, policy_of
from artnb.gather import gather
from artnb.judge import judge
from artnb.judge_report import JudgeReport, judge_report
from artnb.parameters import parameters
from artnb.places import run_root
from artnb.plan import plan
from artnb.prompted import prompted
from artnb.report import report
from artnb.rewards import Reward
from artnb.rubric import Rubric
from artnb.schedule import schedule
from artnb.session import last
from artnb.store import Run
from artnb.sweep import sweep
from artnb.types import (
    Failure,
    Groups,
    History,
    Scenario,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from artnb.ui import Progress, RewardTable
from artnb.ui.html import esc

if TYPE_CHECKING:
    from artnb.backends.fake import FakeBackend
    from artnb.browser import browse
    from artnb.dashboard import Dashboard
    from artnb.distill import distill_step
    from artnb.guard import Guard
    from artnb.mcp import ToolServer
    from artnb.model import Model, run
    from artnb.sft import sft_step
    from artnb.talk import chat
    from artnb.trackers import Tracker, WeaveTracker, upload
    from artnb.train import StepResult, train_step

__version__ = "0.1.0"

__all__ = [
    "ArtnbError",
    "Benchmark",
    "CheckpointError",
    "ConfigurationError",
    "Dashboard",
    "Dialogue",
    "Environment",
    "Evaluation",
    "Failure",
    "FakeBackend",
    "Groups",
    "Guard",
    "History",
    "Interrupted",
    "JudgeReport",
    "LoraConfig",
    "MissingDependency",
    "Model",
    "NonFiniteLogits",
    "NothingToTrain",
    "OutOfMemory",
    "Progress",
    "PromptTooLong",
    "PublicationError",
    "RequestError",
    "Reward",
    "RewardTable",
    "Rubric",
    "Run",
    "RunFailed",
    "RunInUse",
    "RunMismatch",
    "SamplingConfig",
    "Scenario",
    "StalePolicy",
    "StepResult",
    "Stopped",
    "TooManyFailures",
    "ToolServer",
    "ToolServerError",
    "Tracker",
    "TrainConfig",
    "Trajectory",
    "TrajectoryGroup",
    "Turn",
    "WeaveTracker",
    "ask",
    "available_environments",
    "benchmark",
    "browse",
    "chat",
    "clean_notebook",
    "compare",
    "criteria",
    "distill_step",
    "doctor",
    "esc",
    "evaluate",
    "evaluate_baseline",
    "gather",
    "judge",
    "judge_report",
    "last",
    "load_environment",
    "parameters",
    "plan",
    "policy_of",
    "prompted",
    "report",
    "rollout_of",
    "run",
    "run_root",
    "scenarios",
    "schedule",
    "sft_step",
    "sweep",
    "train_step",
    "upload",
]

# These pull in numpy or openai, so they are imported when first used.
_LATER = {
    "Dashboard": "artnb.dashboard",
    "FakeBackend": "artnb.backends.fake",
    "Guard": "artnb.guard",
    "Model": "artnb.model",
    "StepResult": "artnb.train",
    "ToolServer": "artnb.mcp",
    "Tracker": "artnb.trackers",
    "WeaveTracker": "artnb.trackers",
    "browse": "artnb.browser",
    "chat": "artnb.talk",
    "distill_step": "artnb.distill",
    "run": "artnb.model",
    "sft_step": "artnb.sft",
    "train_step": "artnb.train",
    "upload": "artnb.trackers",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'artnb' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
