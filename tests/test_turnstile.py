"""Do thousands of ready coroutines leave the event loop to others in between?"""

from __future__ import annotations

import asyncio
from itertools import pairwise

from artnb.turnstile import AT_ONCE, take_turn


async def test_few_go_on_in_one_turn_of_the_loop_and_all_go_on_in_order():
    passed: list[int] = []
    seen: list[int] = []

    async def walk(number: int) -> None:
        await take_turn()
        passed.append(number)
        await take_turn()

    async def tick() -> None:
        while True:
            seen.append(len(passed))
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    await asyncio.gather(*(walk(number) for number in range(50 * AT_ONCE)))
    ticker.cancel()
    assert passed == list(range(50 * AT_ONCE))
    steps = [after - before for before, after in pairwise(seen)]
    assert max(steps) <= 2 * AT_ONCE and len(seen) >= 50


async def test_one_alone_waits_for_nobody():
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    ticker = asyncio.create_task(tick())
    await take_turn()
    assert turns == 0
    ticker.cancel()


async def test_the_cancelled_are_passed_over():
    passed: list[int] = []

    async def walk(number: int) -> None:
        await take_turn()
        passed.append(number)

    tasks = [asyncio.create_task(walk(number)) for number in range(20 * AT_ONCE)]
    await asyncio.sleep(0)
    kept = tasks[:: 2 * AT_ONCE]
    for task in tasks:
        if task not in kept:
            task.cancel()
    await asyncio.wait_for(asyncio.gather(*kept), timeout=30)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert set(range(0, 20 * AT_ONCE, 2 * AT_ONCE)) <= set(passed) and len(passed) <= AT_ONCE + len(kept)


def test_every_loop_has_its_own():
    async def walk() -> int:
        await asyncio.gather(*(take_turn() for _ in range(3 * AT_ONCE)))
        return 1

    assert [asyncio.run(walk()) for _ in range(3)] == [1, 1, 1]
