"""Attention over whole arrays on a mesh: the ``shard_map`` around the ring and the all-to-all."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._src import validation as check
from .._src.api import logsumexp
from .._src.autodiff import attend
from .._src.canonical import Arguments, canonicalize, dropout_origin
from .._src.primitive import Residual
from .._src.problem import make_problem
from .._src.spec import Layout, Operand
from .layout import check_order, from_zigzag, to_zigzag
from .ring import ring_residual
from .ulysses import ulysses_residual

#: Options that are arrays, or may be; the others are static.
_ARRAYS = (
    "bias", "mask", "q_offset", "segment_ids", "q_lengths", "kv_lengths", "alibi_slopes", "sinks",
    "dropout_key",
)  # fmt: skip


def mesh_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mesh: Any,
    ring: Any = None,
    ulysses: Any = None,
    batch: Any = None,
    heads: Any = None,
    order: str = "contiguous",
    rearrange: bool = False,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention over whole arrays whose batch, sequence and heads are cut over a mesh.

    Puts the ``shard_map`` around ``ring_attention`` (``ring`` alone), ``ulysses_attention``
    (``ulysses`` alone) or their combination (both). All arguments are global arrays: bias [B, Hq,
    Sq, Sk], segment ids [B, S], and so on, as for ``flash_attention``.

    Args:
      q: [B, Sq, Hq, D].
      k: [B, Sk, Hkv, D].
      v: [B, Sk, Hkv, Dv].
      mesh: the ``jax.sharding.Mesh``. Its other axes hold copies.
      ring, ulysses: the mesh axis (or a tuple of axes) that cuts the sequence for the ring and for
        the all-to-all. With both it is cut over (ring, ulysses).
      batch: the axis that cuts the first dimension.
      heads: the axis that cuts the query and the key heads (tensor parallelism).
      order: "contiguous" or "zigzag", of the ring.
      rearrange: the arrays are in the natural order and the zigzag order is made and undone here,
        at the price of moving them between devices. False: they are laid out already.
      return_lse: also return L.
      **options: those of ``flash_attention``; what a ring or an all-to-all refuses is refused.

    Returns:
      o [B, Sq, Hq, Dv], sharded like q, or (o, L), L [B, Hq, Sq].

    Raises:
      ValueError: an axis is not in the mesh or does not divide its dimension; else as
        ``flash_attention``, ``ring_attention`` and ``ulysses_attention``.
    """
    check_order(order, "mesh_attention")
    check.boolean("rearrange", rearrange)
    arguments = Arguments(**options)
    layout = check.layout(arguments.layout)
    q, k, v = check.array("q", q), check.array("k", k), check.array("v", v)
    check.qkv(q, k, v, layout)
    problem = make_problem(layout, {Operand.Q: q, Operand.K: k, Operand.V: v})
    roles = {"ring": ring, "ulysses": ulysses, "batch": batch, "heads": heads}
    sizes = {name: _size(mesh, name, axis) for name, axis in roles.items()}
    if batch is not None and not problem.batch:
        raise ValueError(
            "mesh_attention: batch must be None where q has no batch, got " + str(batch)
        )
    for what, size, cut in (
        ("the batch", problem.batch[0] if problem.batch else 1, sizes["batch"]),
        ("the query heads", problem.Hq, sizes["heads"]),
        ("the key heads", problem.Hkv, sizes["heads"]),
        ("the queries", problem.Sq, sizes["ring"] * sizes["ulysses"]),
        ("the keys", problem.Sk, sizes["ring"] * sizes["ulysses"]),
    ):
        if size % cut:
            raise ValueError(
                f"mesh_attention: mesh must have axes that divide {what}, got {size} over {cut}"
            )
    sequence = (*_axes(ring), *_axes(ulysses)) or None
    zigzag = order == "zigzag" and ring is not None
    arrays: dict[str, Any] = {
        name: options.pop(name)
        for name in _ARRAYS
        if options.get(name) is not None and check.static_int(options[name]) is None
    }
    window = options.pop("window", None)
    arrays |= _traced_sides(window)
    if "dropout_key" in arrays:
        arrays["origin"] = dropout_origin((*problem.batch, problem.Hq))
    #: Names of the dimensions of each argument, from the last one; the batch comes before.
    head_dims = (sequence, heads, None) if layout == Layout.BTNH else (heads, sequence, None)
    dims: dict[str, tuple[Any, ...]] = {
        "q": head_dims, "k": head_dims, "v": head_dims,
        "bias": (heads, sequence, None), "mask": (heads, sequence, None),
        "segment_ids": (sequence,), "alibi_slopes": (heads,), "sinks": (heads,),
        "origin": (heads, None), "q_offset": (), "q_lengths": (), "kv_lengths": (),
    }  # fmt: skip
    rank = len(problem.batch)

    def spec(name: str, x: Any) -> PartitionSpec:
        """The mesh axes of one array; a dimension of size 1 is not cut."""
        names = ((batch, *(None,) * (rank - 1)) if rank else ()) + dims.get(name, ())
        if name not in dims or x.ndim > len(names):  # the operator will complain
            return PartitionSpec()
        names = names[len(names) - x.ndim :]
        return PartitionSpec(
            *(None if n == 1 else at for n, at in zip(x.shape, names, strict=True))
        )

    def laid(name: str, x: Any, there: bool) -> Any:
        if not (zigzag and rearrange) or sequence not in dims.get(name, ()):
            return x
        axis = dims[name].index(sequence) - len(dims[name])
        move = to_zigzag if there else from_zigzag
        return x if x.shape[axis] == 1 else move(x, sizes["ring"], axis)

    everything = {"q": q, "k": k, "v": v} | {n: _as_arrays(x) for n, x in arrays.items()}
    everything = {
        n: jax.tree.map(lambda x, n=n: laid(n, x, True), xs) for n, xs in everything.items()
    }
    specs = {n: jax.tree.map(lambda x, n=n: spec(n, x), xs) for n, xs in everything.items()}

    def residual_of(given: dict[str, Any]) -> Residual:
        given = dict(given)
        qkv = [given.pop(name) for name in ("q", "k", "v")]
        origin = given.pop("origin", None)
        sides = [given.pop(side, None) for side in ("left", "right")]
        if window is not None:
            given["window"] = tuple(
                static if traced is None else traced
                for static, traced in zip(window, sides, strict=True)
            )
        chosen = options | given
        if ulysses is not None:
            return ulysses_residual(*qkv, ulysses, ring, order, chosen, origin)
        if ring is not None:
            return ring_residual(*qkv, ring, order, chosen, origin)
        canonical = canonicalize(*qkv, Arguments(**chosen))
        if Operand.DROPOUT_ORIGIN in canonical.operands and origin is not None:
            canonical.operands[Operand.DROPOUT_ORIGIN] = origin
        return attend(canonical.call, canonical.operands)

    def local(given: dict[str, Any]) -> tuple[Any, ...]:
        residual = residual_of(given)  # unused results of a shard_map break remat on jax 0.8
        return (residual.o, logsumexp(residual)) if return_lse else (residual.o,)

    rows = PartitionSpec(*((batch, *(None,) * (rank - 1)) if rank else ()), heads, sequence)
    out_specs = (specs["q"], rows) if return_lse else (specs["q"],)
    o, *lse = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=out_specs)(everything)
    o = laid("q", o, False)
    if not return_lse:
        return o
    lse = lse[0]
    return o, from_zigzag(lse, sizes["ring"], -1) if zigzag and rearrange else lse


def _axes(axis: Any) -> tuple[Any, ...]:
    return () if axis is None else tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)


def _size(mesh: Any, name: str, axis: Any) -> int:
    size = 1
    for one in _axes(axis):
        if one not in mesh.shape:
            raise ValueError(
                f"mesh_attention: {name} must be an axis of the mesh {tuple(mesh.shape)}, got "
                f"{one!r}"
            )
        size *= mesh.shape[one]
    return size


def _traced_sides(window: Any) -> dict[str, Any]:
    """Sides of a window that are arrays: arguments of the ``shard_map``."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        return {}
    return {
        name: side
        for name, side in zip(("left", "right"), window, strict=True)
        if side is not None and check.static_int(side) is None and check.is_array(side)
    }


def _as_arrays(x: Any) -> Any:
    """Numbers stay numbers for the checks of the operator; here only arrays are cut."""
    return jax.tree.map(jnp.asarray, tuple(x) if isinstance(x, (tuple, list)) else x)
