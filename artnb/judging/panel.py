"""What does a panel of judges think of one group? Every sample is asked, checked, and averaged."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from artnb.judging.answers import InvalidAnswer, Score
from artnb.judging.cache import Cache
from artnb.judging.forms import Form
from artnb.judging.prompt import Case, Question, question
from artnb.judging.referee import JudgeError, JudgeRefused, Referee, Reply

_LONGEST_ECHO = 4000
"""Characters of its own invalid answer that a judge is shown again."""


class OverBudget(Exception):
    """The budget is spent; nothing more is asked."""


@dataclass
class Spent:
    """What judging took so far. Answers from the cache cost nothing."""

    limit: float | None = None
    """Dollars."""
    dollars: float = 0.0
    is_priced: bool = True
    """False once a judge without a price was asked."""
    requests: int = 0
    cached: int = 0
    invalid: int = 0
    """Answers that could not be used and were asked for again."""
    input_tokens: int = 0
    output_tokens: int = 0

    def check(self) -> None:
        if self.limit is not None and self.dollars >= self.limit:
            raise OverBudget(f"the budget of ${self.limit:g} is spent")

    def add(self, referee: Referee, reply: Reply) -> None:
        self.requests += 1
        self.input_tokens += reply.input_tokens
        self.output_tokens += reply.output_tokens
        cost = referee.cost(reply.input_tokens, reply.output_tokens)
        self.is_priced = self.is_priced and cost is not None
        self.dollars += cost or 0.0


@dataclass(frozen=True)
class Opinion:
    """One valid answer about a group: a sample of one judge."""

    referee: str
    sample: int
    scores: tuple[Score, ...]
    """One for each attempt of the case."""
    question: Question
    reply: Reply
    key: str
    is_cached: bool

    def to_json(self) -> dict[str, Any]:
        """How it was asked and what came, without the question's text."""
        return {
            "judge": self.referee,
            "sample": self.sample,
            "ids": list(self.question.names),
            "positions": list(self.question.positions),
            "raw": self.reply.text,
            "seconds": self.reply.seconds,
            "input_tokens": self.reply.input_tokens,
            "output_tokens": self.reply.output_tokens,
            "key": self.key,
            "cached": self.is_cached,
        }


@dataclass(frozen=True)
class Verdict:
    """What the panel thinks of the attempts of a case, or why there is no verdict."""

    opinions: tuple[Opinion, ...] = ()
    problems: tuple[str, ...] = ()
    """Why samples are missing."""

    def score(self, attempt: int) -> float:
        """Mean over the opinions."""
        return statistics.fmean(o.scores[attempt].value for o in self.opinions)

    def spread(self, attempt: int) -> float:
        """Population standard deviation over the opinions."""
        return statistics.pstdev(o.scores[attempt].value for o in self.opinions)

    def parts(self, attempt: int) -> dict[str, float]:
        """Mean of each criterion over the opinions."""
        given = [o.scores[attempt].parts for o in self.opinions]
        return {name: statistics.fmean(parts[name] for parts in given) for name in given[0]}

    def details(self, attempt: int) -> dict[str, Any]:
        """What is kept with a trajectory."""
        return {
            "score": self.score(attempt),
            "spread": self.spread(attempt),
            "explanation": self.opinions[0].scores[attempt].explanation,
            "scores": [o.scores[attempt].value for o in self.opinions],
            "explanations": [o.scores[attempt].explanation for o in self.opinions],
            "judges": [o.referee for o in self.opinions],
            "ids": [o.question.names[attempt] for o in self.opinions],
            "positions": [o.question.positions[attempt] for o in self.opinions],
            "shortened": any(o.question.shortened[attempt] for o in self.opinions),
        }


@dataclass
class Panel:
    """Judges, how often each is asked, and what they have taken."""

    referees: Sequence[Referee]
    form: Form
    samples: int
    attempts: int
    """How often a judge may answer until its answer is valid."""
    seed: int
    cache: Cache
    spent: Spent
    places: asyncio.Semaphore
    """So many requests at once."""
    problem: JudgeRefused | None = field(default=None)

    async def verdict(self, case: Case) -> Verdict:
        """Ask everybody. Raises JudgeRefused when a judge cannot be asked anything at all."""
        asked = [self._opinion(case, r, k) for r in self.referees for k in range(self.samples)]
        found = await _all_or_none(asked)
        problems = tuple(dict.fromkeys(one for one in found if isinstance(one, str)))
        return Verdict(tuple(one for one in found if isinstance(one, Opinion)), problems)

    async def _opinion(self, case: Case, referee: Referee, sample: int) -> Opinion | str:
        """A valid answer, or why there is none."""
        try:
            asked = question(
                case,
                self.form.task,
                sample=sample,
                samples=self.samples,
                seed=self.seed,
                fits=referee.fits,
            )
        except ValueError as error:
            return f"judge {referee.name}: {error}"
        schema = self.form.schema(asked.names)
        # what an endpoint turned out not to take changes no answer: the key is of the plain request
        body = {"model": referee.model, "messages": asked.messages, "max_tokens": referee.max_tokens}
        key = Cache.key(body | {"schema": schema} | dict(referee.options), referee.identity, sample)
        if (known := self.cache.get(key)) is not None:
            try:
                scores = self.form.parse(known.text, asked.names)
            except InvalidAnswer:
                pass  # another version of the parser kept it: ask again
            else:
                self.spent.cached += 1
                return _opinion(referee, sample, scores, asked, known, key, is_cached=True)
        try:
            reply, scores = await self._valid_answer(referee, asked, schema)
        except (JudgeError, OverBudget) as error:
            if isinstance(error, JudgeRefused):
                raise
            return str(error)
        self.cache.put(key, reply)
        return _opinion(referee, sample, scores, asked, reply, key, is_cached=False)

    async def _valid_answer(
        self, referee: Referee, asked: Question, schema: Mapping[str, Any]
    ) -> tuple[Reply, Mapping[str, Score]]:
        """Ask until the answer can be used; what was wrong with it is told to the judge."""
        messages, max_tokens, complaint = list(asked.messages), referee.max_tokens, ""
        for _ in range(self.attempts):
            async with self.places:
                self.spent.check()
                reply = await referee.ask(messages, schema, max_tokens)
                self.spent.add(referee, reply)
            try:
                return reply, self.form.parse(reply.text, asked.names)
            except InvalidAnswer as error:
                complaint = str(error)
            self.spent.invalid += 1
            if reply.finish_reason == "length":
                complaint = f"it was cut off after {max_tokens} tokens; {complaint}. Be brief"
                max_tokens = min(2 * max_tokens, max(referee.context // 4, referee.max_tokens))
            messages = [
                *asked.messages,
                {"role": "assistant", "content": reply.text[:_LONGEST_ECHO] or "(nothing)"},
                {
                    "role": "user",
                    "content": f"That answer cannot be used: {complaint}. Answer again, with the JSON only, "
                    f"and these ids: {', '.join(asked.names)}.",
                },
            ]
        raise JudgeError(
            f"judge {referee.name} gave no valid answer in {self.attempts}; the last one: {complaint}"
        )


def _opinion(
    referee: Referee,
    sample: int,
    scores: Mapping[str, Score],
    asked: Question,
    reply: Reply,
    key: str,
    *,
    is_cached: bool,
) -> Opinion:
    ordered = tuple(scores[name] for name in asked.names)
    return Opinion(referee.name, sample, ordered, asked, reply, key, is_cached)


async def _all_or_none(coroutines: Sequence[Any]) -> list[Any]:
    """Results in order; when one raises, or this is cancelled, the others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
