"""Generating token by token with a key/value cache: one compiled step for every position.

``q_offset`` (where the query stands) and ``kv_lengths`` (how much of the cache is written) are
arrays, so the step is never compiled again; the unwritten rest of the cache may hold anything.
"""

import jax
import jax.numpy as jnp

from jax_flashtrain import flash_attention
from jax_flashtrain.nn import KVCache

BATCH, MAX, HEADS, KV_HEADS, DIM = 2, 32, 4, 2, 16


@jax.jit
def step(cache, q, k, v):
    """One new position per row; ``cache`` grows by one."""
    before = cache.lengths
    cache = cache.append(k, v)
    o = flash_attention(
        q, cache.keys, cache.values, causal=True, q_offset=before, kv_lengths=cache.lengths
    )
    return o, cache


def main():
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (BATCH, 20, HEADS, DIM))
    k = jax.random.normal(keys[1], (BATCH, 20, KV_HEADS, DIM))
    v = jax.random.normal(keys[2], (BATCH, 20, KV_HEADS, DIM))

    cache = KVCache.init(BATCH, MAX, KV_HEADS, DIM)
    outputs = []
    for t in range(20):
        at = slice(t, t + 1)
        o, cache = step(cache, q[:, at], k[:, at], v[:, at])
        outputs.append(o)
    error = float(
        jnp.abs(jnp.concatenate(outputs, 1) - flash_attention(q, k, v, causal=True)).max()
    )
    print(
        f"20 steps, {step._cache_size()} compiled program(s), differ from one call by {error:.1e}"
    )
    assert error < 1e-5
    assert not cache.overflowed.any()


if __name__ == "__main__":
    main()
