"""A causal self-attention layer as an Equinox module, trained with filter_jit and filter_grad."""

import importlib.util

import jax
import jax.numpy as jnp

from jax_flashtrain import flash_attention


def main():
    if importlib.util.find_spec("equinox") is None:
        print("skipped: pip install equinox")
        return
    import equinox as eqx

    class SelfAttention(eqx.Module):
        project: eqx.nn.Linear
        out: eqx.nn.Linear
        heads: int = eqx.field(static=True)

        def __init__(self, dim, heads, *, key):
            k1, k2 = jax.random.split(key)
            self.project = eqx.nn.Linear(dim, 3 * dim, use_bias=False, key=k1)
            self.out = eqx.nn.Linear(dim, dim, use_bias=False, key=k2)
            self.heads = heads

        def __call__(self, x):  # [seq, dim]: no batch dimension is needed
            q, k, v = (
                part.reshape(x.shape[0], self.heads, -1)
                for part in jnp.split(jax.vmap(self.project)(x), 3, axis=-1)
            )
            return jax.vmap(self.out)(flash_attention(q, k, v, causal=True).reshape(x.shape))

    layer = SelfAttention(32, 4, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (8, 24, 32))
    target = jnp.roll(x, 1, axis=1).at[:, 0].set(0)  # copy the token before

    @eqx.filter_jit
    def step(layer):
        @eqx.filter_value_and_grad
        def loss(layer):
            return jnp.mean(
                (jax.vmap(layer)(x) - target) ** 2
            )  # the batch by vmap: one kernel call

        value, grads = loss(layer)
        return value, eqx.apply_updates(layer, jax.tree.map(lambda g: -3.0 * g, grads))

    first, layer = step(layer)
    for _ in range(50):
        value, layer = step(layer)
    print(f"loss {first:.4f} -> {value:.4f}")
    assert value < first


if __name__ == "__main__":
    main()
