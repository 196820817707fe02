"""How well do scripted players file? At random, all in one folder, by key words, and as the rules say."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from artnb import Scenario, Trajectory
from artnb_environments.email_filing.rules import TOPICS, own_lines
from artnb_environments.email_filing.tools import PAGE, Episode
from artnb_environments.email_search.world import Mail

_CUES = {
    "quote": r"\$\d",
    "order": r"\b[A-Z]{2}-\d{4}\b",
    "meeting": r"\bRoom \w+",
    "deadline": r"\b\d{1,2} [A-Z][a-z]+ \d{4}\b",
    "headcount": r"\b\d+ (?:people|names)\b",
    "hire": r"\bas \w|\bpost\b",
    "approval": r"\b[Yy]es\b|\bfine with\b",
}
"""What a mail of each topic looks like to who has seen a few."""
Choice = Callable[[Episode, Mail], str]


def _play(scenario: Scenario, choice: Choice) -> Trajectory:
    """File every mail by ``choice``, as an agent would: list, read, move, done."""
    episode = Episode(scenario)
    trajectory = Trajectory(scenario_id=scenario.id)
    trajectory.messages_and_choices.append({"role": "system", "content": "\n".join(episode.rules.lines)})
    if scenario.task["style"] == "word":
        (mail,) = episode.mails.values()
        folder = choice(episode, mail)
        episode.answer(folder)
        trajectory.messages_and_choices.append({"role": "assistant", "content": folder})
        return episode.score(trajectory)

    def call(tool: str, /, **arguments: Any) -> None:
        text = json.dumps(arguments)
        function = {"name": tool, "arguments": text}
        made = {"id": f"call_{episode.calls}", "type": "function", "function": function}
        result = episode.call(tool, text)
        trajectory.messages_and_choices += [
            {"role": "assistant", "content": "", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": made["id"], "content": result},
        ]

    for page in range(-(-len(episode.mails) // PAGE)):
        call("list_inbox", page=page + 1)
    for mail in episode.mails.values():
        call("read_email", id=mail.id)
        folder = choice(episode, mail)
        if folder not in episode.folders:
            call("create_folder", name=folder)
        call("move_email", id=mail.id, folder=folder)
    call("done")
    return episode.score(trajectory)


def _random(scenario: Scenario) -> Trajectory:
    """Any folder that a rule names."""
    draw = random.Random(scenario.seed)
    return _play(scenario, lambda episode, mail: draw.choice(episode.rules.folders))


def _majority(scenario: Scenario) -> Trajectory:
    """One folder for all: that of most of these mails; for a single mail the one that is named first."""
    most = Counter(scenario.task["right"]).most_common(1)[0][0]
    is_word = scenario.task["style"] == "word"
    return _play(scenario, lambda episode, _: episode.folders[0] if is_word else most)


def _keyword_rules(scenario: Scenario) -> Trajectory:
    """The first rule in the user's order of which a word or a sender occurs: blind to which rule wins."""

    def choice(episode: Episode, mail: Mail) -> str:
        rules, text = episode.rules, "\n".join(own_lines(mail))
        for topic in rules.topics:
            if re.search(_CUES[topic], text):
                return TOPICS[topic][0]
        return rules.folder_of(mail, None) or rules.folders[0]

    return _play(scenario, choice)


def _oracle(scenario: Scenario) -> Trajectory:
    """Knows each mail's topic and follows the rules."""
    return _play(scenario, lambda episode, mail: episode.right[mail.id])


baselines: dict[str, Callable[[Scenario], Trajectory]] = {
    "random": _random,
    "majority": _majority,
    "keyword_rules": _keyword_rules,
    "oracle": _oracle,
}
