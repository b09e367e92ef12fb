"""T5's relative position bias, learnt through the attention's gradient of ``bias``.

A table [buckets, heads] gives every (query, key) distance a number per head. The bias has no batch
dimension: its gradient is summed over the batch inside the kernel and has the size of the bias.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_flashtrain import flash_attention

BUCKETS, LARGEST = 32, 128
LEARNING_RATE = 30.0


def buckets(length):
    """T5's causal bucket of every distance i - j: exact up to 16, then logarithmic."""
    distance = np.maximum(np.arange(length)[:, None] - np.arange(length)[None, :], 0)
    exact = BUCKETS // 2
    ratio = np.log(np.maximum(distance, 1) / exact) / math.log(LARGEST / exact)
    far = exact + (ratio * (BUCKETS - exact)).astype(int)
    return np.where(distance < exact, distance, np.minimum(far, BUCKETS - 1))


def attend(table, q, k, v):
    bias = jnp.moveaxis(table[buckets(q.shape[1])], -1, 0)  # [heads, queries, keys]
    return flash_attention(q, k, v, bias=bias, causal=True)


def main():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 96, 4, 32))
    table = jnp.zeros((BUCKETS, 4))
    target = attend(table.at[0].set(2.0), q, k, v)  # something that likes to look at itself

    @jax.jit
    def step(table):
        loss, grad = jax.value_and_grad(
            lambda t: jnp.mean((attend(t, q, k, v) - target) ** 2)
        )(table)  # fmt: skip
        return loss, table - LEARNING_RATE * grad

    first, _ = step(table)
    for _ in range(100):
        loss, table = step(table)
    print(f"loss {first:.2e} -> {loss:.2e}")
    # A softmax only sees differences, so these are what can be learnt.
    print(
        "learnt bias of distance 0 above distance 1:", (table[0] - table[1]).round(2), "sought: 2"
    )
    assert loss < first / 10


if __name__ == "__main__":
    main()
