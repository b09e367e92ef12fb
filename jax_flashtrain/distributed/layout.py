"""In which order the shards of a mesh axis hold a sequence, and how to lay one out.

    contiguous    shard r holds the r-th of n equal pieces
    zigzag        the sequence is cut into 2n pieces, shard r holds pieces r and 2n - 1 - r

Under a causal mask a shard that holds late queries sees more keys than one that holds early ones.
In the zigzag order every shard holds an early and a late piece, and all have the same work.

A *part* is what lies together both in a shard and in the sequence: a shard has one, or two.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ORDERS = ("contiguous", "zigzag")


def parts_of(order: str) -> int:
    """How many pieces of the sequence a shard holds."""
    return 2 if order == "zigzag" else 1


def part_start(order: str, part: int, shard: Any, shards: int, length: int) -> Any:
    """Global index of the first token of a part of ``length`` tokens (shard: ints or an array)."""
    piece = shard if part == 0 else 2 * shards - 1 - shard
    return piece * length


def local_positions(length: int, axis_name: Any, order: str = "contiguous") -> jax.Array:
    """Global index of every token of this shard (inside a ``shard_map``): for RoPE, for labels.

    Args:
      length: tokens in this shard.
      axis_name: mesh axis (or tuple of axes) that cuts the sequence.
      order: "contiguous" or "zigzag".

    Returns:
      int32 [length].

    Raises:
      ValueError: an unknown order, or an odd length in the zigzag order.
    """
    check_order(order)
    parts = parts_of(order)
    if length % parts:
        raise ValueError(f"local_positions: length must be even in the zigzag order, got {length}")
    piece = length // parts
    shards, shard = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    starts = [part_start(order, part, shard, shards, piece) for part in range(parts)]
    return jnp.concatenate([start + jnp.arange(piece, dtype=jnp.int32) for start in starts])


def zigzag_positions(length: int, shards: int) -> np.ndarray:
    """The token that lies at each place of the zigzag order: positions for RoPE.

    Args:
      length: tokens of the whole sequence, a multiple of ``2 * shards``.
      shards: size of the mesh axis (or axes) that the ring goes over.

    Returns:
      int32 [length].

    Raises:
      ValueError: the length is no multiple of ``2 * shards``.

    Example:
      >>> zigzag_positions(8, 2)
      array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    """
    return to_zigzag(np.arange(length, dtype=np.int32), shards, axis=0)


def to_zigzag(x: Any, shards: int, axis: int = 1) -> Any:
    """Brings a sequence (tokens, labels, segment ids, rows of a bias, ...) into the zigzag order.

    Do it once, on the host, where the batch is made: on a sharded array it moves half of it.
    Labels are shifted before they are laid out.

    Args:
      x: array with the sequence along ``axis``, in the order of the tokens. NumPy stays NumPy.
      shards: size of the mesh axis that the ring goes over.
      axis: the sequence's axis.

    Returns:
      An array of the same shape: place p holds token ``zigzag_positions(length, shards)[p]``.

    Raises:
      ValueError: the length is no multiple of ``2 * shards``.
    """
    return _reordered("to_zigzag", x, _pieces(shards), axis)


def from_zigzag(x: Any, shards: int, axis: int = 1) -> Any:
    """Inverse of ``to_zigzag``: back to the order of the tokens.

    Args:
      x: array with the sequence along ``axis``, in the zigzag order.
      shards: size of the mesh axis that the ring goes over.
      axis: the sequence's axis.

    Returns:
      An array of the same shape.

    Raises:
      ValueError: the length is no multiple of ``2 * shards``.
    """
    return _reordered("from_zigzag", x, np.argsort(_pieces(shards)), axis)


def _pieces(shards: int) -> np.ndarray:
    """The piece at each place of the zigzag order: 0, 2n - 1, 1, 2n - 2, ..."""
    early = np.arange(shards)
    return np.stack([early, 2 * shards - 1 - early], axis=1).reshape(-1)


def _reordered(name: str, x: Any, pieces: np.ndarray, axis: int) -> Any:
    axis %= x.ndim
    count, length = len(pieces), x.shape[axis]
    if length % count:
        raise ValueError(
            f"{name}: the sequence must be a multiple of 2 * shards = {count}, got {length} "
            f"along axis {axis} of shape {x.shape}"
        )
    shape = x.shape
    x = x.reshape(*shape[:axis], count, length // count, *shape[axis + 1 :])
    picked = x[(slice(None),) * axis + (pieces,)]
    return picked.reshape(shape)


def check_order(order: str, function: str = "local_positions") -> None:
    if order not in ORDERS:
        raise ValueError(f"{function}: order must be one of {ORDERS}, got {order!r}")
