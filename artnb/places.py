"""Which service does this process run on, and where on it does a run outlive the session?"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

_HOSTS = {"KAGGLE_KERNEL_RUN_TYPE": "Kaggle", "COLAB_RELEASE_TAG": "Colab"}
"""Environment variables that these services set; Kaggle's image is made from Colab's."""

_DRIVE = Path("/content/drive/MyDrive")
_KAGGLE = Path("/kaggle/working")

_LOST = {
    "Colab": (
        "runs go to {place} and are gone when Colab takes this machine back. To keep them: run "
        "`from google.colab import drive; drive.mount('/content/drive')` in a cell of its own before this one"
    ),
    "Kaggle": (
        "runs go to {place}, and an interactive session's files are gone when it ends. To keep them: "
        "Save Version, or turn on Settings > Persistence > Files"
    ),
}

_warned: set[str] = set()


def host(environment: Mapping[str, str] = os.environ) -> str | None:
    """The service whose image this process runs in: ``Colab``, ``Kaggle``, or None.

    >>> host({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"})
    'Kaggle'
    """
    return next((name for sign, name in _HOSTS.items() if sign in environment), None)


def run_root() -> str:
    """The folder that runs are kept in when none is named.

    ``artnb-runs`` on Google Drive where it is mounted in Colab, ``/kaggle/working/runs`` on Kaggle, else
    ``runs`` in the working folder. Warns once where the files end with the session, and says what keeps
    them. Drive is never mounted here: that asks a question, and a notebook that runs unattended would
    wait for the answer for ever.
    """
    service = host()
    if service == "Colab" and _DRIVE.is_dir():
        return str(_DRIVE / "artnb-runs")
    place = "runs"
    if service == "Kaggle" and _KAGGLE.is_dir():
        place = str(_KAGGLE / "runs")
    is_kept = os.environ.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch"  # the files become the version's output
    if service and not is_kept and service not in _warned:
        _warned.add(service)
        warnings.warn(_LOST[service].format(place=place), stacklevel=2)
    return place
