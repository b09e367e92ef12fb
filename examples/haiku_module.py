"""A causal self-attention layer as a Haiku module."""

import importlib.util

import jax
import jax.numpy as jnp

from jax_flashtrain import flash_attention


def main():
    if importlib.util.find_spec("haiku") is None:
        print("skipped: pip install dm-haiku")
        return
    import haiku as hk

    class SelfAttention(hk.Module):
        def __init__(self, heads, name=None):
            super().__init__(name=name)
            self.heads = heads

        def __call__(self, x):  # [batch, seq, dim]
            projected = hk.Linear(3 * x.shape[-1], with_bias=False)(x)
            q, k, v = (
                part.reshape(*x.shape[:2], self.heads, -1)
                for part in jnp.split(projected, 3, axis=-1)
            )
            o = flash_attention(q, k, v, causal=True)
            return hk.Linear(x.shape[-1], with_bias=False)(o.reshape(x.shape))

    model = hk.without_apply_rng(hk.transform(lambda x: SelfAttention(4)(x)))
    x = jax.random.normal(jax.random.key(1), (8, 24, 32))
    target = jnp.roll(x, 1, axis=1).at[:, 0].set(0)  # copy the token before
    params = model.init(jax.random.key(0), x)

    @jax.jit
    def step(params):
        value, grads = jax.value_and_grad(
            lambda p: jnp.mean((model.apply(p, x) - target) ** 2)
        )(params)  # fmt: skip
        return value, jax.tree.map(lambda p, g: p - 3.0 * g, params, grads)

    first, params = step(params)
    for _ in range(50):
        value, params = step(params)
    print(f"loss {first:.4f} -> {value:.4f}")
    assert value < first


if __name__ == "__main__":
    main()
