"""Self-attention as an Equinox module (``pip install equinox``)."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp

from jax_flashtrain.nn.attend import Window
from jax_flashtrain.nn.attention import attention, init_attention
from jax_flashtrain.nn.rope import rope_tables


class SelfAttention(eqx.Module):
    """`attention` with its weights: grouped heads, optional RoPE, window and softcap.

    Args:
      dim: size of a token's vector.
      heads: query heads.
      kv_heads: key and value heads, a divisor of ``heads``; None = ``heads``.
      head_dim: None = ``dim // heads``.
      rope_base: base of the rotary embedding; None = no positions.
      causal, window, softcap: as in flash_attention.
      key: a jax.random key for the weights.

    A call takes ``x [*batch, S, dim]`` (no batch dimension is needed), int ``segment_ids
    [*batch, S]`` and a float ``bias``, and returns an array like ``x``.
    """

    weights: dict[str, jax.Array]
    rope_base: float | None = eqx.field(static=True)
    causal: bool = eqx.field(static=True)
    window: Window | None = eqx.field(static=True)
    softcap: float | None = eqx.field(static=True)

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        rope_base: float | None = 10000.0,
        causal: bool = True,
        window: Window | None = None,
        softcap: float | None = None,
        key: jax.Array,
    ):
        self.weights = init_attention(key, dim, heads, kv_heads or heads, head_dim or dim // heads)
        self.rope_base, self.causal = rope_base, causal
        self.window, self.softcap = window, softcap

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        rope = None
        if self.rope_base is not None:
            head_dim = self.weights["wq"].shape[-1]
            rope = rope_tables(jnp.arange(x.shape[-2]), head_dim, base=self.rope_base)
        y, _ = attention(
            self.weights, x, rope=rope, causal=self.causal, window=self.window,
            softcap=self.softcap, segment_ids=segment_ids, bias=bias,
        )  # fmt: skip
        return y
