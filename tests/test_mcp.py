"""An agent calls tools of real MCP servers - in this process, on stdio, over HTTP on loopback - and what
happens when one fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.server.mcpserver.exceptions import ToolError
from scripted import ScriptedModel

import artnb as nb
from artnb import ToolServer, ToolServerError
from artnb.mcp_connection import Connection
from artnb.mcp_result import Pages, ToolResult, definitions_of

SHOP = [sys.executable, "-m", "artnb_environments.shop_server"]
ODD = """
import asyncio, os, sys, time
from mcp.server import MCPServer
server = MCPServer("odd")

@server.tool()
def slow() -> str:
    time.sleep(30)
    return "late"

@server.tool()
async def hang() -> str:
    time.sleep(60)
    return "late"

@server.tool()
def die() -> str:
    sys.stderr.write("out of goods\\n")
    os._exit(3)

@server.tool()
def secrets() -> str:
    return " ".join(os.environ)

@server.tool()
def pid() -> str:
    return str(os.getpid())

server.run()
"""
PNG = bytes.fromhex("89504e470d0a1a0a") + b"not much of a picture"


@pytest.fixture
def odd(tmp_path: Path) -> list[str]:
    path = tmp_path / "odd.py"
    path.write_text(ODD)
    return [sys.executable, str(path)]


def zoo() -> MCPServer:
    """A server of this process with a tool for each kind of result."""
    server = MCPServer("zoo", instructions="Feed nobody.")

    @server.tool()
    async def count(title: str, animals: int = 2) -> str:
        return f"{animals} {title}"

    @server.tool()
    def fail(readable: bool) -> str:
        raise ToolError("no tigers today") if readable else ValueError("the vault's code is 1234")

    @server.tool(structured_output=False)
    def photo() -> list[Any]:
        return ["a tiger", Image(data=PNG, format="png"), Image(data=b"<svg/>", format="svg+xml")]

    @server.tool(name="lions.list")
    def lions(lines: int) -> str:
        return "\n".join(f"lion {n:04}" for n in range(lines))

    @server.tool()
    def sleep(seconds: float) -> str:
        time.sleep(seconds)
        return "rested"

    return server


def children() -> set[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in listed}


async def played(server: ToolServer, says: list[Any], task: str = "count") -> tuple[Any, ScriptedModel]:
    model = ScriptedModel(lambda request: says[sum(m["role"] == "assistant" for m in request["messages"])])
    scenario = nb.Scenario("one", task={"task": task})
    groups = await nb.gather(server.rollout, [scenario], model=model, group_size=1, progress=False)
    (trajectory,) = groups.trajectories
    assert trajectory.error is None, trajectory.error
    return trajectory, model


# ---- on stdio -----------------------------------------------------------------------------------


async def test_tools_are_listed_and_called_and_the_process_ends():
    before = children()
    async with ToolServer(SHOP) as server:
        (started,) = children() - before
        names = [tool["function"]["name"] for tool in server.tools]
        assert names == ["price", "stock", "read_more"]
        assert server.tools[0]["function"]["parameters"]["required"] == ["item"]
        assert await server.call("price", {"item": "rope"}) == await server.call("price", {"item": "rope"})
        assert (await server.call("price", {"item": "moon"})).startswith("Error")
        assert (await server.call("fly")).startswith("Error")
        many = await asyncio.gather(*(server.call("stock", {"item": "rope"}) for _ in range(50)))
        assert len(set(many)) == 1
    assert not Path(f"/proc/{started}").exists()
    with pytest.raises(ToolServerError, match="not running"):
        await server.call("price", {"item": "rope"})


async def test_one_cell_opens_it_and_another_closes_it():
    server, before = ToolServer(SHOP), children()
    cells = [asyncio.create_task(server.open()) for _ in range(3)]  # a cell is a task of its own
    assert await asyncio.gather(*cells) == [server] * 3
    assert len(children() - before) == 1, "running the cell again starts no second one"
    assert "rope" in await asyncio.create_task(server.call("price", {"item": "rope"}))
    await asyncio.create_task(server.close())
    await server.close()


async def test_a_server_that_does_not_start_says_why_and_where_its_log_is(tmp_path, monkeypatch):
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no database')")
    log = tmp_path / "logs" / "server.log"
    with pytest.raises(ToolServerError, match=r"broken\.py did not start.*no database.*server\.log"):
        await ToolServer([sys.executable, str(broken)], log=log).open()
    assert "no database" in log.read_text()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "logs"))
    with pytest.raises(ToolServerError, match="did not start"):
        await ToolServer(["/no/such/program"]).open()
    assert [one.name for one in log.parent.iterdir()] == ["server.log"], "nothing was said"


async def test_a_server_that_dies_fails_the_calls_under_way_and_the_next_call_starts_another(odd):
    async with ToolServer(odd) as server:
        first = await server.call("pid")
        under_way = [server.call("slow"), server.call("die"), server.call("slow")]
        failed = await asyncio.gather(*under_way, return_exceptions=True)
        assert [type(one) for one in failed] == [ToolServerError] * 3
        assert "out of goods" in str(failed[1]) and "artnb-mcp-" in str(failed[1])
        pids = await asyncio.gather(*(server.call("pid") for _ in range(4)))
        assert len(set(pids)) == 1 and pids[0] != first
        assert len(server.crashes) == 1 and "Connection closed" in server.crashes[0]
    Path(str(failed[1]).rsplit("all of it: ", 1)[1].rstrip(")")).unlink()


async def test_it_is_not_started_again_for_ever(odd, tmp_path):
    async with ToolServer(odd, restarts=1, log=tmp_path / "log") as server:
        for _ in range(2):
            with pytest.raises(ToolServerError, match="'die'"):
                await server.call("die")
        with pytest.raises(ToolServerError, match=r"2 times in a row.*not started again.*server\.open"):
            await server.call("pid")
        await server.open()
        for _ in range(2):  # a call that is answered in between starts the count anew
            assert await server.call("pid")
            with pytest.raises(ToolServerError, match="'die'"):
                await server.call("die")
        assert await server.call("pid")
    assert len(server.crashes) == 4


async def test_a_slow_call_is_given_up_and_a_server_that_hangs_is_ended(odd, tmp_path, monkeypatch):
    async with ToolServer(odd, log=tmp_path / "log") as server:
        first = await server.call("pid")
        server.timeout = 0.3
        with pytest.raises(ToolServerError, match=r"did not answer within 0\.3 s"):
            await server.call("slow")
        server.timeout = 20.0
        assert await server.call("pid") == first, "it was only slow"
        server.timeout = 0.3
        monkeypatch.setattr("artnb.mcp_connection._SECONDS_TO_ANSWER", 0.3)
        with pytest.raises(ToolServerError, match=r"did not answer within 0\.3 s"):
            await server.call("hang")
        server.timeout = 20.0
        assert await server.call("pid") != first
        assert not Path(f"/proc/{first}").exists()
        assert len(server.crashes) == 1 and "nor was anything else answered" in server.crashes[0]


async def test_it_inherits_no_keys_and_leaves_no_log_behind(odd, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    async with ToolServer(odd, env={"SHOP": "1"}) as server:
        names = (await server.call("secrets")).split()
        assert len(list((tmp_path / "temporary").iterdir())) == 1
    assert "OPENAI_API_KEY" not in names and "SHOP" in names
    assert not list((tmp_path / "temporary").iterdir())


async def test_a_server_that_ends_fails_its_rollouts_as_data(odd, tmp_path):
    model = ScriptedModel(lambda request: [("die", "{}")])
    async with ToolServer(odd, log=tmp_path / "log") as server:
        groups = await nb.gather(
            server.rollout,
            [nb.Scenario("x", task={"task": "die"})],
            model=model,
            group_size=2,
            max_failures=None,
            progress=False,
        )
    assert [t.error.type for t in groups.trajectories] == ["ToolServerError"] * 2


# ---- over HTTP ----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def on_loopback(server: MCPServer, port: int = 0) -> AsyncIterator[tuple[str, list[dict[str, str]]]]:
    """The URL of a server that answers HTTP in a thread, and the headers of the requests it got."""
    app, headers = server.streamable_http_app(), list[dict[str, str]]()

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        await app(scope, receive, send)

    listening = socket.create_server(("127.0.0.1", port))
    web = uvicorn.Server(uvicorn.Config(noted, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not web.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", headers
    finally:
        web.should_exit = True
        await asyncio.to_thread(thread.join, 10)
        listening.close()


async def test_a_server_at_a_url_is_reached_again_after_it_was_away():
    server = ToolServer("http://127.0.0.1:1/mcp?apikey=canary", timeout=20)
    with pytest.raises(ToolServerError, match="did not start") as caught:
        await server.open()
    assert "canary" not in str(caught.value) and "canary" not in repr(server)
    async with on_loopback(zoo()) as (url, headers):
        server = ToolServer(url, headers={"X-Key": "mine"}, timeout=20)
        await server.open()
        many = await asyncio.gather(*(server.call("count", {"title": str(n)}) for n in range(20)))
        assert many == [f"2 {n}" for n in range(20)]
        assert {one.get("x-key") for one in headers} == {"mine"}
    with pytest.raises(ToolServerError, match=r"127\.0\.0\.1"):
        await server.call("count", {"title": "cats"})
    async with on_loopback(zoo(), int(url.split(":")[2].split("/")[0])):
        assert await server.call("count", {"title": "cats"}) == "2 cats"
        await server.close()


async def test_errors_do_not_repeat_the_keys_in_a_url():
    url = "https://me:canary1@example.invalid/mcp?apikey=canary2"
    connection = Connection(url, env=None, headers=None, log=None)
    cause = connection.cause_of(ExceptionGroup("several", [OSError(f"404 for url {url}")]))
    assert cause.startswith("OSError: 404 for url https://me:…@example.invalid/mcp?…")
    assert "canary" not in cause + connection.name


# ---- in this process ----------------------------------------------------------------------------


async def test_schemas_become_definitions_that_the_chat_api_takes():
    async with ToolServer(zoo(), page=None) as server:
        functions = {tool["function"]["name"]: tool["function"] for tool in server.tools}
        assert list(functions) == ["count", "fail", "photo", "lions_list", "sleep"]
        assert functions["count"]["parameters"] == {
            "type": "object",
            "properties": {"title": {"type": "string"}, "animals": {"type": "integer", "default": 2}},
            "required": ["title"],
        }
        assert functions["photo"]["parameters"]["properties"] == {}
        assert server.instructions == "Feed nobody."
        assert await server.call("lions_list", {"lines": 2}) == "lion 0000\nlion 0001"


def test_names_that_the_chat_api_does_not_take_stay_apart():
    class Tool:
        description, input_schema = None, {"type": "object"}

        def __init__(self, name: str) -> None:
            self.name = name

    found = definitions_of([Tool("a.b"), Tool("a/b"), Tool("x" * 90), Tool("é")])
    assert [(name, original) for name, (original, _) in found.items()] == [
        ("a_b", "a.b"),
        ("a_b_2", "a/b"),
        ("x" * 64, "x" * 90),
        ("_", "é"),
    ]


async def test_an_agent_reads_why_a_tool_failed_but_not_what_its_author_kept_back():
    async with ToolServer(zoo()) as server:
        assert "no tigers today" in await server.call("fail", {"readable": True})
        hidden = await server.result("fail", {"readable": False})
        assert hidden.is_error and hidden.text.startswith("Error") and "1234" not in hidden.text
        wrong = await server.result("count", {"title": 7, "animals": "many"})
        assert wrong.is_error and "animals" in wrong.text
        for arguments in ("{", "[]", '{"title": "\\ud800"}', '{"title": NaN}', "[" * 100_000, None):
            assert (await server.answer("count", arguments)).text.startswith("Error"), arguments
        assert "there is no tool" in (await server.answer("x" * 5000, "{}")).text


async def test_what_a_server_of_this_process_logs_goes_to_its_file(tmp_path, caplog, capfd):
    log = tmp_path / "server.log"
    async with ToolServer(zoo(), log=log) as server:
        await server.call("fail", {"readable": False})
    assert "1234" in log.read_text(), "its author finds here what the agent is not told"
    assert "1234" not in caplog.text and "1234" not in "".join(capfd.readouterr())


async def test_images_are_kept_and_shown_to_models_that_see():
    says = [[("photo", "{}")], "A tiger."]
    async with ToolServer(zoo()) as server:
        trajectory, model = await played(server, says)
        seeing = ToolServer(server.server, images=True)
        async with seeing:
            _, seer = await played(seeing, says)
    (told,) = (m for m in trajectory.messages() if m["role"] == "tool")
    assert [part["type"] for part in told["content"]] == ["text", "image_url"]
    assert (
        told["content"][0]["text"]
        == "a tiger\n[image/png, 30 bytes]\n[image of type image/svg+xml: left out]"
    )
    assert told["content"][1]["image_url"]["url"].startswith("data:image/png;base64,iVBORw0K")
    assert model.requests[1]["messages"][-1]["content"] == told["content"][0]["text"]
    assert seer.requests[1]["messages"][-1]["content"] == told["content"]
    assert nb.Trajectory.from_json(trajectory.to_json()) == trajectory


async def test_a_long_result_is_read_page_by_page():
    async with ToolServer(zoo(), page=1000) as server:
        whole = "\n".join(f"lion {n:04}" for n in range(1000))
        page, text, pages = await server.call("lions_list", {"lines": 1000}), "", 1
        name = page.split('"result_id": "')[1].split('"')[0]
        while True:
            shown, note = page.rsplit("\n", 1)
            assert len(shown) <= 1000 and shown.startswith("lion"), "pages end where lines do"
            text += shown
            if "for the next call read_more" not in note:
                break
            pages += 1
            page = await server.call("read_more", {"result_id": name, "page": pages})
        assert text == whole and note == f"[page {pages} of {pages}]"
        assert "page must be 1 to" in await server.call("read_more", {"result_id": name, "page": 99})
        assert "page must be 1 to" in await server.call("read_more", {"result_id": name, "page": True})
        assert "no such result" in await server.call("read_more", {"result_id": ["x"]})
        assert name in await server.call("lions_list", {"lines": 1000}), "the same text has the same id"


def test_the_oldest_pages_are_forgotten(monkeypatch):
    monkeypatch.setattr("artnb.mcp_result._MOST_KEPT", 2500)
    pages = Pages(500)
    names = [pages.first(ToolResult(str(n) * 1000)).text.split('id": "')[1][:8] for n in range(3)]
    assert [pages.read({"result_id": name}).is_error for name in names] == [True, False, False]


async def test_a_tool_of_this_process_that_blocks_its_thread_is_given_up_too():
    async with ToolServer(zoo(), timeout=0.2) as server:
        started = time.monotonic()
        with pytest.raises(ToolServerError, match=r"within 0\.2 s"):
            await server.call("sleep", {"seconds": 1.5})
        assert time.monotonic() - started < 1.2
        assert await server.call("count", {"title": "cats"}) == "2 cats"
        assert not server.crashes


async def test_many_rollouts_share_one_server():
    model = ScriptedModel(
        lambda request: (
            "Done." if request["messages"][-1]["role"] == "tool" else [("count", '{"title": "x"}')] * 4
        )
    )
    scenarios = [nb.Scenario(str(n), task={"task": "count"}) for n in range(25)]
    async with ToolServer(zoo()) as server:
        groups = await nb.gather(server.rollout, scenarios, model=model, group_size=4, progress=False)
    assert [t.metrics["tool_calls"] for t in groups.trajectories] == [4] * 100
    assert not [t.error for t in groups.trajectories if t.error]


def test_it_belongs_to_the_loop_it_was_opened_in():
    server = ToolServer(zoo())

    async def use() -> str:
        await asyncio.gather(server.open(), server.open())
        with pytest.raises(ToolServerError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, server.call("count", {"title": "cats"}))
        return await server.call("count", {"title": "cats"})

    assert [asyncio.run(use()), asyncio.run(use())] == ["2 cats"] * 2


@pytest.mark.parametrize("given", [[], "", "python -m shop", [1], 7, None])
def test_what_is_no_server_is_refused(given):
    with pytest.raises(nb.ConfigurationError):
        ToolServer(given)


@pytest.mark.parametrize(
    "options",
    [{"headers": {"a": "b"}}, {"calls": "both"}, {"page": 10}, {"server": "http://x", "env": {"a": "b"}}],
)
def test_options_that_do_not_fit_are_refused(options):
    with pytest.raises(nb.ConfigurationError):
        ToolServer(**{"server": SHOP} | options)


async def test_an_agent_plays_with_the_tools():
    says = [
        [("count", '{"title": "cats"}')],
        [("fly", "{}")],
        [("count", "moon")],
        [("count", "[]")],
        "There are two.",
    ]
    async with ToolServer(zoo()) as server:
        trajectory, model = await played(server, says)
        async with ToolServer(zoo(), max_turns=2) as short:
            cut, _ = await played(short, says)
    assert trajectory.metrics == {"tool_calls": 4, "tool_errors": 3, "answered": 1}
    told = [m["content"] for m in trajectory.messages() if m["role"] == "tool"]
    assert told[0] == "2 cats" and "no tool 'fly'" in told[1]
    assert "no JSON" in told[2] and "JSON object" in told[3]
    assert model.requests[0]["tools"] == server.tools
    assert cut.metrics["answered"] == 0 and len(cut.turns) == 2
