"""What users of other attention libraries reported, one named test per report (rows A1 to A39).

The whole kind of fault must be impossible here, so most tests compare o, L and every gradient with
the float64 oracle on the smallest input that showed the fault elsewhere. Rows A14, A15, A28 and A35
need a GPU; what a CPU can show of them runs here too.
"""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from checking import (
    FORWARD_TARGET,
    NATIVE_FORWARD_TARGET,
    Call,
    check,
    compiled_text,
    draw,
    function_of,
    make_call,
    references,
    run,
    value_and_grads,
    verify,
)
from tolerances import check_close, check_equal

import jax_flashtrain
from jax_flashtrain import flash_attention

BF16 = np.dtype(ml_dtypes.bfloat16)
FINFO_MIN = float(np.finfo(np.float32).min)


def _finite(got):
    for name, x in got.items():
        if name != "lse":
            assert np.isfinite(x.astype(np.float64)).all(), name


def _temp_bytes(call, implementation=None) -> int:
    g, args = value_and_grads(call, implementation)
    return jax.jit(g).lower(*args).compile().memory_analysis().temp_size_in_bytes


# ---- masks --------------------------------------------------------------------------------------


def test_a1_fully_masked_row(implementation):
    """An all-False row gave NaN, spoiled the whole batch's gradients, or reported L = +inf."""
    mask = np.tril(np.ones((6, 6), bool))[None, None].repeat(2, 0)
    unmasked = make_call(1, B=2, Sq=6, D=8, mask=mask.copy())
    mask[0, 0, 5] = False
    call = make_call(1, B=2, Sq=6, D=8, mask=mask)
    got = check(call, implementation)
    assert np.all(got["o"][0, 5] == 0)
    assert np.all(got["lse"][0, :, 5] == -np.inf)
    assert np.all(got["dq"][0, 5] == 0)
    _finite(got)
    before = run(unmasked, implementation)
    for name in ("o", "dq", "dk", "dv"):
        check_equal(name, got[name][1], before[name][1])


def test_a1_infinite_cotangents_of_an_empty_row(implementation):
    """mean(L^2) over a padded row sends an infinite cotangent of L, and inf * 0 is NaN."""
    mask = np.ones((1, 1, 6, 6), bool)
    mask[0, 0, 5] = False
    call = make_call(1, Sq=6, D=8, mask=mask)
    quiet = run(call, implementation)
    for bad in (np.inf, -np.inf, np.nan):
        call.do[0, 5] = bad
        call.dlse[0, :, 5] = bad
        got = check(call, implementation)
        for name in ("dq", "dk", "dv"):
            check_equal(name, got[name], quiet[name])


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_a2_causal_alignment(layout, implementation):
    """Bottom-right by default, top-left with q_offset=0, on every head, in both passes."""
    k = np.zeros((1, 5, 4, 32), np.float32)
    v = np.broadcast_to(np.arange(5, dtype=np.float32)[None, :, None, None], k.shape).copy()
    q = np.zeros((1, 2, 4, 32), np.float32)
    rng = np.random.default_rng(0)
    do, dlse = draw(rng, q.shape, np.float32), draw(rng, (1, 4, 2), np.float32)
    if layout == "BNTH":
        q, k, v, do = (x.swapaxes(1, 2) for x in (q, k, v, do))
    for offset, want in ((None, [1.5, 2.0]), (0, [0.0, 0.5])):
        static = {"causal": True, "layout": layout}
        if offset is not None:
            static["q_offset"] = offset
        got = check(Call({"q": q, "k": k, "v": v}, static, do, dlse), implementation)
        o = got["o"] if layout == "BTNH" else got["o"].swapaxes(1, 2)
        for row in (0, 1):
            check_close("o", o[0, row], np.full((4, 32), want[row]), atol=1e-6)


@pytest.mark.parametrize(("Sq", "Sk"), [(2048, 1024), (130, 2)])
def test_a3_causal_with_more_queries_than_keys(Sq, Sk, implementation):
    """Bottom-right: the first Sq - Sk rows see nothing and follow A1; the others match."""
    got = check(make_call(3, Sq=Sq, Sk=Sk, Hq=1, D=64, causal=True), implementation)
    assert np.all(got["o"][0, : Sq - Sk] == 0)
    assert np.all(got["lse"][0, :, : Sq - Sk] == -np.inf)
    assert np.all(got["dq"][0, : Sq - Sk] == 0)
    assert np.all(got["o"][0, Sq - Sk :] != 0)
    _finite(got)


def test_a4_finfo_min_in_a_bias(implementation):
    """Ordinary rows give such keys weight 0; a row of nothing else is uniform, never NaN."""
    bias = np.zeros((1, 1, 441, 441), np.float32)
    bias[..., :128] = FINFO_MIN
    bias[0, 0, 7] = FINFO_MIN
    call = make_call(4, Sq=441, D=64, bias=bias, dlse=False)
    got = check(call, implementation)
    _finite(got)
    check_close("o of the dead row", got["o"][0, 7], call.arrays["v"][0].mean(0), atol=1e-5)
    masked = make_call(4, Sq=441, D=64, mask=(bias == 0), dlse=False)
    masked.do[0, 7] = call.do[0, 7] = 0
    got, want = run(call, implementation), run(masked, implementation)
    rows = np.arange(441) != 7
    check_close("o", got["o"][0, rows], want["o"][0, rows], atol=1e-5)
    check_close("dv", got["dv"], want["dv"], atol=1e-5)
    check_close("dk", got["dk"], want["dk"], atol=1e-5)
    assert np.all(got["dv"][0, :128] == 0)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_a5_a_mask_that_is_not_boolean(dtype):
    """A float mask cast to bool inverts its meaning: refused, with the way out."""
    q = jnp.zeros((1, 4, 2, 8))
    mask = np.zeros((1, 1, 4, 4), dtype)
    with pytest.raises(
        TypeError, match=rf"mask.*{np.dtype(dtype).name}.*bias|mask.*bias.*{np.dtype(dtype).name}"
    ):
        flash_attention(q, q, q, mask=mask)
    with pytest.raises(TypeError, match="bias"):
        jax.jit(lambda m: flash_attention(q, q, q, mask=m))(mask)


def test_a6_key_padding_mask_and_odd_bias(implementation):
    rng = np.random.default_rng(6)
    mask = rng.random((4, 1, 1, 32)) < 0.7
    check(make_call(6, B=4, Sq=32, Hq=4, dtype="bfloat16", mask=mask), implementation)
    bias = draw(rng, (2, 4, 77, 77), np.float32)
    check(make_call(6, B=2, Sq=77, Hq=4, dtype="bfloat16", bias=bias), implementation)
    bias = draw(rng, (2, 1, 1, 700), BF16)
    check(make_call(6, B=2, Sq=33, Sk=700, dtype="bfloat16", bias=bias), implementation)


@pytest.mark.parametrize("kind", ["bias", "mask"])
def test_a6_no_temporary_of_the_broadcast_shape(kind, implementation):
    shape, rng = (4, 1, 1, 1024), np.random.default_rng(6)
    option = {kind: draw(rng, shape, BF16) if kind == "bias" else rng.random(shape) < 0.7}
    call = make_call(6, B=4, Sq=1024, Hq=4, dtype="bfloat16", **option)
    assert _temp_bytes(call, implementation) < 4 * 4 * 1024 * 1024 * 2  # bytes of a bf16 [B,H,S,S]


@pytest.mark.parametrize("S", [1, 2, 15, 16, 17, 63, 64, 65, 256])
def test_a7_bias_varies_along_queries(S, implementation):
    """mask[t, j] = j <= t + 50, as bool and as bias: each row of a block has its own values."""
    see = np.arange(S) <= np.arange(S)[:, None] + 50
    as_mask = make_call(7, Sq=S, D=16, mask=see[None, None])
    bias = np.where(see, 0, -np.inf).astype(np.float32)[None, None]
    as_bias = make_call(7, Sq=S, D=16, bias=bias)
    answers = [check(as_mask, implementation), check(as_bias, implementation)]
    want = references(as_mask)[0]["o"].want
    for got in answers:
        check_close("o", got["o"], want, atol=1e-5)


# ---- heads and sizes ----------------------------------------------------------------------------


def test_a8_gqa_gradients(implementation):
    got = check(make_call(8, Sq=16, Hq=8, Hkv=2, D=16), implementation)
    assert got["dk"].shape == got["dv"].shape == (1, 16, 2, 16)
    check(make_call(8, Sq=16, Hq=8, Hkv=2, D=16, dtype="bfloat16"), implementation)


def test_a8_heads_that_do_not_divide():
    q, k = jnp.zeros((1, 4, 3, 8)), jnp.zeros((1, 4, 2, 8))
    for call in (flash_attention, jax.jit(flash_attention)):
        with pytest.raises(ValueError, match=r"(?s)3.*2"):
            call(q, k, k)


A9_SIZES = (1, 3, 8, 17, 32, 64, 72, 80, 96, 104, 128, 192, 256)


@pytest.mark.parametrize("D", A9_SIZES)
def test_a9_head_sizes(D):
    """Every size, native in f32 and bf16 (blockwise: below); the last channel counts."""
    for dtype in ("float32", "bfloat16"):
        got = check(make_call(9, Sq=65, D=D, dtype=dtype), "native")
    other = make_call(9, Sq=65, D=D, dtype="bfloat16")
    other.arrays["q"][..., D - 1] += 1
    assert (run(other, "native")["o"] != got["o"]).any()


@pytest.mark.parametrize("D", [1, 17, 72])
def test_a9_head_sizes_blockwise(D):
    check(make_call(9, Sq=65, D=D), "jax")


def test_a10_value_size_differs(implementation):
    got = check(make_call(10, Sq=16, D=32, Dv=24), implementation)
    assert got["o"].shape == (1, 16, 2, 24)
    check(make_call(10, Sq=16, D=24, Dv=32, layout="BNTH"), implementation)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("S", [1, 2, 15, 17, 63, 65, 127, 129, 192, 384, 1025])
def test_a11_odd_lengths(S, causal):
    check(make_call(11, Sq=S, Hq=1, D=32, causal=causal), "native")


@pytest.mark.parametrize("S", [15, 129, 384])
def test_a11_odd_lengths_blockwise(S):
    check(make_call(11, Sq=S, Hq=1, D=32, causal=True), "jax")


@pytest.mark.parametrize("S", [64, 192, 704])
def test_a12_scores_far_below_zero(S, implementation):
    """Scores about -100: a padded score of 0 would give exp(0 - L) = inf, and 0 * inf NaN."""
    mask = np.ones((1, 1, S, S), bool)
    call = make_call(12, Sq=S, D=64, Hq=1, dtype="bfloat16", mask=mask, std=0.05)
    call.arrays["q"] = (call.arrays["q"].astype(np.float32) + 3.5).astype(BF16)
    call.arrays["k"] = (call.arrays["k"].astype(np.float32) - 3.5).astype(BF16)
    got = check(call, implementation)
    assert got["lse"].max() < -88.7
    _finite(got)


def test_a12_one_element_in_float16(implementation):
    call = make_call(12, Sq=1, Hq=1, D=16, dtype="float16", std=3.0)
    got = check(call, implementation)
    _finite(got)


@pytest.mark.parametrize("causal", [False, True])
def test_a13_no_keys(causal, implementation):
    got = check(make_call(13, B=2, Sq=4, Sk=0, D=16, causal=causal), implementation)
    assert got["o"].shape == (2, 4, 2, 16)
    assert np.all(got["o"] == 0)
    assert np.all(got["lse"] == -np.inf)
    assert np.all(got["dq"] == 0)
    assert got["dk"].shape == got["dv"].shape == (2, 0, 2, 16)


def _last_alone(B, S, H, D, which, implementation="native"):
    """Gradients of the whole batch and of one element alone, bf16 on the device."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (jax.random.normal(key, (B, S, H, D), jnp.bfloat16) for key in keys)

    @jax.jit
    def both(q, k, v, do):
        o, pull = jax.vjp(
            lambda *x: flash_attention(*x, causal=True, implementation=implementation), q, k, v
        )
        return (o, *pull(do))

    whole = [np.asarray(x[which]) for x in both(q, k, v, do)]
    alone = [np.asarray(x[0]) for x in both(*(x[which][None] for x in (q, k, v, do)))]
    for name, x, y in zip(("o", "dq", "dk", "dv"), whole, alone, strict=True):
        check_close(name, x.astype(np.float32), y.astype(np.float32), atol=1e-2, rtol=1e-2)
        assert np.abs(x.astype(np.float32)).max() > 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1600, 729, 16, 72), (2100, 1024, 16, 64)])
def test_a14_offsets_beyond_32_bits(shape):
    """1.3e9 elements with an f32 scratch beyond 2^32 bytes, and more than 2^31 elements."""
    _last_alone(*shape, which=-1)


@pytest.mark.gpu
def test_a15_grid_limit_on_the_gpu():
    for which in (0, -1):
        _last_alone(80000, 16, 1, 16, which)
    heads = make_call(15, Sq=10, Hq=65536, D=16, dtype="bfloat16")
    check(heads, "native")


def test_a15_more_than_65535_heads(implementation):
    """batch * heads beyond 65535, in the batch and in the heads."""
    call = make_call(15, B=66000, Sq=2, Hq=1, D=2)
    check(call, implementation)
    check(make_call(15, Sq=2, Hq=65538, Hkv=32769, D=2, layout="BNTH"), implementation)


def test_a16_strided_inputs_and_cotangents(implementation):
    """Transposes before and after the call, inside one jit, change no bit."""
    rng = np.random.default_rng(16)
    x = [draw(rng, (84, 3, 3, 64), np.float32) for _ in range(3)]
    w = draw(rng, (84, 3, 3, 64), np.float32)

    @jax.jit
    def transposed(q, k, v, w):
        def f(*args):
            args = (a.transpose(0, 2, 1, 3) for a in args)
            return flash_attention(*args, implementation=implementation).transpose(0, 2, 1, 3)

        o, pull = jax.vjp(f, q, k, v)
        return (o, *pull(w))

    @jax.jit
    def plain(q, k, v, w):
        o, pull = jax.vjp(lambda *a: flash_attention(*a, implementation=implementation), q, k, v)
        return (o, *pull(w))

    got = transposed(*x, w)
    want = plain(*(np.ascontiguousarray(a.transpose(0, 2, 1, 3)) for a in (*x, w)))
    for name, a, b in zip(("o", "dq", "dk", "dv"), got, want, strict=True):
        check_equal(name, np.asarray(a).transpose(0, 2, 1, 3), b)


# ---- transforms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0), (1, 0, None)])
def test_a17_vmap_over_some_arguments(axes, implementation):
    rng = np.random.default_rng(17)
    mask = rng.random((1, 1, 8, 8)) < 0.8
    bias = draw(rng, (1, 2, 8, 8), np.float32)
    args = []
    for axis in axes:
        x = draw(rng, (3, 2, 8, 2, 8) if axis is not None else (2, 8, 2, 8), np.float32)
        args.append(np.moveaxis(x, 0, axis) if axis else x)

    def f(q, k, v):
        return flash_attention(q, k, v, mask=mask, bias=bias, implementation=implementation)

    def value_and_grad(q, k, v):
        o, pull = jax.vjp(f, q, k, v)
        return (o, *pull(jnp.cos(o)))

    got = jax.jit(jax.vmap(value_and_grad, axes))(*args)
    one = jax.jit(value_and_grad)
    for n in range(3):
        picked = (
            np.take(x, n, axis) if axis is not None else x
            for x, axis in zip(args, axes, strict=True)
        )
        for name, a, b in zip(("o", "dq", "dk", "dv"), got, one(*picked), strict=True):
            check_close(name, a[n], b, atol=2e-6)


def test_a18_vmap_of_grad(implementation):
    rng = np.random.default_rng(18)
    q, k, v = (draw(rng, (3, 1, 4, 2, 8), np.float32) for _ in range(3))

    def loss(q, k, v):
        o, lse = flash_attention(q, k, v, return_lse=True, implementation=implementation)
        return (o**2).sum() + lse.sum()

    grad = jax.value_and_grad(loss, (0, 1, 2))
    got = jax.jit(jax.vmap(grad))(q, k, v)
    nested = jax.jit(jax.vmap(jax.vmap(grad)))(*(x[:, :, None] for x in (q, k, v)))
    for n in range(3):
        want = jax.tree.leaves(jax.jit(grad)(q[n], k[n], v[n]))
        for a, b, c in zip(jax.tree.leaves(got), jax.tree.leaves(nested), want, strict=True):
            check_close("vmap(grad)", a[n], c, atol=2e-6)
            check_close("vmap(vmap(grad))", np.reshape(b[n], np.shape(c)), c, atol=2e-6)


def test_a19_sharding(implementation):
    """Mismatched shardings of q, k, v and do give the unsharded numbers, without a gather."""
    if jax.device_count() < 4 and jax.default_backend() == "gpu":
        pytest.skip("needs 4 devices")
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    devices = np.asarray(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "model"))
    call = make_call(19, B=4, Sq=16, Hq=4, Hkv=2, D=8, causal=True)
    want = run(call, implementation)
    g, args = value_and_grads(call, implementation)
    even = P("data", None, "model", None)
    for specs in (
        (even, even, even, even),
        (P("data", "model", None, None), even, even, even),  # do arrives split along queries
        (even, even, P(), P()),  # k and v replicated
        (P(), even, P(None, None, "model", None), P("model", None, None, None)),
    ):
        do, dlse, q, k, v = args
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip((do, q, k, v), specs, strict=True)
        ]
        f = jax.jit(g)
        given = (placed[0], dlse, *placed[1:])
        got = f(*given)
        for name, x in want.items():
            check_close(name, np.asarray(got[name]), x, atol=2e-6)
        if specs == (even,) * 4:
            text = f.lower(*given).compile().as_text()
            for collective in ("all-gather", "all-to-all", "collective-permute"):
                assert collective not in text


def test_a20_checkpoint_policies():
    """One forward kernel when the policy saves the named residuals, two when it does not."""
    call = make_call(20, Sq=16)
    q, k, v = call.arrays.values()

    def layer(q, k, v):
        return jnp.sin(flash_attention(jnp.sin(q), k, v, implementation="native"))

    def gradient(policy):
        f = jax.checkpoint(layer, policy=policy)
        return jax.jit(jax.value_and_grad(lambda *x: f(*x).sum(), (0, 1, 2)))

    save = jax.checkpoint_policies.save_only_these_names("flashtrain_out", "flashtrain_lse")
    grads = []
    for policy, kernels in ((save, 1), (None, 2)):
        # As lowered: XLA for CPU of jaxlib 0.10 and older merges two equal custom calls.
        lowered = gradient(policy).lower(q, k, v)
        assert lowered.as_text().count(FORWARD_TARGET) == kernels
        if kernels == 1:
            assert lowered.compile().as_text().count(f'custom_call_target="{FORWARD_TARGET}"') == 1
        grads.append(jax.tree.leaves(gradient(policy)(q, k, v)))
    for a, b in zip(*grads, strict=True):
        check_equal("gradient", a, b)


@pytest.mark.parametrize("kind", ["traced", "closed over", "numpy"])
def test_a21_integer_arguments(kind, implementation):
    """Two calls share one int32 array: its float0 cotangents must not be added up and raise."""
    ids = np.asarray([[0, 0, 1, 1, 1, 2]], np.int32)
    x = draw(np.random.default_rng(21), (1, 6, 2, 8), np.float32)
    shared = ids if kind == "numpy" else jnp.asarray(ids)

    def loss(x, ids):
        y = flash_attention(x, x, x, segment_ids=ids, causal=True, implementation=implementation)
        z = flash_attention(y, x, y, segment_ids=ids, implementation=implementation)
        return (z * jnp.cos(jnp.arange(8.0))).sum()

    if kind == "traced":
        grad = jax.jit(jax.grad(loss))(x, shared)
    else:
        grad = jax.jit(jax.grad(lambda x: loss(x, shared)))(x)

    def loss64(x):
        y, _ = oracle.attention(x, x, x, segment_ids=ids, causal=True)
        z, _ = oracle.attention(y, x, y, segment_ids=ids)
        return (z * np.cos(np.arange(8.0))).sum()

    x64 = x.astype(np.float64)
    for index in np.ndindex(1, 6, 2, 8):
        step = np.zeros_like(x64)
        step[index] = 1e-5
        numeric = (loss64(x64 + step) - loss64(x64 - step)) / 2e-5
        check_close("grad", np.asarray(grad)[index], numeric, atol=1e-5)


def test_a22_mixed_dtypes():
    """Every mixture of bf16, f16 and f32 is a TypeError that names all three dtypes."""
    dtypes = (jnp.bfloat16, jnp.float16, jnp.float32)
    for a in dtypes:
        for b in dtypes:
            for c in dtypes:
                q, k, v = (jnp.zeros((1, 16, 2, 8), d) for d in (a, b, c))
                if a == b == c:
                    assert jax.eval_shape(flash_attention, q, k, v).dtype == a
                    continue
                with pytest.raises(TypeError) as error:
                    jax.eval_shape(flash_attention, q, k, v)
                for dtype in (a, b, c):
                    assert jnp.dtype(dtype).name in str(error.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a22_result_dtypes(dtype, implementation):
    got = check(make_call(22, Sq=16, dtype=dtype, sinks=np.zeros(2, np.float32)), implementation)
    for name in ("o", "dq", "dk", "dv"):
        assert got[name].dtype == jnp.dtype(dtype)
    assert got["lse"].dtype == got["dsinks"].dtype == np.float32


# ---- numbers ------------------------------------------------------------------------------------


def test_a23_scores_beyond_float16(implementation):
    """q.k = 102400 overflows float16 before the scale; constant 1000s gave NaN gradients."""
    call = make_call(23, Sq=8, Hq=1, D=64, dtype="float16", dlse=False)
    call.arrays["q"][:] = call.arrays["k"][:] = 40
    got = run(call, implementation)
    v = call.arrays["v"].astype(np.float64)
    check_close("o", got["o"], np.broadcast_to(v.mean(1, keepdims=True), v.shape), atol=2e-3)
    check_close("lse", got["lse"], np.full((1, 1, 8), 12800 + np.log(8)), rtol=1e-3)
    _finite(got)

    call = make_call(23, Sq=50, Hq=1, D=64, dlse=False)
    for name in "qkv":
        call.arrays[name][:] = 1000
    got = run(call, implementation)
    _finite(got)
    check_close("o", got["o"], np.full(got["o"].shape, 1000.0), rtol=1e-5)
    want = np.broadcast_to(call.do.astype(np.float64).mean(1, keepdims=True), call.do.shape)
    check_close("dv", got["dv"], want, rtol=1e-5, atol=1e-5)
    # ds is a difference of equal numbers of size 1000 * 64 and meets factors 1000 * 50 / 8.
    noise = 1000 * 64 * np.abs(call.do).max() * 2**-23 * 1000 / 8
    for name in ("dq", "dk"):
        assert np.abs(got[name]).max() < 50 * noise


@pytest.mark.parametrize("cap", [15.0, 50.0])
def test_a24_softcap(cap, implementation):
    """c * tanh(s / c) with its backward, for two caps in one process, scores up to +-200."""
    call = make_call(24, Sq=24, D=16, softcap=cap, std=8.0)
    q, k = (call.arrays[n][0].astype(float).swapaxes(0, 1) for n in "qk")
    assert np.abs(q @ k.swapaxes(1, 2) / 4).max() > 100
    got = check(call, implementation)
    assert got["lse"].max() <= cap + np.log(24) + 1e-4


@pytest.mark.parametrize("causal", [False, True])
def test_a25_window_bounds_are_inclusive(causal, implementation):
    S, zero = 8, np.zeros((1, 8, 1, 4), np.float32)
    v = np.broadcast_to(np.arange(S, dtype=np.float32)[None, :, None, None], zero.shape).copy()
    do = draw(np.random.default_rng(25), zero.shape, np.float32)
    call = Call({"q": zero, "k": zero, "v": v}, {"window": (2, 0), "causal": causal}, do, None)
    got = check(call, implementation)
    for i in range(S):
        keys = range(max(0, i - 2), i + 1)
        check_close("o", got["o"][0, i, 0], np.full(4, np.mean(keys)), atol=1e-6)
        check_close("lse", got["lse"][0, 0, i], np.log(len(keys)), atol=1e-6)


def test_a25_unbounded_windows(implementation):
    call = make_call(25, Sq=8)
    want = run(call, implementation)
    call.static["window"] = (None, None)
    got = run(call, implementation)
    for name in want:
        check_equal(name, got[name], want[name])
    call.static["window"] = (None, 0)
    got = check(call, implementation)
    causal = run(make_call(25, Sq=8, causal=True), implementation)
    for name in want:
        check_equal(name, got[name], causal[name])
    q = call.arrays["q"]
    with pytest.raises(ValueError, match="None"):
        flash_attention(q, q, q, window=(-1, -1))
    with pytest.raises(TypeError, match="window"):
        flash_attention(q, q, q, window=4)


def test_a26_packed_sequences(implementation):
    """Two documents of 5 and 7 in one row of 12 equal two calls; GQA reads its own tokens."""
    ids = np.asarray([[3] * 5 + [1] * 7], np.int32)
    call = make_call(26, Sq=12, Hq=4, Hkv=1, D=8, causal=True, segment_ids=ids)
    got = check(call, implementation)
    for part in (slice(0, 5), slice(5, 12)):
        arrays = {n: call.arrays[n][:, part] for n in "qkv"}
        static = {"causal": True}
        alone = run(Call(arrays, static, call.do[:, part], call.dlse[..., part]), implementation)
        for name in ("o", "dq", "dk", "dv"):
            check_close(name, got[name][:, part], alone[name], atol=1e-5)
        check_close("lse", got["lse"][..., part], alone["lse"], atol=1e-5)


def test_a27_dropout(implementation):
    q, k, v, u = (draw(np.random.default_rng(27), (2, 32, 2, 8), np.float32) for _ in range(4))

    @jax.jit
    def f(v, key):
        return flash_attention(
            q, k, v, dropout_rate=0.3, dropout_key=key, implementation=implementation
        )

    one, two = jax.random.key(1), jax.random.key(2)
    check_equal("same key", f(v, one), f(v, one))
    assert (np.asarray(f(v, one)) != np.asarray(f(v, two))).mean() > 0.9  # one trace, two masks
    _, pull = jax.vjp(lambda v: f(v, one), v)
    (dv,) = pull(u)
    # o is linear in v: the pairing is exact up to rounding.
    check_close("<dv, w> = <u, f(w)>", (dv * k).sum(), (u * np.asarray(f(k, one))).sum(), rtol=1e-4,
                atol=1e-4)  # fmt: skip
    plain = flash_attention(q, k, v, implementation=implementation)
    zero = flash_attention(
        q, k, v, dropout_rate=0.0, dropout_key=one, implementation=implementation
    )
    check_equal("rate 0", zero, plain)
    check(make_call(27, B=2, Sq=32, D=8, dropout_rate=0.3, dropout_key=one), implementation)


_RERUN = """
import hashlib, sys
import jax, jax.numpy as jnp, numpy as np
from jax_flashtrain import flash_attention
B, S, H, D, repeats = (int(x) for x in sys.argv[1:6])
keys = jax.random.split(jax.random.key(0), 4)
q, k, v, do = (jax.random.normal(key, (B, S, H, D), jnp.bfloat16) for key in keys)
@jax.jit
def f(q, k, v, do):
    o, pull = jax.vjp(lambda *x: flash_attention(*x, causal=True, deterministic=True,
                                                 implementation="native"), q, k, v)
    return (o, *pull(do))
digests = set()
for _ in range(repeats):
    data = b"".join(np.asarray(x).tobytes() for x in f(q, k, v, do))
    digests.add(hashlib.sha256(data).hexdigest())
print("digests", *sorted(digests))
"""


def _python(code, *args, **environment):
    """Runs code in a fresh process; returns its output or fails with its error."""
    env = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        env=env, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.gpu
def test_a28_deterministic_backward_on_the_gpu():
    first, second = (_python(_RERUN, 4, 1024, 8, 128, 20) for _ in range(2))
    assert first == second
    assert len(first.split()) == 2  # "digests" and one digest


def test_a28_deterministic_backward():
    first, second = (_python(_RERUN, 2, 200, 4, 32, 5) for _ in range(2))
    assert first == second
    assert len(first.split()) == 2


@pytest.mark.parametrize("shape", [(2, 4, 16, 16), (1, 4, 16, 16), (4, 16, 16)])
def test_a29_gradient_of_bias(shape, implementation):
    bias = draw(np.random.default_rng(29), shape, np.float32)
    got = check(make_call(29, B=2, Sq=16, Hq=4, bias=bias), implementation)
    assert got["dbias"].shape == shape
    assert np.abs(got["dbias"]).max() > 0.01


def test_a30_gradient_through_lse(implementation):
    """A loss on L alone: dq and dk are the p-weighted keys and queries, dv is exactly zero."""
    call = make_call(30, Sq=8, D=8)
    call.do[:] = 0
    call.dlse[:] = 1 / call.dlse.size
    got = check(call, implementation)
    assert np.abs(got["dq"]).max() > 1e-3
    assert np.all(got["dv"] == 0)
    check(make_call(30, Sq=8, D=8), implementation)  # mixed loss on o and L


def test_a31_forward_mode():
    """autodiff="jvp" gives right values; the default says which option gives forward mode."""
    call = make_call(31, Sq=6, D=4)
    q, k, v = call.arrays.values()
    tangents = tuple(draw(np.random.default_rng(n), q.shape, np.float32) for n in range(3))

    def f(q, k, v):
        return flash_attention(q, k, v, autodiff="jvp", return_lse=True)

    (o, _), (do, dlse) = jax.jit(lambda *t: jax.jvp(f, (q, k, v), t))(*tangents)
    verify_forward = references(call)[0]
    check_close("o", o, verify_forward["o"].want, atol=1e-5)
    step = 1e-5
    ends = [
        oracle.attention(
            *(x.astype(float) + sign * step * t for x, t in zip((q, k, v), tangents, strict=True))
        )
        for sign in (1, -1)
    ]
    check_close("o tangent", do, (ends[0][0] - ends[1][0]) / (2 * step), atol=1e-5)
    check_close("L tangent", dlse, (ends[0][1] - ends[1][1]) / (2 * step), atol=1e-5)
    linear = jax.linearize(f, q, k, v)[1](*tangents)
    check_close("linearize", linear[0], do, atol=1e-6)
    with pytest.raises(Exception, match=r"(?i)forward.mode|jvp"):
        jax.jvp(flash_attention, (q, k, v), tangents)


def test_a32_x64(x64, implementation):
    """f64 zeros with a half-True mask under debug_infs: no large negative number becomes inf."""
    mask = np.zeros((5, 1, 6, 6), bool)
    mask[..., ::2] = True
    before = jax.config.jax_debug_infs
    jax.config.update("jax_debug_infs", True)
    try:
        call = make_call(32, B=5, Sq=6, Hq=11, D=4, dtype="float64", mask=mask)
        got = check(call, implementation)
        for name in "qkv":
            call.arrays[name][:] = 0
        check(call, implementation)
        check(make_call(32, B=5, Sq=6, D=4, mask=mask), implementation)  # f32 under x64
    finally:
        jax.config.update("jax_debug_infs", before)
    want = references(make_call(32, B=5, Sq=6, Hq=11, D=4, dtype="float64", mask=mask))[0]
    for name in got:
        check_close(name, got[name], want[name].want, atol=1e-10)


def test_a33_attributes_are_plain_scalars():
    """window=(4, 0) reaches the custom call as integers of fixed width, so programs serialise."""
    call = make_call(33, Sq=8, window=(4, 0))
    f, args = function_of(call, "native")
    text = jax.jit(f).lower(*args).as_text()
    at = text.index(NATIVE_FORWARD_TARGET)
    config = text[text.index("mhlo.backend_config", at) : text.index("\n", at)]
    assert "window_left = 4 : i64" in config
    assert "window_right = 0 : i64" in config
    for form in ("dense<", "array<"):
        assert (
            form not in config[: config.index("operand_layouts")]
            if "operand_layouts" in config
            else True
        )


_CACHED = """
import os, sys
import jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from jax_flashtrain import flash_attention
traces = 0
def loss(q, k, v):
    global traces
    traces += 1
    return flash_attention(q, k, v, causal=True, implementation="native").sum()
f = jax.jit(jax.grad(loss, (0, 1, 2)))
q = jnp.ones((1, 16, 2, 8))
for _ in range(100):
    f(q, q, q)
print(traces, *sorted(n for n in os.listdir(sys.argv[1]) if not n.endswith("-atime")))
"""


def test_a34_compilation_cache(tmp_path):
    """A second process adds no file, and 100 equal calls trace once."""
    first, second = (_python(_CACHED, tmp_path).split() for _ in range(2))
    assert first[0] == second[0] == "1"
    assert len(first) > 1
    assert first == second


def test_a34_no_address_in_the_module():
    call = make_call(34, Sq=8)
    f, args = function_of(call, "native")
    text = jax.jit(f).lower(*args).as_text()
    assert "0x7f" not in text.lower()
    assert text == jax.jit(function_of(call, "native")[0]).lower(*args).as_text()


@pytest.mark.gpu
def test_a35_second_device():
    if len(jax.devices()) < 2:
        pytest.skip("needs a second NVIDIA GPU")
    call = make_call(35, Sq=64, D=64, dtype="bfloat16")
    g, args = value_and_grads(call, "native")
    out = jax.jit(g)(*jax.device_put(args, jax.devices()[1]))
    assert all(x.devices() == {jax.devices()[1]} for x in jax.tree.leaves(out))
    verify(call, {name: np.asarray(x) for name, x in out.items()})


@pytest.mark.gpu
def test_a35_graph_capture():
    """Ten attention calls in one jit, the first run captured; three replays with new inputs."""

    @jax.jit
    def f(q, k, v):
        for _ in range(10):
            q = flash_attention(q, k, v, causal=True, implementation="native")
        return q

    for seed in range(3):
        call = make_call(seed, Sq=128, D=64, dtype="bfloat16")
        q, k, v = call.arrays.values()
        want = q.astype(np.float64)
        for _ in range(10):
            want = oracle.attention(want, k, v, causal=True)[0].astype(BF16).astype(np.float64)
        check_close("o", np.asarray(f(q, k, v), np.float64), want, atol=0.03)
    assert compiled_text(make_call(35, Sq=128, D=64, dtype="bfloat16"), "native")


def test_a36_import_needs_no_device():
    """Importing starts no backend and works where no GPU platform exists."""
    out = _python(
        """
        import jax_flashtrain
        from jax._src import xla_bridge
        print(xla_bridge.backends_are_initialized())
        """
    )
    assert out.split() == ["False"]


def test_a36_no_link_to_jaxlib():
    """The compiled part needs the C library and the C++ runtime only, never jaxlib's C++ ABI."""
    import jax_flashtrain_native.cpu as native

    with open(native.__file__, "rb") as file:
        data = file.read()
    for name in (b"libjax", b"xla_extension", b"libxla", b"_ZN3xla"):
        assert name not in data


def test_a37_scale_and_order(implementation):
    """The default is D^-0.5 of the unpadded D; score = softcap(scale * q.k) + bias."""
    call = make_call(37, Sq=8, D=72)
    got = run(call, implementation)
    call.static["scale"] = 72**-0.5
    same = run(call, implementation)
    for name in got:
        check_equal(name, got[name], same[name])
    bias = draw(np.random.default_rng(37), (1, 2, 8, 8), np.float32, std=3.0)
    check(make_call(37, Sq=8, D=72, scale=0.5, bias=bias, softcap=2.0), implementation)


@pytest.mark.parametrize("D", [8, 32, 256, 512])
def test_a38_memory_is_linear(D, implementation):
    """S = 8192 with GQA: temporary memory is a few inputs, not S x S (which is 1 GB here)."""
    shapes = [jax.ShapeDtypeStruct((1, 8192, H, D), jnp.float32) for H in (4, 1, 1)]

    def loss(q, k, v):
        return flash_attention(q, k, v, causal=True, implementation=implementation).sum()

    memory = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes).compile().memory_analysis()
    inputs = 8192 * 6 * D * 4
    assert memory.temp_size_in_bytes < 12 * inputs + 128 * 2**20


def test_a38_memory_with_a_key_bias(implementation):
    shapes = [jax.ShapeDtypeStruct((1, 8192, 4, 32), jnp.float32) for _ in range(3)]
    bias = jax.ShapeDtypeStruct((1, 4, 1, 8192), jnp.float32)

    def loss(q, k, v, bias):
        return flash_attention(q, k, v, bias=bias, implementation=implementation).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*shapes, bias).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8192 * 8192 * 4  # one head's S x S


def test_a38_what_runs_can_be_asked():
    q = jax.ShapeDtypeStruct((1, 16, 2, 8), jnp.float32)
    platform = jax.default_backend().replace("gpu", "cuda")
    answer = jax_flashtrain.explain(q, q, q)
    assert (answer.backend, answer.reason) == (platform, "")
    assert answer.kernel
    other = jax_flashtrain.explain(q, q, q, platform="rocm")
    assert other.backend == "jax"
    assert "rocm" in other.reason


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e38])
def test_a39_values_at_hidden_places(junk, implementation):
    """k[1] and v[1] are hidden from every query: o and the gradients are those of zeros there."""
    mask = np.asarray([[[[True, False], [True, False]]]])
    call = make_call(39, Sq=2, D=4, mask=mask)
    call.arrays["k"][:, 1] = call.arrays["v"][:, 1] = 0
    want = run(call, implementation)
    call.arrays["k"][:, 1] = call.arrays["v"][:, 1] = junk
    got = check(call, implementation)
    for name in want:
        check_equal(name, got[name], want[name])


def test_every_row_has_a_test(request):
    """A1 to A39, each by name."""
    rows = {name.split("_")[1] for name in globals() if name.startswith("test_a")}
    assert rows == {f"a{n}" for n in range(1, 40)}
