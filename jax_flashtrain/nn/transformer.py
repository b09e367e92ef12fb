"""Decoder-only transformer: embedding, pre-norm blocks, final norm, head.

Pure functions on a nested dict of float32 arrays. ``dtype`` chooses the arithmetic: the embedding
casts its rows to it and every matrix is cast where it is used; norm weights, statistics, logits and
losses stay float32. Gradients therefore come back in float32 for the float32 master weights.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_flashtrain.nn.attend import Attend
from jax_flashtrain.nn.attention import attention, init_attention
from jax_flashtrain.nn.embedding import embedding
from jax_flashtrain.nn.feed_forward import feed_forward, init_feed_forward
from jax_flashtrain.nn.kv_cache import KVCache
from jax_flashtrain.nn.norms import rms_norm
from jax_flashtrain.nn.rope import LlamaScaling, rope_tables

Params = dict[str, Any]

#: How much of a block's forward is kept for its backward.
REMAT_CHOICES = ("none", "attention", "full")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a model (hashable: a static argument under jit)."""

    vocab_size: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 352
    rope_base: float = 10000.0
    rope_scaling: float | LlamaScaling | None = None
    rope_interleaved: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    norm_eps: float = 1e-6
    tied_head: bool = False


def init_transformer(key: jax.Array, config: TransformerConfig) -> Params:
    """float32 parameters; matrices ~ N(0, 0.02^2), those that end a residual branch smaller by
    ``1 / sqrt(2 layers)``; norm weights 1."""
    out_stddev = 0.02 / math.sqrt(2 * config.layers)
    embed_key, head_key, *layer_keys = jax.random.split(key, 2 + config.layers)

    def block(key: jax.Array) -> Params:
        k1, k2 = jax.random.split(key)
        return {
            "attention_norm": jnp.ones(config.dim, jnp.float32),
            "attention": init_attention(
                k1, config.dim, config.heads, config.kv_heads, config.head_dim,
                out_stddev=out_stddev,
            ),
            "mlp_norm": jnp.ones(config.dim, jnp.float32),
            "mlp": init_feed_forward(k2, config.dim, config.hidden, out_stddev=out_stddev),
        }  # fmt: skip

    params = {
        "embedding": _normal(embed_key, (config.vocab_size, config.dim)),
        "layers": [block(k) for k in layer_keys],
        "norm": jnp.ones(config.dim, jnp.float32),
    }
    if not config.tied_head:
        params["head"] = _normal(head_key, (config.dim, config.vocab_size))
    return params


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return 0.02 * jax.random.normal(key, shape, jnp.float32)


def transformer_block(
    params: Params, x: jax.Array, *, eps: float = 1e-6, **attention_options: Any
) -> tuple[jax.Array, KVCache | None]:
    """``x += attention(norm(x))``, then ``x += mlp(norm(x))``; options as in `attention`."""
    a, cache = attention(
        params["attention"], rms_norm(x, params["attention_norm"], eps=eps), **attention_options
    )
    x = x + a
    return x + feed_forward(params["mlp"], rms_norm(x, params["mlp_norm"], eps=eps)), cache


def checkpointed(block: Any, remat: str) -> Any:
    """``block`` under jax.checkpoint: ``attention`` keeps only the attention's output and row
    statistics (the kernel never runs twice), ``full`` keeps nothing."""
    if remat == "none":
        return block
    if remat == "attention":
        names = jax.checkpoint_policies.save_only_these_names("flashtrain_out", "flashtrain_lse")
        return jax.checkpoint(block, policy=names)
    if remat == "full":
        return jax.checkpoint(block)
    raise ValueError(f"remat must be one of {REMAT_CHOICES}, got {remat!r}")


def transformer_hidden(
    params: Params,
    tokens: jax.Array,
    config: TransformerConfig,
    *,
    attend: Attend | None = None,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    dtype: Any = jnp.float32,
    remat: str = "none",
    scan_layers: bool = False,
    caches: list[KVCache] | None = None,
    new: jax.Array | None = None,
) -> tuple[jax.Array, list[KVCache] | None]:
    """Hidden states after the final norm, ``[*batch, S, dim]``, and the grown caches.

    Args:
      tokens: int ``[*batch, S]``.
      attend: see `attend.attention_fn`.
      segment_ids: int ``[*batch, S]``, documents packed into a row do not see each other.
      positions: int ``[S]`` of the tokens, for RoPE; None = 0 to S - 1. For rows that are laid out
        in another order (``attend`` must know it), without caches.
      dtype: dtype of activations and matrix products.
      remat: one of REMAT_CHOICES, see `checkpointed`.
      scan_layers: one compiled block in a loop (compiles faster) in place of unrolled layers.
      caches: one KVCache per layer; positions continue at their lengths.
      new: int ``[*batch]``, rows that count, with caches only.
    """
    x = embedding(params["embedding"], tokens, dtype=dtype)
    if positions is None:
        positions = jnp.arange(tokens.shape[-1], dtype=jnp.int32)
    if caches is not None:
        positions = caches[0].lengths[..., None] + positions
    tables = rope_tables(
        positions, config.head_dim, base=config.rope_base, scaling=config.rope_scaling
    )

    def block(params: Params, x: jax.Array, cache: KVCache | None = None) -> Any:
        return transformer_block(
            params, x, eps=config.norm_eps, attend=attend, rope=tables,
            rope_interleaved=config.rope_interleaved, window=config.window,
            softcap=config.softcap, segment_ids=segment_ids, cache=cache, new=new,
        )  # fmt: skip

    if caches is not None:
        grown = []
        for layer, cache in zip(params["layers"], caches, strict=True):
            x, cache = block(layer, x, cache)
            grown.append(cache)
        return rms_norm(x, params["norm"], eps=config.norm_eps), grown

    block = checkpointed(block, remat)
    if scan_layers:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])
        x, _ = jax.lax.scan(lambda x, layer: (block(layer, x)[0], None), x, stacked)
    else:
        for layer in params["layers"]:
            x, _ = block(layer, x)
    return rms_norm(x, params["norm"], eps=config.norm_eps), None


def head_weight(params: Params) -> jax.Array:
    """Weight ``[dim, vocab]`` of the output layer."""
    return params["head"] if "head" in params else params["embedding"].T


def transformer(
    params: Params, tokens: jax.Array, config: TransformerConfig, **options: Any
) -> jax.Array:
    """float32 logits ``[*batch, S, vocab]``; options as in `transformer_hidden`."""
    hidden, _ = transformer_hidden(params, tokens, config, **options)
    return logits_of(params, hidden)


def logits_of(params: Params, hidden: jax.Array) -> jax.Array:
    """``hidden @ head`` accumulated and returned in float32."""
    return jnp.dot(
        hidden, head_weight(params).astype(hidden.dtype), preferred_element_type=jnp.float32
    )


def init_caches(
    config: TransformerConfig,
    batch: int | tuple[int, ...],
    max_seq: int,
    dtype: Any = jnp.float32,
) -> list[KVCache]:
    """One empty KVCache per layer."""
    return [
        KVCache.init(batch, max_seq, config.kv_heads, config.head_dim, dtype=dtype)
        for _ in range(config.layers)
    ]
