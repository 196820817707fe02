"""■ and clicks are noticed while a cell awaits, on the kernels that notebooks really run on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from kernel_tools import OLD_KERNELS, old_kernel, running_kernel
from steps import group, open_fake

import artnb as nb
from artnb import comm_pump
from artnb.session import session
from artnb.ui import Live, detect

SETUP = """
import asyncio, signal, sys, threading
import artnb as nb
from artnb import comm_pump

try:
    from comm import create_comm
except ImportError:  # ipykernel 6.17
    from ipykernel.comm import Comm as create_comm

shell = get_ipython().kernel
clicked, released = threading.Event(), threading.Event()

def on_click(message):
    print("heard a click")
    clicked.set()

comm = create_comm(target_name="test")
comm.on_msg(on_click)

async def until_clicked(model, scenario):
    print("ready", len(comm_pump._running), flush=True)
    for _ in range(50 if scenario == "short" else 300):
        if clicked.is_set():
            return 1.0
        await asyncio.sleep(0.1)
    return 0.0

async def one_is_quick(model, scenario):
    if scenario != "quick":
        print("waiting", flush=True)
        await asyncio.sleep(300)
    return 1.0

async def stubborn(model, scenario):
    print("begun", flush=True)
    while not released.is_set():
        try:
            await asyncio.sleep(300)
        except asyncio.CancelledError:
            print("cleaning", flush=True)

class SlowTrainer(nb.FakeBackend):
    # Micro-batches of 0.1 s in a worker thread, for 30 s or until a click; a stubborn one hears a click only.
    steps_are_slow = True
    teacher_is_slow = is_stubborn = False

    async def forward_backward(self, samples, config, *, loss_denominator):
        stop = threading.Event()

        def train():
            for _ in range(300):
                if clicked.is_set() or stop.wait(0.1):
                    return

        if self.steps_are_slow:
            print("training", flush=True)
            micro_batches = asyncio.ensure_future(asyncio.to_thread(train))
            try:
                await asyncio.shield(micro_batches)
            except asyncio.CancelledError:
                if not self.is_stubborn:
                    stop.set()
                print("cancelled", flush=True)
                await micro_batches
                raise
            print("clicked", clicked.is_set())
        return await super().forward_backward(samples, config, loss_denominator=loss_denominator)

    async def score(self, samples, config, *, base):
        if self.teacher_is_slow:
            print("reading", flush=True)
            await asyncio.sleep(300)
        return [[-0.1] * sum(row.is_sampled_T) for row in samples]

def group():
    turn = nb.Turn((1, 2), (3, 4), (-0.5, -0.5), model.policy_version, "stop", {"role": "assistant"})
    return [nb.TrajectoryGroup([nb.Trajectory([turn], reward=r) for r in (0.0, 1.0)])]

backend = SlowTrainer()
model = nb.Model(run="demo", backend=backend)
options = {"model": model, "progress": False}
handler = signal.getsignal(signal.SIGINT)
"""

KERNELS = ["installed", *(pytest.param(version, marks=pytest.mark.slow) for version in OLD_KERNELS)]
OLD = list(OLD_KERNELS)


def set_up(kernel):
    """Run SETUP; returns the id of its comm."""
    kernel.run(SETUP)
    return kernel.run("print(comm.comm_id)").strip()


@pytest.fixture(scope="module", params=KERNELS)
def kernel(request, tmp_path_factory):
    """A kernel that ran SETUP; each test leaves it ready for the next one's cells."""
    python = sys.executable if request.param == "installed" else old_kernel(request.param)
    with running_kernel(tmp_path_factory.mktemp("kernel"), python) as opened:
        opened.comm_id = set_up(opened)
        yield opened


@pytest.fixture
def fresh(kernel):
    """The same kernel with nothing clicked, and afterwards nothing left in its works."""
    kernel.run("clicked.clear()")
    yield kernel
    left = """
print(vars(shell).get("dispatch_shell"), comm_pump._running, signal.getsignal(signal.SIGINT) is handler)
lock = getattr(shell, "_main_asyncio_lock", None)
print(lock is None or type(lock) is asyncio.Lock)
"""
    assert kernel.run(left).split() == ["None", "{}", "True", "True"]


# Clicks


def test_a_click_is_heard_while_a_rollout_awaits(fresh):
    cell = fresh.start("""
groups = await nb.gather(until_clicked, ["long"], group_size=1, **options)
print("reward", groups.trajectories[0].reward)
""")
    cell.prints("ready")
    clicked = fresh.click(fresh.comm_id)
    assert "reward 1.0" in cell.output()
    heard = [m["content"]["text"] for m in fresh.published(clicked, "stream")]
    assert "".join(heard) == "heard a click\n", "a callback's output is the click's, not the cell's"


def test_a_click_is_heard_while_a_step_trains_in_its_thread(fresh):
    cell = fresh.start("result = await nb.train_step(model, group()); print(nb.last() is result)")
    cell.prints("training")
    fresh.click(fresh.comm_id)
    assert "clicked True" in cell.output() and cell.text.endswith("True\n")


def test_what_waits_for_the_cell_goes_on_waiting_and_is_not_lost(fresh):
    first = fresh.start("groups = await nb.gather(until_clicked, ['long'], **options); print('first')")
    second = fresh.start("print('second', clicked.is_set())")
    first.prints("ready")
    asked = fresh.client.complete("groups.traj")
    for _ in range(3):  # all of them are looked at in passing, several times
        fresh.click("nobody")
    fresh.click(fresh.comm_id)
    assert "first" in first.output() and second.output() == "second True\n"
    assert list(fresh.replies).index(first.identity) < list(fresh.replies).index(second.identity)
    fresh.wait(lambda: asked in fresh.replies, "an answer that waited")
    assert fresh.replies[asked]["matches"]


def test_primitives_inside_each_other_and_side_by_side_share_one_session(fresh):
    cell = fresh.start("""
async def nested(model, scenario):
    return (await nb.gather(until_clicked, ["long"], group_size=1, **options)).trajectories[0].reward

both = await asyncio.gather(*(nb.evaluate(nested, [s], split="train", **options) for s in "ab"))
print("rewards", [one.mean_reward for one in both])
""")
    cell.prints("ready")
    fresh.click(fresh.comm_id)
    assert "rewards [1.0, 1.0]" in cell.output()


def test_cells_and_clicks_go_on_beside_a_primitive_in_the_background(fresh):
    cell = fresh.start("task = asyncio.create_task(nb.gather(until_clicked, ['long'], **options))")
    cell.prints("ready")
    assert fresh.run("print('beside')") == "beside\n"
    fresh.click(fresh.comm_id)
    assert fresh.run("print((await task).trajectories[0].reward)").endswith("1.0\n")


@pytest.mark.slow
@pytest.mark.parametrize("version", OLD)
def test_the_pump_can_be_switched_off(version, tmp_path):
    with running_kernel(tmp_path, old_kernel(version), ARTNB_COMM_PUMP="0") as kernel:
        comm = set_up(kernel)
        cell = kernel.start("print((await nb.gather(until_clicked, ['short'], **options)).trajectories[0])")
        cell.prints("ready 0")
        kernel.click(comm)
        assert cell.output()
        assert kernel.run("print(clicked.is_set(), nb.last().trajectories[0].reward)") == "True 0.0\n"


@pytest.mark.slow
@pytest.mark.parametrize("version", OLD)
def test_a_real_button_is_answered_and_its_page_hears_that_it_was(version, tmp_path):
    with running_kernel(tmp_path, old_kernel(version)) as kernel:
        kernel.run(SETUP)
        button = kernel.run("""
import ipywidgets
button, slider = ipywidgets.Button(), ipywidgets.IntSlider()
button.on_click(on_click)
print(button.comm.comm_id)
""").split()[-1]
        cell = kernel.start("print((await nb.gather(until_clicked, ['long'], **options)).status)")
        cell.prints("ready 1")
        message = kernel.click(button, {"method": "custom", "content": {"event": "click"}})
        assert "complete" in cell.output()
        states = [m["content"]["execution_state"] for m in kernel.published(message, "status")]
        assert states == ["busy", "idle"], "ipywidgets sends its next change of state only then"


@pytest.mark.slow
def test_a_subshell_goes_its_own_way(tmp_path):
    with running_kernel(tmp_path, old_kernel("7.3.0")) as kernel:
        comm = set_up(kernel)
        subshell = kernel.new_subshell()
        cell = kernel.start("print((await nb.gather(until_clicked, ['long'], **options)).status)")
        cell.prints("ready 1")
        beside = kernel.start("print('beside', clicked.is_set())", subshell=subshell)
        assert beside.output() == "beside False\n", "it does not wait for the main shell's cell"
        kernel.click(comm, subshell=subshell)  # as JupyterLab does
        assert "complete" in cell.output()


def test_an_ipykernel_that_is_built_otherwise_is_left_alone_after_a_warning(tmp_path):
    with running_kernel(tmp_path) as kernel:
        comm = set_up(kernel)
        kernel.run("comm_pump._SEES_TO_IT_ITSELF = (99,)")  # this one does, and not as older ones could
        cell = kernel.start("print((await nb.gather(until_clicked, ['long'], **options)).status)")
        cell.prints("ready 0")
        kernel.click(comm)
        assert "complete" in cell.output() and "not as artnb knows it" in cell.text
        assert kernel.run("print(vars(shell).get('dispatch_shell'), comm_pump._running)") == "None {}\n"


async def test_an_unknown_kernel_of_the_old_kind_is_left_alone_after_a_warning(monkeypatch):
    unknown = SimpleNamespace(io_loop=SimpleNamespace(asyncio_loop=asyncio.get_running_loop()))
    monkeypatch.setattr(comm_pump, "find_kernel", lambda: unknown)
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace(version_info=(6, 17, 1, "", "")))
    with pytest.warns(RuntimeWarning, match="no attribute 'session'"):
        async with session(lambda: None):
            await asyncio.sleep(0.15)
    monkeypatch.setenv("ARTNB_COMM_PUMP", "0")
    async with session(lambda: None):
        await asyncio.sleep(0)


# ■


def test_an_interrupted_gather_leaves_what_was_finished(fresh):
    cell = fresh.start("groups = await nb.gather(one_is_quick, ['quick', 'slow'], group_size=1, **options)")
    cell.prints("waiting")
    fresh.interrupt()
    reply = cell.reply()
    assert reply["ename"] == "Interrupted" and "1 of 2 rollouts are finished" in reply["evalue"]
    assert fresh.run("print(nb.last().status, len(nb.last()))") == "interrupted 1\n"
    assert fresh.run("print(len(await nb.gather(one_is_quick, ['quick'], **options)))") == "1\n"


def test_an_interrupted_gather_returns_what_was_finished_when_asked(fresh):
    cell = fresh.start("""
groups = await nb.gather(
    one_is_quick, ["quick", "slow"], group_size=1, on_interrupt="return", **options
)
print(groups.status, len(groups), nb.last() is groups)
""")
    cell.prints("waiting")
    fresh.interrupt()
    assert "interrupted 1 True" in cell.output()


def test_an_interrupted_evaluation_says_that_it_is_partial(fresh):
    cell = fresh.start("print('here'); await nb.evaluate(one_is_quick, ['quick', 'slow'], **options)")
    cell.prints("waiting")
    fresh.interrupt()
    assert cell.reply()["ename"] == "Interrupted"
    assert (
        fresh.run("print(nb.last().n, nb.last().mean_reward, nb.last().note)")
        == "1 1.0 partial (interrupted)\n"
    )


STEPS = {
    "train_step": "nb.train_step(model, group())",
    "sft_step": "nb.sft_step(model, [group()[0].trajectories[0]])",
    "distill_step": "nb.distill_step(model, group(), 'base')",
}


@pytest.mark.parametrize("step", STEPS)
def test_an_interrupted_step_ends_at_the_next_micro_batch_and_is_undone(fresh, step):
    fresh.run("before, version = await nb.gather(one_is_quick, ['quick'], **options), model.policy_version")
    cell = fresh.start(f"for _ in range(3): await {STEPS[step]}")
    cell.prints("training")
    fresh.interrupt()
    reply = cell.reply()
    assert reply["ename"] == "Interrupted" and "interrupted and undone" in reply["evalue"]
    assert cell.text.count("training") == 1, "the loop in the cell stops too"
    assert fresh.run("print(model.policy_version == version, nb.last() is before)") == "True True\n"
    again = f"clicked.set(); print((await {STEPS[step]}).policy_version == version + 1)"
    assert fresh.run(again).endswith("True\n")


def test_an_interrupt_while_the_teacher_reads_leaves_nothing_to_undo(fresh):
    fresh.run("version, backend.teacher_is_slow = model.policy_version, True")
    cell = fresh.start(f"await {STEPS['distill_step']}")
    cell.prints("reading")
    fresh.interrupt()
    reply = cell.reply()
    assert reply["ename"] == "Interrupted" and "nothing was trained" in reply["evalue"]
    fresh.run("backend.teacher_is_slow = False; clicked.set()")
    assert fresh.run(f"print((await {STEPS['distill_step']}).policy_version - version)").endswith("1\n")


def test_a_second_interrupt_does_not_leave_a_step_half_undone(fresh):
    fresh.run("version, backend.is_stubborn = model.policy_version, True")
    cell = fresh.start("await nb.train_step(model, group())")
    cell.prints("training")
    fresh.interrupt()
    cell.prints("cancelled")
    fresh.interrupt()
    fresh.click(fresh.comm_id)  # only now the micro-batch ends
    assert cell.reply()["ename"] in ("Interrupted", "CancelledError", "KeyboardInterrupt")
    assert fresh.run("backend.is_stubborn = False; print(model.policy_version - version)") == "0\n"
    again = "print((await nb.train_step(model, group())).policy_version - version)"
    assert fresh.run(again).endswith("1\n")


def interrupt_twice_while_it_cleans_up(fresh, code):
    fresh.run("""
released.clear()
gathering = sys.modules["artnb.gather"]
kept, gathering._GRACE_SECONDS = gathering._GRACE_SECONDS, 300.0
""")
    cell = fresh.start(code)
    cell.prints("begun")
    fresh.interrupt()
    cell.prints("cleaning")
    fresh.interrupt()
    assert cell.reply()["ename"] in ("CancelledError", "KeyboardInterrupt")
    fresh.run("released.set(); gathering._GRACE_SECONDS = kept")


def test_a_second_interrupt_ends_an_evaluation_as_well(fresh):
    interrupt_twice_while_it_cleans_up(fresh, "await nb.evaluate(stubborn, ['a'], **options)")
    again = "print((await nb.evaluate(one_is_quick, ['quick'], **options)).n)"
    assert fresh.run(again) == "1\n"


def test_a_second_interrupt_does_not_wait_for_a_rollout_that_cleans_up(fresh):
    interrupt_twice_while_it_cleans_up(fresh, "await nb.gather(stubborn, ['a'], group_size=1, **options)")
    assert fresh.run("print(len(await nb.gather(one_is_quick, ['quick'], **options)))") == "1\n"


# What is kept


async def test_last_is_what_the_latest_primitive_finished(tmp_path):
    async def rollout(model, scenario):
        if scenario == "stop":
            await asyncio.sleep(0.01)
            raise KeyboardInterrupt
        return 1.0

    with open_fake(tmp_path) as model:
        options = {"model": model, "progress": False}
        groups = await nb.gather(rollout, ["a"], **options)
        assert nb.last() is groups
        result = await nb.train_step(model, [group(0, 1)])
        assert nb.last() is result
        evaluation = await nb.evaluate(rollout, ["a", "b"], **options)
        assert nb.last() is evaluation and evaluation.status == "complete" and evaluation.note == ""
        with pytest.raises(nb.Interrupted) as caught:
            await nb.evaluate(rollout, ["a", "stop"], **options)
        partial = caught.value.partial
        assert nb.last() is partial and (partial.n, partial.status) == (1, "interrupted")
        assert partial.to_json()["note"] == "partial (interrupted)" and "partial" in repr(partial)
        returned = await nb.evaluate(rollout, ["a", "stop"], on_interrupt="return", **options)
        assert (returned.n, returned.status) == (1, "interrupted")
        shown = await nb.sft_step(
            model, [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
        )
        assert nb.last() is shown


async def test_a_step_that_is_undone_leaves_the_groups_to_train_on_again(tmp_path, monkeypatch):
    async def rollout(model, scenario):
        return 1.0

    with open_fake(tmp_path) as model:
        groups = await nb.gather(rollout, ["a"], model=model, progress=False)
        publish = model.backend.publish_weights

        async def press_stop(version):
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0.01)
            return await publish(version)

        monkeypatch.setattr(model.backend, "publish_weights", press_stop)
        with pytest.raises(nb.Interrupted, match="undone"):
            await nb.train_step(model, [group(0, 1)])
        assert nb.last() is groups and model.policy_version == 0


async def test_a_time_limit_keeps_what_was_finished(tmp_path):
    cleaned = []

    async def rollout(model, scenario):
        try:
            await asyncio.sleep(0 if scenario == "quick" else 60)
        finally:
            cleaned.append(scenario)
        return 1.0

    async def blocking(model, scenario):
        time.sleep(0.05)
        return 1.0

    with open_fake(tmp_path) as model:
        options = {"model": model, "progress": False, "group_size": 1}
        with pytest.raises(nb.Stopped, match=r"time_limit of 0.1 s: 1 of 2 rollouts") as caught:
            await nb.gather(rollout, ["quick", "slow"], time_limit=0.1, **options)
        assert not isinstance(caught.value, nb.Interrupted) and sorted(cleaned) == ["quick", "slow"]
        returned = await nb.gather(
            rollout, ["quick", "slow"], time_limit=0.1, on_interrupt="return", **options
        )
        for partial in (caught.value.partial, returned):
            assert partial.status == "timeout" and [g.scenario_id for g in partial] == ["0"]
        with pytest.raises(nb.ConfigurationError, match="'timeout'"):
            await nb.train_step(model, returned)
        in_time = await nb.gather(rollout, ["quick"], time_limit=60, **options)
        just_in_time = await nb.gather(blocking, ["quick"], time_limit=0.01, **options)
        assert in_time.status == just_in_time.status == "complete"
        with pytest.raises(nb.ConfigurationError, match="time_limit must be"):
            await nb.gather(rollout, ["quick"], time_limit=0, **options)


async def test_a_session_leaves_no_task_and_no_handler_behind():
    before, tasks = signal.getsignal(signal.SIGINT), asyncio.all_tasks()
    with pytest.raises(ValueError, match="inside"):
        async with session(lambda: None):
            assert signal.getsignal(signal.SIGINT) is not before
            raise ValueError("inside")
    assert signal.getsignal(signal.SIGINT) is before and asyncio.all_tasks() == tasks


def test_a_session_in_another_thread_sets_no_handler():
    before, found = signal.getsignal(signal.SIGINT), []

    async def work():
        async with session(lambda: None):
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    thread.join()
    assert found == [before]


# Where are we?

FRONT_ENDS = {
    "papermill": ({}, "html"),
    "JupyterLab": ({"JPY_SESSION_NAME": "a.ipynb"}, "live"),
    "VS Code": ({"VSCODE_PID": "7"}, "live"),
    "Colab": ({"COLAB_RELEASE_TAG": "release"}, "live"),
    "Kaggle": ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "live"),
    "Kaggle, Save & Run All": ({"KAGGLE_KERNEL_RUN_TYPE": "Batch", "COLAB_GPU": "1"}, "html"),
    "told otherwise": ({"JPY_SESSION_NAME": "a.ipynb", "ARTNB_UI": "text"}, "text"),
}


@pytest.mark.parametrize("place", FRONT_ENDS)
def test_a_kernel_is_batch_work_until_it_is_proven_interactive(place, monkeypatch):
    variables, mode = FRONT_ENDS[place]
    for name in [
        name for name in os.environ if name.startswith(("ARTNB_UI", "COLAB_", "KAGGLE_", "JPY_", "VSCODE_"))
    ]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    shell = SimpleNamespace(kernel=object(), user_ns={}, execution_count=1)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert detect() == mode
    assert Live().mode == ("html" if mode == "live" else mode), "it is no widget and looks the same in both"
    if mode == "html" and place == "papermill":
        shell.user_ns["__vsc_ipynb_file__"] = "a.ipynb"
        assert detect() == "live"


def test_a_kernel_that_a_cell_started_is_batch_work():
    ask = "from artnb.ui import display; print(display._is_started_by_a_cell())"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ask!r}])"

    def answer(**environment):
        variables = {k: v for k, v in os.environ.items() if k != "JPY_PARENT_PID"} | environment
        found = subprocess.run(
            [sys.executable, "-c", start], env=variables, capture_output=True, text=True, check=True
        )
        return found.stdout

    assert answer() == "False\n" and answer(JPY_PARENT_PID="7") == "True\n"
