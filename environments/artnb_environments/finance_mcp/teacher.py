"""How does a model that finds nothing by itself learn? The oracle's episodes join its groups."""

from __future__ import annotations

from typing import Any

from artnb import ConfigurationError, Scenario, Trajectory, Turn
from artnb_environments.finance_mcp.rollout import dialogue


def oracle_replies(scenario: Scenario) -> list[str]:
    """What the oracle writes in the text style: its calls, one a reply, and the answer."""
    calls = [
        f"<call>{name} {' '.join(str(value) for value in given.values())}</call>"
        for name, given in scenario.task["plan"]
    ]
    return [*calls, f"<answer>{scenario.task['answer']}</answer>"]


async def oracle_episode(model: Any, scenario: Scenario) -> Trajectory:
    """The oracle's episode as if ``model`` had sampled it, for the text style.

    Add it to the group of the model's own attempts and train with ``loss="reinforce"``: the logprobs of its
    tokens are 0, for the script says them with certainty. Raises ConfigurationError for the style ``tools``.
    """
    if scenario.task["style"] != "text":
        raise ConfigurationError("the oracle writes the text style only: load_environment(..., style='text')")
    episode = dialogue(scenario)
    histories: list[list[Any]] = [[*episode.messages]]
    for text in oracle_replies(scenario):
        ids = tuple(model.tokenizer.encode(text, add_special_tokens=False))
        said = {"role": "assistant", "content": text.rsplit("</", 1)[0]}  # as an engine cuts at a stop string
        prompt_ids = model.app.renderer.render(Trajectory([*histories[0]]).messages())
        certain = (0.0,) * len(ids)
        turn = Turn(prompt_ids, ids, certain, model.policy_version, "stop", said, {"temperature": 1.0})
        await episode.move(histories, turn)
    trajectory = Trajectory([*histories[0]], scenario_id=scenario.id, metadata={"played_by": "oracle"})
    assert episode.score is not None
    episode.score(trajectory)
    return trajectory.finish()
