"""How is a run going, and what does a person want of it? A live view of the run's folder, with controls."""

from artnb.dashboard.widget import Dashboard

__all__ = ["Dashboard"]
