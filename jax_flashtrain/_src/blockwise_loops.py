"""What the loops over tiles share: counters, carries, skipping of hidden tiles, sliced biases."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from . import compat
from .blockwise_pair import Pair, Tile
from .blockwise_tiles import Geometry, geometry, grouped, stack
from .spec import AttentionSpec, Operand

Operands = dict[Operand, Array]

#: Around the body of every loop that is differentiated (a scan needs no barrier against CSE).
checkpoint = functools.partial(jax.checkpoint, prevent_cse=False)


class Loops:
    """Counters and carries of one call."""

    def __init__(self, spec: AttentionSpec, operands: Operands, *others: Array):
        self.geo = geo = geometry(spec, operands)
        self.pair = Pair(spec, geo, operands)
        self.operands = operands
        self.dtype = self.pair.dtype
        self.i0 = jnp.arange(geo.blocks_q, dtype=jnp.int32) * geo.block_q
        self.j0 = jnp.arange(geo.blocks_k, dtype=jnp.int32) * geo.block_k
        self._like = [*operands.values(), *others]

    def uniform(self, tree: Any) -> Any:
        """Makes arrays vary over every manual axis over which an operand varies.

        Carries and branches must keep their type, and a constant does not vary by itself.
        """
        leaves, structure = jax.tree.flatten(tree)
        varying = compat.match_varying([*leaves, *self._like])[: len(leaves)]
        return jax.tree.unflatten(structure, varying)

    def full(self, shape: tuple[int, ...], value: float, dtype: Any = None) -> Array:
        """An array to start a carry with."""
        started: Array = self.uniform(jnp.full(shape, value, dtype or self.dtype))
        return started

    def wide(self, x: Array) -> Array:
        return x.astype(self.dtype)

    def sinks(self) -> Array | None:
        """[b.., K, G, 1] in the accumulator dtype."""
        sinks = self.operands.get(Operand.SINKS)
        return None if sinks is None else self.pair.per_head(sinks)[..., 0]

    def unless_hidden(
        self, i0: Array, j0: Array, compute: Callable[[Tile], Any], skip: Callable[[], Any]
    ) -> Any:
        """``compute``, or ``skip`` where no row of the tile sees any of its keys."""
        visibility = self.pair.visibility
        near = visibility.near(i0, j0)
        listed = visibility.listed(i0, j0)
        tile = Tile(i0, j0, listed)
        if listed is not None:
            some = jnp.any(listed)
            near = some if near is None else near & some
        if near is None:
            return self.uniform(compute(tile))
        return lax.cond(near, lambda: self.uniform(compute(tile)), lambda: self.uniform(skip()))


def bias_stack(geo: Geometry, bias: Array | None) -> Array | None:
    """A bias as [blocks_q|1, blocks_k|1, b.., K|1, G|1, block_q|1, block_k|1].

    ``dynamic_slice`` transposes into an update of the whole array in every step; a slice that
    ``lax.scan`` takes does not. It costs a copy of the bias, so only derivatives use it.
    """
    if bias is None:
        return None
    x = grouped(geo, bias)
    q, k = x.shape[-2:]
    x = stack(x, -1, *((1, 1) if k == 1 else (geo.block_k, geo.blocks_k)))
    return stack(x, -2, *((1, 1) if q == 1 else (geo.block_q, geo.blocks_q)))


def scanned(x: Array | None, steps: int) -> tuple[Array | None, Callable[[Any], Any]]:
    """(xs, pick) of a stack for a loop of ``steps``; a stack of one block serves every step."""
    if x is None or x.shape[0] == steps:
        return x, lambda block: block
    return None, lambda _: x[0]
