"""What were the prices? Five stocks' trading days from 2000 to 2013, and what is computed from them.

Prices and volumes are adjusted for splits, not for dividends, as they stood on the data's last day: three
splits lie in these years. What looks like a fourth one, Apple's fall by half on 2000-09-29, is a real day.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
from bisect import bisect_right
from dataclasses import dataclass
from datetime import date as Date
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise

from artnb import ArtnbError

SHA256 = "5abadf99b2d394f920120a27de6f0df129859d71d4cfb0bf661bcc99446ab1fd"
SPLITS = {"AAPL": {"2000-06-21": 2, "2005-02-28": 2}, "MSFT": {"2003-02-18": 2}}
"""First day with the new price -> new shares for an old one."""
NAMES = {
    "AAPL": ("Apple Inc.", "NASDAQ"),
    "FB": ("Facebook, Inc.", "NASDAQ"),
    "GOOG": ("Google Inc.", "NASDAQ"),
    "IBM": ("International Business Machines Corporation", "NYSE"),
    "MSFT": ("Microsoft Corporation", "NASDAQ"),
}
SYMBOLS = tuple(NAMES)
FIRST_DAY, TODAY = "2000-03-01", "2013-03-01"
YEAR = 252
"""Trading days of 52 weeks."""


class MarketError(Exception):
    """Why a question to the market has no answer, for whoever asked."""


@dataclass(frozen=True)
class Stock:
    """One stock's days, oldest first; prices in dollars."""

    symbol: str
    days: tuple[str, ...]
    open: tuple[float, ...]
    high: tuple[float, ...]
    low: tuple[float, ...]
    close: tuple[float, ...]
    volume: tuple[int, ...]

    def at(self, day: str) -> int:
        """The place of a trading day. Raises MarketError."""
        check_day(day)
        place = bisect_right(self.days, day) - 1
        if place < 0:
            raise MarketError(f"{self.symbol} has no prices before {self.days[0]}")
        if self.days[place] != day:
            raise MarketError(f"{day} was no trading day; the last one before it was {self.days[place]}")
        return place

    def between(self, start: str, end: str) -> range:
        """The places of the trading days from ``start`` to ``end``, both included. Raises MarketError."""
        check_day(start)
        check_day(end)
        if start > end:
            raise MarketError(f"start {start} is after end {end}")
        first = bisect_right(self.days, start)
        first -= first > 0 and self.days[first - 1] == start
        return range(first, bisect_right(self.days, end))

    def series(self, interval: str, series_type: str, last: int) -> list[float]:
        """Prices up to the place ``last``, of each day or of the last day of each week."""
        prices: tuple[float, ...] = getattr(self, series_type)
        if interval == "daily":
            return list(prices[: last + 1])
        weeks = {_week(day): price for day, price in zip(self.days[: last + 1], prices, strict=False)}
        return list(weeks.values())


@lru_cache(maxsize=10_000)
def _week(day: str) -> tuple[int, int]:
    year, week, _ = Date.fromisoformat(day).isocalendar()
    return year, week


def check_day(day: str) -> None:
    """Refuse what is no day, or one that has not come yet. Raises MarketError."""
    try:
        is_iso = str(Date.fromisoformat(day)) == day
    except ValueError:
        is_iso = False
    if not is_iso:
        raise MarketError(f"a day is written YYYY-MM-DD, not {day[:40]!r}")
    if day > TODAY:
        raise MarketError(f"{day} is after today, {TODAY}")


def stock(symbol: str) -> Stock:
    """The stock with a symbol. Raises MarketError."""
    found = market().get(symbol.strip().upper())
    if found is None:
        raise MarketError(f"there is no symbol {symbol[:40]!r}; search_symbol finds symbols by name")
    return found


@lru_cache(maxsize=1)
def market() -> dict[str, Stock]:
    """All stocks. Raises ArtnbError when the file of prices is not the one that this was written for."""
    packed = files(__package__).joinpath("data", "stocks.csv.gz").read_bytes()
    if hashlib.sha256(packed).hexdigest() != SHA256:
        raise ArtnbError("stocks.csv.gz of finance_mcp has been changed; install artnb again")
    rows: dict[str, list[dict[str, str]]] = {symbol: [] for symbol in SYMBOLS}
    for row in csv.DictReader(io.StringIO(gzip.decompress(packed).decode("ascii"))):
        rows[row["Ticker"]].append(row)
    return {symbol: _adjusted(symbol, of_symbol) for symbol, of_symbol in rows.items()}


def _adjusted(symbol: str, rows: list[dict[str, str]]) -> Stock:
    days = tuple(row["Date"] for row in rows)
    shares = [1] * len(rows)
    for first_day, new in SPLITS.get(symbol, {}).items():
        for place in range(days.index(first_day)):
            shares[place] *= new

    def prices(column: str) -> tuple[float, ...]:
        return tuple(round(float(row[column]) / n, 4) for row, n in zip(rows, shares, strict=True))

    volume = tuple(int(row["Volume"]) * n for row, n in zip(rows, shares, strict=True))
    return Stock(symbol, days, prices("Open"), prices("High"), prices("Low"), prices("Close"), volume)


def mean_of_last(values: list[float], count: int) -> float:
    """The simple moving average at the end of a series. Raises MarketError.

    >>> mean_of_last([1.0, 2.0, 4.0], 2)
    3.0
    """
    if len(values) < count:
        raise MarketError(f"there are only {len(values)} prices until this day, not {count}")
    return sum(values[-count:]) / count


def relative_strengths(values: list[float], period: int) -> list[float]:
    """Wilder's relative strength index, 0 to 100, of every price but the first ``period`` ones.

    The first average is the mean of the first ``period`` changes; each later change counts 1/period. Raises
    MarketError.

    >>> [round(value, 2) for value in relative_strengths([1.0, 2.0, 3.0, 2.0, 2.0], 3)]
    [66.67, 66.67]
    """
    if len(values) <= period:
        raise MarketError(f"there are only {len(values)} prices until this day, not {period + 1}")
    changes = [after - before for before, after in pairwise(values)]
    up = sum(max(change, 0.0) for change in changes[:period]) / period
    down = sum(max(-change, 0.0) for change in changes[:period]) / period
    found = [_strength(up, down)]
    for change in changes[period:]:
        up += (max(change, 0.0) - up) / period
        down += (max(-change, 0.0) - down) / period
        found.append(_strength(up, down))
    return found


def _strength(up: float, down: float) -> float:
    return 100.0 if down == 0 else 100.0 - 100.0 / (1.0 + up / down)
