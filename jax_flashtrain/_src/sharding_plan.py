"""How one call is split over a mesh: which axes cut which dimension, and what a shard has to do.

Every dimension of every operand and result belongs to one *factor* of the operation:

    batch d    a leading dimension
    heads      query heads                kv    key heads (cut with the query heads)
    rows       queries                    keys  never cut: every query reads all of its keys
    None       sizes of 1, feature and other dimensions: never cut

Rows, heads and batch elements are independent of each other, so the forward needs no communication.
A gradient is summed over the axes that cut the call but not its operand: a replicated key over the
axes that cut the rows, a bias over those along which it is broadcast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .primitive import Operands
from .problem import Problem, trailing_dims
from .spec import AttentionSpec, Layout, Operand

Axes = tuple[str, ...]
#: One entry per dimension: the mesh axes that cut it.
Cuts = tuple[Axes, ...]
Factor = str | int | None

_LIKE_Q = (Operand.Q, Operand.O, Operand.DO)
_LIKE_K = (Operand.K, Operand.V)
_TRAILING: dict[Operand, tuple[Factor, ...]] = {
    Operand.Q_OFFSET: (),
    Operand.WINDOW_LEFT: (),
    Operand.WINDOW_RIGHT: (),
    Operand.Q_SEGMENT_IDS: ("rows",),
    Operand.KV_SEGMENT_IDS: ("keys",),
    Operand.Q_LENGTHS: (),
    Operand.KV_LENGTHS: (),
    Operand.MASK: ("heads", "rows", "keys"),
    Operand.BIAS: ("heads", "rows", "keys"),
    Operand.ALIBI_SLOPES: ("heads",),
    Operand.SINKS: ("heads",),
    Operand.DROPOUT_SEED: (None,),
    Operand.DROPOUT_ORIGIN: ("heads", None),
    Operand.ROW_MAX: ("heads", "rows"),
    Operand.ROW_LOG_SUM: ("heads", "rows"),
    Operand.DLSE: ("heads", "rows"),
}


def factors(op: Operand, shape: Sequence[Any], layout: Layout) -> tuple[Factor, ...]:
    """The factor of every dimension of an operand (or of its gradient)."""
    if op in _LIKE_Q or op in _LIKE_K:
        kind = ("rows", "heads") if op in _LIKE_Q else ("keys", "kv")
        trailing: tuple[Factor, ...] = (*(kind if layout == Layout.BTNH else kind[::-1]), None)
    else:
        trailing = _TRAILING[op]
    batch = range(len(shape) - trailing_dims(op))
    return tuple(
        None if size == 1 else factor
        for size, factor in zip(shape, (*batch, *trailing), strict=True)
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """The split of one call.

    Attributes:
      sizes: sizes of the mesh axes.
      batch: axes that cut every batch dimension.
      heads: axes that cut the query heads, the outermost first.
      rows: axes that cut the queries.
      kv_count: how many of ``heads`` (from the front) cut the key heads too; along the others every
        shard has all key heads of its part and takes those that its query heads read.
    """

    problem: Problem
    sizes: Mapping[str, int]
    batch: Cuts
    heads: Axes
    rows: Axes
    kv_count: int

    @property
    def kv(self) -> Axes:
        return self.heads[: self.kv_count]

    @property
    def kv_shared(self) -> Axes:
        """Axes that cut the query heads of one key head (or of a few)."""
        return self.heads[self.kv_count :]

    @property
    def used(self) -> Axes:
        return (*(axis for axes in self.batch for axis in axes), *self.heads, *self.rows)

    def count(self, axes: Axes) -> int:
        return int(np.prod([self.sizes[axis] for axis in axes], dtype=np.int64))

    def axes_of(self, factor: Factor) -> Axes:
        if isinstance(factor, int):
            return self.batch[factor]
        named: dict[Factor, Axes] = {"heads": self.heads, "rows": self.rows, "kv": self.kv}
        return named.get(factor, ())

    def cuts(self, op: Operand, shape: Sequence[Any]) -> Cuts:
        """The axes that cut each dimension of an operand or its gradient."""
        return tuple(self.axes_of(f) for f in factors(op, shape, self.problem.layout))

    def index(self, axes: Axes) -> jax.Array:
        """Number of this shard along several axes, the first one outermost (inside a shard)."""
        index: jax.Array = jnp.int32(0)
        for axis in axes:
            index = index * self.sizes[axis] + jax.lax.axis_index(axis)
        return index


def make_plan(
    problem: Problem, sizes: Mapping[str, int], known: Sequence[tuple[Operand, Sequence[Any], Cuts]]
) -> Plan:
    """Chooses the split from the shardings of operands and results, the most important first.

    Args:
      known: (operand, shape, axes per dimension). An axis cuts one factor only, and only where the
        factor's size is a multiple of the number of shards.
    """
    full: dict[Factor, Any] = dict(enumerate(problem.batch))
    full |= {"heads": problem.Hq, "rows": problem.Sq}
    chosen: dict[Factor, Axes] = {}
    used: set[str] = set()
    for op, shape, cuts in known:
        for factor, axes in zip(factors(op, shape, problem.layout), cuts, strict=True):
            target: Factor = "heads" if factor == "kv" else factor
            axes = tuple(axis for axis in axes if sizes[axis] > 1)
            if not axes or target in chosen or target not in full or used & set(axes):
                continue
            if full[target] % int(np.prod([sizes[axis] for axis in axes])):
                continue
            chosen[target] = axes
            used |= set(axes)
    heads = chosen.get("heads", ())
    kv_count, left = 0, problem.Hkv
    for axis in heads:
        if left % sizes[axis]:
            break
        left //= sizes[axis]
        kv_count += 1
    batch = tuple(chosen.get(d, ()) for d in range(len(problem.batch)))
    return Plan(problem, sizes, batch, heads, chosen.get("rows", ()), kv_count)


# ---- inside a shard ------------------------------------------------------------------------------


def localize(plan: Plan, spec: AttentionSpec, operands: Operands) -> Operands:
    """A shard's operands for the kernel: its key heads, and positions that stay global.

    ``operands`` are the shards that ``plan.cuts`` describes.
    """
    out = dict(operands)
    for op in _LIKE_K:
        out[op] = _own_kv_heads(plan, out[op])
    if plan.rows:
        rows = plan.problem.Sq // plan.count(plan.rows)
        start = plan.index(plan.rows) * rows
        batch_dims = len(plan.problem.batch)
        if spec.causal or _has_window(spec, operands) or Operand.ALIBI_SLOPES in operands:
            offset = operands.get(Operand.Q_OFFSET)
            if offset is None:
                offset = jnp.full((1,) * batch_dims, plan.problem.Sk - plan.problem.Sq, jnp.int32)
            # Far beyond every position an offset has no meaning of its own: do not overflow.
            out[Operand.Q_OFFSET] = (
                jnp.minimum(offset, np.iinfo(np.int32).max - plan.problem.Sq) + start
            )
        if Operand.Q_LENGTHS in operands:
            lengths = jnp.clip(operands[Operand.Q_LENGTHS], 0, plan.problem.Sq)
            out[Operand.Q_LENGTHS] = lengths - start
        if Operand.DROPOUT_ORIGIN in operands:
            shift = jnp.zeros((3,), jnp.uint32).at[0].set(start.astype(jnp.uint32))
            out[Operand.DROPOUT_ORIGIN] = operands[Operand.DROPOUT_ORIGIN] + shift
    return out


def _has_window(spec: AttentionSpec, operands: Operands) -> bool:
    traced = Operand.WINDOW_LEFT in operands or Operand.WINDOW_RIGHT in operands
    return traced or spec.window != (None, None)


def _kv_axis(plan: Plan, x: jax.Array) -> int:
    return x.ndim - (2 if plan.problem.layout == Layout.BTNH else 3)


def _kv_heads(plan: Plan) -> tuple[jax.Array, int] | jax.Array | None:
    """Key heads that a shard reads: (first, count), an index per query head, or None = all."""
    if not plan.kv_shared:
        return None
    part = plan.problem.Hkv // plan.count(plan.kv)
    heads = plan.problem.Hq // plan.count(plan.heads)
    group = plan.problem.Hq // plan.problem.Hkv
    first = plan.index(plan.kv_shared) * heads
    if part == 1:
        return None
    if group % heads == 0:
        return first // group, 1
    # Its heads start or end in the middle of a group: one key head for every query head.
    return (first + jnp.arange(heads, dtype=jnp.int32)) // group


def _own_kv_heads(plan: Plan, x: jax.Array) -> jax.Array:
    own = _kv_heads(plan)
    axis = _kv_axis(plan, x)
    if own is None:
        return x
    if isinstance(own, tuple):
        return jax.lax.dynamic_slice_in_dim(x, *own, axis)
    return jnp.take(x, own, axis)


def whole_kv_heads(plan: Plan, x: jax.Array) -> jax.Array:
    """Transpose of the choice of key heads: a gradient of all key heads of the part."""
    own = _kv_heads(plan)
    if own is None:
        return x
    axis = _kv_axis(plan, x)
    part = plan.problem.Hkv // plan.count(plan.kv)
    zeros = jnp.zeros((*x.shape[:axis], part, *x.shape[axis + 1 :]), x.dtype)
    if isinstance(own, tuple):
        return jax.lax.dynamic_update_slice_in_dim(zeros, x, own[0], axis)
    at = (*(slice(None),) * axis, own)
    return zeros.at[at].add(x)


def spread(plan: Plan, x: jax.Array, shape: Sequence[int], axes: Cuts, keep: Cuts) -> jax.Array:
    """Puts a shard of a gradient into zeros of the size that ``keep`` leaves.

    Args:
      shape: of the whole gradient.
      axes: what cuts each dimension of ``x``.
      keep: what cuts each dimension of the result: ``axes`` or nothing.
    """
    moved = [d for d in range(x.ndim) if axes[d] and not keep[d]]
    if not moved:
        return x
    sizes = [shape[d] if d in moved else n for d, n in enumerate(x.shape)]
    start = [
        plan.index(axes[d]) * x.shape[d] if d in moved else jnp.int32(0) for d in range(x.ndim)
    ]
    return jax.lax.dynamic_update_slice(jnp.zeros(sizes, x.dtype), x, start)
