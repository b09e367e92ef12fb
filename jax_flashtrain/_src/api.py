"""The public operator."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from . import batching as _batching  # noqa: F401  (registers rules of the primitives)
from . import lowering as _lowering  # noqa: F401  (likewise)
from . import validation as check
from .autodiff import attend
from .canonical import Arguments, canonicalize
from .primitive import Residual
from .spec import EMPTY_ROW

Window = tuple[int | ArrayLike | None, int | ArrayLike | None]
SegmentIds = ArrayLike | tuple[ArrayLike, ArrayLike]


@overload
def flash_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    causal: bool = False,
    window: Window | None = None,
    q_offset: int | ArrayLike | None = None,
    segment_ids: SegmentIds | None = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool | None = None,
    precision: Literal["default", "high", "highest"] | jax.lax.Precision | None = None,
    layout: Literal["BTNH", "BNTH"] = "BTNH",
    implementation: Literal["native", "jax", "metal"] | None = None,
    autodiff: Literal["vjp", "jvp"] | None = None,
) -> jax.Array: ...


@overload
def flash_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    causal: bool = False,
    window: Window | None = None,
    q_offset: int | ArrayLike | None = None,
    segment_ids: SegmentIds | None = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
    return_lse: Literal[True],
    deterministic: bool | None = None,
    precision: Literal["default", "high", "highest"] | jax.lax.Precision | None = None,
    layout: Literal["BTNH", "BNTH"] = "BTNH",
    implementation: Literal["native", "jax", "metal"] | None = None,
    autodiff: Literal["vjp", "jvp"] | None = None,
) -> tuple[jax.Array, jax.Array]: ...


@check.rejects_foreign_keywords
def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
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
) -> Any:
    r"""Softmax attention by FlashAttention kernels, exact and differentiable, in O(S) memory.

    ::

        s_ij = softcap * tanh(scale * q_i . k_j / softcap) + bias_ij - slope_h * |i + offset - j|
        L_i  = ln(sum_j exp(s_ij) + exp(sink_h))          over the visible j
        o_i  = sum_j exp(s_ij - L_i) * Z_ij * v_j         Z = 1 without dropout

    A pair (i, j) is visible iff causal, window, mask, segments and lengths all allow it. A row that
    sees nothing has o = 0, L = -inf and contributes zero to every gradient.

    Shapes: B batch (any number of leading dimensions, also none), Sq and Sk query and key length,
    Hq and Hkv heads (query head h reads kv head h // G, G = Hq / Hkv), D head size of q and k, Dv
    head size of v and o.

    Args:
      q: queries [B, Sq, Hq, D]; float16, bfloat16, float32 or float64.
      k: keys [B, Sk, Hkv, D], dtype of q; Hkv divides Hq.
      v: values [B, Sk, Hkv, Dv], dtype of q.
      bias: float [B, Hq, Sq, Sk], added to the logits; every dimension 1 or full, leading ones may
        be left out. Differentiable. -inf gives weight 0.
      mask: boolean, shaped like bias, True = may attend.
      causal: hide keys behind the query's position i + offset (bottom-right aligned by default).
      window: (left, right): keys with i + offset - left <= j <= i + offset + right are visible. A
        side is an int >= 0, an integer scalar array (traced or not; negative = unbounded), or
        None = unbounded.
      q_offset: absolute position of query 0; an int, or an integer array [] or [B], traced or not.
        Default Sk - Sq. It moves causal, window and ALiBi only.
      segment_ids: integers [B, S], or a pair ([B, Sq], [B, Sk]); equal ids see each other.
      q_lengths: integers [B] (or a scalar): rows at or beyond are empty. Clamped to [0, Sq].
      kv_lengths: integers [B] (or a scalar): keys at or beyond are hidden. Clamped to [0, Sk].
      alibi_slopes: floats [Hq] or [B, Hq], positive = penalty on distance. Differentiable.
      sinks: floats [Hq], a logit per head without a value. Differentiable.
      scale: a Python number; default 1 / sqrt(D).
      softcap: a Python number > 0; default off.
      dropout_rate: probability of dropping a weight, 0 <= rate < 1; needs dropout_key if > 0.
      dropout_key: a jax.random key. The same key gives the same mask on every backend.
      return_lse: also return L, which is differentiable.
      deterministic: True: gradients bitwise equal from run to run; False: atomics allowed; None:
        deterministic where that costs nothing.
      precision: for float32 inputs: "default" may use TF32 on NVIDIA GPUs, "high" and "highest" are
        full float32; None reads jax_default_matmul_precision.
      layout: "BTNH" as above, or "BNTH": q [B, Hq, Sq, D], k, v and o alike.
      implementation: None: the native kernel where there is one, else blockwise JAX code (with a
        warning once); "native": native or NotImplementedError with the reason; "jax": the
        blockwise code; "metal": the Metal kernels.
      autodiff: None or "vjp": a custom_vjp, for reverse mode of any order; "jvp": also forward mode
        (jvp, linearize, jacfwd, hessian).

    Returns:
      o [B, Sq, Hq, Dv] in the layout and dtype of q; with return_lse=True the pair (o, L), L
      [B, Hq, Sq] in float32 (float64 for float64 inputs), the natural logarithm, in both layouts.

    Raises:
      ValueError: a wrong value or shape.
      TypeError: a wrong type, dtype or keyword.
      NotImplementedError: implementation="native" or "metal" where no kernel serves the call.

    Source: Dao, FlashAttention-2, 2023 (arXiv:2307.08691), section 3.1, algorithms 1 and 2.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flashtrain import flash_attention
      >>> q = jnp.zeros((1, 2, 1, 4))
      >>> v = jnp.arange(8.0).reshape(1, 2, 1, 4)
      >>> flash_attention(q, q, v, causal=True)[0, :, 0]
      Array([[0., 1., 2., 3.],
             [2., 3., 4., 5.]], dtype=float32)
    """
    canonical = canonicalize(
        q,
        k,
        v,
        Arguments(
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
        ),
    )
    residual = attend(canonical.call, canonical.operands)
    return (residual.o, logsumexp(residual)) if canonical.return_lse else residual.o


def logsumexp(residual: Residual) -> jax.Array:
    """L = row_max + row_log_sum, -inf for empty rows. Its cotangent is that of row_log_sum."""
    c = residual.row_log_sum
    lse = jax.lax.stop_gradient(residual.row_max) + c
    return jnp.where(c >= EMPTY_ROW / 2, jnp.asarray(-jnp.inf, c.dtype), lse)
