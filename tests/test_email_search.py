"""Is every answer in the mailbox and nowhere else, is it paid as the card says, and do rollouts survive?"""

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
from artnb_environments.email_search.questions import DONT_KNOW
from artnb_environments.email_search.reward import by_level, is_correct, ladder, precision_recall, values_in
from artnb_environments.email_search.rollout import prompt
from artnb_environments.email_search.store import MailStore
from artnb_environments.email_search.tools import Episode
from artnb_environments.email_search.words import FIRST_NAMES, KINDS, LAST_NAMES, PROJECTS
from artnb_environments.email_search.world import (
    INBOXES,
    WORLDS,
    Mail,
    _Writer,
    cast_of,
    make_inbox,
    make_world,
)

SPLITS = ("train", "validation", "test")


@cache
def drawn(split: str = "test", n: int = 300, **variant: Any) -> tuple[Scenario, ...]:
    return tuple(load_environment("email_search", **variant).scenarios(split, n))


@cache
def world(split: str) -> list[Any]:
    return make_world(split, WORLDS[split][0])


def call(episode: Episode, name: str, **arguments: Any) -> str:
    return episode.call(name, json.dumps(arguments))


# ---- the mailbox --------------------------------------------------------------------------------


def test_a_world_has_eleven_thousand_mails_in_inboxes_of_a_thousand() -> None:
    inboxes = world("test")
    assert len({mail.id for inbox in inboxes for mail in inbox.mails}) == 11_000
    assert [len(inbox.mails) for inbox in inboxes] == [1000] * INBOXES
    for inbox in inboxes:
        assert len({mail.id for mail in inbox.mails}) == 1000
        assert [mail.date for mail in inbox.mails] == sorted(mail.date for mail in inbox.mails)
        assert all(inbox.owner.address in (m.from_address, *m.to, *m.cc) for m in inbox.mails)


def test_an_inbox_repeats_itself_from_its_arguments() -> None:
    again = _Writer("test", 1000, 3, 1000, 0.95).inbox()
    assert again == make_inbox("test", 1000, 3) and again is not make_inbox("test", 1000, 3)
    assert again.mails != make_inbox("test", 1000, 4).mails


def test_no_two_facts_can_be_meant_by_one_question() -> None:
    for split in SPLITS:
        for inbox in world(split):
            by_place = [(f.kind, f.item[0], f.project) for f in inbox.facts]
            by_person = [(f.kind, f.item[0], f.person.name) for f in inbox.facts]
            assert len(set(by_place)) == len(by_place) > 50
            assert len(set(by_person)) == len(by_person)


def test_each_value_stands_in_its_source_and_each_source_names_the_item() -> None:
    for inbox in world("test"):
        mails = {mail.id: mail for mail in inbox.mails}
        for fact in inbox.facts:
            assert [v.date for v in fact.values] == sorted(v.date for v in fact.values)
            for value in fact.values:
                mail = mails[value.source]
                assert mail.date == value.date and fact.item[0] in mail.body and fact.project in mail.subject
                if fact.kind == "approval":
                    assert value.text not in mail.body
                    assert mail.from_address.split("@")[0] == value.text.lower().replace(" ", ".")
                else:
                    assert value.text in mail.body


def test_the_traps_are_there() -> None:
    inbox = world("test")[0]
    told = [fact for fact in inbox.facts if fact.values]
    assert sum(len(fact.values) > 1 for fact in told) > len(told) / 3, "superseded"
    stale = 0
    for fact in told:
        quotes = [m for m in inbox.mails if m.date > fact.last_date and "\n> " in m.body]
        stale += any(
            f"{v.text}," in m.body or f"{v.text}." in m.body for v in fact.values[:-1] for m in quotes
        )
    assert stale > 5, "a quote of the old value after the new one"
    assert sum(m.from_address.startswith("digest@") for m in inbox.mails) > 20
    assert sum(m.from_address.startswith("news@") for m in inbox.mails) > 20
    assert any("ignore all earlier instructions" in m.body for m in inbox.mails)
    same_item = Counter((fact.kind, fact.item[0]) for fact in inbox.facts)
    same_place = Counter((fact.kind, fact.project) for fact in inbox.facts)
    assert max(same_item.values()) > 2 and max(same_place.values()) > 1, "siblings"


def test_the_questions_other_words_for_an_item_are_in_no_mail() -> None:
    stores = [(split, MailStore(m for inbox in world(split) for m in inbox.mails)) for split in SPLITS]
    others = {
        word for kind in KINDS.values() for item in kind.items for other in item[1:] for word in other.split()
    }
    for split, store in stores:
        for owner in cast_of(split, WORLDS[split][0])[:INBOXES]:
            assert not {word for word in others if store.search(owner.address, [word])}


def test_splits_share_no_name_project_template_or_held_out_word() -> None:
    for table in (FIRST_NAMES, LAST_NAMES, PROJECTS):
        words = [word for split in SPLITS for word in table[split]]
        assert len(words) == len(set(words))
    for kind in KINDS.values():
        templates = [text for split in SPLITS for text in kind.questions[split]]
        assert len(templates) == len(set(templates)) == 4
        assert all(len({*item}) == 3 for item in kind.items)
    trained, tested = ({s.task["question"] for s in drawn(split, 300)} for split in ("train", "test"))
    assert not trained & tested


# ---- questions ----------------------------------------------------------------------------------


def test_questions_have_the_stated_shares_and_only_sources_of_before_their_day() -> None:
    scenarios = drawn(n=600)
    count = Counter(len(s.task["sources"]) for s in scenarios)
    assert 0.06 < count[0] / 600 < 0.15 and 0.14 < count[2] / 600 < 0.26
    for s in scenarios:
        inbox = make_inbox("test", s.task["world"], s.task["inbox"])
        dates = {mail.id: mail.date for mail in inbox.mails}
        assert all(dates[source] < s.task["day"] for source in s.task["sources"])
        assert (s.task["answer"] == DONT_KNOW) == (not s.task["sources"])


def test_a_question_with_one_source_asks_for_what_held_on_its_day() -> None:
    superseded_later = 0
    for s in drawn(n=600):
        if len(s.task["sources"]) == 1:
            facts = make_inbox("test", s.task["world"], s.task["inbox"]).facts
            (fact,) = [f for f in facts if s.task["sources"][0] in {v.source for v in f.values}]
            held = [value for value in fact.values if value.date < s.task["day"]][-1]
            assert (held.source, held.text) == (s.task["sources"][0], s.task["answer"])
            superseded_later += held is not fact.values[-1]
    assert superseded_later > 50


def test_a_sum_adds_its_two_sources() -> None:
    pairs = [s for s in drawn(n=600) if len(s.task["sources"]) == 2]
    for s in pairs:
        parts = [int(re.sub(r"\D", "", part)) for part in s.task["parts"]]
        assert sum(parts) == int(re.sub(r"\D", "", s.task["answer"]))


# ---- baselines ----------------------------------------------------------------------------------


def test_baselines_leave_headroom_and_the_oracle_gets_all() -> None:
    environment, n = load_environment("email_search"), 600
    played = {name: [environment.play(name, s) for s in drawn(n=n)] for name in environment.policies}
    mean = {
        name: {m: sum(t.metrics[m] for t in some) / n for m in environment.metrics}
        for name, some in played.items()
    }
    assert mean["newest_hit"]["correct"] <= 0.05
    assert 0.03 < mean["bm25"]["correct"] <= 0.30
    for metric in ("correct", "source_precision", "source_recall", "found", "read"):
        assert mean["oracle"][metric] == 1.0
    assert all(1.3 < t.reward <= 1.5 for t in played["oracle"])
    assert {t.metrics["level"] for t in played["oracle"]} == {1.0, 2.0, 3.0}
    assert sum(levels["n"] for levels in by_level(played["bm25"]).values()) == n
    assert by_level(played["newest_hit"])[1]["correct"] == 1.0


def test_levels_are_solved_by_their_player_and_not_by_the_one_before() -> None:
    environment = load_environment("email_search", preset="small")
    scenarios = environment.scenarios("train", 60)
    assert {s.task["level_found"] for s in scenarios} == {1}
    assert all(environment.play("newest_hit", s).metrics["correct"] for s in scenarios)
    second = load_environment("email_search", level=2)
    for s in second.scenarios("train", 20):
        assert second.play("bm25", s).metrics["correct"]
        first = second.play("newest_hit", s).metrics
        assert not (first["correct"] and first["source_recall"] == 1)


# ---- search -------------------------------------------------------------------------------------

SOME = [
    Mail("m1", "a@x", "2025-01-01 10:00:00", "Vests", "b@x", ("a@x", "c@x"), (), "Safety vests are here."),
    Mail("m2", "a@x", "2025-01-02 10:00:00", "Re: Vests", "c@x", ("a@x",), ("d@x",), "The vest is orange."),
    Mail("m3", "z@x", "2025-01-03 10:00:00", "Vests", "b@x", ("z@x",), (), "Another inbox."),
]


@pytest.mark.parametrize(
    ("keywords", "filters", "found"),
    [
        (["vest"], {}, ["m2", "m1"]),
        (["VESTS", "safety"], {}, ["m1"]),
        (["vest"], {"max_results": 1}, ["m2"]),
        (["vest"], {"from_addr": "B@x"}, ["m1"]),
        (["vest"], {"to_addr": "d@x"}, ["m2"]),
        (["vest"], {"sent_after": "2025-01-02"}, ["m2"]),
        (["vest"], {"sent_before": "2025-01-02"}, ["m1"]),
        (["vest"], {"until": "2025-01-02"}, ["m1"]),
        (["safety vests"], {}, ["m1"]),
        (["vests safety"], {}, []),
        (['vest" OR "safety'], {}, []),
        (["NEAR(", "*"], {}, []),
        (["", "  ", '"'], {}, []),
        (["\ud800vest", "a\0b"], {}, []),
        (["orange", "safety"], {"any_keyword": True, "max_results": 5}, None),
    ],
)
def test_search_filters_and_takes_hostile_keywords_as_words(
    keywords: list[str], filters: dict[str, Any], found: list[str] | None
) -> None:
    hits = [hit.message_id for hit in MailStore(SOME).search("a@x", keywords, **filters)]
    assert set(hits) == {"m1", "m2"} if found is None else hits == found


def test_read_gives_recipients_and_only_this_inbox_and_day() -> None:
    store = MailStore(SOME)
    assert store.read("a@x", "m1") == SOME[0] and store.read("a@x", "m2") == SOME[1]
    assert store.read("a@x", "m3") is None
    assert store.read("a@x", "m2", until="2025-01-02") is None


def test_mail_of_after_the_day_is_neither_found_nor_read() -> None:
    episode = Episode(drawn()[0])
    later = [m for m in make_inbox("test", 1000, episode.task["inbox"]).mails if m.date > episode.task["day"]]
    assert later and "no mail with this id" in call(episode, "read_email", message_id=later[0].id)
    assert episode.read_nothing


# ---- reward -------------------------------------------------------------------------------------

NAMES = ("Ada Marsh", "Bruno Keller")


@pytest.mark.parametrize(
    ("answer", "truth", "kind", "right"),
    [
        ("It is $4,310.", "$4,310", "money", True),
        ("4310 dollars", "$4,310", "money", True),
        ("USD 4,310.00", "$4,310", "money", True),
        ("4310", "$4,310", "money", True),
        ("$4,310 or $4,400", "$4,310", "money", False),
        ("$4,310 or 4,400", "$4,310", "money", False),
        ("$4,310 since 3 March 2025", "$4,310", "money", True),
        ("$14,310", "$4,310", "money", False),
        ("4,310 for the 12 vests: $4,310", "$4,310", "money", True),
        ("3 March 2025", "3 March 2025", "date", True),
        ("March 3rd", "3 March 2025", "date", True),
        ("2025-03-03", "3 March 2025", "date", True),
        ("3 March 2024", "3 March 2025", "date", False),
        ("3 or 4 March", "3 March 2025", "date", False),
        ("March 3 or March 4", "3 March 2025", "date", False),
        ("ka-1234", "KA-1234", "code", True),
        ("KA1234, not KB-1234", "KA-1234", "code", False),
        ("47 people", "47", "int", True),
        ("147", "47", "int", False),
        ("47 or 48", "47", "int", False),
        ("Room Oak", "Room Oak", "place", True),
        ("Room Oak or Room Elm", "Room Oak", "place", False),
        ("Marsh", "Ada Marsh", "person", True),
        ("Ada", "Ada Marsh", "person", False),
        ("Ada Marsh or Bruno Keller", "Ada Marsh", "person", False),
        ("I don't know", DONT_KNOW, "money", True),
        ("I do not know, perhaps $40", DONT_KNOW, "money", False),
        ("nothing", DONT_KNOW, "money", False),
        ("I don't know, maybe $4,310", "$4,310", "money", False),
        ("", "$4,310", "money", False),
        ("$4,310" + " " * 5000, "$4,310", "money", False),
    ],
)
def test_an_answer_is_right_with_the_value_and_no_other(
    answer: str, truth: str, kind: str, right: bool
) -> None:
    assert is_correct(answer, truth, kind, "How much?", NAMES) == right


def test_parts_of_a_sum_may_be_shown() -> None:
    assert is_correct("45 + 81 = 126", "126", "int", "How many?; 45; 81")
    assert not is_correct("45 + 80 = 125", "126", "int", "How many?; 45; 81")
    assert not is_correct("45 and 81", "126", "int", "How many?; 45; 81")


def test_every_generated_answer_is_right_in_its_own_words() -> None:
    for s in drawn(n=600):
        names = [person.name for person in cast_of("test", s.task["world"])]
        assert is_correct(
            s.task["answer"], s.task["answer"], s.task["answer_type"], s.task["question"], names
        )
        if s.task["sources"]:
            assert len(values_in(s.task["answer_type"], s.task["answer"], names)) == 1
            assert not is_correct(DONT_KNOW, s.task["answer"], s.task["answer_type"], "", names)


def test_the_ladder_pays_as_arts() -> None:
    assert precision_recall([], []) == (1.0, 1.0) and precision_recall(["m1"], []) == (0.0, 0.0)
    assert precision_recall(["m1", "m2"], ["m1"]) == (0.5, 1.0)
    assert ladder("correct", partial=0.4, source_f1=1, given=1, needed=1, turns_left=0.7) == pytest.approx(
        1.47
    )
    assert ladder("correct", partial=0.0, source_f1=0.5, given=2, needed=1) == pytest.approx(1.2)
    rungs = ["unreadable", "unknown_tool", "bad_arguments", "wrong", "none"]
    assert [ladder(rung, partial=0.0) for rung in rungs] == [-2.0, -1.9, -1.8, -1.0, 0.0]


def one_source() -> Scenario:
    return next(s for s in drawn() if len(s.task["sources"]) == 1)


def test_an_episode_is_paid_step_by_step() -> None:
    scenario = one_source()
    (source,) = scenario.task["sources"]
    episode = Episode(scenario)
    assert episode.reward == 0.0
    call(episode, "read_email", message_id=source)
    assert episode.reward == pytest.approx(0.2), "read, and no mail that is not there"
    call(episode, "return_final_answer", answer="no idea at all", sources=[source])
    assert episode.outcome == "wrong" and episode.reward == pytest.approx(-1 + 0.3)
    assert call(episode, "read_email", message_id=source).startswith("Error")

    episode = Episode(scenario)
    call(episode, "return_final_answer", answer=scenario.task["answer"], sources=[source, "m00000"])
    assert episode.reward == pytest.approx(1 + 0.3 * 2 / 3 + 0.05 + 0.1 * 0.9)


def test_dont_know_is_worth_nothing_where_there_is_an_answer_and_all_where_there_is_none() -> None:
    episode = Episode(one_source())
    call(episode, "return_final_answer", answer=DONT_KNOW, sources=[])
    assert (episode.outcome, episode.reward) == ("none", 0.0)
    episode = Episode(next(s for s in drawn() if not s.task["sources"]))
    call(episode, "return_final_answer", answer=DONT_KNOW, sources=[])
    assert episode.reward == pytest.approx(1.49)


def test_the_user_recalls_one_thing_a_question_at_a_price() -> None:
    (scenario,) = load_environment("email_search", ask_user=True).scenarios("test", 1)
    episode = Episode(scenario)
    told = [call(episode, "ask_user", question="what?") for _ in range(12)]
    assert told[0].startswith('The mails call it "') and len(set(told)) > 3
    assert told[-1] == "That is all I remember." and episode.reward == pytest.approx(-0.6)
    assert call(Episode(one_source()), "ask_user", question="?").startswith("Error: there is no tool")


# ---- rollout ------------------------------------------------------------------------------------


async def play(scenario: Scenario, reply: Callable[[dict[str, Any]], Any], **options: Any) -> Trajectory:
    trajectory = await load_environment("email_search").rollout(ScriptedModel(reply, **options), scenario)
    assert Trajectory.from_json(json.loads(json.dumps(trajectory.finish().to_json()))) == trajectory
    assert load_environment("email_search").render(trajectory)
    return trajectory


async def test_tool_calls_are_answered_until_the_final_one() -> None:
    scenario = one_source()
    (source,) = scenario.task["sources"]
    final = {"answer": scenario.task["answer"], "sources": [source]}
    script = iter(
        [
            [("search_emails", json.dumps({"keywords": ["the"], "from_addr": None}))],
            [("read_email", json.dumps({"message_id": source})), ("read_email", "{}")],
            [("return_final_answer", json.dumps(final))],
        ]
    )
    trajectory = await play(scenario, lambda _: next(script))
    assert trajectory.metrics["correct"] == 1 and trajectory.metrics["calls"] == 3
    tools = [m for m in trajectory.messages() if m["role"] == "tool"]
    assert len(tools) == 3 and source in tools[1]["content"] and "one call a turn" in tools[2]["content"]
    assert not trajectory.metrics["bad_calls"]


BAD = [
    ("", -2.0),
    ("I think it is $5", -2.0),
    ([("delete_all", "{}")], -1.9),
    ([("search_emails", "no json")], -2.0),
    ([("search_emails", "[" * 100_000)], -2.0),
    ([("search_emails", "[]")], -1.8),
    ([("search_emails", "{}")], -1.8),
    ([("search_emails", '{"keywords": "vests"}')], -1.8),
    ([("search_emails", '{"keywords": []}')], -1.8),
    ([("search_emails", '{"keywords": ["a"], "max_results": 11}')], -1.8),
    ([("search_emails", '{"keywords": ["a"], "max_results": true}')], -1.8),
    ([("search_emails", '{"keywords": ["a"], "sent_after": "2025-02-30"}')], -1.8),
    ([("search_emails", '{"keywords": ["a"], "inbox": "b"}')], -1.8),
    ([("read_email", '{"message_id": 3}')], -1.8),
    ([("return_final_answer", '{"answer": "x"}')], -1.8),
    ([("return_final_answer", '{"answer": "x", "sources": [1]}')], -1.8),
]


@pytest.mark.parametrize(("reply", "reward"), BAD)
async def test_a_bad_call_ends_on_its_own_rung(reply: Any, reward: float) -> None:
    trajectory = await play(one_source(), lambda _: reply)
    assert trajectory.reward == pytest.approx(reward)
    assert len(trajectory.turns) == 1 and trajectory.metrics["bad_calls"] == 1


async def test_with_retry_the_agent_reads_what_was_wrong_and_goes_on() -> None:
    (scenario,) = load_environment("email_search", invalid="retry", max_turns=3).scenarios("test", 1)
    script = iter(["hello", [("nothing", "{}")], [("search_emails", '{"keywords": ["vests"]}')]])
    trajectory = await play(scenario, lambda _: next(script))
    assert trajectory.metrics["bad_calls"] == 2 and trajectory.metadata["outcome"] == "none"
    said = [m["content"] for m in trajectory.messages() if str(m.get("content")).startswith("Error")]
    assert len(said) == 2 and "call one of the tools" in said[0] and "read_email" in said[1]
    trajectory = await play(scenario, lambda _: "hello")
    assert len(trajectory.turns) == 3 and trajectory.reward == -2.0


@pytest.mark.parametrize("text", ["x" * 100_000, "\ud800\0", '"; DROP TABLE emails; --', "<script>"])
async def test_hostile_texts_are_only_texts(text: str) -> None:
    replies = [
        [("search_emails", json.dumps({"keywords": [text], "from_addr": text}))],
        [("read_email", json.dumps({"message_id": text}))],
        [("return_final_answer", json.dumps({"answer": text, "sources": [text]}))],
    ]
    script = iter(replies)
    trajectory = await play(one_source(), lambda _: next(script))
    assert trajectory.metadata["outcome"] == "wrong"
    assert "<script>" not in load_environment("email_search").render(trajectory)


async def test_the_text_style_needs_no_tool_calls() -> None:
    (scenario,) = load_environment("email_search", preset="small").scenarios("test", 1)
    answer = f"<answer>{scenario.task['answer']} {' '.join(scenario.task['sources'])}</answer>"

    def reply(request: dict[str, Any]) -> str:
        assert "tools" not in request and request["stop"] == ["</call>", "</answer>"]
        words = " ".join(re.findall(r"[A-Z]\w+", scenario.task["question"])[-1:])
        return answer if len(request["messages"]) > 10 else f"<call>search {words}</call>"

    trajectory = await play(scenario, reply)
    assert trajectory.metrics["correct"] == trajectory.metrics["source_recall"] == 1.0
    for text, outcome in (("<call>search", "unreadable"), ("<call>fly away</call>", "unknown_tool")):
        assert (await play(scenario, lambda _, text=text: text)).metadata["outcome"] == outcome
    cut = await play(scenario, lambda _: answer.removesuffix("</answer>"), finish_reason="length")
    assert not cut.metrics["answered"]


async def test_metrics_count_turns_bad_calls_tokens_and_time() -> None:
    (scenario,) = load_environment("email_search", invalid="retry", max_turns=4).scenarios("test", 1)
    script = iter(
        ["hello", [("search_emails", "no json")], [("search_emails", '{"keywords": ["vests"]}')] * 2]
    )
    trajectory = await play(scenario, lambda _: next(script, [("read_email", '{"message_id": "m1"}')]))
    got = trajectory.metrics
    assert (got["turns"], got["calls"], got["bad_calls"], got["bad_call_rate"]) == (4, 3, 2, 0.5)
    assert (got["tokens_read"], got["tokens_written"], got["seconds"], got["dont_know"]) == (20, 8, 0, 0)


@pytest.mark.parametrize("style", ["tools", "text"])
def test_all_of_the_prompt_but_the_question_is_the_same_everywhere(style: str) -> None:
    environment = load_environment("email_search", style=style, examples=2, messages=60)
    prompts = [prompt(s) for s in environment.scenarios("train", 20) + environment.scenarios("test", 20)]
    assert len({json.dumps(p[:-1]) for p in prompts}) == 1
    assert len({p[-1]["content"] for p in prompts}) > 30
    assert len(prompts[0]) == (10 if style == "text" else 12)


def test_options_that_cannot_work_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        *({"style": "xml"}, {"examples": 3}, {"messages": 5}, {"paraphrase": 2}, {"level": 4}),
        *({"max_turns": 0}, {"invalid": "noop"}, {"max_tokens": 0}, {"distractors": -1}),
    ]
    for options in wrong:
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            load_environment("email_search", **options)
