"""flax.nnx's MultiHeadAttention through our kernel, by its ``attention_fn``."""

import importlib.util

import jax
import jax.numpy as jnp

from jax_flashtrain.nn.flax import attention_fn


def main():
    if importlib.util.find_spec("flax") is None:
        print("skipped: pip install flax")
        return
    from flax import nnx

    def layer(**options):
        return nnx.MultiHeadAttention(
            num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0), **options
        )

    x = jax.random.normal(jax.random.key(1), (2, 24, 32))
    mask = nnx.make_causal_mask(jnp.ones((2, 24)))
    ours, theirs = layer(attention_fn=attention_fn), layer()

    @nnx.jit
    def loss_and_gradients(model):
        return nnx.value_and_grad(lambda m: jnp.mean(m(x, mask=mask) ** 2))(model)

    (value, grads), (want, want_grads) = loss_and_gradients(ours), loss_and_gradients(theirs)
    errors = jax.tree.map(
        lambda a, b: jnp.abs(a - b).max(), nnx.state(grads), nnx.state(want_grads)
    )
    print(f"loss {value:.6f}, flax's own {want:.6f}")
    print(f"largest difference of a gradient: {max(jax.tree.leaves(errors)):.1e}")
    assert abs(value - want) < 1e-6
    assert max(jax.tree.leaves(errors)) < 1e-6


if __name__ == "__main__":
    main()
