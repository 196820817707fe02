"""What is the smallest task? One word in one turn: yes, no and maybe are allowed, and maybe pays most."""

from importlib.resources import files

from artnb_environments.say_maybe.task import Variant, baselines, dialogue, metrics, rollout, scenarios

card = files(__name__).joinpath("README.md").read_text(encoding="utf-8")

__all__ = ["Variant", "baselines", "card", "dialogue", "metrics", "rollout", "scenarios"]
