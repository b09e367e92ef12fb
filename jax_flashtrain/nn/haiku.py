"""Self-attention as a Haiku module (``pip install dm-haiku``)."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp

from jax_flashtrain.nn.attend import Window
from jax_flashtrain.nn.attention import attention
from jax_flashtrain.nn.rope import rope_tables


class SelfAttention(hk.Module):
    """`attention` with its weights: grouped heads, optional RoPE, window and softcap.

    Args:
      heads: query heads.
      kv_heads: key and value heads, a divisor of ``heads``; None = ``heads``.
      head_dim: None = the size of a token's vector by ``heads``.
      rope_base: base of the rotary embedding; None = no positions.
      causal, window, softcap: as in flash_attention.

    A call takes ``x [*batch, S, dim]`` (no batch dimension is needed), int ``segment_ids
    [*batch, S]`` and a float ``bias``, and returns an array like ``x``. The parameters are those of
    `init_attention`, in float32.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        rope_base: float | None = 10000.0,
        causal: bool = True,
        window: Window | None = None,
        softcap: float | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        if heads % (kv_heads or heads):
            raise ValueError(
                f"SelfAttention: kv_heads must divide heads, got {heads} and {kv_heads}"
            )
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads or heads, head_dim
        self.rope_base, self.causal = rope_base, causal
        self.window, self.softcap = window, softcap

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        dim = x.shape[-1]
        size = self.head_dim or dim // self.heads
        shapes = {
            "wq": (dim, self.heads, size),
            "wk": (dim, self.kv_heads, size),
            "wv": (dim, self.kv_heads, size),
            "wo": (self.heads, size, dim),
        }
        init = hk.initializers.RandomNormal(0.02)
        weights = {
            name: hk.get_parameter(name, shape, jnp.float32, init) for name, shape in shapes.items()
        }
        rope = None
        if self.rope_base is not None:
            rope = rope_tables(jnp.arange(x.shape[-2]), size, base=self.rope_base)
        y, _ = attention(
            weights, x, rope=rope, causal=self.causal, window=self.window,
            softcap=self.softcap, segment_ids=segment_ids, bias=bias,
        )  # fmt: skip
        return y
