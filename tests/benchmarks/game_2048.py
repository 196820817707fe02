"""How many moves a second does the engine of 2048 play, and how many a plain implementation?

    python tests/benchmarks/game_2048.py [--repeats 3] [--quick] [--json]

Whole random games, from the first board until they are over; "plain" is ``tests/plain_2048.py``, played on
the same seeds and moves in the same run. The cache of rows is empty before the first repeat, and the
median repeat is reported.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "environments"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import Machine, arguments, median, report, table
from plain_2048 import Plain2048

from artnb_environments.game_2048.game import MOVES, Game, slide


def moves_per_second(
    make: Callable[[int, int, str], Any], games: int, size: int, rules: str
) -> tuple[float, int]:
    """Moves a second over whole games, and how many moves they were."""
    moves = 0
    started = time.perf_counter()
    for seed in range(games):
        game, draw = make(seed, size, rules), random.Random(seed)
        while not game.is_over():
            game.move(draw.choice(MOVES))
            moves += 1
    return moves / (time.perf_counter() - started), moves


def measure(games: int, repeats: int) -> list[dict[str, Any]]:
    rows = []
    for rules in ("classic", "art"):
        for size in (3, 4):
            slide.cache_clear()
            engine, plain = [], []
            for _ in range(repeats):  # in turn, so that both meet the machine as it is
                engine.append(moves_per_second(Game, games, size, rules))
                plain.append(moves_per_second(Plain2048, games, size, rules))
            assert engine[0][1] == plain[0][1], "both play the same games"
            fast, slow = median([m for m, _ in engine]), median([m for m, _ in plain])
            rows.append(
                {
                    "rules": rules,
                    "board": f"{size}x{size}",
                    "moves": engine[0][1],
                    "moves_per_second": fast,
                    "plain_per_second": slow,
                    "over_plain": fast / slow,
                }
            )
    return rows


def main() -> None:
    options = arguments(__doc__).parse_args()
    machine = Machine()
    rows = measure(20 if options.quick else 1000, options.repeats or (1 if options.quick else 3))
    columns = (
        ("rules", "rules", "s"),
        ("board", "board", "s"),
        ("moves", "moves", ",d"),
        ("moves_per_second", "moves/s", ",.0f"),
        ("plain_per_second", "plain moves/s", ",.0f"),
        ("over_plain", "over plain", ".2f"),
    )
    figures = {"benchmark": "game_2048", "rows": rows}
    report(machine, figures, table(rows, columns), only_json=options.json)


if __name__ == "__main__":
    main()
