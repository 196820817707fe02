"""Has every mail one right folder by the rules, and is filing paid as the card says?"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from scripted import ScriptedModel

from artnb.environments import load_environment
from artnb.errors import ConfigurationError
from artnb.types import Scenario, Trajectory
from artnb_environments.email_filing.rollout import prompt, worked
from artnb_environments.email_filing.rules import (
    APPROVALS,
    FIXED,
    SPECIALS,
    TOPICS,
    Rules,
    Special,
    inbox_of,
    kinds_of,
)
from artnb_environments.email_filing.tools import TOOLS, Episode
from artnb_environments.email_search.world import Mail

SPLITS = ("train", "validation", "test")


@cache
def drawn(split: str = "test", n: int = 100, **variant: Any) -> tuple[Scenario, ...]:
    return tuple(load_environment("email_filing", **variant).scenarios(split, n))


def call(episode: Episode, tool: str, /, **arguments: Any) -> str:
    return episode.call(tool, json.dumps(arguments))


# ---- rules --------------------------------------------------------------------------------------

ABOVE = Special("amount", "5000", APPROVALS, "above $5,000")
FALCON = Special("project", "Falcon", "Falcon", "on Falcon")
ADA = Special("person", "ada@x", "Ada", "from Ada")


def mail(body: str, subject: str = "Re: Falcon", sender: str = "ada@x") -> Mail:
    return Mail("m1", "me", "2025-01-01 10:00:00", subject, sender, ("me",), (), body)


@pytest.mark.parametrize(
    ("order", "given", "kind", "folder"),
    [
        ((ABOVE, FALCON, ADA), mail("We ask $9,000 for the vests."), "quote", APPROVALS),
        ((FALCON, ABOVE, ADA), mail("We ask $9,000 for the vests."), "quote", "Falcon"),
        ((ADA, FALCON, ABOVE), mail("We ask $9,000 for the vests."), "quote", "Ada"),
        ((ABOVE, FALCON, ADA), mail("We ask $5,000 for the vests."), "quote", "Falcon"),
        ((ABOVE,), mail("It is $80.\n\n> We ask $9,000."), "quote", "Purchasing"),
        ((ABOVE,), mail("It is $80."), "quote", "Purchasing"),
        ((ADA,), mail("It is $80.", sender="bob@x"), "meeting", "Rooms"),
        ((FALCON,), mail("It is $80.", subject="Willow"), "hire", "Hiring"),
        ((ABOVE, FALCON), mail("last year $9,000", sender="digest@example.com"), None, "Digests"),
        ((FALCON,), mail("Falcon is making progress", sender="news@example.com"), None, "Newsletters"),
        ((), mail("hello"), None, None),
    ],
)
def test_the_strongest_rule_that_fits_decides(
    order: tuple[Special, ...], given: Mail, kind: str | None, folder: str | None
) -> None:
    assert Rules("test", tuple(TOPICS), order, True).folder_of(given, kind) == folder


def test_the_rules_say_which_one_wins() -> None:
    for seed in range(8):
        lines = Rules("test", ("quote",), (ABOVE, FALCON, ADA), False, seed).lines
        later = [line for line in lines if line.startswith("Anything")]
        assert len(later) == 3 and set(later) == {
            "Anything above $5,000 → Approvals, whatever the topic, even if it is on Falcon or from Ada",
            "Anything on Falcon → Falcon, whatever the topic, even if it is from Ada",
            "Anything from Ada → Ada, whatever the topic",
        }
    orders = {tuple(Rules("test", (), (ABOVE, FALCON, ADA), False, seed).lines) for seed in range(30)}
    assert len(orders) == 6, "the order of the lines says nothing"


def winner(lines: list[str], fitting: set[str]) -> str:
    """The folder that a reader of the rules' text chooses among the specials that fit."""
    told = {line.split(" → ")[1].split(",")[0]: line for line in lines if line.startswith("Anything")}
    for folder in fitting:
        rivals = [told[other].split(" → ")[0].removeprefix("Anything ") for other in fitting - {folder}]
        if all(rival in told[folder].partition("even if it is")[2] for rival in rivals):
            return folder
    raise AssertionError("no rule wins")


def test_the_text_of_the_rules_and_the_right_folders_agree() -> None:
    torn = 0
    for split in SPLITS:
        for scenario in drawn(split, 40):
            episode = Episode(scenario)
            for name, one in episode.mails.items():
                fitting = {special.folder for special in episode.rules.specials if special.applies(one)}
                if one.from_address.startswith(("news@", "digest@")):
                    assert episode.right[name] in ("Newsletters", "Digests")
                elif fitting:
                    assert episode.right[name] == winner(episode.rules.lines, fitting)
                    torn += len(fitting) > 1
                else:
                    kind = kinds_of(split, scenario.task["world"], scenario.task["inbox"])[name]
                    assert episode.right[name] == TOPICS[kind][0]
    assert torn > 20


def test_folders_specials_and_conflicts_are_spread() -> None:
    scenarios = drawn(n=150)
    folders = Counter(folder for s in scenarios for folder in s.task["right"])
    named = {TOPICS[topic][0] for topic in TOPICS} | {"Newsletters", "Digests", APPROVALS}
    assert named <= set(folders) and max(folders.values()) < 0.25 * folders.total()
    episodes = [Episode(s) for s in scenarios]
    assert 0.33 < sum(len(e.torn) for e in episodes) / sum(len(e.mails) for e in episodes) < 0.45
    assert {e.rules.specials[0].kind for e in episodes} == set(SPECIALS)
    assert all(8 <= len(e.rules.folders) <= 12 for e in episodes)
    assert all(len(set(s.task["ids"])) == 8 for s in scenarios)
    assert not any(Episode(s).torn for s in drawn(n=40, conflicts=0.0))


def test_splits_have_no_mail_and_no_words_for_a_topic_in_common() -> None:
    for _, words in TOPICS.values():
        assert len(set(words.values())) == 3
    subjects = {split: {Episode(s).owner.address for s in drawn(split, 60)} for split in SPLITS}
    assert not subjects["train"] & subjects["test"] and not subjects["validation"] & subjects["test"]


# ---- baselines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [None, "word", "small"])
def test_baselines_leave_headroom_and_the_oracle_gets_all(preset: str | None) -> None:
    environment = load_environment("email_filing", preset=preset)
    scenarios = environment.scenarios("test", 200 if preset else 60)
    mean = {}
    for name in environment.policies:
        played = [environment.play(name, s) for s in scenarios]
        assert all(-1 <= t.reward <= 1.2 for t in played if t.reward is not None)
        mean[name] = sum(t.reward or 0.0 for t in played) / len(played)
    assert mean["oracle"] == pytest.approx(1.2)
    assert mean["random"] < 0 and mean["majority"] < 0.35
    assert mean["random"] < mean["keyword_rules"] < 1.0
    if preset is None:
        torn = [environment.play("keyword_rules", s).metrics for s in scenarios]
        assert sum(m["conflicts_right"] for m in torn) / len(torn) < 0.25


# ---- tools and reward ---------------------------------------------------------------------------


def test_an_episode_is_paid_as_the_card_says() -> None:
    scenario = drawn(mails=4)[0]
    episode = Episode(scenario)
    names = list(episode.mails)
    assert episode.reward == 0.0 and episode.achieved["unfiled"] == 1.0
    if episode.right[names[0]] not in episode.folders:
        call(episode, "create_folder", name=episode.right[names[0]])
    call(episode, "move_email", id=names[0], folder=episode.right[names[0]].upper())
    assert episode.reward == pytest.approx(0.25)
    wrong = next(f for f in episode.folders if f != episode.right[names[1]])
    call(episode, "move_email", id=names[1], folder=wrong)
    assert episode.reward == pytest.approx(0.25 - 0.125)
    while episode.turns < episode.needed_calls + 3:
        call(episode, "list_inbox", page=1)
    assert episode.achieved["extra_calls"] == 3 and episode.reward == pytest.approx(0.125 - 0.06)
    call(episode, "move_email", id=names[1], folder=episode.right[names[1]])
    call(episode, "done")
    assert episode.done and call(episode, "done").startswith("Error: the task has ended")


def test_the_reward_has_a_floor() -> None:
    episode = Episode(drawn(mails=40, max_turns=500)[0])
    for _ in range(400):
        call(episode, "list_inbox", page=1)
    assert episode.reward == -1.0


def test_a_missing_folder_is_made_once() -> None:
    episode = Episode(drawn()[0])
    missing = episode.missing
    assert missing is not None and missing not in episode.folders
    (name, *_) = episode.mails
    assert "there is no folder" in call(episode, "move_email", id=name, folder=missing)
    assert call(episode, "create_folder", name=f" {missing} ") == f"there is a folder {missing} now"
    assert "new name" in call(episode, "create_folder", name=missing.lower())
    assert call(episode, "move_email", id=name, folder=missing) == f"{name} is in {missing}"
    assert "new name" in call(episode, "create_folder", name="x" * 41)
    for number in range(60):
        told = call(episode, "create_folder", name=f"f{number}")
    assert "40 folders already" in told


def test_pages_hold_ten_mails() -> None:
    episode = Episode(drawn(mails=23)[0])
    pages = [call(episode, "list_inbox", page=page) for page in (1, 2, 3)]
    ids = [line.split(" | ")[0] for page in pages for line in page.splitlines()[:-1]]
    assert ids == list(episode.mails) and pages[2].endswith("page 3 of 3")
    assert "page must be 1 to 3" in call(episode, "list_inbox", page=4)


# ---- rollout ------------------------------------------------------------------------------------


async def play(scenario: Scenario, reply: Callable[[dict[str, Any]], Any], **options: Any) -> Trajectory:
    environment = load_environment("email_filing")
    trajectory = await environment.rollout(ScriptedModel(reply, **options), scenario)
    assert Trajectory.from_json(json.loads(json.dumps(trajectory.finish().to_json()))) == trajectory
    assert set(trajectory.metrics) == set(environment.metrics)
    assert environment.render is not None and "<script>" not in environment.render(trajectory)
    return trajectory


async def test_a_model_that_reads_the_rules_files_all() -> None:
    scenario = drawn()[0]
    right = Episode(scenario)
    calls = [[("list_inbox", '{"page": 1}')]]
    if right.missing in right.right.values():
        calls.append([("create_folder", json.dumps({"name": right.missing}))])
    for name, folder in right.right.items():
        calls.append([("read_email", json.dumps({"id": name}))])
        calls.append([("move_email", json.dumps({"id": name, "folder": folder})), ("done", "{}")])
    script = iter([*calls, [("done", "{}")]])
    model_reply = lambda _: next(script)  # noqa: E731 - one line
    trajectory = await play(scenario, model_reply)
    assert trajectory.reward == 1.2 and trajectory.metrics["extra_calls"] == 0
    tools = [m["content"] for m in trajectory.messages() if m["role"] == "tool"]
    assert "Error: not made, one call a turn" in tools
    assert any(next(iter(right.mails.values())).body in text for text in tools)


BAD: list[Any] = [
    "",
    "I would file it under Rooms",
    [("delete_all", "{}")],
    [("move_email", "no json")],
    [("move_email", "[" * 100_000)],
    [("move_email", "[]")],
    [("move_email", '{"id": "m1"}')],
    [("move_email", '{"id": 3, "folder": "Rooms"}')],
    [("move_email", '{"id": "m1", "folder": "Rooms"}')],
    [("list_inbox", '{"page": true}')],
    [("list_inbox", '{"page": 0}')],
    [("read_email", '{"id": "\\ud800<script>"}')],
    [("create_folder", '{"name": " "}')],
]


@pytest.mark.parametrize("reply", BAD)
async def test_a_bad_call_costs_a_turn_or_ends_the_episode(reply: Any) -> None:
    ended = await play(drawn(invalid="end")[0], lambda _: reply)
    assert len(ended.turns) == 1 and ended.metrics["bad_calls"] == 1
    gone_on = await play(drawn(max_turns=3)[0], lambda _: reply)
    assert len(gone_on.turns) == 3 and gone_on.metrics["bad_calls"] == 3 and gone_on.reward == 0.0
    assert any(str(m.get("content")).startswith("Error") for m in gone_on.messages())


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("right", 1.2),
        (" RIGHT.\n", 1.2),
        ("wrong", -0.5),
        ("", -1.0),
        ("It goes to right", -1.0),
        ("<script>", -1.0),
    ],
)
async def test_the_word_style_is_one_reply(said: str, reward: float) -> None:
    for scenario in drawn(style="word")[:5]:
        episode = Episode(scenario)
        (right,) = episode.right.values()
        wrong = next(folder for folder in episode.folders if folder != right)
        text = re.sub("right|RIGHT", right, said).replace("wrong", wrong)
        trajectory = await play(scenario, lambda _, text=text: text)
        assert trajectory.reward == reward and len(trajectory.turns) == 1
    cut = await play(drawn(style="word")[0], lambda _: right, finish_reason="length")
    assert cut.reward == -1.0


def test_with_fixed_rules_all_of_the_prompt_but_the_mail_is_the_same() -> None:
    environment = load_environment("email_filing", preset="small")
    prompts = [prompt(s) for s in environment.scenarios("train", 20) + environment.scenarios("test", 20)]
    assert len({json.dumps(p[:-1]) for p in prompts}) == 1 and len({p[-1]["content"] for p in prompts}) > 30
    shown = [m["content"] for m in prompts[0] if m["role"] == "assistant"]
    assert sorted(shown) == sorted(FIXED.folders)


def test_examples_follow_the_rules_and_are_no_mails_of_the_task() -> None:
    for scenario in drawn(n=30, examples=4):
        rules = Episode(scenario).rules
        for one, folder in worked(rules):
            assert folder in rules.folders
            assert (folder == APPROVALS) == any(s.kind == "amount" and s.applies(one) for s in rules.specials)
        calls = [call for message in prompt(scenario) for call in message.get("tool_calls") or []]
        assert len(calls) == 12
        known = {tool["function"]["name"] for tool in TOOLS}
        assert {call["function"]["name"] for call in calls} <= known


def test_every_mail_of_a_scenario_is_in_its_inbox() -> None:
    for scenario in drawn(n=20):
        inbox = inbox_of(scenario.split, scenario.task["world"], scenario.task["inbox"])
        assert set(scenario.task["ids"]) <= {one.id for one in inbox.mails}
        assert len(scenario.task["right"]) == 8


def test_options_that_cannot_work_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        *({"style": "xml"}, {"examples": 5}, {"mails": 0}, {"topics": 1}, {"specials": 4}),
        *({"conflicts": 2}, {"max_turns": 0}, {"invalid": "noop"}, {"max_tokens": 0}),
    ]
    for options in wrong:
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            load_environment("email_filing", **options)
