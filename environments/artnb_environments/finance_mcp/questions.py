"""What is asked about the market, and what is the right answer? Eleven templates; each question comes with
its answer and the calls that find it.

Every day of the calendar belongs to one split, and the days that a question names are its split's. IBM and
three templates are asked about in ``test`` only.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from artnb_environments.finance_mcp.market import (
    NAMES,
    SYMBOLS,
    TODAY,
    YEAR,
    mean_of_last,
    relative_strengths,
    stock,
)
from artnb_environments.finance_mcp.tools import symbols_of

Question = dict[str, Any]
HELD_OUT_SYMBOL = "IBM"
_SHARE_OF = {"train": (0.0, 0.6), "validation": (0.6, 0.8), "test": (0.8, 1.0)}
"""Which part of the shuffled calendar is each split's."""
_FIRST_PLACE = 60
"""Enough days before it for every average that is asked for."""
_CLEAR = 0.01
"""How far apart two values must lie at least, relative to each other, to be asked which is larger."""
NUMBER_TOLERANCE, PERCENT_TOLERANCE = 0.005, 0.0501
"""A number is right within half a percent; a percentage also when it is rounded to one decimal."""
OVERBOUGHT, OVERSOLD = 70.0, 30.0
_RSI_DAYS = 14
_MOST_TRIES = 20_000
"""Draws of days for one question; the rarest answer needs some hundred."""
_LATE = "2010-01-01"
"""Before, every price was so far below today's high that one guess would do for all."""
_VOLUME_PAIRS = [
    [("AAPL", "GOOG"), ("FB", "MSFT")],
    [("AAPL", "GOOG"), ("FB", "MSFT"), ("AAPL", "IBM"), ("GOOG", "IBM")],
]
"""Pairs of which either was traded more on many days: those of train and validation, those of test."""


class Draw:
    """The random choices of one question, all from its split's days and symbols."""

    def __init__(self, split: str, seed: int) -> None:
        self.split = split
        self.random = random.Random(seed)
        self.target = self.random.random()
        """Which of the possible answers is wanted: it stays while days are drawn, which balances them."""
        self._days = days_of(split)

    def wanted(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.target * len(choices))]

    def day(self) -> str:
        return self.random.choice(self._days)

    def days(self, shortest: int, longest: int) -> tuple[str, str]:
        """A first and a last day, so many trading days apart, or about."""
        low, high = _SHARE_OF[self.split]
        distance = max(1, round(self.random.randint(shortest, longest) * (high - low)))
        place = self.random.randrange(len(self._days) - distance)
        return self._days[place], self._days[place + distance]

    def symbols(self, day: str, count: int) -> list[str] | None:
        """Different symbols that were traded on a day; None when there are too few."""
        known = [s for s in symbols_of(day) if self.split == "test" or s != HELD_OUT_SYMBOL]
        return self.random.sample(known, count) if len(known) >= count else None


@lru_cache(maxsize=3)
def days_of(split: str) -> tuple[str, ...]:
    """The trading days that questions of a split name."""
    shuffled = list(stock("MSFT").days[_FIRST_PLACE:])
    random.Random("finance_mcp days").shuffle(shuffled)
    low, high = (round(share * len(shuffled)) for share in _SHARE_OF[split])
    return tuple(sorted(shuffled[low:high]))


def _question(text: str, kind: str, answer: Any, *plan: tuple[str, Mapping[str, Any]]) -> Question:
    return {"question": text, "kind": kind, "answer": answer, "plan": [[name, dict(a)] for name, a in plan]}


def _quote(symbol: str, day: str) -> tuple[str, Mapping[str, Any]]:
    return "get_stock_quote", {"symbol": symbol, "date": day}


def _close(symbol: str, day: str) -> float:
    found = stock(symbol)
    return found.close[found.at(day)]


def _listed(draw: Draw, day: str, history: int = 0, count: int = 1) -> list[str] | None:
    """Symbols traded on a day that had so many days before it."""
    symbols = draw.symbols(day, count)
    if symbols is None or any(stock(one).at(day) < history for one in symbols):
        return None
    return symbols


# ---- templates: each gives a question, or None when what was drawn does not do ------------------------


def close(draw: Draw) -> Question | None:
    day = draw.day()
    if (symbols := _listed(draw, day)) is None:
        return None
    (symbol,) = symbols
    text = f"At what price did {symbol} close on {day}? Answer with a number."
    return _question(text, "number", _close(symbol, day), _quote(symbol, day))


def close_by_name(draw: Draw) -> Question | None:
    day = draw.day()
    if (symbols := _listed(draw, day)) is None:
        return None
    (symbol,) = symbols
    word = NAMES[symbol][0].split()[0].strip(",")
    text = f"At what price did the stock of {NAMES[symbol][0]} close on {day}? Answer with a number."
    return _question(
        text, "number", _close(symbol, day), ("search_symbol", {"keywords": word}), _quote(symbol, day)
    )


def change(draw: Draw) -> Question | None:
    first, last = draw.days(3, 60)
    if (symbols := _listed(draw, first)) is None:
        return None
    (symbol,) = symbols
    percent = 100 * (_close(symbol, last) / _close(symbol, first) - 1)
    if abs(percent) < 2:
        return None
    text = (
        f"By how many percent did {symbol} change from its close on {first} to its close on {last}? Answer "
        "with a number, negative if it fell."
    )
    return _question(text, "percent", round(percent, 4), _quote(symbol, first), _quote(symbol, last))


def above_average(draw: Draw) -> Question | None:
    wanted, day, period = draw.wanted(("above", "below")), draw.day(), draw.random.choice((10, 20, 30, 50))
    if (symbols := _listed(draw, day, period)) is None:
        return None
    (symbol,) = symbols
    average, price = _average(symbol, day, period), _close(symbol, day)
    if abs(price / average - 1) < _CLEAR or wanted != ("above" if price > average else "below"):
        return None
    text = (
        f"Did {symbol} close above or below its {period}-day simple moving average on {day}? "
        "Answer above or below."
    )
    plan = _quote(symbol, day), ("get_sma", {"symbol": symbol, "time_period": period, "date": day})
    return _question(text, "label", wanted, *plan) | {"choices": ["above", "below"]}


def _average(symbol: str, day: str, period: int) -> float:
    found = stock(symbol)
    return mean_of_last(found.series("daily", "close", found.at(day)), period)


def more_volume(draw: Draw) -> Question | None:
    day, pairs = draw.day(), _VOLUME_PAIRS[draw.split == "test"]
    winner, loser = draw.wanted([*pairs, *(pair[::-1] for pair in pairs)])
    if not {winner, loser} <= set(symbols_of(day)):
        return None
    volumes = [stock(one).volume[stock(one).at(day)] for one in (winner, loser)]
    return _which(f"Of which were more shares traded on {day}", (winner, loser), volumes, draw, [day])


def higher_gain(draw: Draw) -> Question | None:
    first, last = draw.days(3, 60)
    pairs = [*itertools.permutations(SYMBOLS, 2)]
    winner, loser = draw.wanted(pairs)
    if not {winner, loser} <= set(symbols_of(first)):
        return None
    gains = [_close(one, last) / _close(one, first) for one in (winner, loser)]
    text = f"Which gained more in percent, or lost less, from the close on {first} to the close on {last}"
    return _which(text, (winner, loser), gains, draw, [first, last])


def _which(
    text: str, symbols: tuple[str, str], values: Sequence[float], draw: Draw, days: Sequence[str]
) -> Question | None:
    """A question for one of two symbols, of which the first must be right; either may be named first."""
    if values[0] / values[1] - 1 < _CLEAR:
        return None
    named = draw.random.sample(symbols, 2)
    asked = f"{text}, {named[0]} or {named[1]}? Answer with the symbol."
    plan = [_quote(one, day) for one in named for day in days]
    return _question(asked, "symbol", symbols[0], *plan) | {"choices": named}


def day_of_high(draw: Draw) -> Question | None:
    first, last = draw.days(5, 40)
    if (symbols := _listed(draw, first)) is None:
        return None
    found = stock(symbols[0])
    places = found.between(first, last)
    best, second = sorted(places, key=lambda place: -found.close[place])[:2]
    if found.close[best] == found.close[second]:
        return None
    text = (
        f"On which day from {first} to {last}, both included, did {found.symbol} have its highest close? "
        "Answer with the day as YYYY-MM-DD."
    )
    plan = ("get_time_series_daily", {"symbol": found.symbol, "start": first, "end": last})
    return _question(text, "date", found.days[best], plan)


def rsi_zone(draw: Draw) -> Question | None:
    wanted, day = draw.wanted(("overbought", "oversold", "neutral")), draw.day()
    if (symbols := _listed(draw, day, 30)) is None:
        return None
    found = stock(symbols[0])
    value = _rsi(found.symbol)[found.at(day) - _RSI_DAYS]
    zone = "overbought" if value > OVERBOUGHT else "oversold" if value < OVERSOLD else "neutral"
    if zone != wanted or min(abs(value - OVERBOUGHT), abs(value - OVERSOLD)) < 0.5:
        return None
    text = (
        f"By its 14-day RSI, was {found.symbol} overbought (above 70), oversold (below 30) or neutral "
        f"on {day}? Answer overbought, oversold or neutral."
    )
    plan = ("get_rsi", {"symbol": found.symbol, "time_period": _RSI_DAYS, "date": day})
    return _question(text, "label", zone, plan) | {"choices": ["overbought", "oversold", "neutral"]}


@lru_cache(maxsize=8)
def _rsi(symbol: str) -> list[float]:
    return relative_strengths(list(stock(symbol).close), _RSI_DAYS)


def trading_days(draw: Draw) -> Question | None:
    first, last = draw.days(3, 60)
    if (symbols := _listed(draw, first)) is None:
        return None
    (symbol,) = symbols
    count = len(stock(symbol).between(first, last))
    text = (
        f"On how many days was {symbol} traded from {first} to {last}, both included? Answer with a number."
    )
    plan = ("get_trading_days", {"symbol": symbol, "start": first, "end": last})
    return _question(text, "count", count, plan)


def average(draw: Draw) -> Question | None:
    day, period = draw.day(), draw.random.choice((10, 20, 30, 50))
    if (symbols := _listed(draw, day, period)) is None:
        return None
    (symbol,) = symbols
    text = f"What was the {period}-day simple moving average of {symbol} on {day}? Answer with a number."
    plan = ("get_sma", {"symbol": symbol, "time_period": period, "date": day})
    return _question(text, "number", round(_average(symbol, day, period), 4), plan)


def below_high(draw: Draw) -> Question | None:
    day = draw.day()
    if day < _LATE or (symbols := _listed(draw, day)) is None:
        return None
    found = stock(symbols[0])
    high = max(found.close[-YEAR:])
    percent = 100 * (1 - _close(found.symbol, day) / high)
    if percent < 2:
        return None
    text = (
        f"How many percent was {found.symbol}'s close on {day} below its 52-week high as of today, {TODAY}? "
        "Answer with a number."
    )
    plan = ("get_company_overview", {"symbol": found.symbol}), _quote(found.symbol, day)
    return _question(text, "percent", round(percent, 4), *plan)


TRAINED: dict[str, Callable[[Draw], Question | None]] = {
    one.__name__: one
    for one in (
        *(close, close_by_name, change, above_average),
        *(more_volume, day_of_high, rsi_zone, trading_days),
    )
}
HELD_OUT: dict[str, Callable[[Draw], Question | None]] = {
    one.__name__: one for one in (higher_gain, average, below_high)
}
TEMPLATES = TRAINED | HELD_OUT


def templates_of(split: str) -> list[str]:
    """The templates that a split's questions come from."""
    return [*TEMPLATES] if split == "test" else [*TRAINED]


def draw_question(split: str, seed: int, template: str) -> Question:
    """A question of a template, ``all`` for any; what does not do is drawn again, so labels are balanced."""
    draw = Draw(split, seed)
    name = draw.random.choice(templates_of(split)) if template == "all" else template
    for _ in range(_MOST_TRIES):
        if (question := TEMPLATES[name](draw)) is not None:
            named = set(re.findall(r"[A-Z]{2,4}", question["question"])) | {_symbol_of(question)}
            unseen = name in HELD_OUT or HELD_OUT_SYMBOL in named
            return {"choices": []} | question | {"topic": name, "unseen": unseen}
    raise AssertionError(f"no question of the template {name} in {_MOST_TRIES} tries")


def _symbol_of(question: Question) -> str:
    return str(question["plan"][-1][1]["symbol"])


def is_right(said: str, question: Mapping[str, Any]) -> bool:
    """Whether an answer holds the right value and no other one of its kind."""
    text, kind, answer = said.replace("\u2212", "-").replace(",", ""), question["kind"], question["answer"]
    if kind == "date":
        return set(re.findall(r"\d{4}-\d\d-\d\d", text)) == {answer}
    if kind in ("label", "symbol"):
        words = set(re.findall(r"[a-z]+", text.lower()))
        return [one for one in question["choices"] if one.lower() in words] == [answer]
    numbers = [float(one) for one in re.findall(r"(?<![\w.])-?\d{1,15}(?:\.\d{1,15})?(?![\w-]|\.\d)", text)]
    if len(numbers) != 1:
        return False
    if kind == "count":
        return numbers[0] == answer
    return abs(numbers[0] - answer) <= max(
        NUMBER_TOLERANCE * abs(answer), PERCENT_TOLERANCE * (kind == "percent")
    )
