"""How does one try the policy that was just trained? By talking to it, in the cell, with the environment's
tools; every conversation is kept in the run."""

from artnb.talk.talk import Reply, Talk, chat

__all__ = ["Reply", "Talk", "chat"]
