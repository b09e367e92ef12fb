"""Accuracy over dtypes, sizes and extreme values, against the float64 oracle under tolerances.py.

The native kernels get the whole grid; the blockwise code, one path for all sizes, a sample.
"""

import itertools
import os
import subprocess
import sys

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checking import (
    BACKEND,
    DTYPES,
    Call,
    check,
    check_kernel_ran,
    draw,
    make_call,
    references,
    run,
    value_and_grads,
    verify,
)
from jax.test_util import check_grads
from tolerances import check_close, check_equal

from jax_flashtrain import flash_attention

BF16 = np.dtype(ml_dtypes.bfloat16)
ALL_DTYPES = tuple(DTYPES)


@pytest.fixture(autouse=True)
def _double_precision(request):
    """float64 cases need x64; nothing else may see it."""
    if (
        "float64" in request.node.callspec.params.values()
        if hasattr(request.node, "callspec")
        else ()
    ):
        request.getfixturevalue("x64")


def test_the_native_kernel_is_what_runs():
    """What the name "native" promises everywhere in this file."""
    check_kernel_ran(make_call(Sq=9), "native")
    check_kernel_ran(make_call(Sq=9), "jax")


# ---- derivatives --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True, "Sk": 9}, {"Hq": 4, "Dv": 3}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_check_grads(dtype, options, implementation):
    """jax.test_util.check_grads, reverse mode, of q, k and v on (o, L)."""
    sizes = {"Sq": 7, "Hq": 2, "Hkv": 2, "D": 5} | {
        k: x for k, x in options.items() if k != "causal"
    }
    call = make_call(3, dtype=dtype, std=0.5, **sizes)
    tolerance = {"float32": 2e-2, "float64": 1e-7}[dtype]

    def f(q, k, v):
        return flash_attention(
            q, k, v, causal="causal" in options, return_lse=True, implementation=implementation
        )

    check_grads(
        f, tuple(call.arrays.values()), order=1, modes=("rev",), atol=tolerance, rtol=tolerance,
        eps=1e-2 if dtype == "float32" else 1e-5,
    )  # fmt: skip


# ---- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_dtypes_and_layouts(dtype, layout, implementation):
    check(
        make_call(1, B=2, Sq=37, Sk=51, Hq=4, Hkv=2, D=20, Dv=12, dtype=dtype, layout=layout),
        implementation,
    )


@pytest.mark.parametrize("D", cases.HEAD_SIZES)
def test_head_sizes(D):
    check(make_call(D, Sq=19, Sk=35, D=D, causal=True), "native")


@pytest.mark.parametrize("D", [1, 7, 16, 40, 65, 128, 256, 512])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_head_sizes_of_other_dtypes(D, dtype):
    check(make_call(D, Sq=19, Sk=35, D=D, dtype=dtype), "native")


@pytest.mark.parametrize(("D", "Dv"), cases.UNEQUAL_HEAD_SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unequal_head_sizes(D, Dv, dtype):
    check(make_call(D, Sq=21, Sk=17, Hq=2, Hkv=1, D=D, Dv=Dv, dtype=dtype), "native")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("S", cases.LENGTHS)
def test_lengths(S, causal):
    check(make_call(S, Sq=S, Hq=2, Hkv=1, D=24, causal=causal), "native")


@pytest.mark.parametrize("S", [1, 17, 64, 129])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_lengths_of_other_dtypes(S, dtype):
    check(make_call(S, Sq=S, D=24, dtype=dtype, causal=True), "native")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("Sq", "Sk"), cases.UNEQUAL_LENGTHS)
def test_unequal_lengths(Sq, Sk, causal):
    check(make_call(Sq, Sq=Sq, Sk=Sk, D=16, causal=causal, layout="BNTH"), "native")


@pytest.mark.parametrize(("Sq", "Sk"), [(5, 2), (7, 130), (300, 77)])
def test_unequal_lengths_blockwise(Sq, Sk):
    check(make_call(Sq, Sq=Sq, Sk=Sk, D=16, causal=True), "jax")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("Hq", "Hkv"), cases.HEADS)
def test_grouped_heads(Hq, Hkv, dtype):
    check(make_call(Hq, B=2, Sq=33, Sk=29, Hq=Hq, Hkv=Hkv, D=8, dtype=dtype, causal=True), "native")


def test_grouped_heads_blockwise():
    check(make_call(5, B=2, Sq=33, Sk=29, Hq=6, Hkv=2, D=8, causal=True), "jax")


@pytest.mark.parametrize("batch", [(), (2, 3), (1, 2, 1, 2)], ids=str)
def test_leading_dimensions(batch, implementation):
    """Any number of batch dimensions, also none; L is [*batch, H, S]."""
    got = check(make_call(4, B=batch, Sq=9, Sk=11, D=8, causal=True), implementation)
    assert got["o"].shape == (*batch, 9, 2, 16 // 2)
    assert got["lse"].shape == (*batch, 2, 9)


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize(
    "sizes", [{"B": 0}, {"Sq": 0, "Sk": 5}, {"Sq": 5, "Sk": 0}, {"B": (2, 0)}], ids=str
)
def test_empty_arrays(sizes, layout, implementation):
    options = {"Sq": 5, "D": 8, "layout": layout} | sizes
    sinks = np.asarray([0.5, -1.0], np.float32)
    for given in (None, sinks):
        check(make_call(1, causal=True, sinks=given, **options), implementation)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("S", cases.LENGTHS)
def test_every_length_with_every_head_size(S, causal, dtype):
    """The full grid (about an hour): S x D x dtype, GQA, both layouts alternating."""
    for n, D in enumerate(cases.HEAD_SIZES):
        layout = ("BTNH", "BNTH")[n % 2]
        check(
            make_call(n, Sq=S, Hq=2, Hkv=1, D=D, dtype=dtype, causal=causal, layout=layout),
            "native",
        )


# ---- bias and mask ------------------------------------------------------------------------------

PATTERNS = [pytest.param(p, id=cases.pattern_name(p)) for p in cases.BROADCAST_PATTERNS]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_bias_patterns(pattern, implementation):
    """All 16 broadcast patterns of bias, and of mask (the complementary one), every gradient."""
    full, rng = (2, 4, 19, 23), np.random.default_rng(7)
    bias = draw(rng, cases.broadcast_shape(pattern, full), np.float32)
    mask = rng.random(cases.broadcast_shape([not p for p in pattern], full)) < 0.8
    check(make_call(2, B=2, Sq=19, Sk=23, Hq=4, Hkv=2, D=8, bias=bias, mask=mask), implementation)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_mask_patterns_with_whole_tiles_hidden(pattern):
    """Masks larger than a tile, in stripes: tiles that are all True, all False and mixed occur."""
    full = (2, 2, 150, 170)
    shape = cases.broadcast_shape(pattern, full)
    b, h, i, j = np.ogrid[tuple(slice(n) for n in shape)]
    mask = ((i // 70 + j // 60 + h + b) % 2 == 0) & ~((i == 3) & (j % 5 == 1))
    got = check(make_call(2, B=2, Sq=150, Sk=170, D=8, mask=mask, dtype="bfloat16"), "native")
    assert got["o"].any() or not mask.any()


@pytest.mark.parametrize("bias_dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_bias_dtypes(dtype, bias_dtype, implementation, x64):
    """Any float dtype of bias with any dtype of q; dbias comes back in the dtype of bias."""
    bias = draw(np.random.default_rng(1), (1, 2, 17, 1), DTYPES[bias_dtype])
    got = check(make_call(1, B=2, Sq=17, D=8, dtype=dtype, bias=bias), implementation)
    assert got["dbias"].dtype == DTYPES[bias_dtype]


def test_bias_of_minus_infinity(implementation):
    """Weight 0; a row of nothing else is an empty row."""
    bias = np.where(np.random.default_rng(3).random((1, 2, 20, 30)) < 0.4, -np.inf, 0.3)
    bias[0, 0, 4] = bias[0, 1, 19] = -np.inf
    call = make_call(3, Sq=20, Sk=30, D=8, bias=bias.astype(np.float32))
    got = check(call, implementation)
    assert got["lse"][0, 0, 4] == got["lse"][0, 1, 19] == -np.inf
    assert not got["o"][0, 4, 0].any()
    for junk in (np.inf, np.nan):  # mean(L^2) over such a row
        call.dlse[0, 0, 4] = call.do[0, 4, 0] = junk
        again = check(call, implementation)
        for name in got:
            check_equal(name, again[name], got[name])


# ---- extreme values -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_times_eight(dtype, implementation):
    call = make_call(8, Sq=70, Sk=90, D=32, dtype=dtype, causal=True)
    call.arrays["q"] = (call.arrays["q"].astype(np.float32) * 8).astype(call.dtype)
    check(call, implementation)


def _weights_sum_to_one(call, got, limit=1e-5):
    """With v = 1, o is sum_j p_ij; the sum of dv over the keys is that of do over the rows."""
    assert np.all(call.arrays["v"] == 1)
    check_close("sum of p, forward", got["o"], np.ones(got["o"].shape), atol=limit)
    rows = call.do.astype(np.float64).sum(1)
    dv = got["dv"].astype(np.float64).sum(1)
    scale = np.abs(call.do.astype(np.float64)).sum(1).max()
    rounding = 0.0 if call.dtype == np.float32 else float(ml_dtypes.finfo(call.dtype).eps)
    check_close("sum of p, backward", dv, rows, atol=(limit + rounding) * scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("level", [-65504.0, -1e9, -1e30, float(np.finfo(np.float32).min)])
def test_rows_far_below_zero_sum_to_one(level, dtype, implementation):
    """Every key of a row at one huge negative bias: a float32 L alone cannot give p back."""
    bias = np.full((1, 1, 40, 1), level, np.float32)
    call = make_call(5, Sq=40, Sk=77, D=16, dtype=dtype, bias=bias)
    call.arrays["v"][:] = 1
    got = run(call, implementation)
    _weights_sum_to_one(call, got)
    check_close("lse", got["lse"], np.full(got["lse"].shape, level), rtol=1e-3)
    for name in ("dq", "dk"):
        assert np.isfinite(got[name].astype(np.float32)).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("level", [1e4, 8e6])
def test_large_logits_sum_to_one(level, sign, implementation):
    """All logits near +-level (from q.k, not from a bias), S past a tile."""
    call = make_call(6, Sq=40, Sk=150, Hq=1, D=16, std=1e-3)
    size = np.sqrt(level / 4)
    call.arrays["q"] += np.float32(size)
    call.arrays["k"] += np.float32(sign * size)
    call.arrays["v"][:] = 1
    got = run(call, implementation)
    _weights_sum_to_one(call, got)
    check_close("lse", got["lse"], np.full(got["lse"].shape, sign * level), rtol=1e-3)


def test_alternating_huge_rows(implementation):
    """Rows at every level in one tile, beside ordinary ones, match the oracle."""
    levels = np.asarray(
        [0, -65504, -1e9, 0, -1e30, np.finfo(np.float32).min, -np.inf, 1e4], np.float32
    )
    call = make_call(
        9, Sq=40, Sk=33, D=16, std=0.0, bias=np.resize(levels, 40).reshape(1, 1, 40, 1)
    )
    call.arrays["v"] = draw(np.random.default_rng(1), call.arrays["v"].shape, np.float32)
    got = run(call, implementation)
    wanted, _ = references(call)
    for name in ("o", "lse", "dq", "dk", "dv"):
        check_close(name, got[name], wanted[name].want, atol=2e-6 * 40, rtol=1e-6)


@pytest.mark.parametrize("sink", [-1e4, -90.0, 90.0, 1e4])
def test_sinks_far_from_the_logits(sink, implementation):
    """The sink belongs into the maximum: exp(sink - m) with the keys' m alone overflows."""
    sinks = np.asarray([sink, 0.5], np.float32)
    call = make_call(12, Sq=20, Sk=90, D=8, sinks=sinks)
    got = run(call, implementation)
    wanted, _ = references(call)
    for name, reference in wanted.items():
        scale = np.abs(reference.want).max()
        check_close(name, got[name], reference.want, atol=4e-6 * scale + 1e-6)


def test_sink_of_an_empty_row(implementation):
    """L = sink there and dL goes to the sink, whatever do holds."""
    call = make_call(13, Sq=30, Sk=20, D=8, causal=True, sinks=np.asarray([0.3, -0.7], np.float32))
    quiet = check(call, implementation)
    np.testing.assert_array_equal(
        quiet["lse"][0, :, :10], [[np.float32(0.3)] * 10, [np.float32(-0.7)] * 10]
    )
    assert not quiet["o"][0, :10].any()
    for junk in (np.nan, np.inf):
        call.do[:, :10] = junk
        got = check(call, implementation)
        for name in quiet:
            check_equal(name, got[name], quiet[name])
    call.dlse[..., :10] += 1
    moved = run(call, implementation)["dsinks"] - quiet["dsinks"]
    check_close("dsinks", moved, np.full(2, 10.0), atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_bf16_gradients_are_near_the_rounding_floor(causal):
    """The error of o, dq, dk, dv in bf16 is at most 1.1 x that of rounding the right result.

    The Metal kernels take delta from the rounded o, as FlashAttention-2 does: 1.25 x. Tensor cores
    take P and dS in bf16: 1.7 x (1.53 x in the emulator).
    """
    limit = {"metal-emulated": 1.25, "cuda": 1.7}.get(BACKEND, 1.1)
    call = make_call(10, B=2, Sq=256, D=64, dtype="bfloat16", causal=causal, dlse=False)
    got, (wanted, _) = run(call, "native"), references(call)
    for name in ("o", "dq", "dk", "dv"):
        want = wanted[name].want
        floor = np.linalg.norm(want.astype(BF16).astype(np.float64) - want)
        assert np.linalg.norm(got[name].astype(np.float64) - want) <= limit * floor, name


# ---- NaN at places that nobody sees -------------------------------------------------------------

POISONS = {
    "lengths": {
        "kv_lengths": np.asarray([50, 17], np.int32), "q_lengths": np.asarray([33, 40], np.int32),
    },
    "causal offset": {"causal": True, "q_offset": np.asarray([3, 11], np.int32)},
    "causal": {"causal": True, "q_offset": 0},
    "window": {"window": (5, 2), "q_offset": np.int32(9)},
    "segments": {
        "segment_ids": (np.repeat([[1, 2]], 20, 1).repeat(2, 0).reshape(2, 40).astype(np.int32),
                        np.resize([1, 7, 2], (2, 70)).astype(np.int32)),
    },
    "mask": {"mask": np.random.default_rng(0).random((2, 1, 1, 70)) < 0.5},
    "mask per head": {"mask": np.random.default_rng(1).random((1, 4, 1, 70)) < 0.3},
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", POISONS.values(), ids=POISONS)
def test_hidden_places_may_hold_nan(options, dtype, implementation):
    """NaN, inf in hidden keys, values, biases, in empty rows and their cotangents change no bit."""
    if implementation == "jax" and dtype == "bfloat16":
        dtype = "float16"  # another dtype for free
    bias = draw(np.random.default_rng(2), (2, 4, 40, 70), np.float32)
    call = make_call(7, B=2, Sq=40, Sk=70, Hq=4, Hkv=2, D=16, dtype=dtype, bias=bias, **options)
    see = references(call)[1].see
    hidden_key = ~see.reshape(2, 2, 80, 70).any(2).swapaxes(1, 2)  # [B, Sk, Hkv]
    empty_row = ~see.any(-1).swapaxes(1, 2)  # [B, Sq, Hq]
    assert hidden_key.any()
    clean, dirty = _filled(call, hidden_key, empty_row, see, 0.0), []
    for junk in (np.nan, np.inf):
        dirty.append(_filled(call, hidden_key, empty_row, see, junk))
    want = check(clean, implementation)
    g, _ = value_and_grads(clean, implementation)
    compiled = jax.jit(g)
    for poisoned in dirty:
        out = compiled(*value_and_grads(poisoned, implementation)[1])
        for name in want:
            check_equal(name, np.asarray(out[name]), want[name])


def _filled(call, hidden_key, empty_row, see, junk):
    arrays = {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in call.arrays.items()}
    do, dlse = call.do.copy(), call.dlse.copy()
    arrays["k"][hidden_key] = arrays["v"][hidden_key] = junk
    arrays["q"][empty_row] = do[empty_row] = junk
    dlse[empty_row.swapaxes(1, 2)] = junk
    arrays["bias"][~see] = junk
    return Call(arrays, call.static, do, dlse)


def test_nan_where_it_is_seen_comes_out(implementation):
    """The guarantee must not be a filter: a NaN that a row sees is its result."""
    call = make_call(7, Sq=20, Sk=40, D=8, causal=True)
    call.arrays["v"][0, 35, 1] = np.nan
    o = run(call, implementation)["o"]
    assert np.isnan(o[0, 15:, 1]).all()
    assert np.isfinite(o[0, :, 0]).all()
    call = make_call(7, Sq=20, Sk=40, D=8)
    call.arrays["k"][0, 3, 0, 2] = np.nan
    o = run(call, implementation)["o"]
    assert np.isnan(o[0, :, 0]).all()
    assert np.isfinite(o[0, :, 1]).all()


# ---- threads and instruction sets ---------------------------------------------------------------

_HASHES = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from checking import make_call, run
rng = np.random.default_rng(0)
calls = [
    make_call(1, B=3, Sq=130, Sk=150, Hq=4, Hkv=2, D=32, causal=True),
    make_call(2, Sq=700, Hq=1, D=64, dtype="bfloat16"),
    make_call(3, Sq=1, Sk=900, Hq=8, Hkv=1, D=64),
    make_call(4, B=2, Sq=140, Hq=4, D=16, sinks=np.zeros(4, np.float32),
              alibi_slopes=np.full(4, 0.1, np.float32),
              bias=rng.standard_normal((1, 1, 1, 140)).astype(np.float32)),
    make_call(5, B=2, Sq=140, Hq=4, D=16,
              bias=rng.standard_normal((2, 1, 140, 140)).astype(np.float32)),
]
for call in calls:
    for name, x in sorted(run(call, "native").items()):
        print(name, hashlib.sha256(x.tobytes()).hexdigest())
"""


def test_thread_count_changes_no_bit(backend):
    """o, L and all gradients are bitwise the same with 1, 2, 3 and 5 threads."""
    if backend != "cpu":
        pytest.skip("threads are the CPU backend's")
    here = os.path.dirname(os.path.abspath(__file__))
    answers = {}
    for threads in (1, 2, 3, 5):
        done = subprocess.run(
            [sys.executable, "-c", _HASHES, here],
            env={**os.environ, "NPROC": str(threads)},
            capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        answers[threads] = done.stdout
    assert len(answers[1].splitlines()) == 5 * 5 + 4  # five results a call, and four optional ones
    assert set(answers.values()) == {answers[1]}


def _isa_levels():
    try:
        import jax_flashtrain_native.cpu as native
    except ImportError:
        return ["(no native module)"]
    return native.isa_levels()


@pytest.fixture
def isa(request, backend):
    if backend != "cpu":
        pytest.skip("instruction sets are the CPU backend's")
    import jax_flashtrain_native.cpu as native

    before = native.isa()
    native.set_isa(request.param)
    assert native.isa() == request.param
    yield request.param
    native.set_isa(before)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("isa", _isa_levels(), indirect=True)
def test_instruction_sets(isa, dtype):
    """Every level that this machine can run, forced: tails in all directions and every option."""
    rng = np.random.default_rng(1)
    check(
        make_call(1, B=2, Sq=67, Sk=83, Hq=4, Hkv=2, D=40, Dv=24, dtype=dtype, causal=True),
        "native",
    )
    check(make_call(2, Sq=130, Sk=129, D=129, dtype=dtype, std=2.0), "native")
    check(
        make_call(
            3, B=2, Sq=35, Sk=50, Hq=4, Hkv=1, D=17, dtype=dtype, softcap=3.0, window=(20, 9),
            bias=draw(rng, (1, 4, 35, 50), DTYPES[dtype]), mask=rng.random((2, 1, 35, 50)) < 0.8,
            alibi_slopes=np.full(4, 0.05, np.float32),
            sinks=np.linspace(-1, 1, 4, dtype=np.float32),
            dropout_rate=0.2, dropout_key=jax.random.key(3),
        ),
        "native",
    )  # fmt: skip


def test_an_unknown_instruction_set_is_refused(backend):
    if backend != "cpu":
        pytest.skip("instruction sets are the CPU backend's")
    import jax_flashtrain_native.cpu as native

    assert native.isa() in native.isa_levels()
    with pytest.raises(ValueError, match=r"isa must be one of.*got mmx"):
        native.set_isa("mmx")


# ---- dropout ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [2.0**-17, 0.1, 0.5, 1 - 2.0**-16])
def test_dropout_rates(rate, implementation):
    """Thresholds 0 (or 1), in the middle, and 65535 of 65536."""
    call = make_call(1, B=2, Sq=20, Sk=45, Hq=4, Hkv=2, D=8, dropout_rate=rate,
                     dropout_key=jax.random.key(9))  # fmt: skip
    check(call, implementation)


@pytest.mark.parametrize("batch", [(), (2, 2)], ids=str)
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_dropout_counts_heads_over_the_whole_batch(batch, layout, implementation):
    """The counter is b * Hq + h of the call as written; past one tile, no multiples of 8."""
    call = make_call(2, B=batch, Sq=70, Sk=93, Hq=2, Hkv=1, D=8, layout=layout, dropout_rate=0.4,
                     dropout_key=jax.random.key(5), causal=True)  # fmt: skip
    check(call, implementation)


def test_dropout_takes_legacy_and_traced_keys(implementation):
    legacy = jax.random.PRNGKey(7)
    check(make_call(3, Sq=20, D=8, dropout_rate=0.3, dropout_key=legacy), implementation)
    typed = jax.random.wrap_key_data(legacy)
    call = make_call(3, Sq=20, D=8, dropout_rate=0.3, dropout_key=typed)
    check(call, implementation)


# ---- one static shape, many values: no recompilation --------------------------------------------


def test_traced_options_do_not_recompile(implementation):
    """Offsets, lengths, window sides, ids and slopes are operands: one trace serves all values."""
    traces = 0

    @jax.jit
    def f(q, k, v, offset, lengths, left, ids, slopes):
        nonlocal traces
        traces += 1
        return flash_attention(
            q, k, v, causal=True, q_offset=offset, kv_lengths=lengths, window=(left, None),
            segment_ids=(ids[:, :9], ids), alibi_slopes=slopes, return_lse=True,
            implementation=implementation,
        )  # fmt: skip

    rng = np.random.default_rng(0)
    for offset, lengths, left in itertools.product((0, 5, -3), ([14, 2], [0, 40]), (0, 4)):
        call = make_call(
            1, B=2, Sq=9, Sk=14, Hq=4, Hkv=2, D=8, causal=True, q_offset=np.int32(offset),
            kv_lengths=np.asarray(lengths, np.int32), alibi_slopes=draw(rng, (4,), np.float32),
        )  # fmt: skip
        ids = rng.integers(0, 2, (2, 14)).astype(np.int32)
        call.static["window"] = (left, None)
        call.arrays["segment_ids"] = (ids[:, :9], ids)
        a = call.arrays
        o, lse = f(
            a["q"], a["k"], a["v"], np.int32(offset), a["kv_lengths"], np.int32(left), ids,
            a["alibi_slopes"],
        )  # fmt: skip
        wanted, attention = references(call)
        for name, x in (("o", o), ("lse", lse)):
            wanted[name].check(name, x, jnp.float32, sensitivity=attention.sensitivity)
    assert traces == 1


def test_eager_and_jit_agree(implementation):
    call = make_call(2, Sq=30, D=8, causal=True)
    verify(call, run(call, implementation, jit=False))
