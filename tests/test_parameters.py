"""Notebook parameters: right ones pass, misspelt and mistyped ones are named."""

from __future__ import annotations

from pathlib import Path

import nbformat
import papermill
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from artnb.errors import ConfigurationError
from artnb.parameters import parameters

OWN = 'base = None\nrun_name = "a"\nout_dir = "runs"\nsteps = 4\ngroup_size = 8\n'


def namespace(*cells: str) -> dict[str, object]:
    """What a kernel's globals() hold after these cells."""
    values: dict[str, object] = {"In": ["", *cells]}
    for cell in cells:
        exec(cell, {}, values)
    return values


def test_it_takes_the_names_that_the_parameters_cell_sets():
    p = parameters(namespace("step = 3", OWN))
    assert (p.base, p.steps, p.group_size) == (None, 4, 8)
    assert repr(p).startswith("Parameters(")
    assert not hasattr(p, "seed")


def test_it_ignores_other_variables_of_the_notebook():
    later = "for step in range(3):\n    grup_size = step"
    assert parameters(namespace(OWN, later)).steps == 4


def test_it_names_a_misspelt_parameter_and_the_likely_one():
    with pytest.raises(ConfigurationError, match=r"'grup_size'; did you mean 'group_size'"):
        parameters(namespace(OWN + "grup_size = 2"))
    with pytest.raises(ConfigurationError, match=r"'step'; did you mean 'steps'"):
        parameters(namespace(OWN, "# Parameters\nstep = 2\n"))


def test_it_refuses_an_injected_name_that_this_notebook_does_not_set():
    with pytest.raises(ConfigurationError, match="'learning_rate'"):
        parameters(namespace(OWN, "# Parameters\nlearning_rate = 1e-3\n"))


def test_it_forgets_an_injected_cell_when_the_parameters_cell_runs_again():
    values = namespace(OWN, "# Parameters\nstep = 2\n", OWN)
    assert parameters(values).steps == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": "8"}, r"steps must be int, got '8' \(str\)"),
        ({"steps": 2.0}, "steps must be int"),
        ({"steps": True}, "steps must be int"),
        ({"steps": -1}, "steps must be at least 0"),
        ({"group_size": 1}, "group_size must be at least 2"),
        ({"learning_rate": float("nan")}, "learning_rate must be finite"),
        ({"run_name": " "}, "run_name must not be empty"),
        ({"run_name": None}, "run_name must be str, got None"),
        ({"base": 3}, "base must be str or None"),
    ],
)
def test_it_names_what_is_wrong_with_a_value(given, message):
    with pytest.raises(ConfigurationError, match=message):
        parameters(**given)


def test_it_takes_whole_numbers_where_a_real_one_is_wanted():
    rate = parameters(learning_rate=1).learning_rate
    assert rate == 1.0 and isinstance(rate, float)


def test_it_knows_a_notebook_s_own_parameters():
    assert parameters(preset="tile16", extra={"preset": "x"}).preset == "tile16"
    with pytest.raises(ConfigurationError, match="preset must be str"):
        parameters(preset=3, extra={"preset": "x"})


def test_it_does_not_change():
    p = parameters(steps=3)
    with pytest.raises(AttributeError, match="parameters cell"):
        p.steps = 4
    with pytest.raises(AttributeError, match=r"'stepss'; did you mean 'steps'"):
        _ = p.stepss


def run_with_papermill(folder: Path, **given: object) -> str:
    check = "from artnb.parameters import parameters\nparameters(globals())"
    notebook = new_notebook(cells=[new_code_cell(OWN), new_code_cell(check)])
    notebook.cells[0].metadata["tags"] = ["parameters"]
    notebook.metadata["language_info"] = {"name": "python"}
    source, executed = folder / "in.ipynb", folder / "out.ipynb"
    nbformat.write(notebook, source)
    papermill.execute_notebook(
        str(source), str(executed), parameters=given, kernel_name="python3", progress_bar=False
    )
    return nbformat.read(executed, as_version=4).cells[-1].outputs[0]["data"]["text/plain"]


def test_it_checks_what_papermill_really_injects(tmp_path):
    assert "steps=2" in run_with_papermill(tmp_path, steps=2)
    with pytest.raises(papermill.PapermillExecutionError, match=r"did you mean 'group_size'"):
        run_with_papermill(tmp_path, grup_size=4)
