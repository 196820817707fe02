"""A judge that is right, one that guesses, one that prefers a place: the report tells them apart."""

from __future__ import annotations

import random
from typing import Any

import pytest
from test_judge import group, oracle, quality

import artnb as nb
from artnb.judging.loopback import Asked, LoopbackJudge, Says, answer
from artnb.types import TrajectoryGroup


def known_groups(count: int = 24) -> list[TrajectoryGroup]:
    source = random.Random(3)
    groups = []
    for k in range(count):
        made = group(*(round(source.random(), 3) for _ in range(4)), name=str(k))
        for trajectory in made:
            trajectory.reward = quality(trajectory.messages())
        groups.append(made)
    return groups


async def report_on(
    script: Any, groups: list[TrajectoryGroup] | None = None, **options: Any
) -> nb.JudgeReport:
    with LoopbackJudge(script) as server:
        options = {
            "judge": "scripted",
            **server.access,
            "progress": False,
        } | options
        return await nb.judge_report(groups or known_groups(), **options)


async def test_an_oracle_is_right_and_agrees_with_itself():
    report = await report_on(oracle, price=(1.0, 2.0))
    assert report.pairwise.mean == 1.0 and report.rank_correlation.mean == pytest.approx(1.0)
    assert report.consistency.mean == 1.0 and report.spread == 0.0
    assert report.first_place_bonus.mean == 0.0 and report.invalid_rate == 0.0
    assert report.dollars_per_group == pytest.approx(3 * (1000 * 1.0 + 100 * 2.0) / 1e6)
    assert "1.000" in repr(report) and "pairs ordered rightly" in report._repr_html_()


async def test_a_guess_is_a_coin():
    source = random.Random(0)
    report = await report_on(lambda asked: Says(answer({n: source.random() for n in asked.attempts})))
    assert report.pairwise.low < 0.5 < report.pairwise.high
    assert report.consistency.low < 0.5 < report.consistency.high
    assert report.rank_correlation.low < 0 < report.rank_correlation.high


async def test_a_liar_is_wrong_although_it_agrees_with_itself():
    def liar(asked: Asked) -> Says:
        return Says(answer({name: 1 - quality(e) for name, e in asked.attempts.items()}))

    report = await report_on(liar)
    assert report.pairwise.mean == 0.0 and report.consistency.mean == 1.0
    assert report.rank_correlation.mean == pytest.approx(-1.0)


async def test_a_preference_for_the_first_place_is_seen():
    def biased(asked: Asked) -> Says:
        return Says(
            answer(
                {
                    n: min(1.0, quality(e) * 0.5 + 0.3 * (k == 0))
                    for k, (n, e) in enumerate(asked.attempts.items())
                }
            )
        )

    report = await report_on(biased, samples=4)
    assert report.first_place_bonus.mean == pytest.approx(0.3)
    assert report.first_place_bonus.low > 0.25
    assert report.pairwise.mean == 1.0, "each stood first once"


async def test_truth_may_come_from_elsewhere_and_the_groups_stay_as_they_are():
    groups = known_groups(6)
    before = [[t.reward for t in one] for one in groups]
    report = await report_on(oracle, groups, truth=lambda trajectory: 1 - quality(trajectory.messages()))
    assert report.pairwise.mean == 0.0
    assert [[t.reward for t in one] for one in groups] == before


async def test_without_any_truth_it_says_so():
    with pytest.raises(nb.ConfigurationError, match="true rewards differ"):
        await nb.judge_report([group(0.1, 0.2)], judge="x", progress=False)
    with pytest.raises(nb.ConfigurationError, match="at least 2"):
        await nb.judge_report(known_groups(2), samples=1, judge="x", progress=False)
