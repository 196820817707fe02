"""What does a call through the in-process client cost, beside the same openai client on a mock transport?

Both serve many concurrent calls from an engine that answers at once with one token. Figures are CPU
time of this process for each call, and how late a ticking task wakes meanwhile (event-loop lag).

    python tests/benchmarks/client.py [--calls 2000] [--repeats 5] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import openai

from artnb.backends.fake import FakeBackend
from artnb.client import async_client
from artnb.completions import ChatApp
from artnb.recording import recording
from artnb.rendering import make_renderer

SYSTEM = "You play a game on a small board. Answer with one word: up, down, left or right. " * 4
CANNED = {
    "id": "chatcmpl-0",
    "object": "chat.completion",
    "created": 0,
    "model": "fake",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "u"},
            "finish_reason": "length",
            "logprobs": None,
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
Call = Callable[[int], Awaitable[Any]]


def mock_client() -> openai.AsyncOpenAI:
    """The same client on a transport that returns a canned response after one turn of the loop."""
    parents = openai.DefaultAsyncHttpxClient.__mro__
    package = next(c for c in parents if c.__name__ == "AsyncClient").__module__.split(".")[0]
    httpx = importlib.import_module(package)
    content = json.dumps(CANNED).encode()

    class Mock(httpx.AsyncBaseTransport):  # type: ignore[name-defined]
        async def handle_async_request(self, request: Any) -> Any:
            await request.aread()
            await asyncio.sleep(0)
            return httpx.Response(
                200, headers={"content-type": "application/json"}, content=content, request=request
            )

    return openai.AsyncOpenAI(
        api_key="mock",
        base_url="http://mock.invalid/v1",
        max_retries=0,
        timeout=None,
        http_client=httpx.AsyncClient(transport=Mock(), timeout=None),
    )


def first_turn(number: int) -> list[dict[str, Any]]:
    """Eight calls share a prompt, as the members of a group do."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"board {number // 8}: 2 4 8 2 / 0 0 2 4 / 0 0 0 2 / 0 0 0 0"},
    ]


def single(client: openai.AsyncOpenAI) -> Call:
    async def call(number: int) -> None:
        await client.chat.completions.create(model="fake", messages=first_turn(number), max_tokens=1)  # type: ignore[arg-type]

    return call


def four_turns(client: openai.AsyncOpenAI) -> Call:
    async def call(number: int) -> None:
        with recording():
            messages = first_turn(number)
            for turn in range(4):
                answer = await client.chat.completions.create(model="fake", messages=messages, max_tokens=1)  # type: ignore[arg-type]
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                messages.append({"role": "user", "content": f"turn {turn}: 2 4 8 2 / 0 0 2 4"})

    return call


async def measure(call: Call, calls: int) -> tuple[float, list[float]]:
    """CPU seconds, and by how much a 1 ms tick was late (s)."""
    lags: list[float] = []

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - before - 0.001)

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    lags.clear()
    gc.collect()
    started = time.process_time()
    await asyncio.gather(*(call(number) for number in range(calls)))
    used = time.process_time() - started
    await asyncio.sleep(0.002)
    ticker.cancel()
    await asyncio.gather(ticker, return_exceptions=True)
    return used, lags


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def compare(calls: int, repeats: int) -> list[dict[str, Any]]:
    """Alternate the clients, so that a busy moment of the machine touches all of them."""
    backend = FakeBackend(script=["u"], max_context=16384)
    app = ChatApp(backend, make_renderer(backend.tokenizer), model_name="fake")
    kinds: list[tuple[str, Call, int]] = [
        ("mock transport, one turn", single(mock_client()), 1),
        ("artnb in process, one turn", single(async_client(app)), 1),
        ("mock transport, four turns", four_turns(mock_client()), 4),
        ("artnb in process, four turns", four_turns(async_client(app)), 4),
    ]
    cpu: dict[str, list[float]] = {name: [] for name, *_ in kinds}
    lags: dict[str, list[float]] = {name: [] for name, *_ in kinds}
    for _, call, _ in kinds:
        await measure(call, 16)  # imports and caches
    for _ in range(repeats):
        for name, call, turns in kinds:
            backend.requests.clear()
            used, late = await measure(call, calls // turns)
            cpu[name].append(used / (calls // turns * turns))
            lags[name] += late
    return [
        {
            "name": name,
            "cpu_ms": 1e3 * statistics.median(cpu[name]),
            "lag_p50_ms": 1e3 * quantile(lags[name], 0.5),
            "lag_p99_ms": 1e3 * quantile(lags[name], 0.99),
            "lag_max_ms": 1e3 * max(lags[name]),
        }
        for name, *_ in kinds
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    options = parser.parse_args()
    rows = asyncio.run(compare(options.calls, options.repeats))
    extra = [rows[1]["cpu_ms"] - rows[0]["cpu_ms"], rows[3]["cpu_ms"] - rows[2]["cpu_ms"]]
    if not options.json:
        print(f"{options.calls} concurrent calls, median of {options.repeats}; openai {openai.__version__}")
        print(f"{'':32}{'CPU ms/call':>12}{'lag p50':>10}{'p99':>10}{'max ms':>10}")
        for row in rows:
            figures = (row["lag_p50_ms"], row["lag_p99_ms"], row["lag_max_ms"])
            print(f"{row['name']:32}{row['cpu_ms']:12.3f}" + "".join(f"{x:10.1f}" for x in figures))
        print(f"CPU above the mock: {extra[0]:.3f} ms (one turn), {extra[1]:.3f} ms (four turns) a call")
    print(
        json.dumps(
            {
                "benchmark": "client",
                "calls": options.calls,
                "openai": openai.__version__,
                "rows": rows,
                "extra_cpu_ms_one_turn": extra[0],
                "extra_cpu_ms_four_turns": extra[1],
            }
        )
    )


if __name__ == "__main__":
    main()
