"""Trains until it is killed: the processes of test_kill_campaign.py.

Importing torch takes longer than a step of the tiny model. So one process imports it once, reads jobs from
its input, a JSON object a line, and forks for each a process that imports artnb itself, trains, and dies.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

GROUP_SIZE = 3
WORDS = ("one", "two", "three")
PRELOADED = ("torch", "transformers", "peft", "safetensors.torch", "openai", "numpy")
PATIENCE = 60
"""Seconds after which a process that nobody killed gives up."""
FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")
"""What Python tells an audit hook of what happens to files."""


def die() -> None:
    """Nothing is flushed, closed or told, as when the machine takes the process away."""
    os.kill(os.getpid(), signal.SIGKILL)


def at_nth(number: int, act: Callable[[], Any]) -> Callable[[], None]:
    left = [number]

    def count() -> None:
        left[0] -= 1
        if left[0] == 0:
            act()

    return count


def arm(moment: str, number: int, root: Path) -> None:
    """Die at the ``number``-th touch of a file of the run, or in the middle of the ``number``-th append."""
    if moment == "file":
        count = at_nth(number, die)

        def on_event(event: str, arguments: tuple[Any, ...]) -> None:
            if event in FILE_EVENTS and str(arguments[0]).startswith(str(root)):
                count()

        sys.addaudithook(on_event)
    elif moment == "append":
        write = os.write
        torn = at_nth(number, die)

        def half(handle: int, lines: Any) -> int:
            if bytes(lines[:1]) != b"{":
                return write(handle, lines)
            count_down = len(lines) // 2
            write(handle, lines[:count_down])
            torn()
            return count_down

        os.write = half


async def train(job: dict[str, Any]) -> None:
    """A notebook's loop; with a base it trains the tiny model, without one nothing."""
    from steps import open_fake, open_model, rollout

    import artnb as nb

    root = Path(job["root"])
    model = open_model(job["base"], root) if job["base"] else open_fake(root)
    with model:
        for step in model.run.steps(job["steps"]):
            scenarios = [nb.Scenario(id=f"{step} {word}") for word in WORDS]
            options = {"group_size": GROUP_SIZE, "progress": False}
            groups = await nb.gather(rollout, scenarios, model=model, **options)
            model.run.cursor["next"] = step + 1
            await nb.train_step(model, groups, learning_rate=1e-3)


def run_child(job: dict[str, Any]) -> None:
    import warnings

    warnings.simplefilter("ignore")
    os.write(1, f"{os.getpid()}\n".encode())
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)  # one that hangs says where
    arm(job["moment"], job["number"], Path(job["root"]))
    asyncio.run(train(job))


def main() -> None:
    for name in PRELOADED:
        __import__(name)
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                run_child(json.loads(line))
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(status)
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
