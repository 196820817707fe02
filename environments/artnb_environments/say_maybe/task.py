"""What is asked, and what does each word pay? A question, three words, and a reward that no prompt tells."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from artnb import Dialogue, Scenario, Trajectory, Turn, rollout_of
from artnb_environments import make_scenarios, require, require_one_of, variant_of
from artnb_environments.replies import STYLES, Form

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
"""As in OpenPipe ART's yes-no-maybe; any other reply is worth 0."""

_THINGS = {
    "train": "tea soup road tower violin candle puddle ladder blanket parrot melon engine curtain drum",
    "validation": "bridge kettle poster violet",
    "test": "river pillow trumpet lantern acorn scarf wagon pebble",
}
_QUALITIES = {
    "train": "warm tall heavy quiet bright old narrow clean soft new",
    "validation": "round cheap dusty",
    "test": "cold steep shiny loud fragile wet",
}
THINGS = {split: words.split() for split, words in _THINGS.items()}
QUALITIES = {split: words.split() for split, words in _QUALITIES.items()}
"""No word of a question is in two splits."""
ORDERS = tuple(permutations(REWARDS))
_EXAMPLES = (
    ("Is the fence green?", "yes"),
    ("Is the castle small?", "no"),
    ("Is the jacket dry?", "maybe"),
    ("Is the letter long?", "yes"),
    ("Is the garden empty?", "no"),
    ("Is the window open?", "maybe"),
)

metrics = ("valid", "yes", "no", "maybe")


@dataclass(frozen=True)
class Variant:
    """The options of this environment."""

    style: str = "word"
    """``word``: maybe; ``tags``: <say>maybe</say>; ``tools``: a tool call of the API."""
    examples: int = 3
    """Worked answers in the prompt, 0 to 6: yes, no and maybe in turn."""
    max_tokens: int | None = None
    """Longest reply; None: 4 for a word, 12 for tags, 64 for tools."""

    def __post_init__(self) -> None:
        require_one_of("style", self.style, STYLES)
        most = len(_EXAMPLES)
        require(0 <= self.examples <= most, f"examples must be 0 to {most}, got {self.examples}")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens must be 1 or more, or None")


def scenarios(split: str, n: int, seed: int = 0, **variant: Any) -> list[Scenario]:
    """Questions of words of the split; the order in which the three words are named is drawn too."""

    def start(question_seed: int) -> dict[str, Any]:
        draw = random.Random(question_seed)
        words = ", ".join(draw.choice(ORDERS))
        return {
            "question": f"Is the {draw.choice(THINGS[split])} {draw.choice(QUALITIES[split])}?",
            "words": words,
        }

    return make_scenarios("say_maybe", split, n, seed, Variant(**variant), start)


def form_of(variant: Variant) -> Form:
    return Form(variant.style, "say", "word", "|".join(REWARDS), "Answer the question with one word.")


def prompt(scenario: Scenario) -> list[dict[str, Any]]:
    """System and worked answers, the same in every scenario, and the question."""
    variant = variant_of(scenario, Variant)
    form = form_of(variant)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"Answer with one word, for example {form.written('yes')}."}
    ]
    for number, (question, word) in enumerate(_EXAMPLES[: variant.examples]):
        messages.append({"role": "user", "content": asked(question, ", ".join(ORDERS[number]))})
        messages.append(form.reply(word, number))
        if variant.style == "tools":
            messages += form.answer(messages[-1], "thank you")
    return [*messages, {"role": "user", "content": asked(**_task(scenario))}]


def _task(scenario: Scenario) -> dict[str, str]:
    return {name: str(scenario.task[name]) for name in ("question", "words")}


def asked(question: str, words: str) -> str:
    return f"{question} Say {words.rsplit(', ', 1)[0]} or {words.rsplit(', ', 1)[1]}."


def score(trajectory: Trajectory, word: str | None) -> Trajectory:
    """Write reward and metrics for the word that was said, None for a reply that was none of the three."""
    trajectory.reward = REWARDS.get(word or "", 0.0)
    trajectory.metrics |= {"valid": float(word is not None)} | {one: float(word == one) for one in REWARDS}
    return trajectory


def dialogue(scenario: Scenario) -> Dialogue:
    """One question, one reply."""
    variant = variant_of(scenario, Variant)
    form = form_of(variant)
    said: list[str | None] = []

    def respond(turn: Turn) -> list[dict[str, Any]]:
        said.append(form.read(turn))
        return []

    return Dialogue(
        prompt(scenario),
        respond,
        tools=form.tools,
        options=form.options(variant.max_tokens, 4),
        score=lambda trajectory: score(trajectory, said[-1] if said else None),
    )


rollout = rollout_of(dialogue)

Policy = Callable[[str, random.Random], str]
"""A scripted agent: what is asked, randomness -> a word."""


def play(policy: Policy, scenario: Scenario) -> Trajectory:
    """One episode of a scripted agent, without a model."""
    text = asked(**_task(scenario))
    word = policy(text, random.Random(f"baseline/{scenario.seed}"))
    conversation: list[Any] = [{"role": "user", "content": text}, {"role": "assistant", "content": word}]
    return score(Trajectory(conversation, scenario_id=scenario.id), word)


def any_word(text: str, draw: random.Random) -> str:
    return draw.choice(list(REWARDS))


def first_named(text: str, draw: random.Random) -> str:
    """The word that the question names first, as models without training like to do."""
    found = re.search(r"Say (\w+)", text)
    assert found, "questions name the words"
    return found.group(1)


baselines: dict[str, Callable[[Scenario], Trajectory]] = {
    "random": lambda scenario: play(any_word, scenario),
    "first_named": lambda scenario: play(first_named, scenario),
    "oracle": lambda scenario: play(lambda text, draw: "maybe", scenario),
}
