"""What does a person see? Progress, tables and trajectories: HTML in a notebook, text elsewhere."""

from artnb.ui.display import Live, Progress, detect
from artnb.ui.table import RewardTable

__all__ = ["Live", "Progress", "RewardTable", "detect"]
