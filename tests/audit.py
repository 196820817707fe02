"""What is installed for artnb: under which licence, and is a weakness of it known?

    python tests/audit.py [--index https://pypi.org] [--extras cpu,serve]

Lists every package that the requirements of artnb reach here, with its version, by licence, and asks the
package index which of these versions have known vulnerabilities. Exits with 1 when one has, and says which
version mends it; where the index does not answer, it says that nothing was checked.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = "artnb"
SECONDS = 5.0
ENOUGH = 3
COPYLEFT = re.compile(r"\b(A?GPL|LGPL|MPL|EUPL|CDDL|EPL)\b|General Public|Mozilla Public", re.IGNORECASE)


@dataclass(frozen=True)
class Package:
    """One installed distribution."""

    name: str
    version: str
    licence: str
    asked_by: str
    """The package that first required it."""


@dataclass(frozen=True)
class Weakness:
    """A known vulnerability of an installed version."""

    package: Package
    number: str
    mended_in: tuple[str, ...]


def reached(root: str = ROOT, extras: Iterable[str] | None = None) -> list[Package]:
    """Every installed package that ``root`` requires, through any number of others, by name.

    extras: of the root; None for all. What is required for another platform, or not installed, is left out.
    """
    declared = metadata.distribution(root).metadata.get_all("Provides-Extra") or []
    waiting = [(root, tuple(declared if extras is None else extras), "")]
    found: dict[str, Package] = {}
    while waiting:
        name, wanted, by = waiting.pop()
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        key = canonicalize_name(name)
        is_new = key not in found
        if is_new:
            found[key] = Package(key, distribution.version, licence_of(distribution.metadata), by)
        if not is_new and not wanted:
            continue
        for line in distribution.requires or []:
            requirement = Requirement(line)
            environments = [{"extra": extra} for extra in ("", *wanted)]
            if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
                target = canonicalize_name(requirement.name)
                if target not in found or set(requirement.extras):
                    waiting.append((target, tuple(requirement.extras), name))
    found.pop(canonicalize_name(root))
    return sorted(found.values(), key=lambda package: package.name)


def licence_of(about: metadata.PackageMetadata) -> str:
    """As the package declares it: an SPDX expression, else its classifiers, else the first words it says."""
    if expression := about.get("License-Expression"):
        return expression
    classified = [
        line.rpartition(" :: ")[2] for line in about.get_all("Classifier") or [] if "License" in line
    ]
    if classified:
        return ", ".join(classified)
    said = (about.get("License") or "").strip().splitlines()
    return said[0][:60] if said else "not declared"


def by_licence(packages: Iterable[Package]) -> dict[str, list[Package]]:
    """The licence of most packages first."""
    groups: dict[str, list[Package]] = {}
    for package in packages:
        groups.setdefault(package.licence, []).append(package)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def weaknesses(packages: Iterable[Package], index: str) -> tuple[list[Weakness], list[Package]]:
    """What the index knows against these versions, and the packages that it does not know at all.

    Raises OSError when it does not answer, or knows none of the first ones.
    """

    def ask(package: Package) -> list[Weakness] | None:
        address = f"{index.rstrip('/')}/pypi/{package.name}/{package.version.partition('+')[0]}/json"
        try:
            with urllib.request.urlopen(address, timeout=SECONDS) as answer:
                told = json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
        return [
            Weakness(package, str(one.get("id", "?")), tuple(one.get("fixed_in") or ()))
            for one in told.get("vulnerabilities") or []
            if not one.get("withdrawn")
        ]

    listed = list(packages)
    answers = [ask(package) for package in listed[:ENOUGH]]  # where nobody answers, a few are enough
    if answers and all(answer is None for answer in answers):
        raise OSError(f"it knows none of {', '.join(package.name for package in listed[:ENOUGH])}")
    with ThreadPoolExecutor(8) as pool:
        answers += pool.map(ask, listed[ENOUGH:])
    told = [weakness for answer in answers for weakness in answer or ()]
    return told, [package for package, answer in zip(listed, answers, strict=True) if answer is None]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--index", default="https://pypi.org")
    parser.add_argument("--extras", help="of artnb, with commas between them; default: all")
    options = parser.parse_args()
    packages = reached(extras=options.extras.split(",") if options.extras else None)
    print(f"{len(packages)} packages, by licence")
    for licence, named in by_licence(packages).items():
        mark = " (copyleft)" if COPYLEFT.search(licence) else ""
        print(f"{licence}{mark}: {', '.join(f'{p.name} {p.version}' for p in named)}")
    try:
        found, unknown = weaknesses(packages, options.index)
    except (OSError, ValueError) as error:
        print(f"Known vulnerabilities were NOT checked: {options.index} gives no answer ({error}).")
        return 0
    for weakness in found:
        package, mended = weakness.package, ", ".join(weakness.mended_in) or "no release yet"
        print(f"VULNERABLE {package.name} {package.version}: {weakness.number}, mended in {mended}")
    known = f"{len(packages) - len(unknown)} of {len(packages)} packages are known to {options.index}"
    print(f"{len(found)} known vulnerabilities; {known}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
