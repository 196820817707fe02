"""Where do keys come from? The environment first, then Colab's or Kaggle's own store; never a prompt.

A value that was found is in no message, log or repr of ours; ``redact`` takes it out of others' texts.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import re
import threading
from collections.abc import Callable

from artnb.places import host

_log = logging.getLogger(__name__)

_SECONDS = 5.0
"""How long a service may take. Colab's answers only where its own page is open, and else never."""

_KEYLIKE = re.compile(r"(?:^|_)(?:(?:API)?KEY|TOKEN|SECRET|PASSWORD|PASSWD|JWT)(?:$|_)", re.IGNORECASE)
_SHORTEST = 8
"""Shorter values are words that a text may well hold for another reason."""

_found: dict[str, str] = {}
"""Name -> value that a service gave."""

_given: dict[str, str] = {}
"""Value -> name, of keys that were handed over as arguments, or made here."""


def secret(name: str) -> str | None:
    """The value of a key such as ``OPENAI_API_KEY``, or None where nobody has one.

    Asks the environment, then, on Colab and Kaggle, the secrets that the user gave this notebook; blocks the
    calling thread for at most 5 seconds. None as well when the service fails or does not answer: the reason
    is logged.
    """
    if value := os.environ.get(name) or _found.get(name):
        return value
    ask = {"Colab": _ask_colab, "Kaggle": _ask_kaggle}.get(host() or "")
    value = _in_time(ask, name) if ask else None
    if value:
        _found[name] = value
    return value or None


def keep_secret(name: str, value: str) -> str:
    """Let ``redact`` take a key out of texts that was given as an argument, or made here; returns it."""
    _given[value] = name
    return value


def how_to_set(name: str) -> str:
    """What to tell a user whose key is missing: a sentence without its full stop."""
    stores = {
        "Colab": "add it under Secrets (the key in the left margin) and allow this notebook to read it",
        "Kaggle": "attach it under Add-ons > Secrets",
    }
    here = stores.get(host() or "")
    return f"set the environment variable {name}" + (f", or {here}" if here else "")


def redact(text: str) -> str:
    """The text with the name of a key in place of its value, for every key that this process knows.

    Those are what ``secret`` returned and ``keep_secret`` was told, and the environment's variables whose
    names say key, token, secret or password.

    >>> os.environ["EXAMPLE_API_KEY"] = "sk-0123456789"
    >>> redact("401: sk-0123456789 is not known")
    '401: [EXAMPLE_API_KEY] is not known'
    >>> del os.environ["EXAMPLE_API_KEY"]
    """
    known = [(name, value) for name, value in os.environ.items() if _KEYLIKE.search(name)]
    known += [*_found.items(), *((name, value) for value, name in _given.items())]
    for name, value in sorted(known, key=lambda item: -len(item[1])):  # one may begin with another
        if len(value) >= _SHORTEST:
            text = text.replace(value, f"[{name}]")
    return text


def _ask_colab(name: str) -> str:
    return importlib.import_module("google.colab.userdata").get(name)


def _ask_kaggle(name: str) -> str:
    return importlib.import_module("kaggle_secrets").UserSecretsClient().get_secret(name)


class _TooLate(BaseException):
    """Raised in a thread that nobody waits for any longer."""


def _in_time(ask: Callable[[str], str], name: str) -> str | None:
    """What ``ask`` returns, or None when it raises or takes longer than ``_SECONDS``."""
    answers: list[str] = []

    def work() -> None:
        try:
            answers.append(ask(name))
        except _TooLate:
            _log.info("no secret %s: the service did not answer within %g s", name, _SECONDS)
        except Exception as error:  # whatever a service raises; its text might hold the value
            _log.info("no secret %s: %s", name, type(error).__name__)

    thread = threading.Thread(target=work, name=f"artnb-secret-{name}", daemon=True)
    thread.start()
    thread.join(_SECONDS)
    if thread.is_alive():
        _end(thread)
    return answers[0] if answers else None


def _end(thread: threading.Thread) -> None:
    """Colab's would wait for ever, and swallow what is typed into ``input()`` meanwhile."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_TooLate))
