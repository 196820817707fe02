"""The walls: what `import artnb` may load, what it offers, and which way imports point."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "artnb"
ENVIRONMENTS = ROOT / "environments" / "artnb_environments"

PUBLIC = {
    # nouns
    *("Scenario", "Turn", "Trajectory", "TrajectoryGroup", "Groups", "History", "Failure"),
    *(
        "Model",
        "FakeBackend",
        "Run",
        "Environment",
        "Evaluation",
        "Reward",
        "RewardTable",
        "Rubric",
        "JudgeReport",
        "StepResult",
        "ToolServer",
    ),
    *("Dashboard", "Dialogue", "Guard", "Progress"),
    *("SamplingConfig", "LoraConfig", "TrainConfig"),
    *("Tracker", "WeaveTracker", "upload"),
    # verbs
    *(
        "gather",
        "judge",
        "judge_report",
        "criteria",
        "scenarios",
        "browse",
        "chat",
        "train_step",
        "sft_step",
        "distill_step",
        "evaluate",
        "evaluate_baseline",
        "policy_of",
        "compare",
        "last",
        "run",
        "report",
    ),
    *("ask", "benchmark", "Benchmark"),
    *("parameters", "schedule", "plan", "doctor", "run_root", "esc", "clean_notebook", "sweep"),
    *("load_environment", "available_environments", "rollout_of", "prompted"),
    # errors
    *("ArtnbError", "MissingDependency", "ConfigurationError", "RequestError", "PromptTooLong"),
    *("NonFiniteLogits", "RunFailed", "RunInUse", "RunMismatch", "CheckpointError", "StalePolicy"),
    "NothingToTrain",
    *("PublicationError", "ToolServerError", "OutOfMemory", "Stopped", "TooManyFailures", "Interrupted"),
}

HEAVY = (
    *("torch", "transformers", "peft", "vllm", "unsloth", "ray"),
    *("pandas", "matplotlib", "openai", "IPython", "anywidget", "ipywidgets"),
)

# A module may import those of its own layer and of the layers before it.
LAYERS = (
    ("types", "errors", "config", "sizes", "places", "secrets"),
    ("ui", "prompt_memory", "recording"),
    ("store", "report", "parameters", "dialogue", "environments", "clean"),
    ("schedule", "draw", "advantage", "batch", "packing"),
    ("logprobs", "loss"),
    ("architecture", "memory"),
    ("backends", "bundled", "tool_calls", "chat_template", "rendering"),
    ("plan", "measure"),
    ("devices", "compatibility", "servers", "doctor", "install"),
    ("turnstile", "streaming", "chat_request", "completions", "client", "serve"),
    ("interrupts", "comm_pump", "session", "undo"),
    (
        "attempts",
        "gather_log",
        "rewards",
        "gather",
        "evaluate",
        "judging",
        "criteria",
        "rubric",
        "judge",
        "judge_report",
        "ask",
        "prompted",
        "benchmark",
        "scenarios",
        "mcp_result",
        "mcp_connection",
        "mcp",
    ),
    ("dashboard", "browser"),
    ("outcome", "report_view", "report_html", "guard"),
    ("trackers",),
    ("model",),
    ("step_metrics", "step_tokens"),
    ("train",),
    ("sft", "distill"),
    ("talk",),
    ("new_env", "demo", "sweep", "cli"),
)

DRAWN_LATER = {
    ("artnb.types", "ui"),
    ("artnb.store.folder", "report_html"),
    ("artnb.store.folder", "outcome"),
    ("artnb.store.folder", "dashboard"),
}
"""A repr imports its drawing when somebody looks, a run its report, verdict and figures when asked."""

PROBE = """
import json, os, sys, warnings, logging
before = dict(os.environ), warnings.filters[:], logging.getLogger().handlers[:]
import artnb
after = dict(os.environ), warnings.filters[:], logging.getLogger().handlers[:]
print(json.dumps({
    "modules": sorted({name.split(".")[0] for name in sys.modules}),
    "same": before == after,
    "all": sorted(artnb.__all__),
    "bound": sorted(name for name in artnb.__all__ if hasattr(artnb, name)),
}))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, object]:
    """What a fresh process looks like after `import artnb`."""
    answer = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    return json.loads(answer.stdout)


def test_it_imports_nothing_heavy(imported):
    assert not set(HEAVY) & set(imported["modules"])


def test_it_changes_nothing(imported):
    assert imported["same"] is True


def test_it_offers_exactly_the_public_names(imported):
    assert set(imported["all"]) == PUBLIC
    assert imported["bound"] == imported["all"]


def modules(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        yield name.removesuffix(".__init__"), ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports in full"
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names)


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def layer_of(name: str) -> int:
    found = [index for index, layer in enumerate(LAYERS) if room(name) in layer]
    assert found, f"{name} has no layer: put it into LAYERS"
    return found[0]


def importable(target: str) -> bool:
    return target.startswith("artnb.") and room(target) in {r for layer in LAYERS for r in layer}


def test_it_imports_one_way():
    wrong = []
    for name, tree in modules(PACKAGE):
        if name == "artnb":
            continue
        for target in imports(tree):
            is_repr = (name, room(target)) in DRAWN_LATER
            if importable(target) and layer_of(target) > layer_of(name) and not is_repr:
                wrong.append(f"{name} imports {target}")
    assert not wrong


def test_it_keeps_torch_and_backends_out_of_screens_and_files():
    for name, tree in modules(PACKAGE):
        if room(name) in ("ui", "store", "trackers", "types", "errors", "config", "advantage", "gather"):
            for target in imports(tree):
                assert target.split(".")[0] not in ("torch", "transformers", "peft"), f"{name}: {target}"
                assert not target.startswith("artnb.backends"), f"{name}: {target}"


def files_that_import(package: str) -> list[str]:
    return [name for name, tree in modules(PACKAGE) if package in {t.split(".")[0] for t in imports(tree)}]


@pytest.mark.parametrize("package", ["vllm", "unsloth"])
def test_it_imports_this_package_in_one_file_only(package):
    files = [
        name for name, tree in modules(PACKAGE) if any(t.split(".")[0] == package for t in imports(tree))
    ]
    assert len(files) <= 1, files


def test_it_asks_in_one_file_only_whether_this_is_a_notebook():
    assert files_that_import("IPython") == ["artnb.ui.display"]


def test_environments_import_only_the_package_root():
    import artnb

    allowed = {"artnb"} | {f"artnb.{name}" for name in artnb.__all__}
    for name, tree in modules(ENVIRONMENTS):
        ours = {target for target in imports(tree) if target.split(".")[0] == "artnb"}
        assert not ours - allowed, name
