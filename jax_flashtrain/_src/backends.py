"""Which backend runs a call, and why not the native one. One predicate, read by the lowering,
``explain`` and ``supports``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from . import compat, native
from .primitive import Target
from .problem import Problem, make_problem
from .spec import MAX_BATCH_DIMS, OPTIONAL_GRADS, AttentionSpec, Operand, present_mask

#: Platforms with native kernels.
NATIVE_PLATFORMS = tuple(dict.fromkeys(platform for platform, _ in native.MODULES.values()))

UNKNOWN = -1  # a size that is symbolic while exporting

# Twin of DType in cpp/core/problem.h (tests/test_interface.py).
DTYPE_CODES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}


class Choice(NamedTuple):
    """What runs: backend ("cpu", "cuda", "metal", "jax"), kernel, why no native one, FFI target."""

    backend: str
    kernel: str
    reason: str
    target: str = ""


@dataclasses.dataclass(frozen=True)
class Query:
    """One pass of one call, as the native modules are asked about it."""

    spec: AttentionSpec
    problem: Problem
    present: tuple[Operand, ...]
    bias: tuple[tuple[Any, ...], str] | None  # shape and dtype
    mask: tuple[Any, ...] | None  # shape
    targets: tuple[Target, ...]  # empty: the forward
    kv_batch: tuple[Any, ...]

    def facts(self, platform: str) -> dict[str, int]:
        """The question in plain ints; symbolic sizes are UNKNOWN."""
        p, spec = self.problem, self.spec
        grads = sum(OPTIONAL_GRADS.get(t.operand, 0) for t in self.targets)
        attributes = spec.attributes(
            present=present_mask(self.present), batch_dims=len(p.batch), grads=int(grads)
        )
        facts = {k: int(v) for k, v in attributes.items() if isinstance(v, np.int64)}
        summed = 0  # bit set of Operand: gradients that are summed over a batch dimension
        for t in self.targets:
            if any(not f and n != 1 for f, n in zip(t.full, p.batch, strict=True)):
                summed |= 1 << t.operand
        bias_shape, bias_dtype = self.bias or ((), "")
        bias_sizes = bias_shape[-3:] if bias_shape else (0, 0, 0)
        mask_sizes = self.mask[-3:] if self.mask else (0, 0, 0)
        return facts | {
            "backward": int(bool(self.targets)),
            "dtype": DTYPE_CODES[p.dtype.name],
            "softcap": int(spec.softcap is not None),
            "dropout": int(spec.dropout_rate > 0),
            "summed": summed,
            "B": _product(p.batch),
            "kv_batch": _product(self.kv_batch),
            "Sq": _known(p.Sq),
            "Sk": _known(p.Sk),
            "Hq": _known(p.Hq),
            "Hkv": _known(p.Hkv),
            "D": _known(p.D),
            "Dv": _known(p.Dv),
            "bias_dtype": DTYPE_CODES.get(bias_dtype, UNKNOWN),
            "bias_batch": _product(bias_shape[:-3]) if bias_shape else 0,
            "bias_heads": _known(bias_sizes[0]),
            "bias_rows": _known(bias_sizes[1]),
            "bias_cols": _known(bias_sizes[2]),
            "mask_batch": _product(self.mask[:-3]) if self.mask else 0,
            "mask_heads": _known(mask_sizes[0]),
            "mask_rows": _known(mask_sizes[1]),
            "mask_cols": _known(mask_sizes[2]),
            "compute_capability": compute_capability(platform),
        }


def _known(size: Any) -> int:
    return int(size) if compat.is_static_size(size) else UNKNOWN


def _product(sizes: Sequence[Any]) -> int:
    known = all(compat.is_static_size(n) for n in sizes)
    return math.prod(int(n) for n in sizes) if known else UNKNOWN


def make_query(
    spec: AttentionSpec, operands: Mapping[Operand, Any], targets: Sequence[Target] = ()
) -> Query:
    """The question that the operands' shapes and dtypes ask (arrays or abstract values)."""
    problem = make_problem(spec.layout, operands)
    bias, mask = operands.get(Operand.BIAS), operands.get(Operand.MASK)
    return Query(
        spec=spec,
        problem=problem,
        present=tuple(sorted(operands)),
        bias=None if bias is None else (tuple(bias.shape), np.dtype(bias.dtype).name),
        mask=None if mask is None else tuple(mask.shape),
        targets=tuple(targets),
        kv_batch=tuple(operands[Operand.K].shape[: len(problem.batch)]),
    )


def compute_capability(platform: str) -> int:
    """90 for an H100 or H200; 0 where there is no such device in this process (exporting)."""
    if platform != "cuda":
        return 0
    try:
        return round(10 * float(jax.devices("cuda")[0].compute_capability))
    except (RuntimeError, AttributeError, ValueError):
        return 0


def choose(platform: str, query: Query, implementation: str | None = None) -> Choice:
    """The native kernel for one pass of a call on a platform, or the blockwise code and why."""
    if implementation == "jax":
        return _blockwise('implementation="jax" was asked for')
    if platform == "metal":
        platform, implementation = "cpu", "metal"
    if platform not in NATIVE_PLATFORMS:
        return _blockwise(no_kernels(platform))
    if implementation == "metal" and platform != "cpu":
        return _blockwise(f"the Metal kernels run on jax's cpu platform, got {platform!r}")
    name = "metal" if implementation == "metal" else platform
    if platform == "cpu" and name != "metal" and _metal_preferred(query):
        name = "metal"
    loaded = native.load(name)
    if loaded.module is None:
        return _blockwise(loaded.reason)
    if len(query.problem.batch) > MAX_BATCH_DIMS:
        return _blockwise(
            f"the native kernels take at most {MAX_BATCH_DIMS} batch dimensions "
            f"(leading ones and vmaps), got {len(query.problem.batch)}"
        )
    module = loaded.module
    if hasattr(module, "explain"):
        kernel, reason = module.explain(query.facts(platform))
    else:
        kernel, reason = module.isa(), ""
    if not kernel:
        return _blockwise(reason.removeprefix("flash_attention: "))
    if name == "metal":
        target = native.METAL_BACKWARD_TARGET if query.targets else native.METAL_FORWARD_TARGET
    else:
        target = native.BACKWARD_TARGET if query.targets else native.FORWARD_TARGET
    return Choice(name, kernel, "", target)


def _metal_preferred(query: Query) -> bool:
    """Does the GPU of an Apple machine take a call of the cpu platform? Both passes must fit."""
    module = native.load("metal").module
    if module is None or len(query.problem.batch) > MAX_BATCH_DIMS:
        return False
    facts = query.facts("cpu")
    return bool(module.preferred(facts) and module.explain(facts)[0])


def no_kernels(platform: str) -> str:
    """The reason on platforms that have no native module."""
    names = ", ".join(NATIVE_PLATFORMS)
    return f"platform {platform!r} has no native kernels (those are for {names})"


def _blockwise(reason: str) -> Choice:
    return Choice("jax", "blockwise", reason)


def workspace_bytes(choice: Choice, query: Query) -> Any:
    """Size of the workspace result of a native call, or None where its targets have none.

    With a symbolic batch the size of one element times the batch: a module's workspace for a batch
    is never larger than that.
    """
    module = native.load(choice.backend).module
    if module is None or not hasattr(module, "workspace_bytes"):
        return None
    facts = query.facts(choice.backend)
    if facts["B"] != UNKNOWN:
        return int(module.workspace_bytes(facts))
    batches = ("B", "kv_batch", "bias_batch", "mask_batch")
    one = {
        name: 1 if name in batches and value == UNKNOWN else value for name, value in facts.items()
    }
    if UNKNOWN in (one["Sq"], one["Sk"]):
        raise NotImplementedError(
            "flash_attention: exporting for cuda takes symbolic batch sizes only, got a symbolic "
            "sequence length"
        )
    return math.prod(query.problem.batch, start=int(module.workspace_bytes(one)))


def ffi_lowering(target: str) -> Any:
    """Lowering rule of an FFI target; jax.ffi pins every operand and result to row-major."""
    return jax.ffi.ffi_lowering(target)


class BackendInfo(NamedTuple):
    """One row of ``backends()``."""

    name: str
    available: bool
    reason: str


def backends() -> tuple[BackendInfo, ...]:
    """The implementations of this installation, each with the reason where it cannot be used.

    Returns:
      Rows ``(name, available, reason)``: one per native module ("cpu", "cuda", "metal"), then
      "jax", the blockwise JAX code, which is always there. Whether a device is present is not
      looked at: importing and asking never start one.

    Example:
      >>> import jax_flashtrain
      >>> jax_flashtrain.backends()[-1]
      BackendInfo(name='jax', available=True, reason='')
    """
    rows = []
    for name in native.MODULES:
        loaded = native.load(name)
        rows.append(BackendInfo(name, loaded.module is not None, loaded.reason))
    rows.append(BackendInfo("jax", True, ""))
    return tuple(rows)
