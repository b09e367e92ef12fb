"""From the primitives to programs: the native custom call where one serves, else blockwise JAX.

    forward_p / backward_p  --(`sharding.partitioned` splits it over several devices)-->
    forward_kernel_p / backward_kernel_p  --(per platform)-->  custom call, or blockwise JAX

The kernel primitives have the parameters and shapes of the outer ones but no rules: they only exist
between the split over devices and the platform's choice.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from . import backends, blockwise, compat, primitive, sharding
from .primitive import Target, backward_p, forward_p, named, tangent_p
from .rules import blockwise_backward, blockwise_tangent
from .spec import OPTIONAL_GRADS, AttentionSpec, Operand, present_mask

forward_kernel_p = compat.Primitive("flash_attention_forward_kernel")
backward_kernel_p = compat.Primitive("flash_attention_backward_kernel")


def blockwise_forward(
    *values: Any, spec: AttentionSpec, present: tuple[Operand, ...], implementation: str | None
) -> list[Any]:
    """The forward in plain JAX, on the primitive's operands."""
    del implementation
    return list(blockwise.forward(spec, named(present, values)))


def _blockwise_backward(*values: Any, implementation: str | None, **params: Any) -> list[Any]:
    del implementation
    return list(blockwise_backward(*values, **params))


def _blockwise_tangent(*values: Any, implementation: str | None, **params: Any) -> list[Any]:
    del implementation
    return list(blockwise_tangent(*values, **params))


# ---- the split over devices --------------------------------------------------------------------


def kernel_call(kernel: Any, *operands: Any, **params: Any) -> list[Any]:
    """The operation on the operands of one device: what a partitioned call runs on every shard."""
    if params["implementation"] == "jax":
        plain = blockwise_forward if kernel is forward_kernel_p else _blockwise_backward
        # custom_partitioning (jax 0.8) takes no function with constants; jit keeps them inside.
        return list(jax.jit(functools.partial(plain, **params))(*operands))
    return list(kernel.bind(*operands, **params))


def _lower_outer(kernel: Any) -> Any:
    def whole(*operands: Any, **params: Any) -> list[Any]:
        return kernel_call(kernel, *operands, **params)

    def split(*operands: Any, **params: Any) -> list[Any]:
        return sharding.partitioned(whole, *operands, **params)

    def rule(ctx: Any, *values: Any, **params: Any) -> Sequence[Any]:
        function = split if compat.is_split_automatically(ctx) else whole
        lower = compat.mlir.lower_fun(function, multiple_results=True)
        results: Sequence[Any] = lower(ctx, *values, **params)
        return results

    return rule


# ---- one platform ------------------------------------------------------------------------------

_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, UserWarning, stacklevel=2)


def _foreign_platform(ctx: Any) -> str:
    """Name of a platform without a rule of its own (one program may be for several platforms)."""
    names: Sequence[str] = ctx.platforms or ctx.module_context.platforms
    return next((name for name in names if name not in backends.NATIVE_PLATFORMS), names[0])


def _lower_kernel(platform: str | None, backward: bool) -> Any:
    """Lowering rule of a kernel primitive for one platform (None: any that has no rule)."""
    plain = _blockwise_backward if backward else blockwise_forward

    def rule(ctx: Any, *values: Any, **params: Any) -> Sequence[Any]:
        spec, present = params["spec"], params["present"]
        implementation = params["implementation"]
        targets: tuple[Target, ...] = params.get("targets", ())
        name = platform or _foreign_platform(ctx)
        query = backends.make_query(spec, named(present, ctx.avals_in), targets)
        choice = backends.choose(name, query, implementation)
        if choice.backend == "jax":
            if implementation in ("native", "metal"):
                raise NotImplementedError(
                    f"flash_attention: implementation={implementation!r} cannot run here: "
                    f"{choice.reason}"
                )
            _warn_once(f"flash_attention: runs as blockwise JAX code: {choice.reason}")
            lowered = compat.mlir.lower_fun(plain, multiple_results=True)
            results: Sequence[Any] = lowered(ctx, *values, **params)
            return results
        return _custom_call(ctx, values, choice, query, spec, present, targets)

    return rule


def _custom_call(
    ctx: Any,
    values: Sequence[Any],
    choice: backends.Choice,
    query: backends.Query,
    spec: AttentionSpec,
    present: tuple[Operand, ...],
    targets: tuple[Target, ...],
) -> Sequence[Any]:
    """Emits the FFI call. Operands and results are row-major: the kernels read dense arrays."""
    batch_dims = len(ctx.avals_in[0].shape) - 3
    grads = sum(OPTIONAL_GRADS.get(t.operand, 0) for t in targets)
    attributes = spec.attributes(
        present=present_mask(present), batch_dims=batch_dims, grads=int(grads)
    )
    avals_out = list(ctx.avals_out)
    workspace = backends.workspace_bytes(choice, query)
    if workspace is not None:
        avals_out.append(compat.AbstractArray((workspace,), np.dtype(np.uint8)))
    lower = backends.ffi_lowering(choice.target)
    results: Sequence[Any] = lower(ctx.replace(avals_out=avals_out), *values, **attributes)
    return results[: len(ctx.avals_out)]


def _register() -> None:
    mlir = compat.mlir
    for outer, kernel, backward in (
        (forward_p, forward_kernel_p, False),
        (backward_p, backward_kernel_p, True),
    ):
        kernel.multiple_results = True
        kernel.def_abstract_eval(
            primitive.backward_shapes if backward else primitive.forward_shapes
        )
        primitive.define_eager(kernel)
        mlir.register_lowering(outer, _lower_outer(kernel))
        compat.needs_devices(outer)
        mlir.register_lowering(kernel, _lower_kernel(None, backward))
        for platform in backends.NATIVE_PLATFORMS:
            mlir.register_lowering(kernel, _lower_kernel(platform, backward), platform=platform)
    mlir.register_lowering(tangent_p, mlir.lower_fun(_blockwise_tangent, multiple_results=True))


_register()
