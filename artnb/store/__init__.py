"""Where is everything kept? In a run folder: records, trajectories and checkpoints."""

from artnb.store.checkpoints import Checkpoint
from artnb.store.folder import RunFolder
from artnb.store.run import Run
from artnb.store.trajectories import Stored

__all__ = ["Checkpoint", "Run", "RunFolder", "Stored"]
