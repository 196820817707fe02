"""Does anything grow? Many steps, and many models opened and closed, on a tiny model."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest

import artnb as nb

pytestmark = pytest.mark.slow


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def rollout(model: nb.Model, scenario: nb.Scenario) -> nb.Trajectory:
    messages = [{"role": "user", "content": f"item {scenario.id}"}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=8)
    text = reply.choices[0].message.content or ""
    return nb.Trajectory([*messages, reply.choices[0]], reward=sum(map(str.isalnum, text)) / 8)


SCENARIOS = [nb.Scenario(id=f"{number}") for number in range(4)]


async def take_step(model: nb.Model) -> None:
    groups = await nb.gather(rollout, SCENARIOS, model=model, group_size=4, progress=False)
    await nb.train_step(model, groups, learning_rate=1e-4)


async def test_two_hundred_steps_leave_memory_threads_and_files_as_they_were(tiny_model, tmp_path):
    with nb.Model(tiny_model, run="soak", root=tmp_path, dtype="float32") as model:
        for _ in range(20):
            await take_step(model)
        before = resident(), threading.active_count(), descriptors()
        for _ in range(180):
            await take_step(model)
        after = resident(), threading.active_count(), descriptors()
    assert after[0] < 1.02 * before[0], f"{before[0] / 1e6:.0f} MB became {after[0] / 1e6:.0f} MB"
    assert after[1:] == before[1:]


async def test_twenty_models_opened_and_closed_leave_nothing(tiny_model, tmp_path):
    found = []
    for number in range(20):
        with nb.Model(tiny_model, run=f"model-{number}", root=tmp_path, dtype="float32") as model:
            await take_step(model)
        found.append((resident(), threading.active_count(), descriptors()))
    early, late = found[4], found[-1]
    assert late[0] < 1.02 * early[0], [f"{memory / 1e6:.0f} MB" for memory, *_ in found]
    assert late[1:] == early[1:]


async def test_eight_hours_of_steps_grow_nothing_but_the_run_s_folder(tiny_model, tmp_path):
    """Five thousand steps, a night of them; the folder grows by as much a step as in the first ones."""
    steps, first = 5000, 500

    def folder_size() -> int:
        return sum(path.stat().st_size for path in (tmp_path / "night").rglob("*") if path.is_file())

    async def few(model: nb.Model) -> None:
        groups = await nb.gather(rollout, SCENARIOS[:2], model=model, group_size=2, progress=False)
        await nb.train_step(model, groups, learning_rate=1e-5)

    with nb.Model(tiny_model, run="night", root=tmp_path, dtype="float32") as model:
        for _ in range(first // 2):
            await few(model)
        half = folder_size()
        for _ in range(first // 2):
            await few(model)
        before, size = (resident(), threading.active_count(), descriptors()), folder_size()
        for _ in range(steps - first):
            await few(model)
        after = resident(), threading.active_count(), descriptors()
        predicted = size + (size - half) / (first // 2) * (steps - first)
        assert model.run.step == steps and len(model.run.metrics()) == steps
        assert after[0] < 1.05 * before[0], f"{before[0] / 1e6:.0f} MB became {after[0] / 1e6:.0f} MB"
        assert after[1:] == before[1:]
        assert 0.8 < folder_size() / predicted < 1.2, (folder_size(), predicted)
        assert f"{steps * 4:,} trajectories" in repr(nb.browse(model.run))
