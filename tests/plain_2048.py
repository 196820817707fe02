"""How does 2048 play, written once more? A list of cells and loops: what the engine is compared with."""

from __future__ import annotations

import random


class Plain2048:
    """A game on ``cells``, row after row. It imports nothing of the engine."""

    def __init__(self, seed: int, size: int, rules: str) -> None:
        self.size, self.rules, self.score = size, rules, 0
        self.cells = [0] * (size * size)
        self.chance = random.Random(seed)
        self.spawn()
        self.spawn()

    def spawn(self) -> None:
        free = [place for place, tile in enumerate(self.cells) if tile == 0]
        if free:
            place = self.chance.choice(free)
            self.cells[place] = 2 if self.chance.random() < 0.9 else 4

    def lines(self, move: str) -> list[list[int]]:
        """The places of each line, that towards which tiles move first."""
        n = self.size
        across = [[row * n + column for column in range(n)] for row in range(n)]
        down = [[row * n + column for row in range(n)] for column in range(n)]
        chosen = across if move in ("left", "right") else down
        return [line[::-1] for line in chosen] if move in ("right", "down") else chosen

    def slid(self, move: str) -> tuple[list[int], int]:
        """The cells when every tile has gone as far as it goes, and the points."""
        cells, points = list(self.cells), 0
        for line in self.lines(move):
            merged = -1  # tiles up to here were made in this move
            for start in range(1, len(line)):
                tile = cells[line[start]]
                if tile == 0:
                    continue
                end = start
                while end > 0 and cells[line[end - 1]] == 0:
                    end -= 1
                cells[line[start]] = 0
                if end - 1 > merged and cells[line[end - 1]] == tile:
                    cells[line[end - 1]] = 2 * tile
                    points += 2 * tile
                    merged = end - 1
                else:
                    cells[line[end]] = tile
        return cells, points

    def move(self, move: str) -> bool:
        cells, points = self.slid(move)
        changed = cells != self.cells
        self.cells, self.score = cells, self.score + points
        if changed or self.rules == "art":
            self.spawn()
        return changed

    def is_over(self) -> bool:
        if 0 in self.cells:
            return False
        if self.rules == "art":
            return True
        n, cells = self.size, self.cells
        beside = any(cells[i] == cells[i + 1] for i in range(n * n - 1) if (i + 1) % n)
        below = any(cells[i] == cells[i + n] for i in range(n * n - n))
        return not (beside or below)
