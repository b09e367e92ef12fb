"""Ring attention: every shard keeps its queries, keys and values go round.

In step t of a ring of n, shard r holds the keys of shard (r - t) % n. The forward merges the states
of the steps (``merging.py``); the backward sends the keys round once more and calls the operator's
backward with the residual of the whole row, so that every step gives its exact share of dq, dk, dv.
The sums dk and dv travel with their keys, in float32, and come home after the last step.

Positions are global: the offset of the queries, the first column of bias and mask and the counters
of dropout are those of the part of the sequence that a shard holds.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from .._src import compat, primitive
from .._src.api import logsumexp
from .._src.autodiff import Call
from .._src.canonical import Arguments, canonicalize, lift
from .._src.primitive import Operands, Residual, Target
from .._src.problem import trailing_dims
from .._src.rules import name_residual
from .._src.spec import DIFFERENTIABLE, EMPTY_ROW, OPTIONAL_GRADS, Layout, Operand
from .layout import check_order, part_start, parts_of
from .merging import State, is_empty, merge, row_sums, with_sinks
from .schedule import Band, Pair, Run, plan

O = Operand
_I32 = jnp.iinfo(jnp.int32).max
#: Operands that lie along the keys and go round with them.
_TRAVEL = (O.K, O.V, O.KV_SEGMENT_IDS)
#: Operands whose rows are the shard's own queries.
_ROWS = (O.Q, O.Q_SEGMENT_IDS, O.MASK, O.BIAS, O.O, O.ROW_MAX, O.ROW_LOG_SUM, O.DO, O.DLSE)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Everything static about a ring."""

    call: Call
    axis_name: Any
    order: str
    shards: int
    runs: tuple[Run, ...]


def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    axis_name: Any,
    order: str = "contiguous",
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention over a sequence that is cut along a mesh axis; called inside ``shard_map``.

    The result and all gradients are those of ``flash_attention`` on the whole sequence. Memory per
    device falls with the number of shards: keys, values and their gradients go round by
    ``ppermute``, nothing is gathered, and GQA moves the kv heads only.

    Args:
      q: [B, Sq, Hq, D], this shard's queries.
      k: [B, Sk, Hkv, D], this shard's keys.
      v: [B, Sk, Hkv, Dv].
      axis_name: mesh axis (or tuple of axes) that cuts the sequences of q, k and v.
      order: "contiguous", or "zigzag" (see ``to_zigzag``): equal work for all under a causal mask.
      return_lse: also return L.
      **options: those of ``flash_attention``, with the meaning they have on the whole sequence.
        ``bias`` and ``mask``: rows of this shard, columns of the whole sequence in its natural
        order. ``segment_ids``: of this shard. ``q_lengths``, ``kv_lengths``, ``q_offset``: of the
        whole sequence, and lengths need the contiguous order. ``autodiff="jvp"`` is refused.

    Returns:
      o [B, Sq, Hq, Dv] of this shard, or (o, L), L [B, Hq, Sq].

    Raises:
      ValueError, TypeError, NotImplementedError: as ``flash_attention``, and for an order or an
      option that a ring does not take.

    Source: Liu, Zaharia, Abbeel, Ring Attention, 2023 (arXiv:2310.01889).
    """
    residual = ring_residual(q, k, v, axis_name, order, options)
    return (residual.o, logsumexp(residual)) if return_lse else residual.o


def ring_residual(
    q: Any,
    k: Any,
    v: Any,
    axis_name: Any,
    order: str,
    options: dict[str, Any],
    dropout_origin: Any = None,
) -> Residual:
    """``ring_attention`` with its row residual.

    ``dropout_origin``: the counters of dropout where the call holds a part of the batch or of the
    heads (see ``spec.Operand``); None = this call's own.
    """
    check_order(order, "ring_attention")
    if options.get("autodiff") == "jvp":
        raise NotImplementedError(
            'ring_attention: autodiff must be None or "vjp" (the ring is a custom_vjp), got "jvp"'
        )
    ring, operands = _prepare(q, k, v, axis_name, order, dict(options))
    if dropout_origin is not None and O.DROPOUT_ORIGIN in operands:
        operands[O.DROPOUT_ORIGIN] = dropout_origin
    present, values = primitive.ordered(operands)
    values = compat.match_varying(values)
    call = dataclasses.replace(ring.call, present=present)
    return Residual(*_attend(dataclasses.replace(ring, call=call), *values))


def _prepare(
    q: Any, k: Any, v: Any, axis_name: Any, order: str, options: dict[str, Any]
) -> tuple[_Ring, Operands]:
    shards = jax.lax.axis_size(axis_name)
    grids = {O.BIAS: options.pop("bias", None), O.MASK: options.pop("mask", None)}
    layout_axis = -2 if options.get("layout", "BTNH") == "BNTH" else -3
    keys = k.shape[layout_axis] if getattr(k, "ndim", 0) >= 3 else 0
    checked = {
        name: grid if grid is None or grid.shape[-1] == 1 else _columns(grid, keys, shards, name)
        for name, grid in (("bias", grids[O.BIAS]), ("mask", grids[O.MASK]))
    }
    canonical = canonicalize(q, k, v, Arguments(**options, **checked))
    operands = dict(canonical.operands)
    spec = canonical.call.spec
    ids = options.get("segment_ids")
    for x in ids if isinstance(ids, tuple) else (ids,):
        if x is not None and jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).max > _I32:
            raise NotImplementedError(
                f"ring_attention: segment_ids must have at most 32 bits, signed, got {x.dtype}"
            )
    batch_dims = q.ndim - 3
    for op, grid in grids.items():
        if grid is not None:
            operands[op] = lift(op, jnp.asarray(grid), batch_dims)
    rows, keys = (operands[op].shape[_sequence_axis(op, spec.layout)] for op in (O.Q, O.K))
    parts = parts_of(order)
    if rows % parts or keys % parts:
        raise ValueError(
            "ring_attention: q and k must have an even length per shard in the zigzag order, "
            f"got {rows} and {keys}"
        )
    if parts > 1 and (O.Q_LENGTHS in operands or O.KV_LENGTHS in operands):
        raise NotImplementedError(
            "ring_attention: q_lengths and kv_lengths must be None in the zigzag order (use "
            "segment_ids), got lengths"
        )
    bounded = spec.causal or spec.window != (None, None)
    traced_window = O.WINDOW_LEFT in operands or O.WINDOW_RIGHT in operands
    band = Band()
    if O.Q_OFFSET not in operands and (bounded or traced_window or O.ALIBI_SLOPES in operands):
        base = (keys - rows) * shards  # bottom right, of the whole sequence
        operands[O.Q_OFFSET] = jnp.full((1,) * batch_dims, base, jnp.int32)
        left, right = spec.window
        high = 0 if spec.causal else right
        if spec.causal and right is not None:
            high = min(0, right)
        band = Band(None if left is None else base - left, None if high is None else base + high)
    runs = plan(order, shards, rows // parts, keys // parts, band)
    return _Ring(canonical.call, axis_name, order, shards, runs), operands


def _columns(grid: Any, keys: int, shards: int, name: str) -> Any:
    if grid.shape[-1] != keys * shards:
        raise ValueError(
            f"ring_attention: {name} must have the columns of the whole sequence "
            f"({keys * shards}) or 1, got shape {grid.shape}"
        )
    return grid[..., :keys]


# ---- parts of operands ----


def _sequence_axis(op: Operand, layout: Layout) -> int:
    """Axis of an operand that lies along a sequence."""
    if op in (O.Q, O.K, O.V, O.O, O.DO):
        return -3 if layout == Layout.BTNH else -2
    return -2 if op in (O.MASK, O.BIAS) else -1


def _piece(x: Any, part: int, parts: int, axis: int) -> Any:
    if parts == 1 or x.shape[axis] == 1:
        return x
    size = x.shape[axis] // parts
    return jax.lax.slice_in_dim(x, part * size, (part + 1) * size, axis=axis)


def _joined(pieces: list[Any], axis: int) -> Any:
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a pair of parts lies: global first row and column (traced), and the parts."""

    pair: Pair
    row: Any
    column: Any


def _place(ring: _Ring, operands: Operands, pair: Pair, t: Any) -> _Place:
    rows, keys = _sizes(ring, operands)
    shard = jax.lax.axis_index(ring.axis_name)
    owner = (shard - t) % ring.shards
    return _Place(
        pair,
        part_start(ring.order, pair.rows, shard, ring.shards, rows),
        part_start(ring.order, pair.keys, owner, ring.shards, keys),
    )


def _local(ring: _Ring, operands: Operands, place: _Place) -> Operands:
    """The operands of one pair of parts, with positions counted from its corner."""
    layout, parts = ring.call.spec.layout, parts_of(ring.order)
    rows, keys = _sizes(ring, operands)
    out: Operands = {}
    for op, x in operands.items():
        if op == O.SINKS:
            continue  # once, after the merge
        if op in _TRAVEL:
            x = _piece(x, place.pair.keys, parts, _sequence_axis(op, layout))
        elif op in _ROWS:
            x = _piece(x, place.pair.rows, parts, _sequence_axis(op, layout))
        if op in (O.MASK, O.BIAS) and x.shape[-1] != 1:
            x = jax.lax.dynamic_slice_in_dim(x, place.column, keys, axis=-1)
        elif op == O.Q_OFFSET:
            x = x + (place.row - place.column).astype(jnp.int32)
        elif op == O.Q_LENGTHS:
            x = jnp.clip(x - place.row, 0, rows).astype(jnp.int32)
        elif op == O.KV_LENGTHS:
            x = jnp.clip(x - place.column, 0, keys).astype(jnp.int32)
        elif op == O.DROPOUT_ORIGIN:
            corner = jnp.stack([place.row, place.column, jnp.zeros_like(place.row)])
            x = x + corner.astype(x.dtype)
        out[op] = x
    _, values = primitive.ordered(out)
    return dict(zip(sorted(out), compat.match_varying(values), strict=True))


def _sizes(ring: _Ring, operands: Operands) -> tuple[int, int]:
    """Rows and keys of one part."""
    layout, parts = ring.call.spec.layout, parts_of(ring.order)
    rows, keys = (operands[op].shape[_sequence_axis(op, layout)] // parts for op in (O.Q, O.K))
    return rows, keys


def _pass_on(ring: _Ring, tree: Any, by: int = 1) -> Any:
    """Everything to the shard ``by`` places on, in one permute: XLA for GPUs keeps one in flight
    at a time, so of several only the last would run beside the kernels."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves or by % ring.shards == 0:
        return tree
    width = min(x.dtype.itemsize for x in leaves)
    bits = jnp.dtype(f"uint{8 * width}")
    flat = [jax.lax.bitcast_convert_type(x, bits).reshape(-1) for x in leaves]
    route = [(i, (i + by) % ring.shards) for i in range(ring.shards)]
    got = jax.lax.ppermute(jnp.concatenate(flat), ring.axis_name, route)
    ends = list(itertools.accumulate(x.size for x in flat))
    found = []
    for x, part, end in zip(leaves, flat, ends, strict=True):
        piece = jax.lax.slice_in_dim(got, end - part.size, end)
        wide = x.dtype.itemsize // width
        piece = piece.reshape(*x.shape, wide) if wide > 1 else piece.reshape(x.shape)
        found.append(jax.lax.bitcast_convert_type(piece, x.dtype))
    return jax.tree.unflatten(structure, found)


def _walk(
    ring: _Ring, travel: Operands, fixed: Any, moving: Any, body: Any, home: Operands | None = None
) -> tuple[Any, Any]:
    """Goes round: ``fixed, moving = body(t, pairs, travel, fixed, moving)`` in every step.
    ``moving`` comes home in the dtypes of ``home``.

    The next keys are sent before the present ones are computed. ``moving`` goes round with the
    keys, one place behind them: it is sent while the step that adds to it computes, and comes home
    at the end. Steps that no shard needs are skipped; consecutive ones that do the same are one
    loop, so memory does not grow with the number of shards.
    """

    def step(run: Run, carry: Any, t: Any) -> tuple[Any, None]:
        travel, fixed, moving = carry
        coming, moving = _pass_on(ring, (travel, moving))
        fixed, moving = body(t, run.pairs, travel, fixed, moving)
        return (coming, fixed, moving), None

    _, values = primitive.ordered(travel)
    leaves, tree = jax.tree.flatten((travel, fixed, moving))
    carry = jax.tree.unflatten(tree, compat.match_varying([*leaves, *values])[: len(leaves)])
    at = 0
    for run in ring.runs:
        travel, fixed, moving = carry
        travel, moving = _pass_on(ring, (travel, moving), run.first - at)
        carry = travel, fixed, moving
        steps = jnp.arange(run.first, run.last + 1, dtype=jnp.int32)
        carry, _ = jax.lax.scan(functools.partial(step, run), carry, steps)
        at = run.last + 1
    _, fixed, moving = carry
    if home is not None:
        moving = {op: [x.astype(home[op].dtype) for x in xs] for op, xs in moving.items()}
    return fixed, _pass_on(ring, moving, 1 - at)


# ---- forward and backward ----


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, *values: Any) -> tuple[Any, Any, Any]:
    return tuple(_forward(ring, primitive.named(ring.call.present, values)))


def _forward(ring: _Ring, operands: Operands) -> Residual:
    """The residual of the whole rows."""
    call, layout = ring.call, ring.call.spec.layout

    def body(t: Any, pairs: Any, travel: Operands, states: Any, _: Any) -> tuple[Any, Any]:
        states = list(states)
        for pair in pairs:
            local = _local(ring, operands | travel, _place(ring, operands, pair, t))
            found = primitive.forward(call.spec, call.implementation, local)
            found = found._replace(o=found.o.astype(found.row_max.dtype))
            states[pair.rows] = merge(layout, states[pair.rows], found)
        return tuple(states), ()

    travel = {op: operands[op] for op in _TRAVEL if op in operands}
    states, _ = _walk(ring, travel, _nothing(ring, operands), (), body)
    if O.SINKS in operands:
        states = [with_sinks(layout, s, operands[O.SINKS].astype(s.row_max.dtype)) for s in states]
    o = _joined([s.o for s in states], _sequence_axis(O.O, layout)).astype(operands[O.Q].dtype)
    return Residual(o, *(_joined([s[n] for s in states], -1) for n in (1, 2)))


def _nothing(ring: _Ring, operands: Operands) -> tuple[State, ...]:
    """The states of the parts before they have seen a key."""
    present, values = primitive.ordered(operands)
    shapes = primitive.forward_shapes(
        *(compat.aval_of(x) for x in values), spec=ring.call.spec, present=present,
        implementation=None,
    )  # fmt: skip
    parts = parts_of(ring.order)
    o, m, c = (
        _piece(jnp.zeros(shape.shape, shapes[1].dtype), 0, parts, axis)
        for shape, axis in zip(
            shapes, (_sequence_axis(O.O, ring.call.spec.layout), -1, -1), strict=True
        )
    )
    return (State(o, m, jnp.full_like(c, EMPTY_ROW)),) * parts


def _attend_fwd(ring: _Ring, *values: Any) -> tuple[tuple[Any, Any, Any], Any]:
    residual = name_residual(_forward(ring, primitive.named(ring.call.present, values)))
    return tuple(residual), (values, residual)


def _attend_bwd(ring: _Ring, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    values, residual = saved
    call, layout = ring.call, ring.call.spec.layout
    operands = primitive.named(call.present, values)
    do, _, dlse = cotangents  # row_max is a gauge: no derivative
    with_rows = operands | primitive.residual_operands(residual)
    with_rows |= {O.DO: do, O.DLSE: dlse}

    accumulator = residual.row_max.dtype
    wanted = [op for op in DIFFERENTIABLE if op in operands and op != O.SINKS]
    sums = {op: _parts(ring, op, jnp.zeros(operands[op].shape, accumulator)) for op in wanted}
    home = {op: sums.pop(op) for op in (O.K, O.V)}  # travel with their keys

    def body(t: Any, pairs: Any, travel: Operands, sums: Any, home: Any) -> tuple[Any, Any]:
        sums, home = dict(sums), dict(home)
        for pair in pairs:
            place = _place(ring, operands, pair, t)
            local = _local(ring, with_rows | travel, place)
            targets = [Target(op, _full(local[op], op)) for op in wanted]
            grads = primitive.backward(call.spec, call.implementation, local, targets)
            for op, grad in grads.items():
                into = home if op in home else sums
                into[op] = _add(op, into[op], grad.astype(accumulator), place)
        return sums, home

    travel = {op: operands[op] for op in _TRAVEL if op in operands}
    sums, home = _walk(ring, travel, sums, home, body, operands)
    grads = {op: _joined(list(x), _sequence_axis(op, layout)) for op, x in (sums | home).items()}
    if O.SINKS in operands:
        grads[O.SINKS] = _dsinks(layout, operands[O.SINKS], residual, do, dlse)
    return tuple(
        grads[op].astype(operands[op].dtype) if op in grads else None for op in call.present
    )


def _full(x: Any, op: Operand) -> tuple[bool, ...]:
    return tuple(n != 1 for n in x.shape[: x.ndim - trailing_dims(op)])


def _parts(ring: _Ring, op: Operand, total: Any) -> tuple[Any, ...]:
    """The sum of a gradient, part by part where it lies along a sequence."""
    parts, axis = parts_of(ring.order), _sequence_axis(op, ring.call.spec.layout)
    if (op in OPTIONAL_GRADS and op != O.BIAS) or total.shape[axis] == 1:
        return (total,)
    return tuple(_piece(total, part, parts, axis) for part in range(parts))


def _add(op: Operand, totals: tuple[Any, ...], grad: Any, place: _Place) -> tuple[Any, ...]:
    """Adds the gradient of a part of an operand to the gradient of the whole."""
    at = (place.pair.keys if op in _TRAVEL else place.pair.rows) if len(totals) > 1 else 0
    total = totals[at]
    if op == O.BIAS and grad.shape[-1] != total.shape[-1]:
        old = jax.lax.dynamic_slice_in_dim(total, place.column, grad.shape[-1], axis=-1)
        new = jax.lax.dynamic_update_slice_in_dim(total, old + grad, place.column, axis=-1)
    else:
        new = total + grad
    return (*totals[:at], new, *totals[at + 1 :])


def _dsinks(layout: Layout, sinks: Any, residual: Residual, do: Any, dlse: Any) -> Any:
    """-sum_i p_i (rowsum(o do)_i - dL_i), with p_i = exp(sink - L_i) the weight of the sink."""
    acc = residual.row_max.dtype
    empty = is_empty(residual.row_log_sum)
    products = jnp.where(residual.o == 0, 0, residual.o.astype(acc) * do.astype(acc))
    delta = row_sums(products, layout) - dlse
    power = jnp.where(empty, -jnp.inf, (sinks[..., None] - residual.row_max) - residual.row_log_sum)
    weight = jnp.exp(power)
    total = -jnp.sum(jnp.where(weight > 0, weight * delta, 0), -1)
    over = tuple(n for n in range(sinks.ndim - 1) if sinks.shape[n] == 1 and total.shape[n] != 1)
    return jnp.sum(total, over, keepdims=True)


_attend.defvjp(_attend_fwd, _attend_bwd)
