"""Colab, Kaggle and Jupyter servers: what their images hold, where runs stay, which package belongs where."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import warnings
from pathlib import Path

import nbformat
import papermill
import pytest
from kernel_tools import environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import artnb as nb
from artnb import compatibility, places, servers

TESTS = Path(__file__).resolve().parent
PROJECT = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# What the images hold


def freeze(image: str) -> dict[str, str]:
    """Package -> version of a notebook service's image."""
    lines = (TESTS / "data" / "images" / f"{image}.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version.split(";")[0].strip() for name, version in pairs}


@pytest.fixture(scope="module", params=["colab", "kaggle"])
def image(request, tmp_path_factory):
    """An environment in which pip finds every package of the image, as far as names and versions go."""
    folder = tmp_path_factory.mktemp(request.param)
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/*/site-packages")
    for name, version in freeze(request.param).items():
        place = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        place.mkdir()
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (place / "INSTALLER").write_text("pip\n")
    return folder / "bin" / "python"


def pip_says(python: Path, *wanted: str) -> str:
    """What pip, without any index, would do to bring these requirements into an environment."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--dry-run", "--no-index"]
    quiet = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([*pip, *wanted], env=quiet, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_the_core_needs_nothing_that_an_image_does_not_hold_already(image):
    said = pip_says(image, *PROJECT["dependencies"])
    assert said.count("Requirement already satisfied") == len(PROJECT["dependencies"])
    assert not re.search("Would install|ERROR", said), said
    refused = pip_says(image, *PROJECT["dependencies"], "pandas>=3")
    assert "No matching distribution found for pandas>=3" in refused, "pip looks at the image's versions"


ADDED = {"cpu": {"gguf", "renderers"}, "parquet": set(), "serve": set()}
"""What an extra brings to an image; test_install.py follows the requirements of these."""


@pytest.mark.parametrize("extra", ADDED)
@pytest.mark.parametrize("name", ["colab", "kaggle"])
def test_an_extra_replaces_nothing_that_an_image_holds(name, extra):
    held = freeze(name)
    wanted = [Requirement(line) for line in PROJECT["optional-dependencies"][extra]]
    absent = {one.name for one in wanted if canonicalize_name(one.name) not in held}
    wrong = [
        one
        for one in wanted
        if one.name not in absent and held[canonicalize_name(one.name)] not in one.specifier
    ]
    assert not wrong and absent == ADDED[extra]


def test_what_the_widgets_need_is_held_by_an_image():
    """The rest of the notebook extra is a server's, and the services run servers of their own."""
    lines = {one.name: one for one in map(Requirement, PROJECT["optional-dependencies"]["notebook"])}
    for name in ("colab", "kaggle"):
        for package in ("anywidget", "ipykernel"):
            assert freeze(name)[package] in lines[package].specifier, (name, package)


PINNED = (
    *(
        "ipykernel",
        "ipython",
        "ipywidgets",
        "jupyter-client",
        "jupyter-core",
        "traitlets",
        "tornado",
        "pyzmq",
    ),
    *(
        "anywidget",
        "plotly",
        "pandas",
        "numpy",
        "matplotlib",
        "openai",
        "httpx",
        "anyio",
        "pydantic",
        "packaging",
    ),
    *("nbformat", "nbclient", "nbconvert", "psutil", "safetensors"),
)
CORE_TESTS = (
    *("test_session.py", "test_ui.py", "test_store.py", "test_gather.py", "test_types.py", "test_client.py"),
    *("test_dashboard.py", "test_dashboard_widget.py", "test_browser_widget.py"),
)

PRETENDS = "test_an_ipykernel_that_is_built_otherwise_is_left_alone_after_a_warning"
"""Takes ipykernel 7.4 for an older one; Colab's is older."""


@pytest.mark.slow
def test_the_core_s_tests_pass_beside_the_packages_of_colab():
    held = freeze("colab")
    pins = [f"{name}=={held[name]}" for name in PINNED]
    python = environment("colab", [*pins, "pytest>=8.3", "pytest-asyncio>=1.0", "hypothesis>=6.100"])
    ask = "import importlib.metadata as m, sys; print(*(m.version(name) for name in sys.argv[1:]))"
    found = subprocess.run([python, "-c", ask, *PINNED], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [held[name] for name in PINNED]
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS.parent / "environments")])
    files = [f"tests/{name}" for name in CORE_TESTS]
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *files,
        *("-k", "not serve"),  # needs uvicorn, which no image holds
        "--deselect",
        f"{files[0]}::{PRETENDS}",
    ]
    variables = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=TESTS.parent, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1]


# Where runs stay


@pytest.fixture
def place(monkeypatch, tmp_path):
    """Pretend to be somewhere: a function of environment variables and of the folders that are there."""
    for name in ("KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(places, "_warned", set())
    monkeypatch.setattr(places, "_DRIVE", tmp_path / "drive" / "MyDrive")
    monkeypatch.setattr(places, "_KAGGLE", tmp_path / "kaggle" / "working")
    monkeypatch.chdir(tmp_path)

    def be(folder: str = "", **environment: str) -> Path:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        if folder:
            (tmp_path / folder).mkdir(parents=True)
        return tmp_path

    return be


def test_runs_stay_in_the_working_folder_of_a_machine_of_one_s_own(place):
    place("drive/MyDrive")
    with warnings.catch_warnings(action="error"):
        assert nb.run_root() == "runs"


def test_runs_go_to_a_mounted_drive(place):
    folder = place("drive/MyDrive", COLAB_RELEASE_TAG="release")
    with warnings.catch_warnings(action="error"):
        assert nb.run_root() == str(folder / "drive" / "MyDrive" / "artnb-runs")
        with nb.Model(run="kept", backend=nb.FakeBackend()) as model:
            assert model.run.path == folder / "drive" / "MyDrive" / "artnb-runs" / "kept"
        assert nb.Run.read("kept").path == model.run.path, "and they are looked for there"


def test_colab_without_drive_warns_once_and_says_what_keeps_a_run(place, monkeypatch):
    place(COLAB_RELEASE_TAG="release")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a prompt"))
    with pytest.warns(UserWarning, match=r"gone when Colab .* drive\.mount"):
        assert nb.run_root() == "runs"
    with warnings.catch_warnings(action="error"):
        assert nb.run_root() == "runs"


def test_kaggle_s_working_folder_is_kept_by_a_saved_version_only(place):
    folder = place("kaggle/working", COLAB_RELEASE_TAG="release", KAGGLE_KERNEL_RUN_TYPE="Batch")
    with warnings.catch_warnings(action="error"):
        assert nb.run_root() == str(folder / "kaggle" / "working" / "runs")
    place(KAGGLE_KERNEL_RUN_TYPE="Interactive")
    with pytest.warns(UserWarning, match=r"interactive session.* Save Version"):
        nb.run_root()


def test_a_root_that_is_named_is_taken_without_a_word(place, tmp_path):
    place(COLAB_RELEASE_TAG="release")
    with (
        warnings.catch_warnings(action="error"),
        nb.Model(run="a", root=tmp_path, backend=nb.FakeBackend()) as model,
    ):
        assert model.run.path.parent == tmp_path


# Which package belongs where


@pytest.fixture
def jupyter(tmp_path, monkeypatch):
    """Folder of an environment with a Jupyter of its own, of which a shell's PATH knows."""
    monkeypatch.setattr(servers, "_SYSTEM_FOLDERS", ())
    for name in ("KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "server"
    command = folder / "bin" / "jupyter-lab"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    (folder / "bin" / "python").symlink_to(sys.executable)
    return folder


def written(path: Path, record: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


def has_extension(folder: Path, version: str = "0.9.21") -> None:
    written(folder / "share/jupyter/labextensions/anywidget/package.json", {"version": version})


def has_kernel(folder: Path, python: str = sys.executable) -> None:
    written(folder / "share/jupyter/kernels/mine/kernel.json", {"argv": [python, "-m", "ipykernel_launcher"]})


HERE = {"artnb": "0.1.0", "ipykernel": "6.17.1", "anywidget": "0.9.21"}


def look(jupyter: Path, installed=HERE, **variables: str) -> tuple[servers.Environments, str]:
    variables = {"PATH": str(jupyter / "bin"), "JUPYTER_DATA_DIR": str(jupyter / "nothing"), **variables}
    found = servers.find(installed, variables)
    return found, "\n".join(f"{finding.what} | {finding.fix}" for finding in servers.findings(found))


def test_two_environments_that_fit_together_are_named_and_nothing_is_said(jupyter):
    has_extension(jupyter, "0.9.13")
    has_kernel(jupyter)
    found, said = look(jupyter)
    assert said == "" and found.page == jupyter and found.cells == Path(sys.prefix)
    told = servers.facts(found)
    assert "artnb, ipykernel and anywidget" in told["cells run in"] and sys.prefix in told["cells run in"]
    assert "anywidget for its extension" in told["page is served from"]


def test_a_server_that_cannot_show_widgets_or_start_this_kernel_is_told_what_it_lacks(jupyter):
    _, said = look(jupyter)
    assert f"has no kernel in {sys.prefix}" in said and "ipykernel install --user" in said
    assert f"{jupyter} has no anywidget extension" in said
    assert f'{jupyter}/bin/python -m pip install "anywidget==0.9.*", then reload' in said
    has_extension(jupyter, "0.11.0")
    has_kernel(jupyter, "python3")  # the server's own
    _, said = look(jupyter)
    assert "gives the page anywidget 0.11.0, and the cells use 0.9.21" in said and "has no kernel" in said


def test_a_kernel_without_anywidget_is_told_so(jupyter):
    has_extension(jupyter)
    has_kernel(jupyter)
    _, said = look(jupyter, {"artnb": "0.1.0", "ipykernel": "6.17.1"})
    assert "anywidget is missing in" in said and f"{sys.executable} -m pip install anywidget" in said


def test_an_extension_is_found_where_the_server_looks(jupyter, tmp_path):
    has_kernel(jupyter)
    has_extension(tmp_path / "user")
    assert "no anywidget extension" in look(jupyter)[1]
    assert not look(jupyter, JUPYTER_DATA_DIR=str(tmp_path / "user" / "share" / "jupyter"))[1]
    assert not look(jupyter, JUPYTER_PATH=str(tmp_path / "user" / "share" / "jupyter"))[1]


def test_a_kernel_finds_the_environment_of_the_server_that_started_it(jupyter, monkeypatch):
    monkeypatch.setattr(servers, "kernel", lambda: object())
    has_extension(jupyter)
    server = subprocess.Popen(
        [jupyter / "bin" / "python", "-c", "input('ready')"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert server.stdout.read(5) == b"ready"
        started = {"JPY_PARENT_PID": str(server.pid), "PATH": "/nowhere"}
        found, said = look(jupyter, JPY_SESSION_NAME="a.ipynb", **started)
        assert found.page == jupyter and said == ""
        assert look(jupyter, **started)[0].page is None, "papermill started it, and serves no page"
        assert look(jupyter, JPY_SESSION_NAME="a", COLAB_RELEASE_TAG="r", **started)[0].page is None
    finally:
        server.communicate(b"\n")
    assert look(jupyter, JPY_SESSION_NAME="a.ipynb", **started)[0].page is None, "it has ended"


def test_one_environment_for_both_is_the_simple_case(jupyter, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(jupyter))
    has_extension(jupyter)
    found, said = look(jupyter)
    assert said == "" and list(servers.facts(found)) == ["cells and page"]


def test_doctor_says_which_package_belongs_where(monkeypatch):
    monkeypatch.setattr(compatibility, "probe", lambda names: ({}, {}))  # it imports torch in a child process
    found = servers.Finding("warning", "two anywidgets", "pip")
    monkeypatch.setattr(servers, "findings", lambda _: [found])
    told = nb.doctor().to_dict()
    assert "anywidget" in str(told["facts"]["notebook"]) and "two anywidgets" in str(told["findings"])


# What no machine here can run


def test_the_checklist_says_what_to_do_and_to_see_and_runs_as_a_batch(tmp_path):
    source = TESTS.parent / "notebooks" / "checklist.ipynb"
    cells = nbformat.read(source, as_version=4).cells
    about = [cell.source for cell in cells[2:] if cell.cell_type == "markdown"]
    assert all("**See:**" in text for text in about)
    assert all(
        line.startswith(("- **Do:**", "- **See:**", "## ")) for text in about for line in text.splitlines()
    )
    given = {"out_dir": str(tmp_path), "steps": 3}
    executed = papermill.execute_notebook(
        str(source), str(tmp_path / "checklist.ipynb"), given, progress_bar=False, kernel_name="python3"
    )
    printed = "".join(str(cell.get("outputs", "")) for cell in executed.cells)
    assert "mode html" in printed and "complete 4" in printed and "ended at step 3" in printed
    assert "widgets" not in executed.metadata and (tmp_path / "checklist" / "report.html").is_file()
