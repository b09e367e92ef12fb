"""Sampling from a transformer with a key/value cache and one compiled step per model."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flashtrain.nn.attend import attention_fn
from jax_flashtrain.nn.kv_cache import SHORTEST_PART
from jax_flashtrain.nn.transformer import (
    Params,
    TransformerConfig,
    init_caches,
    logits_of,
    transformer_hidden,
)


def sample(
    key: jax.Array,
    logits: jax.Array,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> jax.Array:
    """One token id per row of ``logits [..., V]``.

    Args:
      key: a jax.random key.
      temperature: divides the logits; 0 takes the most likely token.
      top_k: only the k most likely tokens are drawn.
      top_p: only the most likely tokens whose probabilities (after temperature and top_k) add up
        to at least ``top_p`` are drawn; at least one remains.
    """
    if temperature < 0:
        raise ValueError(f"sample: temperature must not be negative, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"sample: top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"sample: top_p must be in (0, 1], got {top_p}")
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits.astype(jnp.float32) / temperature
    vocab = logits.shape[-1]
    if (top_k is None or top_k >= vocab) and top_p is None:
        return jax.random.categorical(key, logits).astype(jnp.int32)
    # Sorted from the most likely on; ranks decide, so equal logits never let extra tokens in.
    order = jnp.argsort(-logits, axis=-1)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    if top_k is not None:
        ranked = jnp.where(jnp.arange(vocab) < top_k, ranked, -jnp.inf)
    if top_p is not None:
        p = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(p, axis=-1) - p  # probability of everything more likely
        keep = (before < top_p).at[..., 0].set(True)
        ranked = jnp.where(keep, ranked, -jnp.inf)
    rank = jax.random.categorical(key, ranked)
    return jnp.take_along_axis(order, rank[..., None], axis=-1)[..., 0].astype(jnp.int32)


@partial(
    jax.jit,
    static_argnames=("config", "attention", "dtype", "temperature", "top_k", "top_p"),
    donate_argnames=("caches",),
)
def decode_step(
    params: Params,
    caches: list,
    tokens: jax.Array,
    new: jax.Array,
    key: jax.Array,
    *,
    config: TransformerConfig,
    attention: str | None = None,
    dtype: Any = jnp.float32,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> tuple[jax.Array, list]:
    """Feed ``tokens [B, n]`` (the first ``new[b]`` of each row count) and draw the next token.

    Serves the prompt (n = its padded length) and every later step (n = 1): where a row stands is
    read from the caches, so one program serves all positions.

    Returns:
      (next tokens int32 ``[B]``, grown caches).
    """
    hidden, caches = transformer_hidden(
        params, tokens, config, attend=attention_fn(attention), dtype=dtype, caches=caches, new=new
    )
    last = jnp.take_along_axis(hidden, jnp.maximum(new - 1, 0)[:, None, None], axis=1)[:, 0]
    logits = logits_of(params, last)
    return sample(key, logits, temperature=temperature, top_k=top_k, top_p=top_p), caches


def generate(
    params: Params,
    prompt: jax.Array,
    config: TransformerConfig,
    *,
    max_new: int,
    key: jax.Array,
    prompt_lengths: jax.Array | None = None,
    max_seq: int | None = None,
    attention: str | None = None,
    dtype: Any = jnp.float32,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> np.ndarray:
    """Continue prompts by ``max_new`` tokens.

    Args:
      params: see `init_transformer`.
      prompt: int ``[B, n]`` with n >= 1, right-padded when the prompts differ in length.
      config: the model's sizes.
      max_new: tokens to draw per row.
      key: a jax.random key; the same key draws the same tokens.
      prompt_lengths: int ``[B]``, from 1 to n; None = all n.
      max_seq: rows of the cache; None = n + max_new, beyond 256 the next multiple of 256.
      attention: see `attend.attention_fn`.
      dtype: arithmetic and cache.
      temperature, top_k, top_p: see `sample`.

    Returns:
      int32 ``[B, max_new]``, on the host.

    Raises:
      ValueError: an empty prompt, or ``max_seq`` too small.
    """
    prompt = jnp.asarray(prompt)
    if prompt.ndim != 2 or not prompt.shape[1]:
        raise ValueError(f"generate: prompt must be [batch, length >= 1], got {prompt.shape}")
    if max_new < 1:
        raise ValueError(f"generate: max_new must be at least 1, got {max_new}")
    batch, length = prompt.shape
    # The token drawn last is never fed back, so the cache holds one row less than the text.
    if max_seq is None:
        max_seq = length + max_new
        # A long cache whose length is a multiple can be split among the blocks of a GPU.
        if max_seq > SHORTEST_PART:
            max_seq = -(-max_seq // SHORTEST_PART) * SHORTEST_PART
    if length + max_new - 1 > max_seq:
        raise ValueError(
            f"generate: prompt + max_new must fit the cache, got {length} + {max_new} - 1 > "
            f"max_seq {max_seq}"
        )
    new = jnp.full(batch, length, jnp.int32)
    if prompt_lengths is not None:
        given = np.asarray(prompt_lengths)
        if given.shape != (batch,) or given.min() < 1 or given.max() > length:
            raise ValueError(
                f"generate: prompt_lengths must be [{batch}] within 1..{length}, got {given}"
            )
        new = jnp.asarray(given, jnp.int32)
    step = partial(
        decode_step, params, config=config, attention=attention, dtype=jnp.dtype(dtype),
        temperature=temperature, top_k=top_k, top_p=top_p,
    )  # fmt: skip
    caches = init_caches(config, batch, max_seq, dtype)
    one = jnp.ones(batch, jnp.int32)
    drawn = []
    tokens = prompt
    for step_key in jax.random.split(key, max_new):
        last, caches = step(caches, tokens, new, step_key)
        drawn.append(last)
        tokens, new = last[:, None], one
    if bool(caches[0].overflowed.any()):
        raise RuntimeError("generate: the key/value cache overflowed; this is a bug")
    return np.stack([np.asarray(t) for t in drawn], axis=1)
