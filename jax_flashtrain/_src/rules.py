"""Differentiation of the primitives: JVP rules and transposes.

    forward   -- JVP -->        tangent (linear in its directions)
    tangent   -- transpose -->  backward,   backward (linear in do, dL) -- transpose --> tangent
    tangent, backward -- JVP --> themselves in the linear operands, blockwise JAX in the others

so reverse, forward and any nesting of both come from one set of rules. The derivative of row_max is
zero by definition (see ``primitive.tangent``), and empty rows have constant o and row_log_sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import blockwise, compat, primitive
from .primitive import Operands, Target, backward_p, forward_p, named, tangent_p
from .problem import broadcast_size, gradient_shape, make_problem, trailing_dims
from .spec import DIFFERENTIABLE, RESIDUALS, AttentionSpec, Operand

Zero = compat.ad.Zero

# Checkpoint names of the residual, for jax.checkpoint policies.
OUT_NAME = "flashtrain_out"
LSE_NAME = "flashtrain_lse"

_VARIABLE = (*DIFFERENTIABLE, Operand.O, Operand.ROW_LOG_SUM)  # what a rule differentiates by


def name_residual(residual: primitive.Residual) -> primitive.Residual:
    """Gives the residual the names that checkpoint policies may save."""
    return primitive.Residual(
        compat.checkpoint_name(residual.o, OUT_NAME),
        compat.checkpoint_name(residual.row_max, LSE_NAME),
        compat.checkpoint_name(residual.row_log_sum, LSE_NAME),
    )


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is Zero


def _directions(present: Sequence[Operand], tangents: Sequence[Any]) -> Operands:
    """Tangents that are not symbolically zero, of operands that have a derivative."""
    return {
        op: t
        for op, t in zip(present, tangents, strict=True)
        if op in _VARIABLE and not _is_zero(t)
    }


def _zeros_like(x: Any) -> Any:
    return jnp.zeros_like(x)


# ---- forward -----------------------------------------------------------------------------------


def _forward_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    spec: AttentionSpec,
    present: tuple[Operand, ...],
    implementation: str | None,
) -> Any:
    operands = named(present, primals)
    residual = name_residual(primitive.forward(spec, implementation, operands))
    directions = _directions(present, tangents)
    zeros = [Zero(compat.tangent_aval(x)) for x in residual]
    if not directions:
        return list(residual), zeros
    o_dot, row_log_sum_dot = primitive.tangent(
        spec, implementation, operands | primitive.residual_operands(residual), directions
    )
    return list(residual), [o_dot, zeros[1], row_log_sum_dot]


# ---- tangent -----------------------------------------------------------------------------------


def _spread(operands: Operands, others: Iterable[Any], batch_dims: int) -> Operands:
    """The forward operands with every batch dimension that only a cotangent or a tangent has.

    The blockwise code reads the batch off the forward's operands. Under a vmap over cotangents or
    tangents alone (jacrev, jacfwd) those lack the mapped dimension: q gets it, which is no larger
    than the mapped tangents are.
    """
    sizes = [x.shape[:batch_dims] for x in (*operands.values(), *others)]
    full = tuple(broadcast_size([s[d] for s in sizes]) for d in range(batch_dims))
    own = tuple(broadcast_size([x.shape[d] for x in operands.values()]) for d in range(batch_dims))
    if own == full:
        return operands
    q = operands[Operand.Q]
    batch = [f if f != w else n for f, w, n in zip(full, own, q.shape, strict=False)]
    return operands | {Operand.Q: jnp.broadcast_to(q, (*batch, *q.shape[batch_dims:]))}


@functools.partial(jax.jit, static_argnames=("spec", "present", "along"))
def blockwise_tangent(
    *values: Any,
    spec: AttentionSpec,
    present: tuple[Operand, ...],
    along: tuple[Operand, ...],
) -> tuple[Any, Any]:
    """The tangent in plain JAX, on the primitive's operands."""
    operands = named(present, values[: len(present)])
    directions = named(along, values[len(present) :])
    o, row_max, row_log_sum = (operands.pop(op) for op in RESIDUALS)
    batch_dims = operands[Operand.Q].ndim - 3
    operands = _spread(operands, (o, row_max, row_log_sum, *directions.values()), batch_dims)
    o_dot, row_log_sum_dot = blockwise.tangent(spec, operands, o, row_max, row_log_sum, directions)
    return o_dot, row_log_sum_dot


def _jvp_of(
    function: Callable[..., Any],
    kinds: Sequence[Operand],
    primals: Sequence[Any],
    tangents: Sequence[Any],
) -> Any:
    """Directional derivative of a plain JAX function along the tangents of ``kinds`` that vary."""
    varying = [
        n
        for n, (op, t) in enumerate(zip(kinds, tangents, strict=True))
        if op in _VARIABLE and not _is_zero(t)
    ]

    def closed(*moving: Any) -> Any:
        full = list(primals)
        for n, x in zip(varying, moving, strict=True):
            full[n] = x
        return function(*full)

    return jax.jvp(closed, [primals[n] for n in varying], [tangents[n] for n in varying])[1]


def _add(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else [x + y for x, y in zip(a, b, strict=True)]


def _tangent_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    spec: AttentionSpec,
    present: tuple[Operand, ...],
    along: tuple[Operand, ...],
    implementation: str | None,
) -> Any:
    outs = tangent_p.bind(
        *primals, spec=spec, present=present, along=along, implementation=implementation
    )
    operands, directions = primals[: len(present)], primals[len(present) :]
    operand_dots = tangents[: len(present)]
    linear = nonlinear = None
    moving = _directions(along, tangents[len(present) :])
    if moving:
        linear = list(primitive.tangent(spec, implementation, named(present, operands), moving))
    if _directions(present, operand_dots):
        function = functools.partial(blockwise_tangent, spec=spec, present=present, along=along)
        nonlinear = _jvp_of(
            lambda *ops: list(function(*ops, *directions)), present, operands, operand_dots
        )
    total = _add(linear, nonlinear)
    return outs, total or [Zero(compat.tangent_aval(x)) for x in outs]


def _full_dims(op: Operand, shape: Sequence[Any]) -> tuple[bool, ...]:
    """Which batch dimensions of a value of this shape are full (a size of 1 may be either)."""
    return tuple(n != 1 for n in shape[: len(shape) - trailing_dims(op)])


def _tangent_transpose(
    cotangents: Sequence[Any],
    *values: Any,
    spec: AttentionSpec,
    present: tuple[Operand, ...],
    along: tuple[Operand, ...],
    implementation: str | None,
) -> list[Any]:
    operands, directions = named(present, values[: len(present)]), values[len(present) :]
    unknown = {
        op: x.aval
        for op, x in zip(along, directions, strict=True)
        if compat.ad.is_undefined_primal(x)
    }
    do, dlse = cotangents
    if _is_zero(do) and _is_zero(dlse):
        grads: Operands = {op: Zero(compat.cotangent_aval(aval)) for op, aval in unknown.items()}
    else:
        operands[Operand.DO] = compat.ad.instantiate_zeros(do)
        if not _is_zero(dlse):
            operands[Operand.DLSE] = dlse
        shapes = {op: operands[op].shape for op in (Operand.Q, Operand.K, Operand.V)}
        shapes |= {op: aval.shape for op, aval in unknown.items()}
        targets = [Target(op, _full_dims(op, shapes[op])) for op in DIFFERENTIABLE if op in shapes]
        grads = primitive.backward(spec, implementation, operands, targets)
    return [None] * len(present) + [grads[op] if op in unknown else None for op in along]


# ---- backward ----------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("spec", "present", "targets"))
def blockwise_backward(
    *values: Any,
    spec: AttentionSpec,
    present: tuple[Operand, ...],
    targets: tuple[Target, ...],
) -> list[Any]:
    """The backward in plain JAX, on the primitive's operands."""
    operands = named(present, values)
    problem = make_problem(spec.layout, operands)
    shapes = {
        DIFFERENTIABLE[t.operand]: gradient_shape(t.operand, problem, operands, t.full)
        for t in targets
    }
    o, row_max, row_log_sum = (operands.pop(op) for op in RESIDUALS)
    do, dlse = operands.pop(Operand.DO), operands.pop(Operand.DLSE, None)
    others = [x for x in (o, row_max, row_log_sum, do, dlse) if x is not None]
    operands = _spread(operands, others, len(problem.batch))
    # rowsum(o * do) of a stretched o is miscompiled by XLA's CPU backend of jaxlib 0.10.2 (seen
    # with a vmap of 100 over do alone; 0.8.0, 0.11.2 and 0.12.0.1 are right): give both one size.
    o, do = jnp.broadcast_arrays(o, do)
    grads = blockwise.backward(spec, operands, o, row_max, row_log_sum, do, dlse, shapes)
    return [grads[DIFFERENTIABLE[t.operand]] for t in targets]


def _backward_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    spec: AttentionSpec,
    present: tuple[Operand, ...],
    implementation: str | None,
    targets: tuple[Target, ...],
) -> Any:
    outs = backward_p.bind(
        *primals, spec=spec, present=present, implementation=implementation, targets=targets
    )
    operands, dots = named(present, primals), named(present, tangents)
    linear = nonlinear = None
    do_dot = dots[Operand.DO]
    dlse_dot = dots.get(Operand.DLSE)
    moves_dlse = dlse_dot is not None and not _is_zero(dlse_dot)
    if not _is_zero(do_dot) or moves_dlse:
        moved: Operands = {op: x for op, x in operands.items() if op != Operand.DLSE}
        moved[Operand.DO] = _zeros_like(operands[Operand.DO]) if _is_zero(do_dot) else do_dot
        if moves_dlse:
            moved[Operand.DLSE] = dlse_dot
        grads = primitive.backward(spec, implementation, moved, targets)
        linear = [grads[t.operand] for t in targets]
    if _directions(present, tangents):
        function = functools.partial(
            blockwise_backward, spec=spec, present=present, targets=targets
        )
        nonlinear = _jvp_of(function, present, primals, tangents)
    total = _add(linear, nonlinear)
    return outs, total or [Zero(compat.tangent_aval(x)) for x in outs]


def _backward_transpose(
    cotangents: Sequence[Any],
    *values: Any,
    spec: AttentionSpec,
    present: tuple[Operand, ...],
    implementation: str | None,
    targets: tuple[Target, ...],
) -> list[Any]:
    operands = named(present, values)
    linear = {
        op: operands.pop(op).aval
        for op in (Operand.DO, Operand.DLSE)
        if op in operands and compat.ad.is_undefined_primal(operands[op])
    }
    for op in (Operand.DO, Operand.DLSE):
        operands.pop(op, None)
    directions = {
        t.operand: ct for t, ct in zip(targets, cotangents, strict=True) if not _is_zero(ct)
    }
    if directions:
        pair = primitive.tangent(spec, implementation, operands, directions)
        found = dict(zip((Operand.DO, Operand.DLSE), pair, strict=True))
        grads: Operands = {op: _sum_to(found[op], aval.shape) for op, aval in linear.items()}
    else:
        grads = {op: Zero(compat.cotangent_aval(aval)) for op, aval in linear.items()}
    return [grads.get(op) for op in present]


def _sum_to(x: Any, shape: Sequence[Any]) -> Any:
    """Sums over the dimensions that the shape has with size 1."""
    axes = tuple(d for d, (n, m) in enumerate(zip(x.shape, shape, strict=True)) if n != m)
    return jnp.sum(x, axes, keepdims=True) if axes else x


compat.ad.primitive_jvps[forward_p] = _forward_jvp
compat.ad.primitive_jvps[tangent_p] = _tangent_jvp
compat.ad.primitive_jvps[backward_p] = _backward_jvp
compat.ad.primitive_transposes[tangent_p] = _tangent_transpose
compat.ad.primitive_transposes[backward_p] = _backward_transpose
