"""How was metadata.json made? From PyPI, by pip's own report of what it would install.

    python fetch_metadata.py 3.13 colab.resolved 3.12 kaggle.resolved 3.12 others.txt > metadata.json

Each list holds lines name==version: here, what a resolver chose for one image when it preferred the
versions that the image has (uv pip compile with the image's versions as its earlier output), and
`others.txt` the versions that tests argue about. Nothing is installed; only metadata is read. A second
version of one name goes into a list of its own. Extras that nobody asks for are left out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

_GLIBC = ["2_35", "2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5"]
_PLATFORMS = [f"manylinux_{version}_x86_64" for version in _GLIBC]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


def report(python: str, specs: list[str]) -> list[dict]:
    """Metadata of these exact versions, as pip would fetch them on a Linux machine with an NVIDIA card."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed"]
    command += ["--quiet", "--only-binary=:all:", "--target", "unused", "--report", "-"]
    command += ["--python-version", python, "--implementation", "cp"]
    command += [f"--abi={abi}" for abi in ("cp" + python.replace(".", ""), "abi3", "none")]
    command += [f"--platform={platform}" for platform in _PLATFORMS]
    done = subprocess.run([*command, *specs], stdout=subprocess.PIPE, text=True, check=True)
    return [entry["metadata"] for entry in json.loads(done.stdout)["install"]]


def merged(records: list[dict]) -> dict[str, dict[str, dict]]:
    """Name -> version -> its requirements, without the extras that none of the others asks for."""
    lines = [line for record in records for line in record.get("requires_dist", [])]
    asked = {name for line in lines for name in re.findall(r"\[([^\]]*)\]", line.split(";")[0])}
    extras = {extra.strip() for names in asked for extra in names.split(",")}
    found: dict[str, dict[str, dict]] = {}
    for record in records:
        name = re.sub(r"[-_.]+", "-", record["name"]).lower()
        found.setdefault(name, {})[record["version"]] = {
            "requires_dist": [line for line in record.get("requires_dist", []) if _is_asked(line, extras)],
            "requires_python": record.get("requires_python", ""),
        }
    return found


def main(arguments: list[str]) -> None:
    """Print the metadata of all the lists as one JSON object."""
    records = []
    for python, path in zip(arguments[::2], arguments[1::2], strict=True):
        specs = [line.strip() for line in Path(path).read_text().splitlines() if "==" in line]
        records += report(python, specs)
    json.dump(merged(records), sys.stdout, indent=0, sort_keys=True)


def _is_asked(line: str, extras: set[str]) -> bool:
    named = set(re.findall(r"""extra\s*==\s*['"]([^'"]+)['"]""", line))
    return not named or bool(named & extras)


if __name__ == "__main__":
    main(sys.argv[1:])
