"""How does an engine share one compute thread? It takes a step, then queues behind whoever waits.

Requests and commands come from any thread through an inbox; only the compute thread looks at the
engine's state. A command runs when no request does, and before those that wait.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import Any, Generic, Protocol, TypeVar

from artnb.backends.base import SampleRequest
from artnb.errors import PromptTooLong, RequestError

log = logging.getLogger(__name__)


class Queued(Protocol):
    """A request that waits, as the loop sees it."""

    request: SampleRequest
    future: Future[Any]
    policy: str


Request = TypeVar("Request", bound=Queued)


class EngineLoop(ABC, Generic[Request]):
    """The part of an engine that is about threads, and about whose turn it is.

    compute: an executor with one thread. provider: returns what ``load`` takes for a policy, and the
    policy's version; called when requests ask for another policy than the one served.
    """

    max_context: int
    """Longest prompt plus completion, in tokens."""

    def __init__(self, compute: Executor, provider: Callable[[str], tuple[Any, int]]) -> None:
        self._compute = compute
        self.provider = provider
        self.served, self.version = "current", 0
        self._waiting: deque[Request] = deque()
        self._inbox: deque[Callable[[], None]] = deque()
        self._commands: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = threading.Lock()
        self._scheduled = False
        self._closed = False

    # ---- what an engine adds, on the compute thread -----------------------------------------

    @abstractmethod
    def load(self, weights: Any, policy: str, version: int) -> bool:
        """Serve a policy; True when that changed what is served."""

    @abstractmethod
    def _step(self) -> None:
        """Begin, continue and finish requests; obey a command when none runs."""

    @abstractmethod
    def _futures(self) -> Iterable[Future[Any]]:
        """Of all running and waiting requests."""

    @abstractmethod
    def _recover(self, error: Exception) -> None:
        """A step failed: fail the running requests and leave the engine usable."""

    @abstractmethod
    def _release(self) -> None:
        """Forget every request and free what the engine holds; nothing follows."""

    # ---- called from any thread -------------------------------------------------------------

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function on the compute thread once no request is running, before any waiting one."""
        future: Future[Any] = Future()
        self._post(lambda: self._commands.append((future, function)))
        return future

    def close(self) -> None:
        """Take no more requests, cancel the others, free memory. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._scheduled:
                return  # the compute thread does the rest at the end of its step
        self._compute.submit(self._shut_down)

    def _post(self, message: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise RequestError("the engine is closed; run the cell that makes the Model again")
            self._inbox.append(message)
            if not self._scheduled:
                self._scheduled = True
                self._compute.submit(self._work)

    def _check(self, request: SampleRequest) -> None:
        """Refuse what no engine can answer. Raises RequestError, PromptTooLong."""
        prompt, asked = len(request.prompt_ids), request.sampling.max_tokens
        if prompt == 0:
            raise RequestError("the prompt is empty: there is nothing to continue")
        if prompt + asked > self.max_context:
            raise PromptTooLong(
                f"the prompt has {prompt} tokens and {asked} more are asked for, "
                f"but this engine's context holds {self.max_context}"
            )

    # ---- on the compute thread --------------------------------------------------------------

    def _may_admit(self, *, is_idle: bool) -> bool:
        """Forget who was cancelled; an idle engine for whose policy nobody waits turns to the first one's.

        False when nobody waits, or when that policy cannot be served: then its requests have failed.
        """
        self._waiting = deque(r for r in self._waiting if not r.future.cancelled())
        if not self._waiting:
            return False
        if is_idle and all(r.policy != self.served for r in self._waiting):
            policy = self._waiting[0].policy
            try:
                weights, version = self.provider(policy)
                self.load(weights, policy, version)
            except Exception as error:
                for refused in [r for r in self._waiting if r.policy == policy]:
                    self._waiting.remove(refused)
                    fail(refused.future, RequestError(f"policy {policy!r} cannot be served: {error}"), error)
                return False
        return True

    def _served_waiting(self) -> list[Request]:
        """Who waits for the policy served, in order."""
        return [r for r in self._waiting if r.policy == self.served]

    def _leave_queue(self, chosen: Iterable[Request]) -> None:
        taken = {id(r) for r in chosen}
        self._waiting = deque(r for r in self._waiting if id(r) not in taken)

    def _work(self) -> None:
        """One step; then to the end of the compute thread's queue, so that others get their turn."""
        self._receive()
        try:
            if not self._closed:
                self._step()
        except Exception as error:
            log.exception("the engine failed a step; its running requests fail")
            self._try_to_recover(error)
        with self._lock:
            has_work = bool(self._inbox or self._commands) or any(True for _ in self._futures())
            self._scheduled = has_work and not self._closed
            if self._scheduled:
                self._compute.submit(self._work)
        if self._closed:
            self._shut_down()

    def _try_to_recover(self, error: Exception) -> None:
        try:
            self._recover(error)
        except Exception:
            log.exception("the engine cannot go on; it is closed")
            with self._lock:
                self._closed = True

    def _receive(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _shut_down(self) -> None:
        """After close, when no step is under way nor will be."""
        self._receive()
        futures = [*self._futures(), *(future for future, _ in self._commands)]
        self._commands.clear()
        self._release()
        for future in futures:
            future.cancel()

    def _obey(self) -> None:
        """Run the first command."""
        future, function = self._commands.popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)


def fail(future: Future[Any], error: Exception, cause: Exception | None = None) -> None:
    """Give a request its error, unless it was cancelled meanwhile."""
    error.__cause__ = cause
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
