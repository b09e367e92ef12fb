"""Local attention: ``window=(left, right)`` counts the keys beside the query, both ends included.

A scan over layers may mix local and global ones: a side may be a traced number.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jax_flashtrain import flash_attention


def main():
    length = 10
    # Equal scores: every row is the mean of the values it sees, and value j is j.
    q = k = jnp.zeros((1, length, 1, 8))
    v = jnp.broadcast_to(jnp.arange(length, dtype=jnp.float32)[None, :, None, None], q.shape)
    seen = flash_attention(q, k, v, causal=True, window=(2, 0))[0, :, 0, 0]
    want = [np.mean(range(max(0, i - 2), i + 1)) for i in range(length)]
    print("mean of keys i-2 .. i:", seen.round(2))
    np.testing.assert_allclose(seen, want, atol=1e-6)

    x = jax.random.normal(jax.random.key(0), (1, 64, 4, 16))
    lefts = jnp.array([8, 64, 8, 64])  # local, global, local, global

    @jax.jit
    def layers(x):
        def layer(x, left):
            return x + flash_attention(x, x, x, causal=True, window=(left, 0)), None

        return jax.lax.scan(layer, x, lefts)[0]

    y = x
    for left in (8, None, 8, None):
        window = None if left is None else (left, 0)
        y = y + flash_attention(y, y, y, causal=True, window=window)
    error = float(jnp.abs(layers(x) - y).max())
    print(f"one compiled layer for local and global: differs by {error:.1e}")
    assert error < 1e-4


if __name__ == "__main__":
    main()
