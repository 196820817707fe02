"""How does the shop work, and what is a reply worth? Items, prices and the four steps of the reward."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from artnb import Scenario, Trajectory
from artnb_environments import make_scenarios, require, require_one_of

_ITEM_WORDS = {
    "train": "apple bread milk rice tea salt pear soap egg cake corn fish lamp book pen cup hat shoe "
    "door sock chair spoon candle carrot",
    "validation": "plate onion brush honey bag clock grape pot",
    "test": "lemon table cheese glove butter key phone bottle melon rope knife plum",
}
ITEMS = {split: words.split() for split, words in _ITEM_WORDS.items()}
"""No item is in two splits, so a good score on ``test`` is about items never trained on."""
EXAMPLES = (("kite", 41), ("ring", 73), ("drum", 28), ("sofa", 65))
"""The worked examples' items, which are in no split."""
PRICES = range(10, 100)

metrics = ("correct", "called", "right_item", "answered")


@dataclass(frozen=True)
class Variant:
    """The options of this environment."""

    style: str = "tags"
    """``tags``: the call is text, ``<call>item</call>``; ``tools``: a tool call of the API."""
    examples: int = 2
    """Worked episodes in the prompt, 0 to 4."""
    max_tokens: int | None = None
    """Longest reply; None: 16 for tags, 64 for tools."""

    def __post_init__(self) -> None:
        require_one_of("style", self.style, ("tags", "tools"))
        require(
            0 <= self.examples <= len(EXAMPLES),
            f"examples must be 0 to {len(EXAMPLES)}, got {self.examples}",
        )
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens must be 1 or more, or None")


def scenarios(split: str, n: int, seed: int = 0, **variant: object) -> list[Scenario]:
    """Questions about the price of one item of the split; the price is drawn anew for each."""

    def start(game_seed: int) -> dict[str, object]:
        draw = random.Random(game_seed)
        return {"item": draw.choice(ITEMS[split]), "price": draw.choice(PRICES)}

    return make_scenarios("tool_lookup", split, n, seed, Variant(**variant), start)  # type: ignore[arg-type]


class Lookup:
    """One episode: the shop, and what the agent has achieved so far."""

    def __init__(self, scenario: Scenario) -> None:
        self.item = str(scenario.task["item"])
        self.price = int(scenario.task["price"])
        self.called = self.right_item = self.answered = self.correct = False

    @property
    def question(self) -> str:
        return question(self.item)

    def call(self, item: str | None) -> str | None:
        """The tool's result; None ends the episode: no readable call, or not the item asked for."""
        self.called = item is not None
        self.right_item = item == self.item
        return result(self.item, self.price) if self.right_item else None

    def answer(self, price: str | None) -> None:
        """Take the final answer: the digits of a price, or None when it could not be read."""
        self.answered = price is not None
        self.correct = self.answered and price == str(self.price)

    @property
    def reward(self) -> float:
        """1 right answer, 0.7 an answer, 0.5 the right call, 0.2 a call, 0 nothing readable."""
        steps = ((self.correct, 1.0), (self.answered, 0.7), (self.right_item, 0.5), (self.called, 0.2))
        return next((reward for reached, reward in steps if reached), 0.0)

    def score(self, trajectory: Trajectory) -> Trajectory:
        """Write reward and metrics onto the episode's trajectory."""
        trajectory.reward = self.reward
        trajectory.metrics |= {name: float(getattr(self, name)) for name in metrics}
        return trajectory


def question(item: str) -> str:
    return f"How much is the {item}?"


def result(item: str, price: int) -> str:
    return f"{item}: {price}"


Policy = Callable[[str, str | None, random.Random], str]
"""A scripted agent: question, tool result (None before the call), randomness -> item or price."""


def guess(question: str, result: str | None, draw: random.Random) -> str:
    """Knows the format and nothing else: any item, then any price."""
    return draw.choice([*chain(*ITEMS.values())]) if result is None else str(draw.choice(PRICES))


def parse(question: str, result: str | None, draw: random.Random) -> str:
    """Reads the item in the question and the price in the result."""
    found = re.search(r"the (\w+)\?", question) if result is None else re.search(r"(\d+)", result)
    assert found, "questions name an item and results a price"
    return found.group(1)


def play(policy: Policy, scenario: Scenario) -> Trajectory:
    """One episode of a scripted agent, without a model."""
    shop, draw = Lookup(scenario), random.Random(scenario.seed)
    call = policy(shop.question, None, draw)
    conversation = [("user", shop.question), ("assistant", f"<call>{call}</call>")]
    told = shop.call(call)
    if told is not None:
        answer = policy(shop.question, told, draw)
        shop.answer(answer)
        conversation += [("user", told), ("assistant", f"<answer>{answer}</answer>")]
    trajectory = Trajectory(scenario_id=scenario.id)
    trajectory.messages_and_choices += [{"role": role, "content": text} for role, text in conversation]
    return shop.score(trajectory)


baselines: dict[str, Callable[[Scenario], Trajectory]] = {
    "random": lambda scenario: play(guess, scenario),
    "oracle": lambda scenario: play(parse, scenario),
}
