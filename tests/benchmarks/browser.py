"""How long does the trajectory browser take to open, filter, sort and page many trajectories of a run?

A run folder with small trajectories is written as training writes it. Every figure is also given as a
multiple of the time that only reading the index's bytes takes in the same run. The index is then removed,
and what making it again takes is measured as well.

    python tests/benchmarks/browser.py [--trajectories 100000] [--repeats 3] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy

from artnb.browser.source import Source, source_of
from artnb.store.run import Run
from artnb.store.trajectories import Stored
from artnb.types import Failure, Trajectory, Turn

A_STEP, GROUP, SCENARIOS = 100, 8, 2000
FILTER = "reward<0.5 form:1 tool:move -error scenario:maze"
SORT = [["metric/moves", "desc"], ["reward", "asc"]]


def trajectory(random_: random.Random, step: int, scenario: str) -> Trajectory:
    """Two short turns, as many figures as a usual environment records."""
    call = {"id": "c", "type": "function", "function": {"name": "move", "arguments": '{"to": "left"}'}}
    one = Trajectory(scenario_id=scenario, reward=random_.random(), seconds=10 * random_.random())
    logprobs = tuple(-random_.random() for _ in range(3))
    first = Turn(
        (1, 2, 3), (4, 5, 6), logprobs, step, "tool_calls", {"role": "assistant", "tool_calls": [call]}
    )
    says = {"role": "assistant", "content": f"the exit is at {random_.randrange(1000)}"}
    one.messages_and_choices = [
        {"role": "user", "content": f"find the exit of {scenario}"},
        first,
        {"role": "tool", "tool_call_id": "c", "content": "a wall"},
        Turn((*first.ids, 7), (8, 9), logprobs[:2], step, "stop", says),
    ]
    form = float(random_.random() < 0.5)
    one.metrics = {"reward/form": form, "reward/exit": one.reward, "moves": float(random_.randrange(30))}
    if random_.random() < 0.02:
        one.error, one.reward = Failure("TimeoutError", "the maze took too long"), None
    return one


def write_run(root: Path, count: int) -> tuple[Run, float]:
    """A closed run with so many trajectories, and the share of the writing that went into the index."""
    random_, run, spent = random.Random(0), Run.open("benchmark", root), 0.0
    write_rows = run._trajectories._index.append

    def timed(*arguments: Any) -> None:
        nonlocal spent
        started = time.perf_counter()
        write_rows(*arguments)
        spent += time.perf_counter() - started

    run._trajectories._index.append = timed  # type: ignore[method-assign]
    writing = 0.0
    for start in range(0, count, A_STEP):
        step, stored = start // A_STEP, []
        for number in range(start, min(start + A_STEP, count)):
            if number % GROUP == 0 or not stored:
                scenario = f"maze/train/{random_.randrange(SCENARIOS)}"
            one = trajectory(random_, step, scenario)
            stored.append(Stored(step, "train", f"{step:012x}", number % GROUP, one))
        started = time.perf_counter()
        run.append_attempt(stored)
        writing += time.perf_counter() - started
        run.append_metrics({"kind": "train", "step": step, "dropped": {}})
    run.close()
    return run, spent / writing


def seconds(work: Callable[[], Any], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        gc.collect()
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def measure(path: Path, repeats: int) -> list[dict[str, Any]]:
    """One row a question, in the order in which a person asks them."""
    files = sorted((path / "trajectories" / "index").iterdir())
    raw = seconds(lambda: [file.read_bytes() for file in files], repeats)
    opened: list[Source] = []
    rows = [("open", seconds(lambda: opened.append(source_of(path)) or opened[:-1].clear(), repeats))]
    source = opened[-1]
    opened.clear()
    rows.append(("describe the table", seconds(source.facts, 1)))
    source.query(FILTER, SORT)  # columns are worked out when they are first needed
    asked: dict[str, Callable[[], Any]] = {
        "filter": lambda: source.query(FILTER),
        "sort": lambda: source.query("", SORT),
        "filter and sort": lambda: source.query(FILTER, SORT),
        "sort by id": lambda: source.query("", [["id", "asc"]]),
        "tree of steps": lambda: source.query(tree=True),
    }
    rows += [(name, seconds(work, repeats)) for name, work in asked.items()]
    listed = source.query("", SORT)
    middle = listed["count"] // 2
    rows.append(("page of 100", seconds(lambda: source.page(listed["query"], middle, 100), repeats)))
    names = [row["id"] for row in source.page(listed["query"], middle, 100)["rows"]]
    source.trajectory(names[0])
    rows.append(("open a trajectory", seconds(lambda: source.trajectory(names[len(names) // 2]), repeats)))
    rows.append(("its tokens", seconds(lambda: source.tokens(names[-1]), repeats)))
    rows.append(("look for news", seconds(source.refresh, repeats)))
    for file in files:
        file.unlink()

    def again() -> None:
        made = source_of(path)
        while made.facts()["indexing"] is not None:
            made.refresh()

    rows.append(("make the index again", seconds(again, 1)))
    return [{"name": n, "seconds": s, "over_reading_bytes": s / raw} for n, s in rows] + [
        {"name": "read the index's bytes", "seconds": raw, "over_reading_bytes": 1.0}
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3, help="the median of so many is reported")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, share = write_run(Path(folder), options.trajectories)
        index = run.path / "trajectories" / "index"
        size = sum(file.stat().st_size for file in index.iterdir())
        rows = measure(run.path, options.repeats)
    if not options.json:
        print(f"{options.trajectories:,} trajectories, median of {options.repeats}")
        for row in rows:
            print(f"{row['name']:24}{row['seconds']:10.4f} s{row['over_reading_bytes']:12.1f} × reading")
        print(f"{size / options.trajectories:.0f} bytes a row; {share:.1%} of the time of writing")
    figures = {
        "benchmark": "browser",
        "trajectories": options.trajectories,
        "bytes_a_row": size / max(options.trajectories, 1),
        "index_share_of_writing": share,
        "numpy": numpy.__version__,
        "rows": rows,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
