"""The differentiable op: ``attend(call, operands) -> Residual``.

Default mode: a ``custom_vjp`` around the forward and backward primitives. It exists for what a
plain primitive cannot do: its rule knows which operands are perturbed (dbias is computed only when
somebody wants it) and it refuses forward mode, so that nobody falls into the slower tangent by
accident. The primitives inside carry rules of their own (``rules.py``), so differentiating the
rules works to any order. ``autodiff="jvp"`` uses the primitives directly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax

from . import compat, primitive, sharding
from .primitive import Operands, Residual, Target
from .problem import trailing_dims
from .rules import name_residual
from .spec import DIFFERENTIABLE, OPTIONAL_GRADS, AttentionSpec, Operand

FORWARD_MODE_ERROR = (
    "flash_attention: forward-mode differentiation (jax.jvp, jax.linearize, jax.jacfwd, "
    'jax.hessian) needs autodiff="jvp", got autodiff={!r}, which is a custom_vjp and knows reverse '
    "mode only"
)


@dataclasses.dataclass(frozen=True)
class Call:
    """Everything static about one call of the op."""

    spec: AttentionSpec
    present: tuple[Operand, ...]
    implementation: str | None = None
    autodiff: Literal["vjp", "jvp"] | None = None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Operands whose optional gradient was asked for: static, so it travels in the tree."""

    operands: frozenset[Operand]


def attend(call: Call, operands: Operands) -> Residual:
    """Attention with its row residual, differentiable in the operands of ``DIFFERENTIABLE``.

    Args:
      call: static choices; ``call.present`` is set from ``operands``.
      operands: arrays with equal numbers of batch dimensions, each of size 1 or full.

    Returns:
      o, row_max and row_log_sum; see ``primitive.Residual``.
    """
    if sharding.has_explicit_axes(operands):
        return sharding.over_explicit_axes(lambda local: attend(call, local), call.spec, operands)
    present, values = primitive.ordered(operands)
    values = compat.match_varying(values)
    call = dataclasses.replace(call, present=present)
    if call.autodiff == "jvp":
        return primitive.forward(call.spec, call.implementation, primitive.named(present, values))
    try:
        return Residual(*_attend_vjp(call, *values))
    except NotImplementedError as error:
        # A shard_map that runs eagerly refuses a bare custom_vjp of our kind, a jitted one works.
        if "symbolic_zeros" not in str(error):
            raise
        return Residual(*_attend_jitted(call, *values))
    except TypeError as error:
        # jax's own text does not know our option. (Under an outer jit jax raises it later, from the
        # compilation, where only its own text can appear: docs/transforms.md quotes it.)
        if "forward-mode" in str(error) and "flash_attention" not in str(error):
            raise TypeError(FORWARD_MODE_ERROR.format(call.autodiff)) from error
        raise


def _attend(call: Call, *values: Any) -> tuple[Any, ...]:
    operands = primitive.named(call.present, values)
    return tuple(primitive.forward(call.spec, call.implementation, operands))


_attend_vjp = jax.custom_vjp(_attend, nondiff_argnums=(0,))


def _attend_fwd(call: Call, *primals: Any) -> tuple[tuple[Any, ...], Any]:
    values = [p.value for p in primals]
    wanted = _Wanted(
        frozenset(op for op, p in zip(call.present, primals, strict=True) if p.perturbed)
    )
    operands = primitive.named(call.present, values)
    residual = name_residual(primitive.forward(call.spec, call.implementation, operands))
    return tuple(residual), (values, residual, wanted)


def _attend_bwd(call: Call, saved: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
    values, residual, wanted = saved
    operands = primitive.named(call.present, values)
    do, _, dlse = (_instantiated(ct) for ct in cotangents)  # row_max is a gauge: no derivative
    if do is None and dlse is None:
        return tuple(None for _ in call.present)
    shapes = {op: operands[op].shape for op in DIFFERENTIABLE if op in operands}
    targets = [
        Target(op, tuple(n != 1 for n in shape[: len(shape) - trailing_dims(op)]))
        for op, shape in shapes.items()
        if op not in OPTIONAL_GRADS or op in wanted.operands
    ]
    operands |= primitive.residual_operands(residual)
    operands[Operand.DO] = jax.numpy.zeros_like(residual.o) if do is None else do
    if dlse is not None:
        operands[Operand.DLSE] = dlse
    grads = primitive.backward(call.spec, call.implementation, operands, targets)
    return tuple(grads.get(op) for op in call.present)


def _instantiated(cotangent: Any) -> Any:
    """The cotangent, or None where it is symbolically zero."""
    return None if isinstance(cotangent, jax.custom_derivatives.SymbolicZero) else cotangent


_attend_vjp.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)
_attend_jitted = jax.jit(_attend_vjp, static_argnums=(0,))
