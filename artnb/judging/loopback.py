"""How is judging tried without a key? An endpoint on loopback whose answers a script gives.

It speaks the chat-completions protocol, its faults included: a script may answer late, wrongly or not at all.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ATTEMPT = re.compile(r'<attempt id="(\w+)">\n(.*)\n</attempt>')

CONTEXT = re.compile(r"<context>\n(.*)\n</context>")


@dataclass
class Asked:
    """A request as the server read it."""

    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def text(self) -> str:
        """The question, without what followed an invalid answer."""
        return str(self.body["messages"][1]["content"])

    @property
    def attempts(self) -> dict[str, Any]:
        """The entries of each attempt by its id, in the order in which they stand."""
        return {name: json.loads(entries) for name, entries in ATTEMPT.findall(self.text)}

    @property
    def context(self) -> list[dict[str, Any]]:
        """The messages with which all attempts begin."""
        found = CONTEXT.search(self.text)
        return json.loads(found[1]) if found else []

    @property
    def is_again(self) -> bool:
        """Whether this follows an answer that could not be used."""
        return len(self.body["messages"]) > 2


@dataclass
class Says:
    """What the server sends back."""

    text: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: str | None = None
    """The whole body in place of a completion."""
    delay: float = 0.0
    drip: float = 0.0
    """Seconds between two bytes of the body."""
    finish_reason: str = "stop"
    refusal: str | None = None


Script = Callable[[Asked], Says]


def answer(scores: dict[str, Any], explanation: str = "so it is") -> str:
    """A well-formed answer."""
    entries = [{"id": name, "explanation": explanation, "score": s} for name, s in scores.items()]
    return json.dumps({"scores": entries})


class _Handler(BaseHTTPRequestHandler):
    judge: LoopbackJudge
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        given = self.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self.judge.api_key}".encode()):
            self._answer(Says(status=401, text="wrong key"), body)
            return
        asked = Asked(body, {name.lower(): value for name, value in self.headers.items()})
        self.judge.asked.append(asked)
        self._answer(self.judge.script(asked), body)

    def _answer(self, says: Says, body: dict[str, Any]) -> None:
        time.sleep(says.delay)
        text = says.raw if says.raw is not None else _completion(body, says)
        self.send_response(says.status)
        told = {"Content-Type": "application/json", "Content-Length": str(len(text.encode()))}
        for name, value in (told | says.headers).items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client gave up
            self._send(text.encode(), says.drip)

    def _send(self, data: bytes, drip: float) -> None:
        for start in range(0, len(data), 1 if drip else len(data) or 1):
            self.wfile.write(data[start : start + (1 if drip else len(data))])
            self.wfile.flush()
            time.sleep(drip)

    def log_message(self, *_: Any) -> None:
        """Say nothing on stderr."""


class LoopbackJudge:
    """A server on a free port of 127.0.0.1 with a key of its own, from now until ``close``.

    script: gives the answer to each request; it may be replaced at any time. asked: every request.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked: list[Asked] = []
        self.api_key = secrets.token_urlsafe(24)
        """Requests without it are refused."""
        handler = type("Handler", (_Handler,), {"judge": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads, self._server.block_on_close = True, False  # clients keep connections
        self.base_url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def access(self) -> dict[str, str]:
        """``base_url`` and ``api_key``, for ``judge(..., **server.access)``."""
        return {"base_url": self.base_url, "api_key": self.api_key}

    def close(self) -> None:
        """Stop serving. May be called again."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def __enter__(self) -> LoopbackJudge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LoopbackJudge({self.base_url}, {len(self.asked)} requests)"


def _completion(body: dict[str, Any], says: Says) -> str:
    if says.status != 200:
        return json.dumps({"error": {"message": says.text or "no", "type": "error", "code": says.status}})
    message = {"role": "assistant", "content": says.text, "refusal": says.refusal}
    return json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": body.get("model"),
            "choices": [{"index": 0, "message": message, "finish_reason": says.finish_reason}],
            "usage": {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100},
        }
    )
