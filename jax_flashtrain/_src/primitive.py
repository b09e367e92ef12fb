"""The three primitives: forward, backward, and the linear tangent of the forward.

Each takes its operands in ``Operand`` order and static parameters only. Abstract evaluation below
is the home of every output and residual shape. Rules live elsewhere: ``batching.py`` (vmap),
``rules.py`` (JVP and transpose), ``lowering.py`` (kernels).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from . import compat
from .problem import Problem, gradient_shape, make_problem
from .spec import RESIDUALS, AttentionSpec, Operand

Operands = dict[Operand, Any]


class Residual(NamedTuple):
    """Results of the forward: o, and per row m = max logit and c = ln sum exp(s - m)."""

    o: Any
    row_max: Any
    row_log_sum: Any


class Target(NamedTuple):
    """A gradient that the backward computes: of which operand, and which batch dims are full."""

    operand: Operand
    full: tuple[bool, ...]


forward_p = compat.Primitive("flash_attention_forward")
backward_p = compat.Primitive("flash_attention_backward")
tangent_p = compat.Primitive("flash_attention_tangent")
for _prim in (forward_p, backward_p, tangent_p):
    _prim.multiple_results = True


def ordered(operands: Mapping[Operand, Any]) -> tuple[tuple[Operand, ...], list[Any]]:
    """Splits a dict into the operands that are present and their values, both in fixed order."""
    present = tuple(sorted(op for op, value in operands.items() if value is not None))
    return present, [operands[op] for op in present]


def named(present: Sequence[Operand], values: Sequence[Any]) -> Operands:
    """Inverse of ``ordered``."""
    return dict(zip(present, values, strict=True))


# ---- calling them ------------------------------------------------------------------------------


def forward(spec: AttentionSpec, implementation: str | None, operands: Operands) -> Residual:
    """Binds the forward primitive."""
    present, values = ordered(operands)
    return Residual(
        *forward_p.bind(*values, spec=spec, present=present, implementation=implementation)
    )


def backward(
    spec: AttentionSpec,
    implementation: str | None,
    operands: Operands,
    targets: Sequence[Target],
) -> Operands:
    """Binds the backward primitive.

    Args:
      spec: static choices.
      implementation: the user's choice of implementation.
      operands: forward operands, O, ROW_MAX, ROW_LOG_SUM, DO and optionally DLSE.
      targets: gradients to compute, in ``DIFFERENTIABLE`` order; q, k and v always come.

    Returns:
      The gradients by operand.
    """
    present, values = ordered(operands)
    grads = backward_p.bind(
        *values,
        spec=spec,
        present=present,
        implementation=implementation,
        targets=tuple(targets),
    )
    return {target.operand: grad for target, grad in zip(targets, grads, strict=True)}


def tangent(
    spec: AttentionSpec,
    implementation: str | None,
    operands: Operands,
    tangents: Operands,
) -> tuple[Any, Any]:
    """Binds the tangent primitive: (o_dot, row_log_sum_dot), linear in ``tangents``.

    ``operands`` holds the forward operands and its residual; the derivative of row_max is zero by
    definition (it is a gauge: only row_max + row_log_sum has a meaning).
    """
    present, values = ordered(operands)
    along, directions = ordered(tangents)
    o_dot, row_log_sum_dot = tangent_p.bind(
        *values,
        *directions,
        spec=spec,
        present=present,
        along=along,
        implementation=implementation,
    )
    return o_dot, row_log_sum_dot


# ---- shapes ------------------------------------------------------------------------------------


def forward_shapes(
    *avals: Any, spec: AttentionSpec, present: tuple[Operand, ...], implementation: str | None
) -> list[Any]:
    del implementation
    problem = make_problem(spec.layout, named(present, avals))
    return [
        compat.result_aval(problem.out_shape, problem.dtype, avals),
        compat.result_aval(problem.row_shape, problem.accumulator, avals),
        compat.result_aval(problem.row_shape, problem.accumulator, avals),
    ]


def backward_shapes(
    *avals: Any,
    spec: AttentionSpec,
    present: tuple[Operand, ...],
    implementation: str | None,
    targets: tuple[Target, ...],
) -> list[Any]:
    del implementation
    operands = named(present, avals)
    problem = make_problem(spec.layout, operands)
    return [
        compat.result_aval(
            gradient_shape(target.operand, problem, operands, target.full),
            operands[target.operand].dtype,
            avals,
        )
        for target in targets
    ]


def tangent_problem(
    spec: AttentionSpec,
    present: tuple[Operand, ...],
    along: tuple[Operand, ...],
    values: Sequence[Any],
) -> Problem:
    """Sizes of a tangent call: directions may carry batch dimensions that the operands lack."""
    operands = named(present, values[: len(present)])
    problem = make_problem(spec.layout, operands)
    batch = problem.batch
    for direction in values[len(present) :]:
        batch = tuple(
            n if n != 1 else d for n, d in zip(batch, direction.shape[: len(batch)], strict=True)
        )
    return Problem(**{**vars(problem), "batch": batch})


def _tangent_shapes(
    *avals: Any,
    spec: AttentionSpec,
    present: tuple[Operand, ...],
    along: tuple[Operand, ...],
    implementation: str | None,
) -> list[Any]:
    del implementation
    problem = tangent_problem(spec, present, along, avals)
    return [
        compat.result_aval(problem.out_shape, problem.dtype, avals),
        compat.result_aval(problem.row_shape, problem.accumulator, avals),
    ]


forward_p.def_abstract_eval(forward_shapes)
backward_p.def_abstract_eval(backward_shapes)
tangent_p.def_abstract_eval(_tangent_shapes)


# ---- eager calls -------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("prim", "params"))
def _run(*operands: Any, prim: Any, params: tuple[tuple[str, Any], ...]) -> Any:
    return prim.bind(*operands, **dict(params))


def define_eager(prim: Any) -> None:
    """Eager calls run as a cached one-operation program."""

    def impl(*operands: Any, **params: Any) -> Any:
        # Under disable_jit a jitted function runs in Python: it would come back here for ever.
        with jax.disable_jit(False):
            return _run(*operands, prim=prim, params=tuple(sorted(params.items())))

    prim.def_impl(impl)


for _prim in (forward_p, backward_p, tangent_p):
    define_eager(_prim)


def residual_operands(residual: Residual) -> Operands:
    """The residual as operands of the backward and tangent primitives."""
    return dict(zip(RESIDUALS, residual, strict=True))
