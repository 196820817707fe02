"""What does the agent see and say? One part and its own notes, new notes, and at the end the balances."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from artnb import ConfigurationError, Dialogue, Scenario, Trajectory, Turn, rollout_of
from artnb_environments.long_ledger.episode import Episode, Variant
from artnb_environments.long_ledger.ledger import draw_ledger, notes_of
from artnb_environments.replies import Form
from artnb_environments.said import said_episode

_LONGEST = 2000
_NOTES = rf"[^\s<>](?:[^<>]{{0,{_LONGEST - 2}}}[^\s<>])?"
_NUMBERS = r"-?[0-9]{1,9}(?:[, ]{1,3}-?[0-9]{1,9}){0,30}"


def forms_of(variant: Variant) -> tuple[Form, Form]:
    """How notes are given, and how the answer is."""
    calls = ("write_notes", "answer") if variant.style == "tools" else ("notes", "answer")
    return (
        Form(variant.style, calls[0], "notes", _NOTES, "Keep these notes; all else is forgotten.", True),
        Form(variant.style, calls[1], "balances", _NUMBERS, "Answer: the balances, with commas between."),
    )


def system(variant: Variant) -> str:
    notes, answer = forms_of(variant)
    forgets = (
        "You see one part at a time; of all before, only the notes you write stay. "
        if variant.history == "compact"
        else "You get it part by part. "
    )
    return (
        f"You keep a ledger. {forgets}After each part reply with notes of every balance, at most "
        f"{variant.notes_limit} characters, for example {notes.written('A 40, B 17')}. To the question reply "
        f"with the balances asked for, in that order, for example {answer.written('40, 17')}."
    )


def part_text(episode: Episode) -> str:
    """The part that is being told, with the agent's notes where all else is forgotten, and what to do."""
    ledger, variant = episode.ledger, episode.variant
    lines = [f"Part {episode.part + 1} of {len(ledger.parts)}"]
    if variant.history == "compact" and episode.part:
        lines.insert(0, f"Your notes: {episode.notes or 'none'}")
    if episode.asked_again:
        lines.insert(0, "That was not in the form asked for.")
    if not episode.part:
        lines.append(f"opening: {notes_of(ledger.opening)}")
    lines += map(str, ledger.parts[episode.part])
    asked = f"What are the balances of {', '.join(ledger.asked)}?"
    return "\n".join([*lines, asked if episode.is_last else "Notes?"])


@lru_cache(maxsize=64)
def _worked(variant: Variant, number: int) -> tuple[dict[str, Any], ...]:
    """A short ledger with exact notes and the right answer. Its seed is negative; no scenario has such."""
    accounts = min(variant.accounts, max(3, variant.asked))
    short = draw_ledger(-1 - number, accounts, 2, min(3, variant.entries), variant.kinds, variant.asked)
    episode = Episode(variant, short)
    said: list[dict[str, Any]] = []
    for place, (form, text) in enumerate(zip(_forms(variant, 2), exact_replies(episode), strict=True)):
        told = part_text(episode)
        if said and variant.history == "full":
            said += form.answer(said[-1], told)
        else:
            if said and variant.style == "tools":  # a call needs its result before the next user's turn
                said += form.answer(said[-1], "kept")
            said.append({"role": "user", "content": told})
        said.append(form.reply(text, 10 * number + place))
        episode.note(text)
    if variant.style == "tools":
        said += form.answer(said[-1], "thank you")
    return tuple(said)


def _forms(variant: Variant, parts: int) -> list[Form]:
    """The form of each reply."""
    notes, answer = forms_of(variant)
    return [notes] * (parts - 1) + [answer]


def exact_replies(episode: Episode) -> list[str]:
    """Exact notes after each part but the last, and the right answer."""
    ledger = episode.ledger
    notes = [notes_of(ledger.after(part)) for part in range(1, len(ledger.parts))]
    return [*notes, ", ".join(map(str, ledger.truth))]


def opening(variant: Variant) -> list[dict[str, Any]]:
    """System and worked ledgers: the same, byte for byte, in every episode of a variant."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system(variant)}]
    for number in range(variant.examples):
        messages += _worked(variant, number)
    return messages


def take(episode: Episode, turn: Turn) -> None:
    """Read a reply as notes, or after the last part as the answer."""
    notes, answer = forms_of(episode.variant)
    if not episode.is_last:
        episode.note(notes.read(turn))
        return
    read = answer.read(turn)
    episode.answer(None if read is None else tuple(map(int, re.findall(r"-?[0-9]+", read))))


def dialogue(scenario: Scenario) -> Dialogue:
    """Part after part; each begins a conversation anew unless the history is ``full``."""
    episode = Episode.of(scenario)
    variant = episode.variant
    notes, answer = forms_of(variant)
    is_compact = variant.history == "compact"

    def respond(turn: Turn) -> list[dict[str, Any]]:
        if episode.ended_by:
            return []
        take(episode, turn)
        text = part_text(episode)
        if episode.ended_by:
            return []
        return [{"role": "user", "content": text}] if is_compact else notes.answer(turn.message, text)

    stop = {"word": ["\n"], "tags": ["</notes>", "</answer>"]}.get(variant.style)
    return Dialogue(
        [*opening(variant), {"role": "user", "content": part_text(episode)}],
        respond,
        tools=[*(notes.tools or ()), *(answer.tools or ())] or None,
        options={"max_tokens": variant.max_tokens or 160} | ({"stop": stop} if stop else {}),
        forgets=is_compact,
        score=episode.score,
    )


rollout = rollout_of(dialogue)


async def oracle_episode(model: Any, scenario: Scenario) -> Trajectory:
    """The oracle's episode as if ``model`` had sampled it, for the styles ``word`` and ``tags``.

    Add it to the group of the model's own attempts and train with ``loss="reinforce"``. Raises
    ConfigurationError for the style ``tools``.
    """
    episode = Episode.of(scenario)
    if episode.variant.style == "tools":
        raise ConfigurationError("the oracle writes text: load_environment(..., style='word')")
    forms = _forms(episode.variant, len(episode.ledger.parts))
    end = "\n" if episode.variant.style == "word" else ""
    said = [form.written(text) + end for form, text in zip(forms, exact_replies(episode), strict=True)]
    return await said_episode(dialogue, said, model, scenario)
