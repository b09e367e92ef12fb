"""Attention for flax: the ``attention_fn`` of ``nnx.MultiHeadAttention`` and of linen's.

    nnx.MultiHeadAttention(..., attention_fn=jax_flashtrain.nn.flax.attention_fn)

Needs no flax itself: it is a function with the arguments that flax passes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_flashtrain import flash_attention


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
) -> jax.Array:
    """flax's dot_product_attention through `flash_attention`.

    Args:
      query, key, value: ``[*batch, seq, heads, head_dim]``; converted to ``dtype``, or to their
        common dtype.
      bias: ``[*batch, heads, q, kv]``, dimensions of size 1 broadcast.
      mask: like bias, nonzero = may attend (flax makes masks of 0.0 and 1.0). A row that may attend
        to nothing is 0 here, not the mean of all values.
      broadcast_dropout: not followed: every weight is dropped on its own, in every batch element.
      dropout_rng, dropout_rate, deterministic: weights are dropped unless deterministic.
      precision: as in flash_attention.
      module: flax passes it when attention weights are to be stored; they never exist here.
      is_causal: query i sees keys up to i, also where the lengths differ (flax's alignment).

    Returns:
      ``[*batch, seq, heads, head_dim of value]``.

    Raises:
      NotImplementedError: ``module`` is given.
      ValueError: weights are to be dropped and ``dropout_rng`` is None.
    """
    del broadcast_dropout
    if module is not None:
        raise NotImplementedError(
            "attention_fn: sow_weights must be off, the attention weights are never stored"
        )
    dtype = dtype or jnp.result_type(query, key, value)
    options: dict[str, Any] = {"bias": bias, "precision": precision}
    if mask is not None:
        options["mask"] = mask.astype(bool)
    if is_causal:
        options |= {"causal": True, "q_offset": 0}
    if dropout_rate > 0 and not deterministic:
        if dropout_rng is None:
            raise ValueError("attention_fn: dropout_rng is required with dropout, got None")
        options |= {"dropout_rate": dropout_rate, "dropout_key": dropout_rng}
    return flash_attention(query.astype(dtype), key.astype(dtype), value.astype(dtype), **options)
