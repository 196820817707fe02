"""Which MCP server do the market's tools stand behind? One on stdio, or one of this process.

python -m artnb_environments.finance_mcp.server
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from artnb import MissingDependency
from artnb_environments.finance_mcp.market import MarketError
from artnb_environments.finance_mcp.tools import INSTRUCTIONS, TOOLS


def make_server() -> Any:
    """An ``MCPServer`` with the seven tools. Raises MissingDependency."""
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError as error:
        raise MissingDependency(
            'mcp is needed to play finance_mcp. Install it with: pip install "artnb[mcp]"'
        ) from error

    def served(tool: Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(tool)
        async def answer(**arguments: Any) -> str:  # a coroutine: a thread for each call would be slower
            try:
                return tool(**arguments)
            except MarketError as error:
                raise ToolError(str(error)) from error

        return answer

    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    server = MCPServer("finance", instructions=INSTRUCTIONS)
    root.handlers[:] = handlers  # the SDK sets up the whole process's log, which is a notebook's here
    root.setLevel(level)
    for tool in TOOLS.values():
        server.tool(structured_output=False)(served(tool))
    return server


if __name__ == "__main__":
    make_server().run()
