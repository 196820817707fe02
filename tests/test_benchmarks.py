"""Do the benchmarks still run, and print their figures? How fast they are is no test's business."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest


def run(
    repository: Path, name: str, arguments: list[str], monkeypatch: Any, capsys: Any
) -> tuple[str, dict[str, Any]]:
    """Everything on stdout, and the JSON line read."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    capsys.readouterr()
    runpy.run_path(str(repository / "tests" / "benchmarks" / f"{name}.py"), run_name="__main__")
    output = capsys.readouterr().out
    return output, json.loads(output.splitlines()[-1])


ROWS = {
    "email_search": {"search", "milliseconds", "slowest_ms", "over_raw"},
    "engine": {
        *("workload", "concurrent", "raw_turns_per_second", "raw_tokens_per_second"),
        *("client_over_raw", "raw_over_generate", "prompt", "computed_prompt", "share_of_limit"),
    },
    "game_2048": {"rules", "board", "moves", "moves_per_second", "plain_per_second", "over_plain"},
    "gather": {"turns", "sampled_tokens", "gather_seconds", "raw_seconds", "gather_over_raw"},
    "load": {"rollouts", "failed", "seconds", "turns_per_second", "lag_p99_ms", "lag_max_ms"},
    "judge": {"judge", "pairs_right", "consistent", "useless", "verdicts", "tokens"},
    "train_step": {
        *("share_prefixes", "seconds", "row_tokens_per_second", "packed_tokens", "peak_memory_gib"),
        "share_of_limit",
    },
}
TOTALS = {
    "email_search": {"mails", "generate_seconds", "store_seconds", "lsa_seconds"},
    "engine": {"matmul_tflops", "dtype"},
    "game_2048": set(),
    "gather": {"gather_over_raw", "turns_per_second"},
    "load": {"growth", "worst_lag_p99_ms"},
    "judge": {"groups", "samples"},
    "train_step": {"matmul_tflops", "prefix_sharing_gain"},
}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_json_prints_one_line_of_figures(
    name: str, repository: Path, tiny_model: Path, monkeypatch: Any, capsys: Any
) -> None:
    arguments = ["--quick", "--json", "--model", str(tiny_model)]
    output, figures = run(repository, name, arguments, monkeypatch, capsys)
    assert output.count("\n") == 1
    assert figures["benchmark"] == name
    assert TOTALS[name] <= figures.keys()
    assert all(ROWS[name] <= row.keys() for row in figures["rows"])
    assert figures["machine"].keys() >= {"load_before", "cores_used_by_others", "threads"}


def test_the_table_comes_before_the_line(
    repository: Path, tiny_model: Path, monkeypatch: Any, capsys: Any
) -> None:
    arguments = ["--quick", "--model", str(tiny_model)]
    output, figures = run(repository, "train_step", arguments, monkeypatch, capsys)
    assert "not shared" in output
    assert "load average before" in output
    assert figures["rows"][0]["packed_tokens"] < figures["rows"][1]["packed_tokens"]


def test_the_client_benchmark_prints_one_line(repository: Path, monkeypatch: Any, capsys: Any) -> None:
    output, figures = run(
        repository, "client", ["--calls", "8", "--repeats", "1", "--json"], monkeypatch, capsys
    )
    assert output.count("\n") == 1
    assert len(figures["rows"]) == 4


def test_the_dashboard_benchmark_prints_one_line(repository: Path, monkeypatch: Any, capsys: Any) -> None:
    arguments = ["--steps", "300", "--updates", "3", "--loop", "2", "--rounds", "2"]
    output, figures = run(repository, "dashboard", arguments, monkeypatch, capsys)
    assert output.splitlines()[-1].startswith("{")
    assert {"overhead_percent", "processor_percent", "update_ms", "saved_html_bytes"} <= figures.keys()
    assert 0 < figures["attach_bytes"] < 1_000_000 and figures["largest_message_bytes"] < 256_000


def test_the_browser_benchmark_prints_one_line(repository: Path, monkeypatch: Any, capsys: Any) -> None:
    arguments = ["--trajectories", "300", "--repeats", "1", "--json"]
    output, figures = run(repository, "browser", arguments, monkeypatch, capsys)
    assert output.count("\n") == 1
    assert {"open", "filter", "sort", "page of 100", "open a trajectory"} <= {
        r["name"] for r in figures["rows"]
    }
    assert 0 < figures["bytes_a_row"] < 200 and 0 < figures["index_share_of_writing"] < 1


@pytest.mark.slow
def test_three_stacks_give_one_gradient(
    repository: Path, tiny_model: Path, monkeypatch: Any, capsys: Any
) -> None:
    """artnb on peft and on Unsloth, and TRL's GRPOTrainer on Unsloth, from one adapter and the same rows."""
    arguments = ["--quick", "--json", "--peer", "--model", str(tiny_model)]
    _, figures = run(repository, "train_step", arguments, monkeypatch, capsys)
    stacks = figures["stacks"]
    assert stacks["artnb, Unsloth"]["gradient_cosine"] > 0.9999
    assert stacks["TRL, Unsloth"]["gradient_cosine"] > 0.999
    assert abs(stacks["TRL, Unsloth"]["entropy"] - stacks["artnb, peft"]["entropy"]) < 0.001
    assert all(stack["peak_memory_gib"] > 0 for stack in stacks.values())


def test_the_mcp_benchmark_prints_one_line(repository: Path, monkeypatch: Any, capsys: Any) -> None:
    output, figures = run(repository, "mcp", ["--quick", "--json"], monkeypatch, capsys)
    assert output.count("\n") == 1
    assert [row["transport"] for row in figures["rows"]] == ["in_process", "stdio"]
    assert all({"tool_server_per_s", "sdk_client_per_s", "ratio"} <= row.keys() for row in figures["rows"])
