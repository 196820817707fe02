"""Which stack a machine gets, and the loop on the real Unsloth and vLLM: other packages, same results."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from artnb.backends.quiet import without_remarks
from artnb.backends.stack import Stack, choose, load_model
from artnb.config import LoraConfig
from artnb.errors import ConfigurationError


def test_a_cpu_gets_peft_and_our_engine_unless_others_are_named():
    assert choose() == Stack("peft", "torch", "cpu")
    assert choose(trainer="unsloth", engine="vllm") == Stack("unsloth", "vllm", "cpu")


@pytest.mark.parametrize("named", [{"trainer": "trl"}, {"engine": "sglang"}])
def test_an_unknown_name_is_refused_with_the_known_ones(named):
    with pytest.raises(ConfigurationError, match="must be one of"):
        choose(**named)


def test_an_option_of_unsloth_s_is_refused_by_peft_before_anything_is_loaded():
    import torch

    with pytest.raises(ConfigurationError, match="load_in_4bit"):
        load_model(choose(), "no such folder", torch.float32, LoraConfig(), {"load_in_4bit": True}, {})


def test_remarks_of_packages_that_are_imported_are_not_heard_but_errors_are(caplog):
    logger = logging.getLogger("torchao")
    with without_remarks():
        logger.warning("no kernels for this machine")
        logger.error("broken")
    logger.warning("later")
    assert caplog.messages == ["broken", "later"]


def run_loop(trainer: str, engine: str, folder: Path) -> dict:
    """In a process of its own: Unsloth changes transformers for the whole process."""
    script = Path(__file__).with_name("stack_loop.py")
    command = [sys.executable, str(script), trainer, engine, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("stacks")
    return {"plain": run_loop("peft", "torch", folder), "gpu": run_loop("unsloth", "vllm", folder)}


def test_unsloth_and_vllm_run_the_loop(loops):
    assert loops["gpu"]["stack"] == ["unsloth", "vllm"]
    assert loops["gpu"]["version"] == 2 and loops["gpu"]["evaluated"] == [4, 2]
    for step in loops["gpu"]["steps"]:
        assert step["logprob_gap_mean"] < 1e-3, "vLLM's logprobs are the trainer's"
        assert step["probe_gap_mean"] < 1e-3 and step["rows_unpacked"] == 0


def test_a_closed_model_can_be_made_again_in_the_same_process(loops):
    assert loops["gpu"]["again"] == [2, 2], "its policy's version, and rollouts that it sampled"


def test_switching_the_stack_changes_no_result_beyond_rounding(loops):
    plain, other = loops["plain"]["steps"][0], loops["gpu"]["steps"][0]
    assert other["tokens"] == plain["tokens"]
    for name in ("loss", "grad_norm", "entropy"):
        assert other[name] == pytest.approx(plain[name], rel=1e-3), name
