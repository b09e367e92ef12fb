"""Sequences longer than one device holds: attention over a mesh axis, inside ``shard_map``."""

from .layout import from_zigzag, local_positions, to_zigzag, zigzag_positions
from .ring import ring_attention

__all__ = [
    "from_zigzag",
    "local_positions",
    "ring_attention",
    "to_zigzag",
    "zigzag_positions",
]
