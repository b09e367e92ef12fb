"""Our causal self-attention as an Equinox module, trained with filter_jit and filter_grad."""

import importlib.util

import jax
import jax.numpy as jnp


def main():
    if importlib.util.find_spec("equinox") is None:
        print("skipped: pip install equinox")
        return
    import equinox as eqx

    from jax_flashtrain.nn.equinox import SelfAttention

    layer = SelfAttention(32, heads=4, kv_heads=2, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (8, 24, 32))
    target = jnp.roll(x, 1, axis=1).at[:, 0].set(0)  # copy the token before

    @eqx.filter_jit
    def step(layer):
        @eqx.filter_value_and_grad
        def loss(layer):
            return jnp.mean((jax.vmap(layer)(x) - target) ** 2)  # vmap: one kernel call

        value, grads = loss(layer)
        return value, eqx.apply_updates(layer, jax.tree.map(lambda g: -3.0 * g, grads))

    first, layer = step(layer)
    for _ in range(100):
        value, layer = step(layer)
    print(f"loss {first:.4f} -> {value:.4f}")
    assert value < first - 0.1


if __name__ == "__main__":
    main()
