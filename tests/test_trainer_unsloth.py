"""With Unsloth the trainer gives the same results: ``unsloth_cases``, run in a process of its own.

ARTNB_UNSLOTH_PYTHON names the Python of an environment that has Unsloth, where this one does not.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from reference_models import load
from safetensors.torch import save_file
from test_trainer import OBJECTIVES, conversations, gradients, make_trainer, step

from artnb.backends.trainer_full import FullTrainer
from artnb.backends.trainer_unsloth import import_unsloth
from artnb.config import TrainConfig
from artnb.errors import ConfigurationError

CASES = Path(__file__).with_name("unsloth_cases.py")
NAMES = [
    node.name
    for node in ast.parse(CASES.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="module")
def reference(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gradients, losses and a checkpoint after three updates, computed here, without Unsloth."""
    assert "unsloth" not in sys.modules
    folder, losses = tmp_path_factory.mktemp("reference"), {}
    for name, config in OBJECTIVES.items():
        trainer = make_trainer(tiny_model)
        save_file(gradients(trainer, conversations(), config), folder / f"{name}.safetensors")
        trainer.optimizer.zero_grad()
        _, sizes = trainer.forward_backward(conversations(), config, denominator=7.0)
        losses[name] = sizes["loss"]
    full = FullTrainer(load(tiny_model, implementation="artnb"))
    save_file(gradients(full, conversations(), TrainConfig()), folder / "full.safetensors")
    trainer = make_trainer(tiny_model)
    for _ in range(3):
        step(trainer)
    trainer.save(folder)
    losses["next"] = [step(trainer), step(trainer)]
    (folder / "losses.json").write_text(json.dumps(losses))
    return folder


@pytest.fixture(scope="module")
def outcomes(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """For each case what went wrong, empty where nothing did."""
    report = tmp_path_factory.mktemp("unsloth") / "report.xml"
    python = os.environ.get("ARTNB_UNSLOTH_PYTHON", sys.executable)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(CASES)]
    environment = os.environ | {"REFERENCE": str(reference), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=CASES.parent.parent, env=environment, capture_output=True, text=True)
    assert run.returncode in (0, 1), (run.stdout + run.stderr)[-4000:]
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problems = found.setdefault(case.attrib["name"].partition("[")[0], [])
        problems.extend(f"{child.tag}: {child.text}" for child in case if child.tag != "system-out")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_in_a_process_with_unsloth(outcomes, name):
    assert outcomes[name] == [], "\n".join(outcomes[name])


def test_every_case_ran(outcomes):
    assert outcomes.keys() == set(NAMES)


def test_unsloth_after_the_packages_that_it_changes_is_refused():
    assert "transformers" in sys.modules and "unsloth" not in sys.modules
    with pytest.raises(ConfigurationError, match=r"before transformers.*Restart the kernel"):
        import_unsloth()
    assert "unsloth" not in sys.modules


def test_its_gpu_attention_hands_over_to_our_plan(tmp_path):
    """What can be proved of it without a GPU: everything between the decoder's keywords and the kernels."""
    python = os.environ.get("ARTNB_UNSLOTH_PYTHON", sys.executable)
    script = str(CASES.with_name("unsloth_gpu_attention.py"))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(CASES.parent.parent)}
    run = subprocess.run([python, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and "the plan was heard" in run.stdout, (run.stdout + run.stderr)[-4000:]
