"""Attention over a set of keys, put together from attention over its subsets.

A *state* is o in the accumulator dtype and the residual (m, c) of the rows (docs/design.md): m is
the largest logit, c = ln sum exp(s - m), and c = EMPTY_ROW where a row saw nothing yet. Two states
over disjoint keys merge as

    m = max(m1, m2),  e_k = exp((m_k - m) + c_k),  c = ln(e_1 + e_2),  o = sum_k e_k o_k / sum_k e_k

which stays exact where L = m + c is huge. Merging goes round the ring in a fixed order, so results
are reproducible.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._src.primitive import Residual
from .._src.spec import EMPTY_ROW, Layout

State = Residual  # o in the accumulator dtype


def is_empty(row_log_sum: jax.Array) -> jax.Array:
    """Rows that have seen nothing."""
    return row_log_sum >= EMPTY_ROW / 2


def per_value(rows: jax.Array, layout: Layout) -> jax.Array:
    """[b.., H, S] so that it multiplies o: [b.., S, H, 1] in BTNH, [b.., H, S, 1] in BNTH."""
    return (jnp.swapaxes(rows, -1, -2) if layout == Layout.BTNH else rows)[..., None]


def row_sums(o: jax.Array, layout: Layout) -> jax.Array:
    """Sum over the features of something like o: [b.., H, S]."""
    sums = jnp.sum(o, -1)
    return jnp.swapaxes(sums, -1, -2) if layout == Layout.BTNH else sums


def merge(layout: Layout, one: State, two: State) -> State:
    """The state over the keys of both."""
    tops = [jnp.where(is_empty(s.row_log_sum), -jnp.inf, s.row_max) for s in (one, two)]
    top = jnp.maximum(*tops)
    top = jnp.where(top == -jnp.inf, 0, top)
    shares = [_share(s, top) for s in (one, two)]
    total = shares[0] + shares[1]
    seen = total > 0
    safe = jnp.where(seen, total, 1)
    weights = [per_value(share / safe, layout) for share in shares]
    return State(
        weights[0] * one.o + weights[1] * two.o,
        jnp.where(seen, top, 0),
        jnp.where(seen, jnp.log(safe), jnp.asarray(EMPTY_ROW, total.dtype)),
    )


def _share(state: State, top: jax.Array) -> jax.Array:
    """exp((m - top) + c), 0 for rows that have seen nothing."""
    empty = is_empty(state.row_log_sum)
    power = jnp.where(empty, 0, (state.row_max - top) + state.row_log_sum)
    return jnp.where(empty, 0, jnp.exp(power))


def with_sinks(layout: Layout, state: State, sinks: Any) -> State:
    """The state with a logit per head that has no value. ``sinks``: [b.., Hq]."""
    one_more = jnp.broadcast_to(sinks[..., None], state.row_max.shape)
    top = jax.lax.stop_gradient(one_more)  # m is a gauge, the derivative goes by way of c
    return merge(layout, state, State(jnp.zeros_like(state.o), top, one_more - _finite(top)))


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(x == -jnp.inf, 0, x)
