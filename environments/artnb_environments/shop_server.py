"""Which tools does the bundled MCP server offer? A shop's prices and stock, over stdio.

    python -m artnb_environments.shop_server

Every start has the same goods, so that a judge who asks the server knows what is true.
"""

from __future__ import annotations

import random

WORDS = (
    "apple bread milk rice tea salt pear soap egg cake corn fish lamp book pen cup hat shoe door sock chair "
    "spoon candle carrot plate onion brush honey bag clock grape pot lemon table cheese glove butter key "
    "phone bottle melon rope knife plum kite ring drum sofa"
)
_draw = random.Random("artnb shop")
GOODS = {word: (_draw.randrange(10, 100), _draw.randrange(10, 100)) for word in WORDS.split()}
"""Item -> (price, pieces in stock)."""


def price(item: str) -> str:
    """The price of an item in this shop."""
    return f"{item}: {_find(item)[0]}"


def stock(item: str) -> str:
    """How many pieces of an item are in stock."""
    return f"{item}: {_find(item)[1]} left"


def _find(item: str) -> tuple[int, int]:
    if item not in GOODS:
        raise ValueError(f"the shop has no {item!r}; it has {', '.join(list(GOODS)[:8])} and more")
    return GOODS[item]


def main() -> None:
    """Serve until stdin ends."""
    from mcp.server import MCPServer

    server = MCPServer("shop")
    server.tool()(price)
    server.tool()(stock)
    server.run()


if __name__ == "__main__":
    main()
