"""An agent calls tools of a real MCP server, started here, over stdio; and what happens when it fails."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from scripted import ScriptedModel

import artnb as nb
from artnb import ToolServer, ToolServerError

SHOP = [sys.executable, "-m", "artnb_environments.shop_server"]
ODD = """
import asyncio, os, sys, time
from mcp.server import MCPServer
server = MCPServer("odd")

@server.tool()
def big() -> str:
    return "x" * 30_000

@server.tool()
def slow() -> str:
    time.sleep(30)
    return "late"

@server.tool()
def die() -> str:
    sys.stderr.write("out of goods\\n")
    os._exit(3)

@server.tool()
def secrets() -> str:
    return " ".join(os.environ)

server.run()
"""


@pytest.fixture
def odd(tmp_path: Path) -> list[str]:
    path = tmp_path / "odd.py"
    path.write_text(ODD)
    return [sys.executable, str(path)]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_tools_are_listed_and_called_and_the_process_ends():
    before = children()
    async with ToolServer(SHOP) as server:
        (started,) = children() - before
        names = [tool["function"]["name"] for tool in server.tools]
        assert names == ["price", "stock"]
        assert server.tools[0]["function"]["parameters"]["required"] == ["item"]
        assert await server.call("price", {"item": "rope"}) == await server.call("price", {"item": "rope"})
        assert (await server.call("price", {"item": "moon"})).startswith("Error")
        assert (await server.call("fly")).startswith("Error")
        many = await asyncio.gather(*(server.call("stock", {"item": "rope"}) for _ in range(50)))
        assert len(set(many)) == 1
    assert not alive(started)
    with pytest.raises(ToolServerError, match="not running"):
        await server.call("price", {"item": "rope"})


def children() -> set[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in listed}


async def test_one_cell_opens_it_and_another_closes_it():
    server = ToolServer(SHOP)
    await asyncio.create_task(server.open())  # a cell is a task of its own
    assert await asyncio.create_task(server.open()) is server, "running the cell again starts no second one"
    assert "rope" in await asyncio.create_task(server.call("price", {"item": "rope"}))
    await asyncio.create_task(server.close())
    await server.close()


async def test_a_server_that_does_not_start_says_why(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no database')")
    with pytest.raises(ToolServerError, match=r"broken\.py did not start.*no database"):
        await ToolServer([sys.executable, str(broken)]).open()
    with pytest.raises(ToolServerError, match="did not start"):
        await ToolServer(["/no/such/program"]).open()


async def test_a_server_that_dies_or_hangs_is_an_error_and_the_next_one_works(odd):
    async with ToolServer(odd, timeout=1.0) as server:
        with pytest.raises(ToolServerError, match="did not answer within 1 s"):
            await server.call("slow")
    async with ToolServer(odd, timeout=10.0) as server:
        with pytest.raises(ToolServerError, match="die"):
            await server.call("die")
    async with ToolServer(odd) as server:
        assert "characters left out" in await server.call("big")


async def test_it_inherits_no_keys(odd, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary")
    async with ToolServer(odd, env={"SHOP": "1"}) as server:
        names = (await server.call("secrets")).split()
    assert "OPENAI_API_KEY" not in names and "SHOP" in names


@pytest.mark.parametrize("given", [[], "", "python -m shop", [1]])
def test_what_is_no_server_is_refused(given):
    with pytest.raises(nb.ConfigurationError):
        ToolServer(given)


async def test_an_agent_plays_with_the_tools():
    says = [
        [("price", '{"item": "rope"}')],
        [("fly", "{}")],
        [("price", "moon")],
        [("stock", "[]")],
        "It is dear.",
    ]
    model = ScriptedModel(lambda request: says[sum(m["role"] == "assistant" for m in request["messages"])])
    scenario = nb.Scenario("rope", task={"task": "How much is the rope?"})
    async with ToolServer(SHOP) as server:
        groups = await nb.gather(server.rollout, [scenario], model=model, group_size=1, progress=False)
        short = ToolServer(SHOP, max_turns=2)
        async with short:
            cut = await nb.gather(short.rollout, [scenario], model=model, group_size=1, progress=False)
    (trajectory,) = groups.trajectories
    assert trajectory.error is None, trajectory.error
    assert trajectory.metrics == {"tool_calls": 4, "tool_errors": 3, "answered": 1}
    told = [m["content"] for m in trajectory.messages() if m["role"] == "tool"]
    assert told[0].startswith("rope: ") and "no tool 'fly'" in told[1]
    assert "no JSON" in told[2] and "JSON object" in told[3]
    assert model.requests[0]["tools"] == server.tools
    assert cut.trajectories[0].metrics["answered"] == 0 and len(cut.trajectories[0].turns) == 2


async def test_a_server_that_ends_fails_its_rollouts_as_data(odd):
    model = ScriptedModel(lambda request: [("die", "{}")])
    async with ToolServer(odd) as server:
        groups = await nb.gather(
            server.rollout,
            [nb.Scenario("x", task={"task": "die"})],
            model=model,
            group_size=2,
            max_failures=None,
            progress=False,
        )
    assert [t.error.type for t in groups.trajectories] == ["ToolServerError"] * 2
