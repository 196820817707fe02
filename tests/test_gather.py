"""Many rollouts run at once, each is kept, and stopping early leaves nothing behind."""

import asyncio
import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest

from artnb.attempts import attempt_seed
from artnb.errors import ConfigurationError, Interrupted, RunInUse, TooManyFailures
from artnb.gather import gather as gather_with_progress
from artnb.recording import record
from artnb.rewards import Reward
from artnb.session import last
from artnb.store import Run, Stored
from artnb.types import Scenario, Trajectory, Turn

gather = functools.partial(gather_with_progress, progress=False)


def model(run=None, policy_version=0):
    return SimpleNamespace(run=run, policy_version=policy_version, name="tiny", sampling=None)


def scenarios(n):
    return [Scenario(f"s{i}") for i in range(n)]


def turn(text="hi", version=0):
    return Turn((1, 2), (3, 4), (-0.5, -0.1), version, "stop", {"role": "assistant", "content": text})


async def succeed(model, scenario):
    await asyncio.sleep(0)
    return Trajectory([{"role": "user", "content": scenario.id}, turn()], reward=1.0)


def nobody_else_runs():
    return [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []


# Success


async def test_groups_come_in_the_order_of_scenarios_and_attempts():
    started = []

    async def rollout(model, scenario):
        number = sum(s == scenario.id for s in started)
        started.append(scenario.id)
        await asyncio.sleep(0.02 * (3 - number))
        return Trajectory([turn()], reward=float(number))

    groups = await gather(rollout, scenarios(3), model=model(), group_size=3)
    assert [g.scenario_id for g in groups] == ["s0", "s1", "s2"]
    assert [g.rewards for g in groups] == [[0.0, 1.0, 2.0]] * 3
    assert groups.status == "complete" and groups.seconds > 0.05
    assert all(t.scenario_id == g.scenario_id and t.seconds > 0 for g in groups for t in g)
    assert last() is groups and nobody_else_runs()


async def test_a_rollout_may_return_a_number_or_nothing_and_keeps_its_recorded_calls():
    async def number(model, scenario):
        record([{"role": "user", "content": "q"}], None, turn(scenario.id))
        await asyncio.sleep(0.001)
        return 0.25 if scenario.id == "s0" else True

    async def nothing(model, scenario):
        await asyncio.create_task(asyncio.sleep(0))
        record([{"role": "user", "content": "q"}], None, turn(scenario.id))

    groups = await gather(number, scenarios(2), model=model(), group_size=2)
    assert [g.rewards for g in groups] == [[0.25, 0.25], [1.0, 1.0]]
    assert [[t.message["content"] for t in one.turns] for one in groups.trajectories] == [["s0"]] * 2 + [
        ["s1"]
    ] * 2
    groups = await gather(nothing, scenarios(2), model=model(), group_size=1)
    assert [(t.reward, len(t.turns), t.scenario_id) for t in groups.trajectories] == [
        (None, 1, "s0"),
        (None, 1, "s1"),
    ]


async def test_members_of_a_list_group_by_seat():
    async def rollout(model, scenario):
        return [Trajectory([turn()], reward=r, seat=s) for s, r in (("white", 1.0), ("black", 0.0))]

    groups = await gather(rollout, scenarios(2), model=model(), group_size=3)
    assert [(g.scenario_id, g.seat, g.rewards) for g in groups] == [
        ("s0", "white", [1.0] * 3),
        ("s0", "black", [0.0] * 3),
        ("s1", "white", [1.0] * 3),
        ("s1", "black", [0.0] * 3),
    ]


async def test_scenarios_may_be_anything_and_get_their_index_as_id():
    async def rollout(model, scenario):
        return float(scenario["x"])

    groups = await gather(rollout, iter([{"x": 1}, {"x": 2, "id": "named"}]), model=model(), group_size=1)
    assert [g.scenario_id for g in groups] == ["0", "named"]


async def test_concurrency_is_bounded_and_tasks_start_lazily():
    running, most, tasks = 0, 0, 0

    async def rollout(model, scenario):
        nonlocal running, most, tasks
        running += 1
        most, tasks = max(most, running), max(tasks, len(asyncio.all_tasks()))
        await asyncio.sleep(0.001)
        running -= 1
        return 1.0

    groups = await gather(rollout, scenarios(50), model=model(), group_size=4, concurrency=7)
    assert most == 7 and tasks <= 7 + 4
    assert len(groups.trajectories) == 200


async def test_five_thousand_rollouts_are_quick(tmp_path):
    async def rollout(model, scenario):
        await asyncio.sleep(0)
        return Trajectory([turn()], reward=1.0)

    with Run.open("demo", tmp_path) as run:
        started = time.process_time()
        groups = await gather(rollout, scenarios(625), model=model(run), concurrency=2000)
        assert time.process_time() - started < 10
        assert len(groups.trajectories) == 5000
        assert sum(1 for _ in run.stored(0, "train")) == 5000
        assert [t.id for t in run.trajectories()] != []


async def test_a_seed_gives_each_attempt_its_own():
    async def rollout(model, scenario):
        return Trajectory(reward=1.0, metadata={"seen": attempt_seed()})

    def seeds(groups):
        return [t.metadata["seen"] for t in groups.trajectories]

    first = await gather(rollout, scenarios(2), model=model(), group_size=2, seed=1)
    again = await gather(rollout, scenarios(2), model=model(), group_size=2, seed=1)
    other = await gather(rollout, scenarios(2), model=model(), group_size=2, seed=2)
    assert seeds(first) == seeds(again) and len({*seeds(first), *seeds(other)}) == 8
    assert [t.metadata["seed"] for t in first.trajectories] == seeds(first)
    assert seeds(await gather(rollout, scenarios(1), model=model(), group_size=1)) == [None]


async def test_rewards_score_what_has_none():
    async def rollout(model, scenario):
        return 0.0 if scenario.id == "s0" else None

    async def half(trajectory, scenario):
        return 0.5

    def broken(trajectory):
        raise KeyError("answer")

    groups = await gather(rollout, scenarios(2), model=model(), group_size=1, reward=Reward(half))
    assert [t.reward for t in groups.trajectories] == [0.0, 0.5]
    groups = await gather(rollout, scenarios(2), model=model(), group_size=1, reward=broken)
    assert [t.error and t.error.type for t in groups.trajectories] == [None, "RewardError"]


# Failures


async def test_a_failed_rollout_is_a_trajectory_with_its_turns_and_traceback():
    async def rollout(model, scenario):
        record([{"role": "user", "content": "q"}], None, turn())
        if scenario.id == "s1":
            raise RuntimeError("the tool broke")
        return 1.0

    groups = await gather(rollout, scenarios(3), model=model(), group_size=2)
    assert [len(g.exceptions) for g in groups] == [0, 2, 0]
    failed = groups[1][0]
    assert (failed.error.type, failed.error.message) == ("RuntimeError", "the tool broke")
    assert 'raise RuntimeError("the tool broke")' in failed.error.traceback
    assert len(failed.turns) == 1 and failed.scenario_id == "s1" and failed.reward is None


async def test_a_wrong_return_value_is_told():
    async def rollout(model, scenario):
        return {
            "s0": "text",
            "s1": [],
            "s2": [Trajectory(), 1],
            "s3": Trajectory([SimpleNamespace(message="m")]),
        }[scenario.id]

    groups = await gather(rollout, scenarios(4), model=model(), group_size=1, max_failures=None)
    messages = [t.error.message for t in groups.trajectories]
    assert "returned str" in messages[0] and "an empty list" in messages[1] and "returned list" in messages[2]
    assert "no token ids" in messages[3]
    assert groups[3][0].messages() == [{"role": "assistant", "content": "m"}]


async def test_even_sys_exit_in_a_rollout_is_only_its_own_failure():
    async def rollout(model, scenario):
        if scenario.id == "s0":
            sys.exit(3)
        return 1.0

    groups = await gather(rollout, scenarios(2), model=model(), group_size=1)
    assert groups[0][0].error.type == "SystemExit" and groups[1][0].reward == 1.0


async def test_a_failed_attempt_is_repeated_and_says_so():
    tries = []

    async def rollout(model, scenario):
        tries.append(scenario.id)
        if len(tries) < 3:
            raise ValueError(f"try {len(tries)}")
        return 1.0

    groups = await gather(rollout, scenarios(1), model=model(), group_size=1, retries=2)
    (kept,) = groups.trajectories
    assert kept.error is None and kept.reward == 1.0
    assert kept.logs == [
        "try 1 failed and was repeated: ValueError: try 1",
        "try 2 failed and was repeated: ValueError: try 2",
    ]


async def test_a_slow_rollout_times_out_with_what_it_had():
    cleaned = []

    async def rollout(model, scenario):
        record([{"role": "user", "content": "q"}], None, turn())
        try:
            await asyncio.sleep(60 if scenario.id == "s0" else 0)
        finally:
            cleaned.append(scenario.id)
        return 1.0

    groups = await gather(rollout, scenarios(2), model=model(), group_size=1, timeout=0.05)
    slow = groups[0][0]
    assert slow.error.type == "TimeoutError" and "longer than timeout=0.05 s" in slow.error.message
    assert len(slow.turns) == 1 and groups[1][0].reward == 1.0 and len(cleaned) == 2


async def test_a_rollout_that_catches_its_timeout_has_still_timed_out():
    async def rollout(model, scenario):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return Trajectory([turn()], reward=1.0)

    groups = await gather(rollout, scenarios(1), model=model(), group_size=1, timeout=0.05, max_failures=1)
    assert groups[0][0].error.type == "TimeoutError" and len(groups[0][0].turns) == 1


@pytest.mark.parametrize(
    ("limit", "failing", "raises"), [(0.5, 2, False), (0.5, 3, True), (0, 1, True), (3, 3, False)]
)
async def test_max_failures_is_a_number_or_a_share(limit, failing, raises):
    async def rollout(model, scenario):
        if int(scenario.id[1:]) < failing:
            raise ValueError("no")
        return 1.0

    work = gather(rollout, scenarios(4), model=model(), group_size=1, max_failures=limit)
    if raises:
        with pytest.raises(TooManyFailures):
            await work
    else:
        assert (await work).status == "complete"


async def test_too_many_failures_cancel_and_await_the_others():
    cleaned, started = [], []

    async def rollout(model, scenario):
        started.append(scenario.id)
        if scenario.id == "s0":
            return 1.0
        if scenario.id in ("s1", "s2"):
            await asyncio.sleep(0.02)
            raise ValueError("broken")
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            cleaned.append(scenario.id)

    with pytest.raises(TooManyFailures) as caught:
        await gather(rollout, scenarios(8), model=model(), group_size=1, max_failures=1, concurrency=6)
    assert sorted(cleaned) == ["s3", "s4", "s5", "s6"] and "s7" not in started
    assert "2 of 8 rollouts failed, 1 may (max_failures). Most often (2): ValueError: broken" in str(
        caught.value
    )
    partial = caught.value.partial
    assert [g.scenario_id for g in partial] == ["s0", "s1", "s2"] and partial.status == "stopped"
    assert last() is partial and nobody_else_runs()


# Early ends


async def test_cancellation_is_passed_on_after_everything_was_awaited(tmp_path):
    cleaned = []

    async def rollout(model, scenario):
        if scenario.id == "s0":
            return Trajectory([turn()], reward=1.0)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            cleaned.append(scenario.id)

    with Run.open("demo", tmp_path) as run:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await gather(rollout, scenarios(4), model=model(run), group_size=1)
        assert sorted(cleaned) == ["s1", "s2", "s3"]
        assert [t.scenario_id for t in last().trajectories] == ["s0"] and last().status == "stopped"
        assert [t.scenario_id for t in run.trajectories()] == ["s0"]
        assert run.events()[-1]["status"] == "stopped" and run.events()[-1]["failed"] == 0
    assert nobody_else_runs()
    task = asyncio.create_task(gather(rollout, scenarios(3), model=model(), group_size=1))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_at_the_very_end_of_the_last_rollout_is_passed_on():
    async def rollout(model, scenario):
        asyncio.current_task().add_done_callback(lambda _: task.cancel())
        return 1.0

    task = asyncio.create_task(gather(rollout, scenarios(1), model=model(), group_size=1))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [t.reward for t in last().trajectories] == [1.0]


async def test_what_a_rollout_makes_of_its_cancellation_is_neither_result_nor_failure():
    async def rollout(model, scenario):
        try:
            await asyncio.sleep(0 if scenario.id == "s0" else 60)
        except asyncio.CancelledError as error:
            if scenario.id == "s1":
                return Trajectory([turn()], reward=0.0)
            raise RuntimeError("cleaning up failed") from error
        return 1.0

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await gather(rollout, scenarios(3), model=model(), group_size=1)
    assert [t.scenario_id for t in last().trajectories] == ["s0"]


async def test_a_rollout_that_cancels_itself_is_no_failure():
    cleaned = []

    async def rollout(model, scenario):
        if scenario.id == "s0":
            await asyncio.sleep(0.01)
            raise asyncio.CancelledError
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(scenario.id)

    with pytest.raises(asyncio.CancelledError, match="scenario s0 was cancelled, and not by gather"):
        await gather(rollout, scenarios(2), model=model(), group_size=1)
    assert cleaned == ["s1"] and last().trajectories == []


async def test_a_keyboard_interrupt_inside_a_rollout_interrupts_gather():
    async def rollout(model, scenario):
        if scenario.id == "s0":
            return 1.0
        if scenario.id == "s1":
            await asyncio.sleep(0.01)
            raise KeyboardInterrupt
        await asyncio.sleep(60)

    with pytest.raises(Interrupted) as caught:
        await gather(rollout, scenarios(3), model=model(), group_size=1)
    assert [t.scenario_id for t in caught.value.partial.trajectories] == ["s0"]


@pytest.mark.parametrize("on_interrupt", ["raise", "return"])
async def test_sigint_stops_gather_within_moments_and_keeps_what_is_finished(on_interrupt):
    cleaned = []

    async def rollout(model, scenario):
        if scenario.id == "s0":
            return 1.0
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(scenario.id)

    before = signal.getsignal(signal.SIGINT)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    work = gather(rollout, scenarios(3), model=model(), group_size=1, on_interrupt=on_interrupt)
    if on_interrupt == "raise":
        with pytest.raises(Interrupted, match="1 of 3 rollouts are finished") as caught:
            await work
        partial = caught.value.partial
    else:
        partial = await work
    assert time.monotonic() - started < 2
    assert partial.status == "interrupted" and [t.scenario_id for t in partial.trajectories] == ["s0"]
    assert sorted(cleaned) == ["s1", "s2"] and last() is partial
    assert signal.getsignal(signal.SIGINT) is before and nobody_else_runs()
    assert (await gather(succeed, scenarios(1), model=model())).status == "complete"


async def test_one_interrupt_stops_gathers_that_run_side_by_side():
    async def rollout(model, scenario):
        await asyncio.sleep(60)

    before = signal.getsignal(signal.SIGINT)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    works = [gather(rollout, scenarios(2), model=model()), gather(succeed, scenarios(2), model=model())]
    found = await asyncio.gather(*works, gather(rollout, scenarios(1), model=model()), return_exceptions=True)
    assert [type(f).__name__ for f in found] == ["Interrupted", "Groups", "Interrupted"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_script_gets_interrupted_by_ctrl_c(tmp_path):
    script = textwrap.dedent("""
        import asyncio, sys
        from types import SimpleNamespace
        from artnb.errors import Interrupted
        from artnb.gather import gather
        from artnb.session import last
        from artnb.store import Run

        async def rollout(model, scenario):
            if scenario == 0:
                return 1.0
            try:
                print("running", flush=True)
                await asyncio.sleep(60)
            finally:
                print("cleaned", flush=True)

        async def main():
            run = Run.open("demo", sys.argv[1])
            model = SimpleNamespace(run=run, policy_version=0)
            try:
                await gather(rollout, [0, 1], model=model, group_size=1, progress=False)
            except Interrupted as error:
                stored = list(run.trajectories())
                print("interrupted", len(error.partial), len(last()), len(stored), flush=True)
            try:
                await asyncio.sleep(60)  # outside gather Ctrl-C is asyncio's again
            finally:
                print("left", flush=True)

        asyncio.run(main())
    """)
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "running\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "cleaned\n"
        assert process.stdout.readline() == "interrupted 1 1 1\n"
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=20)
    assert out == "left\n" and "KeyboardInterrupt" in errors
    assert not (tmp_path / "demo/owner.json").exists()


async def test_a_trajectory_made_at_the_end_lasts_as_long_as_its_rollout():
    async def rollout(model, scenario):
        await asyncio.sleep(0.05)
        return Trajectory(reward=1.0)

    before = time.time()
    groups = await gather(rollout, [0], model=SimpleNamespace(run=None), group_size=1, progress=False)
    (trajectory,) = groups.trajectories
    assert 0.05 <= trajectory.seconds < 1 and trajectory.started < before + 0.05


def answer_to(client, asked):
    """The kernel's reply to this request; late ones to the start-up's questions are passed over."""
    while True:
        reply = client.get_shell_msg(timeout=10)
        if reply["parent_header"].get("msg_id") == asked:
            return reply["content"]


def test_the_interrupt_button_reaches_a_kernel():
    from jupyter_client.manager import start_new_kernel

    code = textwrap.dedent("""
        import asyncio
        from types import SimpleNamespace
        from artnb.gather import gather
        from artnb.session import last

        async def rollout(model, scenario):
            if scenario:
                print("running", flush=True)
                await asyncio.sleep(60)
            return 1.0

        model = SimpleNamespace(run=None, policy_version=0)
        groups = await gather(rollout, [0, 1], model=model, group_size=1, progress=False)
    """)
    manager, client = start_new_kernel(extra_arguments=["--HistoryManager.enabled=False"])
    try:
        asked = client.execute(code, stop_on_error=False)
        while client.get_iopub_msg(timeout=60)["msg_type"] != "stream":
            continue
        time.sleep(0.2)
        started = time.monotonic()
        manager.interrupt_kernel()
        reply = answer_to(client, asked)
        assert reply["ename"] == "Interrupted" and time.monotonic() - started < 2
        assert "1 of 2 rollouts are finished" in reply["evalue"]
        done = "await gather(rollout, [0], model=None, group_size=1, progress=False); assert len(last()) == 1"
        assert answer_to(client, client.execute(done))["status"] == "ok"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_it_runs_in_a_thread_that_cannot_have_signal_handlers():
    found = []
    work = gather(succeed, scenarios(2), model=model(), group_size=1)
    thread = threading.Thread(target=lambda: found.append(asyncio.run(work)))
    thread.start()
    thread.join()
    assert found[0].status == "complete"


# Mistakes


async def call(**changes):
    options = {"model": model(), **changes}
    return await gather(options.pop("rollout", succeed), options.pop("scenarios", scenarios(1)), **options)


def not_async(model, scenario):
    return 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scenarios": []}, "scenarios is empty"),
        ({"scenarios": Scenario("one")}, r"pass \[scenario\]"),
        ({"scenarios": "train"}, "got str"),
        ({"rollout": None}, "without calling it"),
        ({"rollout": not_async}, "not_async is not async. Write it as `async def"),
        ({"rollout": lambda m, s: 1.0}, "returned float, no awaitable"),
        ({"group_size": 0}, "group_size must be a whole number >= 1, got 0"),
        ({"group_size": 2.5}, "group_size"),
        ({"concurrency": 0}, "concurrency"),
        ({"retries": -1}, "retries"),
        ({"timeout": 0}, "timeout"),
        ({"max_failures": 1.5}, "max_failures"),
        ({"max_failures": -1}, "max_failures"),
        ({"reward": 1.0}, "reward must be a function"),
        ({"on_interrupt": "ignore"}, "'raise' or 'return'"),
    ],
)
async def test_mistakes_are_told_before_anything_runs(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        await call(**changes)
    assert nobody_else_runs()


async def test_partials_lambdas_and_callable_objects_are_rollouts():
    class Agent:
        async def __call__(self, model, scenario):
            return 1.0

        async def play(self, model, scenario):
            return 1.0

    async def with_option(model, scenario, *, hard):
        return 1.0

    for rollout in (
        Agent(),
        Agent().play,
        functools.partial(with_option, hard=True),
        lambda m, s: succeed(m, s),
    ):
        assert (await call(rollout=rollout)).trajectories[0].reward == 1.0


# The run


async def test_every_attempt_is_written_as_it_finishes(tmp_path):
    seen = []

    async def rollout(model, scenario):
        if scenario.id == "s1":
            await asyncio.sleep(0.2)
            seen.extend(t.scenario_id for t in model.run.trajectories())
            raise ValueError("late")
        return Trajectory([turn()], reward=1.0)

    with Run.open("demo", tmp_path) as run:
        groups = await gather(rollout, scenarios(2), model=model(run), group_size=1, split="test")
        assert seen == ["s0"]
        stored = list(run.stored(0, "test"))
        assert [s.trajectory for s in stored] == groups.trajectories
        assert stored[1].trajectory.error.type == "ValueError"
        event = run.events()[-1]
        assert (event["kind"], event["done"], event["failed"], event["status"]) == (
            "gather",
            2,
            1,
            "complete",
        )
        assert groups[0].metadata["gather_id"] == event["gather_id"] == stored[0].gather_id


async def test_a_run_that_was_taken_over_stops_gather(tmp_path):
    async def rollout(model, scenario):
        if scenario.id == "s0":
            model.run._owner._lost_to = {"pid": 4711}
            return 1.0
        await asyncio.sleep(60)

    with Run.open("demo", tmp_path) as run:
        with pytest.raises(RunInUse, match="taken over by process 4711"):
            await gather(rollout, scenarios(3), model=model(run), group_size=1)
        run._owner._lost_to = None
    assert nobody_else_runs() and [t.scenario_id for t in last().trajectories] == ["s0"]


async def test_finished_rollouts_of_a_killed_process_are_reused(tmp_path):
    script = textwrap.dedent(f"""
        import asyncio, os, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from test_gather import *
        run = Run.open("demo", sys.argv[1])
        calls.clear()
        os.environ["KILL_AFTER"] = "5"
        asyncio.run(gather(counted, scenarios(2), model=model(run), group_size=4, concurrency=1))
    """)
    process = subprocess.run([sys.executable, "-c", script, str(tmp_path)])
    assert process.returncode == -signal.SIGKILL
    calls.clear()
    with Run.open("demo", tmp_path) as run:
        assert list(run.trajectories()) == []
        left = sum(1 for _ in (run.path / "trajectories/step_000000.jsonl").open())
        groups = await gather(counted, scenarios(2), model=model(run), group_size=4)
        assert left >= 4 and len(calls) == 8 - left
        assert [len(g) for g in groups] == [4, 4]
        assert sorted(t.id for t in run.trajectories()) == sorted(t.id for t in groups.trajectories)
        reused = [e for e in run.events() if e["kind"] == "reused"]
        assert len(reused) == 1 and len(reused[0]["trajectories"]) == left
        calls.clear()
        await gather(counted, scenarios(2), model=model(run), group_size=4)
        assert len(calls) == 8  # each is reused once


calls: list[str] = []


async def counted(model, scenario):
    calls.append(scenario.id)
    if len(calls) > int(os.environ.get("KILL_AFTER", 1000)):
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(0.05)
    return Trajectory([turn()], reward=1.0)


@pytest.mark.parametrize(
    "change", ["nothing", "policy", "scenario", "split", "failed", "incomplete", "sampling"]
)
async def test_only_a_rollout_that_would_be_the_same_is_reused(tmp_path, change):
    async def rollout(model, scenario):
        calls.append(scenario.id)
        if change == "failed" and len(calls) == 1:
            raise ValueError("no")
        return Trajectory([turn()], reward=1.0)

    calls.clear()
    with Run.open("demo", tmp_path) as run:
        await gather(rollout, [Scenario("s")], model=model(run), group_size=1, max_failures=None)
        file = run.path / "trajectories/step_000000.jsonl"
    lines = file.read_text().replace(Stored.__dataclass_fields__["process"].default, "earlier")
    file.write_text(lines.replace('"members":1', '"members":2') if change == "incomplete" else lines)
    calls.clear()
    calls.append("earlier")
    with Run.open("demo", tmp_path) as run:
        player = model(run, policy_version=1 if change == "policy" else 0)
        player.sampling = "colder" if change == "sampling" else None
        scenario = Scenario("s", seed=1 if change == "scenario" else 0)
        split = "test" if change == "split" else "train"
        await gather(rollout, [scenario], model=player, group_size=1, split=split)
    assert len(calls) == (1 if change == "nothing" else 2)
