"""``dot_product_attention``: the signature and meaning of ``jax.nn``, on our operator."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .api import flash_attention

Residual = tuple[jax.Array, jax.Array]
_Implementation = Literal["xla", "cudnn", "native", "jax", "metal"]


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: _Implementation | None = None,
    return_residual: Literal[False] = False,
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: _Implementation | None = None,
    return_residual: Literal[True],
) -> Residual: ...


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    implementation: Any = None,
    return_residual: bool = False,
) -> Any:
    """Drop-in for ``jax.nn.dot_product_attention``, on the FlashAttention kernels.

    ::

        o = softmax(scale * query key^T + bias, masked) value

    Shapes as in jax.nn: B batch, T query length, S key length, N query heads, K key/value heads (K
    divides N), H head size. It differs from jax.nn in two places only: a row without a visible key
    gives o = 0 and a residual of -inf (jax.nn: the mean of the values), and NaN in hidden keys and
    values does not leak into the result.

    Args:
      query: [B, T, N, H] or [T, N, H].
      key: [B, S, K, H] or [S, K, H], dtype of query.
      value: shape and dtype of key.
      bias: floats, broadcastable to [B, N, T, S]; differentiable.
      mask: booleans, broadcastable to [B, N, T, S], True = may attend.
      scale: a number; default 1 / sqrt(H).
      is_causal: hide key s from query t where s > t (top-left aligned, as in jax.nn).
      query_seq_lengths: int32 [B]; rows at or beyond are empty.
      key_value_seq_lengths: int32 [B]; keys at or beyond are hidden.
      local_window_size: (left, right) counts around the position t, or one int for both.
      implementation: None, "native", "jax" or "metal": ours, see ``flash_attention``; "xla" and
        "cudnn" pass the call on to jax.nn.
      return_residual: also return the logsumexp of the logits.

    Returns:
      o, shaped like query; with return_residual=True the pair (o, residual): [B, T, N] or [T, N],
      in the dtype of key, without a gradient (as in jax.nn; ``flash_attention`` returns L in
      float32 and differentiable).

    Raises:
      ValueError: a wrong shape, dtype or option.
      NotImplementedError: implementation="native" or "metal" where no kernel serves the call.

    Source: signature and argument checks of jax.nn.dot_product_attention, jax 0.12.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_flashtrain import dot_product_attention
      >>> x = jnp.arange(8.0).reshape(2, 1, 4)
      >>> dot_product_attention(0 * x, 0 * x, x, is_causal=True)[:, 0]
      Array([[0., 1., 2., 3.],
             [2., 3., 4., 5.]], dtype=float32)
    """
    if implementation in ("xla", "cudnn"):
        return _jax_nn(
            query,
            key,
            value,
            bias,
            mask,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            implementation=implementation,
            return_residual=return_residual,
        )
    if implementation not in (None, "native", "jax", "metal"):
        raise ValueError(
            f"dot_product_attention: implementation must be one of None, 'native', 'jax', 'metal', "
            f"'xla', 'cudnn', got {implementation!r}"
        )
    out_shape = jnp.shape(query)
    q, k, v = (_four_dims(x) for x in (query, key, value))
    bias = None if bias is None else _four_dims(bias)
    mask = None if mask is None else _four_dims(mask)
    lengths = [
        None if x is None else jnp.asarray(x) for x in (query_seq_lengths, key_value_seq_lengths)
    ]
    if isinstance(local_window_size, (int, np.integer)):
        local_window_size = (local_window_size, local_window_size)
    _check(q, k, v, bias, mask, lengths)

    o, lse = flash_attention(
        q,
        k,
        v,
        bias=bias,
        mask=mask,
        causal=is_causal,
        window=local_window_size,
        q_offset=0,
        q_lengths=lengths[0],
        kv_lengths=lengths[1],
        scale=scale,
        return_lse=True,
        implementation=implementation,
    )
    o = o.reshape(out_shape)
    if not return_residual:
        return o
    residual = jnp.swapaxes(jax.lax.stop_gradient(lse), -1, -2).astype(k.dtype)
    return o, residual.reshape(out_shape[:-1])


def _four_dims(x: Any) -> Any:
    x = jnp.asarray(x)
    return jnp.expand_dims(x, tuple(range(4 - x.ndim))) if x.ndim < 4 else x


def _check(q: Any, k: Any, v: Any, bias: Any, mask: Any, lengths: list[Any]) -> None:
    """The argument checks of jax.nn, with its argument names."""

    def check(x: Any, shape: list[Any], dtype: Any, name: str) -> None:
        if x is None:
            return
        if x.ndim != len(shape):
            raise ValueError(
                f"dot_product_attention: {name} must have {len(shape)} dimensions, got {x.ndim}"
            )
        if dtype is not None and x.dtype != dtype:
            raise ValueError(
                f"dot_product_attention: {name} must have dtype {dtype}, got {x.dtype}"
            )
        for want, size in zip(shape, x.shape, strict=True):
            if want is not None and want != size:
                text = ", ".join("any" if n is None else str(n) for n in shape)
                raise ValueError(
                    f"dot_product_attention: {name} must have shape [{text}], got {x.shape}"
                )

    check(k, [None] * 4, None, "key")
    batch, length, heads, size = k.shape
    check(v, [batch, length, heads, size], k.dtype, "value")
    check(q, [batch, None, None, size], k.dtype, "query")
    check(mask, [None] * 4, jnp.bool_, "mask")
    check(bias, [None] * 4, None, "bias")
    check(lengths[0], [batch], jnp.int32, "query_seq_lengths")
    check(lengths[1], [batch], jnp.int32, "key_value_seq_lengths")
    if heads == 0 or q.shape[-2] % heads != 0:
        raise ValueError(
            "dot_product_attention: the number of query heads must be a multiple of the number of "
            f"key/value heads, got {q.shape[-2]} and {heads}"
        )
    full = (batch, q.shape[-2], q.shape[1], length)
    for name, x in (("mask", mask), ("bias", bias)):
        if x is not None and any(n not in (1, m) for n, m in zip(x.shape, full, strict=True)):
            raise ValueError(
                f"dot_product_attention: {name} must be broadcastable to {full}, got {x.shape}"
            )


def _jax_nn(query: Any, key: Any, value: Any, bias: Any, mask: Any, **options: Any) -> Any:
    """jax.nn itself; releases that do not know ``return_residual`` get it only when it is asked."""
    if not options["return_residual"]:
        del options["return_residual"]
    return jax.nn.dot_product_attention(query, key, value, bias, mask, **options)
