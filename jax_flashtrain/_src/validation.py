"""Checks of the arguments, while tracing: the one home of their texts.

Every text reads ``flash_attention: <argument> <what is required>, got <what came>``. A wrong value
is a ValueError, a wrong type or dtype a TypeError.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .spec import Layout, Precision

DTYPES = ("float16", "bfloat16", "float32", "float64")
LAYOUTS = {Layout.BTNH: "[..., seq, heads, head_dim]", Layout.BNTH: "[..., heads, seq, head_dim]"}
IMPLEMENTATIONS = (None, "native", "jax", "metal")
AUTODIFF = (None, "vjp", "jvp")

_INT32 = np.iinfo(np.int32)

#: Keywords of other libraries and our name for the same thing.
_FOREIGN = {
    "query": "q",
    "key": "k",
    "value": "v",
    "is_causal": "causal",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "logits_scale": "scale",
    "window_size": "window",
    "local_window_size": "window",
    "sliding_window": "window",
    "sliding_window_size": "window",
    "attn_mask": "mask",
    "attention_mask": "mask",
    "attn_bias": "bias",
    "attention_bias": "bias",
    "ab": "bias",
    "return_residual": "return_lse",
    "return_residuals": "return_lse",
    "return_softmax_lse": "return_lse",
    "return_attn_probs": "return_lse",
    "return_logsumexp": "return_lse",
    "logits_soft_cap": "softcap",
    "attn_logits_soft_cap": "softcap",
    "soft_cap": "softcap",
    "logit_cap": "softcap",
    "dropout_p": "dropout_rate",
    "dropout": "dropout_rate",
    "dropout_rng": "dropout_key",
    "dropout_seed": "dropout_key",
    "rng": "dropout_key",
    "query_seq_lengths": "q_lengths",
    "q_seqlen": "q_lengths",
    "key_value_seq_lengths": "kv_lengths",
    "kv_seqlen": "kv_lengths",
    "cache_seqlens": "kv_lengths",
    "q_segment_ids": "segment_ids",
    "kv_segment_ids": "segment_ids",
    "cu_seqlens": "segment_ids",
    "cu_seqlens_q": "segment_ids",
    "slopes": "alibi_slopes",
    "s_aux": "sinks",
    "sink": "sinks",
    "head_first": "layout",
    "impl": "implementation",
    "backend": "implementation",
    "query_offset": "q_offset",
}

P = ParamSpec("P")
R = TypeVar("R")


def value_error(text: str) -> NoReturn:
    raise ValueError(f"flash_attention: {text}")


def type_error(text: str) -> NoReturn:
    raise TypeError(f"flash_attention: {text}")


def rejects_foreign_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Answers an unknown keyword with the name it probably means."""
    names = [
        name
        for name, p in inspect.signature(function).parameters.items()
        if p.kind is not inspect.Parameter.VAR_KEYWORD
    ]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for keyword in kwargs:
            if keyword not in names:
                raise TypeError(_unknown_keyword(function.__name__, keyword, names))
        return function(*args, **kwargs)

    return checked


def _unknown_keyword(function: str, keyword: str, names: Sequence[str]) -> str:
    text = f"{function}: unknown keyword argument {keyword!r}"
    close = _FOREIGN.get(keyword) or next(iter(difflib.get_close_matches(keyword, names, 1)), None)
    if close in names:
        hint = " (see segment_ids_from_cu_seqlens)" if keyword.startswith("cu_seqlens") else ""
        return f"{text}, did you mean {close!r}?{hint}"
    return f"{text}, valid ones are {', '.join(names)}"


# ---- scalars -----------------------------------------------------------------------------------


def is_array(x: object) -> bool:
    """Arrays and tracers of any kind, but no Python or numpy scalars."""
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, np.generic)


def boolean(name: str, value: object) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    type_error(f"{name} must be True or False, known while tracing, got {describe(value)}")


def choice(name: str, value: object, valid: Sequence[str | None]) -> Any:
    if value is None or isinstance(value, str):
        if value in valid:
            return value
        options = ", ".join(repr(option) for option in valid)
        value_error(f"{name} must be one of {options}, got {value!r}")
    type_error(f"{name} must be a string or None, got {describe(value)}")


def layout(value: object) -> Layout:
    return Layout[str(choice("layout", value, [member.name for member in Layout]))]


def number(name: str, value: object, traced_hint: str) -> float:
    """A finite Python number, known while tracing."""
    if is_array(value) and not (isinstance(value, np.ndarray) and value.ndim == 0):
        type_error(
            f"{name} must be a Python number, known while tracing, got {describe(value)}: "
            f"{traced_hint}"
        )
    if isinstance(value, np.ndarray):
        value = value.item()
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (numbers.Real, np.floating)):
        type_error(f"{name} must be a Python number, got {describe(value)}")
    result = float(value)
    if not math.isfinite(result):
        value_error(f"{name} must be finite, got {result}")
    return result


def softcap(value: object) -> float | None:
    if value is None:
        return None
    cap = number("softcap", value, "it is a static choice (None = off)")
    if cap <= 0:
        value_error(f"softcap must be > 0 (None = off), got {cap}")
    return cap


def dropout_rate(value: object) -> float:
    rate = number("dropout_rate", value, "it is a static choice")
    if not 0.0 <= rate < 1.0:
        value_error(f"dropout_rate must be in 0 <= rate < 1, got {rate}")
    return rate


def static_int(value: object) -> int | None:
    """The value of a Python or numpy integer (also a 0-d numpy array), else None."""
    if isinstance(value, (bool, np.bool_)):
        return None
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iu":
        return int(value)
    return None


def int32_value(name: str, value: int) -> int:
    if not _INT32.min <= value <= _INT32.max:
        value_error(f"{name} must fit int32, got {value}")
    return value


def describe(value: object) -> str:
    """A short account of what came: ``float32[2,3]`` for arrays."""
    if isinstance(value, jax.core.Tracer) and not isinstance(value, np.generic):
        return f"a traced {_array_text(value)}"
    if is_array(value):
        return f"an array {_array_text(value)}"
    return f"{value!r} ({type(value).__name__})"


def _array_text(x: Any) -> str:
    return f"{x.dtype}[{','.join(str(n) for n in x.shape)}]"


# Everything that jax_default_matmul_precision may hold and that asks for more than the default; the
# presets name an algorithm. Single-pass bfloat16 and TF32 settings are DEFAULT.
_PRECISION_SETTINGS = {
    "high": Precision.HIGH,
    "bfloat16_3x": Precision.HIGH,
    "TF32_TF32_F32_X3": Precision.HIGH,
    "BF16_BF16_F32_X3": Precision.HIGH,
    "highest": Precision.HIGHEST,
    "float32": Precision.HIGHEST,
    "BF16_BF16_F32_X6": Precision.HIGHEST,
    "BF16_BF16_F32_X9": Precision.HIGHEST,
    "F32_F32_F32": Precision.HIGHEST,
    "F64_F64_F64": Precision.HIGHEST,
}


def precision(value: object, dtype: Any) -> Precision:
    """The precision of float32 products; other dtypes have one meaning only."""
    if value is None:
        setting = str(jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]
        resolved = _PRECISION_SETTINGS.get(setting, Precision.DEFAULT)
    elif isinstance(value, jax.lax.Precision):
        resolved = Precision[value.name]
    else:
        resolved = Precision[
            str(choice("precision", value, ("default", "high", "highest"))).upper()
        ]
    return resolved if np.dtype(dtype) == np.float32 else Precision.DEFAULT


# ---- arrays ------------------------------------------------------------------------------------


def array(name: str, value: object) -> Any:
    """An array of any kind as a jax array (or tracer)."""
    if isinstance(value, (str, bytes, dict)) or value is None:
        type_error(f"{name} must be an array, got {describe(value)}")
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"flash_attention: {name} must be an array, got {describe(value)}"
        ) from error


def qkv(q: Any, k: Any, v: Any, order: Layout) -> None:
    """Ranks, dtypes, sizes and head counts of q, k and v."""
    legend = LAYOUTS[order]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 3:
            value_error(
                f"{name} must have at least 3 dimensions {legend} (layout={order.name!r}), got "
                f"shape {x.shape}"
            )
        if x.ndim != q.ndim:
            value_error(
                f"{name} must have as many dimensions as q, got q {q.shape} and {name} {x.shape}"
            )
    dtypes = [np.dtype(x.dtype).name for x in (q, k, v)]
    if len(set(dtypes)) > 1 or dtypes[0] not in DTYPES:
        type_error(
            f"q, k and v must share one dtype of {', '.join(DTYPES)}, got q {dtypes[0]}, k "
            f"{dtypes[1]}, v {dtypes[2]}"
        )
    seq, head = (-3, -2) if order == Layout.BTNH else (-2, -3)
    for name, x in (("k", k), ("v", v)):
        if x.shape[:-3] != q.shape[:-3]:
            value_error(
                f"{name} must have the leading (batch) dimensions of q, got q {q.shape} and {name} "
                f"{x.shape}"
            )
    if v.shape[seq] != k.shape[seq] or v.shape[head] != k.shape[head]:
        value_error(
            f"v must have the sequence length and the heads of k {legend}, got k {k.shape} and v "
            f"{v.shape}"
        )
    if q.shape[-1] != k.shape[-1]:
        value_error(f"k must have the head size of q, got q {q.shape[-1]} and k {k.shape[-1]}")
    for name, size in (
        ("the heads of q", q.shape[head]),
        ("the heads of k and v", k.shape[head]),
        ("the head size of q and k", q.shape[-1]),
        ("the head size of v", v.shape[-1]),
    ):
        if size == 0:
            value_error(f"{name} must be at least 1, got 0 in shapes q {q.shape}, v {v.shape}")
    if q.shape[head] % k.shape[head] != 0:
        value_error(
            f"the heads of q must be a multiple of the heads of k and v (layout={order.name!r}: "
            f"{legend}), got {q.shape[head]} and {k.shape[head]}"
        )


def integers(name: str, x: Any) -> None:
    if np.dtype(x.dtype).kind not in "iu":
        type_error(f"{name} must hold integers, got dtype {x.dtype}")


def floats(name: str, x: Any, hint: str = "") -> None:
    if np.dtype(x.dtype).name not in DTYPES:
        type_error(f"{name} must be one of {', '.join(DTYPES)}, got dtype {x.dtype}{hint}")


def broadcasts(name: str, shape: Sequence[Any], full: Sequence[Any], legend: str) -> None:
    """Right-aligned, every dimension 1 or full."""
    fits = len(shape) <= len(full) and all(
        n == 1 or n == m for n, m in zip(reversed(shape), reversed(full), strict=False)
    )
    if not fits:
        value_error(
            f"{name} must be {legend} = {_shape(full)} with every dimension 1 or full (leading "
            f"ones may be left out), got shape {_shape(shape)}"
        )


def per_batch(name: str, shape: Sequence[Any], batch: Sequence[Any]) -> None:
    """Shape [] or the batch shape."""
    if len(shape) > len(batch) or any(
        n not in (1, m) for n, m in zip(reversed(shape), reversed(batch), strict=False)
    ):
        value_error(
            f"{name} must be a scalar or have the batch shape {_shape(batch)}, got shape "
            f"{_shape(shape)}"
        )


def _shape(shape: Sequence[Any]) -> str:
    return f"[{', '.join(str(n) for n in shape)}]"
