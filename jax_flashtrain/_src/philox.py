"""Philox4x32-10 in uint32 arithmetic: the dropout bits of ``cpp/core/semantics.h`` in plain JAX.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
#: Draws (logits) that one call decides, 16 bits each.
DRAWS = 8


def dropout_threshold(rate: float) -> int:
    """A weight survives iff its 16-bit draw is at least this."""
    return round(rate * 65536)


def dropout_factor(rate: float) -> float:
    """What surviving weights are multiplied with: 1 / (1 - threshold / 65536)."""
    # A rate that rounds to a threshold of 65536 drops everything: the factor meets zeros only.
    return 65536.0 / max(1, 65536 - dropout_threshold(rate))


def _multiply_high(x: Array, y: int) -> Array:
    """High word of a 32 x 32 bit product, from 16-bit halves (there is no uint64 without x64)."""
    x0, x1 = x & np.uint32(0xFFFF), x >> np.uint32(16)
    y0, y1 = np.uint32(y & 0xFFFF), np.uint32(y >> 16)
    middle = x1 * y0 + ((x0 * y0) >> np.uint32(16))
    low = (middle & np.uint32(0xFFFF)) + x0 * y1
    return x1 * y1 + (middle >> np.uint32(16)) + (low >> np.uint32(16))


def philox4x32_10(
    counter: tuple[Array, Array, Array, Array], key: tuple[Array, Array]
) -> tuple[Array, Array, Array, Array]:
    """Ten rounds on uint32 arrays that broadcast with each other: 4 counter words to 4 words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply_high(c0, _MULTIPLIERS[0]), c0 * np.uint32(_MULTIPLIERS[0])
        high1, low1 = _multiply_high(c2, _MULTIPLIERS[1]), c2 * np.uint32(_MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + np.uint32(_WEYL[0]), k1 + np.uint32(_WEYL[1])
    return c0, c1, c2, c3


def dropout_keep(
    rate: float,
    seed: Array,
    origin: Array,
    first_row: Array,
    rows: int,
    first_col: Array,
    cols: int,
) -> Array:
    """True where a weight of a tile survives.

    Args:
      rate: dropout rate; ``threshold = round(rate * 65536)``.
      seed: uint32 [b.., 2], the Philox key.
      origin: uint32 [b.., H, 3]: position of logit (0, 0) of this call in the call as the user
        wrote it, and the flat head ``b * Hq + h`` there.
      first_row, first_col: int32 scalars, where the tile starts in this call.
      rows, cols: size of the tile.

    Returns:
      bool [b.., H, rows, cols]; leading dimensions broadcast between ``seed`` and ``origin``.
    """
    k0, k1 = (seed[..., w][..., None, None, None] for w in (0, 1))
    row = (origin[..., 0] + first_row.astype(jnp.uint32))[..., None, None]
    row = row + jnp.arange(rows, dtype=jnp.uint32)[:, None]
    start = origin[..., 1] + first_col.astype(jnp.uint32)  # [b.., H]
    head = origin[..., 2][..., None, None]

    # One group more than an aligned tile needs, so that any first column will do.
    groups = (cols + DRAWS - 1) // DRAWS + 1
    column = (start // np.uint32(DRAWS))[..., None, None] + jnp.arange(groups, dtype=jnp.uint32)
    words = philox4x32_10((row, column, head, jnp.zeros_like(head)), (k0, k1))
    halves = [half for w in words for half in (w & np.uint32(0xFFFF), w >> np.uint32(16))]
    draws = jnp.stack(halves, axis=-1)
    draws = draws.reshape(*draws.shape[:-2], groups * DRAWS)
    kept = draws >= np.uint32(dropout_threshold(rate))

    skew = (start % np.uint32(DRAWS)).astype(jnp.int32)

    def aligned(kept: Array) -> Array:
        return kept[..., :cols]

    def shifted(kept: Array) -> Array:
        index = skew[..., None, None] + jnp.arange(cols, dtype=jnp.int32)
        return jnp.take_along_axis(kept, jnp.broadcast_to(index, (*kept.shape[:-1], cols)), axis=-1)

    tile: Array = lax.cond(jnp.all(skew == 0), aligned, shifted, kept)
    return tile


def draw_seed(key: Array) -> Array:
    """The two uint32 words that a call takes from a dropout key."""
    return jax.random.bits(key, (2,), jnp.uint32)
