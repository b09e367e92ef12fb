"""Our causal self-attention as a Haiku module."""

import importlib.util

import jax
import jax.numpy as jnp


def main():
    if importlib.util.find_spec("haiku") is None:
        print("skipped: pip install dm-haiku")
        return
    import haiku as hk

    from jax_flashtrain.nn.haiku import SelfAttention

    model = hk.without_apply_rng(hk.transform(lambda x: SelfAttention(heads=4, kv_heads=2)(x)))
    x = jax.random.normal(jax.random.key(1), (8, 24, 32))
    target = jnp.roll(x, 1, axis=1).at[:, 0].set(0)  # copy the token before
    params = model.init(jax.random.key(0), x)

    @jax.jit
    def step(params):
        value, grads = jax.value_and_grad(lambda p: jnp.mean((model.apply(p, x) - target) ** 2))(
            params
        )
        return value, jax.tree.map(lambda p, g: p - 3.0 * g, params, grads)

    first, params = step(params)
    for _ in range(100):
        value, params = step(params)
    print(f"loss {first:.4f} -> {value:.4f}")
    assert value < first - 0.1


if __name__ == "__main__":
    main()
