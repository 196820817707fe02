"""How much does a trainer hold at a time? Sizes that it cuts its work to, and that a plan counts with."""

from __future__ import annotations

CHUNK = 256
"""Positions whose logits are held at once."""
SCORES_ON_CPU, SCORES_ON_GPU = 2**21, 2**26
"""Attention scores held at once, over all heads: what a CPU's cache holds, what keeps a GPU busy."""
SMALLEST_BLOCK = 32
"""Queries of a long segment that are computed together at least."""
