"""Does the audit see what is installed, and tell a clean answer from none?"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import audit
import pytest

BAD = {"id": "PYSEC-2026-1", "fixed_in": ["9.9.9"], "withdrawn": None}
WITHDRAWN = {"id": "PYSEC-2026-2", "fixed_in": [], "withdrawn": "2026-01-02T00:00:00Z"}


class _Index(BaseHTTPRequestHandler):
    """The JSON interface of a package index, as far as an audit reads it."""

    answers: dict[str, list[dict[str, Any]] | None]

    def do_GET(self) -> None:
        _, kind, name, version, last = self.path.split("/")
        assert (kind, last) == ("pypi", "json") and version
        told = self.answers.get(name, [])
        body = json.dumps({"info": {"name": name}, "vulnerabilities": told}).encode()
        self.send_response(404 if told is None else 200)
        self.end_headers()
        self.wfile.write(b"" if told is None else body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def index() -> Iterator[tuple[str, dict[str, list[dict[str, Any]] | None]]]:
    answers: dict[str, list[dict[str, Any]] | None] = {}
    handler = type("Index", (_Index,), {"answers": answers})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    server.server_close()
    thread.join()


def run(monkeypatch: Any, capsys: Any, address: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["audit.py", "--index", address, "--extras", "serve"])
    return audit.main(), capsys.readouterr().out


def test_it_follows_requirements_through_extras_and_others():
    found = {package.name: package for package in audit.reached()}
    assert {"numpy", "openai", "torch", "uvicorn", "safetensors", "jinja2", "markupsafe"} <= found.keys()
    assert "artnb" not in found and found["markupsafe"].asked_by == "jinja2"
    core = {package.name for package in audit.reached(extras=())}
    assert {"numpy", "openai", "pydantic"} <= core and not core & {"torch", "uvicorn"}


def test_every_licence_of_the_core_is_declared():
    undeclared = [p.name for p in audit.reached(extras=()) if p.licence == "not declared"]
    assert not undeclared


def test_a_known_weakness_fails_and_names_what_mends_it(index, monkeypatch, capsys):
    address, answers = index
    code, output = run(monkeypatch, capsys, address)
    assert code == 0 and "0 known vulnerabilities" in output
    answers["uvicorn"] = [BAD, WITHDRAWN]
    answers["sniffio"] = None
    code, output = run(monkeypatch, capsys, address)
    assert code == 1 and "VULNERABLE uvicorn" in output and "PYSEC-2026-1, mended in 9.9.9" in output
    assert "PYSEC-2026-2" not in output and "1 known vulnerabilities" in output


@pytest.mark.parametrize("knows_nothing", [True, False])
def test_an_index_that_does_not_answer_is_not_taken_for_a_clean_one(
    index, monkeypatch, capsys, knows_nothing: bool
):
    address, answers = index
    if knows_nothing:
        answers.update({package.name: None for package in audit.reached()})
    else:
        address = "http://127.0.0.1:9"  # the discard port: nobody listens
    code, output = run(monkeypatch, capsys, address)
    assert code == 0 and "NOT checked" in output and "0 known" not in output
