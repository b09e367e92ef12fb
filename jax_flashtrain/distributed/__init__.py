"""Context parallelism: sequences that are cut over the devices of a mesh."""

from .layout import from_zigzag, local_positions, to_zigzag, zigzag_positions

__all__ = ["from_zigzag", "local_positions", "to_zigzag", "zigzag_positions"]
