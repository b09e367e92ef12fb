"""A penalty on the logsumexp of the attention: ``L`` is an output with a gradient.

Large attention logits make training unstable; adding ``1e-2 * mean(L^2)`` to the loss pulls them
back, without the S x S logits ever existing.
"""

import jax
import jax.numpy as jnp

from jax_flashtrain import flash_attention


def main():
    x = jax.random.normal(jax.random.key(0), (2, 64, 4, 16))
    weight = 6.0 * jnp.eye(16)  # projects to far too large queries

    def penalty(weight):
        _, lse = flash_attention(x @ weight, x, x, causal=True, return_lse=True)
        return jnp.mean(lse**2)  # lse: [batch, heads, queries], natural logarithm

    step = jax.jit(jax.value_and_grad(penalty))
    first, _ = step(weight)
    for _ in range(40):
        value, grad = step(weight)
        weight = weight - 1e-2 * grad
    print(f"mean L^2: {first:.1f} -> {value:.1f}")
    assert value < first / 2


if __name__ == "__main__":
    main()
