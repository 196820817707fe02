"""Which trajectories did a run gather, and what happened in each? A table of all, each in full."""

from artnb.browser.widget import Browser, browse

__all__ = ["Browser", "browse"]
