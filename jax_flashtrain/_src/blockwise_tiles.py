"""Geometry of the blockwise implementation: sizes, block lengths, tiles and their way back.

Inside, tiles are heads-first and grouped, whatever the layout of the call:

    query side   [b.., K, G, block_q, D]      K = Hkv key heads, G = Hq // Hkv
    key side     [b.., K, block_k, D]
    logits       [b.., K, G, block_q, block_k]

``b..`` are the leading dimensions, each 1 or full. A *stack* has the block number as an additional
first axis: the form that ``lax.scan`` slices and stacks without a copy per step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from . import compat
from .spec import AttentionSpec, Layout, Operand, Precision

#: Logits of one tile, summed over batch and heads, that a step may hold (float32: 16 MB).
_TILE_LOGITS = 1 << 22
_MAX_BLOCK = 256
_MIN_BLOCK = 64
#: Blocks start at multiples of this (dropout decides 8 columns at a time).
_ALIGN = 8


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes of one call."""

    batch: tuple[int, ...]  # full leading dimensions
    Sq: int
    Sk: int
    Hq: int
    Hkv: int
    D: int
    Dv: int
    block_q: int
    block_k: int
    layout: Layout

    @property
    def G(self) -> int:
        return self.Hq // self.Hkv

    @property
    def blocks_q(self) -> int:
        return -(-self.Sq // self.block_q)

    @property
    def blocks_k(self) -> int:
        return -(-self.Sk // self.block_k)

    @property
    def rows(self) -> tuple[int, ...]:
        """[b.., K, G, block_q]: one number per row of a tile."""
        return (*self.batch, self.Hkv, self.G, self.block_q)

    @property
    def is_empty(self) -> bool:
        """There is no pair of a query and a key at all."""
        sizes = (*self.batch, self.Sq, self.Sk)
        return any(compat.is_static_size(n) and int(n) == 0 for n in sizes)

    @property
    def rank(self) -> int:
        return len(self.batch)


def geometry(spec: AttentionSpec, operands: dict[Operand, Array]) -> Geometry:
    """Reads the sizes of a call from its operands."""
    q, k, v = (operands[op] for op in (Operand.Q, Operand.K, Operand.V))
    rank = q.ndim - 3
    seq, head = (rank, rank + 1) if spec.layout == Layout.BTNH else (rank + 1, rank)
    batch = tuple(
        next((x.shape[d] for x in operands.values() if not is_one(x.shape[d])), 1)
        for d in range(rank)
    )
    block_q, block_k = block_sizes(q.shape[seq], k.shape[seq], (*batch, q.shape[head]))
    return Geometry(
        batch=batch,
        Sq=q.shape[seq],
        Sk=k.shape[seq],
        Hq=q.shape[head],
        Hkv=k.shape[head],
        D=q.shape[-1],
        Dv=v.shape[-1],
        block_q=block_q,
        block_k=block_k,
        layout=spec.layout,
    )


def is_one(size: int) -> bool:
    return compat.is_static_size(size) and int(size) == 1


def block_sizes(Sq: int, Sk: int, heads: Sequence[int]) -> tuple[int, int]:
    """(block_q, block_k) for a call with ``prod(heads)`` score matrices of Sq x Sk.

    They depend on shapes alone and never grow with S, so memory is O(S).
    """
    count = math.prod(int(n) for n in heads if compat.is_static_size(n))
    target = max(_MIN_BLOCK, min(_MAX_BLOCK, math.isqrt(_TILE_LOGITS // max(1, count))))
    return _even_block(Sq, target), _even_block(Sk, target)


def _even_block(S: int, target: int) -> int:
    """Splits S into equal blocks of about ``target`` (aligned where there is more than one)."""
    if target >= S:
        return max(1, S)
    blocks = -(-S // target)
    return -(-S // (blocks * _ALIGN)) * _ALIGN


def accumulator(dtype: np.dtype) -> np.dtype:
    """float64 for float64 inputs, float32 for all others."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def matmul_precision(spec: AttentionSpec, dtype: np.dtype) -> lax.Precision:
    """Of the products of tiles, whose elements are float32 whatever the inputs are.

    float16 has more mantissa than one bfloat16 pass of a TPU keeps.
    """
    if dtype == np.float16 or (dtype == np.float32 and spec.precision != Precision.DEFAULT):
        return lax.Precision.HIGHEST
    return lax.Precision.DEFAULT


# ---- Stacks -------------------------------------------------------------------------------------


def stack(x: Array, axis: int, block: int, blocks: int, fill: float = 0.0) -> Array:
    """[.., S, ..] as [blocks, .., block, ..], ``fill`` behind the end."""
    axis %= x.ndim
    padding = blocks * block - x.shape[axis]
    if padding:
        widths = [(0, padding if d == axis else 0) for d in range(x.ndim)]
        x = jnp.pad(x, widths, constant_values=fill)
    x = x.reshape(*x.shape[:axis], blocks, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def unstack(x: Array, axis: int, S: int) -> Array:
    """The way back: ``axis`` counts in the result."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, S, axis=axis)


def query_stack(geo: Geometry, x: Array) -> Array:
    """q, o, do in the call's layout as [blocks_q, b.., K, G, block_q, D]."""
    if geo.layout == Layout.BTNH:
        x = jnp.swapaxes(x, -3, -2)
    x = x.reshape(*x.shape[:-3], geo.Hkv, geo.G, *x.shape[-2:])
    return stack(x, -2, geo.block_q, geo.blocks_q)


def key_stack(geo: Geometry, x: Array) -> Array:
    """k, v in the call's layout as [blocks_k, b.., K, block_k, D]."""
    if geo.layout == Layout.BTNH:
        x = jnp.swapaxes(x, -3, -2)
    return stack(x, -2, geo.block_k, geo.blocks_k)


def row_stack(geo: Geometry, x: Array, fill: float = 0.0) -> Array:
    """A residual [b.., Hq, Sq] as [blocks_q, b.., K, G, block_q]."""
    return stack(grouped(geo, x), -1, geo.block_q, geo.blocks_q, fill)


def query_unstack(geo: Geometry, x: Array) -> Array:
    x = unstack(x, x.ndim - 3, geo.Sq)
    x = x.reshape(*x.shape[: geo.rank], geo.Hq, *x.shape[-2:])
    return jnp.swapaxes(x, -3, -2) if geo.layout == Layout.BTNH else x


def key_unstack(geo: Geometry, x: Array) -> Array:
    x = unstack(x, x.ndim - 3, geo.Sk)
    return jnp.swapaxes(x, -3, -2) if geo.layout == Layout.BTNH else x


def row_unstack(geo: Geometry, x: Array) -> Array:
    x = unstack(x, x.ndim - 2, geo.Sq)
    return x.reshape(*x.shape[: geo.rank], geo.Hq, x.shape[-1])


def grouped(geo: Geometry, x: Array) -> Array:
    """[b.., Hq|1, ..] as [b.., K|1, G|1, ..]."""
    heads = (1, 1) if x.shape[geo.rank] != geo.Hq else (geo.Hkv, geo.G)
    return x.reshape(*x.shape[: geo.rank], *heads, *x.shape[geo.rank + 1 :])


# ---- Products -----------------------------------------------------------------------------------


def tile_dot(
    geo: Geometry,
    equation: str,
    x: Array,
    y: Array,
    precision: lax.Precision,
    out_batch: Sequence[int] | None = None,
) -> Array:
    """``jnp.einsum`` over the dimensions behind ``b..``; the leading ones are batch dimensions.

    A dimension that is 1 on one side is not copied. ``out_batch`` names the leading dimensions of
    the result: where it has a 1, the product is summed over that dimension.
    """
    left, right, out = equation.replace("->", ",").split(",")
    labels = {letter: geo.rank + n for n, letter in enumerate(dict.fromkeys(left + right))}
    batch = list(range(geo.rank))
    keep = [d for d in batch if out_batch is None or not is_one(out_batch[d])]
    product = jnp.einsum(
        x,
        [*batch, *(labels[c] for c in left)],
        y,
        [*batch, *(labels[c] for c in right)],
        [*keep, *(labels[c] for c in out)],
        precision=precision,
        preferred_element_type=x.dtype,
    )
    missing = [d for d in batch if d not in keep]
    return jnp.expand_dims(product, missing) if missing else product
