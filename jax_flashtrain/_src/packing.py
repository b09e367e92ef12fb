"""Helpers for packed sequences."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from . import validation as check


def segment_ids_from_cu_seqlens(cu_seqlens: ArrayLike, length: int) -> jax.Array:
    """Segment ids of sequences that are packed one after the other.

    ::

        id_t = number of n >= 1 with cu_seqlens[n] <= t

    so sequence n (positions cu_seqlens[n] to cu_seqlens[n+1] - 1) has id n, and the positions
    behind the last sequence form a segment of their own.

    Args:
      cu_seqlens: integers [*batch, N + 1]: cumulative lengths, starting with 0, never decreasing
        (what flash-attn's variable-length functions take). Traced or not.
      length: number of positions of the packed axis, a Python int.

    Returns:
      int32 [*batch, length], for the argument ``segment_ids`` of ``flash_attention``.

    Raises:
      TypeError: cu_seqlens does not hold integers, or length is no int.
      ValueError: cu_seqlens has no dimension, or length is negative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_flashtrain import segment_ids_from_cu_seqlens
      >>> segment_ids_from_cu_seqlens(jnp.array([0, 2, 5]), 6)
      Array([0, 0, 1, 1, 1, 2], dtype=int32)
    """
    ends: Any = jnp.asarray(cu_seqlens)
    if not jnp.issubdtype(ends.dtype, jnp.integer):
        raise TypeError(
            f"segment_ids_from_cu_seqlens: cu_seqlens must hold integers, got dtype {ends.dtype}"
        )
    if ends.ndim == 0 or ends.shape[-1] == 0:
        raise ValueError(
            "segment_ids_from_cu_seqlens: cu_seqlens must be [*batch, N + 1] and start with 0, got "
            f"shape {ends.shape}"
        )
    size = check.static_int(length)
    if size is None:
        raise TypeError(
            "segment_ids_from_cu_seqlens: length must be a Python int, got "
            f"{check.describe(length)}"
        )
    if size < 0:
        raise ValueError(f"segment_ids_from_cu_seqlens: length must be >= 0, got {size}")
    # One step up at every end (two at an empty sequence), then a running sum: O(N + length).
    steps = jnp.zeros((*ends.shape[:-1], size + 1), jnp.int32)
    at = jnp.clip(ends[..., 1:], 0, size)
    batch = jnp.indices(at.shape, sparse=True)[:-1]
    steps = steps.at[(*batch, at)].add(1)
    return jnp.cumsum(steps, axis=-1)[..., :size].astype(jnp.int32)
