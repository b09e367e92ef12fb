"""Names that move between jax releases (0.8 to 0.12). The only file that may use ``jax._src``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import sharding_impls as _sharding_impls
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

__all__ = [
    "AbstractArray",
    "Primitive",
    "ad",
    "aval_of",
    "batching",
    "checkpoint_name",
    "custom_partitioning",
    "is_static_size",
    "match_varying",
    "mlir",
    "primal_mesh",
    "result_aval",
    "varying_axes",
]

#: The type of an array while tracing (shape, dtype, sharding, varying axes).
AbstractArray = _core.ShapedArray

# jax 0.8 keeps the varying manual axes in `aval.vma`, later releases in `aval.mat.varying`.
_HAS_VMA = hasattr(_core.ShapedArray((), np.dtype(np.float32)), "vma")
_pcast: Callable[..., Any] | None = getattr(jax.lax, "pcast", None)
_pvary: Callable[..., Any] | None = getattr(jax.lax, "pvary", None)


def aval_of(x: Any) -> Any:
    """The abstract value of an array or tracer."""
    return jax.typeof(x)


def is_static_size(size: object) -> bool:
    """False for the symbolic dimensions of ``jax.export``."""
    return isinstance(size, (int, np.integer))


def varying_axes(aval: Any) -> frozenset[Any]:
    """Mesh axes (of an enclosing ``shard_map``) along which a value differs between devices."""
    found = aval.vma if _HAS_VMA else aval.mat.varying
    return frozenset(found)


def primal_mesh(avals: Iterable[Any]) -> Any:
    """The abstract mesh that the operands live on, or None outside every mesh."""
    for aval in avals:
        mesh = aval.sharding.mesh
        if not mesh.empty:
            return mesh
    return None


def result_aval(
    shape: Sequence[Any],
    dtype: Any,
    operands: Sequence[Any],
    partition: Sequence[Any] | None = None,
) -> Any:
    """Type of a result: it varies over every axis over which an operand varies.

    Args:
      shape: of the result.
      dtype: of the result.
      operands: abstract values of the operands.
      partition: axis names of the result's dimensions on an Explicit mesh, or None.
    """
    shape = tuple(shape)
    mesh = primal_mesh(operands)
    if mesh is None:
        return AbstractArray(shape, np.dtype(dtype))
    spec = PartitionSpec(*(partition or [None] * len(shape)))
    varying = frozenset[Any]().union(*(varying_axes(aval) for aval in operands))
    if _HAS_VMA:
        kind: dict[str, Any] = {"vma": varying}
    else:
        kind = {"manual_axis_type": _core.ManualAxisType(varying=varying)}
    return AbstractArray(shape, np.dtype(dtype), sharding=NamedSharding(mesh, spec), **kind)


def _vary(x: Any, axes: tuple[Any, ...]) -> Any:
    if _pcast is not None:
        return _pcast(x, axes, to="varying")
    if _pvary is not None:
        return _pvary(x, axes)
    raise NotImplementedError("flash_attention: this jax has neither lax.pcast nor lax.pvary")


def match_varying(values: Sequence[Any]) -> list[Any]:
    """Makes every value vary over the union of the values' varying axes (no-op elsewhere).

    ``custom_vjp`` compares the types of gradients and inputs, so a replicated operand of a
    shard_map must become varying before it enters (the cast's transpose is the psum it needs).
    """
    avals = [aval_of(x) for x in values]
    union = frozenset[Any]().union(*(varying_axes(aval) for aval in avals))
    if not union:
        return list(values)
    out = []
    for x, aval in zip(values, avals, strict=True):
        missing = tuple(sorted(union - varying_axes(aval), key=str))
        if missing:
            x = _vary(x, missing)
        out.append(x)
    return out


def tangent_aval(x: Any) -> Any:
    """Abstract value of the tangent of an array."""
    return aval_of(x).to_tangent_aval()


def cotangent_aval(aval: Any) -> Any:
    """Abstract value of the cotangent of a value of this type."""
    convert = getattr(aval, "to_ct_aval", None) or aval.to_cotangent_aval
    return convert()


# ---- several devices -----------------------------------------------------------------------------


def explicit_axes(avals: Iterable[Any]) -> tuple[str, ...]:
    """The axes of the operands' mesh whose shardings are part of the types."""
    mesh = primal_mesh(avals)
    if mesh is None:
        return ()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in types if kind == jax.sharding.AxisType.Explicit)


def shard_map(
    function: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any, axes: Iterable[str]
) -> Callable[..., Any]:
    """``jax.shard_map`` over some axes of a mesh, with varying axes checked."""
    mapped: Callable[..., Any] = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes)
    )
    return mapped


def keep_results(results: Sequence[Any]) -> Sequence[Any]:
    """Makes every result of a ``shard_map`` used.

    jax 0.8 fails in ``jax.checkpoint`` with a policy that saves a result which nobody reads.
    """
    kept: Sequence[Any] = jax.lax.optimization_barrier(tuple(results)) if _HAS_VMA else results
    return kept


def reshard(x: Any, mesh: Any, spec: Any) -> Any:
    """Changes the typed sharding of a value (communicates)."""
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def needs_devices(primitive: Any) -> None:
    """Makes the devices of a program known to the lowering rule of a primitive."""
    _dispatch.prim_requires_devices_during_lowering.add(primitive)


def is_split_automatically(ctx: Any) -> bool:
    """Whether the compiler will spread a lowered operation over several devices.

    Not so in a shard_map over some axes only: XLA (up to jaxlib 0.12) aborts on a partitioner's
    shardings there, so the operation stays whole along the other, Auto axes.
    """
    context = ctx.module_context.axis_context
    return isinstance(context, _sharding_impls.ShardingContext) and int(context.num_devices) > 1


def sharding_rule(
    operands: Sequence[Sequence[str]], results: Sequence[Sequence[str]], fixed: Sequence[str]
) -> Any:
    """A Shardy rule: for each array the factor of each dimension.

    Args:
      fixed: factors that must not be cut, in the order of their first appearance.
    """
    return SdyShardingRule(
        tuple(ArrayMapping(*dims) for dims in operands),
        tuple(ArrayMapping(*dims) for dims in results),
        need_replication_factors=tuple(fixed),
    )
