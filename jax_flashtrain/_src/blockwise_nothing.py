"""Calls without a single pair of query and key (Sk = 0, Sq = 0, empty batch): only sinks are left.

Every row is an empty row: o = 0, and L is the sink's logit, or -inf.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from .blockwise_loops import Loops, Operands
from .blockwise_pair import select
from .blockwise_tiles import Geometry
from .spec import EMPTY_ROW, AttentionSpec, Layout, Operand


def _sinks(loops: Loops, sinks: Array | None) -> Array | None:
    """[b.., Hq] as [b.., Hq, 1] in the accumulator dtype."""
    return None if sinks is None else loops.wide(sinks)[..., None]


def _o_shape(geo: Geometry) -> tuple[int, ...]:
    middle = (geo.Sq, geo.Hq) if geo.layout == Layout.BTNH else (geo.Hq, geo.Sq)
    return (*geo.batch, *middle, geo.Dv)


def forward(spec: AttentionSpec, operands: Operands) -> tuple[Array, Array, Array]:
    """(o, row_max, row_log_sum)."""
    loops = Loops(spec, operands)
    geo = loops.geo
    rows = loops.full((*geo.batch, geo.Hq, geo.Sq), 0.0)
    o = loops.full(_o_shape(geo), 0.0, operands[Operand.Q].dtype)
    sinks = _sinks(loops, operands.get(Operand.SINKS))
    if sinks is None:
        return o, rows, rows + EMPTY_ROW
    sinks = rows + lax.stop_gradient(sinks)
    empty = sinks == -jnp.inf
    return o, jnp.where(empty, 0, sinks), jnp.where(empty, EMPTY_ROW, rows)


def _share(loops: Loops, row_max: Array, row_log_sum: Array) -> Array | None:
    """exp(sink - L) of every row: 1, or 0 where there is no finite sink."""
    sinks = _sinks(loops, loops.operands.get(Operand.SINKS))
    if sinks is None:
        return None
    share = jnp.exp((sinks - lax.stop_gradient(row_max)) - row_log_sum)
    return select(row_log_sum < EMPTY_ROW / 2, share)


def backward(
    spec: AttentionSpec,
    operands: Operands,
    row_max: Array,
    row_log_sum: Array,
    dlse: Array | None,
    shapes: dict[str, tuple[int, ...]],
) -> dict[str, Array]:
    """Zeros, except that sinks receive the cotangent of L."""
    others = (row_max, row_log_sum) if dlse is None else (row_max, row_log_sum, dlse)
    loops = Loops(spec, operands, *others)
    kinds = {"q": Operand.Q, "k": Operand.K, "v": Operand.V, "bias": Operand.BIAS}
    kinds |= {"alibi": Operand.ALIBI_SLOPES, "sinks": Operand.SINKS}
    out = {n: loops.full(shape, 0.0, operands[kinds[n]].dtype) for n, shape in shapes.items()}
    share = _share(loops, row_max, row_log_sum)
    if dlse is not None and share is not None and "sinks" in shapes:
        dsinks = jnp.sum(share * select(share > 0, dlse), -1)
        out["sinks"] = out["sinks"] + loops.pair.sum_batch(dsinks, shapes["sinks"])
    return out


def tangent(
    spec: AttentionSpec,
    operands: Operands,
    o: Array,
    row_max: Array,
    row_log_sum: Array,
    dots: Operands,
) -> tuple[Array, Array]:
    """o stays zero, L moves with a sink."""
    loops = Loops(spec, operands, o, row_max, row_log_sum, *dots.values())
    share = _share(loops, row_max, row_log_sum)
    sinks_dot = _sinks(loops, dots.get(Operand.SINKS))
    o_dot, log_sum_dot = loops.uniform((jnp.zeros_like(o), jnp.zeros_like(row_log_sum)))
    if share is not None and sinks_dot is not None:
        log_sum_dot = log_sum_dot + share * sinks_dot
    return o_dot, log_sum_dot
