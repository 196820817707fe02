"""A supervised step: which tokens it learns, with which gradient, and that it is a step of the run."""

import asyncio
import copy
import math
import re

import peft
import pytest
import torch
from chat_tokenizers import make_tokenizer, spelled
from reference_models import load
from steps import LORA, attempt, group, open_fake, open_model, play

import artnb as nb
from artnb.sft import sft_step

pytestmark = pytest.mark.usefixtures("one_thread")

TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "The price of an item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "price", "arguments": '{"item": "kite"}'}}
SALE = [
    {"role": "system", "content": "You sell."},
    {"role": "user", "content": "How much is the kite?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "costs 17"},
    {"role": "assistant", "content": "The kite costs 17."},
    {"role": "user", "content": "hello world"},
    {"role": "assistant", "content": "the price is low"},
    {"role": "user", "content": "nobody answers this"},
]
CHATML = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)
LLAMA = re.compile(r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)", re.DOTALL)


def talk(*texts):
    """Question, reply, question, reply ..."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


class Recorder(nb.FakeBackend):
    """A backend that keeps the rows it is given."""

    async def forward_backward(self, samples, config, *, loss_denominator):
        self.samples, self.denominator, self.config = list(samples), loss_denominator, config
        return await super().forward_backward(samples, config, loss_denominator=loss_denominator)


async def rows_of(root, examples, tokenizer=None, **options):
    with open_fake(root, backend=Recorder(tokenizer)) as model:
        await sft_step(model, examples, **options)
        return model.backend.samples


def learned(row):
    return [i for i, own in zip(row.ids_T, row.is_sampled_T, strict=True) if own]


@pytest.fixture
def fake(tmp_path):
    with open_fake(tmp_path, backend=Recorder()) as opened:
        yield opened


@pytest.fixture
def model(tiny_model, tmp_path):
    with open_model(tiny_model, tmp_path) as opened:
        yield opened


# Which tokens are learned


@pytest.mark.parametrize(
    ("family", "turns"), [("smollm2", CHATML), ("qwen2_5", CHATML), ("llama3", LLAMA), ("llama3_1", LLAMA)]
)
async def test_it_learns_the_assistants_tokens_and_their_ends_in_the_rendered_conversation(
    tmp_path, family, turns
):
    tokenizer = make_tokenizer(family)
    (row,) = await rows_of(tmp_path, [{"messages": SALE, "tools": [TOOL], "source": "shop"}], tokenizer)
    with open_fake(tmp_path, "other", backend=nb.FakeBackend(tokenizer)) as model:
        text = tokenizer.decode(model.app.renderer.render(SALE, [TOOL], add_generation_prompt=False))
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = [match.span(1) for match in turns.finditer(text)]
    assert len(spans) == 3 and '"price"' in text[slice(*spans[0])]
    mask = [any(a <= first and last <= b for a, b in spans) for first, last in whole["offset_mapping"]]
    length = len(row.ids_T)
    assert list(row.ids_T) == whole["input_ids"][:length]
    assert list(row.is_sampled_T) == mask[:length] and not any(mask[length:])
    assert tokenizer.decode(learned(row)) == "".join(text[a:b] for a, b in spans)


@pytest.mark.parametrize("typed", [False, True])
async def test_where_the_template_drops_earlier_thinking_an_example_becomes_several_rows(tmp_path, typed):
    tokenizer = make_tokenizer("qwen3")
    messages = talk("hello", "world", "the price?", "17")
    messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "I greet.", "I look."
    backend = Recorder(tokenizer, base_model="Qwen/Qwen3-0.6B" if typed else "folder")
    with open_fake(tmp_path, backend=backend) as model:
        assert model.app.renderer.name == ("qwen3" if typed else "template")
        result = await sft_step(model, [messages])
    first, second = backend.samples
    for row, end in ((first, 2), (second, 4)):
        text = tokenizer.apply_chat_template(messages[:end], tokenize=False)
        assert tokenizer.decode(row.ids_T) == text.rstrip("\n")
        assert tokenizer.decode(learned(row)) == [m[1] for m in CHATML.finditer(text)][-1]
    assert "I greet." in tokenizer.decode(learned(first))
    assert "I greet." not in tokenizer.decode(second.ids_T) and "world" in tokenizer.decode(second.ids_T)
    assert result.metrics["rows_split"] == 1 and result.metrics["samples"] == 2
    assert result.metrics["examples"] == 1


async def test_the_learned_tokens_are_what_a_client_gets_that_asks_after_the_same_prompt(tmp_path):
    messages = talk("hello", "world", "again", "the price is 17")
    script = [m["content"] for m in messages if m["role"] == "assistant"]
    with open_fake(tmp_path, backend=Recorder(script=script)) as model:
        for end in (1, 3):
            await model.client.chat.completions.create(model=model.name, messages=messages[:end])
        await sft_step(model, [messages])
        (row,) = model.backend.samples
        asked = [request.prompt_ids for request in model.backend.requests]
        end = model.app.renderer.stop_ids[0]
    for prompt, reply in zip(asked, script, strict=True):
        sampled = (*model.tokenizer.encode(reply), end)
        assert row.ids_T[: len(prompt) + len(sampled)] == (*prompt, *sampled)
        assert row.is_sampled_T[len(prompt) - 1 :][: len(sampled) + 1] == (False, *[True] * len(sampled))


@pytest.mark.filterwarnings("ignore::artnb.chat_template.UnknownTemplateWarning")
async def test_a_token_that_would_reach_into_the_prompt_is_learned_as_the_engine_can_say_it(tmp_path):
    tokenizer = copy.deepcopy(make_tokenizer("smollm2"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    messages = talk("hello", "the kite", "world", "price")
    first, second = await rows_of(tmp_path, [messages], tokenizer)
    asked, written = "user: hello<|im_end|>assistant: ", "user: hello<|im_end|>assistant: the kite<|im_end|>"
    assert tokenizer.encode(written)[: len(tokenizer.encode(asked))] != tokenizer.encode(asked)
    assert list(first.ids_T) == [*tokenizer.encode(asked), *tokenizer.encode("the kite<|im_end|>")]
    assert learned(first) == tokenizer.encode("the kite<|im_end|>")
    assert tokenizer.decode(second.ids_T) == f"{written}user: world<|im_end|>assistant: price<|im_end|>"
    assert learned(second) == tokenizer.encode("price<|im_end|>")


@pytest.mark.filterwarnings("ignore::artnb.chat_template.UnknownTemplateWarning")
async def test_a_turn_that_the_template_does_not_end_is_ended(tmp_path):
    tokenizer = copy.deepcopy(make_tokenizer("smollm2"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    rows = await rows_of(tmp_path, [talk("hello", "world", "hello", "kite")], tokenizer)
    assert [tokenizer.decode(learned(row)) for row in rows] == ["world\n<|im_end|>", "kite\n<|im_end|>"]


async def test_a_trajectorys_own_tokens_are_learned_whoever_sampled_them_and_however(tmp_path):
    tokenizer = make_tokenizer("smollm2")
    prompt = tuple(tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n"))
    end = tokenizer.eos_token_id
    first = nb.Turn(prompt, (*spelled(tokenizer, "hello"), end), (math.nan,) * 6, -1, "stop", {"role": "x"})
    longer = (*first.ids, *tokenizer.encode("\nworld"))
    options = {"sampling": {"temperature": 0.0}, "credit": 3.0}
    second = nb.Turn(longer, spelled(tokenizer, "kite"), (-0.1,) * 4, 7, "length", {"role": "x"}, **options)
    said = {"role": "assistant", "content": "by another model"}
    trajectory = nb.Trajectory([said, first, second], additional_histories=[nb.History([first])])
    (row,) = await rows_of(tmp_path, [trajectory], tokenizer)
    assert row.ids_T == second.ids
    assert learned(row) == [*spelled(tokenizer, "hello"), end, *spelled(tokenizer, "kite")]
    assert list(tokenizer.encode("hello")) != list(spelled(tokenizer, "hello"))
    assert row.temperature == 1 and set(row.logprobs_T) == {0.0}
    expected = tuple(float(own) for own in row.is_sampled_T)
    assert row.advantages_T == row.weights_T == expected


async def test_examples_are_left_as_they_were(fake):
    examples = [SALE, {"messages": SALE, "tools": [TOOL]}, attempt(None)]
    before = copy.deepcopy(examples)
    await sft_step(fake, examples)
    assert examples == before


# What cannot be learned from


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "there are no examples"),
        (talk("a", "b"), "put each conversation into a list of its own"),
        ({"messages": talk("a", "b")}, "examples must be a list of examples, got dict"),
        (attempt(1.0), "examples must be a list of examples, got Trajectory"),
        ([talk("a", "b"), talk("a")], "example 1 has no assistant turn"),
        ([nb.Trajectory(talk("a", "b"))], "example 0 has no assistant turn"),
        ([attempt(1.0, completion=0)], "example 0 has no assistant turn"),
        ([group(1.0)], "example 0 must be a list of messages.*got TrajectoryGroup"),
        (["hello"], "example 0 must be a list of messages.*got str"),
        ([{"text": "hello"}], "example 0 must be a list of messages.*got NoneType"),
        ([[]], "example 0, messages: messages must be a list of at least one"),
        ([talk("a", "b"), [{"role": "human", "content": "x"}]], r"example 1, messages\[0\].role: role must"),
        ([[*talk("a", "b"), {"role": "user"}]], r"example 0, messages\[2\].content: a user message needs"),
        ([{"messages": talk("a", "b"), "tools": ["x"]}], r"example 0, tools\[0\]: a tool needs"),
        ([talk("a", "b"), talk("a", "b" * 5000)], "example 1 has 50.. tokens, .* context holds 4096"),
        ([attempt(1.0, completion=4094)], "example 0 has 4097 tokens, the model's context holds 4096"),
    ],
)
async def test_an_example_without_anything_to_learn_is_named_before_anything_happens(fake, examples, message):
    with pytest.raises(nb.ConfigurationError, match=message):
        await sft_step(fake, examples)
    assert fake.run.step == 0 and fake.policy_version == 0 and fake.run.metrics() == []


@pytest.mark.filterwarnings("ignore::artnb.chat_template.UnknownTemplateWarning")
async def test_a_conversation_that_the_template_refuses_or_writes_otherwise_is_named(tmp_path):
    tokenizer = copy.deepcopy(make_tokenizer("smollm2"))
    tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'x' %}{{ raise_exception('no system here') }}{% endif %}"
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:<think>{% endif %}"
    )
    with open_fake(tmp_path, backend=nb.FakeBackend(tokenizer)) as model:
        with pytest.raises(nb.ConfigurationError, match=r"example 0, messages\[2\]: .*no system here"):
            await sft_step(model, [[{"role": "system", "content": "x"}, *talk("a", "b")]])
        with pytest.raises(nb.ConfigurationError, match=r"example 0, messages\[1\]: .*ends with .*<think>"):
            await sft_step(model, [talk("a", "b")])


async def test_options_that_compare_attempts_are_refused_but_a_config_may_hold_them(fake):
    with pytest.raises(nb.ConfigurationError, match="clip_low, loss: a supervised step compares"):
        await sft_step(fake, [talk("a", "b")], loss="ppo", clip_low=0.1)
    with pytest.raises(nb.ConfigurationError, match="unknown training option learning_rte"):
        await sft_step(fake, [talk("a", "b")], learning_rte=1)
    with pytest.raises(nb.ConfigurationError, match="mask: a supervised step compares"):
        await sft_step(fake, [talk("a", "b")], mask="token")
    held = nb.TrainConfig(loss="ppo", mask="token", learning_rate=0.5)
    await sft_step(fake, [talk("a", "b")], held, eps=1e-6)
    assert fake.backend.config.mask == "none"  # there is no sampling policy whose ratio it could judge
    assert (fake.backend.config.loss, fake.backend.config.learning_rate) == ("reinforce", 0.5)


# Loss and gradient


def plain_cross_entropy(folder, parameters, rows):
    """Loss and gradient in float64 of the mean over all learned tokens; transformers, peft and autograd."""
    lora = peft.LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear")
    model = peft.get_peft_model(load(folder, dtype=torch.float64), lora)
    names = {f"base_model.model.{n}".replace(".weight", ".default.weight"): n for n in parameters}
    own = {names[name]: p for name, p in model.named_parameters() if name in names}
    for name, parameter in own.items():
        parameter.data = parameters[name].double()
    total, count = 0.0, 0
    for ids, mask in rows:
        labels = torch.tensor([i if is_learned else -100 for i, is_learned in zip(ids, mask, strict=True)])
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum")
        count += sum(mask)
    loss = total / count
    loss.backward()
    return loss.item(), {name: p.grad for name, p in own.items()}


async def test_loss_and_gradient_are_those_of_plain_cross_entropy(tiny_model, model, monkeypatch):
    examples = [talk("hello", "a kite", "more?", "no"), talk("hello", "world"), [SALE[0], *talk("?", "17")]]
    await sft_step(model, examples, learning_rate=1e-2)  # both factors of the adapter have a gradient then
    trainer, seen = model.backend.trainer, {}
    update = trainer.optim_step

    def looked_at(config):
        seen["before"] = {n: p.detach().clone() for n, p in trainer.parameters.items()}
        seen["gradient"] = {n: p.grad.double() for n, p in trainer.parameters.items()}
        return update(config)

    monkeypatch.setattr(trainer, "optim_step", looked_at)
    result = await sft_step(model, examples, microbatch_tokens=64)
    rows = []
    for messages in examples:
        text = model.tokenizer.apply_chat_template(messages, tokenize=False)
        whole = model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = [match.span(1) for match in CHATML.finditer(text)]
        rows.append(
            (
                whole["input_ids"],
                [any(a <= first and last <= b for a, b in spans) for first, last in whole["offset_mapping"]],
            )
        )
    loss, gradient = plain_cross_entropy(tiny_model, seen["before"], rows)
    assert result.metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert result.metrics["nll"] == pytest.approx(loss, rel=1e-6)
    assert result.metrics["tokens"] == sum(sum(mask) for _, mask in rows)
    assert gradient.keys() == seen["gradient"].keys()
    ours, theirs = (torch.cat([g[n].flatten() for n in gradient]) for g in (seen["gradient"], gradient))
    assert theirs.norm() > 0.01
    assert (ours - theirs).norm() / theirs.norm() < 1e-5
    assert result.metrics["grad_norm"] == pytest.approx(float(theirs.norm()), rel=1e-5)


async def test_the_loss_falls_and_the_engine_serves_what_was_learned(model):
    messages, losses = talk("hello", "kite"), []
    renderer, engine = model.app.renderer, model.backend.engine
    prompt = renderer.render(messages[:1])
    ids = (*prompt, *model.tokenizer.encode("kite"), renderer.stop_ids[0])
    for _ in range(8):
        served = engine.call(lambda: engine.score(ids)).result()[len(prompt) - 1 :]
        losses.append((await sft_step(model, [messages], learning_rate=1e-2)).metrics["nll"])
        assert losses[-1] == pytest.approx(-float(served.mean()), abs=1e-4)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 3


async def test_the_aggregate_option_weighs_examples(fake):
    examples = [talk("a", "b"), talk("a", "bbbbb")]  # 2 and 6 tokens, their ends included
    await sft_step(fake, examples, aggregate="trajectory")
    sums = [sum(row.weights_T) for row in fake.backend.samples]
    assert sums == pytest.approx([4, 4]) and fake.backend.denominator == pytest.approx(8)
    await sft_step(fake, examples)
    assert [sum(row.weights_T) for row in fake.backend.samples] == [2, 6] and fake.backend.denominator == 8
    await sft_step(fake, examples, aggregate="constant", constant_tokens=10)
    assert fake.backend.denominator == 20


# A step of the run


async def test_it_is_a_step_of_the_run_with_a_line_and_a_checkpoint(model):
    result = await sft_step(model, [talk("hello", "world"), talk("a", "b")], learning_rate=1e-3)
    assert (result.step, result.policy_version, model.policy_version, model.run.step) == (0, 1, 1, 1)
    (line,) = model.run.metrics()
    assert (line["kind"], line["step"], line["policy_version"]) == ("sft", 0, 1)
    assert line["nll"] == result.metrics["nll"] and model.run.trained_steps == 1
    (checkpoint,) = model.run.checkpoints()
    assert (checkpoint.step, checkpoint.state["policy_version"]) == (1, 1)
    metrics = result.metrics
    assert (metrics["examples"], metrics["samples"], metrics["tokens"]) == (2, 2, 8)
    assert {"loss", "entropy", "grad_norm", "learning_rate", "updates", "packed_tokens"} <= metrics.keys()
    assert {"seconds", "seconds_train", "seconds_publish", "seconds_checkpoint"} <= metrics.keys()
    assert metrics["learning_rate"] == 1e-3 and metrics["weights_changed"] == 1
    assert metrics["probe_gap_max"] < 1e-4 and all(map(math.isfinite, metrics.values()))
    assert not [n for n in metrics if re.search("ratio|kl_k|fraction|logprob_gap|effective|reward|advant", n)]
    assert "step 0, policy version 1" in repr(result) and "negative log-likelihood per token" in repr(result)


async def test_supervised_and_reinforcement_steps_follow_each_other(model):
    early = await play(model)
    await sft_step(model, [max(early.trajectories, key=lambda t: t.reward)])
    with pytest.raises(nb.StalePolicy):
        await nb.train_step(model, early)
    await nb.train_step(model, await play(model))
    await sft_step(model, [talk("a", "b")])
    assert [(r["kind"], r["step"]) for r in model.run.metrics()] == [("sft", 0), ("train", 1), ("sft", 2)]
    assert model.policy_version == model.run.step == 3


async def test_mini_batches_are_updates_of_one_step(model):
    examples = [talk("hello", "world"), talk("a", "b"), talk("c", "d")]
    result = await sft_step(model, examples, minibatches=3)
    assert result.metrics["updates"] == 3 and result.policy_version == 1
    moments = model.backend.trainer.optimizer.state_dict()["state"]
    assert {int(state["step"]) for state in moments.values()} == {3}
    assert result.metrics["nll"] == pytest.approx(result.metrics["loss"], rel=1e-6)


async def test_no_more_rows_than_max_samples_are_trained_and_the_rest_is_counted(fake):
    result = await sft_step(fake, [talk("a", "b"), talk("c", "d"), talk("e", "f")], max_samples=2)
    assert result.metrics["samples"] == 2 and result.dropped == {"not drawn (max_samples)": 1}


async def test_a_resumed_run_goes_on_as_one_that_never_stopped(tiny_model, tmp_path):
    batches = [[talk("hello", "world")], [talk("a", "b"), talk("c", "d")]]
    with open_model(tiny_model, tmp_path, "whole") as model:
        expected = [(await sft_step(model, batch, learning_rate=1e-2)).metrics["loss"] for batch in batches]
    losses = []
    for batch in batches:
        with open_model(tiny_model, tmp_path, "resumed") as model:
            assert model.policy_version == model.run.step == len(losses)
            losses.append((await sft_step(model, batch, learning_rate=1e-2)).metrics["loss"])
    assert losses == expected
    assert [r["kind"] for r in nb.Run.read("resumed", tmp_path).metrics()] == ["sft", "sft"]


async def test_a_line_that_a_kill_prevented_is_written_on_resume(tmp_path):
    with open_fake(tmp_path) as model:
        await sft_step(model, [talk("a", "b")])
        lines = model.run.path / "metrics.jsonl"
    lines.write_text("")
    with open_fake(tmp_path) as model:
        (line,) = model.run.metrics()
        assert (line["kind"], line["step"], model.run.step) == ("sft", 0, 1)


@pytest.mark.parametrize("moment", ["optim_step", "publish_weights", "save"])
@pytest.mark.parametrize("error", [nb.PublicationError, asyncio.CancelledError])
async def test_a_step_that_fails_is_undone_and_can_be_repeated(model, monkeypatch, moment, error):
    await sft_step(model, [talk("a", "b")], learning_rate=1e-2)
    before = await model.backend.snapshot()
    original = getattr(model.backend, moment)

    async def failing(*arguments):
        await original(*arguments)
        raise error("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(model.backend, moment, failing)
        with pytest.raises(error):
            await sft_step(model, [talk("hello", "world")], learning_rate=1e-2)
    after = await model.backend.snapshot()
    assert all(map(torch.equal, before[0][0], after[0][0]))
    assert model.policy_version == model.run.step == len(model.run.metrics()) == 1
    assert [c.step for c in model.run.checkpoints()] == [1]
    assert (await sft_step(model, [talk("hello", "world")])).policy_version == 2


async def test_it_warns_when_it_changed_nothing(model):
    with pytest.warns(UserWarning, match="changed nothing") as caught:
        await sft_step(model, [talk("a", "b")], learning_rate=1e-30)
    assert caught[0].filename == __file__
