"""Shared prefixes are found where they save work, and only there."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from artnb.backends.prefixes import MIN_SAVED, common_length, shared_prefixes

Prompt = tuple[int, ...]


def cost(prompts: list[Prompt], known: list[int], blocks: list[Prompt]) -> int:
    """Prompt tokens that run when these blocks are computed first, each extending a shorter one."""

    def longest(tokens: Prompt, among: list[Prompt], whole: bool) -> int:
        return max(
            (len(b) for b in among if tokens[: len(b)] == b and (whole or len(b) < len(tokens))), default=0
        )

    existing = [p[:k] for p, k in zip(prompts, known, strict=True)]
    total = 0
    for number, block in enumerate(blocks):
        total += len(block) - longest(block, blocks[:number] + existing, True)
    return total + sum(len(p) - longest(p, blocks + existing, False) for p in prompts)


@st.composite
def trees(draw: st.DrawFn) -> list[Prompt]:
    """Prompts grown from few stems, often equal, nested or branching."""
    prompts: list[Prompt] = [()]
    for _ in range(draw(st.integers(1, 12))):
        stem = draw(st.sampled_from(prompts))
        cut = draw(st.integers(0, len(stem)))
        prompts.append(stem[:cut] + (draw(st.integers(0, 3)),) * draw(st.integers(1, 120)))
    return draw(st.permutations(prompts[1:]))


@given(a=st.lists(st.integers(0, 2), max_size=40), b=st.lists(st.integers(0, 2), max_size=40))
def test_common_length_counts_equal_tokens_from_the_start(a, b):
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_length(tuple(a), tuple(b)) == expected


@given(prompts=trees())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_every_prefix_is_shared_saves_work_and_leaves_a_token_to_run(prompts):
    blocks = shared_prefixes(prompts, [0] * len(prompts))
    for block in blocks:
        assert sum(p[: len(block)] == block and len(block) < len(p) for p in prompts) >= 2
    assert len(set(blocks)) == len(blocks)
    assert [len(b) for b in blocks] == sorted(len(b) for b in blocks)
    saved = cost(prompts, [0] * len(prompts), []) - cost(prompts, [0] * len(prompts), blocks)
    assert saved >= MIN_SAVED * len(blocks)


@given(prompts=trees())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_only_small_change_is_left_to_save(prompts):
    """No single further prefix of any length saves its users as much as a prefix must."""
    nothing = [0] * len(prompts)
    blocks = shared_prefixes(prompts, nothing)
    reached = cost(prompts, nothing, blocks)
    for prompt in prompts:
        for length in range(1, len(prompt), 11):
            users = sum(p[:length] == prompt[:length] for p in prompts)
            more = sorted({*blocks, prompt[:length]}, key=len)
            assert reached - cost(prompts, nothing, more) < MIN_SAVED * users


@given(prompts=trees())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_asked_again_it_wants_nothing_new(prompts):
    blocks = shared_prefixes(prompts, [0] * len(prompts))
    known = [
        max((len(b) for b in blocks if len(b) < len(p) and p[: len(b)] == b), default=0) for p in prompts
    ]
    again = shared_prefixes(prompts, known)
    assert cost(prompts, known, again) <= cost(prompts, known, [])
    assert not set(again) & set(blocks)


def test_a_system_prompt_and_the_prompts_of_groups_are_both_shared():
    system = (1,) * 100
    groups = [system + (2 + g,) * 100 for g in range(3)]
    prompts = [(*group, 50 + member) for group in groups for member in range(4)]
    assert sorted(shared_prefixes(prompts, [0] * 12)) == [system, *groups]
    assert cost(prompts, [0] * 12, [system, *groups]) == 100 + 300 + 12


def test_equal_prompts_share_all_but_their_last_token():
    assert shared_prefixes([(7,) * 80] * 3, [0, 0, 0]) == [(7,) * 79]


def test_what_saves_little_or_is_known_is_left():
    assert shared_prefixes([(1,) * MIN_SAVED + (2,), (1,) * MIN_SAVED + (3,)], [0, 0]) == [(1,) * MIN_SAVED]
    assert shared_prefixes([(1,) * (MIN_SAVED - 1) + (i,) for i in (2, 3)], [0, 0]) == []
    assert shared_prefixes([(1,) * 99 + (i,) for i in (2, 3)], [60, 60]) == []
    assert shared_prefixes([(1,) * 99, (2,) * 99], [0, 0]) == []
    assert shared_prefixes([(1,) * 99], [0]) == []
    assert shared_prefixes([], []) == []


def test_a_long_chain_of_turns_is_no_trouble():
    chain = [tuple(range(n)) for n in range(2, 1200)]
    blocks = shared_prefixes(chain, [0] * len(chain))
    assert cost(chain, [0] * len(chain), blocks) < 60 * len(chain)
