"""From the user's arguments to one static ``Call`` and a dict of operands.

Operands keep the user's leading dimensions; those with fewer get sizes of 1 in front. Nothing is
copied, transposed or broadcast here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import validation as check
from .autodiff import Call
from .philox import dropout_threshold
from .primitive import Operands
from .problem import Problem, make_problem, trailing_dims
from .spec import AttentionSpec, Operand

_INT32 = np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of ``flash_attention`` behind q, k and v, as the user wrote them."""

    bias: Any = None
    mask: Any = None
    causal: Any = False
    window: Any = None
    q_offset: Any = None
    segment_ids: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    scale: Any = None
    softcap: Any = None
    dropout_rate: Any = 0.0
    dropout_key: Any = None
    return_lse: Any = False
    deterministic: Any = None
    precision: Any = None
    layout: Any = "BTNH"
    implementation: Any = None
    autodiff: Any = None


class Canonical(NamedTuple):
    call: Call
    operands: Operands
    return_lse: bool


def canonicalize(q: Any, k: Any, v: Any, args: Arguments) -> Canonical:
    """Checks every argument and brings it into the form of the primitives."""
    order = check.layout(args.layout)
    causal = check.boolean("causal", args.causal)
    return_lse = check.boolean("return_lse", args.return_lse)
    deterministic = args.deterministic is not None and check.boolean(
        "deterministic", args.deterministic
    )
    implementation = check.choice("implementation", args.implementation, check.IMPLEMENTATIONS)
    autodiff = check.choice("autodiff", args.autodiff, check.AUTODIFF)

    q, k, v = check.array("q", q), check.array("k", k), check.array("v", v)
    check.qkv(q, k, v, order)
    operands: Operands = {Operand.Q: q, Operand.K: k, Operand.V: v}
    problem = make_problem(order, operands)

    rate = check.dropout_rate(args.dropout_rate)
    spec = AttentionSpec(
        scale=_scale(args.scale, problem.D),
        softcap=check.softcap(args.softcap),
        causal=causal,
        window=_window(args.window, operands),
        dropout_rate=rate if _drops(rate) else 0.0,
        deterministic=deterministic,
        precision=check.precision(args.precision, problem.dtype),
        layout=order,
    )
    positional = causal or args.window is not None or args.alibi_slopes is not None
    _q_offset(args.q_offset, positional, problem, operands)
    _segment_ids(args.segment_ids, problem, operands)
    _lengths(args, problem, operands)
    _mask_and_bias(args, problem, operands)
    _slopes_and_sinks(args, problem, operands)
    _dropout(args.dropout_key, rate, problem, operands)

    batch_dims = len(problem.batch)
    operands = {op: lift(op, x, batch_dims) for op, x in operands.items()}
    call = Call(spec, tuple(sorted(operands)), implementation, autodiff)
    return Canonical(call, operands, return_lse)


def lift(op: Operand, x: Any, batch_dims: int) -> Any:
    """Adds the batch dimensions that are missing, of size 1."""
    missing = batch_dims + trailing_dims(op) - x.ndim
    return jnp.expand_dims(x, tuple(range(missing))) if missing else x


def _scale(value: Any, head_size: int) -> float:
    if value is None:
        return 1.0 / math.sqrt(head_size)
    return check.number("scale", value, "multiply q by a traced scale instead")


def _drops(rate: float) -> bool:
    """Whether the 16-bit draws can realise the rate at all."""
    return dropout_threshold(rate) > 0


def _as_int32(x: Any) -> Any:
    """Integers as int32; values outside its range saturate."""
    if x.dtype == jnp.int32:
        return x
    if np.dtype(x.dtype).itemsize >= 4:
        low = None if np.dtype(x.dtype).kind == "u" else _INT32.min
        x = jnp.clip(x, low, _INT32.max)
    return x.astype(jnp.int32)


def _q_offset(value: Any, positional: bool, problem: Problem, operands: Operands) -> None:
    if value is None:
        return
    static = check.static_int(value)
    if static is not None:
        check.int32_value("q_offset", static)
        offset = np.int32(static)
    elif check.is_array(value):
        array = check.array("q_offset", value)
        check.integers("q_offset", array)
        check.per_batch("q_offset", array.shape, problem.batch)
        offset = _as_int32(array)
    else:
        check.type_error(
            f"q_offset must be an int or an integer array, got {check.describe(value)}"
        )
    if positional:  # without causal, window or alibi an offset means nothing
        operands[Operand.Q_OFFSET] = jnp.asarray(offset)


def _window(value: Any, operands: Operands) -> tuple[int | None, int | None]:
    if value is None:
        return None, None
    if not isinstance(value, (tuple, list)):
        check.type_error(
            "window must be a pair (left, right) of counts, None = unbounded, got "
            f"{check.describe(value)}: write (n, 0) for n keys before the query"
        )
    if len(value) != 2:
        check.value_error(f"window must have two sides (left, right), got {len(value)}")
    sides: list[int | None] = []
    for name, op, side in zip(
        ("left", "right"), (Operand.WINDOW_LEFT, Operand.WINDOW_RIGHT), value, strict=True
    ):
        static = check.static_int(side)
        if static is not None and static < 0:
            check.value_error(
                f"window {name} must be >= 0, got {static}: use None for an unbounded side"
            )
        if side is not None and static is None:
            operands[op] = _traced_side(f"window {name}", side)
        sides.append(static if static is None else min(static, int(_INT32.max)))
    return sides[0], sides[1]


def _traced_side(name: str, side: Any) -> Any:
    if not check.is_array(side):
        check.type_error(
            f"{name} must be an int, an integer scalar array or None, got {check.describe(side)}"
        )
    array = check.array(name, side)
    check.integers(name, array)
    if array.ndim:
        check.value_error(f"{name} must be a scalar, got shape {array.shape}")
    return _as_int32(array)


def _segment_ids(value: Any, problem: Problem, operands: Operands) -> None:
    if value is None:
        return
    if isinstance(value, (tuple, list)):
        if len(value) != 2 or not all(check.is_array(x) for x in value):
            check.type_error(
                "segment_ids must be one integer array [*batch, S] or a pair ([*batch, Sq], "
                f"[*batch, Sk]), got {type(value).__name__} of length {len(value)}"
            )
        q_ids, kv_ids = (check.array("segment_ids", x) for x in value)
    else:
        if problem.Sq != problem.Sk:
            check.value_error(
                "segment_ids must be a pair ([*batch, Sq], [*batch, Sk]) where Sq and Sk differ, "
                f"got one array with Sq = {problem.Sq}, Sk = {problem.Sk}"
            )
        q_ids = kv_ids = check.array("segment_ids", value)
    for name, ids, length in (("Sq", q_ids, problem.Sq), ("Sk", kv_ids, problem.Sk)):
        check.integers("segment_ids", ids)
        if ids.ndim == 0 or ids.shape[-1] != length:
            check.value_error(
                f"segment_ids must have {name} = {length} as last dimension, got shape {ids.shape}"
            )
        check.broadcasts("segment_ids", ids.shape, (*problem.batch, length), f"[*batch, {name}]")
    q_ids, kv_ids = _ids_as_int32(q_ids, kv_ids)
    operands[Operand.Q_SEGMENT_IDS], operands[Operand.KV_SEGMENT_IDS] = q_ids, kv_ids


def _ids_as_int32(q_ids: Any, kv_ids: Any) -> tuple[Any, Any]:
    """Ids as int32 such that different ids stay different (only equality matters)."""
    if all(np.dtype(x.dtype).itemsize < 8 for x in (q_ids, kv_ids)):
        return q_ids.astype(jnp.int32), kv_ids.astype(jnp.int32)  # uint32 wraps one to one
    wide = jnp.promote_types(q_ids.dtype, kv_ids.dtype)
    if not jnp.issubdtype(wide, jnp.integer):
        check.type_error(
            f"segment_ids must share an integer type, got {q_ids.dtype} and {kv_ids.dtype}"
        )
    # 64-bit ids: their ranks among all keys' ids are small and equal exactly where the ids are.
    return _rank(q_ids.astype(wide), kv_ids.astype(wide))


def _rank(q_ids: Any, kv_ids: Any) -> tuple[Any, Any]:
    def one(a: Any, b: Any) -> tuple[Any, Any]:
        every = jnp.sort(jnp.concatenate([a, b]))
        return (
            jnp.searchsorted(every, a).astype(jnp.int32),
            jnp.searchsorted(every, b).astype(jnp.int32),
        )

    ranked = jnp.vectorize(one, signature="(m),(n)->(m),(n)")(q_ids, kv_ids)
    return ranked[0], ranked[1]


def _lengths(args: Arguments, problem: Problem, operands: Operands) -> None:
    for name, op, value in (
        ("q_lengths", Operand.Q_LENGTHS, args.q_lengths),
        ("kv_lengths", Operand.KV_LENGTHS, args.kv_lengths),
    ):
        if value is None:
            continue
        if not check.is_array(value) and check.static_int(value) is None:
            check.type_error(f"{name} must be an integer array, got {check.describe(value)}")
        array = check.array(name, value)
        check.integers(name, array)
        check.per_batch(name, array.shape, problem.batch)
        operands[op] = _as_int32(array)  # the kernels clamp to [0, S]


def _mask_and_bias(args: Arguments, problem: Problem, operands: Operands) -> None:
    full = (*problem.batch, problem.Hq, problem.Sq, problem.Sk)
    legend = "[*batch, Hq, Sq, Sk]"
    if args.mask is not None:
        mask = check.array("mask", args.mask)
        if mask.dtype != jnp.bool_:
            check.type_error(
                f"mask must be boolean (True = may attend), got dtype {mask.dtype}: an additive "
                "mask goes to bias="
            )
        check.broadcasts("mask", mask.shape, full, legend)
        operands[Operand.MASK] = _lift_to(mask, 3)
    if args.bias is not None:
        bias = check.array("bias", args.bias)
        hint = ": a boolean mask goes to mask=" if bias.dtype == jnp.bool_ else ""
        check.floats("bias", bias, hint)
        check.broadcasts("bias", bias.shape, full, legend)
        operands[Operand.BIAS] = _lift_to(bias, 3)


def _lift_to(x: Any, ndim: int) -> Any:
    missing = ndim - x.ndim
    return jnp.expand_dims(x, tuple(range(missing))) if missing > 0 else x


def _slopes_and_sinks(args: Arguments, problem: Problem, operands: Operands) -> None:
    """Cast to the accumulator type outside the op: their gradients come back in their own dtype."""
    for name, op, value, batch in (
        ("alibi_slopes", Operand.ALIBI_SLOPES, args.alibi_slopes, problem.batch),
        ("sinks", Operand.SINKS, args.sinks, ()),
    ):
        if value is None:
            continue
        array = check.array(name, value)
        check.floats(name, array)
        legend = "[*batch, Hq]" if batch else "[Hq]"
        if array.ndim == 0 or array.shape[-1] != problem.Hq:
            check.value_error(
                f"{name} must be {legend} with Hq = {problem.Hq}, got shape {array.shape}"
            )
        check.broadcasts(name, array.shape, (*batch, problem.Hq), legend)
        operands[op] = array.astype(problem.accumulator)


def _dropout(key: Any, rate: float, problem: Problem, operands: Operands) -> None:
    if rate > 0 and key is None:
        check.value_error(f"dropout_key must be given where dropout_rate > 0, got None ({rate = })")
    if key is None:
        return
    if not check.is_array(key):
        check.type_error(
            f"dropout_key must be a jax.random key, got {check.describe(key)}: use jax.random.key"
        )
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed and key.dtype != jnp.uint32:
        check.type_error(f"dropout_key must be a jax.random key, got an array of dtype {key.dtype}")
    if key.ndim != (0 if typed else 1):
        check.value_error(
            f"dropout_key must be one key, got shape {key.shape}: split it outside, or vmap"
        )
    if _drops(rate):
        operands[Operand.DROPOUT_SEED] = jax.random.bits(key, (2,), jnp.uint32)
        operands[Operand.DROPOUT_ORIGIN] = dropout_origin((*problem.batch, problem.Hq))


def dropout_origin(shape: Sequence[Any]) -> Any:
    """u32 [*batch, Hq, 3]: (0, 0, b * Hq + h), the counters of this call as the user wrote it."""
    size = math.prod(shape)
    flat = jnp.arange(size, dtype=jnp.uint32).reshape(shape)
    zero = jnp.zeros_like(flat)
    return jnp.stack([zero, zero, flat], axis=-1)
