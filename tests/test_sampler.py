"""The next token is drawn from exactly the distribution whose logprob is reported."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artnb.backends.sampler import draw, processed
from artnb.config import SamplingConfig

pytestmark = pytest.mark.usefixtures("one_thread")

HALVES = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
"""Four tokens whose probabilities are easy to add up."""


def kept(**sampling: float) -> dict[int, float]:
    """Tokens that remain of HALVES, with their probabilities."""
    probabilities = processed(HALVES[None], [SamplingConfig(**sampling)])[0].softmax(-1)  # type: ignore[arg-type]
    return {i: round(p, 4) for i, p in enumerate(probabilities.tolist()) if p > 0}


def counts(logits: torch.Tensor, sampling: SamplingConfig, uniform: list[float]) -> torch.Tensor:
    ids, *_ = draw(logits.repeat(len(uniform), 1), [sampling] * len(uniform), uniform)
    return torch.bincount(torch.tensor(ids), minlength=len(logits)).double()


# ---- what is cut ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, {0: 0.1, 1: 0.5, 2: 0.25, 3: 0.15}),
        ({"top_k": 1}, {1: 1.0}),
        ({"top_k": 2}, {1: 0.6667, 2: 0.3333}),
        ({"top_k": 99}, {0: 0.1, 1: 0.5, 2: 0.25, 3: 0.15}),
        ({"top_p": 0.4}, {1: 1.0}),
        ({"top_p": 0.51}, {1: 0.6667, 2: 0.3333}),
        ({"top_p": 0.74}, {1: 0.6667, 2: 0.3333}),
        ({"top_p": 0.8}, {1: 0.5556, 2: 0.2778, 3: 0.1667}),
        ({"top_p": 1e-9}, {1: 1.0}),
        ({"min_p": 0.4}, {1: 0.6667, 2: 0.3333}),
        ({"min_p": 0.25}, {1: 0.5556, 2: 0.2778, 3: 0.1667}),
        ({"top_k": 3, "top_p": 0.6}, {1: 0.6667, 2: 0.3333}),
        ({"temperature": 0.5}, {0: 0.029, 1: 0.7246, 2: 0.1812, 3: 0.0652}),
        ({"temperature": 0.5, "top_p": 0.9}, {1: 0.8, 2: 0.2}),
    ],
)
def test_it_cuts_and_renormalises_as_worked_out_by_hand(sampling, expected):
    assert kept(**sampling) == pytest.approx(expected, abs=2e-4)


def test_each_row_has_its_own_settings():
    settings_ = [SamplingConfig(), SamplingConfig(top_k=1), SamplingConfig(temperature=0.5)]
    logits = HALVES.repeat(3, 1)
    before = logits.clone()
    together = processed(logits, settings_)
    for row, each in enumerate(settings_):
        assert torch.equal(together[row], processed(HALVES[None], [each])[0])
    assert torch.equal(logits, before), "the model's logits stay as they are"


# ---- what is drawn -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), SamplingConfig(temperature=0.7), SamplingConfig(top_p=0.9, top_k=20)]
)
def test_draws_follow_the_distribution_by_chi_square(sampling):
    logits = 1.5 * torch.randn(50, generator=torch.Generator().manual_seed(0))
    source, draws = random.Random(0), 20_000
    observed = counts(logits, sampling, [source.random() for _ in range(draws)])
    expected = draws * processed(logits[None], [sampling])[0].double().softmax(-1)
    assert not observed[expected == 0].any(), "what is cut is never drawn"
    likely = expected > 5
    statistic = float(((observed - expected).square() / expected)[likely].sum())
    freedom = int(likely.sum()) - 1
    # the normal approximation of the upper 0.1 % point (Wilson and Hilferty)
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def test_evenly_spaced_numbers_give_each_token_its_share():
    uniform = [(i + 0.5) / 1000 for i in range(1000)]
    assert counts(HALVES, SamplingConfig(), uniform).tolist() == [100, 500, 250, 150]


@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=30),
    uniform=st.floats(0, 1, exclude_max=True),
    top_k=st.integers(0, 5),
    top_p=st.floats(0.01, 1.0),
    temperature=st.sampled_from([0.0, 0.2, 1.0, 3.0]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_drawn_token_was_possible_and_its_logprob_is_the_distributions(
    logits, uniform, top_k, top_p, temperature
):
    sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    (token,), (logprob,), cut, log_total = draw(torch.tensor([logits]), [sampling], [uniform])
    expected = processed(torch.tensor([logits]), [sampling])[0].double().log_softmax(-1)
    assert expected[token] > -math.inf
    assert logprob == pytest.approx(float(expected[token]), abs=1e-4)
    assert torch.allclose((cut[0] - log_total[0]).double(), expected, atol=1e-4)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53, 0.99999999, 0.5])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_token_without_mass_is_never_drawn_at_the_edges(uniform, place):
    logits = torch.full((1000,), float("-inf"))
    logits[{"first": 0, "middle": 500, "last": 999}[place]] = 3.0
    (token,), (logprob,), *_ = draw(logits[None], [SamplingConfig()], [uniform])
    assert logits[token] == 3.0 and logprob == 0.0
    (token,), (logprob,), *_ = draw(torch.arange(9.0, 0, -1)[None], [SamplingConfig(top_k=2)], [uniform])
    assert token in (0, 1) and math.isfinite(logprob)


def test_temperature_zero_takes_the_largest_and_reports_it_at_temperature_one():
    (token,), (logprob,), *_ = draw(HALVES[None], [SamplingConfig(temperature=0)], [0.99])
    assert token == 1
    assert logprob == pytest.approx(math.log(0.5), abs=1e-6)


def test_bfloat16_logits_are_scored_in_float32():
    logits = torch.randn(2000, generator=torch.Generator().manual_seed(0)).bfloat16()
    (token,), (logprob,), *_ = draw(logits[None], [SamplingConfig()], [0.3])
    assert logprob == pytest.approx(float(logits.double().log_softmax(-1)[token]), abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), SamplingConfig(temperature=0), SamplingConfig(top_k=3)]
)
def test_a_row_without_a_distribution_shows_in_its_logprob_alone(bad, sampling):
    logits = torch.stack([HALVES, HALVES, HALVES])
    logits[1, 2] = bad
    ids, logprobs, *_ = draw(logits, [sampling] * 3, [0.3] * 3)
    assert [math.isfinite(p) for p in logprobs] == [True, False, True]
    assert ids[0] == ids[2]
    everything = torch.full((1, 4), bad)
    assert not math.isfinite(draw(everything, [sampling], [0.3])[1][0])
