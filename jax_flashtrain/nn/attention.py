"""Self-attention layer with grouped key/value heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_flashtrain.nn.attend import Attend, Window, attention_fn
from jax_flashtrain.nn.kv_cache import KVCache
from jax_flashtrain.nn.rope import rotate

Params = dict[str, jax.Array]


def init_attention(
    key: jax.Array,
    dim: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    stddev: float = 0.02,
    out_stddev: float | None = None,
) -> Params:
    """float32 weights: wq ``[dim, Hq, D]``, wk, wv ``[dim, Hkv, D]``, wo ``[Hq, D, dim]``."""
    if heads % kv_heads:
        raise ValueError(f"attention: kv_heads must divide heads, got {heads} and {kv_heads}")
    kq, kk, kv, ko = jax.random.split(key, 4)
    return {
        "wq": stddev * jax.random.normal(kq, (dim, heads, head_dim), jnp.float32),
        "wk": stddev * jax.random.normal(kk, (dim, kv_heads, head_dim), jnp.float32),
        "wv": stddev * jax.random.normal(kv, (dim, kv_heads, head_dim), jnp.float32),
        "wo": (out_stddev or stddev) * jax.random.normal(ko, (heads, head_dim, dim), jnp.float32),
    }


def attention(
    params: Params,
    x: jax.Array,
    *,
    attend: Attend | None = None,
    rope: tuple[jax.Array, jax.Array] | None = None,
    rope_interleaved: bool = False,
    causal: bool = True,
    window: Window | None = None,
    softcap: float | None = None,
    bias: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    cache: KVCache | None = None,
    new: jax.Array | None = None,
) -> tuple[jax.Array, KVCache | None]:
    """``o = attend(x wq, x wk, x wv)``, then ``o wo``; weights are cast to the dtype of ``x``.

    Args:
      params: see `init_attention`; heads and head size are read from the shapes.
      x: ``[*batch, S, dim]``.
      attend: see `attend.attention_fn`; None = flash_attention.
      rope: tables of `rope_tables` for the rows of ``x``, or None.
      rope_interleaved: see `rope.rotate`.
      causal, window, softcap, bias, segment_ids: as in flash_attention.
      cache: keys and values of earlier rows. The new ones are appended, and row i of ``x`` stands
        at position ``length + i``.
      new: int ``[*batch]``, how many rows of ``x`` count (only with a cache); None = all.

    Returns:
      (``[*batch, S, dim]``, the grown cache or None).
    """
    wq, wk, wv, wo = (params[name].astype(x.dtype) for name in ("wq", "wk", "wv", "wo"))
    q = jnp.einsum("...sd,dhk->...shk", x, wq)
    k = jnp.einsum("...sd,dhk->...shk", x, wk)
    v = jnp.einsum("...sd,dhk->...shk", x, wv)
    if rope is not None:
        q = rotate(q, *rope, interleaved=rope_interleaved)
        k = rotate(k, *rope, interleaved=rope_interleaved)
    options: dict = {}
    if cache is not None:
        before, cache = cache.lengths, cache.append(k, v, new=new)
        k, v = cache.keys.astype(x.dtype), cache.values.astype(x.dtype)
        options = {"q_offset": before, "kv_lengths": cache.lengths}
    if segment_ids is not None:
        options["segment_ids"] = segment_ids
    for name, value in (("window", window), ("softcap", softcap), ("bias", bias)):
        if value is not None:
            options[name] = value
    o = (attend or attention_fn())(q, k, v, causal=causal, **options)
    return jnp.einsum("...shk,hkd->...sd", o, wo), cache
