"""How far do scripted players come? Random, newest hit, BM25, and an oracle that is told the sources."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from artnb import Scenario, Trajectory
from artnb_environments.email_search.questions import DONT_KNOW
from artnb_environments.email_search.reward import values_in
from artnb_environments.email_search.store import Hit
from artnb_environments.email_search.tools import Episode
from artnb_environments.email_search.world import Mail

_GENERAL = """
    a according and as at be by come did does do for from give have how in is it latest many
    much must of on one or over plus should sum that the this to total together under was we
    were what when where which who whom will with would number
"""
_STOP_WORDS = frozenset(_GENERAL.split())
TEXT_HITS = 3
"""Mails that a search shows in the text style."""
_DEPTH = 10
"""Hits that a scripted player looks through for a value of the type asked for."""


def keywords_of(question: str) -> list[str]:
    """The words of a question that may stand in a mail."""
    return [word for word in re.findall(r"[\w-]+", question.lower()) if word not in _STOP_WORDS]


def newest_hits(episode: Episode) -> list[Hit]:
    """Mails with as many of the question's keywords as still give a hit, newest first."""
    words = newest_words(episode)
    return _search(episode, words, False) if words else []


def newest_words(episode: Episode) -> list[str]:
    """The question's keywords that occur, without the first ones until some mail holds them all."""
    words = [word for word in keywords_of(episode.task["question"]) if _search(episode, [word], False)]
    while words and not _search(episode, words, False):
        words.pop(0)  # a question begins with its general words and ends with names
    return words


def bm25_hits(episode: Episode) -> list[Hit]:
    """Mails with any of the question's keywords, best by BM25 first."""
    return _search(episode, keywords_of(episode.task["question"]), True)


def _search(episode: Episode, words: list[str], is_any: bool) -> list[Hit]:
    day = episode.task["day"]
    return episode.store.search(episode.inbox, words, until=day, any_keyword=is_any, max_results=_DEPTH)


def first_value(episode: Episode, hits: list[Hit]) -> tuple[str, list[str]]:
    """The first value of the type asked for in the first hit that holds one, and that mail."""
    for hit in hits:
        mail = episode.store.read(episode.inbox, hit.message_id)
        if mail is not None and (value := _value_of(episode, mail)):
            return value, [mail.id]
    return DONT_KNOW, []


def _value_of(episode: Episode, mail: Mail) -> str | None:
    task = episode.task
    known = values_in(task["answer_type"], task["question"], episode.names)
    lines = [line for line in mail.body.splitlines() if not line.startswith(">")]
    if task["answer_type"] == "person":
        lines.append(mail.from_address)
    for line in lines:
        if found := sorted(values_in(task["answer_type"], line, episode.names) - known):
            return {"place": "room {}", "money": "${}"}.get(task["answer_type"], "{}").format(found[0])
    return None


def level_of(scenario: Scenario) -> int:
    """1: the newest hit gives answer and sources; 2: BM25's best does; 3: neither."""
    for level, hits_of in ((1, newest_hits), (2, bm25_hits)):
        episode = Episode(scenario)
        answer, sources = first_value(episode, hits_of(episode))
        episode.call("return_final_answer", json.dumps({"answer": answer, "sources": sources}))
        if episode.outcome == "correct" and episode.achieved["source_recall"] == 1.0:
            return level
    return 3


class _Player:
    """Plays by the tools and writes down what a model would have said and read."""

    def __init__(self, scenario: Scenario) -> None:
        self.episode = Episode(scenario)
        self.trajectory = Trajectory(scenario_id=scenario.id, tools=self.episode.tools)
        self.trajectory.messages_and_choices.append({"role": "user", "content": scenario.task["question"]})

    def call(self, name: str, **arguments: Any) -> str:
        number, text = self.episode.calls, json.dumps(arguments)
        told = self.episode.call(name, text)
        if self.episode.task["style"] == "text":
            self.trajectory.messages_and_choices += [
                {"role": "assistant", "content": as_text(name, arguments)},
                {"role": "user", "content": told},
            ]
            return told
        call = {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": text}}
        self.trajectory.messages_and_choices += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": told},
        ]
        return told

    def read_and_answer(self, answer: str, sources: list[str]) -> Trajectory:
        for source in sources:
            self.call("read_email", message_id=source)
        self.call("return_final_answer", answer=answer, sources=sources)
        return self.episode.score(self.trajectory)


def as_text(name: str, arguments: dict[str, Any]) -> str:
    """A call in the text style, whose search knows no filters."""
    if name == "search_emails":
        return f"<call>search {' '.join(arguments['keywords'])}</call>"
    if name == "read_email":
        return f"<call>read {arguments['message_id']}</call>"
    return f"<answer>{' '.join([arguments['answer'], *arguments['sources']])}</answer>"


def demonstrate(scenario: Scenario) -> list[dict[str, Any]]:
    """What a good player says and reads after the question, to learn from before reinforcement.

    In the text style: a search for the words that find the newest hit, a look at the source where the hits do
    not tell, and the answer. Else the oracle's calls.
    """
    if scenario.task["style"] != "text":
        return _oracle(scenario).messages()[1:-1]
    player, task = _Player(scenario), scenario.task
    words = newest_words(player.episode) or keywords_of(task["question"])
    told = player.call("search_emails", keywords=words, max_results=TEXT_HITS)
    for source, part in zip(task["sources"], task["parts"], strict=False):
        if part not in told:
            player.call("read_email", message_id=source)
    player.call("return_final_answer", answer=task["answer"], sources=task["sources"])
    return player.trajectory.messages()[1:-1]


def _random(scenario: Scenario) -> Trajectory:
    """Searches for one word of the question and answers with a value of any hit."""
    player, draw = _Player(scenario), random.Random(scenario.seed)
    words = keywords_of(scenario.task["question"])
    player.call("search_emails", keywords=[draw.choice(words)])
    hits = sorted(player.episode.found)
    draw.shuffle(hits)
    for hit in hits:
        mail = player.episode.store.read(player.episode.inbox, hit)
        if mail is not None and (value := _value_of(player.episode, mail)):
            return player.read_and_answer(value, [hit])
    return player.read_and_answer(DONT_KNOW, [])


def _scripted(hits_of: Callable[[Episode], list[Hit]]) -> Callable[[Scenario], Trajectory]:
    def play(scenario: Scenario) -> Trajectory:
        player = _Player(scenario)
        hits = hits_of(player.episode)
        player.episode.found |= {hit.message_id for hit in hits}
        return player.read_and_answer(*first_value(player.episode, hits))

    return play


def _oracle(scenario: Scenario) -> Trajectory:
    """Knows which mails to look for, finds each by its own subject and day, and what they add up to."""
    player = _Player(scenario)
    for source in scenario.task["sources"]:
        mail = player.episode.store.read(player.episode.inbox, source)
        assert mail is not None, "a source stands in the inbox"
        words = re.findall(r"[A-Za-z]\w+", mail.subject)
        player.call("search_emails", keywords=words, from_addr=mail.from_address, sent_after=mail.date[:10])
        if source not in player.episode.found:  # more than ten newer ones: end the search at its day
            player.call(
                "search_emails", keywords=words, from_addr=mail.from_address, sent_before=_next(mail.date)
            )
    return player.read_and_answer(scenario.task["answer"], scenario.task["sources"])


def _next(date: str) -> str:
    return str(datetime.fromisoformat(date) + timedelta(days=1))[:10]


baselines: dict[str, Callable[[Scenario], Trajectory]] = {
    "random": _random,
    "newest_hit": _scripted(newest_hits),
    "bm25": _scripted(bm25_hits),
    "oracle": _oracle,
}
