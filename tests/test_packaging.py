"""The wheel and the sdist: built, looked into, and used away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

USE = """
import artnb, artnb_environments, sys
assert artnb.__file__.startswith(sys.prefix), artnb.__file__
assert artnb_environments.__file__.startswith(sys.prefix), artnb_environments.__file__
for name in artnb.available_environments():
    environment = artnb.load_environment(name)
    heldout = environment.scenarios("test", n=4)
    played = artnb.evaluate_baseline(environment, "random", heldout)
    print(name, played.n, len(environment.card) > 100)
"""


def answer_of(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that sees nothing of this checkout but what its arguments name."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True)


def run(*command: str | Path, cwd: Path) -> str:
    answer = answer_of(*command, cwd=cwd)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def built(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a wheel and an sdist of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", folder)
    run(*build, ".", cwd=repository)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a new environment that holds the wheel; only its dependencies come from this one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    wheel = next(built.glob("*.whl"))
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet")
    run(*pip, wheel, cwd=folder)
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    # .pth files inside a folder added by a .pth file are not read: the editable artnb stays out
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


PRICES = [f"artnb_environments/finance_mcp/data/{name}" for name in ("stocks.csv.gz", "LICENSE.md")]
CONSTRAINTS = [f"artnb/constraints/constraints-{image}.txt" for image in ("colab", "kaggle", "t4")]


def test_the_wheel_holds_the_package_the_environments_and_their_data(built):
    names = set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())
    files = ("artnb/__init__.py", "artnb/ui/html.py", "artnb_environments/tool_lookup/README.md")
    for wanted in (*files, *PRICES, *CONSTRAINTS):
        assert wanted in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"artnb", "artnb_environments"}
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]


def test_the_sdist_holds_what_the_tests_and_the_demo_need(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        members = archive.getnames()
    names = {name.split("/", 1)[1] for name in members if "/" in name}
    files = ("Makefile", "LICENSE", "constraints-cpu.txt", "notebooks/quickstart.ipynb", ".ci/run")
    prices = [f"environments/{name}" for name in PRICES]
    for wanted in (*files, *prices, *CONSTRAINTS, "tests/data/images/metadata.json"):
        assert wanted in names
    assert not [name for name in names if name.startswith((".venv", "out/", "runs/"))]


def test_the_installed_wheel_plays_its_environments_anywhere(installed, tmp_path):
    lines = run(installed, "-c", USE, cwd=tmp_path).splitlines()
    assert {"game_2048 4 True", "tool_lookup 4 True"} <= set(lines)


def test_the_installed_wheel_finds_its_constraints(installed, tmp_path):
    code = "from artnb.install import constraints; print(constraints('kaggle', []).read_text())"
    assert "vllm==" in run(installed, "-c", code, cwd=tmp_path)


def test_the_installed_command_answers(installed, tmp_path):
    command = installed.parent / "artnb"
    assert "no runs in" in answer_of(command, "runs", cwd=tmp_path).stdout
    demo = answer_of(command, "demo", "quickstart", cwd=tmp_path)
    assert demo.returncode == 1
    assert "not part of the installed package" in demo.stderr
