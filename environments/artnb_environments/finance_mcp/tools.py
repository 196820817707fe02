"""What can one ask the market? Seven tools as functions, without any server.

A function's name, arguments and first paragraph are what an agent reads of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from artnb_environments.finance_mcp.market import (
    FIRST_DAY,
    NAMES,
    SPLITS,
    TODAY,
    YEAR,
    MarketError,
    market,
    mean_of_last,
    relative_strengths,
    stock,
)

INSTRUCTIONS = (
    f"Daily prices of US stocks from {FIRST_DAY} to {TODAY}. Today is {TODAY}, the data's last day; days are "
    "written YYYY-MM-DD. All prices and volumes are adjusted for splits, not for dividends. There are no "
    "prices of weekends and holidays, nor of days before a stock was listed."
)
_COMPACT = 100
_LONGEST_PERIOD = 1000


def get_stock_quote(symbol: str, date: str | None = None) -> str:
    """Close, open, high, low and volume of a stock on one trading day, and the change since the day before.

    date: YYYY-MM-DD; today when left out.
    """
    found = stock(symbol)
    place = found.at(date or TODAY)
    close = found.close[place]
    text = (
        f"{found.symbol} {found.days[place]}: close {_price(close)}, open {_price(found.open[place])}, high "
        f"{_price(found.high[place])}, low {_price(found.low[place])}, volume {found.volume[place]}"
    )
    if place == 0:
        return text
    before = found.close[place - 1]
    change = f"change {_price(close - before)} ({100 * (close / before - 1):.2f} %)"
    return f"{text}, previous close {_price(before)}, {change}"


def get_time_series_daily(
    symbol: str,
    start: str | None = None,
    end: str | None = None,
    outputsize: Literal["compact", "full"] = "compact",
) -> str:
    """Open, high, low, close and volume of each trading day, newest first.

    start, end: YYYY-MM-DD, both included; all days until today when left out. outputsize: compact gives the
    latest 100 of these days at most, full all of them.
    """
    found = stock(symbol)
    places = found.between(start or FIRST_DAY, end or TODAY)
    if not places:
        raise MarketError(f"{found.symbol} has no trading days from {start or FIRST_DAY} to {end or TODAY}")
    shown = places if outputsize == "full" else places[-_COMPACT:]
    lines = ["date,open,high,low,close,volume"]
    for place in reversed(shown):
        columns = (found.open, found.high, found.low, found.close)
        prices = ",".join(_price(column[place]) for column in columns)
        lines.append(f"{found.days[place]},{prices},{found.volume[place]}")
    if len(shown) < len(places):
        lines.append(f"{len(places) - len(shown)} earlier days left out; outputsize full or an earlier end")
    return "\n".join(lines)


def search_symbol(keywords: str) -> str:
    """Symbols of companies whose name or symbol holds all of the words."""
    words = keywords.lower().split()
    lines = [
        f"{symbol}: {name} ({exchange})"
        for symbol, (name, exchange) in NAMES.items()
        if words and all(word in f"{symbol} {name}".lower() for word in words)
    ]
    return "\n".join(lines) or "nothing found"


def get_company_overview(symbol: str) -> str:
    """A company's name and exchange, its first day here, its splits, and its range of the last 52 weeks."""
    found = stock(symbol)
    name, exchange = NAMES[found.symbol]
    last_year = range(max(0, len(found.days) - YEAR), len(found.days))
    closes = [found.close[place] for place in last_year]
    splits = ", ".join(f"{new}:1 on {day}" for day, new in SPLITS.get(found.symbol, {}).items())
    return "\n".join(
        [
            f"{found.symbol}: {name} ({exchange})",
            f"prices from {found.days[0]} to {found.days[-1]}, {len(found.days)} trading days",
            f"splits: {splits or 'none'}",
            f"52-week high of closes: {_price(max(closes))}",
            f"52-week low of closes: {_price(min(closes))}",
            f"last close: {_price(found.close[-1])}",
        ]
    )


def get_sma(
    symbol: str,
    time_period: int = 30,
    date: str | None = None,
    interval: Literal["daily", "weekly"] = "daily",
    series_type: Literal["close", "open", "high", "low"] = "close",
) -> str:
    """Simple moving average: the mean of the last prices until a trading day, that day included.

    time_period: how many prices. date: YYYY-MM-DD; today when left out. weekly takes each week's last day.
    """
    values = _values(symbol, time_period, date, interval, series_type)
    value = mean_of_last(values, time_period)
    return f"{symbol.strip().upper()} {date or TODAY}: SMA({time_period}) {_price(value)}"


def get_rsi(
    symbol: str,
    time_period: int = 14,
    date: str | None = None,
    interval: Literal["daily", "weekly"] = "daily",
    series_type: Literal["close", "open", "high", "low"] = "close",
) -> str:
    """Wilder's relative strength index on a trading day, 0 to 100: oversold below 30, overbought above 70.

    date: YYYY-MM-DD; today when left out. weekly takes each week's last day.
    """
    values = _values(symbol, time_period, date, interval, series_type)
    value = relative_strengths(values, time_period)[-1]
    return f"{symbol.strip().upper()} {date or TODAY}: RSI({time_period}) {value:.2f}"


def get_trading_days(symbol: str, start: str, end: str) -> str:
    """On how many days a stock was traded from start to end, YYYY-MM-DD, both included; first and last."""
    found = stock(symbol)
    places = found.between(start, end)
    if not places:
        return f"{found.symbol} {start} to {end}: 0 trading days"
    first, last = found.days[places[0]], found.days[places[-1]]
    return f"{found.symbol} {start} to {end}: {len(places)} trading days, the first {first}, the last {last}"


TOOLS: dict[str, Callable[..., str]] = {
    tool.__name__: tool
    for tool in (
        *(get_stock_quote, get_time_series_daily, search_symbol, get_company_overview),
        *(get_sma, get_rsi, get_trading_days),
    )
}


def ask(name: str, **arguments: Any) -> str:
    """What a tool answers, its errors included, as the server tells them to an agent."""
    try:
        return TOOLS[name](**arguments)
    except MarketError as error:
        return f"Error executing tool {name}: {error}"


def _values(symbol: str, period: int, day: str | None, interval: str, series_type: str) -> list[float]:
    if not 2 <= period <= _LONGEST_PERIOD:
        raise MarketError(f"time_period must be 2 to {_LONGEST_PERIOD}")
    found = stock(symbol)
    return found.series(interval, series_type, found.at(day or TODAY))


def _price(value: float) -> str:
    """Dollars with four decimals at most.

    >>> _price(45.5)
    '45.5'
    """
    return f"{value:.4f}".rstrip("0").rstrip(".")


def symbols_of(day: str) -> list[str]:
    """The stocks that were traded on a day."""
    return [symbol for symbol, one in market().items() if one.days[0] <= day]
