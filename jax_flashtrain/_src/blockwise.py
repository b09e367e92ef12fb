"""Attention in plain JAX, block by block: O(S) memory, derivatives included.

The default on platforms without a kernel, ``implementation="jax"``, and what second derivatives
and forward mode are made of. Operands are canonical (docs/design.md); results are those of the
native targets. Source: Dao, "FlashAttention-2" (2023), algorithms 1 and 2.

How memory stays O(S) under differentiation: the body of every loop is a ``jax.checkpoint``, outer
loops carry nothing that a derivative needs, and inner loops save one row (column) of tiles at a
time. Where the cheapest loop is not of that kind, ``custom_jvp`` gives derivatives another one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from . import blockwise_nothing as nothing
from . import compat
from .blockwise_backward import DIFFERENTIABLE, gradients, is_zero
from .blockwise_loops import Loops, Operands
from .blockwise_pair import Tile
from .blockwise_tangent import tangent as _tangent
from .blockwise_tiles import geometry, grouped, key_stack, query_stack, query_unstack, row_unstack
from .blockwise_visibility import slice_tile
from .spec import EMPTY_ROW, AttentionSpec, Operand


def forward(spec: AttentionSpec, operands: Operands) -> tuple[Array, Array, Array]:
    """(o, row_max, row_log_sum) of a canonical call; see docs/design.md for the residual."""
    operands = _present(operands)
    if geometry(spec, operands).is_empty:
        return nothing.forward(spec, operands)
    return _forward(spec, operands)


def backward(
    spec: AttentionSpec,
    operands: Operands,
    o: Array,
    row_max: Array,
    row_log_sum: Array,
    do: Array,
    dlse: Array | None,
    grad_shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Array]:
    """Gradients of a canonical call, each of the shape ``grad_shapes`` gives for it.

    Args:
      spec, operands: of the forward.
      o, row_max, row_log_sum: results of the forward.
      do, dlse: cotangents of o and of L = row_max + row_log_sum (None = zero).
      grad_shapes: shapes by name: 'q', 'k', 'v' and, as far as they are wanted, 'bias', 'alibi',
        'sinks'. A batch dimension of 1 is summed over.
    """
    operands = _present(operands)
    shapes = tuple((name, tuple(shape)) for name, shape in grad_shapes.items())
    if geometry(spec, operands).is_empty:
        return nothing.backward(spec, operands, row_max, row_log_sum, dlse, dict(shapes))
    residual = {"o": o, "row_max": row_max, "row_log_sum": row_log_sum, "do": do}
    if dlse is not None:
        residual["dlse"] = dlse
    return gradients(spec, shapes, operands, residual)


def tangent(
    spec: AttentionSpec,
    operands: Operands,
    o: Array,
    row_max: Array,
    row_log_sum: Array,
    tangents: Operands,
) -> tuple[Array, Array]:
    """(o_dot, row_log_sum_dot), linear in ``tangents``, which hold those of some float operands.

    With p, Z as in the contract: ``c_dot = sum_j p s_dot``, ``o_dot = sum_j p Z (v s_dot + v_dot) -
    c_dot o``. Its transpose is exactly ``backward``.
    """
    operands = _present(operands)
    if geometry(spec, operands).is_empty:
        return nothing.tangent(spec, operands, o, row_max, row_log_sum, tangents)
    return _tangent(spec, operands, o, row_max, row_log_sum, tangents)


def _present(operands: Operands) -> Operands:
    """The operands that are given, varying over the same manual axes."""
    given = {op: x for op, x in operands.items() if x is not None}
    return dict(zip(given, compat.match_varying(list(given.values())), strict=True))


# ---- Forward ------------------------------------------------------------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _forward(spec: AttentionSpec, operands: Operands) -> tuple[Array, Array, Array]:
    loops = Loops(spec, operands)
    geo, pair = loops.geo, loops.pair
    k_stack = key_stack(geo, operands[Operand.K])
    v_stack = key_stack(geo, operands[Operand.V])
    bias = operands.get(Operand.BIAS)
    bias = None if bias is None else grouped(geo, bias)
    sinks = loops.sinks()

    def row_block(_: None, xs: tuple[Array, Array]) -> tuple[None, tuple[Array, Array, Array]]:
        i0, q_i = xs
        q_i = loops.wide(q_i)

        def step(carry: Any, xs: tuple[Array, ...]) -> tuple[Any, None]:
            j0, k_j, v_j = xs

            def compute(at: Tile) -> tuple[Array, ...]:
                m, total, acc = carry
                b = None if bias is None else loops.wide(slice_tile(geo, bias, i0, j0))
                seen = pair.seen(at, b)
                q, k, v = pair.scrubbed(seen, q_i, loops.wide(k_j), loops.wide(v_j))
                s = pair.logits(at, seen, q, k, b).s
                m_new = jnp.maximum(m, jnp.max(s, -1))
                # -inf - -inf: a row that has not seen anything yet.
                base = jnp.where(m_new == -jnp.inf, 0, m_new)
                p = jnp.exp(s - base[..., None])
                alpha = jnp.exp(m - base)
                total = total * alpha + jnp.sum(p, -1)
                acc = acc * alpha[..., None] + pair.dot("KGqs,Ksd->KGqd", pair.dropped(at, p), v)
                return m_new, total, acc

            return loops.unless_hidden(i0, j0, compute, lambda: carry), None

        rows = geo.rows
        carry = (
            loops.full(rows, -np.inf),
            loops.full(rows, 0.0),
            loops.full((*rows, geo.Dv), 0.0),
        )
        (m, total, acc), _ = lax.scan(step, carry, (loops.j0, k_stack, v_stack))
        if sinks is not None:
            m_new = jnp.maximum(m, sinks)
            base = jnp.where(m_new == -jnp.inf, 0, m_new)
            alpha = jnp.exp(m - base)
            total = total * alpha + jnp.exp(sinks - base)
            acc = acc * alpha[..., None]
            m = m_new
        empty = m == -jnp.inf
        total = jnp.where(empty, 1, total)
        o = (acc / total[..., None]).astype(operands[Operand.Q].dtype)
        log_sum = jnp.where(empty, jnp.asarray(EMPTY_ROW, loops.dtype), jnp.log(total))
        return None, (o, jnp.where(empty, 0, m), log_sum)

    q_stack = query_stack(geo, operands[Operand.Q])
    _, (o, m, log_sum) = lax.scan(row_block, None, (loops.i0, q_stack))
    return query_unstack(geo, o), row_unstack(geo, m), row_unstack(geo, log_sum)


def _forward_jvp(spec: AttentionSpec, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (operands,), (dots,) = primals, tangents
    o, row_max, row_log_sum = _forward(spec, operands)
    given = {op: dots[op] for op in DIFFERENTIABLE if op in dots and not is_zero(dots[op])}
    o_dot, log_sum_dot = _tangent(spec, operands, o, row_max, row_log_sum, given)
    return (o, row_max, row_log_sum), (o_dot, jnp.zeros_like(row_max), log_sum_dot)


_forward.defjvp(_forward_jvp, symbolic_zeros=True)
