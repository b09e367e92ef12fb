"""Attention of a few rows over many keys, as in decoding: one call, the keys split among its rows.

A kernel gives each block of the device one head's rows and lets it walk all keys. With one row per
head that leaves most of a GPU idle, and every query head of a group reads the same keys again. So

* the keys are split, a part being one more batch element, and the results are merged by their L:
  o = sum_k e^(L_k - L) o_k,  L = ln sum_k e^(L_k);
* a single row's query heads of one group become the rows of one head (they see the same keys).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_flashtrain import flash_attention
from jax_flashtrain.nn.kv_cache import SHORTEST_PART

#: Rows up to which the keys are split.
MAX_ROWS = 16
#: Heads times parts that keep a large GPU busy. On an H200, with one sequence of 32768 keys, twice
#: as many took 17 % longer (docs/tuning-hopper.md).
BUSY = 128


def number_of_parts(heads: int, keys: int) -> int:
    """How many equal parts ``keys`` rows are split into; ``heads`` counts the batch too."""
    most = min(-(-BUSY // max(heads, 1)), keys // SHORTEST_PART)
    return next((n for n in range(most, 1, -1) if keys % n == 0), 1)


def few_rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_offset: jax.Array,
    kv_lengths: jax.Array,
    causal: bool = False,
    window: Any = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """flash_attention with these arguments, ``q [*batch, rows, Hq, D]``, up to rounding."""
    batch, (rows, heads, dim) = q.shape[:-3], q.shape[-3:]
    keys, kv_heads = k.shape[-3:-1]
    parts = number_of_parts(math.prod(batch) * kv_heads, keys)
    options: dict[str, Any] = {"softcap": softcap, "implementation": implementation}
    offset = jnp.broadcast_to(jnp.asarray(q_offset, jnp.int32), batch)
    lengths = jnp.broadcast_to(jnp.asarray(kv_lengths, jnp.int32), batch)
    first = jnp.arange(parts, dtype=jnp.int32) * (keys // parts)
    folded = rows == 1 and window is None
    if folded:
        if causal:
            lengths = jnp.minimum(lengths, offset + 1)
        q = jnp.swapaxes(q.reshape(*batch, kv_heads, heads // kv_heads, dim), -3, -2)
    else:
        options |= {"causal": causal, "window": window, "q_offset": offset[..., None] - first}

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(*batch, parts, keys // parts, *x.shape[-2:])

    o, lse = flash_attention(
        jnp.broadcast_to(q[..., None, :, :, :], (*batch, parts, *q.shape[-3:])), split(k), split(v),
        kv_lengths=jnp.clip(lengths[..., None] - first, 0, keys // parts), return_lse=True,
        **options,
    )  # fmt: skip
    o = _merged(o, lse) if parts > 1 else o[..., 0, :, :, :]
    if folded:
        o = jnp.swapaxes(o, -3, -2).reshape(*batch, 1, heads, o.shape[-1])
    return o


def _merged(o: jax.Array, lse: jax.Array) -> jax.Array:
    """``o [*batch, parts, rows, heads, D]`` with weights softmax(L) over the parts; 0 where every
    part is empty."""
    top = jnp.max(lse, axis=-3, keepdims=True)
    share = jnp.exp(lse - jnp.where(jnp.isneginf(top), 0.0, top))
    total = jnp.sum(share, axis=-3, keepdims=True)
    weight = jnp.swapaxes(share / jnp.where(total > 0, total, 1.0), -1, -2)[..., None]
    return jnp.sum(weight * o, axis=-4).astype(o.dtype)
