"""Tangent of the blockwise implementation: forward mode, linear in the tangents."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from . import compat
from .blockwise_loops import Loops, Operands, bias_stack, checkpoint, scanned
from .blockwise_pair import Tile, select
from .blockwise_tiles import key_stack, query_stack, query_unstack, row_stack, row_unstack
from .spec import EMPTY_ROW, AttentionSpec, Operand


def tangent(
    spec: AttentionSpec,
    operands: Operands,
    o: Array,
    row_max: Array,
    row_log_sum: Array,
    dots: Operands,
) -> tuple[Array, Array]:
    """(o_dot, row_log_sum_dot); see :func:`blockwise.tangent`."""
    o, row_max, row_log_sum = compat.match_varying([o, row_max, row_log_sum])
    dots = dict(zip(dots, compat.match_varying([*dots.values()]), strict=True))
    loops = Loops(spec, operands, o, row_max, row_log_sum, *dots.values())
    geo, pair, wide = loops.geo, loops.pair, loops.wide

    rows = {
        "q": query_stack(geo, wide(operands[Operand.Q])),
        "o": query_stack(geo, wide(o)),
        "row_max": row_stack(geo, lax.stop_gradient(row_max)),
        "row_log_sum": row_stack(geo, row_log_sum, EMPTY_ROW),
    }
    keys = {
        "k": key_stack(geo, wide(operands[Operand.K])),
        "v": key_stack(geo, wide(operands[Operand.V])),
    }
    if Operand.Q in dots:
        rows["q_dot"] = query_stack(geo, wide(dots[Operand.Q]))
    for op, name in ((Operand.K, "k_dot"), (Operand.V, "v_dot")):
        if op in dots:
            keys[name] = key_stack(geo, wide(dots[op]))
    biases = {
        name: stacked
        for name, given in (("bias", operands), ("bias_dot", dots))
        if (stacked := bias_stack(geo, given.get(Operand.BIAS))) is not None
    }
    slopes_dot = dots.get(Operand.ALIBI_SLOPES)
    slopes_dot = None if slopes_dot is None else pair.per_head(slopes_dot)
    sinks = loops.sinks()
    sinks_dot = dots.get(Operand.SINKS)
    sinks_dot = None if sinks_dot is None else pair.per_head(sinks_dot)[..., 0]

    picks = {name: scanned(x, geo.blocks_q) for name, x in biases.items()}

    def row_block(_: None, xs: tuple[Any, ...]) -> tuple[None, tuple[Array, Array]]:
        i0, row, bias_xs = xs
        in_row = {
            name: scanned(pick(bias_xs[name]), geo.blocks_k) for name, (_, pick) in picks.items()
        }
        live_row = row["row_log_sum"] < EMPTY_ROW / 2

        def step(carry: tuple[Array, Array], xs: tuple[Any, ...]) -> tuple[Any, None]:
            j0, key, bias_xs = xs

            def compute(at: Tile) -> tuple[Array, Array]:
                acc, log_sum_dot = carry
                bias = {name: wide(pick(bias_xs[name])) for name, (_, pick) in in_row.items()}
                seen = pair.seen(at, bias.get("bias"))
                live = live_row if seen.rows is None else live_row & seen.rows
                seen = seen._replace(rows=live)
                q, k, v = pair.scrubbed(seen, row["q"], key["k"], key["v"])
                logits = pair.logits(at, seen, q, k, bias.get("bias"))
                p = jnp.exp((logits.s - row["row_max"][..., None]) - row["row_log_sum"][..., None])
                s_dot = pair.logits_tangent(
                    at,
                    seen,
                    logits,
                    (q, k),
                    (
                        pair.scrub_rows(seen, row.get("q_dot")),
                        pair.scrub_keys(seen, key.get("k_dot")),
                    ),
                    bias.get("bias_dot"),
                    slopes_dot,
                )
                if s_dot is not None:
                    ps = p * s_dot
                    log_sum_dot = log_sum_dot + jnp.sum(ps, -1)
                    acc = acc + pair.dot("KGqs,Ksd->KGqd", pair.dropped(at, ps), v)
                v_dot = pair.scrub_keys(seen, key.get("v_dot"))
                if v_dot is not None:
                    acc = acc + pair.dot("KGqs,Ksd->KGqd", pair.dropped(at, p), v_dot)
                return acc, log_sum_dot

            return loops.unless_hidden(i0, j0, compute, lambda: carry), None

        carry = (loops.full((*geo.rows, geo.Dv), 0.0), loops.full(geo.rows, 0.0))
        xs = (loops.j0, keys, {name: x for name, (x, _) in in_row.items()})
        (acc, log_sum_dot), _ = lax.scan(checkpoint(step), carry, xs)
        if sinks is not None and sinks_dot is not None:
            share = jnp.exp((sinks - row["row_max"]) - row["row_log_sum"])
            log_sum_dot = log_sum_dot + select(live_row, share * sinks_dot)
        o_dot = acc - log_sum_dot[..., None] * row["o"]
        return None, (o_dot.astype(o.dtype), log_sum_dot)

    xs = (loops.i0, rows, {name: x for name, (x, _) in picks.items()})
    _, (o_dot, log_sum_dot) = lax.scan(checkpoint(row_block), None, xs)
    return query_unstack(geo, o_dot), row_unstack(geo, log_sum_dot)
