"""A distillation step: the advantage of a sampled token is the teacher's, and the student comes closer."""

import asyncio
import math
import os
import signal

import pytest
import torch
import transformers
from reference_models import load, logprobs_of
from steps import attempt, open_fake, open_model, play

import artnb as nb
from artnb.backends.local import LocalBackend
from artnb.distill import distill_step

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="session")
def other_model(tiny_model, tiny_tokenizer, tmp_path_factory):
    """The tiny model with other weights: what there is to learn is in every layer."""
    folder = tmp_path_factory.mktemp("teacher")
    teacher = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in teacher.named_parameters():
            if name.endswith("proj.weight"):
                weight += 0.06 * torch.randn(weight.shape, generator=generator)
    teacher.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model(tiny_model, tmp_path):
    with open_model(tiny_model, tmp_path, "student") as opened:
        yield opened


@pytest.fixture
def teacher(other_model, tmp_path):
    with open_model(other_model, tmp_path, "teacher") as opened:
        yield opened


class Recorder:
    """Keeps the rows that a backend trains on."""

    def __init__(self, backend):
        self.backend, self.rows = backend, []
        self._train, backend.forward_backward = backend.forward_backward, self

    async def __call__(self, samples, config, *, loss_denominator):
        self.rows += samples
        return await self._train(samples, config, loss_denominator=loss_denominator)


def divergence(student, teacher, groups):
    """Exact mean KL(student || teacher) over the places of these completions: transformers, full logits."""
    turns = {(t.turns[0].prompt_ids, t.turns[0].completion_ids) for t in groups.trajectories}
    found = []
    for prompt, completion in turns:
        p, q = logprobs_of(student, prompt, completion), logprobs_of(teacher, prompt, completion)
        found.append((p.exp() * (p - q)).sum(-1))
    return float(torch.cat(found).mean())


def merged(model, folder):
    """A model of transformers with the student's effective weights."""
    plain = load(folder)
    modules = dict(plain.named_modules())
    for name, weight in model.backend.trainer.merged_weights().items():
        modules[name].weight.data.copy_(weight)
    return plain


async def test_the_advantage_of_a_token_is_the_teachers_logprob_minus_the_samplers(
    model, teacher, other_model
):
    model.sampling = nb.SamplingConfig(temperature=0.7)
    recorder, groups = Recorder(model.backend), await play(model)
    result = await nb.distill_step(model, groups, teacher, learning_rate=1e-9)
    reference, differences = load(other_model), []
    turns = {t.id: t.turns[0] for t in groups.trajectories}
    assert len(recorder.rows) == 12
    for row in recorder.rows:
        turn = turns[row.trajectory_id]
        logits = logprobs_of(reference, turn.prompt_ids, turn.completion_ids) / row.temperature
        scored = logits.log_softmax(-1).gather(1, torch.tensor(turn.completion_ids)[:, None])[:, 0]
        wanted = scored - torch.tensor(turn.logprobs)
        start = len(turn.prompt_ids)
        assert row.advantages_T[:start] == (0.0,) * start
        torch.testing.assert_close(torch.tensor(row.advantages_T[start:]), wanted, atol=1e-4, rtol=1e-4)
        differences.append(wanted)
    assert result.metrics["kl_teacher"] == pytest.approx(-float(torch.cat(differences).mean()), abs=1e-4)
    assert result.metrics["kl_teacher"] > 0.1, "there is something to learn"


async def test_the_student_comes_closer_to_the_teacher_where_it_goes_itself(
    model, teacher, tiny_model, other_model
):
    """Judged by the exact divergence over the whole vocabulary, on fresh completions of either policy."""
    goal, first = load(other_model), await play(model)
    before = divergence(merged(model, tiny_model), goal, first)
    for _ in range(12):
        result = await distill_step(model, await play(model, group_size=16), teacher, learning_rate=2e-2)
    after = divergence(merged(model, tiny_model), goal, await play(model))
    assert after < 0.7 * before
    assert divergence(merged(model, tiny_model), goal, first) < 0.8 * before, "also where it went at first"
    assert (result.step, result.policy_version) == (11, 12) and teacher.policy_version == 0
    (line,) = [r for r in model.run.metrics() if r["step"] == 11]
    assert line["kl_teacher"] == result.metrics["kl_teacher"]


async def test_the_base_teaches_a_policy_that_has_moved_away_from_it(model, tiny_model):
    base = load(tiny_model)
    for _ in range(3):
        await nb.train_step(model, await play(model), learning_rate=2e-2)
    moved = divergence(merged(model, tiny_model), base, await play(model))
    for _ in range(8):
        await distill_step(model, await play(model), "base", learning_rate=5e-3)
    assert divergence(merged(model, tiny_model), base, await play(model)) < 0.6 * moved


async def test_scores_do_not_depend_on_how_rows_are_packed(model):
    recorder, groups = Recorder(model.backend), await play(model)
    await distill_step(model, groups, "base", learning_rate=1e-9)
    rows = recorder.rows
    whole, one_by_one = [
        await model.backend.score(rows, nb.TrainConfig(microbatch_tokens=size, share_prefixes=size > 1))
        for size in (4096, 1)
    ]
    for left, right, row in zip(whole, one_by_one, rows, strict=True):
        assert len(left) == row.sampled_tokens and left == pytest.approx(right, abs=1e-5)
        sampled = [p for p, own in zip(row.logprobs_T, row.is_sampled_T, strict=True) if own]
        assert left == pytest.approx(sampled, abs=1e-3), "the policy that sampled them"


async def test_no_reward_is_needed_and_a_failure_is_left_out_with_its_count(model):
    unscored = attempt(None)
    failed = attempt(None, error=nb.Failure("ValueError", "broke"))
    result = await distill_step(model, [nb.TrajectoryGroup([unscored]), nb.TrajectoryGroup([failed])], "base")
    assert result.skipped is None and result.metrics["samples"] == 1 and result.dropped == {"failed": 1}
    nothing = await distill_step(model, [nb.TrajectoryGroup([failed])], "base")
    assert nothing.skipped == "nothing to learn from: 1 × failed" and model.policy_version == 1
    assert "kl_teacher" not in nothing.metrics


async def test_it_refuses_what_it_cannot_learn_from(model, teacher, tmp_path):
    groups = await play(model)
    with open_fake(tmp_path, "fake") as fake:
        for who, words in (
            (model, "another Model or 'base'"),
            ("step_000001", "another Model or 'base'"),
            (fake, "FakeBackend cannot score"),
        ):
            with pytest.raises(nb.ConfigurationError, match=words):
                await distill_step(model, groups, who)
    with pytest.raises(nb.ConfigurationError, match="credit_weight: distillation looks at the teacher"):
        await distill_step(model, groups, teacher, credit_weight=0.5)
    with pytest.raises(nb.StalePolicy):
        await distill_step(model, [nb.TrajectoryGroup([attempt(None, version=3)])], teacher)
    groups.status = "interrupted"
    with pytest.raises(nb.ConfigurationError, match="partial"):
        await distill_step(model, groups, teacher)
    groups.status = "complete"
    teacher.backend.max_context = 8
    with pytest.raises(nb.ConfigurationError, match=r"a row has \d+ tokens, the teacher reads 8"):
        await distill_step(model, groups, teacher)
    describe = LocalBackend.describe(teacher.backend)
    describe["identity"] = {**describe["identity"], "tokenizer": "of another family"}
    teacher.backend.describe = lambda: describe
    with pytest.raises(nb.ConfigurationError, match="another tokenizer"):
        await distill_step(model, groups, teacher)
    assert model.run.step == model.policy_version == 0


async def test_an_interrupt_while_the_teacher_reads_trains_nothing(model, teacher):
    groups, read = await play(model), teacher.backend.score

    async def slowly(*args, **options):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(30)
        return await read(*args, **options)

    teacher.backend.score = slowly
    with pytest.raises(nb.Interrupted, match="nothing was trained"):
        await distill_step(model, groups, teacher)
    teacher.backend.score = read
    assert model.run.step == model.policy_version == 0
    result = await distill_step(model, groups, teacher)
    assert result.policy_version == 1 and math.isfinite(result.metrics["kl_teacher"])
