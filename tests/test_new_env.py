"""Does a new environment work before anything of it was changed?"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import artnb as nb
from artnb.cli import main
from artnb.new_env import new_environment


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A new package, installed beside artnb, and the environment variables that find it."""
    root = tmp_path_factory.mktemp("new")
    package, site = root / "coin_toss", root / "site"
    assert main(["new-env", "coin_toss", "--folder", str(package)]) == 0
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(package)], check=True, timeout=120)
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(Path(nb.__file__).parents[1])])}
    return package, found


def test_its_own_tests_pass(installed: tuple[Path, dict[str, str]]):
    package, found = installed
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=package,
        env=found,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert "8 passed" in run.stdout


def test_it_is_found_by_name_with_its_options_and_card(installed: tuple[Path, dict[str, str]]):
    _, found = installed
    script = (
        "import artnb; e = artnb.load_environment('coin_toss', preset='hard'); print(e);"
        "print(all(f'`{w}`' in e.card for w in [*e.variant, *e.metrics, *e.policies]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], env=found, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert "Environment(coin_toss: digits=4, examples=0" in run.stdout and run.stdout.endswith("True\n")


@pytest.mark.parametrize("name", ["../up", "Coin", "a b", "", "class", "1st", "x" * 60, "a/b"])
def test_a_name_that_cannot_be_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(nb.ConfigurationError):
        new_environment(name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["game_2048", "artnb", "bundled"])
def test_a_name_that_would_hide_something_installed_is_refused(name: str, tmp_path: Path):
    """``artnb`` would be written as ``artnb_environments``, the package of the bundled ones."""
    with pytest.raises(nb.ConfigurationError, match="taken"):
        new_environment(name, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_the_next_two_commands_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    place = tmp_path / "my $HOME place"
    assert main(["new-env", "coin_toss", "--folder", str(place)]) == 0
    _, install, load = capsys.readouterr().out.splitlines()
    pip, editable, where, *then = shlex.split(install)[1:]
    assert [pip, editable, where] == ["install", "-e", f"{place}[test]"]
    assert then == ["&&", "python", "-m", "pytest", str(place)]
    assert shlex.split(load)[-1] == "import artnb; print(artnb.load_environment('coin_toss'))"
    assert main(["new-env", "coin_toss", "--folder", str(place)]) == 1


def test_nothing_is_overwritten(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(nb.ConfigurationError, match="not empty"):
        new_environment("coin_toss", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
