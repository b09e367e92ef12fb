"""All-to-all over heads: every shard trades its piece of the sequence for a part of the heads.

    q [B, S / n, Hq, D]   ->   q [B, S, Hq / n, D]   ->   attention   ->   o [B, S / n, Hq, Dv]

Shard r of n attends with query heads r Hq / n to (r + 1) Hq / n over the whole sequence. Query head
h reads kv head h // G. With g = gcd(Hq / n, G), each run of g query heads lies in one shard and
reads one kv head, so a shard needs Hq / (n g) kv heads: they are *split* where n divides Hkv
(g = G), and *replicated* on the way out as often as is needed elsewhere. The gradients of the
copies add up by the transpose of the replication.

With ``ring_axis`` the sequence is cut over both axes. The all-to-all brings a shard the piece of
its place in the ring, and ``ring.py`` does the rest.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._src import autodiff, compat
from .._src import validation as check
from .._src.api import logsumexp
from .._src.canonical import Arguments, canonicalize, dropout_origin
from .._src.primitive import Residual
from .._src.problem import make_problem
from .._src.spec import Layout, Operand
from .layout import check_order
from .ring import ring_residual


def ulysses_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    axis_name: Any,
    ring_axis: Any = None,
    order: str = "contiguous",
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention over a cut sequence by all-to-all over heads; called inside ``shard_map``.

    The result and all gradients are those of ``flash_attention`` on the whole sequence. Two
    all-to-alls bring q, k, v and o to where they belong; q, k and v are never gathered.

    Args:
      q: [B, Sq, Hq, D], this shard's queries. The size n of the axis must divide Hq.
      k: [B, Sk, Hkv, D], this shard's keys. Where n does not divide Hkv, kv heads are replicated.
      v: [B, Sk, Hkv, Dv].
      axis_name: mesh axis (or tuple of axes) for the all-to-all.
      ring_axis: a second axis (or tuple) that cuts the sequence, for a ring: the sequence is cut
        over (ring_axis, axis_name). None = no ring.
      order: of the ring, "contiguous" or "zigzag" (``to_zigzag(x, size of ring_axis)``). Without a
        ring the two are the same.
      return_lse: also return L.
      **options: those of ``flash_attention``, with the meaning they have on the whole sequence.
        ``alibi_slopes`` and ``sinks``: of all heads. ``segment_ids``: of this shard.
        ``bias`` and ``mask``: rows of this shard (or 1), columns of the whole sequence in its
        natural order (or 1), all heads (or 1; its rows are then gathered, as every shard reads
        them). ``q_lengths``, ``kv_lengths``, ``q_offset``: of the whole sequence.
        ``autodiff="jvp"`` and, in the zigzag order, lengths are refused with a ring.

    Returns:
      o [B, Sq, Hq, Dv] of this shard, or (o, L), L [B, Hq, Sq].

    Raises:
      ValueError, TypeError, NotImplementedError: as ``flash_attention`` and ``ring_attention``, and
        where the axis does not divide the query heads.

    Source: Jacobs et al., DeepSpeed Ulysses, 2023 (arXiv:2309.14509).
    """
    residual = ulysses_residual(q, k, v, axis_name, ring_axis, order, options)
    return (residual.o, logsumexp(residual)) if return_lse else residual.o


def ulysses_residual(
    q: Any,
    k: Any,
    v: Any,
    axis_name: Any,
    ring_axis: Any,
    order: str,
    options: dict[str, Any],
    origin: Any = None,
) -> Residual:
    """``ulysses_attention`` with its row residual; ``origin`` as in ``ring_residual``."""
    check_order(order, "ulysses_attention")
    arguments = Arguments(**options)  # an unknown option is a TypeError here
    layout = check.layout(arguments.layout)
    q, k, v = check.array("q", q), check.array("k", k), check.array("v", v)
    check.qkv(q, k, v, layout)
    problem = make_problem(layout, {Operand.Q: q, Operand.K: k, Operand.V: v})
    shards, shard = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    if problem.Hq % shards:
        raise ValueError(
            f"ulysses_attention: q must have a number of heads that the axis {axis_name!r} of size "
            f"{shards} divides, got {problem.Hq}: give a part of the axis to a ring (ring_axis)"
        )
    sequence, head = (-3, -2) if layout == Layout.BTNH else (-2, -3)

    def heads_out(x: Any, heads: int, rows: int) -> Any:
        """All of the sequence, a part of the heads."""
        return _all_to_all(x, axis_name, heads, rows)

    def heads_back(x: Any, heads: int, rows: int) -> Any:
        return _all_to_all(x, axis_name, rows, heads)

    def mine(x: Any, axis: int) -> Any:
        """This shard's part of an array that holds all heads."""
        size = x.shape[axis] // shards
        x, at = compat.match_varying([x, shard])
        return jax.lax.dynamic_slice_in_dim(x, at * size, size, axis=axis)

    group = problem.Hq // problem.Hkv
    copies = np.arange(problem.Hq) // group
    run = math.gcd(problem.Hq // shards, group)
    if run != group:
        k, v = (jnp.take(x, copies[::run], axis=head) for x in (k, v))
    q, k, v = (heads_out(x, head, sequence) for x in (q, k, v))

    local = dict(options)
    for name in ("bias", "mask"):
        x = local.get(name)
        if x is not None:
            local[name] = _grid(name, x, problem.Hq, problem.Sq, axis_name, heads_out)
    ids = local.get("segment_ids")
    if ids is not None:
        pair = isinstance(ids, (tuple, list))
        whole = tuple(_gathered(x, axis_name, -1) for x in (ids if pair else (ids,)))
        local["segment_ids"] = whole if pair else whole[0]
    for name in ("alibi_slopes", "sinks"):
        x = local.get(name)
        if x is not None:
            x = check.array(name, x)
            if x.ndim == 0 or x.shape[-1] != problem.Hq:
                raise ValueError(
                    f"ulysses_attention: {name} must have all {problem.Hq} heads, got shape "
                    f"{x.shape}"
                )
            local[name] = mine(x, -1)
    if origin is None:
        origin = dropout_origin((*problem.batch, problem.Hq))
    origin = mine(origin, -2)

    if ring_axis is not None:
        residual = ring_residual(q, k, v, ring_axis, order, local, origin)
    else:
        canonical = canonicalize(q, k, v, Arguments(**local))
        operands = canonical.operands
        if Operand.DROPOUT_ORIGIN in operands:
            operands[Operand.DROPOUT_ORIGIN] = origin
        residual = autodiff.attend(canonical.call, operands)
    o = heads_back(residual.o, head, sequence)
    return Residual(o, *(heads_back(x, -2, -1) for x in residual[1:]))


def _all_to_all(x: Any, axis_name: Any, split: int, joined: int) -> Any:
    """Cuts ``x`` along one dimension and joins what comes along another."""
    split, joined = split % x.ndim, joined % x.ndim
    return jax.lax.all_to_all(x, axis_name, split, joined, tiled=True)


def _gathered(x: Any, axis_name: Any, axis: int) -> Any:
    x = jnp.asarray(x)
    return jax.lax.all_gather(x, axis_name, axis=axis % x.ndim, tiled=True)


def _grid(name: str, x: Any, heads: int, rows: int, axis_name: Any, heads_out: Any) -> Any:
    """Bias or mask of this shard's heads and all rows."""
    x = check.array(name, x)
    x = x[(None,) * (3 - x.ndim)] if x.ndim < 3 else x
    if x.shape[-3] not in (1, heads) or x.shape[-2] not in (1, rows):
        raise ValueError(
            f"ulysses_attention: {name} must have all {heads} heads or 1, and this shard's {rows} "
            f"rows or 1, got shape {x.shape}"
        )
    if x.shape[-3] == 1:
        return x if x.shape[-2] == 1 else _gathered(x, axis_name, -2)
    if x.shape[-2] != 1:
        return heads_out(x, -3, -2)
    shards, shard = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    x, shard = compat.match_varying([x, shard])
    size = heads // shards
    return jax.lax.dynamic_slice_in_dim(x, shard * size, size, axis=x.ndim - 3)
