"""Norms, embedding, SwiGLU, attention layer and block: values, gradients, dtypes, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from tolerances import check_close, check_equal

from jax_flashtrain.nn import (
    TransformerConfig,
    attention,
    attention_fn,
    embedding,
    feed_forward,
    init_attention,
    init_feed_forward,
    init_transformer,
    layer_norm,
    rms_norm,
    rope_tables,
    swiglu,
    transformer,
    transformer_block,
)

NAMES = ["native", "jax", "xla"]


# ---- Norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (1, 1), (3, 7), (2, 3, 64)])
def test_norms_by_formula(rng, shape):
    x = rng.standard_normal(shape).astype(np.float32) + 2
    w, b = (rng.standard_normal(shape[-1]).astype(np.float32) for _ in range(2))
    x64 = x.astype(np.float64)
    rms = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * w
    centred = x64 - x64.mean(-1, keepdims=True)
    norm = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w
    check_close("rms_norm", rms_norm(jnp.asarray(x), jnp.asarray(w)), rms, atol=2e-6, rtol=2e-6)
    check_close("layer_norm", layer_norm(jnp.asarray(x), jnp.asarray(w)), norm, atol=4e-6)
    got = layer_norm(jnp.asarray(x), jnp.asarray(w), jnp.asarray(b))
    check_close("layer_norm, bias", got, norm + b, atol=4e-6)


def test_norm_gradients(rng):
    x, w, b = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((3, 5), 5, 5))
    check_grads(rms_norm, (x, w), 2, ["rev"], rtol=2e-2, atol=2e-2)
    check_grads(layer_norm, (x, w, b), 2, ["rev"], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_norms_keep_float32_weights_under_bfloat16(rng, norm):
    x = jnp.asarray(300 * rng.standard_normal((64, 32)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal(32), jnp.float32)
    y, pull = jax.vjp(norm, x, w)
    dx, dw = pull(jnp.ones_like(y))
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    # The gradient of the weight is a float32 sum over rows, not a bfloat16 one.
    want = jax.grad(lambda w: norm(x.astype(jnp.float32), w).sum())(w)
    check_close("dw", dw, want, atol=1e-4)


def test_norm_errors():
    with pytest.raises(ValueError, match=r"rms_norm: weight must .* \(4,\), got \(3,\)"):
        rms_norm(jnp.ones((2, 4)), jnp.ones(3))
    with pytest.raises(ValueError, match=r"layer_norm: weight must .* \(4,\), got \(\)"):
        layer_norm(jnp.ones((2, 4)), jnp.ones(()))


# ---- Embedding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int32", "uint32", "uint8", "int8"])
def test_ids_outside_give_nan_rows_and_no_gradient(rng, dtype):
    table = jnp.asarray(rng.standard_normal((5, 3)), jnp.float32)
    bad = {"int32": [-1, 5], "uint32": [2**32 - 1, 5], "uint8": [255, 5], "int8": [-128, 5]}[dtype]
    ids = jnp.asarray(np.array([4, bad[0], 0, bad[1], 4]).astype(dtype))
    rows, pull = jax.vjp(lambda t: embedding(t, ids), table)
    assert np.isnan(rows[np.array([1, 3])]).all()
    check_equal("rows", rows[np.array([0, 2, 4])], table[np.array([4, 0, 4])])
    dy = np.ones((5, 3), np.float32)
    dy[[1, 3]] = np.nan
    want = np.zeros((5, 3))
    want[0], want[4] = 1, 2
    check_equal("gradient", pull(jnp.asarray(dy))[0], want)


def test_repeated_ids_add_up_in_float32():
    """4096 times 1/256 in bfloat16 would stop growing at 2."""
    table = jnp.zeros((3, 2), jnp.bfloat16)
    ids = jnp.ones(4096, jnp.int32)
    grad = jax.grad(lambda t: (embedding(t, ids, dtype=jnp.float32) / 256).sum())(table)
    check_equal("gradient", grad, np.array([[0, 0], [16, 16], [0, 0]]))
    grad = jax.grad(lambda t: (embedding(t, ids) / 256).sum().astype(jnp.float32))(table)
    check_equal("gradient of bf16 rows", grad, np.array([[0, 0], [16, 16], [0, 0]]))


def test_embedding_casts_rows_after_the_gather():
    table = np.linspace(0, 1, 6, dtype=np.float32).reshape(3, 2)  # NumPy is taken too
    got = embedding(table, jnp.array([[2], [0]]), dtype=jnp.bfloat16)
    assert got.shape == (2, 1, 2)
    check_equal("rows", got, table[np.array([[2], [0]])].astype(jnp.bfloat16))


def test_embedding_wants_integers():
    with pytest.raises(TypeError, match="ids must be integers, got float32"):
        embedding(jnp.ones((2, 2)), jnp.ones(2))


# ---- SwiGLU --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)])
def test_feed_forward(rng, shape):
    params = init_feed_forward(jax.random.key(0), 6, 10, stddev=0.5)
    x = rng.standard_normal(shape).astype(np.float32)
    gate, up, down = (np.asarray(params[n], np.float64) for n in ("gate", "up", "down"))
    g = x @ gate
    want = (g / (1 + np.exp(-g)) * (x @ up)) @ down
    check_close("y", feed_forward(params, jnp.asarray(x)), want, atol=1e-5)
    check_grads(
        lambda p, x: feed_forward(p, x), (params, jnp.asarray(x)), 1, ["rev"], rtol=2e-2, atol=2e-2
    )


def test_swiglu_refuses_what_would_broadcast():
    with pytest.raises(ValueError, match=r"got float32\(4,\) and float32\(1,\)"):
        swiglu(jnp.ones(4), jnp.ones(1))


# ---- Attention layer -----------------------------------------------------------------------------


def naive_attention(params, x, bias=None, window=None, softcap=None):
    """Causal GQA layer in float64, one query at a time."""
    p = {name: np.asarray(w, np.float64) for name, w in params.items()}
    x = np.asarray(x, np.float64)
    q, k, v = (np.einsum("sd,dhk->hsk", x, p[name]) for name in ("wq", "wk", "wv"))
    heads, rows, dim = q.shape
    group = heads // k.shape[0]
    o = np.zeros_like(q)
    for h in range(heads):
        for i in range(rows):
            first = 0 if window is None else max(0, i - window[0])
            s = k[h // group, first : i + 1] @ q[h, i] / np.sqrt(dim)
            if softcap:
                s = softcap * np.tanh(s / softcap)
            if bias is not None:
                s = s + bias[h, i, first : i + 1]
            w = np.exp(s - s.max())
            o[h, i] = w @ v[h // group, first : i + 1] / w.sum()
    return np.einsum("hsk,hkd->sd", o, p["wo"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", [None, "bias", "window", "softcap"])
def test_attention_layer_by_formula(rng, name, option):
    if (name, option) == ("xla", "softcap"):
        pytest.skip("jax.nn has no softcap; its refusal is tested below")
    params = init_attention(jax.random.key(1), 12, 4, 2, 6, stddev=0.5)
    x = jnp.asarray(rng.standard_normal((7, 12)), jnp.float32)
    value = {
        "bias": rng.standard_normal((4, 7, 7)).astype(np.float32),
        "window": (2, 0),
        "softcap": 0.5,
    }
    options = {option: value[option]} if option else {}
    # bias travels as a jax array, with the batch dimension that x[None] has
    call = {k: jnp.asarray(v)[None] if k == "bias" else v for k, v in options.items()}
    got, cache = attention(params, x[None], attend=attention_fn(name), **call)
    assert cache is None
    check_close("y", got[0], naive_attention(params, x, **options), atol=5e-6)
    if option:
        assert (
            np.abs(naive_attention(params, x, **options) - naive_attention(params, x)).max() > 0.01
        )


def test_jax_nn_refuses_softcap():
    params = init_attention(jax.random.key(1), 4, 2, 1, 2)
    with pytest.raises(NotImplementedError, match="no softcap"):
        attention(params, jnp.ones((1, 3, 4)), attend=attention_fn("xla"), softcap=1.0)


def test_segments_equal_separate_calls(rng):
    params = init_attention(jax.random.key(2), 8, 2, 1, 4, stddev=0.5)
    x = jnp.asarray(rng.standard_normal((1, 9, 8)), jnp.float32)
    ids = jnp.array([[0] * 4 + [1] * 5])
    for name in NAMES:
        attend = attention_fn(name)
        got, _ = attention(params, x, attend=attend, segment_ids=ids)
        parts = [attention(params, x[:, s], attend=attend)[0] for s in (slice(4), slice(4, 9))]
        check_close(name, got, jnp.concatenate(parts, 1), atol=2e-6)


def test_unknown_attention_name():
    with pytest.raises(ValueError, match=r"name must be one of .* got 'flash'"):
        attention_fn("flash")
    with pytest.raises(ValueError, match="kv_heads must divide heads, got 3 and 2"):
        init_attention(jax.random.key(0), 4, 3, 2, 2)


# ---- Block and whole model -----------------------------------------------------------------------

SMALL = TransformerConfig(
    vocab_size=11, dim=8, layers=2, heads=4, kv_heads=2, head_dim=2, hidden=12, rope_base=500000.0
)


def loud(params, rng):
    """Weights large enough that every part of the model matters."""
    return jax.tree.map(
        lambda p: p + jnp.asarray(0.3 * rng.standard_normal(p.shape), jnp.float32), params
    )


@pytest.mark.parametrize("name", NAMES)
def test_block_gradients(rng, name):
    params = loud(init_transformer(jax.random.key(0), SMALL)["layers"][0], rng)
    x = jnp.asarray(rng.standard_normal((1, 5, 8)), jnp.float32)
    tables = rope_tables(jnp.arange(5), 2)

    def block(params, x):
        return transformer_block(params, x, attend=attention_fn(name), rope=tables)[0]

    check_grads(block, (params, x), 1, ["rev"], rtol=3e-2, atol=3e-2)
    grads = jax.grad(lambda p: jnp.sum(block(p, x) ** 2))(params)
    assert len(jax.tree.leaves(grads)) == 9
    assert all(float(jnp.abs(g).max()) > 1e-3 for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("name", NAMES)
def test_transformer_gradients(rng, name):
    """The whole model, from the token ids to the logits, against finite differences."""
    params = loud(init_transformer(jax.random.key(0), SMALL), rng)
    tokens = jnp.asarray(rng.integers(0, 11, (2, 5)))

    def logits(params):
        return transformer(params, tokens, SMALL, attend=attention_fn(name))

    check_grads(logits, (params,), 1, ["rev"], rtol=3e-2, atol=3e-2)
    for grad in jax.tree.leaves(jax.grad(lambda p: jnp.sum(logits(p) ** 2))(params)):
        assert float(jnp.abs(grad).max()) > 1e-3


@pytest.mark.parametrize(
    "option", [{"scan_layers": True}, {"remat": "attention"}, {"remat": "full"}]
)
def test_ways_to_run_the_layers_agree(rng, option):
    params = loud(init_transformer(jax.random.key(0), SMALL), rng)
    tokens = jnp.asarray(rng.integers(0, 11, (2, 6)))

    def loss(params, **options):
        return jnp.sum(transformer(params, tokens, SMALL, **options) ** 2)

    want = jax.jit(jax.value_and_grad(loss))(params)
    got = jax.jit(jax.value_and_grad(lambda p: loss(p, **option)))(params)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        check_close(str(option), g, w, rtol=1e-4, atol=1e-4)


def test_named_policy_keeps_the_attention(rng):
    """The gradient holds one attention forward per layer with "attention", two with "full"."""
    params = init_transformer(jax.random.key(0), SMALL)
    tokens = jnp.zeros((1, 6), jnp.int32)

    def forwards(remat):
        def loss(p):
            return transformer(
                p, tokens, SMALL, attend=attention_fn("native"), remat=remat
            ).sum()  # fmt: skip

        return jax.jit(jax.grad(loss)).lower(params).compile().as_text().count("flashtrain_fwd")

    assert forwards("attention") == forwards("none") > 0
    assert forwards("full") == 2 * forwards("none")


def test_unknown_remat():
    params = init_transformer(jax.random.key(0), SMALL)
    with pytest.raises(ValueError, match="got 'half'"):
        transformer(params, jnp.zeros((1, 2), jnp.int32), SMALL, remat="half")


def test_mixed_precision(rng):
    """bf16 activations, float32 master weights, gradients and logits."""
    params = loud(init_transformer(jax.random.key(0), SMALL), rng)
    tokens = jnp.asarray(rng.integers(0, 11, (2, 6)))

    def loss(params, dtype):
        logits = transformer(params, tokens, SMALL, dtype=dtype)
        assert logits.dtype == jnp.float32
        return jnp.mean(logits**2)

    grad_fn = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    wide = grad_fn(params, jnp.float32)
    narrow = grad_fn(params, jnp.bfloat16)
    check_close("loss", narrow[0], wide[0], rtol=0.05)
    for n, w in zip(jax.tree.leaves(narrow[1]), jax.tree.leaves(wide[1]), strict=True):
        assert n.dtype == jnp.float32
        check_close("gradient", n, w, atol=0.1 * float(jnp.abs(w).max()) + 1e-3)


def test_tied_head(rng):
    import dataclasses

    config = dataclasses.replace(SMALL, tied_head=True)
    params = init_transformer(jax.random.key(0), config)
    assert "head" not in params
    tokens = jnp.asarray(rng.integers(0, 11, (1, 4)))
    untied = {**params, "head": params["embedding"].T}
    check_equal("logits", transformer(params, tokens, config), transformer(untied, tokens, SMALL))


def test_causal_and_documents(rng):
    """A later token never changes earlier logits; a packed document equals the document alone."""
    params = loud(init_transformer(jax.random.key(0), SMALL), rng)
    tokens = jnp.asarray(rng.integers(0, 11, (1, 8)))
    logits = transformer(params, tokens, SMALL)
    changed = transformer(params, tokens.at[0, 5].add(1) % 11, SMALL)
    check_equal("before", changed[:, :5], logits[:, :5])
    assert float(jnp.abs(changed[:, 5:] - logits[:, 5:]).min()) > 0
    packed = transformer(params, tokens, SMALL, segment_ids=jnp.array([[0, 0, 0, 1, 1, 1, 1, 1]]))
    check_close("document", packed[:, 3:], transformer(params, tokens[:, 3:], SMALL), atol=2e-5)
