"""The notebooks: tidy as files, and run from start to end on the real bundled model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest

import artnb as nb
from artnb.demo import DemoFailed, find_notebook, main, run_demo
from artnb.errors import ConfigurationError

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))
SHARED = ("base", "run_name", "out_dir", "steps", "scenarios_per_step", "group_size", "seed")
TRAINING = [path for path in NOTEBOOKS if '"id": "train"' in path.read_text(encoding="utf-8")]
WITH_BASELINES = [path for path in TRAINING if path.stem in ("quickstart", "2048")]
TINY = {"steps": 2, "scenarios_per_step": 2, "group_size": 2, "evaluation_scenarios": 4}


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def write_notebook(folder: Path, *sources: str) -> Path:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebook.cells[0].metadata["tags"] = ["parameters"]
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path = folder / "toy.ipynb"
    nbformat.write(notebook, path)
    return path


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_holds_no_output(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
        assert cell.cell_type == "markdown" or cell.source.count("\n") < 20


def test_the_training_notebooks_and_the_sweep_are_there():
    assert {"quickstart", "2048"} <= {path.stem for path in TRAINING}
    assert "sweep" in {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_a_training_notebook_ends_with_its_verdict(path):
    assert read(path).cells[-1].source == "model.run.assert_ok(p.steps)"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_shared_parameters_and_tells_what_each_cell_does(path):
    cells = read(path).cells
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    for name in SHARED:
        assert re.search(rf"^{name} = ", tagged[0].source, re.MULTILINE), name
    code = [index for index, cell in enumerate(cells) if cell.cell_type == "code"]
    assert all(cells[index - 1].cell_type == "markdown" for index in code)


def test_all_notebooks_begin_with_the_same_installation():
    first = {next(cell.source for cell in read(path).cells if cell.cell_type == "code") for path in NOTEBOOKS}
    (source,) = first
    assert len(NOTEBOOKS) > 1
    assert source.index("except ImportError") < source.index("%pip install")  # only where artnb is not there
    assert source.index("install()") < source.index("import torch")  # else replacing it asks for a restart


@pytest.mark.parametrize("path", WITH_BASELINES, ids=lambda path: path.stem)
def test_a_notebook_runs_through_papermill_on_the_bundled_model(path, tmp_path, capsys):
    result = run_demo(str(path), TINY, tmp_path)
    printed = capsys.readouterr().out
    record = json.loads(result.read_text())
    assert record["notebook"] == path.stem
    assert len(record["reward_by_step"]) == 2
    for evaluation in (record["evaluation"]["before"], record["evaluation"]["after"]):
        assert evaluation["n"] == 4
        assert evaluation["low"] <= evaluation["mean_reward"] <= evaluation["high"]
    assert record["evaluation"]["baselines"]["random"]["n"] == 4
    assert record["seconds"] > 0 and record["versions"]["torch"] and record["machine"]["cores"]
    assert "step 1: mean reward" in printed and "baseline random" in printed
    folder = next(tmp_path.iterdir())
    executed = read(folder / path.name)
    assert "widgets" not in executed.metadata
    first = next(cell for cell in executed.cells if cell.cell_type == "code")
    assert not any("Installing" in str(output) for output in first.outputs)  # all was there
    training = next(cell for cell in executed.cells if cell.get("id") == "train")
    assert any("<svg" in str(output.get("data", {}).get("text/html", "")) for output in training.outputs)
    assert (folder / path.name).stat().st_size < 2_000_000
    assert "<svg" in (folder / path.name).with_suffix(".html").read_text()
    assert record["status"] == "complete"
    report = next(folder.glob("*/report.html")).read_text(encoding="utf-8")
    assert "evaluation after" in report and "SmolLM2-135M-Instruct" in report


def test_the_notebook_without_data_has_tasks_written_and_attempts_judged(tmp_path):
    result = run_demo("zero_data", TINY | {"evaluation_scenarios": 8}, tmp_path)
    record = json.loads(result.read_text())
    assert record["status"] == "complete" and len(record["reward_by_step"]) == 2
    for evaluation in (record["evaluation"]["before"], record["evaluation"]["after"]):
        assert evaluation["n"] == 8 and evaluation["low"] <= evaluation["mean_reward"] <= evaluation["high"]
    folder = next(tmp_path.iterdir())
    tasks = next(tmp_path.rglob("*-tasks.jsonl")).read_text(encoding="utf-8").splitlines()
    assert len(tasks) == 6 and len(set(tasks)) == 6
    executed = {cell.get("id"): cell for cell in read(folder / "zero_data.ipynb").cells}
    assert "widgets" not in read(folder / "zero_data.ipynb").metadata
    judged = str(executed["trust"].outputs)
    assert "pairs ordered rightly" in judged and "1.000 [" in judged, "the script knows the truth"
    page = next(folder.glob("*/report.html")).read_text(encoding="utf-8")
    assert "evaluation after" in page and "judge" in page


@pytest.mark.slow
def test_the_notebook_on_an_mcp_server_trains_compares_and_judges(tmp_path):
    result = run_demo("finance_mcp", TINY, tmp_path)
    record = json.loads(result.read_text())
    assert record["status"] == "complete" and len(record["reward_by_step"]) == 2
    assert record["evaluation"]["baselines"]["oracle"]["mean_reward"] == 1.1
    folder = next(tmp_path.iterdir())
    executed = {cell.get("id"): cell for cell in read(folder / "finance_mcp.ipynb").cells}
    assert "Today is 2013-03-01" in str(executed["tools"].outputs)
    assert "the last one before it was 2012-12-24" in str(executed["tools"].outputs)
    (table,) = (output["data"]["text/html"] for output in executed["table"].outputs if "data" in output)
    for name in ("right tool", "right arguments", "calls / oracle", "right answer", "seconds", "1,000 runs"):
        assert name in table
    assert all(name in table for name in ("random", "heuristic", "oracle", "before", "after"))
    assert "At what price did" in str(executed["zero"].outputs)
    assert "None" not in executed["judged"].outputs[0].get("text", ""), "every attempt was judged"
    assert "widgets" not in read(folder / "finance_mcp.ipynb").metadata


@pytest.mark.slow
def test_the_notebook_on_mail_imports_trains_and_evaluates_each_level(tmp_path):
    result = run_demo("email_search", TINY | {"evaluation_scenarios": 3}, tmp_path)
    record = json.loads(result.read_text())
    assert record["status"] == "complete"
    assert record["evaluation"]["baselines"]["oracle"]["metrics"]["correct"] == 1.0
    folder = next(tmp_path.iterdir())
    executed = {cell.get("id"): cell for cell in read(folder / "email_search.ipynb").cells}
    assert "40 messages read, 40 kept in 1 inbox" in str(executed["import"].outputs)
    levels = str(executed["after"].outputs)
    assert all(f"after, level {level}" in levels for level in (1, 2, 3)) and "source_recall" in levels
    assert "the best: reward" in str(executed["browse"].outputs) and "truth" in str(
        executed["browse"].outputs
    )
    compared = str(executed["compare"].outputs)
    assert "1,000 runs" in compared and "before" in compared and "after" in compared
    assert "widgets" not in read(folder / "email_search.ipynb").metadata


@pytest.mark.slow
def test_the_notebook_on_one_s_own_environment_builds_plays_and_trains_it(tmp_path):
    result = run_demo("your_environment", TINY | {"evaluation_scenarios": 2}, tmp_path)
    record = json.loads(result.read_text())
    assert record["status"] == "complete" and len(record["reward_by_step"]) == 2
    assert record["evaluation"]["baselines"]["oracle"]["mean_reward"] == 1.0
    folder = next(tmp_path.iterdir())
    executed = {cell.get("id"): cell for cell in read(folder / "your_environment.ipynb").cells}
    assert "Colour of" in str(executed["look"].outputs) and "trajectories" in str(executed["browse"].outputs)
    assert "widgets" not in read(folder / "your_environment.ipynb").metadata


def test_the_sweep_notebook_compares_runs_of_the_bundled_model(tmp_path):
    folder = tmp_path / "swept"
    folder.mkdir()
    given = TINY | {"run_name": "swept", "out_dir": str(folder), "grid": {"learning_rate": [1e-4, 1e-3]}}
    executed = folder / "sweep.ipynb"
    source = find_notebook("sweep")
    papermill.execute_notebook(str(source), str(executed), given, progress_bar=False, kernel_name="python3")
    cells = {cell.get("id"): cell for cell in read(executed).cells}
    (shown,) = (output["data"] for output in cells["compare"].outputs if "data" in output)
    assert "2 complete" in shown["text/html"] and "<svg" in shown["text/html"]
    assert re.search(r"loaded anew for every point: [\d.]+ s each", shown["text/html"])
    points = [nb.Run.read(f"learning_rate={rate}", folder / "swept") for rate in (0.0001, 0.001)]
    assert [point.trained_steps for point in points] == [2, 2]
    assert "widgets" not in read(executed).metadata


def test_the_demo_shows_a_failing_cell_and_keeps_the_partial_notebook(tmp_path):
    path = write_notebook(tmp_path, 'run_name = "a"\nout_dir = "b"', "print('worked')", "1 / 0")
    with pytest.raises(DemoFailed, match="ZeroDivisionError") as caught:
        run_demo(str(path), {}, tmp_path / "out")
    partial = next((tmp_path / "out").glob("*/toy.ipynb"))
    assert str(partial) in str(caught.value)
    assert "worked" in partial.read_text()


def test_the_demo_ends_with_one_when_a_cell_fails(tmp_path, capsys):
    path = write_notebook(tmp_path, 'run_name = "a"', "raise ValueError('no such board')")
    assert main([str(path), "--out", str(tmp_path / "out")]) == 1
    assert "no such board" in capsys.readouterr().err


def test_the_demo_says_when_a_notebook_wrote_no_result(tmp_path):
    path = write_notebook(tmp_path, 'run_name = "a"', "print('done')")
    with pytest.raises(DemoFailed, match=r"wrote no .*result\.json"):
        run_demo(str(path), {}, tmp_path / "out")


def test_the_demo_lists_the_notebooks_that_there_are():
    with pytest.raises(ConfigurationError, match=r"there are: .*quickstart"):
        find_notebook("quikstart")


def test_the_readme_example_runs_as_pasted(repository, tmp_path):
    readme = (repository / "README.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 20
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    answer = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
