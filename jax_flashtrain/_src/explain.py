"""Asking which kernel a call would run, without running it: ``explain`` and ``supports``."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from . import backends, native
from . import validation as check
from .canonical import Arguments, Canonical, canonicalize
from .primitive import Target
from .spec import DIFFERENTIABLE, Operand


class Explanation(NamedTuple):
    """What runs a call.

    Attributes:
      backend: "cpu", "cuda", "metal", or "jax" for the blockwise JAX code.
      kernel: name of the forward kernel; "forward / backward" where two kernels differ in name.
      reason: why no native kernel runs, empty where one does.
    """

    backend: str
    kernel: str
    reason: str


class Support(NamedTuple):
    """Answer of ``supports``: true in a condition iff a native kernel serves; else the reason."""

    supported: bool
    reason: str

    def __bool__(self) -> bool:
        return self.supported


@check.rejects_foreign_keywords
def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    platform: str | None = None,
    bias: Any = None,
    mask: Any = None,
    causal: bool = False,
    window: Any = None,
    q_offset: Any = None,
    segment_ids: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    precision: Any = None,
    layout: str = "BTNH",
    implementation: str | None = None,
    autodiff: str | None = None,
) -> Explanation:
    """Which backend and kernel ``flash_attention`` would run for these arguments, and why.

    It asks the very predicate that the lowering asks, for the forward and for the backward of every
    differentiable argument. Nothing is compiled and no array is read.

    Args:
      q, k, v: arrays or ``jax.ShapeDtypeStruct``; so may be all other array arguments.
      platform: "cpu", "cuda", "tpu", ...; default: jax's default backend.
      bias, mask, causal, window, q_offset, segment_ids, q_lengths, kv_lengths, alibi_slopes, sinks,
        scale, softcap, dropout_rate, dropout_key, return_lse, deterministic, precision, layout,
        implementation, autodiff: as in ``flash_attention``.

    Returns:
      An ``Explanation`` (backend, kernel, reason).

    Raises:
      ValueError, TypeError: what ``flash_attention`` raises for these arguments.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_flashtrain
      >>> q = jax.ShapeDtypeStruct((2, 128, 8, 64), jnp.float32)
      >>> jax_flashtrain.explain(q, q, q, causal=True, implementation="jax").kernel
      'blockwise'
    """
    arguments = Arguments(
        bias=bias,
        mask=mask,
        causal=causal,
        window=window,
        q_offset=q_offset,
        segment_ids=segment_ids,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        scale=scale,
        softcap=softcap,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        return_lse=return_lse,
        deterministic=deterministic,
        precision=precision,
        layout=layout,
        implementation=implementation,
        autodiff=autodiff,
    )
    canonical = _abstract(q, k, v, arguments)
    if platform is None:
        platform = jax.default_backend()
    platform = {"gpu": "cuda"}.get(platform, platform)
    return _explain(canonical, platform)


def _explain(canonical: Canonical, platform: str) -> Explanation:
    call = canonical.call
    query = backends.make_query(call.spec, canonical.operands)
    forward = backends.choose(platform, query, call.implementation)
    if forward.backend == "jax":
        return Explanation(*forward[:3])
    backward = backends.choose(platform, _backward_query(canonical), call.implementation)
    if backward.backend == "jax":
        text = f"the backward runs as blockwise JAX code: {backward.reason}"
        return Explanation(forward.backend, f"{forward.kernel} / {backward.kernel}", text)
    names = dict.fromkeys((forward.kernel, backward.kernel))
    return Explanation(forward.backend, " / ".join(names), "")


def _backward_query(canonical: Canonical) -> backends.Query:
    """The backward with every gradient that the operands have."""
    call, operands = canonical.call, canonical.operands
    forward = backends.make_query(call.spec, operands).problem
    row = jax.ShapeDtypeStruct(forward.row_shape, forward.accumulator)
    out = jax.ShapeDtypeStruct(forward.out_shape, forward.dtype)
    extra = {Operand.O: out, Operand.ROW_MAX: row, Operand.ROW_LOG_SUM: row, Operand.DO: out}
    targets = [
        Target(op, tuple(n != 1 for n in operands[op].shape[: len(forward.batch)]))
        for op in DIFFERENTIABLE
        if op in operands
    ]
    return backends.make_query(call.spec, operands | extra, targets)


def _is_dynamic(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct) or (check.is_array(x) and np.ndim(x) > 0)


def _abstract(q: Any, k: Any, v: Any, arguments: Arguments) -> Canonical:
    """Canonicalises without reading a value: arrays become abstract, everything else stays."""
    fields = {"q": q, "k": k, "v": v} | vars(arguments)
    leaves, tree = jax.tree.flatten(fields, is_leaf=lambda x: x is None)
    dynamic = [n for n, x in enumerate(leaves) if _is_dynamic(x)]
    found: list[Canonical] = []

    def run(*arrays: Any) -> None:
        filled = list(leaves)
        for n, x in zip(dynamic, arrays, strict=True):
            filled[n] = x
        values = jax.tree.unflatten(tree, filled)
        q, k, v = (values.pop(name) for name in ("q", "k", "v"))
        canonical = canonicalize(q, k, v, dataclasses.replace(arguments, **values))
        shapes = {
            op: jax.ShapeDtypeStruct(x.shape, x.dtype) for op, x in canonical.operands.items()
        }
        found.append(canonical._replace(operands=shapes))

    jax.eval_shape(run, *(leaves[n] for n in dynamic))
    return found[0]


def supports(platform: str, q: Any = None, k: Any = None, v: Any = None, **options: Any) -> Support:
    """Whether a native kernel serves a call (or any call) on a platform, with the reason if not.

    Args:
      platform: "cpu", "cuda", "tpu", ...
      q, k, v: arrays or ``jax.ShapeDtypeStruct``; leave them out to ask about the platform alone.
      **options: every other argument of ``flash_attention``.

    Returns:
      ``Support(supported, reason)``; in a condition it is true iff supported. Both passes count.

    Example:
      >>> import jax_flashtrain
      >>> bool(jax_flashtrain.supports("tpu"))
      False
      >>> jax_flashtrain.supports("tpu").reason
      "platform 'tpu' has no native kernels (those are for cpu, cuda)"
    """
    if q is None and k is None and v is None and not options:
        if platform not in native.MODULES:
            return Support(False, backends.no_kernels(platform))
        loaded = native.load(platform)
        return Support(loaded.module is not None, loaded.reason)
    found = explain(q, k, v, platform=platform, **options)
    return Support(found.backend != "jax" and not found.reason, found.reason)
