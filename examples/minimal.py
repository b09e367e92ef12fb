"""Attention inside a jitted loss, with its gradients: the smallest complete use."""

import jax
import jax.numpy as jnp

from jax_flashtrain import explain, flash_attention


@jax.jit
def loss_and_gradients(q, k, v):
    def loss(q, k, v):
        return jnp.mean(flash_attention(q, k, v, causal=True) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)


def main():
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, 128, 8, 64))  # [batch, seq, heads, head_dim]
    k = jax.random.normal(keys[1], (2, 128, 2, 64))  # two key/value heads: four queries share one
    v = jax.random.normal(keys[2], (2, 128, 2, 64))
    print("runs on:", explain(q, k, v, causal=True))
    value, (dq, dk, dv) = loss_and_gradients(q, k, v)
    print(f"loss {value:.5f}; gradients {dq.shape}, {dk.shape}, {dv.shape}")

    want = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    error = jnp.abs(flash_attention(q, k, v, causal=True) - want).max()
    print(f"largest difference from jax.nn.dot_product_attention: {error:.1e}")
    assert error < 1e-5


if __name__ == "__main__":
    main()
