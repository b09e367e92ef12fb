"""Sequences longer than one device holds: attention over mesh axes, inside ``shard_map`` or out."""

from .layout import from_zigzag, local_positions, to_zigzag, zigzag_positions
from .over_mesh import mesh_attention
from .ring import ring_attention
from .ulysses import ulysses_attention

__all__ = [
    "from_zigzag",
    "local_positions",
    "mesh_attention",
    "ring_attention",
    "to_zigzag",
    "ulysses_attention",
    "zigzag_positions",
]
