"""How does what a script says become turns to train on? As if the model had sampled the script's words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from artnb import Dialogue, History, Scenario, Trajectory, Turn


def said_turn(model: Any, conversation: Sequence[Any], text: str, stop: Iterable[str] = ()) -> Turn:
    """The turn of a model that said ``text`` after ``conversation`` (messages and turns).

    Its logprobs are 0, for the script says its words with certainty; train with ``loss="reinforce"``. The
    message ends before the first of the ``stop`` strings, as an engine's would.
    """
    ids = tuple(model.tokenizer.encode(text, add_special_tokens=False))
    prompt_ids = model.app.renderer.render(History(list(conversation)).messages())
    content = min((text.split(one)[0] for one in stop), key=len, default=text)
    message = {"role": "assistant", "content": content}
    certain = (0.0,) * len(ids)
    return Turn(prompt_ids, ids, certain, model.policy_version, "stop", message, {"temperature": 1.0})


async def said_episode(
    dialogue: Callable[[Scenario], Dialogue], replies: Iterable[str], model: Any, scenario: Scenario
) -> Trajectory:
    """The episode of a dialogue in which the agent says ``replies``, as ``rollout_of`` would record it."""
    episode = dialogue(scenario)
    assert not episode.tools, "a script says text, and makes no call of the API"
    histories: list[list[Any]] = [[*episode.messages]]
    for text in replies:
        turn = said_turn(model, histories[-1], text, episode.options.get("stop") or ())
        await episode.move(histories, turn)
    first, *later = histories
    trajectory = Trajectory(
        first,
        additional_histories=[History(history) for history in later],
        scenario_id=scenario.id,
        metadata={"played_by": "script"},
    )
    if episode.score:
        episode.score(trajectory)
    return trajectory.finish()
