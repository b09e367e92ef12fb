"""flax, Equinox and Haiku: each layer against the same weights computed without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import check_close, check_equal

from jax_flashtrain.nn import attention, rope_tables
from jax_flashtrain.nn.flax import attention_fn

# The libraries are not ours to clean.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def rows(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


# ---- flax ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("option", ["mask", "bias", "is_causal", "longer keys", "bf16"])
def test_attention_fn_means_what_flax_means(rng, batch, option):
    nnx = pytest.importorskip("flax.nnx")
    keys = 9 if option == "longer keys" else 6
    q, k, v = (
        rows(rng, *batch, 6, 4, 8),
        rows(rng, *batch, keys, 2, 8),
        rows(rng, *batch, keys, 2, 8),
    )
    options = {
        "mask": {
            "mask": jnp.asarray(np.tri(6) + np.eye(6, k=2), jnp.float32)[(None,) * (len(batch) + 1)]
        },
        "bias": {"bias": rows(rng, *[1] * len(batch), 4, 6, 6)},
        "is_causal": {"is_causal": True},
        "longer keys": {"is_causal": True},
        "bf16": {"dtype": jnp.bfloat16},
    }[option]
    got = attention_fn(q, k, v, **options)
    if not batch:  # flax's own road wants a batch dimension
        q, k, v = q[None], k[None], v[None]
        options = {n: x[None] if n in ("mask", "bias") else x for n, x in options.items()}
        got = got[None]
    want = nnx.dot_product_attention(q, k, v, **options)
    assert got.dtype == want.dtype
    check_close(option, got, want, atol=2e-2 if option == "bf16" else 2e-6)


def test_flax_dropout(rng):
    nnx = pytest.importorskip("flax.nnx")
    x = rows(rng, 2, 5, 8)

    def layer(**options):
        return nnx.MultiHeadAttention(
            num_heads=2, in_features=8, dropout_rate=0.5, decode=False, rngs=nnx.Rngs(0),
            attention_fn=attention_fn, **options,
        )  # fmt: skip

    calm = layer(deterministic=True)(x)
    plain = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0))(x)
    check_close("deterministic", calm, plain, atol=1e-6)
    noisy = layer(deterministic=False)
    first, second = noisy(x, rngs=nnx.Rngs(1)), noisy(x, rngs=nnx.Rngs(1))
    check_equal("same key", first, second)
    assert float(jnp.abs(first - calm).max()) > 1e-3
    with pytest.raises(ValueError, match="dropout_rng is required"):
        attention_fn(x[..., None, :], x[..., None, :], x[..., None, :], dropout_rate=0.5)
    storing = layer(deterministic=True)
    with pytest.raises(NotImplementedError, match="never stored"):
        storing(x, sow_weights=True)


# ---- Equinox and Haiku ---------------------------------------------------------------------------

OPTIONS = [{}, {"rope_base": None}, {"window": (2, 0)}, {"softcap": 0.3}, {"causal": False}]


def want_of(weights, x, *, rope_base=10000.0, **options):
    tables = None if rope_base is None else rope_tables(jnp.arange(x.shape[-2]), 6, base=rope_base)
    return attention(weights, x, rope=tables, **options)[0]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equinox_module(rng, options):
    pytest.importorskip("equinox")
    from jax_flashtrain.nn.equinox import SelfAttention

    x = rows(rng, 7, 24)
    layer = SelfAttention(24, heads=4, kv_heads=2, key=jax.random.key(0), **options)
    loud = jax.tree.map(lambda w: 20 * w, layer)
    check_equal("y", loud(x), want_of(loud.weights, x, **options))
    ids = jnp.array([0, 0, 0, 1, 1, 1, 1])
    check_close("segments", loud(x, segment_ids=ids)[:3], loud(x[:3]), atol=1e-5)
    grads = jax.grad(lambda m: jnp.sum(m(x) ** 2))(loud)
    assert all(float(jnp.abs(g).max()) > 1e-4 for g in jax.tree.leaves(grads))
    assert len(jax.tree.leaves(grads)) == 4
    with pytest.raises(ValueError, match="kv_heads must divide heads, got 4 and 3"):
        SelfAttention(24, 4, 3, key=jax.random.key(0))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_haiku_module(rng, options):
    hk = pytest.importorskip("haiku")
    from jax_flashtrain.nn.haiku import SelfAttention

    x, bias = rows(rng, 2, 7, 24), rows(rng, 1, 4, 7, 7)
    model = hk.without_apply_rng(
        hk.transform(lambda x, **more: SelfAttention(4, 2, name="a", **options)(x, **more))
    )
    params = jax.tree.map(lambda w: 20 * w, model.init(jax.random.key(0), x))
    assert {n: w.shape for n, w in params["a"].items()} == {
        "wq": (24, 4, 6), "wk": (24, 2, 6), "wv": (24, 2, 6), "wo": (4, 6, 24)
    }  # fmt: skip
    check_equal("y", model.apply(params, x), want_of(params["a"], x, **options))
    got = model.apply(params, x, bias=bias)
    check_equal("bias", got, want_of(params["a"], x, bias=bias, **options))
    with pytest.raises(ValueError, match="kv_heads must divide heads, got 4 and 3"):
        hk.transform(lambda x: SelfAttention(4, 3)(x)).init(jax.random.key(0), x)
