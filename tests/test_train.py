"""A training step: what it learns from, what it leaves out, what it says and what it writes."""

import math

import pytest
from steps import attempt, copied, group, open_fake, open_model, play

import artnb as nb
from artnb.types import Groups

pytestmark = pytest.mark.usefixtures("one_thread")
MEASURED = {
    *("loss", "entropy", "kl_k1", "kl_k3", "grad_norm", "learning_rate", "effective_sample_size"),
    *("ratio_p05", "ratio_p50", "ratio_p95", "ratio_p99", "ratio_max", "fraction_capped", "fraction_clipped"),
    *("reward_mean", "reward_std", "reward_min", "reward_max", "advantage_mean", "advantage_std"),
    *("logprob_gap_mean", "logprob_gap_max", "probe_gap_mean", "probe_gap_max", "rounding_lost"),
    *("tokens", "tokens_sampled", "packed_tokens", "row_tokens", "samples", "truncated", "staleness"),
    *("seconds", "seconds_gather", "seconds_train", "seconds_publish", "seconds_checkpoint"),
    *("tokens_per_second_gather", "tokens_per_second_train", "memory_peak_gb"),
}


@pytest.fixture
def model(tiny_model, tmp_path):
    with open_model(tiny_model, tmp_path) as opened:
        yield opened


@pytest.fixture
def fake(tmp_path):
    with open_fake(tmp_path) as opened:
        yield opened


def completions_logprob(model, groups, wanted):
    """Mean logprob that the engine's policy gives to completions whose advantage has the wanted sign."""
    sums = []
    for one in groups:
        mean = sum(t.reward for t in one) / len(one)
        for trajectory in one:
            if (trajectory.reward - mean) * wanted > 0:
                turn = trajectory.turns[0]
                logprobs = model.backend.engine.call(lambda ids=turn.ids: model.backend.engine.score(ids))
                sums.append(float(logprobs.result()[-len(turn.completion_ids) :].sum()))
    return sum(sums) / len(sums)


async def test_a_step_makes_rewarded_completions_likelier_and_others_less_likely(model):
    groups = await play(model)
    better, worse = (completions_logprob(model, groups, sign) for sign in (1, -1))
    await nb.train_step(model, groups, learning_rate=1e-2)
    assert completions_logprob(model, groups, 1) > better + 0.05
    assert completions_logprob(model, groups, -1) < worse - 0.05


async def test_the_engine_serves_the_next_version(model):
    groups = await play(model)
    result = await nb.train_step(model, groups)
    assert (result.step, result.policy_version) == (0, 1) == (0, model.policy_version)
    assert {t.turns[0].policy_version for t in (await play(model)).trajectories} == {1}


async def test_the_metrics_of_a_step_are_all_there_and_finite(model):
    metrics = (await nb.train_step(model, await play(model))).metrics
    assert not MEASURED - metrics.keys()
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["logprob_gap_max"] < 1e-4 and metrics["probe_gap_max"] < 1e-4
    assert metrics["ratio_p50"] == pytest.approx(1, abs=1e-4)
    assert metrics["packed_tokens"] < metrics["row_tokens"]
    assert metrics["seconds"] >= metrics["seconds_train"] + metrics["seconds_publish"]


@pytest.mark.parametrize(
    "options",
    [
        *({"loss": loss} for loss in ("cispo", "ppo", "gspo", "reinforce", "dppo")),
        *({"advantage": advantage} for advantage in ("grpo", "rloo")),
        *({"aggregate": aggregate} for aggregate in ("trajectory", "constant")),
        {"kl_coef": 0.1, "entropy_coef": 0.01, "weight_decay": 0.1, "share_prefixes": False},
        {"credit_weight": 0.5, "microbatch_tokens": 64},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
async def test_every_way_to_train_runs(model, options):
    groups = await play(model)
    for trajectory in groups.trajectories:
        turn = trajectory.turns[0]
        trajectory.messages_and_choices[-1] = turn.with_credit(float(turn.completion_ids[0] % 3))
    result = await nb.train_step(model, groups, **options)
    assert result.skipped is None and result.policy_version == 1
    assert math.isfinite(result.metrics["loss"]) and result.metrics["grad_norm"] > 0
    assert result.metrics["weights_changed"] == 1
    assert ("kl_base" in result.metrics) == ("kl_coef" in options)


async def test_an_unknown_option_is_refused_before_anything_happens(fake):
    with pytest.raises(nb.ConfigurationError, match="unknown training option learning_rte"):
        await nb.train_step(fake, [group(0, 1)], learning_rte=1)
    assert fake.run.step == 0 and fake.policy_version == 0


# What is left out


async def test_it_drops_what_teaches_nothing_with_reason_and_count(fake):
    failed = nb.Failure("ValueError", "no")
    groups = [
        group(0.0, 1.0),
        group(1.0, 1.0),
        group(math.nan, 1.0),
        nb.TrajectoryGroup([attempt(1.0), attempt(None, error=failed)]),
        group(0.0, 1.0, completion=0),
    ]
    result = await nb.train_step(fake, groups)
    assert result.metrics["samples"] == 2 and result.metrics["failed"] == 1
    assert result.policy_version == 1 and result.skipped is None
    assert result.dropped == {
        "equal rewards": 1,
        "reward is not finite": 1,
        "failed": 1,
        "fewer than two scored trajectories": 2,
        "no sampled token": 1,
    }
    assert fake.run.metrics()[0]["dropped"] == result.dropped
    assert "left out" in repr(result) and "left out" in result._repr_html_()


async def test_a_step_with_nothing_to_learn_from_is_visible_and_moves_only_the_step(fake):
    result = await nb.train_step(fake, [group(1.0, 1.0), group(0.0, 0.0)])
    assert "nothing to learn from: 2 ×" in result.skipped
    assert (result.step, result.policy_version, fake.run.step, fake.policy_version) == (0, 0, 1, 0)
    assert result.skipped in repr(result) and "skipped" in result._repr_html_()
    assert fake.run.metrics()[0]["skipped"] == result.skipped
    assert fake.run.latest_checkpoint().state["policy_version"] == 0
    again = await nb.train_step(fake, [group(0.0, 1.0)])
    assert (again.step, again.policy_version) == (1, 1)


async def test_strict_raises_instead_and_leaves_the_step(fake):
    with pytest.raises(nb.NothingToTrain, match="2 ×"):
        await nb.train_step(fake, [group(1.0, 1.0), group(0.0, 0.0)], strict=True)
    with pytest.raises(nb.NothingToTrain, match="no groups"):
        await nb.train_step(fake, [], strict=True)
    assert fake.run.step == 0 and fake.run.metrics() == []


# Which policy sampled it


async def test_groups_are_trained_on_once(fake):
    groups = await play(fake, reward=None)
    await nb.train_step(fake, groups)
    with pytest.raises(nb.StalePolicy, match="version 0, the model is at version 1 and max_staleness is 0"):
        await nb.train_step(fake, groups)
    assert fake.run.step == 1
    with pytest.warns(UserWarning, match="of these trajectories were trained on before"):
        result = await nb.train_step(fake, groups, max_staleness=1)
    assert result.metrics["staleness"] == 1 and "policy versions old 1" in repr(result)
    with pytest.raises(nb.StalePolicy, match="sampled under policy version 3"):
        await nb.train_step(fake, [group(0, 1, version=3)], max_staleness=5)  # from the future


@pytest.mark.parametrize("max_staleness", [0, 1, 10])
async def test_turns_of_the_base_model_are_refused(fake, max_staleness):
    with pytest.raises(nb.StalePolicy, match="untrained base model"):
        await nb.train_step(fake, [group(0, 1, version=-1)], max_staleness=max_staleness)


async def test_partial_groups_need_permission(fake):
    groups = Groups([group(0.0, 1.0)])
    groups.status = "interrupted"
    with pytest.raises(nb.ConfigurationError, match="status is 'interrupted'"):
        await nb.train_step(fake, groups)
    assert (await nb.train_step(fake, groups, allow_partial=True)).policy_version == 1


# Warnings


async def test_it_warns_of_truncated_sampling_in_words(fake):
    messages = []
    for reward in (0.0, 1.0):
        one = attempt(reward)
        turn = one.turns[0]
        one.messages_and_choices[-1] = nb.Turn(
            **{**vars(turn), "sampling": {"temperature": 1.0, "top_p": 0.9}}
        )
        messages.append(one)
    with pytest.warns(UserWarning, match="2 turns were sampled with top_p, top_k or min_p") as caught:
        result = await nb.train_step(fake, [nb.TrajectoryGroup(messages)])
    assert len(caught) == 1 and caught[0].filename == __file__
    assert "⚠ 2 turns were sampled" in result._repr_html_()
    assert "warning: 2 turns were sampled" in repr(result)
    assert fake.run.metrics()[0]["warnings"] == result.warnings


async def test_it_warns_when_publishing_changed_nothing(model):
    groups = await play(model)
    with pytest.warns(UserWarning, match="changed nothing"):
        result = await nb.train_step(model, groups, learning_rate=1e-30)
    assert result.metrics["weights_changed"] == 0 and result.policy_version == 1


async def test_an_ordinary_step_warns_of_nothing(fake, recwarn):
    result = await nb.train_step(fake, [group(0, 1)])
    assert result.warnings == [] and "⚠" not in result._repr_html_()
    assert not [w for w in recwarn if w.category is UserWarning]


# Mini-batches and drawing


async def test_mini_batches_are_updates_of_one_step(model):
    groups = await play(model)
    result = await nb.train_step(model, groups, minibatches=2)
    assert result.metrics["updates"] == 2 and result.policy_version == 1
    moments = model.backend.trainer.optimizer.state_dict()["state"]
    assert {int(state["step"]) for state in moments.values()} == {2}
    assert result.metrics["packed_tokens"] > 0 and model.run.step == 1


async def test_no_more_rows_than_max_samples_are_trained_and_the_rest_is_counted(fake):
    result = await nb.train_step(fake, [group(0, 1, 0.5), group(0, 1, 0.25)], max_samples=4)
    assert result.metrics["samples"] == 4 and sum(result.dropped.values()) == 2


# What is written


async def test_a_step_leaves_one_line_and_one_checkpoint(fake):
    await nb.train_step(fake, [group(0, 1)])
    (line,) = fake.run.metrics()
    assert (line["kind"], line["step"], line["policy_version"]) == ("train", 0, 1)
    (checkpoint,) = fake.run.checkpoints()
    assert (checkpoint.step, checkpoint.state["policy_version"]) == (1, 1)
    checkpoint.verify()


async def test_only_the_latest_checkpoints_are_kept(tmp_path):
    with open_fake(tmp_path, keep_checkpoints=2) as model:
        for version in range(4):
            await nb.train_step(model, [group(0, 1, version=version)])
        assert [c.step for c in model.run.checkpoints()] == [3, 4]
        hidden = [p.name for p in (model.run.path / "checkpoints").iterdir() if p.name.startswith(".")]
        assert not hidden


async def test_the_cursor_goes_into_the_checkpoint_and_comes_back(tmp_path):
    with open_fake(tmp_path) as model:
        assert model.run.cursor == {}
        model.run.cursor |= {"epoch": 2, "next": 17}
        await nb.train_step(model, [group(0, 1)])
        model.run.cursor["next"] = 99  # of a step that never finished
    with open_fake(tmp_path) as model:
        assert model.run.cursor == {"epoch": 2, "next": 17}


async def test_the_run_becomes_two_frames(model):
    for _ in range(2):
        await nb.train_step(model, await play(model))
    metrics = model.run.metrics_frame()
    assert list(metrics["step"]) == [0, 1] and list(metrics["policy_version"]) == [1, 2]
    assert set(metrics.columns) >= MEASURED | {"skipped", "dropped", "warnings", "kind", "time"}
    trajectories = model.run.trajectories_frame()
    assert len(trajectories) == 24
    assert list(trajectories.columns)[:7] == [
        *("step", "split", "scenario_id", "group", "attempt", "seat", "reward"),
    ]
    assert set(trajectories["policy_version"]) == {0, 1} and trajectories["completion_tokens"].gt(0).all()


async def test_trajectories_from_disk_give_the_same_loss_bit_for_bit(tiny_model, tmp_path):
    with open_model(tiny_model, tmp_path, "first") as model:
        groups = await play(model)
        stored = {t.id: t for t in nb.Run.read("first", tmp_path).trajectories()}
        result = await nb.train_step(model, groups)
    reloaded = copied(groups)
    for one in reloaded:
        one.trajectories = [stored[t.id] for t in one]
    assert [t for one in reloaded for t in one] == groups.trajectories
    with open_model(tiny_model, tmp_path, "second") as model:
        again = await nb.train_step(model, reloaded)
    for name in ("loss", "grad_norm", "entropy", "kl_k3", "reward_mean"):
        assert again.metrics[name] == result.metrics[name], name
