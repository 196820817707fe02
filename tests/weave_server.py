"""What answers as Weave in tests? A loopback server that speaks its HTTP API and refuses what Weave refuses.

The requests of W&B (``/graphql``) and of Weave's trace server (``/traces/...``) that a client makes to start,
to write calls and to read them. Bodies are checked with models of their schema; the tests let the real
``weave`` package talk to it as well.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

KEY = "canary-0123456789abcdef0123456789abcdef01"
PROJECT = "team/project"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False)


class Usage(_Strict):
    requests: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None


class Summary(BaseModel):
    usage: dict[str, Usage] = {}
    status_counts: dict[str, int] = {}


class CompleteCall(_Strict):
    """A finished call, as ``/v2/{entity}/{project}/calls/complete`` takes it."""

    project_id: str
    id: str
    trace_id: str
    op_name: str
    started_at: datetime
    ended_at: datetime
    attributes: dict[str, Any]
    inputs: dict[str, Any]
    summary: Summary
    output: Any = None
    display_name: str | None = None
    parent_id: str | None = None
    exception: str | None = None
    thread_id: str | None = None
    turn_id: str | None = None
    otel_dump: dict[str, Any] | None = None
    wb_user_id: str | None = None
    wb_run_id: str | None = None
    wb_run_step: int | None = None
    wb_run_step_end: int | None = None


class CompleteBatch(_Strict):
    batch: list[CompleteCall]


class WeaveServer:
    """Holds the calls that clients wrote, and can be made to fail."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        """Every call that was written, in order; a call that was written twice is here twice."""
        self.requests: list[tuple[str, str]] = []
        """Path and Authorization header of every request."""
        self.projects = {PROJECT}
        self.keys = {KEY}
        self.fail: Callable[[str], int | None] = lambda path: None
        """A status to answer with instead, by path."""
        self.fail_after: Callable[[str], int | None] = lambda path: None
        """The same once the request has been carried out: the client cannot know that it was."""
        self.most_bytes = 32 * 2**20
        self.rejects: Callable[[dict[str, Any]], bool] = lambda call: False
        self.hold = threading.Event()
        """Requests that write calls wait for it."""
        self.hold.set()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0
        self.go_online()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def go_online(self) -> None:
        handler = type("Handler", (_Handler,), {"weave": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def go_offline(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def by_op(self, op: str) -> list[dict[str, Any]]:
        return [call for call in self.calls if call["op_name"] == op]

    # What each path does: (status, answer)

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/graphql":
            return 200, {"data": self._graphql(json.loads(body))}
        if path == "/traces/server_info":
            return 200, {"min_required_weave_python_version": "0.0.1", "trace_server_version": "9.0.0"}
        if found := re.fullmatch(r"/traces/v2/([^/]+)/([^/]+)/calls/complete", path):
            return self._complete(f"{found[1]}/{found[2]}", body)
        if path in ("/traces/calls/query_stats", "/traces/calls/stream_query"):
            query = json.loads(body)
            if query["project_id"] not in self.projects:
                return 404, {"detail": "project not found"}
            wanted = (query.get("filter") or {}).get("call_ids")
            found_calls = {c["id"]: c for c in self.calls if wanted is None or c["id"] in wanted}
            if path.endswith("query_stats"):
                return 200, {"count": len(found_calls), "has_more": False}
            return 200, "\n".join(map(json.dumps, found_calls.values()))
        if path == "/traces/obj/create":
            return 200, {"digest": "d" * 43, "object_id": json.loads(body)["obj"]["object_id"]}
        if path in ("/traces/file/create", "/traces/files/create"):
            return 200, {"digest": "f" * 43}
        return 404, {"detail": f"no such path: {path}"}

    def _graphql(self, request: dict[str, Any]) -> dict[str, Any]:
        query, variables = request["query"], request.get("variables") or {}
        if "viewer" in query:
            return {"viewer": {"username": "ada", "defaultEntity": {"name": "team"}}}
        entity = variables.get("entity") or variables.get("entityName")
        name = f"{entity}/{variables['name']}"
        if "upsertModel" in query:
            if entity != "team":
                return {"upsertModel": None}
            self.projects.add(name)
            return {"upsertModel": {"model": {"name": variables["name"], "description": None}}}
        return {"project": {"name": variables["name"]} if name in self.projects else None}

    def _complete(self, project: str, body: bytes) -> tuple[int, Any]:
        self.hold.wait(10)
        if len(body) > self.most_bytes:
            return 413, {"detail": "request too large"}
        if project not in self.projects:
            return 404, {"detail": "project not found"}
        try:
            batch = CompleteBatch.model_validate_json(body).batch
        except ValidationError as error:
            return 422, {"detail": error.errors(include_url=False, include_context=False)}
        calls = json.loads(body, parse_constant=_refuse)["batch"]
        if any(call.project_id != project for call in batch) or any(map(self.rejects, calls)):
            return 422, {"detail": "one of these calls is invalid"}
        self.calls += calls
        return 200, {}


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


class _Handler(BaseHTTPRequestHandler):
    weave: WeaveServer

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, key = self.path.split("?")[0], self.headers.get("Authorization", "")
        self.weave.requests.append((path, key))
        status = self.weave.fail(path)
        if status is not None:
            # a careless server that repeats what it was sent
            return self._write(status, {"detail": f"failed for {key} {_password(key)}"})
        if path != "/traces/server_info" and _password(key) not in self.weave.keys:
            return self._write(401, {"detail": f"unknown key {_password(key)}"})
        status, answer = self.weave.answer(path, body)
        self._write(self.weave.fail_after(path) or status, answer)

    def _write(self, status: int, answer: Any) -> None:
        text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Tests look at ``requests``."""


def _password(header: str) -> str:
    if not header.startswith("Basic "):
        return ""
    return base64.b64decode(header[6:]).decode().partition(":")[2]


@contextmanager
def weave_server() -> Iterator[WeaveServer]:
    server = WeaveServer()
    try:
        yield server
    finally:
        server.hold.set()
        server.go_offline()
