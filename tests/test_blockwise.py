"""The blockwise JAX implementation on canonical operands: options, derivatives, memory, junk."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.test_util import check_grads
from tolerances import check_close

from jax_flashtrain._src import blockwise, blockwise_tiles, philox
from jax_flashtrain._src.spec import EMPTY_ROW, AttentionSpec, Layout, Operand

O = Operand
SEED = np.array([0x01234567, 0x89ABCDEF], np.uint32)
GRADS = {
    "q": O.Q,
    "k": O.K,
    "v": O.V,
    "bias": O.BIAS,
    "alibi": O.ALIBI_SLOPES,
    "sinks": O.SINKS,
}


@pytest.fixture(autouse=True)
def _double(x64):
    """Every test may use float64."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 16, so that short sequences have several."""
    monkeypatch.setattr(blockwise_tiles, "_MAX_BLOCK", 16)
    monkeypatch.setattr(blockwise_tiles, "_MIN_BLOCK", 16)


# ---- calls --------------------------------------------------------------------------------------


def origin(batch, Hq, row=0, col=0):
    """dropout_origin of a whole call."""
    head = np.arange(int(np.prod(batch)) * Hq, dtype=np.uint32).reshape(*batch, Hq)
    return np.stack([np.full_like(head, row), np.full_like(head, col), head], -1)


def canonical(q, k, v, options):
    """(spec, operands) of the oracle's arguments; offsets and lengths are arrays or ints."""
    options = dict(options)
    layout = Layout[options.pop("layout", "BTNH")]
    batch = q.shape[:-3]
    Hq = q.shape[-2 if layout == Layout.BTNH else -3]
    operands = {O.Q: q, O.K: k, O.V: v}

    def per_batch(x, dtype=np.int32):
        x = np.asarray(x, dtype)
        return x if x.ndim else np.full((1,) * len(batch), x)

    window = options.pop("window", None) or (None, None)
    for key, op in (
        ("q_offset", O.Q_OFFSET),
        ("q_lengths", O.Q_LENGTHS),
        ("kv_lengths", O.KV_LENGTHS),
    ):
        if options.get(key) is not None:
            operands[op] = per_batch(options.pop(key))
    if options.pop("traced_window", False):
        for side, op in zip(window, (O.WINDOW_LEFT, O.WINDOW_RIGHT), strict=True):
            if side is not None:
                operands[op] = per_batch(side)
        window = (None, None)
    ids = options.pop("segment_ids", None)
    if ids is not None:
        ids = ids if isinstance(ids, tuple) else (ids, ids)
        operands[O.Q_SEGMENT_IDS], operands[O.KV_SEGMENT_IDS] = (x.astype(np.int32) for x in ids)
    for key, op in (("mask", O.MASK), ("bias", O.BIAS)):
        if options.get(key) is not None:
            operands[op] = options.pop(key)
    for key, op in (("alibi_slopes", O.ALIBI_SLOPES), ("sinks", O.SINKS)):
        x = options.pop(key, None)
        if x is not None:
            operands[op] = x.reshape((1,) * (len(batch) + 1 - x.ndim) + x.shape)
    if options.get("dropout_rate", 0) > 0:
        operands[O.DROPOUT_SEED] = options.pop("dropout_seed").reshape((1,) * len(batch) + (2,))
        operands[O.DROPOUT_ORIGIN] = origin(batch, Hq)
    D = q.shape[-1]
    spec = AttentionSpec(
        scale=options.pop("scale", D**-0.5), window=window, layout=layout, **options
    )
    return spec, {op: jnp.asarray(x) for op, x in operands.items()}


def run(spec, operands, do, dlse, shapes, derivative_form=False):
    """(o, L, gradients by name), jitted."""

    @jax.jit
    def f(operands, do, dlse):
        residual = blockwise.forward(spec, operands)

        def pull(do):
            return blockwise.backward(spec, operands, *residual, do, dlse, shapes)

        if derivative_form:  # linear in (do, dlse): along dlse = 0 the value is what we want
            return residual, jax.jvp(pull, (do,), (jnp.zeros_like(do),))[0]
        return residual, pull(do)

    (o, row_max, row_log_sum), grads = f(operands, do, dlse)
    row_max, row_log_sum = np.asarray(row_max), np.asarray(row_log_sum)
    assert np.isfinite(row_max).all()
    assert np.isfinite(row_log_sum).all()
    lse = np.where(row_log_sum >= EMPTY_ROW / 2, -np.inf, row_max + row_log_sum)
    return o, lse, grads


def verify(q, k, v, do, dlse, options, tolerance=1e-10, derivative_form=False):
    want = oracle.Attention(q, k, v, **{n: x for n, x in options.items() if n != "traced_window"})
    gradients = dict(zip(GRADS, want.backward(do, dlse), strict=True))
    spec, operands = canonical(q, k, v, options)
    shapes = {n: operands[op].shape for n, op in GRADS.items() if op in operands}
    o, lse, grads = run(spec, operands, do, dlse, shapes, derivative_form)
    check_close("o", o, want.o, atol=tolerance)
    check_close("lse", lse, want.lse, atol=tolerance, rtol=tolerance)
    assert set(grads) == set(shapes)
    for name, x in grads.items():
        assert x.shape == shapes[name]
        assert x.dtype == operands[GRADS[name]].dtype
        scale = np.abs(gradients[name]).max(initial=1.0)
        check_close(
            f"d{name}",
            np.reshape(x, gradients[name].shape),
            gradients[name],
            atol=tolerance * scale,
        )
    return want


def draw_case(rng):
    """A random combination of everything."""
    yes = lambda: rng.random() < 0.4  # noqa: E731
    n = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    batch = tuple(rng.integers(1, 3, size=rng.integers(0, 3)))
    Hkv = int(rng.integers(1, 3))
    Hq = Hkv * int(rng.integers(1, 4))
    Sq, Sk = (int(x) for x in rng.integers(1, 50, size=2))
    D, Dv = (int(x) for x in rng.integers(1, 9, size=2))
    q, k, v = n(*batch, Sq, Hq, D), n(*batch, Sk, Hkv, D), n(*batch, Sk, Hkv, Dv)
    do, dlse = n(*batch, Sq, Hq, Dv), n(*batch, Hq, Sq)
    full = (*batch, Hq, Sq, Sk)
    some = lambda: tuple(1 if yes() else size for size in full)  # noqa: E731
    options = {"causal": yes(), "scale": float(rng.uniform(0.1, 1))}
    if yes():
        options["layout"] = "BNTH"
        q, k, v, do = (np.swapaxes(x, -3, -2) for x in (q, k, v, do))
    if yes():
        sides = [None if yes() else int(rng.integers(0, 30)) for _ in range(2)]
        options |= {"window": tuple(sides), "traced_window": yes()}
    if yes():
        options["q_offset"] = rng.integers(-Sq, Sk + 1, size=batch if yes() else ())
    if yes():
        options["q_lengths"] = rng.integers(0, Sq + 5, size=batch)
    if yes():
        options["kv_lengths"] = rng.integers(0, Sk + 5, size=batch)
    if yes():
        options["segment_ids"] = tuple(rng.integers(0, 3, size=(*batch, S)) for S in (Sq, Sk))
    if yes():
        options["mask"] = rng.random(some()) < 0.7
    if yes():
        bias = n(*some())
        bias[rng.random(bias.shape) < 0.1] = -np.inf
        options["bias"] = bias
    if yes():
        options["alibi_slopes"] = rng.uniform(0, 0.3, size=(*batch, Hq) if yes() else (Hq,))
    if yes():
        options["sinks"] = n(Hq)
    if yes():
        options["softcap"] = float(rng.uniform(0.5, 5))
    if yes():
        options |= {"dropout_rate": float(rng.uniform(0.05, 0.8)), "dropout_seed": SEED}
    return q, k, v, do, dlse, options


def _mostly_slow(values, quick):
    """Parameters of which only the first ``quick`` run in the quick suite."""
    return [
        value if n < quick else pytest.param(value, marks=pytest.mark.slow)
        for n, value in enumerate(values)
    ]


SOME_SEEDS = _mostly_slow(range(20), 6)
#: Which of the four dimensions broadcast; the quick ones switch every dimension both ways.
PATTERNS = _mostly_slow(
    sorted(itertools.product((False, True), repeat=4), key=lambda p: (sum(p) != 2, p)), 6
)


@pytest.mark.parametrize("seed", SOME_SEEDS)
def test_random_combinations(seed):
    rng = np.random.default_rng(1000 + seed)
    verify(*draw_case(rng), derivative_form=seed % 2 == 1)


def make(B=2, Sq=40, Sk=37, Hq=4, Hkv=2, D=8, Dv=5, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    n = lambda *shape: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    q, k, v = n(B, Sq, Hq, D), n(B, Sk, Hkv, D), n(B, Sk, Hkv, Dv)
    return q, k, v, n(B, Sq, Hq, Dv), rng.standard_normal((B, Hq, Sq))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_bias_and_mask_broadcasting(pattern):
    q, k, v, do, dlse = make()
    shape = tuple(n if full else 1 for n, full in zip((2, 4, 40, 37), pattern, strict=True))
    rng = np.random.default_rng(5)
    options = {"bias": rng.standard_normal(shape), "mask": rng.random(shape[::1]) < 0.8}
    verify(q, k, v, do, dlse, options, derivative_form=sum(pattern) % 2 == 1)


@pytest.mark.parametrize(
    "S",
    [1, 15, 17, pytest.param(16, marks=pytest.mark.slow), pytest.param(33, marks=pytest.mark.slow)],
)
def test_lengths_around_a_block(S):
    verify(*make(Sq=S, Sk=S), {"causal": True})
    verify(*make(Sq=S, Sk=9), {"causal": True, "bias": np.ones((1, 1, S, 9))})


@pytest.mark.parametrize(("Sq", "Sk", "B"), [(4, 0, 2), (0, 4, 2), (0, 0, 2), (4, 4, 0)])
@pytest.mark.parametrize("sinks", [False, True])
def test_no_pair_at_all(Sq, Sk, B, sinks):
    options = {
        "causal": True,
        "bias": np.ones((1, 1, Sq, Sk)),
        "mask": np.ones((1, 1, Sq, Sk), bool),
    }
    if sinks:
        options["sinks"] = np.array([0.5, -1.0, 2.0, -np.inf])
    q, k, v, do, dlse = make(B=B, Sq=Sq, Sk=Sk)
    verify(q, k, v, do, dlse, options)
    spec, operands = canonical(q, k, v, options)
    residual = blockwise.forward(spec, operands)
    dots = {op: operands[op] for op in GRADS.values() if op in operands}
    o_dot, c_dot = blockwise.tangent(spec, operands, *residual, dots)
    assert o_dot.shape == residual[0].shape
    want = np.where(np.isfinite(options["sinks"]), options["sinks"], 0) if sinks else np.zeros(4)
    finite = {**dots, O.SINKS: jnp.asarray(want)[None]} if sinks else dots
    _, c_dot = blockwise.tangent(spec, operands, *residual, finite)
    if Sk == 0:
        check_close("row_log_sum_dot", c_dot, np.broadcast_to(want[:, None], c_dot.shape))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtypes(dtype):
    q, k, v, do, dlse = (np.asarray(jnp.asarray(x, dtype), np.float64) for x in make())
    want = oracle.Attention(q, k, v, causal=True)
    gradients = dict(zip(GRADS, want.backward(do, dlse), strict=True))
    spec, operands = canonical(*(jnp.asarray(x, dtype) for x in (q, k, v)), {"causal": True})
    shapes = {n: operands[GRADS[n]].shape for n in "qkv"}
    o, lse, grads = run(
        spec, operands, jnp.asarray(do, dtype), jnp.asarray(dlse, jnp.float32), shapes
    )
    assert o.dtype == dtype
    assert lse.dtype == np.float32
    tolerance = 3 * float(jnp.finfo(dtype).eps)
    check_close("o", o, want.o, atol=tolerance * 4)
    check_close("lse", lse, want.lse, atol=1e-5)
    for name, x in grads.items():
        assert x.dtype == dtype
        check_close(name, x, gradients[name], atol=tolerance * np.abs(gradients[name]).max())


@pytest.mark.parametrize("block", [8, 64])
def test_any_block_size_gives_the_same(block, monkeypatch):
    monkeypatch.setattr(blockwise_tiles, "_MAX_BLOCK", block)
    monkeypatch.setattr(blockwise_tiles, "_MIN_BLOCK", block)
    rng = np.random.default_rng(3)
    options = {
        "causal": True,
        "window": (21, None),
        "mask": rng.random((2, 1, 40, 37)) < 0.8,
        "bias": rng.standard_normal((1, 4, 40, 37)),
        "dropout_rate": 0.3,
        "dropout_seed": SEED,
        "segment_ids": (np.arange(80).reshape(2, 40) // 20, np.arange(74).reshape(2, 37) // 20),
    }
    verify(*make(), options)


@pytest.mark.parametrize(
    "level", [-65504.0, -1e4, -8e6, -1e9, -1e30, float(np.finfo(np.float32).min)]
)
def test_huge_logits_still_sum_to_one(level):
    q, k, v, do, _dlse = make(dtype=np.float32)
    bias = np.full((1, 1, 40, 37), level, np.float32)
    spec, operands = canonical(q, k, np.ones_like(v), {"bias": bias})
    shapes = {n: operands[GRADS[n]].shape for n in "qkv"}
    ones = jnp.ones_like(do)
    o, _, grads = run(spec, operands, ones, jnp.zeros((2, 4, 40), jnp.float32), shapes)
    check_close("o", o, np.ones(o.shape), atol=1e-5)
    # sum_j dv_j = sum over rows and the group of sum_j p_ij = 40 * 2
    check_close("dv", np.sum(grads["v"], 1), np.full((2, 2, 5), 80.0), rtol=1e-5)


# ---- junk ---------------------------------------------------------------------------------------


def poisoned_case():
    """Options that hide keys 30.. and rows 33.., and poison at every hidden place."""
    q, k, v, do, dlse = make()
    rng = np.random.default_rng(8)
    see = np.ones((2, 1, 40, 37), bool)
    see[..., 5] = False
    see[:, :, 7] = False
    options = {
        "kv_lengths": np.array([30, 30]),
        "q_lengths": np.array([33, 33]),
        "causal": True,
        "q_offset": np.array([0, 3]),
        "mask": see,
        "bias": rng.standard_normal((2, 4, 40, 37)),
        "softcap": 3.0,
    }
    return [q, k, v, do, dlse], options


@pytest.mark.parametrize(
    ("junk", "sinks", "derivative_form"),
    [(np.nan, False, False), (np.nan, True, True), (np.inf, True, False), (1e38, False, True)],
)
def test_hidden_junk_reaches_nothing(junk, sinks, derivative_form):
    (q, k, v, do, dlse), options = poisoned_case()
    if sinks:
        options["sinks"] = np.array([0.1, 0.2, 0.3, -np.inf])
    clean = verify(q, k, v, do, dlse, options)
    for x in (k, v):
        x[:, [5, *range(30, 37)]] = junk
    for x in (q, do):
        x[:, [7, *range(33, 40)]] = junk
    options["bias"][~np.broadcast_to(clean.see, options["bias"].shape)] = junk
    if not sinks:  # a sink does receive the dL of an empty row
        dlse[:, :, [7, *range(33, 40)]] = junk
    spec, operands = canonical(q, k, v, options)
    shapes = {n: operands[op].shape for n, op in GRADS.items() if op in operands}
    o, lse, grads = run(spec, operands, do, dlse, shapes, derivative_form)
    check_close("o", o, clean.o, atol=1e-10)
    check_close("lse", lse, clean.lse, atol=1e-10)
    want = dict(
        zip(
            GRADS,
            clean.backward(np.nan_to_num(do, nan=0), np.where(clean.empty, 0, dlse)),
            strict=True,
        )
    )
    for name, x in grads.items():
        if name != "sinks":
            check_close(name, np.reshape(x, want[name].shape), want[name], atol=1e-9)
    # exact zeros of rows that see nothing, of keys that nobody sees
    assert not np.any(np.asarray(o)[:, 7])
    assert not np.any(np.asarray(grads["q"])[:, [7, 39]])
    assert not np.any(np.asarray(grads["k"])[:, [5, 36]])
    assert not np.any(np.asarray(grads["v"])[:, [5, 36]])


@pytest.mark.slow
def test_hidden_junk_and_second_derivatives():
    (q, k, v, _do, _dlse), options = poisoned_case()
    places = [5, *range(30, 37)], [7, *range(33, 40)]

    def second(q, k, v, bias):
        spec, operands = canonical(q, k, v, {**options, "bias": bias})

        @jax.jit
        def f(operands):
            def loss(operands):
                o, row_max, row_log_sum = blockwise.forward(spec, operands)
                lse = jnp.where(row_log_sum < EMPTY_ROW / 2, row_max + row_log_sum, 0)
                return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(lse))

            def size(some):
                grads = jax.grad(lambda some: loss(operands | some))(some)
                return sum(jnp.sum(g * g) for g in grads.values())

            return jax.grad(size)({op: operands[op] for op in (O.Q, O.K, O.V, O.BIAS)})

        return f(operands)

    want = second(q, k, v, options["bias"])
    see = oracle.visible(
        (2,),
        4,
        40,
        37,
        **{n: options[n] for n in ("kv_lengths", "q_lengths", "causal", "q_offset", "mask")},
    )
    k[:, places[0]] = v[:, places[0]] = np.nan
    q[:, places[1]] = np.nan
    got = second(q, k, v, np.where(see, options["bias"], np.nan))
    for op in want:
        check_close(op.name, got[op], want[op], atol=1e-9)


# ---- derivatives --------------------------------------------------------------------------------


def everything(dtype=np.float64):
    """A small call with every option that has a derivative."""
    q, k, v, do, dlse = make(B=1, Sq=11, Sk=18, Hq=2, Hkv=1, D=3, Dv=2, dtype=dtype)
    rng = np.random.default_rng(2)
    options = {
        "causal": True,
        "softcap": 2.0,
        "bias": rng.standard_normal((1, 2, 11, 18)),
        "alibi_slopes": np.array([0.1, 0.2]),
        "sinks": np.array([0.3, -0.2]),
        "dropout_rate": 0.2,
        "dropout_seed": SEED,
    }
    return q, k, v, do, dlse, options


def attend(spec, fixed, names):
    """A function of the differentiable operands with (o, L) as its value."""

    def f(*values):
        o, row_max, row_log_sum = blockwise.forward(
            spec, fixed | dict(zip(names, values, strict=True))
        )
        return o, row_max + row_log_sum

    return jax.jit(f)


@pytest.mark.slow
@pytest.mark.parametrize("modes", [("rev",), ("fwd", "rev")])
def test_derivatives_against_finite_differences(modes):
    q, k, v, _, _, options = everything()
    spec, operands = canonical(q, k, v, options)
    names = [op for op in GRADS.values() if op in operands]
    values = [operands[op] for op in names]
    check_grads(attend(spec, operands, names), values, order=2, modes=modes, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_third_derivatives_against_finite_differences():
    q, k, v, _, _, options = everything()
    spec, operands = canonical(q, k, v, options)
    names = [op for op in GRADS.values() if op in operands]
    check_grads(
        attend(spec, operands, names),
        [operands[op] for op in names],
        order=3,
        modes=("rev",),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.slow
def test_backward_differentiates():
    """The second order that the native road takes: derivatives of the backward itself."""
    q, k, v, do, dlse, options = everything()
    spec, operands = canonical(q, k, v, options)
    names = [op for op in GRADS.values() if op in operands]
    shapes = {n: operands[op].shape for n, op in GRADS.items() if op in operands}
    o, row_max, row_log_sum = blockwise.forward(spec, operands)

    @jax.jit
    def f(o, row_log_sum, do, dlse, *values):
        moved = operands | dict(zip(names, values, strict=True))
        return blockwise.backward(spec, moved, o, row_max, row_log_sum, do, dlse, shapes)

    values = [o, row_log_sum, jnp.asarray(do), jnp.asarray(dlse), *(operands[op] for op in names)]
    check_grads(f, values, order=1, modes=("fwd", "rev"), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_tangent_is_the_transpose_of_backward():
    q, k, v, do, dlse, options = everything()
    spec, operands = canonical(q, k, v, options)
    residual = blockwise.forward(spec, operands)
    shapes = {n: operands[op].shape for n, op in GRADS.items() if op in operands}
    grads = blockwise.backward(
        spec, operands, *residual, jnp.asarray(do), jnp.asarray(dlse), shapes
    )
    rng = np.random.default_rng(6)
    for name, op in GRADS.items():
        dot = {op: jnp.asarray(rng.standard_normal(operands[op].shape))}
        o_dot, c_dot = blockwise.tangent(spec, operands, *residual, dot)
        forwards = np.vdot(o_dot, do) + np.vdot(c_dot, dlse)
        backwards = np.vdot(grads[name], dot[op])
        check_close(name, forwards, backwards, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "form",
    ["forward", "backward", "tangent", "second", pytest.param("third", marks=pytest.mark.slow)],
)
def test_memory_grows_with_the_length_alone(form):
    spec = AttentionSpec(scale=0.3, causal=True, softcap=3.0)

    def forward(operands):
        return blockwise.forward(spec, operands)

    def backward(operands):
        residual = forward(operands)
        shapes = {n: operands[op].shape for n, op in GRADS.items() if op in operands}
        return blockwise.backward(spec, operands, *residual, residual[0], residual[1], shapes)

    def tangent(operands):
        dots = {op: operands[op] for op in GRADS.values() if op in operands}
        return blockwise.tangent(spec, operands, *forward(operands), dots)

    def size(f):
        return lambda x: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(x)))

    f = {
        "forward": forward,
        "backward": backward,
        "tangent": tangent,
        "second": jax.grad(size(backward)),
        "third": jax.grad(size(jax.grad(size(backward)))),
    }[form]

    def temporary(S):
        array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
        operands = {op: array(1, S, 2, 8) for op in (O.Q, O.K, O.V)} | {O.BIAS: array(1, 2, 1, S)}
        return jax.jit(f).lower(operands).compile().memory_analysis().temp_size_in_bytes

    small, large = temporary(512), temporary(1024)
    assert large <= 2.2 * small, (small, large)


# ---- batch dimensions ---------------------------------------------------------------------------


@pytest.mark.slow
def test_batch_dimensions_of_one_are_broadcast_and_summed():
    rng = np.random.default_rng(4)
    n = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    small = {
        O.Q: n(3, 1, 20, 4, 8),
        O.K: n(1, 2, 19, 2, 8),
        O.V: n(1, 1, 19, 2, 5),
        O.BIAS: n(1, 2, 1, 20, 19),
        O.SINKS: n(1, 1, 4),
        O.ALIBI_SLOPES: n(3, 1, 4),
        O.MASK: rng.random((3, 1, 1, 1, 19)) < 0.7,
        O.KV_LENGTHS: np.array([[15, 19]], np.int32),
        O.DROPOUT_SEED: SEED[None, None],
        O.DROPOUT_ORIGIN: origin((1, 2), 4),
    }
    small = {op: jnp.asarray(x) for op, x in small.items()}
    large = {op: jnp.broadcast_to(x, (3, 2, *x.shape[2:])) for op, x in small.items()}
    do, dlse = n(3, 2, 20, 4, 5), n(3, 2, 4, 20)
    spec = AttentionSpec(scale=0.3, causal=True, dropout_rate=0.25)
    shapes = {name: small[op].shape for name, op in GRADS.items()}
    wide = {name: large[op].shape for name, op in GRADS.items()}
    o, lse, grads = run(spec, small, do, dlse, shapes)
    o2, lse2, grads2 = run(spec, large, do, dlse, wide)
    _, _, grads3 = run(spec, small, do, dlse, wide)
    _, _, grads4 = run(spec, small, do, dlse, shapes, derivative_form=True)
    check_close("o", o, o2, atol=1e-12)
    check_close("lse", lse, lse2, atol=1e-12)
    for name, shape in shapes.items():
        axes = tuple(d for d in range(2) if shape[d] == 1)
        summed = np.sum(grads2[name], axes, keepdims=True)
        assert grads[name].shape == shape
        check_close(name, grads[name], summed, atol=1e-11)
        check_close(name, grads4[name], summed, atol=1e-11)
        check_close(name, grads3[name], grads2[name], atol=1e-11)


@pytest.mark.parametrize("operand", [O.Q, O.K, O.V])
def test_unmapped_operand_is_not_copied(operand):
    """A key block that all elements share stays one block: the product takes it without a copy."""
    spec = AttentionSpec(scale=0.3)
    operands = {op: jnp.ones((4, 40, 2, 8)) for op in (O.Q, O.K, O.V)}
    operands[operand] = operands[operand][:1]
    f = lambda x: blockwise.forward(spec, x)  # noqa: E731
    text = str(jax.make_jaxpr(f)(operands))
    if operand != O.Q:
        assert "f64[1,2,16,8]" in text or "f64[2,16,8]" in text
    np.testing.assert_allclose(
        f(operands)[0], f({op: jnp.ones((4, 40, 2, 8)) for op in operands})[0]
    )


def test_vmap():
    q, k, v, _, _ = make(B=3)
    spec, operands = canonical(q, k, v, {"causal": True})

    def f(q, k, v):
        return blockwise.forward(spec, {O.Q: q, O.K: k, O.V: v})

    want = f(*(operands[op] for op in (O.Q, O.K, O.V)))
    got = jax.vmap(f)(*(operands[op][:, None] for op in (O.Q, O.K, O.V)))
    for x, y in zip(got, want, strict=True):
        check_close("vmap", x[:, 0], y, atol=1e-12)


# ---- dropout ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "col"), [(0, 0), (3, 8), (5, 3), (17, 13)])
def test_dropout_bits_are_those_of_the_global_position(row, col):
    rows, cols, rate = 9, 21, 0.4
    whole = oracle.dropout_keep(SEED, 2, 3, row + rows, col + cols, rate)
    seed = jnp.asarray(SEED)[None]
    for first_row, first_col in ((0, 0), (4, 8)):
        got = philox.dropout_keep(
            rate,
            seed,
            jnp.asarray(origin((2,), 3, row, col)),
            jnp.int32(first_row),
            rows - first_row,
            jnp.int32(first_col),
            cols - first_col,
        )
        np.testing.assert_array_equal(got, whole[:, :, row + first_row :, col + first_col :])


def test_dropout_columns_may_differ_between_elements():
    at = origin((2,), 1)
    at[1, 0, 1] = 5
    whole = oracle.dropout_keep(SEED, 2, 1, 4, 29, 0.5)
    zero = jnp.int32(0)
    got = philox.dropout_keep(0.5, jnp.asarray(SEED)[None], jnp.asarray(at), zero, 4, zero, 24)
    np.testing.assert_array_equal(got[0], whole[0, :, :, :24])
    np.testing.assert_array_equal(got[1], whole[1, :, :, 5:])


# ---- debugging modes ----------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["jax_debug_nans", "jax_debug_infs"])
def test_debugging_flags_stay_quiet(flag):
    q, k, v, do, dlse = make(dtype=np.float32)
    see = np.ones((2, 1, 40, 37), bool)
    see[:, :, 3] = False
    options = {"mask": see, "kv_lengths": np.array([0, 20]), "causal": True}
    spec, operands = canonical(q, k, v, options)
    shapes = {n: operands[GRADS[n]].shape for n in "qkv"}
    jax.config.update(flag, True)
    try:
        residual = blockwise.forward(spec, operands)
        blockwise.backward(
            spec, operands, *residual, jnp.asarray(do), jnp.asarray(dlse, np.float32), shapes
        )
        blockwise.tangent(spec, operands, *residual, {O.Q: operands[O.Q]})
    finally:
        jax.config.update(flag, False)
