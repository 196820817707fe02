"""How does a run get to Weave? Over the HTTP API of its trace server, one batch of finished calls at a time.

Not through the ``weave`` package: importing it patches PIL and waits to patch moviepy, and ``weave.init``
asks for a key at a prompt, patches the model clients it finds, takes OpenTelemetry's one global provider and
reports errors to Sentry. Its client of this API is generated from the API's own description and cannot be
imported by itself. The tests hold what is sent here against that package's types.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from artnb.errors import ArtnbError, ConfigurationError, require
from artnb.secrets import how_to_set, redact, secret
from artnb.store.trajectories import Stored
from artnb.trackers.base import Tracker, Unreachable
from artnb.trackers.weave_calls import Call, Place, record_call, rollout_calls, score_calls

KEY = "WANDB_API_KEY"
_CLOUD, _CLOUD_TRACES = "https://api.wandb.ai", "https://trace.wandb.ai"
_SECONDS, _CONNECT_SECONDS = 20.0, 5.0
_MOST_CALLS = 200
_MOST_BYTES = 8 * 2**20  # the server takes 32 MiB
_REFUSED, _TOO_LARGE, _INVALID = (401, 403), 413, 422
_LATER = (408, 425, 429)
_SHORTEST_SECRET = 8
"""A shorter value may well be a word of the text; no real key is."""

_VIEWER = "query { viewer { username defaultEntity { name } } }"
_PROJECT = "query ($name: String!, $entity: String!) { project(name: $name, entityName: $entity) { name } }"
_CREATE = (
    "mutation ($name: String!, $entity: String!) "
    "{ upsertModel(input: { name: $name, entityName: $entity }) { model { name } } }"
)


class WeaveTracker(Tracker):
    """Sends rollouts to Weave as traces with turns, tools and rewards, and a call with the metrics a step.

    project: ``"entity/project"``, or ``"project"`` of the key's own default entity. create: make the project
    when there is none, instead of refusing to start. api_key: None for the secret ``WANDB_API_KEY`` (the
    environment, then Colab's and Kaggle's secrets). base_url: a server of your own instead of
    https://api.wandb.ai, also taken from the environment's ``WANDB_BASE_URL``; its traces are under
    ``/traces``.

    Messages, tools, rewards, metrics and token counts are sent; token ids are not. The values of known keys
    are taken out of all of it.
    """

    def __init__(
        self, project: str, *, api_key: str | None = None, base_url: str | None = None, create: bool = False
    ) -> None:
        names = project.split("/") if isinstance(project, str) else []
        if len(names) not in (1, 2) or not all(name.strip() for name in names):
            raise ConfigurationError(f"project must be 'entity/project' or 'project', got {project!r}")
        base = (base_url or os.environ.get("WANDB_BASE_URL") or _CLOUD).rstrip("/")
        if urlsplit(base).scheme not in ("http", "https") or not urlsplit(base).hostname:
            raise ConfigurationError("base_url must be an address such as https://wandb.example.com")
        if urlsplit(base).username or urlsplit(base).password:
            raise ConfigurationError("base_url must not hold a password: pass api_key=")
        self.project = project
        self.base_url = base
        self.create = create
        self._traces = _CLOUD_TRACES if base == _CLOUD else f"{base}/traces"
        self._api_key = api_key
        self._secrets: dict[str, str] = {}
        """The key, and how it is written in a header, with what stands for them in texts."""
        self._http: Any = None
        self._place = Place(project, "")
        self._pending: list[Call] = []
        self._is_again = self._may_be_there = False
        """Some of what is pending may have arrived before: all along, or since an answer was lost."""
        self._rejected = 0

    # Starting

    def start(self, run: Mapping[str, Any]) -> None:
        """Check key and project with the server; three small requests."""
        httpx = require("httpx", extra="weave", why="to send a run to Weave")
        timeout = httpx.Timeout(_SECONDS, connect=_CONNECT_SECONDS)
        self._http = httpx.Client(auth=self._auth(httpx), timeout=timeout, headers={"User-Agent": "artnb"})
        self._pending, self._rejected = [], 0
        self._is_again = self._may_be_there = bool(run.get("again"))
        try:
            self._place = Place("/".join(self._find_project()), str(run["name"]))
            self._check_traces()
        except Unreachable as error:
            self.finish()
            raise ConfigurationError(
                f"{self!r} cannot start: {error}. Go on without it (leave it out of trackers=) and send the "
                "run later with artnb.upload(run, tracker), or check the network."
            ) from None
        except BaseException:
            self.finish()
            raise

    def _auth(self, httpx: Any) -> Any:
        key = (self._api_key or secret(KEY) or "").strip()
        if not key:
            raise ConfigurationError(
                f"{self!r} has no key: {how_to_set(KEY)}, or pass api_key=. Your keys are at "
                "https://wandb.ai/authorize"
            )
        if not key.isascii() or not key.isprintable():
            raise ConfigurationError(f"{self!r}: the key holds characters that no key has. Copy it again.")
        header = base64.b64encode(f"api:{key}".encode()).decode()
        self._secrets = {value: f"[{KEY}]" for value in (key, header) if len(value) >= _SHORTEST_SECRET}
        return httpx.BasicAuth("api", key)

    def _find_project(self) -> tuple[str, str]:
        """Entity and name of the project as the server knows them."""
        viewer = self._graphql(_VIEWER).get("viewer")
        if not viewer:
            raise self._wrong_key()
        entity, _, name = self.project.rpartition("/")
        entity = entity or (viewer.get("defaultEntity") or {}).get("name") or ""
        if not entity:
            raise ConfigurationError(f"{self!r}: this key has no default entity. Say 'entity/{name}'.")
        found = self._graphql(_PROJECT, name=name, entity=entity).get("project")
        if not found and self.create:
            found = (self._graphql(_CREATE, name=name, entity=entity).get("upsertModel") or {}).get("model")
        if not found:
            raise ConfigurationError(
                f"{self!r}: there is no project {name!r} of {entity!r} that this key may see. Check both "
                "names, or pass create=True to make it."
            )
        return entity, str(found.get("name") or name)

    def _graphql(self, query: str, **variables: str) -> dict[str, Any]:
        response = self._post(f"{self.base_url}/graphql", {"query": query, "variables": variables})
        answer = self._json(response)
        if answer.get("errors") and not answer.get("data"):
            messages = [str(e.get("message")) for e in answer["errors"] if isinstance(e, Mapping)]
            raise ConfigurationError(f"{self!r}: {self.base_url} says: {self._clean('; '.join(messages))}")
        return answer.get("data") or {}

    def _check_traces(self) -> None:
        """That the trace server takes this key for this project as well."""
        body = {"project_id": self._place.project, "limit": 1}
        self._json(self._post(f"{self._traces}/calls/query_stats", body))

    # Following

    def rollout(self, stored: Stored) -> None:
        self._pending += rollout_calls(stored, self._place)

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._pending.append(record_call("step", metrics, self._place))

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._pending.append(record_call("evaluation", record, self._place))

    def event(self, event: Mapping[str, Any]) -> None:
        if event.get("kind") == "judged":
            self._pending += score_calls(event, self._place)
        self._pending.append(record_call("event", _without_scores(event), self._place))

    def flush(self) -> None:
        while self._pending:
            size, bodies = 0, []
            for call in self._pending[:_MOST_CALLS]:
                bodies.append((call, self._without_key(json.dumps(call))))
                size += len(bodies[-1][1])
                if size > _MOST_BYTES:
                    break
            self._send(bodies)
            del self._pending[: len(bodies)]
        self._may_be_there = self._is_again

    def _send(self, bodies: Sequence[tuple[Call, str]]) -> None:
        """One request; what the server will not take is found by halves, left out and told of."""
        if self._may_be_there:
            there = self._known([call["id"] for call, _ in bodies])
            bodies = [(call, body) for call, body in bodies if call["id"] not in there]
        if not bodies:
            return
        entity, name = (quote(part, safe="") for part in self._place.project.split("/"))
        content = '{"batch":[' + ",".join(body for _, body in bodies) + "]}"
        response = self._post(f"{self._traces}/v2/{entity}/{name}/calls/complete", content)
        if response.status_code not in (_TOO_LARGE, _INVALID):
            self._json(response)
        elif len(bodies) > 1:
            middle = len(bodies) // 2
            self._send(bodies[:middle])
            self._send(bodies[middle:])
        else:
            self._rejected += 1
            if self._rejected == 1:
                self.tell(
                    f"{self!r}: the server does not take a call of {len(content)} bytes (status "
                    f"{response.status_code}: {self._clean(response.text)}). It and its like are left out."
                )

    def _known(self, ids: Sequence[str]) -> set[str]:
        """Which of these calls the server has."""
        query = {"project_id": self._place.project, "filter": {"call_ids": list(ids)}, "columns": ["id"]}
        response = self._post(f"{self._traces}/calls/stream_query", query)
        if response.status_code // 100 != 2:
            self._json(response)
        return {json.loads(line)["id"] for line in response.text.splitlines() if line.strip()}

    def finish(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None
            if self._rejected > 1:
                self.tell(f"{self!r}: the server did not take {self._rejected} calls of this run.")

    # Requests

    def _post(self, url: str, body: Mapping[str, Any] | str) -> Any:
        httpx = require("httpx", extra="weave", why="to send a run to Weave")
        content = body if isinstance(body, str) else json.dumps(body)
        address = f"{urlsplit(url).scheme}://{urlsplit(url).netloc}"
        try:
            headers = {"Content-Type": "application/json"}
            response = self._http.post(url, content=content.encode(), headers=headers)
        except httpx.HTTPError as error:
            self._may_be_there = True  # it may have arrived, and only its answer not
            reason = self._clean(str(error)) or type(error).__name__
            raise Unreachable(f"no answer from {address} ({reason})") from None
        if response.status_code in _REFUSED:
            raise self._wrong_key()
        if response.status_code in _LATER or response.status_code >= 500:
            self._may_be_there = True
            raise Unreachable(f"{address} answers with status {response.status_code}")
        return response

    def _json(self, response: Any) -> dict[str, Any]:
        """What a successful answer says."""
        path = urlsplit(str(response.url)).path
        if response.status_code // 100 != 2:
            raise ArtnbError(
                f"{self!r}: {path} answers with status {response.status_code}: {self._clean(response.text)}"
            )
        try:
            answer = response.json()
        except ValueError:
            raise ArtnbError(
                f"{self!r}: {path} does not answer in JSON. Is {self.base_url} a W&B server?"
            ) from None
        return answer if isinstance(answer, dict) else {}

    def _wrong_key(self) -> ConfigurationError:
        where = "api_key=" if self._api_key else KEY
        return ConfigurationError(
            f"{self!r}: {self.base_url} refuses the key from {where}, or the key may not write to this "
            "project. Your keys are at https://wandb.ai/authorize"
        )

    def _clean(self, text: str) -> str:
        """A server's words, short and without the key."""
        return " ".join(self._without_key(text).split())[:300]

    def _without_key(self, text: str) -> str:
        for value, name in self._secrets.items():
            text = text.replace(value, name)
        return redact(text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeaveTracker) and self._settings() == other._settings()

    def __hash__(self) -> int:
        return hash(self._settings())

    def _settings(self) -> tuple[Any, ...]:
        return self.project, self.base_url, self.create, self._api_key

    def __repr__(self) -> str:
        return f"WeaveTracker({self.project!r})"


def _without_scores(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("scores", "trajectories")}
