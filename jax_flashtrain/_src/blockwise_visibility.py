"""Which keys a tile of queries sees: the rules of ``cpp/core/semantics.h`` on arrays.

Query row i stands at position i + offset. With ``rel = j - i`` a key is visible iff

    offset - left <= rel <= offset + right      (causal: right = min(right, 0))
    i < q_length,  j < kv_length,  segment ids agree,  mask[i, j]

so the first line needs two int32 numbers per batch element. They saturate instead of overflowing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from . import philox
from .blockwise_tiles import Geometry, grouped
from .spec import AttentionSpec, Operand

_INT_MIN, _INT_MAX = np.iinfo(np.int32).min, np.iinfo(np.int32).max
#: Offsets beyond it only matter to ALiBi distances, which float32 cannot tell apart there.
_FAR = 1 << 30


def _saturating_add(x: Array, count: Array | np.int32) -> Array:
    """x + count for count >= 0 without leaving int32."""
    return jnp.minimum(x, _INT_MAX - count) + count


def _saturating_subtract(x: Array, count: Array | np.int32) -> Array:
    return jnp.maximum(x, _INT_MIN + count) - count


def _all(terms: Iterable[Array]) -> Array | None:
    terms = list(terms)
    return functools.reduce(jnp.logical_and, terms) if terms else None


class Visibility:
    """Positions, lengths, segments, mask and dropout of one call, tile by tile.

    Nothing here has a gradient, so tiles are cut out of the operands by ``dynamic_slice``: a mask
    is never copied as a whole.
    """

    def __init__(self, spec: AttentionSpec, geo: Geometry, operands: dict[Operand, Array]):
        self.geo = geo
        self.rate = spec.dropout_rate
        get = operands.get
        offset = get(Operand.Q_OFFSET)
        self.offset = (
            jnp.full((1,) * geo.rank, geo.Sk - geo.Sq, jnp.int32)
            if offset is None
            else offset.astype(jnp.int32)
        )
        static_left, static_right = spec.window
        left = self._side(static_left, get(Operand.WINDOW_LEFT))
        right = self._side(static_right, get(Operand.WINDOW_RIGHT))
        if spec.causal:
            right = np.int32(0)
        #: Bounds of j - i, int32 [b..], or None.
        self.low = None if left is None else _saturating_subtract(self.offset, left)
        self.high = None if right is None else _saturating_add(self.offset, right)
        self.q_lengths = self._length(get(Operand.Q_LENGTHS), geo.Sq, geo.block_q * geo.blocks_q)
        self.kv_lengths = self._length(get(Operand.KV_LENGTHS), geo.Sk, geo.block_k * geo.blocks_k)
        self.q_segments = get(Operand.Q_SEGMENT_IDS)
        self.kv_segments = get(Operand.KV_SEGMENT_IDS)
        mask = get(Operand.MASK)
        self.mask = None if mask is None else grouped(geo, mask)
        self.seed = get(Operand.DROPOUT_SEED) if self.rate > 0 else None
        self.origin = get(Operand.DROPOUT_ORIGIN)

    @staticmethod
    def _side(static: int | None, traced: Array | None) -> Array | np.int32 | None:
        """A window side; a negative traced one means "no bound", as in semantics.h."""
        if traced is not None:
            traced = traced.astype(jnp.int32)
            return jnp.where(traced < 0, _INT_MAX, traced)
        return None if static is None else np.int32(min(static, _INT_MAX))

    def _length(self, lengths: Array | None, S: int, padded: int) -> Array | None:
        """Rows (keys) that exist, int32 [b..]; None where that is every one, padding included."""
        if lengths is not None:
            return jnp.clip(lengths.astype(jnp.int32), 0, S)
        return jnp.full((1,) * self.geo.rank, S, np.int32) if padded != S else None

    def rel(self, i0: Array, j0: Array) -> Array:
        """j - i of a tile, int32 [block_q, block_k]."""
        i = i0 + jnp.arange(self.geo.block_q, dtype=jnp.int32)
        j = j0 + jnp.arange(self.geo.block_k, dtype=jnp.int32)
        return j[None, :] - i[:, None]

    def distance(self, i0: Array, j0: Array, dtype: np.dtype) -> Array:
        """|i + offset - j| of a tile, [b.., 1, 1, block_q, block_k]."""
        offset = jnp.clip(self.offset, -_FAR, _FAR)[..., None, None, None, None]
        return jnp.abs(offset - self.rel(i0, j0)).astype(dtype)

    def bounded(self) -> bool:
        """Whether some tile may be known to be hidden from positions and lengths alone."""
        return not all(x is None for x in (self.low, self.high, self.q_lengths, self.kv_lengths))

    def near(self, i0: Array, j0: Array) -> Array | None:
        """False where positions and lengths hide the whole tile in every batch element."""
        if not self.bounded():
            return None
        i1 = jnp.minimum(i0 + self.geo.block_q, self.geo.Sq)
        j1 = jnp.minimum(j0 + self.geo.block_k, self.geo.Sk)
        terms = []
        if self.q_lengths is not None:
            i1 = jnp.minimum(i1, self.q_lengths)
            terms.append(i0 < self.q_lengths)
        if self.kv_lengths is not None:
            j1 = jnp.minimum(j1, self.kv_lengths)
            terms.append(j0 < self.kv_lengths)
        if self.high is not None:
            terms.append(j0 - (i1 - 1) <= self.high)
        if self.low is not None:
            terms.append(j1 - 1 - i0 >= self.low)
        seen = _all(terms)
        return None if seen is None else jnp.any(seen)

    def listed(self, i0: Array, j0: Array) -> Array | None:
        """The part of the tile that only data can tell: mask and segment ids."""
        terms = []
        if self.mask is not None:
            terms.append(slice_tile(self.geo, self.mask, i0, j0))
        if self.q_segments is not None and self.kv_segments is not None:
            q_ids = _slice_block(self.q_segments, -1, i0, self.geo.block_q)
            kv_ids = _slice_block(self.kv_segments, -1, j0, self.geo.block_k)
            same = q_ids[..., :, None] == kv_ids[..., None, :]
            terms.append(jnp.expand_dims(same, (-4, -3)))
        return _all(terms)

    def tile(self, i0: Array, j0: Array, listed: Array | None) -> Array | None:
        """True where visible, [b.., K|1, G|1, block_q|1, block_k|1]; None: all of it is."""
        terms = [] if listed is None else [listed]
        i = i0 + jnp.arange(self.geo.block_q, dtype=jnp.int32)
        j = j0 + jnp.arange(self.geo.block_k, dtype=jnp.int32)
        if self.high is not None:
            terms.append(self.rel(i0, j0) <= self.high[..., None, None, None, None])
        if self.low is not None:
            terms.append(self.rel(i0, j0) >= self.low[..., None, None, None, None])
        if self.q_lengths is not None:
            terms.append(i[:, None] < self.q_lengths[..., None, None, None, None])
        if self.kv_lengths is not None:
            terms.append(j[None, :] < self.kv_lengths[..., None, None, None, None])
        return _all(terms)

    def keep(self, i0: Array, j0: Array) -> Array | None:
        """Dropout: True where a weight survives, [b.., K, G, block_q, block_k]."""
        if self.seed is None or self.origin is None:
            return None
        geo = self.geo
        keep = philox.dropout_keep(
            self.rate, self.seed, self.origin, i0, geo.block_q, j0, geo.block_k
        )
        return grouped(geo, keep)


def _slice_block(x: Array, axis: int, start: Array, block: int) -> Array:
    """``block`` entries from ``start`` on; what lies behind the end of x is unspecified."""
    axis %= x.ndim
    S = x.shape[axis]
    if S % block == 0:
        return lax.dynamic_slice_in_dim(x, start, block, axis)
    # dynamic_slice would move the window of the last block back into the array: follow it.
    first = jnp.minimum(start, S - block)
    return jnp.roll(lax.dynamic_slice_in_dim(x, first, block, axis), first - start, axis)


def slice_tile(geo: Geometry, x: Array, i0: Array, j0: Array) -> Array:
    """A tile of a mask or bias [b.., K|1, G|1, Sq|1, Sk|1]; sizes of 1 stay 1."""
    if x.shape[-2] != 1:
        x = _slice_block(x, -2, i0, geo.block_q)
    if x.shape[-1] != 1:
        x = _slice_block(x, -1, j0, geo.block_k)
    return x
