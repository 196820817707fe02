"""Does the plan count what there is, and say what a process really comes to hold?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from known_models import DEEPSEEK, KIMI, KNOWN, MIXTRAL, QWEN_3B, QWEN_7B, QWEN_HALF_B, QWEN_MOE
from steps import open_model, play

import artnb as nb
from artnb.architecture import architecture, built, read_config
from artnb.backends.local import LocalBackend
from artnb.config import LoraConfig
from artnb.errors import ConfigurationError
from artnb.measure import measure, pace, plan_model
from artnb.memory import FOUR_BITS, Setting, engine_budget
from artnb.plan import plan

# ---- parameters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KNOWN)
def test_it_counts_what_transformers_builds(name):
    published, parameters = KNOWN[name]
    config = read_config(published)
    counted, real = architecture(config), built(config)
    assert counted.parameters == real.parameters == parameters
    assert counted.active_parameters == real.active_parameters
    assert (counted.other, counted.experts, counted.tied) == (real.other, real.experts, real.tied)

    def by_shape(linears: Any) -> dict[Any, int]:
        kinds: dict[Any, int] = {}
        for x in linears:
            key = (x.name, x.inputs, x.outputs, x.bias)
            kinds[key] = kinds.get(key, 0) + x.count
        return kinds

    assert by_shape(counted.linears) == by_shape(real.linears)


@pytest.mark.parametrize(
    ("config", "active"), [(DEEPSEEK, 37.5e9), (KIMI, 32.9e9), (MIXTRAL, 12.9e9), (QWEN_MOE, 3.35e9)]
)
def test_it_knows_how_many_parameters_a_token_uses(config, active):
    assert architecture(read_config(config)).active_parameters == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        *((name, "all-linear") for name in ("Qwen2.5-0.5B", "Qwen3-0.6B", "Gemma-2B")),
        # of these peft would also adapt the experts, which are no linear layers and our trainers refuse
        ("Qwen3-30B-A3B", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("DeepSeek-V3", ("q_b_proj", "kv_b_proj", "o_proj")),
    ],
)
def test_it_counts_the_adapter_that_peft_makes(name, targets):
    import peft
    import torch
    import transformers

    config = read_config(KNOWN[name][0])
    lora = LoraConfig(rank=16, targets=targets)
    names = targets if isinstance(targets, str) else list(targets)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(r=16, target_modules=names), low_cpu_mem_usage=True
        )
    real = sum(p.numel() for n, p in adapted.named_parameters() if ".lora_" in n)
    assert architecture(config).adapter_parameters(lora) == real


def test_it_counts_a_family_it_has_no_formula_for():
    config = read_config(
        {
            "model_type": "phi",
            "num_hidden_layers": 2,
            "hidden_size": 128,
            "vocab_size": 100,
            "intermediate_size": 256,
            "num_attention_heads": 4,
        }
    )
    found = architecture(config)
    # phi: q, k, v, dense, fc1, fc2 with biases, one norm with a bias a layer and one at the end, a head bias
    layer = 4 * (128 * 128 + 128) + (128 * 256 + 256) + (256 * 128 + 128) + 256
    assert found.parameters == 2 * layer + 256 + 2 * 100 * 128 + 100


# ---- bytes ------------------------------------------------------------------------------------------


def test_it_knows_the_bytes_of_a_cached_token():
    assert architecture(read_config(QWEN_7B)).kv_bytes(1, 2) == 2 * 28 * 4 * 128 * 2
    assert architecture(read_config(KIMI)).kv_bytes(1, 2) == 61 * (512 + 64) * 2
    gemma3 = architecture(read_config(KNOWN["Gemma-3-1B"][0] | {"sliding_window": 512}))
    assert gemma3.kv_bytes(2048, 2) == 2 * 1 * 256 * 2 * (4 * 2048 + 22 * 512)  # every sixth layer sees all


def test_four_bits_leave_embeddings_and_norms_alone():
    found = plan(QWEN_7B, "L4", load_in_4bit=True)
    linear = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    rest = 7_615_616_512 - linear
    assert found.setting.bytes_of("base weights") == pytest.approx(linear * FOUR_BITS + 2 * rest, abs=2)
    assert 5.4e9 < found.setting.bytes_of("base weights") < 5.8e9  # published 4-bit checkpoint: 5.55 GB


def test_it_says_whether_engine_and_trainer_share_the_base():
    assert plan(QWEN_3B, "A100-40").weight_copies == 1
    two = plan(QWEN_3B, "A100-40", trainer="peft")
    assert two.setting.bytes_of("engine weights") == two.setting.bytes_of("base weights") == 2 * 3_085_938_688
    assert two.weight_copies == 3  # base, merged for the trainer, the engine's
    assert "two copies of the base weights" in repr(two)
    assert "two copies of the base weights" not in repr(plan(QWEN_3B, "A100-40"))
    assert plan(None, "cpu", dtype="bfloat16").weight_copies == 3  # base, merged for the trainer, packed


def test_it_plans_the_default_models():
    checkpointed = {"context": 2048, "gradient_checkpointing": True}
    assert plan(QWEN_3B, "T4", load_in_4bit=True, **checkpointed).fits
    assert plan(QWEN_3B, "T4").setting.dtype == "float16"
    assert not plan(QWEN_7B, "T4", **checkpointed).fits
    assert plan(QWEN_7B, "H100", **checkpointed).fits
    assert not plan(KIMI, "H200", load_in_4bit=True).fits


def test_it_says_what_to_lower():
    found = plan(QWEN_7B, "T4")
    assert not found.fits and found.left < 0
    assert any(line.startswith("load_in_4bit=True saves") for line in found.advice)
    assert any(line.startswith("gradient_checkpointing=True saves") for line in found.advice)
    together = "together these fit: load_in_4bit=True, gradient_checkpointing=True"
    assert found.advice[-1].startswith(together)
    lower = {"load_in_4bit": True, "gradient_checkpointing": True, "context": 2048, "microbatch_tokens": 2048}
    assert plan(QWEN_7B, "T4", **lower).fits
    assert "smaller base" in plan(KIMI, "T4").advice[-1]
    assert plan(QWEN_3B, "H200").advice == []


def test_the_longest_context_fits_and_a_longer_one_does_not():
    found = plan(QWEN_3B, 30 << 30, context=2048, load_in_4bit=True)
    longest = found.longest_context
    assert 256 <= longest < 32768
    assert found.setting.with_context(longest).fits
    assert not found.setting.with_context(longest + 256).fits


def test_the_cache_holds_as_many_trajectories_as_it_says():
    # 36,864 bytes a token: 1,024 own tokens of each, and the prompts of 8 groups
    room = 10 * 1024 * 36_864 + 8 * 1024 * 36_864
    assert plan(QWEN_3B, "A100-80", context=2048, kv_bytes=room).concurrency == 10
    assert plan(QWEN_3B, "A100-80", context=2048).concurrency == 64
    small = plan(None, "cpu", dtype="bfloat16", context=512, kv_bytes=40 * 256 * 23_040)
    assert small.concurrency == 40


def test_all_weights_take_many_times_their_size():
    """Base, trained, published and the engine's copy in bfloat16; in float32 what learns, its gradient, two
    moments, and weights and moments before the step."""
    plain = plan(QWEN_HALF_B, "A100-80", full_finetuning=True).setting
    small = plan(QWEN_HALF_B, "A100-80", full_finetuning=True, optimizer="adamw_8bit").setting
    names = ("base weights", "merged weights", "engine weights", "trained weights", "optimizer", "gradients")
    biases = 24 * (896 + 2 * 128)
    assert plain.trained == plain.architecture.parameters - biases
    for setting, each in ((plain, 4 * 2 + 4 + 4 + 8 + 12), (small, 4 * 2 + 4 + 4 + 2 + 6)):
        held = sum(map(setting.bytes_of, (*names, "undo")))
        assert held == pytest.approx(each * setting.trained, rel=0.01)
    assert plain.trainer == "peft" and plain.bytes_of("adapter") == 0
    assert plan(MIXTRAL, "H200", full_finetuning=True).setting.trained < 2e9, "stacked experts do not learn"


def test_it_says_how_all_weights_could_learn_in_less():
    found = plan(QWEN_3B, "A100-80", full_finetuning=True, context=2048)
    assert not found.fits
    assert any(line.startswith('optimizer="adamw_8bit" saves') for line in found.advice)
    (adapter,) = [
        line for line in found.advice if line.startswith("full_finetuning=False (an adapter) saves")
    ]
    assert adapter.endswith(": then it fits")
    assert not any("load_in_4bit" in line or 'trainer="unsloth"' in line for line in found.advice)
    assert plan(QWEN_HALF_B, "A100-80", full_finetuning=True).fits


def gpu(size: int, trainer: str = "unsloth", **use: Any) -> Setting:
    """Qwen2.5-3B on a GPU of that many bytes, without the parts that this test does not argue about."""
    about = {"base": "3B", "device": "gpu", "capacity": size, "dtype": "bfloat16", "engine": "vllm"}
    return Setting.of(
        read_config(QWEN_3B), lora=LoraConfig(), trainer=trainer, **{**about, "context": 2048, **use}
    )


def by_phase(setting: Setting) -> dict[str, int]:
    others = [item for item in setting.items if item.name != "KV cache"]
    return {
        phase: sum(i.bytes for i in others if i.phase == phase) for phase in ("held", "sampling", "training")
    }


def test_the_engine_stays_awake_where_its_cache_fits_beside_a_training_step():
    needed = 36_864 * (64 * 1024 + 8 * 1024)  # own tokens of 64 trajectories, prompts of 8 groups
    budget = engine_budget(gpu(80 << 30))
    assert (budget.kv_bytes, budget.sleeps, budget.sequences) == (needed, False, 64)
    parts = by_phase(gpu(80 << 30))
    assert parts["training"] > parts["sampling"]
    just = int((needed + parts["held"] + parts["training"]) / 0.95) + 2
    assert not engine_budget(gpu(just)).sleeps and gpu(just).fits
    less = gpu(just - 1000)
    assert engine_budget(less).sleeps and engine_budget(less).kv_bytes == needed and less.fits


def test_a_sleeping_engine_takes_what_sampling_leaves():
    parts = by_phase(gpu(80 << 30))
    room = 36_864 * 20_000
    small = gpu(int((parts["held"] + parts["sampling"] + room) / 0.95))
    budget = engine_budget(small)
    assert budget.sleeps and budget.kv_bytes == pytest.approx(room, abs=2)
    assert budget.sequences == (20_000 - 8 * 1024) // 1024
    assert budget.engine_bytes < 0.95 * small.capacity
    least = engine_budget(gpu(1 << 30))  # too small for the model: still one trajectory
    assert least.kv_bytes == 36_864 * 2048 and not gpu(1 << 30).fits


def test_a_cache_of_a_given_size_may_have_to_sleep_too():
    size = 40 << 30
    parts = by_phase(gpu(size, kv_bytes=1 << 30))
    beside = int(0.95 * size) - parts["held"] - parts["training"]
    assert not engine_budget(gpu(size, kv_bytes=beside)).sleeps
    asleep = engine_budget(gpu(size, kv_bytes=beside + 1))
    assert asleep.sleeps and asleep.kv_bytes == beside + 1


def test_the_budget_counts_the_engine_s_own_copy_of_the_weights():
    one, two = engine_budget(gpu(80 << 30)), engine_budget(gpu(80 << 30, "peft"))
    assert (one.weight_copies, two.weight_copies) == (1, 2)
    assert one.engine_bytes == two.engine_bytes  # shared or not, vLLM counts them
    assert one.engine_bytes > one.kv_bytes + 2 * 3_085_938_688
    on_cpu = engine_budget(gpu(16 << 30, "peft", device="cpu"))
    assert (on_cpu.sleeps, on_cpu.weight_copies) == (False, 2)
    assert gpu(16 << 30, "peft", device="cpu", context=256, groups=1).items[-1].phase == "held"


def test_it_counts_the_tokens_and_minutes_of_a_step():
    found = plan(
        QWEN_3B,
        "A100-40",
        context=1000,
        prompt=600,
        sampled=300,
        group_size=4,
        groups=2,
        sampled_per_second=100,
        trained_per_second=200,
    )
    assert found.tokens_per_step == {"sampled": 8 * 300, "packed": 2 * 600 + 8 * 400, "rows": 8000}
    assert found.minutes_per_step == pytest.approx((2400 / 100 + 4400 / 200) / 60)
    assert "expected: 46.0 s a step" in repr(found)
    assert plan(QWEN_3B, "A100-40").minutes_per_step is None
    assert "expected: not measured yet" in repr(plan(QWEN_3B, "A100-40"))


def test_the_pace_is_the_median_of_the_last_gathered_and_trained_steps():
    def line(seconds: float, **more: Any) -> dict[str, Any]:
        sizes = {"tokens_sampled": 100, "packed_tokens": 300, "tokens_per_second_train": 50.0}
        times = {"seconds_gather": 20.0, "seconds_train": 6.0, "seconds": seconds}
        return {"kind": "train", **sizes, **times, "tokens_per_second_gather": 5.0} | more

    skipped = {"kind": "train", "tokens_sampled": 100, "seconds_gather": 20.0, "seconds": 0.1}
    supervised = line(1.0, kind="sft")
    assert pace([]) is pace([skipped, supervised]) is None
    found = pace([line(1000.0), *(line(10.0 + i) for i in range(5)), skipped, supervised])
    assert found is not None
    assert (found.steps, found.sampled, found.packed) == (5, 100, 300)
    assert found.minutes == pytest.approx((20 + 12) / 60) and found.other_seconds == 6
    assert (found.sampled_per_second, found.trained_per_second) == (5, 50)


def test_it_reads_as_text_as_html_and_as_data():
    found = plan(QWEN_3B, "T4", load_in_4bit=True)
    assert "base weights" in repr(found) and "advice 1: " in repr(found)
    assert "<table>" in found._repr_html_() and "KV cache" in found._repr_html_()
    again = json.loads(json.dumps(found.to_dict()))
    assert again["total"] == found.total and again["fits"] is False
    odd = plan(QWEN_3B | {"name_or_path": "<b>x"}, "T4")
    assert "<b>x" not in odd._repr_html_()


# ---- mistakes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "TPU"}, "device must be"),
        ({"device": -1}, "device must be"),
        ({"context": 0}, "context must be >= 1"),
        ({"context": 100_000}, "positions for 32768"),
        ({"context": 100, "prompt": 80, "sampled": 40}, "do not fit a context of 100"),
        ({"device": "cpu", "load_in_4bit": True}, "load_in_4bit needs a GPU"),
        ({"trainer": "peft", "load_in_4bit": True}, 'load_in_4bit needs trainer="unsloth"'),
        ({"engine": "sglang"}, "engine must be"),
        ({"dtype": "int8"}, "dtype must be"),
        ({"lora": LoraConfig(targets=("c_attn",))}, "c_attn is no linear layer; known: q_proj"),
        ({"lora": LoraConfig(targets=r".*\.q_proj")}, "is no linear layer"),
        ({"optimizer": "sgd"}, "optimizer must be one of adamw, adamw_8bit"),
        ({"full_finetuning": True, "lora": LoraConfig(rank=4)}, "full_finetuning trains no adapter"),
        ({"full_finetuning": True, "trainer": "unsloth"}, 'full_finetuning needs trainer="peft"'),
    ],
)
def test_it_refuses_what_cannot_work(given, message):
    with pytest.raises(ConfigurationError, match=message):
        plan(QWEN_3B, **{"device": "T4", **given})


def test_it_says_when_a_configuration_cannot_be_had(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        plan(tmp_path, "T4")
    with pytest.raises(ConfigurationError, match="'nothing' cannot be planned"):
        plan({"model_type": "nothing"}, "T4")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match="does not give it"):
        plan("artnb/no-such-model", "T4")


# ---- reality ----------------------------------------------------------------------------------------


def test_the_bundled_models_configuration_is_right(bundled):
    assert plan(None, "T4").setting.architecture == plan(bundled, "T4").setting.architecture


async def test_every_planned_item_is_what_is_held(tiny_model, one_thread):
    backend = LocalBackend(tiny_model, LoraConfig(rank=4), dtype="float32", engine_kwargs={"max_running": 16})
    try:
        compared = plan_model(backend, context=256, prompt=0, group_size=1, groups=1)
        for name in ("base weights", "merged weights", "packed weights", "adapter", "KV cache"):
            planned = compared.plan.setting.bytes_of(name)
            assert planned == pytest.approx(compared.held[name], rel=0.005), name
        assert compared.held["optimizer"] == 0  # until the first step
        assert "planned" in repr(compared) and "<table>" in compared._repr_html_()
        assert compared.to_dict()["plan"]["fits"] is True
    finally:
        await backend.close()


async def test_a_loaded_model_expects_minutes_from_the_steps_that_its_run_took(
    tiny_model, tmp_path, one_thread
):
    with open_model(tiny_model, tmp_path) as model:
        use = {"context": 64, "prompt": 32, "group_size": 4, "groups": 3}
        before = model.plan(**use)
        assert before.plan.minutes_per_step is before.pace is None
        assert "expected: not measured yet" in repr(before) and "measured: no step yet" in repr(before)
        result = await nb.train_step(model, await play(model))
        after = model.plan(**use)
        measured = result.metrics
        assert after.plan.tokens_per_step == {"sampled": 12 * 32, "packed": 3 * 32 + 12 * 32, "rows": 12 * 64}
        seconds = 384 / measured["tokens_per_second_gather"] + 480 / measured["tokens_per_second_train"]
        seconds += measured["seconds"] - measured["seconds_train"]
        assert after.plan.minutes_per_step == pytest.approx(seconds / 60)
        taken = (measured["seconds_gather"] + measured["seconds"]) / 60
        assert after.pace.minutes == pytest.approx(taken) == after.to_dict()["pace"]["minutes"]
        assert f"{measured['packed_tokens']:,.0f} trained tokens (median of the last 1)" in repr(after)


def test_it_measures_only_what_is_in_this_kernel():
    from artnb.backends.fake import FakeBackend

    with pytest.raises(ConfigurationError, match="FakeBackend does not say what it holds"):
        measure(FakeBackend())


def process(folder: Path, **use: Any) -> dict[str, Any]:
    """What a fresh process came to hold that loaded this model, sampled and trained once."""
    script = Path(__file__).with_name("plan_process.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, str(folder), json.dumps({"rank": 8, "steps": 1, **use})],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    planned = {item["name"]: item["bytes"] for item in found["plan"]["items"]}
    copies = {name for name in planned if name.endswith("weights")}
    assert copies == {name for name in found["held"] if name.endswith("weights")}
    for name in (*copies, *({"adapter"} & planned.keys()), "optimizer"):
        assert planned[name] == pytest.approx(found["held"][name], rel=0.02), found["text"]
    for name in ("gradients", "KV cache"):  # the one is dropped by the update, the other's prompts too
        assert planned[name] == pytest.approx(found["during"][name], rel=0.02), found["text"]
    assert found["ratio"] == pytest.approx(1.0, abs=0.15), found["text"]
    return found


def test_the_plan_is_right_for_a_tiny_model(tiny_model):
    use = {"context": 1024, "prompt": 768, "group_size": 8, "groups": 2, "microbatch_tokens": 4096}
    process(tiny_model, dtype="float32", **use)


def test_the_plan_is_right_for_a_model_that_vllm_samples_from(tmp_path, tiny_tokenizer):
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,  # the tables of vLLM's rotation stay small beside its weights
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    use = {"context": 256, "prompt": 128, "group_size": 8, "groups": 2, "microbatch_tokens": 2048}
    engine = {"kv_bytes": 64 << 20, "max_running": 16}
    found = process(tmp_path, dtype="float32", engine="vllm", engine_kwargs=engine, **use)
    assert "vllm + peft" in found["text"] and "two copies of the base weights" in found["text"]


@pytest.fixture
def all_weights(tmp_path, tiny_tokenizer):
    """Folder of 22 M random parameters: in their many copies they outweigh the libraries."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=16_384,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    return tmp_path


FULL: dict[str, Any] = {"trainer_kwargs": {"full_finetuning": True}, "steps": 2}
"""From the second step on, undoing one takes the optimizer's moments too."""


def test_the_plan_is_right_where_all_weights_learn(all_weights):
    use = {"context": 64, "prompt": 32, "group_size": 4, "groups": 2, "microbatch_tokens": 160}
    found = process(all_weights, dtype="float32", engine_kwargs={"kv_bytes": 32 << 20}, **FULL, **use)
    planned = {item["name"]: item["bytes"] for item in found["plan"]["items"]}
    parameters = found["plan"]["parameters"]
    assert found["plan"]["trained_parameters"] == parameters > 20e6
    assert planned["trained weights"] == 8 * parameters and planned["undo"] == 12 * parameters
    assert found["peak"] > 60 * parameters, "it is about the weights"


@pytest.mark.slow
@pytest.mark.parametrize("microbatch_tokens", [512, 4096])
def test_the_plan_is_right_where_all_weights_of_the_bundled_model_learn(bundled, microbatch_tokens):
    use = {"context": 256, "prompt": 128, "group_size": 4, "groups": 2}
    engine = {"kv_bytes": 256 << 20}
    process(
        bundled,
        dtype="bfloat16",
        engine_kwargs=engine,
        **FULL,
        **use,
        microbatch_tokens=microbatch_tokens,
    )


def test_the_plan_is_right_for_the_bundled_model(bundled):
    use = {"context": 224, "prompt": 128, "group_size": 8, "groups": 1, "microbatch_tokens": 1024}
    process(bundled, dtype="bfloat16", **use)


@pytest.mark.slow
def test_the_plan_is_right_for_the_bundled_model_in_several_micro_batches(bundled):
    use = {"context": 512, "prompt": 256, "group_size": 4, "groups": 2, "microbatch_tokens": 1024}
    process(bundled, dtype="bfloat16", **use)


@pytest.mark.slow
def test_the_plan_is_right_for_half_a_billion_parameters(tmp_path, tiny_tokenizer):
    import torch
    import transformers

    config = read_config(QWEN_HALF_B)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    del model
    tiny_tokenizer.save_pretrained(tmp_path)
    use = {"context": 192, "prompt": 64, "group_size": 4, "groups": 1, "microbatch_tokens": 1024}
    process(tmp_path, dtype="bfloat16", **use)
    (tmp_path / "model.safetensors").unlink()  # pytest would keep this gigabyte for three runs
