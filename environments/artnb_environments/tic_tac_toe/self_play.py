"""How does a model play against itself, or against what it was some steps ago? One trajectory a seat."""

from __future__ import annotations

from typing import Any

from artnb import History, Scenario, Trajectory, Turn, policy_of
from artnb_environments.tic_tac_toe.episode import MARKS, Game
from artnb_environments.tic_tac_toe.game import free_cells
from artnb_environments.tic_tac_toe.rollout import form_of, observation, opening, options_of


class _Player:
    """One seat: the model that sits there, and its conversations."""

    def __init__(self, model: Any, game: Game, mark: str) -> None:
        self.model, self.mark, self.game = model, mark, game
        self.form = form_of(game.variant)
        self.histories: list[History] = []
        self._was_move = True

    async def reply(self) -> str | None:
        """Show the board, ask for a move: a digit, or None."""
        self._show()
        history = self.histories[-1]
        offered = {"tools": history.tools} if history.tools else {}
        response = await self.model.client.chat.completions.create(
            model=self.model.name, messages=history.messages(), **offered, **options_of(self.game.variant)
        )
        turn = Turn.from_choice(response.choices[0])
        history.messages_and_choices.append(turn)
        return self.form.read(turn)

    def _show(self) -> None:
        text = observation(self.game, self._was_move)
        if not self.histories or self.game.variant.history == "last":
            told: list[Any] = [*opening(self.game.variant), {"role": "user", "content": text}]
            self.histories.append(History(told, self.form.tools))
        else:
            history = self.histories[-1]
            history.messages_and_choices += self.form.answer(history.messages()[-1], text)

    def take(self, digit: str | None) -> None:
        self._was_move = self.game.take(digit)

    def trajectory(self, scenario: Scenario) -> Trajectory:
        first, *later = self.histories
        trajectory = Trajectory(
            first.messages_and_choices,
            tools=first.tools,
            additional_histories=later,
            scenario_id=scenario.id,
            seat=self.mark,
        )
        return self.game.score(trajectory, self.mark)


async def rollout_self_play(
    model: Any, scenario: Scenario, opponent: str | Any | None = None
) -> list[Trajectory]:
    """Play one game of the model against itself, or against ``opponent``.

    opponent: None: the model sits on both seats, and each seat that moved gives a trajectory. Otherwise the
        policy of the run that plays against it, ``"base"`` or a checkpoint such as ``"step_000012"``, or
        another model with ``name`` and ``client``: then only the scenario's mark learns and there is one
        trajectory. A reply of the opponent that names no free cell is replaced by a cell drawn from the
        scenario's seed, so that the game goes on.

    ``seat`` of a trajectory is its mark; ``gather`` groups by it, so that X is compared with X only. For a
    fixed opponent hand over ``functools.partial(rollout_self_play, opponent="step_000012")``.
    """
    game = Game.of(scenario)
    learns = MARKS if opponent is None else (str(scenario.task["mark"]),)
    against: Any = policy_of(model, opponent) if isinstance(opponent, str) else opponent
    players = {mark: _Player(model if mark in learns else against, game, mark) for mark in MARKS}
    while not game.ended_by:
        player = players[game.to_move]
        digit = await player.reply()
        if player.mark not in learns:
            digit = _legal(game, digit)
        player.take(digit)
    found = [players[mark].trajectory(scenario) for mark in learns if players[mark].histories]
    for trajectory in found:
        trajectory.metadata["opponent"] = "self" if opponent is None else str(against.name)
    return found


def _legal(game: Game, digit: str | None) -> str:
    """The reply if it names a free cell, else a free cell at random."""
    if digit is not None and int(digit) - 1 in free_cells(game.board):
        return digit
    return game.drawn_cell()
