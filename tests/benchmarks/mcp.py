"""How many calls a second does an agent's ToolServer make, and what does it add to the MCP SDK's own client?

The finance environment's server answers, in this process or on stdio; calls are made by so many rollouts at
once. ToolServer and the raw client take turns in one run, and the ratio of their speeds is what counts.

    python tests/benchmarks/mcp.py [--calls 4000] [--at-once 64] [--repeats 5] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, sysconfig.get_path("purelib"))  # before this folder: this file has the name of the SDK
sys.path.insert(0, str(Path(__file__).parents[2]))

import mcp

from artnb import ToolServer
from artnb_environments.finance_mcp.market import market
from artnb_environments.finance_mcp.server import make_server

COMMAND = [sys.executable, "-m", "artnb_environments.finance_mcp.server"]
TOOL = "get_stock_quote"
Call = Callable[[str, dict[str, Any]], Awaitable[Any]]


def days() -> Iterator[str]:
    while True:
        yield from market()["IBM"].days


async def speed(call: Call, calls: int, at_once: int) -> float:
    """Calls a second of ``at_once`` callers that share one connection."""
    asked, left = days(), iter(range(calls))

    async def caller() -> None:
        for _ in left:
            await call(TOOL, {"symbol": "IBM", "date": next(asked)})

    gc.collect()
    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(at_once)))
    return calls / (time.perf_counter() - started)


async def compare(transport: str, calls: int, at_once: int, repeats: int) -> dict[str, Any]:
    """Both clients by turns; the medians, and the median of the ratios."""
    if transport == "stdio":
        command, *arguments = COMMAND
        log = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
        raw = mcp.Client(
            mcp.stdio_client(mcp.StdioServerParameters(command=command, args=arguments), errlog=log)
        )
        server = ToolServer(COMMAND)
    else:
        raw, server = mcp.Client(make_server()), ToolServer(make_server())
    ours, theirs = [], []
    async with raw, server:
        for call in (raw.call_tool, server.call):
            await speed(call, at_once, at_once)  # imports and caches
        for _ in range(repeats):
            theirs.append(await speed(raw.call_tool, calls, at_once))
            ours.append(await speed(server.call, calls, at_once))
    ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
    return {
        "transport": transport,
        "tool_server_per_s": statistics.median(ours),
        "sdk_client_per_s": statistics.median(theirs),
        "ratio": statistics.median(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5, help="the median of so many is reported")
    parser.add_argument("--quick", action="store_true", help="few calls: does it run, not how fast")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    options = parser.parse_args()
    calls, repeats = (200, 1) if options.quick else (options.calls, options.repeats)
    load = os.getloadavg()[0]
    rows = [
        asyncio.run(compare(transport, calls, options.at_once, repeats))
        for transport in ("in_process", "stdio")
    ]
    if not options.json:
        print(f"{calls} calls, {options.at_once} at once, median of {repeats}; load before {load:.2f}")
        for row in rows:
            print(
                f"{row['transport']:12} ToolServer {row['tool_server_per_s']:8,.0f} calls/s, "
                f"SDK client {row['sdk_client_per_s']:8,.0f}, ratio {row['ratio']:.2f}"
            )
    print(
        json.dumps(
            {"benchmark": "mcp", "calls": calls, "at_once": options.at_once, "load": load, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
