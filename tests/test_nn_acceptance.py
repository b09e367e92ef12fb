"""Every case of reference systems B and C that is about more than the attention operator.

The data is reference_cases.json (B's attention parity cases run in test_acceptance.py). Each case
runs with its own inputs, expected values and tolerance; where the file says that a case is weak,
the stronger one that it proposes runs as well. ``test_every_case_has_a_test`` keeps the list whole.
"""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.test_util import check_grads
from tolerances import Mismatch, check_close, check_equal

from jax_flashtrain import flash_attention
from jax_flashtrain.nn import (
    KVCache,
    TransformerConfig,
    attention,
    attention_fn,
    attention_from_out_in,
    cross_entropy,
    embedding,
    feed_forward,
    init_transformer,
    params_from_out_in,
    rms_norm,
    rope,
    rope_tables,
    rotate,
    swiglu,
    transformer,
    transformer_block,
)

DATA = json.loads(Path(__file__).with_name("reference_cases.json").read_text())
ALL = DATA["cases"] + DATA["derived_from_code"]
MINE = [
    case
    for case in ALL
    if "reference system A" not in case["document"] and "Sq" not in case.get("shapes", {})
]
TESTED = set()
NAMES = ["native", "jax", "xla"]


def case(name: str) -> dict:
    TESTED.add(name)
    (found,) = [c for c in MINE if c["name"] == name]
    return found


def covers(*names):
    """Marks a test as the one for these cases (read when the module is imported)."""
    for name in names:
        case(name)
    return lambda test: test


def f32(values) -> jax.Array:
    return jnp.asarray(values, jnp.float32)


def expected(name: str, key: str, shape) -> np.ndarray:
    return np.array(case(name)["reference_f64"][key]).reshape(shape)


def central_difference(f, x, step):
    """Of the scalar function f, in float64 inputs rounded to float32 by f itself."""
    grad = np.zeros(x.shape)
    for i in np.ndindex(x.shape):
        up, down = (np.array(x, np.float64) for _ in range(2))
        up[i] += step
        down[i] -= step
        grad[i] = (float(f(f32(up))) - float(f(f32(down)))) / (2 * step)
    return grad


def rejects_zeros(want, atol):
    """The tolerance is strong enough: an all-zero answer would fail."""
    with pytest.raises(Mismatch):
        check_close("zeros", np.zeros_like(want), want, atol=atol)


# ---- System C: embedding, norm, SwiGLU -----------------------------------------------------------


@covers("embedding_lookup")
def test_embedding_lookup():
    got = embedding(jnp.eye(4)[:3], np.array([2, 0, 1], np.uint32))
    check_equal("rows", got, np.eye(4)[[2, 0, 1]])


@covers("embedding_backward_scatter_add")
@pytest.mark.parametrize(
    ("ids", "want"),
    [
        ([1, 0, 2], [[0.3, 0.4], [0.1, 0.2], [0.5, 0.6]]),
        ([1, 0, 1], [[0.3, 0.4], [0.6, 0.8], [0, 0]]),
    ],
)
def test_embedding_backward_scatter_add(ids, want):
    table = f32([[1, 2], [3, 4], [5, 6]])
    rows, pull = jax.vjp(embedding, table, jnp.array(ids))
    check_equal("rows", rows, np.asarray(table)[ids])
    dtable, dids = pull(f32([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]))
    check_close("dtable", dtable, want, atol=1e-6)
    assert dids.dtype == jax.dtypes.float0


@covers("embedding ids")
@pytest.mark.parametrize("bad", [-1, 3])
def test_embedding_ids_outside(bad):
    table = f32([[1, 2], [3, 4], [5, 6]])
    rows, pull = jax.vjp(lambda t: embedding(t, jnp.array([0, bad])), table)
    assert np.isnan(rows[1]).all()
    check_equal("dtable", pull(jnp.ones((2, 2)))[0], [[1, 1], [0, 0], [0, 0]])


@covers("rmsnorm_unit_weight", "rmsnorm_batched")
def test_rmsnorm():
    got = rms_norm(f32([1, 2, 3, 4]), jnp.ones(4), eps=1e-6)
    check_close("rank 1", got, expected("rmsnorm_unit_weight", "y", 4), atol=1e-6)
    got = rms_norm(f32([[3, 4, 0], [1, 1, 1]]), jnp.ones(3), eps=1e-6)
    check_close("batched", got, expected("rmsnorm_batched", "y", (2, 3)), atol=1e-5)


@covers("rmsnorm_backward_gradient_check")
def test_rmsnorm_backward():
    name = "rmsnorm_backward_gradient_check"
    x, w = f32([[1, 2, 3, 4], [0.5, -1, 2, -0.5]]), f32([1.5, 0.5, 2, 1])
    dx, dw = jax.grad(lambda x, w: rms_norm(x, w, eps=1e-6).sum(), (0, 1))(x, w)
    check_close("dx", dx, expected(name, "dx", (2, 4)), atol=2e-6)
    check_close("dweight", dw, expected(name, "dweight (derived)", 4), atol=5e-6)
    slope = central_difference(lambda x: rms_norm(x, w, eps=1e-6).sum(), x, 1e-3)
    check_close("difference quotient", dx, slope, atol=0.01)
    rejects_zeros(slope, 0.01)


@covers("swiglu_fused_activation")
def test_swiglu_activation():
    got = swiglu(f32([0, 1, -1, 2]), jnp.ones(4))
    check_close("y", got, expected("swiglu_fused_activation", "y", 4), atol=1e-6)


@covers("swiglu_layer_identity_like")
def test_swiglu_zero_weights():
    zeros = {"gate": jnp.zeros((4, 8)), "up": jnp.zeros((4, 8)), "down": jnp.zeros((8, 4))}
    check_equal("y", feed_forward(zeros, f32([[1, 2, 3, 4]])), np.zeros((1, 4)))


def ramp(shape, factor, shift, modulus, offset):
    i = np.arange(math.prod(shape))
    return f32(((factor * i + shift) % modulus * 0.1 - offset).reshape(shape))


@covers("swiglu_backward_gradient_check")
def test_swiglu_backward():
    name = "swiglu_backward_gradient_check"
    params = {
        "gate": ramp((4, 3), 7, 3, 11, 0.5).T,
        "up": ramp((4, 3), 11, 5, 13, 0.6).T,
        "down": ramp((3, 4), 13, 7, 11, 0.5).T,
    }
    x = f32([[0.5, -0.3, 0.8], [1, 0.2, -0.5]])
    dx = jax.grad(lambda x: feed_forward(params, x).sum())(x)
    want = expected(name, "dx", (2, 3))
    check_close("dx", dx, want, atol=1e-6)
    rejects_zeros(want, 1e-3)
    slope = central_difference(lambda x: feed_forward(params, x).sum(), x, 1e-3)
    check_close("difference quotient", dx, slope, atol=5e-3)
    check_grads(feed_forward, (params, x), 1, ["rev"], rtol=2e-2, atol=2e-3)


# ---- System C: RoPE ------------------------------------------------------------------------------


@covers("rope_identity_at_pos_zero")
def test_rope_identity_at_zero():
    x = f32([1, 2, 3, 4]).reshape(1, 1, 4)
    for interleaved in (False, True):
        check_equal("y", rope(x, 0, max_positions=32, interleaved=interleaved), x)


@covers("rope_rotation_at_pos_nonzero")
def test_rope_rotation():
    got = rope(f32([1, 0, 0, 0]).reshape(1, 1, 4), 5, max_positions=32)
    check_close("y", got.ravel()[0], math.cos(5), atol=1e-6)
    check_close("y", got.ravel()[2], math.sin(5), atol=1e-6)
    # Stronger: pair 1 has the angle 5 / 10000^0.5.
    got = rope(jnp.ones((1, 1, 4)), 5, max_positions=32).ravel()
    want = [math.cos(5) - math.sin(5), math.cos(0.05) - math.sin(0.05),
            math.sin(5) + math.cos(5), math.sin(0.05) + math.cos(0.05)]  # fmt: skip
    check_close("all pairs", got, want, atol=1e-6)


@covers("rope_high_base")
def test_rope_high_base():
    got = rope(jnp.ones((1, 1, 4)), 10, base=500000, max_positions=64).ravel()
    check_close("y", got, expected("rope_high_base", "y (derived)", 4), atol=1e-6)


@covers("rope_backward_transposed_rotation")
def test_rope_backward():
    x = f32([1, 2, 3, 4]).reshape(1, 1, 4)

    def turn(x):
        return rope(x, 3, max_positions=32, interleaved=True)

    pull = jax.vjp(turn, x)[1]
    got = pull(f32([1, 0, 0, 0]).reshape(1, 1, 4))[0].ravel()
    check_close("dx", got, expected("rope_backward_transposed_rotation", "dx", 4), atol=1e-6)
    slope = central_difference(lambda x: turn(x)[0, 0, 0], x, 1e-2)
    check_close("difference quotient", got, slope.ravel(), atol=1e-3)
    # Stronger: the map is linear, so dx = R^T dy for every pair (angles 3 and 0.03).
    got = pull(jnp.ones((1, 1, 4)))[0].ravel()
    want = [
        f(a)
        for a in (3, 0.03)
        for f in (lambda a: math.cos(a) + math.sin(a), lambda a: math.cos(a) - math.sin(a))
    ]
    check_close("all pairs", got, want, atol=1e-6)


@covers("rope errors")
def test_rope_errors():
    with pytest.raises(ValueError, match="got 5"):
        rope(jnp.ones((1, 1, 5)))
    with pytest.raises(ValueError, match=r"30 \+ 3 > 32"):
        rope(jnp.ones((3, 1, 4)), 30, max_positions=32)
    with pytest.raises(ValueError, match=r"got \(3, 4\)"):
        rope(jnp.ones((3, 4)))


@covers("rope tables")
def test_rope_tables():
    cos, sin = rope_tables(jnp.arange(32), 8)
    angle = np.arange(32)[:, None] / 10000.0 ** (2 * np.arange(4) / 8)
    assert cos.shape == sin.shape == (32, 4)
    check_close("cos", cos, np.cos(angle), atol=1e-6)
    check_close("sin", sin, np.sin(angle), atol=1e-6)
    x = f32(np.random.default_rng(0).standard_normal((32, 2, 8)))
    for interleaved in (False, True):
        there = rotate(x, cos, sin, interleaved=interleaved)
        check_close("back", rotate(there, cos, -sin, interleaved=interleaved), x, atol=1e-6)


# ---- System C: KV cache --------------------------------------------------------------------------


@covers("kv_cache_append_and_retrieve")
def test_kv_cache_append_and_retrieve():
    cache = KVCache.init((), 32, 2, 4)
    keys, values = jnp.eye(4).reshape(2, 2, 4), f32(np.repeat([1, 2, 3, 4], 4)).reshape(2, 2, 4)
    cache = cache.append(keys, values)
    assert int(cache.lengths) == 2
    last_k, last_v = (f32(np.repeat(x, 4)).reshape(1, 2, 4) for x in ([5, 6], [7, 8]))
    cache = cache.append(last_k, last_v)
    assert int(cache.lengths) == 3
    got_k, got_v = cache.get()
    check_equal("keys", got_k, jnp.concatenate([keys, last_k]))
    check_equal("values", got_v, jnp.concatenate([values, last_v]))
    with pytest.raises(ValueError, match=r"length 3 \+ new 30 > max 32"):
        cache.append(jnp.zeros((30, 2, 4)), jnp.zeros((30, 2, 4)))


@covers("kv_cache_clear")
def test_kv_cache_clear():
    cache = KVCache.init((), 16, 1, 2).append(f32([[[1, 2]]]), f32([[[3, 4]]]))
    assert int(cache.lengths) == 1
    assert int(cache.clear().lengths) == 0


# ---- System C: attention layer, block, transformer -----------------------------------------------


def layer(weights, x, heads, kv_heads, head_dim, name):
    """The layer with weights stored [out, in]."""
    params = attention_from_out_in(weights, heads, kv_heads, head_dim)
    return attention(params, x[None], attend=attention_fn(name))[0][0]


def zeros_out_in(dim, heads, kv_heads, head_dim):
    q, kv = heads * head_dim, kv_heads * head_dim
    shapes = {"wq": (q, dim), "wk": (kv, dim), "wv": (kv, dim), "wo": (dim, q)}
    return {n: jnp.zeros(s) for n, s in shapes.items()}


@covers("causal_attention_zeros", "causal_attention_gqa")
@pytest.mark.parametrize("name", NAMES)
def test_attention_zero_weights(name):
    x = f32([np.arange(1, 9), np.arange(8, 0, -1)])
    got = layer(zeros_out_in(8, 2, 2, 4), x, 2, 2, 4, name)
    check_equal("y", got, np.zeros((2, 8)))  # and no NaN
    got = layer(zeros_out_in(8, 4, 2, 2), x[:1], 4, 2, 2, name)
    check_equal("gqa", got, np.zeros((1, 8)))


@covers("causal_attention_gqa")
@pytest.mark.parametrize("name", NAMES)
def test_attention_gqa_reads_the_right_head(name):
    """Stronger: one key per head, so that head h returns exactly the values of kv head h // 2."""
    weights = zeros_out_in(8, 4, 2, 2) | {"wv": jnp.eye(8)[:4], "wo": jnp.eye(8)}
    got = layer(weights, f32([np.arange(1, 9)]), 4, 2, 2, name)
    check_close("y", got, [[1, 2, 1, 2, 3, 4, 3, 4]], atol=1e-6)


@covers("causal_attention_identity_kv", "causal_attention_mask_works")
@pytest.mark.parametrize("name", NAMES)
def test_attention_identity_weights(name):
    eye = dict.fromkeys(("wq", "wk", "wv", "wo"), jnp.eye(4))
    x = f32([[1, 2, 3, 4]])
    check_close("one key", layer(eye, x, 1, 1, 4, name), x, atol=1e-6)
    got = layer(eye, f32([[1, 0, 0, 0], [0, 0, 0, 1]]), 1, 1, 4, name)
    want = expected("causal_attention_mask_works", "y", (2, 4))
    check_close("two keys", got, want, atol=1e-6)


def weight(shape, seed):
    return ramp(shape, seed, 3, 17, 0.8)


@covers("attention_backward_gradient_check")
@pytest.mark.parametrize("name", NAMES)
def test_attention_backward(name):
    weights = {
        "wq": weight((4, 4), 7),
        "wk": weight((2, 4), 11),
        "wv": weight((2, 4), 13),
        "wo": weight((4, 4), 17),
    }
    x = f32([[0.5, -0.3, 0.8, 0.2], [1, 0.1, -0.5, 0.7]])

    def total(x, weights):
        return layer(weights, x, 2, 1, 2, name).sum()

    dx = jax.grad(total)(x, weights)
    want = expected("attention_backward_gradient_check", "dx", (2, 4))
    check_close("dx", dx, want, atol=1e-4)
    rejects_zeros(want, 0.05)
    slope = central_difference(lambda x: total(x, weights), x, 1e-3)
    check_close("difference quotient", dx, slope, atol=0.05)
    # Stronger: a wo that varies (seed 17 makes it constant), a dy that varies, all weights.
    weights["wo"] = weight((4, 4), 5)
    check_grads(
        lambda x, w: layer(w, x, 2, 1, 2, name) * jnp.arange(1.0, 9).reshape(2, 4), (x, weights), 1,
        ["rev"], rtol=2e-2, atol=2e-2,
    )  # fmt: skip


def block_params(make):
    shapes = {"wq": (4, 4), "wk": (2, 4), "wv": (2, 4), "wo": (4, 4)}
    weights = {name: make(shape, 5 + i) for i, (name, shape) in enumerate(shapes.items())}
    return {
        "attention_norm": jnp.ones(4),
        "attention": attention_from_out_in(weights, 2, 1, 2),
        "mlp_norm": jnp.ones(4),
        "mlp": {"gate": make((8, 4), 7).T, "up": make((8, 4), 11).T, "down": make((4, 8), 13).T},
    }  # fmt: skip


@covers("transformer_block_backward_shapes")
@pytest.mark.parametrize("name", NAMES)
def test_transformer_block_backward(name):
    x = f32([[1, 2, 3, 4], [5, 6, 7, 8]])

    def block(params, x):
        return transformer_block(params, x[None], attend=attention_fn(name))[0][0]

    zeros = block_params(lambda shape, seed: jnp.zeros(shape))
    y, pull = jax.vjp(block, zeros, x)
    dparams, dx = pull(jnp.ones((2, 4)))
    check_equal("y", y, x)
    check_equal("dx", dx, np.ones((2, 4)))
    assert len(jax.tree.leaves(dparams)) == 9
    for grad in jax.tree.leaves(dparams):
        check_equal("gradient", grad, np.zeros(grad.shape))
    # Stronger: weights that are not zero, every gradient against finite differences.
    params = block_params(weight)
    check_grads(block, (params, x / 4), 1, ["rev"], rtol=3e-2, atol=3e-2)
    grads = jax.grad(lambda p: (block(p, x) ** 2).sum())(params)
    assert all(float(jnp.abs(g).max()) > 1e-3 for g in jax.tree.leaves(grads))


@covers("weight layout")
def test_weights_stored_out_in(rng):
    """A flat list of [out, in] arrays gives the transformer that the layout describes."""
    config = TransformerConfig(
        vocab_size=7, dim=6, layers=2, heads=4, kv_heads=2, head_dim=2, hidden=5
    )
    block = [(6,), (8, 6), (4, 6), (4, 6), (6, 8), (6,), (5, 6), (5, 6), (6, 5)]
    shapes = [(7, 6), *block, *block, (6,), (7, 6)]
    arrays = [0.5 * rng.standard_normal(s).astype(np.float32) for s in shapes]
    tokens = np.array([3, 0, 6, 3])
    got = transformer(params_from_out_in(arrays, config), jnp.asarray(tokens)[None], config)[0]

    values = iter([a.astype(np.float64) for a in arrays])

    def norm(x, w):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w

    def turn(x):  # [S, H, 2]: one pair, frequency 1
        c, s = np.cos(np.arange(4))[:, None], np.sin(np.arange(4))[:, None]
        return np.stack([x[..., 0] * c - x[..., 1] * s, x[..., 1] * c + x[..., 0] * s], -1)

    x = next(values)[tokens]
    for _ in range(2):
        n1, wq, wk, wv, wo, n2, gate, up, down = (next(values) for _ in range(9))
        h = norm(x, n1)
        q, k, v = (
            turn((h @ wq.T).reshape(4, 4, 2)),
            turn((h @ wk.T).reshape(4, 2, 2)),
            (h @ wv.T).reshape(4, 2, 2),
        )
        s = np.einsum("ihd,jhd->hij", q, np.repeat(k, 2, 1)) / np.sqrt(2)
        p = np.exp(np.where(np.tri(4, dtype=bool), s, -np.inf))
        o = np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), np.repeat(v, 2, 1))
        x = x + o.reshape(4, 8) @ wo.T
        h = norm(x, n2)
        g = h @ gate.T
        x = x + (g / (1 + np.exp(-g)) * (h @ up.T)) @ down.T
    want = norm(x, next(values)) @ next(values).T
    check_close("logits", got, want, atol=2e-5)
    with pytest.raises(ValueError, match=r"block 1 wo must have the shape \(6, 8\), got \(8, 6\)"):
        params_from_out_in([*arrays[:14], arrays[14].T, *arrays[15:]], config)
    with pytest.raises(ValueError, match="2 layers need 21 arrays, got 20"):
        params_from_out_in(arrays[:-1], config)


# ---- System B and C: attention over a cache ------------------------------------------------------


@covers("decode attention", "prefill attention", "kv_attention_fused")
@pytest.mark.parametrize("implementation", ["native", "jax"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("start", [0, 4, 9])
def test_attention_over_a_cache(rng, implementation, rows, start):
    """Query i sees keys 0 .. start + i, never past the cache; rows above may hold anything."""
    q = rng.standard_normal((rows, 4, 8)).astype(np.float32)
    cache = rng.standard_normal((2, 12, 2, 8)).astype(np.float32)
    cache[:, start + rows :] = np.nan
    got = flash_attention(
        f32(q), f32(cache[0]), f32(cache[1]), causal=True, q_offset=start,
        kv_lengths=jnp.array(start + rows), implementation=implementation,
    )  # fmt: skip
    for i in range(rows):
        for h in range(4):
            k, v = cache[:, : start + i + 1, h // 2].astype(np.float64)
            s = k @ q[i, h] / math.sqrt(8)
            p = np.exp(s - s.max())
            check_close(f"row {i}, head {h}", got[i, h], p @ v / p.sum(), atol=2e-6)
    # The next query stands past the last key: bounded by the number of keys.
    past = flash_attention(
        f32(q), f32(cache[0, : start + rows]), f32(cache[1, : start + rows]), causal=True,
        q_offset=start + rows, implementation=implementation,
    )  # fmt: skip
    full = flash_attention(
        f32(q), f32(cache[0, : start + rows]), f32(cache[1, : start + rows]),
        implementation=implementation,
    )  # fmt: skip
    check_close("past the end", past, full, atol=1e-6)


# ---- System B: loss, mixed precision, what XLA does ----------------------------------------------


@covers("cross entropy with pad")
@pytest.mark.parametrize("pad", [3, -100, 2**32 - 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cross_entropy_with_pad(rng, pad, dtype):
    logits = jnp.asarray(rng.standard_normal((6, 5)), dtype)
    targets = np.array([0, pad, 4, 1, pad, 2]).astype(np.uint32 if pad > 2**31 else np.int32)
    z = np.asarray(logits, np.float64)
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    rows = [0, 2, 3, 5]
    picked = targets[rows].astype(int)
    want = np.zeros((6, 5))
    want[rows] = p[rows] / 4
    want[rows, picked] -= 1 / 4
    value, grad = jax.value_and_grad(cross_entropy)(logits, jnp.asarray(targets), ignore_id=pad)
    assert (value.dtype, grad.dtype) == (jnp.float32, logits.dtype)
    check_close("loss", value, -np.log(p[rows, picked]).mean(), rtol=2e-6)
    check_close("gradient", grad, want, atol=1e-7, rtol=2**-8 if dtype == "bfloat16" else 1e-5)
    check_equal("pads", grad[np.array([1, 4])], np.zeros((2, 5)))
    value, grad = jax.value_and_grad(cross_entropy)(
        logits, jnp.asarray(np.full(6, pad).astype(targets.dtype)), ignore_id=pad
    )
    check_equal("none counted", value, 0.0)
    check_equal("none counted, gradient", grad, np.zeros((6, 5)))


@covers("AdamW step")
def test_adamw_step():
    optax = pytest.importorskip("optax")
    p, g = np.array([1.0, -2.0, 0.5]), np.array([0.1, -0.3, 1e-6])
    lr, b1, b2, eps, wd = 0.01, 0.9, 0.95, 1e-5, 0.1
    adamw = optax.adamw(lr, b1, b2, eps, weight_decay=wd)
    params = f32(p)
    state = adamw.init(params)
    m = v = np.zeros(3)
    for t in (1, 2, 3):
        updates, state = adamw.update(f32(g), state, params)
        params = optax.apply_updates(params, updates)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        p = p - lr * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + wd * p)
        check_close(f"step {t}", params, p, atol=1e-6)


@covers("mixed precision")
def test_mixed_precision(rng):
    """bf16 arithmetic, float32 master weights: their gradients stay float32."""
    config = TransformerConfig(
        vocab_size=9, dim=8, layers=1, heads=2, kv_heads=1, head_dim=4, hidden=8
    )
    params = init_transformer(jax.random.key(0), config)
    tokens = jnp.asarray(rng.integers(0, 9, (2, 5)))
    value, grads = jax.jit(
        jax.value_and_grad(
            lambda p: cross_entropy(transformer(p, tokens, config, dtype=jnp.bfloat16), tokens)
        )
    )(params)
    assert value.dtype == jnp.float32
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    x = jnp.asarray(rng.standard_normal((4, 8)), jnp.bfloat16)
    dx, dw = jax.grad(lambda x, w: rms_norm(x, w).astype(jnp.float32).sum(), (0, 1))(x, jnp.ones(8))
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)


@covers("softmax and backward")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_softmax_and_backward(rng, dtype):
    x, dy = (jnp.asarray(rng.standard_normal((3, 7)), dtype) for _ in range(2))
    y, pull = jax.vjp(lambda x: jax.nn.softmax(x, axis=-1), x)
    x64, dy64 = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    want = np.exp(x64) / np.exp(x64).sum(1, keepdims=True)
    atol = 2e-7 if dtype == "float32" else 4e-3
    check_close("y", y, want, atol=atol)
    check_close(
        "dx", pull(dy)[0], want * (dy64 - (dy64 * want).sum(1, keepdims=True)), atol=4 * atol
    )


@covers("reduce_sum")
@pytest.mark.parametrize("shape", [(3, 4, 5), (0, 4), (4, 0), (1,)])
def test_reduce_sum(rng, shape):
    x = rng.standard_normal(shape).astype(np.float32)
    for axis in range(len(shape)):
        got = jax.jit(lambda x, axis=axis: jnp.sum(x, axis=axis))(x)
        check_close("sum", got, x.astype(np.float64).sum(axis), atol=1e-6)


@covers("other device ops")
def test_matmul(rng):
    """bf16 operands, float32 sums, one rounding."""
    a, b = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((8, 512), (512, 4)))
    got = jnp.dot(a, b)
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    assert got.dtype == jnp.bfloat16
    check_close("product", got, want, rtol=2**-8, atol=1e-3)


def test_transpose(rng):
    x = f32(rng.standard_normal((3, 5)))
    check_equal("transpose", jax.jit(jnp.transpose)(x), np.asarray(x).T)


def test_elementwise(rng):
    """A traced expression is one fused loop."""
    x = f32(rng.standard_normal((3, 5)))
    fused = jax.jit(lambda x: jnp.tanh(x) * 2 + x)
    want = np.tanh(np.asarray(x, np.float64)) * 2 + np.asarray(x)
    check_close("elementwise", fused(x), want, atol=1e-6)


def test_add_in_place(rng):
    x = f32(rng.standard_normal((3, 5)))
    add = jax.jit(lambda total, x: total + x, donate_argnums=0)
    total = jnp.zeros((3, 5))
    check_equal("sum", add(total, x), x)
    assert total.is_deleted()


@covers("bf16 conversion")
def test_bf16_conversion_keeps_nan():
    every = np.arange(65536, dtype=np.uint32)
    wide = (every << 16).view(np.float32)
    back = np.asarray(jnp.asarray(wide).astype(jnp.bfloat16)).view(np.uint16)
    nan = np.isnan(wide)
    check_equal("exact values", back[~nan], every[~nan])
    payloads = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000], np.uint32)
    narrow = jnp.asarray(np.concatenate([wide[nan], payloads.view(np.float32)])).astype(
        jnp.bfloat16
    )
    assert jnp.isnan(narrow).all()
    # Ties go to even, and the largest float32 becomes infinity.
    odd = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF], np.uint32).view(np.float32)
    want = np.array([0x3F80, 0x3F82, 0x3F81, 0x7F80], np.uint16).view(ml_dtypes.bfloat16)
    check_equal("rounding", jnp.asarray(odd).astype(jnp.bfloat16), want)


def test_every_case_has_a_test():
    assert {c["name"] for c in MINE} == TESTED
