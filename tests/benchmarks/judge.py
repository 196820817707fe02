"""How well does a judge order attempts whose worth is known, and what does it cost?

The attempts are those of four scripted players of tool_lookup, so their rewards are true. The model in
this kernel judges with its adapter off; beside it a scripted judge on loopback that knows the truth, which
shows what the machinery itself loses, and one that tosses coins.

    python tests/benchmarks/judge.py [--groups 24] [--samples 4] [--json]
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "environments"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import Machine, arguments, model_folder, quiet_output, report, table

import artnb as nb
from artnb.judging.loopback import Asked, LoopbackJudge, Says, answer
from artnb_environments.tool_lookup.tools import guess, parse, play


def said(messages: list[dict[str, Any]]) -> str:
    return json.dumps([message.get("content", "") for message in messages])


def misread(question: str, result: str | None, draw: random.Random) -> str:
    """Makes the right call and tells a wrong price."""
    return parse(question, None, draw) if result is None else "7"


def stop_at_once(question: str, result: str | None, draw: random.Random) -> str:
    """Calls for something that the shop does not have."""
    return "nothing"


def known_groups(count: int) -> tuple[list[nb.TrajectoryGroup], dict[str, float]]:
    """Four players of known worth at each scenario, and the reward of each episode by what was said."""
    groups, true = [], {}
    for scenario in nb.load_environment("tool_lookup").scenarios("test", n=count):
        played = [play(policy, scenario) for policy in (parse, misread, guess, stop_at_once)]
        groups.append(nb.TrajectoryGroup(played, scenario_id=scenario.id))
        true |= {said(one.messages()): float(one.reward or 0.0) for one in played}
    return groups, true


async def measure(count: int, samples: int, folder: str) -> list[dict[str, Any]]:
    groups, true = known_groups(count)
    coins = random.Random(0)

    def oracle(asked: Asked) -> Says:
        return Says(answer({n: true[said(asked.context + e)] for n, e in asked.attempts.items()}))

    def coin(asked: Asked) -> Says:
        return Says(answer({n: coins.random() for n in asked.attempts}))

    rows = []
    for name, script in (("scripted oracle", oracle), ("coins", coin)):
        with LoopbackJudge(script) as server:
            options = {"judge": name, **server.access}
            found = await nb.judge_report(groups, samples=samples, progress=False, **options)
        rows.append(row(name, found))
    with tempfile.TemporaryDirectory() as root, nb.Model(folder, run="judge", root=root) as model:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # groups without a verdict are in the table
            options = {"model": model, "max_tokens": 512, "timeout": 900}
            found = await nb.judge_report(groups, samples=samples, progress=False, **options)
        rows.append(row(f"{Path(model.backend.base_model).name}, adapter off", found))
    return rows


def row(name: str, found: nb.JudgeReport) -> dict[str, Any]:
    return {
        "judge": name,
        "pairs_right": str(found.pairwise),
        "rank_correlation": str(found.rank_correlation),
        "first_place": str(found.first_place_bonus),
        "consistent": str(found.consistency),
        "useless": found.invalid_rate,
        "verdicts": f"{found.scored}/{found.groups}",
        "tokens": found.tokens_per_group,
        "seconds": found.seconds,
    }


COLUMNS = [
    ("judge", "judge", "s"),
    ("pairs_right", "pairs ordered rightly", "s"),
    ("rank_correlation", "rank correlation", "s"),
    ("first_place", "bonus of first place", "s"),
    ("consistent", "pairs alike twice", "s"),
    ("useless", "useless answers", ".0%"),
    ("verdicts", "verdicts", "s"),
    ("tokens", "tokens a group", ",.0f"),
    ("seconds", "seconds", ".1f"),
]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--samples", type=int, default=4)
    options = parser.parse_args()
    count, samples = (2, 2) if options.quick else (options.groups, options.samples)
    machine = Machine()
    with quiet_output():
        rows = asyncio.run(measure(count, samples, model_folder(options)))
    figures = {"benchmark": "judge", "groups": count, "samples": samples, "rows": rows}
    report(machine, figures, table(rows, COLUMNS), only_json=options.json)


if __name__ == "__main__":
    main()
