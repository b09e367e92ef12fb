"""Backward of the blockwise implementation. Loops only; the arithmetic is in blockwise_pair.

Two equal forms. The fast one computes every tile once: a row of tiles at a time gives dq, and dk,
dv grow in an O(S) accumulator on the side. As the carry of the outer loop that accumulator would be
saved once per row by a third derivative, so derivatives use the other form: one pass by rows for
dq, one by columns for dk and dv, whose outer loops carry nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from . import compat
from .blockwise_loops import Loops, Operands, bias_stack, checkpoint, scanned
from .blockwise_pair import Tile, select
from .blockwise_tiles import (
    grouped,
    key_stack,
    key_unstack,
    query_stack,
    query_unstack,
    row_stack,
    unstack,
)
from .blockwise_visibility import slice_tile
from .spec import EMPTY_ROW, AttentionSpec, Operand

Shapes = dict[str, tuple[int, ...]]
Parts = dict[str, Array]

#: Float operands, and the residuals that have a derivative.
DIFFERENTIABLE = (
    Operand.Q,
    Operand.K,
    Operand.V,
    Operand.BIAS,
    Operand.ALIBI_SLOPES,
    Operand.SINKS,
)
_RESIDUALS = ("o", "row_log_sum", "do", "dlse")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def gradients(
    spec: AttentionSpec,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    operands: Operands,
    residual: Parts,
) -> Parts:
    """Gradients of the given (name, shape) pairs; residual: o, row_max, row_log_sum, do, [dlse]."""
    call = _Backward(spec, dict(shapes), operands, residual)
    return call.finish(call.row_pass(with_keys=True))


def _gradients_jvp(
    spec: AttentionSpec,
    shapes: tuple[Any, ...],
    primals: tuple[Any, Any],
    tangents: tuple[Any, Any],
) -> tuple[Parts, Parts]:
    operands, residual = primals
    moving_operands, moving_residual = (
        {name: dot for name, dot in dots.items() if name in names and not is_zero(dot)}
        for dots, names in zip(tangents, (DIFFERENTIABLE, _RESIDUALS), strict=True)
    )

    def function(some: Operands, others: Parts) -> Parts:
        call = _Backward(spec, dict(shapes), operands | some, residual | others)
        call.prepare_derivative()
        return call.finish(call.row_pass(with_keys=False) | call.key_pass())

    return jax.jvp(
        function,
        ({op: operands[op] for op in moving_operands}, {n: residual[n] for n in moving_residual}),
        (moving_operands, moving_residual),
    )


gradients.defjvp(_gradients_jvp, symbolic_zeros=True)


def is_zero(tangent: Any) -> bool:
    """Whether a tangent is known to be zero while tracing."""
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)


class _Backward:
    """One backward call: its stacks and its loops."""

    def __init__(self, spec: AttentionSpec, shapes: Shapes, operands: Operands, residual: Parts):
        residual = dict(zip(residual, compat.match_varying([*residual.values()]), strict=True))
        self.loops = Loops(spec, operands, *residual.values())
        self.geo = geo = self.loops.geo
        self.shapes = shapes
        self.operands = operands
        self.rows = {
            "q": query_stack(geo, operands[Operand.Q]),
            "o": query_stack(geo, residual["o"]),
            "do": query_stack(geo, residual["do"]),
            "row_max": row_stack(geo, lax.stop_gradient(residual["row_max"])),
            # Rows behind the end are empty rows.
            "row_log_sum": row_stack(geo, residual["row_log_sum"], EMPTY_ROW),
        }
        if "dlse" in residual:
            self.rows["dlse"] = row_stack(geo, residual["dlse"])
        self.keys = {
            "k": key_stack(geo, operands[Operand.K]),
            "v": key_stack(geo, operands[Operand.V]),
        }
        bias = operands.get(Operand.BIAS)
        self.bias = None if bias is None else grouped(geo, bias)
        self.bias_stack: Array | None = None
        #: Whether dbias has a row (column) per query (key); else it is summed over them.
        self.bias_by_row, self.bias_by_key = (n != 1 for n in shapes.get("bias", (1, 1))[-2:])

    def prepare_derivative(self) -> None:
        """Sums of derivatives stay in the accumulator dtype; scans slice the bias."""
        self.rows = {n: self.loops.wide(x) for n, x in self.rows.items()}
        self.keys = {n: self.loops.wide(x) for n, x in self.keys.items()}
        bias = self.operands.get(Operand.BIAS)
        self.bias_stack = bias_stack(self.geo, None if bias is None else self.loops.wide(bias))

    # ---- the loops ------------------------------------------------------------------------------

    def row_pass(self, with_keys: bool) -> Parts:
        """By rows of tiles: stacks of dq and all that a row completes; dk, dv too ``with_keys``.

        The sums over keys come as stacks, the sums over everything with one entry per row of tiles.
        """
        geo, shapes = self.geo, self.shapes
        tiled = {"bias"} & set(shapes) if self.bias_by_row and self.bias_by_key else set[str]()
        on_side = self._key_names() if with_keys else set[str]()
        in_row = {"q", "alibi"} & set(shapes)
        if "bias" in shapes and not self.bias_by_key:
            in_row.add("bias")
        if "sinks" in shapes:
            in_row.add("seen")
        bias_xs, pick_row = scanned(self.bias_stack, geo.blocks_q)

        def row_block(side: Parts, xs: tuple[Any, ...]) -> tuple[Parts, Parts]:
            i0, rows, bias_row = xs
            bias_row_xs, pick_tile = scanned(pick_row(bias_row), geo.blocks_k)

            def step(carry: tuple[Parts, Parts], xs: tuple[Any, ...]) -> tuple[Any, Array | None]:
                row, side = carry
                n, j0, keys, bias = xs
                parts = self._pair(i0, j0, rows, keys, pick_tile(bias), in_row | on_side | tiled)
                row = {name: _add(x, parts[name]) for name, x in row.items()}
                side = {name: _add_at(x, n, parts[name]) for name, x in side.items()}
                return (row, side), self._rounded("bias", parts["bias"]) if tiled else None

            start = {name: self._zero(name) for name in in_row}
            numbers = jnp.arange(geo.blocks_k, dtype=jnp.int32)
            xs = (numbers, self.loops.j0, self.keys, bias_row_xs)
            (row, side), tiles = lax.scan(
                step if with_keys else checkpoint(step), (start, side), xs
            )
            if "q" in row:
                row["q"] = self._rounded("q", row["q"])
            if "sinks" in shapes:
                row["sinks"] = self._sinks(rows, row.pop("seen"))
            return side, row if tiles is None else row | {"bias": tiles}

        side = {
            name: self.loops.uniform(jnp.zeros((geo.blocks_k, *x.shape), x.dtype))
            for name, x in ((name, self._zero(name)) for name in sorted(on_side))
        }
        side, out = lax.scan(
            row_block if with_keys else checkpoint(row_block),
            side,
            (self.loops.i0, self.rows, bias_xs),
        )
        row_sums: Parts = out
        return row_sums | side

    def key_pass(self) -> Parts:
        """By columns of tiles: stacks of dk, dv and of a dbias that is summed over queries."""
        geo = self.geo
        by_key = None if self.bias_stack is None else jnp.swapaxes(self.bias_stack, 0, 1)
        bias_xs, pick_column = scanned(by_key, geo.blocks_k)

        def key_block(_: None, xs: tuple[Any, ...]) -> tuple[None, Parts]:
            j0, keys, bias_column = xs
            bias_column_xs, pick_tile = scanned(pick_column(bias_column), geo.blocks_q)

            def step(column: Parts, xs: tuple[Any, ...]) -> tuple[Parts, None]:
                i0, rows, bias = xs
                parts = self._pair(i0, j0, rows, keys, pick_tile(bias), self._key_names())
                return {name: _add(x, parts[name]) for name, x in column.items()}, None

            start = {name: self._zero(name) for name in self._key_names()}
            column, _ = lax.scan(
                checkpoint(step), start, (self.loops.i0, self.rows, bias_column_xs)
            )
            return None, column

        out: Parts
        _, out = lax.scan(checkpoint(key_block), None, (self.loops.j0, self.keys, bias_xs))
        return out

    def _key_names(self) -> set[str]:
        names = {"k", "v"} & set(self.shapes)
        if "bias" in self.shapes and self.bias_by_key and not self.bias_by_row:
            names.add("bias")
        return names

    def _pair(
        self, i0: Array, j0: Array, rows: Parts, keys: Parts, bias: Array | None, wants: set[str]
    ) -> Parts:
        """What a pair of tiles adds to each gradient in ``wants``; zeros for a hidden pair."""
        wide = self.loops.wide

        def compute(at: Tile) -> Parts:
            tile = bias
            if self.bias is not None and bias is None:
                tile = wide(slice_tile(self.geo, self.bias, i0, j0))
            return self.loops.pair.gradients(
                at,
                {n: wide(x) for n, x in rows.items()},
                {n: wide(x) for n, x in keys.items()},
                tile,
                self.shapes,
                frozenset(wants),
            )

        parts: Parts = self.loops.unless_hidden(
            i0, j0, compute, lambda: {name: self._zero(name) for name in wants}
        )
        return parts

    def _zero(self, name: str) -> Array:
        """Zeros of the shape that a pair of tiles adds to a gradient."""
        geo, full = self.geo, self.loops.full
        if name == "seen":
            return full(geo.rows, False, bool)
        shape = self.shapes[name]
        batch = shape[: geo.rank]
        if name == "q":
            return full((*batch, geo.Hkv, geo.G, geo.block_q, geo.D), 0.0)
        if name == "k":
            return full((*batch, geo.Hkv, geo.block_k, geo.D), 0.0)
        if name == "v":
            return full((*batch, geo.Hkv, geo.block_k, geo.Dv), 0.0)
        if name == "alibi":
            return full((*batch, geo.Hkv, geo.G), 0.0)
        heads = (geo.Hkv, geo.G) if shape[geo.rank] == geo.Hq else (1, 1)
        tile = (geo.block_q if self.bias_by_row else 1, geo.block_k if self.bias_by_key else 1)
        return full((*batch, *heads, *tile), 0.0)

    def _sinks(self, rows: Parts, seen: Array) -> Array:
        """-sum_i exp(sink - L_i) delta_i of a row of tiles (delta = -dL of a row that is blind)."""
        wide = self.loops.wide
        sinks = self.loops.sinks()
        if sinks is None:
            raise ValueError("flash_attention: a gradient of sinks needs sinks")
        delta = jnp.sum(wide(rows["o"]) * select(seen[..., None], wide(rows["do"])), -1)
        live = rows["row_log_sum"] < EMPTY_ROW / 2
        share = jnp.exp((sinks - rows["row_max"]) - rows["row_log_sum"])
        if "dlse" in rows:
            delta = delta - select(live & (share > 0), rows["dlse"])
        share, delta = select(live, share), select(live, delta)
        return self.loops.pair.sum_batch(-jnp.sum(share * delta, -1), self.shapes["sinks"])

    # ---- results --------------------------------------------------------------------------------

    def _rounded(self, name: str, x: Array) -> Array:
        """A finished sum in the dtype of its gradient."""
        return x.astype(self.operands[_OPERAND_OF[name]].dtype)

    def finish(self, stacks: Parts) -> Parts:
        """Stacks and partial sums as arrays in the call's layout."""
        geo = self.geo
        out = {}
        for name, shape in self.shapes.items():
            x = stacks[name]
            if name == "q":
                x = query_unstack(geo, x)
            elif name in ("k", "v"):
                x = key_unstack(geo, x)
            elif name == "bias":
                if self.bias_by_row and self.bias_by_key:
                    # [blocks_q, blocks_k, b.., K|1, G|1, block_q, block_k]
                    x = unstack(jnp.swapaxes(x, 0, 1), x.ndim - 2, geo.Sk)
                    x = unstack(x, x.ndim - 3, geo.Sq)
                elif self.bias_by_row:
                    x = unstack(x, x.ndim - 3, geo.Sq)
                elif self.bias_by_key:
                    x = unstack(x, x.ndim - 2, geo.Sk)
                else:
                    x = jnp.sum(x, 0)
            else:
                x = jnp.sum(x, 0)
            out[name] = self._rounded(name, x).reshape(shape)
        return out


_OPERAND_OF = {
    "q": Operand.Q,
    "k": Operand.K,
    "v": Operand.V,
    "bias": Operand.BIAS,
    "alibi": Operand.ALIBI_SLOPES,
    "sinks": Operand.SINKS,
}


def _add(x: Array, y: Array) -> Array:
    return x | y if x.dtype == bool else x + y


def _add_at(x: Array, n: Array, y: Array) -> Array:
    """x[n] += y, in place inside a compiled loop."""
    old = lax.dynamic_index_in_dim(x, n, 0, keepdims=False)
    new: Array = lax.dynamic_update_index_in_dim(x, old + y, n, 0)
    return new
