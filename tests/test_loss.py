"""Each loss against a second, float64 implementation on logits, and against numbers worked out by hand."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from steps import open_model, play

from artnb.batch import loss_denominator, pack
from artnb.config import TrainConfig
from artnb.errors import ConfigurationError
from artnb.logprobs import sampled_logprobs
from artnb.loss import LOSSES, k3, objective, summarize, token_loss
from artnb.step_metrics import warnings_of
from artnb.train import train_step
from artnb.types import Sample

NAMES = sorted(LOSSES)
V, H = 11, 6


def a_problem(seed=0, tokens=12, spread=0.6):
    """Logits of S tokens in three rows, targets, sampling logprobs near the policy's, and advantages."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, V, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.randint(V, (tokens,), generator=generator)
    drift = spread * torch.randn(tokens, generator=generator, dtype=torch.float64)
    old = torch.log_softmax(logits.detach(), -1).gather(1, target[:, None])[:, 0] + drift
    row = torch.arange(tokens) * 3 // tokens
    advantages = torch.tensor([1.0, -0.5, 0.75], dtype=torch.float64)[row]
    return logits, target, old, advantages, row


def policy(logits, target):
    logp = torch.log_softmax(logits, -1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def gradient(logits, loss):
    (found,) = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
    return found


def reference_gradient(name, logits, target, old, advantages, row, config):
    """The gradient by logits written out by hand: d log p / d logits = onehot - p, times a factor."""
    p = torch.softmax(logits.detach(), -1)
    chosen = p.gather(1, target[:, None])[:, 0]
    ratio = chosen / old.exp()
    factor = torch.empty_like(old)
    for s in range(len(old)):
        a, r = advantages[s].item(), ratio[s].item()
        if name == "reinforce":
            factor[s] = a
        elif name == "cispo":
            factor[s] = a * min(r, config.ratio_cap)
        elif name == "dppo":
            moved = chosen[s].item() - math.exp(old[s].item())
            stop = moved > config.dppo_threshold if a > 0 else moved < -config.dppo_threshold
            factor[s] = 0.0 if stop else a * r
        else:
            if name == "gspo":
                own = [j for j in range(len(old)) if row[j] == row[s]]
                r = math.prod(ratio[j].item() for j in own) ** (1 / len(own))
            stop = r > 1 + config.clip_high if a > 0 else r < 1 - config.clip_low
            factor[s] = 0.0 if stop else a * r
    onehot = torch.nn.functional.one_hot(target, V)
    return -factor[:, None] * (onehot - p)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_equals_the_formula_in_float64(name, seed):
    config = TrainConfig(loss=name, ratio_cap=1.3, clip_low=0.1, clip_high=0.15, dppo_threshold=0.01)
    logits, target, old, advantages, row = a_problem(seed)
    logp, entropy = policy(logits, target)
    loss, statistics = token_loss(logp, old, advantages, row, entropy, config)
    expected = reference_gradient(name, logits, target, old, advantages, row, config)
    torch.testing.assert_close(gradient(logits, loss), expected, rtol=1e-10, atol=1e-12)
    if name not in ("reinforce", "gspo"):
        assert 0 < statistics["limited"].sum() < len(old), "the case exercises both sides of the bound"


def test_gspo_is_bounded_by_rows_and_equals_the_sequence_level_objective():
    config = TrainConfig(loss="gspo", clip_low=0.1, clip_high=0.15)
    bounded = []
    for seed in range(10):
        logits, target, old, advantages, row = a_problem(seed)
        logp, entropy = policy(logits, target)
        loss, statistics = token_loss(logp, old, advantages, row, entropy, config)
        sequence = torch.stack([(logp - old)[row == i].mean().exp() for i in range(3)])
        a = torch.tensor([1.0, -0.5, 0.75], dtype=torch.float64)
        sizes = torch.bincount(row)
        expected = -torch.minimum(sequence * a, sequence.clamp(0.9, 1.15) * a) * sizes
        torch.testing.assert_close(loss.sum(), expected.sum())
        torch.testing.assert_close(gradient(logits, loss), gradient(logits, expected), rtol=1e-9, atol=1e-12)
        bounded += [statistics["limited"][row == i].double().mean().item() for i in range(3)]
    assert set(bounded) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "loss", "slope"),
    [
        # slope: d loss / d log p. log p is log 0.5 throughout; default cap 5, clips 0.2 / 0.28, mask 0.2.
        ("cispo", 2.0, 1.0, -2 * math.log(0.5), -2.0),
        ("cispo", 8.0, 1.0, -5 * math.log(0.5), -5.0),
        ("cispo", 8.0, -1.0, 5 * math.log(0.5), 5.0),
        ("reinforce", 8.0, 3.0, -3 * math.log(0.5), -3.0),
        ("ppo", 1.1, 1.0, -1.1, -1.1),
        ("ppo", 2.0, 1.0, -1.28, 0.0),
        ("ppo", 2.0, -1.0, 2.0, 2.0),
        ("ppo", 0.5, -1.0, 0.8, 0.0),
        ("ppo", 0.5, 1.0, -0.5, -0.5),
        ("gspo", 2.0, 1.0, -1.28, 0.0),
        ("gspo", 1.2, 1.0, -1.2, -1.2),
        ("dppo", 2.0, 1.0, 0.0, 0.0),  # from 0.25 to 0.5
        ("dppo", 2.0, -1.0, 2.0, 2.0),
        ("dppo", 0.5, -1.0, 0.0, 0.0),  # from 1.0 to 0.5
        ("dppo", 1.25, 1.0, -1.25, -1.25),  # from 0.4 to 0.5
    ],
)
def test_one_token_by_hand(name, ratio, advantage, loss, slope):
    logp = torch.tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    old = logp.detach() - math.log(ratio)
    found, _ = token_loss(
        logp, old, torch.tensor([advantage]), torch.tensor([0]), torch.zeros(1), TrainConfig(loss=name)
    )
    assert found.item() == pytest.approx(loss)
    assert gradient(logp, found).item() == pytest.approx(slope)


@pytest.mark.parametrize("name", NAMES)
def test_a_good_token_becomes_likelier_and_a_bad_one_rarer(name):
    logits, target, old, advantages, row = a_problem(3, spread=0.01)
    logp, entropy = policy(logits, target)
    loss, _ = token_loss(logp, old, advantages, row, entropy, TrainConfig(loss=name))
    on_target = gradient(logits, loss).gather(1, target[:, None])[:, 0]
    assert torch.equal(on_target.sign(), -advantages.sign())


@pytest.mark.parametrize("name", NAMES)
def test_zero_advantage_has_no_gradient_even_far_off_policy(name):
    logits, target, old, advantages, row = a_problem(4, spread=30.0)
    logp, entropy = policy(logits, target)
    loss, _ = token_loss(logp, old, torch.zeros_like(advantages), row, entropy, TrainConfig(loss=name))
    assert torch.count_nonzero(gradient(logits, loss)) == 0


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name):
    logits, target, _, _, row = a_problem(5)
    advantages = torch.randn(len(row), dtype=torch.float64)  # turns of one row with credits of their own
    logp, entropy = policy(logits, target)
    loss, _ = token_loss(logp, logp.detach(), advantages, row, entropy, TrainConfig(loss=name))
    torch.testing.assert_close(
        gradient(logits, loss), gradient(logits, -advantages * policy(logits, target)[0])
    )


@pytest.mark.parametrize("name", NAMES)
def test_absurd_ratios_stay_finite(name):
    logp = torch.tensor([-0.1, -900.0, -0.1], requires_grad=True)
    old = torch.tensor([-900.0, -0.1, -0.1])
    loss, statistics = token_loss(
        logp, old, torch.ones(3), torch.zeros(3, dtype=torch.long), torch.zeros(3), TrainConfig(loss=name)
    )
    assert torch.isfinite(loss).all() and torch.isfinite(gradient(logp, loss)).all()
    assert all(map(math.isfinite, summarize([statistics], TrainConfig()).values()))


def test_gspo_does_not_depend_on_the_order_or_the_number_of_other_rows():
    config = TrainConfig(loss="gspo")
    logits, target, old, advantages, row = a_problem(6)
    logp, entropy = policy(logits, target)
    whole, _ = token_loss(logp, old, advantages, row, entropy, config)
    order = torch.randperm(len(row))
    shuffled, _ = token_loss(logp[order], old[order], advantages[order], row[order], entropy[order], config)
    torch.testing.assert_close(shuffled, whole[order])
    alone, _ = token_loss(logp[row == 2], old[row == 2], advantages[row == 2], row[row == 2], entropy, config)
    torch.testing.assert_close(alone, whole[row == 2])


def test_k3_is_never_negative_and_zero_only_where_the_policies_agree():
    logp = torch.linspace(-30, 0, 61, dtype=torch.float64)
    base = torch.full_like(logp, -2.0)
    assert (k3(logp, base) >= 0).all() and k3(base, base).abs().max() == 0
    assert k3(torch.tensor([-1.0]), torch.tensor([-1.0 + math.log(2)])).item() == pytest.approx(
        1 - math.log(2)
    )


def test_kl_and_entropy_enter_the_loss_with_their_gradients():
    logits, target, old, advantages, row = a_problem(7)
    base = old - 0.3
    logp, entropy = policy(logits, target)
    plain, _ = token_loss(logp, old, advantages, row, entropy, TrainConfig())
    config = TrainConfig(kl_coef=0.5, entropy_coef=0.1)
    full, statistics = token_loss(logp, old, advantages, row, entropy, config, base)
    difference = base - logp
    expected = plain + 0.5 * (difference.exp() - difference - 1) - 0.1 * entropy
    torch.testing.assert_close(full, expected)
    torch.testing.assert_close(gradient(logits, full), gradient(logits, expected))
    assert not any(values.requires_grad for values in statistics.values())
    with pytest.raises(ValueError, match="base"):
        token_loss(logp, old, advantages, row, entropy, config)


def test_the_objective_of_a_step_is_the_sum_over_its_micro_batches():
    loss, weights = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([3.0, 0.6, 0.6, 0.6])
    # one token of trajectory a, three of b: (3 * 1 + 0.6 * 14) / 4.8
    assert objective(loss, weights, 4.8).item() == pytest.approx(11.4 / 4.8)
    parts = objective(loss[:3], weights[:3], 4.8) + objective(loss[3:], weights[3:], 4.8)
    assert parts.item() == pytest.approx(11.4 / 4.8)


def test_summarize_by_hand_over_two_micro_batches():
    def part(*ratios):
        logs = torch.tensor([math.log(r) for r in ratios])
        limited = torch.tensor([r > 2 for r in ratios])
        return {
            "log_ratio": logs,
            "gap": logs.abs(),
            "limited": limited,
            "entropy": torch.full_like(logs, 0.5),
        }

    found = summarize([part(0.5, 1.0), part(2.0, 6.0)], TrainConfig())
    assert found["kl_k1"] == pytest.approx(-math.log(6) / 4)
    assert found["kl_k3"] == pytest.approx((9.5 - math.log(6) - 4) / 4)
    assert found["effective_sample_size"] == pytest.approx(9.5**2 / (4 * 41.25))
    assert (found["ratio_p50"], found["ratio_max"]) == pytest.approx((1.5, 6.0))
    assert found["ratio_p05"] == pytest.approx(0.575) and found["ratio_p95"] == pytest.approx(5.4)
    assert found["fraction_capped"] == found["fraction_clipped"] == 0.25
    assert found["logprob_gap_mean"] == pytest.approx((math.log(2) * 2 + math.log(6)) / 4)
    assert found["logprob_gap_max"] == pytest.approx(math.log(6)) and found["entropy"] == 0.5
    assert summarize([], TrainConfig()) == {}


# Masks


def naive_mask(logp, old, row, config):
    """One token or row after the other, in plain floats."""
    ratios = [math.exp(a - b) for a, b in zip(logp.tolist(), old.tolist(), strict=True)]
    if config.mask == "sequence":
        own = [[r for r, k in zip(ratios, row.tolist(), strict=True) if k == mine] for mine in row.tolist()]
        ratios = [math.prod(r) ** (1 / len(r)) for r in own]
    return torch.tensor([not config.mask_low <= ratio <= config.mask_high for ratio in ratios])


@pytest.mark.parametrize("mask", ["token", "sequence"])
@pytest.mark.parametrize("name", NAMES)
def test_a_mask_takes_its_tokens_out_of_every_loss_and_leaves_the_others_as_they_are(name, mask):
    config = TrainConfig(
        loss=name, mask=mask, mask_low=0.85, mask_high=1.2, ratio_cap=1.3, kl_coef=0.3, entropy_coef=0.1
    )
    shares = []
    for seed in range(5):
        logits, target, old, advantages, row = a_problem(seed)
        logp, entropy = policy(logits, target)
        base = old - 0.2
        loss, statistics = token_loss(logp, old, advantages, row, entropy, config, base)
        masked = naive_mask(logp, old, row, config)
        assert torch.equal(statistics["masked"], masked)
        plain, _ = token_loss(logp, old, advantages, row, entropy, config.replace(mask="none"), base)
        factor = torch.tensor([0.0 if out else 1.0 for out in masked.tolist()], dtype=torch.float64)
        torch.testing.assert_close(loss, factor * plain)
        found, wanted = gradient(logits, loss), factor[:, None] * gradient(logits, plain)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        reference = reference_gradient(name, logits, target, old, advantages, row, config)
        bare = config.replace(kl_coef=0.0, entropy_coef=0.0)
        loss, _ = token_loss(logp, old, advantages, row, entropy, bare)
        wanted = factor[:, None] * reference
        torch.testing.assert_close(gradient(logits, loss), wanted, rtol=1e-10, atol=1e-12)
        shares.append(summarize([statistics], config)["fraction_masked"])
        assert shares[-1] == pytest.approx(masked.double().mean().item())
    assert any(0 < share < 1 for share in shares), "the case has masked and kept tokens in one batch"


@pytest.mark.parametrize(
    ("mask", "ratios", "expected"),
    [
        ("token", [0.4, 0.6, 1.9, 2.1], [True, False, False, True]),
        ("sequence", [0.4, 0.6, 1.9, 2.1], [False] * 4),  # (0.4 * 0.6 * 1.9 * 2.1) ** (1 / 4) = 0.99
        ("sequence", [0.4, 0.4, 0.4, 1.9], [False] * 4),  # 0.59
        ("sequence", [0.4, 0.4, 0.4, 0.9], [True] * 4),  # 0.49
        ("sequence", [2.1, 2.1, 2.1, 2.1], [True] * 4),
        ("none", [1e-6, 1e6, 1.0, 1.0], None),
    ],
)
def test_what_is_masked_by_hand(mask, ratios, expected):
    logp = torch.full((4,), -1.0, dtype=torch.float64)
    old = logp - torch.tensor(ratios, dtype=torch.float64).log()
    row, ones = torch.zeros(4, dtype=torch.long), torch.ones(4)
    _, statistics = token_loss(logp, old, ones, row, ones, TrainConfig(mask=mask))
    assert statistics["masked"].tolist() == expected if expected else "masked" not in statistics
    assert ("fraction_masked" in summarize([statistics], TrainConfig(mask=mask))) == (expected is not None)


@pytest.mark.parametrize("drift", [-0.05, 0.05])
@pytest.mark.parametrize("mask", ["token", "sequence"])
def test_a_long_row_is_not_masked_for_being_long(mask, drift):
    """Five per cent a token: within bounds at 4 tokens as at 400, where the product would be e^20."""
    lengths = [4, 40, 400]
    row = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    old = torch.full((len(row),), -1.0)
    for bounds, expected in (((0.9, 1.1), 0.0), ((0.97, 1.03), 1.0)):
        config = TrainConfig(mask=mask, mask_low=bounds[0], mask_high=bounds[1])
        _, found = token_loss(old + drift, old, torch.ones(len(row)), row, torch.zeros(len(row)), config)
        assert [found["masked"][row == i].double().mean().item() for i in range(3)] == [expected] * 3


def test_a_sequence_mask_judges_the_sampled_tokens_of_all_turns_of_a_row_and_no_context():
    """Two turns in one row, 30 tokens of a tool's reply between them, and a good row in the same batch."""
    turns, good = [1.0, 1.0, 3.0, 3.0, 3.0, 3.0], [1.0, 1.1]

    def a_row(ratios, trajectory):
        places = [5, 6, *range(37, 37 + len(ratios) - 2)]
        length = places[-1] + 1
        logprobs = [0.0] * length
        for place, ratio in zip(places, ratios, strict=True):
            logprobs[place] = -1.0 - math.log(ratio)
        mask = tuple(place in places for place in range(length))
        ones = tuple(float(m) for m in mask)
        ids = (*range(5), *(trajectory * 100 + place for place in range(5, length)))
        return Sample(ids, mask, tuple(logprobs), ones, ones, str(trajectory), 0)

    (batch,) = pack([a_row(turns, 1), a_row(good, 2)], max_tokens=1000)
    old, row = torch.from_numpy(batch.logprobs_S), torch.from_numpy(batch.row_S)
    ones = torch.ones(len(row))
    for high, expected in ((2.0, [1.0, 0.0]), (2.2, [0.0, 0.0])):  # (1 * 1 * 3 ** 4) ** (1 / 6) = 2.08
        config = TrainConfig(mask="sequence", mask_high=high)
        _, found = token_loss(-ones, old, ones, row, ones, config)
        assert [found["masked"][row == i].float().mean().item() for i in range(2)] == expected


@pytest.mark.parametrize("mask", ["token", "sequence"])
def test_what_is_masked_does_not_depend_on_how_rows_are_packed(mask):
    config = TrainConfig(mask=mask, mask_low=0.9, mask_high=5.0, aggregate="trajectory")
    samples = a_forest()
    gradients = [
        model_gradient(samples, config, share, max_tokens)
        for share, max_tokens in [(False, 10_000), (True, 10_000), (True, 60)]
    ]
    plain = model_gradient(samples, config.replace(mask="none"), True, 10_000)
    assert gradients[0].norm() > 0 and (gradients[0] - plain).norm() > 0.01 * plain.norm()
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() / gradients[0].norm() < 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {"mask": "rows"},
        {"mask_low": 1.0},
        {"mask_low": -0.1},
        {"mask_high": 1.0},
        {"mask_high": float("nan")},
        {"ratio_cap": 0.0},
    ],
)
def test_bounds_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        TrainConfig(**options)


def test_one_side_of_a_mask_can_be_open():
    logp = torch.tensor([-9.0, -1.0, -1.0])
    old = torch.tensor([-1.0, -1.0, -9.0])
    row, ones = torch.zeros(3, dtype=torch.long), torch.ones(3)
    for options, expected in (
        ({"mask_high": float("inf")}, [True, False, False]),
        ({"mask_low": 0.0}, [False, False, True]),
    ):
        _, found = token_loss(logp, old, ones, row, ones, TrainConfig(mask="token", **options))
        assert found["masked"].tolist() == expected


def test_a_step_that_masks_much_says_so():
    quiet = {"fraction_masked": 0.1, "logprob_gap_mean": 0.02}
    assert warnings_of(quiet) == []
    (warning,) = warnings_of({"fraction_masked": 0.5, "logprob_gap_mean": 0.8})
    assert "50%" in warning and "0.8 nats" in warning and "mask_low" in warning


@pytest.mark.parametrize("mask", ["token", "sequence"])
async def test_a_step_reports_what_it_masked(mask, tiny_model, tmp_path, one_thread):
    """One reply whose engine logprobs are 2 nats too low, as if another policy had sampled it."""
    with open_model(tiny_model, tmp_path) as model:
        groups = await play(model)
        strange = groups[0][0]
        turn = strange.turns[0]
        strange.messages_and_choices[-1] = replace(turn, logprobs=tuple(p - 2 for p in turn.logprobs))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            result = await train_step(model, groups, mask=mask)
            both = await train_step(model, groups, mask=mask, minibatches=2, max_staleness=1)
    share = len(turn.completion_ids) / result.metrics["tokens"]
    assert result.metrics["fraction_masked"] == pytest.approx(share)
    assert both.metrics["updates"] == 2 and 0 < both.metrics["fraction_masked"] < 0.5


# Log-probabilities from hidden states


def reference_logprobs(hidden, weight, target, temperature):
    return policy(hidden @ weight.T / temperature[:, None], target)


def a_head(dtype=torch.float64, tokens=7):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    temperature = 0.5 + torch.rand(tokens, generator=generator)
    return hidden, weight, torch.randint(V, (tokens,), generator=generator), temperature.to(dtype)


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_sampled_logprobs_and_both_gradients_match_full_logits(chunk):
    hidden, weight, target, temperature = a_head()
    found = sampled_logprobs(hidden, weight, target, temperature, chunk=chunk)
    expected = reference_logprobs(hidden, weight, target, temperature)
    mix = torch.randn(2, len(hidden), dtype=torch.float64)
    for one, other in zip(
        (*found, *torch.autograd.grad((torch.stack(found) * mix).sum(), (hidden, weight))),
        (*expected, *torch.autograd.grad((torch.stack(expected) * mix).sum(), (hidden, weight))),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_sampled_logprobs_pass_gradcheck():
    hidden, weight, target, temperature = a_head(tokens=4)
    assert torch.autograd.gradcheck(
        lambda h, w: sampled_logprobs(h, w, target, temperature, chunk=3), (hidden, weight)
    )


def test_an_entropy_that_is_only_looked_at_costs_no_gradient():
    hidden, weight, target, temperature = a_head()
    logp, entropy = sampled_logprobs(hidden, weight, target, temperature, chunk=3, entropy_gradient=False)
    expected, _ = reference_logprobs(hidden, weight, target, temperature)
    for one, other in zip(
        torch.autograd.grad(logp.sum() + entropy.sum(), (hidden, weight)),
        torch.autograd.grad(expected.sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_bfloat16_input_gives_float32_numbers_close_to_exact_ones():
    hidden, weight, target, temperature = a_head(torch.bfloat16)
    logp, entropy = sampled_logprobs(hidden, weight, target, temperature.float())
    exact = reference_logprobs(hidden.double(), weight.double(), target, temperature.double())
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp.double(), exact[0], rtol=0, atol=0.1)
    (found,) = torch.autograd.grad(logp.sum(), hidden)
    (wanted,) = torch.autograd.grad(exact[0].sum(), hidden)
    assert torch.nn.functional.cosine_similarity(found.flatten(), wanted.flatten(), dim=0) > 0.999


def test_a_nearly_certain_token_keeps_a_precise_gradient_in_bfloat16():
    weight = torch.eye(4, H).bfloat16()
    hidden = torch.tensor([[8.0, 1.0, 0, 0, 0, 0]]).bfloat16().requires_grad_()
    target, one = torch.tensor([0]), torch.ones(1)
    (found,) = torch.autograd.grad(sampled_logprobs(hidden, weight, target, one)[0].sum(), hidden)
    exact_hidden = hidden.detach().double().requires_grad_()
    exact, _ = reference_logprobs(exact_hidden, weight.double(), target, one.double())
    (wanted,) = torch.autograd.grad(exact.sum(), exact_hidden)
    torch.testing.assert_close(found.double(), wanted, rtol=0.02, atol=1e-6)


def test_without_gradients_nothing_is_kept():
    hidden, weight, target, temperature = a_head()
    with torch.no_grad():
        logp, _ = sampled_logprobs(hidden, weight, target, temperature)
    assert not logp.requires_grad
    none, _ = sampled_logprobs(hidden[:0], weight, target[:0], temperature[:0])
    assert none.shape == (0,)


# From rows to the gradient, packed and not


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("aggregate", ["token", "trajectory", "constant"])
def test_packed_and_unpacked_rows_give_the_same_gradient(name, aggregate):
    """A model whose hidden state is a decayed sum of the embeddings of its context: enough to need a path."""
    config = TrainConfig(loss=name, aggregate=aggregate, entropy_coef=0.01)
    samples = a_forest()
    gradients = [
        model_gradient(samples, config, share, max_tokens)
        for share, max_tokens in [(False, 10_000), (True, 10_000), (True, 60)]
    ]
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() / gradients[0].norm() < 1e-6


def a_forest():
    generator = torch.Generator().manual_seed(2)
    shared = torch.randint(V, (30,), generator=generator).tolist()
    samples = []
    for index in range(6):
        ids = (*shared, *torch.randint(V, (5 + index,), generator=generator).tolist())
        mask = tuple(place >= 30 and place != 32 for place in range(len(ids)))
        logprobs = tuple(-2.0 - 0.05 * place if m else 0.0 for place, m in enumerate(mask))
        advantages = tuple((index - 2.5) if m else 0.0 for m in mask)
        weights = tuple(1.0 / (index + 1) if m else 0.0 for m in mask)
        samples.append(Sample(ids, mask, logprobs, advantages, weights, f"t{index // 2}", 0, 0.8))
    return samples


def model_gradient(samples, config, share_prefixes, max_tokens):
    generator = torch.Generator().manual_seed(3)
    embedding = torch.randn(V, H, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.randn(V, H, generator=generator, dtype=torch.float64)
    denominator = loss_denominator(samples, config)
    for batch in pack(samples, max_tokens=max_tokens, share_prefixes=share_prefixes):
        inputs = embedding[torch.from_numpy(batch.ids_N)] + 0.1 * torch.from_numpy(batch.positions_N)[:, None]
        hidden, ends = [], []
        for segment in batch.segments:
            state = ends[segment.parent] if segment.parent >= 0 else torch.zeros(H, dtype=torch.float64)
            for place in range(segment.start, segment.start + segment.length):
                state = torch.tanh(0.9 * state + inputs[place])
                hidden.append(state)
            ends.append(state)
        arrays = {f: torch.from_numpy(getattr(batch, f)) for f in vars(batch) if f.endswith("_S")}
        logp, entropy = sampled_logprobs(
            torch.stack(hidden)[arrays["source_S"]],
            head,
            arrays["target_S"],
            arrays["temperature_S"],
            chunk=4,
        )
        loss, _ = token_loss(
            logp, arrays["logprobs_S"], arrays["advantages_S"], arrays["row_S"], entropy, config
        )
        objective(loss, arrays["weights_S"], denominator).backward()
    return embedding.grad
