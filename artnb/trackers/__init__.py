"""Who follows a run from outside? Trackers: ``Model(..., trackers=[WeaveTracker("my-team/my-project")])``."""

from artnb.trackers.base import Tracker, Unreachable
from artnb.trackers.following import Trackers
from artnb.trackers.upload import Uploaded, upload
from artnb.trackers.weave import WeaveTracker

__all__ = ["Tracker", "Trackers", "Unreachable", "Uploaded", "WeaveTracker", "upload"]
