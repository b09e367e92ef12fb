"""Every attention case of the three reference systems (reference_cases.json), with the system's own
tolerance and under our rule, plus a N(0,1) twin of each.

Many of the systems' tolerances cannot fail, which ``test_strength_*`` states and shows. Traps:
A's forward aligns causal at max(0, Sk - Sq) and its backward at 0; its window w is window=(w, 0);
B and C have no batch dimension and their layout is [seq, heads, head_dim].
"""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from checking import Call, check, check_kernel_ran, draw, references, run, verify
from tolerances import Mismatch, check_close, check_equal, epsilon

from jax_flashtrain import flash_attention

DATA = json.loads(pathlib.Path(__file__).with_name("reference_cases.json").read_text())
CASES = {case["name"]: case for case in DATA["cases"]}
A, B = (
    [
        c
        for c in DATA["cases"]
        if f"reference system {letter}" in c["document"] and "Sq" in c["shapes"]
    ]
    for letter in "AB"
)
S0 = 0x54524149_4E303031
RESULT_OF = {"O": "o", "L": "lse", "dq": "dq", "dk": "dk", "dv": "dv"}


# ---- The systems' input generators --------------------------------------------------------------


def lcg(seed: int, count: int) -> np.ndarray:
    """The linear congruential generator of system A: values in [-0.5, 0], float32."""
    a, c = np.uint64(6364136223846793005), np.uint64(1442695040888963407)
    powers = np.cumprod(np.full(count, a))  # a^1 .. a^n, modulo 2^64
    sums = np.cumsum(np.concatenate([np.ones(1, np.uint64), powers[:-1]]))
    state = powers * np.uint64(seed) + c * sums
    return (state >> np.uint64(33)).astype(np.float32) / np.float32(4294967295) - np.float32(0.5)


def _wave(text: str, count: int) -> np.ndarray:
    """'0.1 sin(0.01 i - 2.0)' of the flat index, in float32 as system B computes it."""
    match = re.fullmatch(r"([\d.]+ )?(sin|cos)\(([\d.]+) i(?: ([+-]) ([\d.]+))?\)", text)
    factor, name, slope, sign, shift = match.groups()
    i = np.arange(count, dtype=np.float32)
    angle = np.float32(slope) * i + np.float32((sign or "+") + (shift or "0"))
    return np.float32(factor or 1) * getattr(np, name)(angle)


def _values(text: str, shape, rounded: bool) -> np.ndarray:
    count = int(np.prod(shape))
    match = re.fullmatch(r"bf16\(lcg\(S0\+(\d+)\)\)", text)
    flat = lcg(S0 + int(match[1]), count) if match else _wave(text, count)
    return flat.astype(ml_dtypes.bfloat16 if match and rounded else np.float32).reshape(shape)


def _window(case):
    """w of system A's additive window mask (j <= i and j + w >= i), or None."""
    mask = case["flags"].get("mask")
    return int(re.search(r"j\+(\d+)>=i", mask)[1]) if mask else None


def _shapes(case):
    s = case["shapes"]
    sizes = {"q": ("Sq", "Hq"), "k": ("Sk", "Hkv"), "v": ("Sk", "Hkv"), "do": ("Sq", "Hq")}
    if "reference system A" in case["document"]:
        return {n: (s["B"], s[heads], s[rows], s["D"]) for n, (rows, heads) in sizes.items()}
    return {n: (s[rows], s[heads], s["D"]) for n, (rows, heads) in sizes.items()}


def build(case, *, twin: bool = False, mask_as: str = "window", rounded: bool = True) -> Call:
    """The case as one call; ``twin`` draws N(0,1) values of the same shapes and dtype instead.

    ``mask_as``: how a window reaches the call ("window", "bias" = A's own additive mask, "mask").
    """
    rng = np.random.default_rng(len(case["name"]))
    shapes, values = _shapes(case), {}
    for name, shape in shapes.items():
        text = case["inputs"].get(name)
        if text is None or twin:
            dtype = np.float32 if "B" not in case["shapes"] else ml_dtypes.bfloat16
            dtype = np.float32 if case["shapes"].get("dtype") == "float32" else dtype
            values[name] = draw(rng, shape, dtype)
        else:
            values[name] = _values(text, shape, rounded)
    static = {
        "layout": "BNTH" if "reference system A" in case["document"] else "BTNH",
        "causal": bool(case["flags"]["causal"]),
    }
    arrays = {n: values[n] for n in "qkv"}
    if (w := _window(case)) is not None:
        Sq, Sk = shapes["q"][-2], shapes["k"][-2]
        i, j = np.arange(Sq)[:, None], np.arange(Sk)
        see = (j <= i) & (j + w >= i)
        full = (*shapes["q"][:-1], Sk)
        if mask_as == "window":
            static |= {"window": (w, 0), "q_offset": max(0, Sk - Sq)}
        elif mask_as == "bias":
            additive = np.where(see, 0, -np.inf).astype(ml_dtypes.bfloat16)
            arrays["bias"] = np.broadcast_to(additive, full).copy()
        else:
            arrays["mask"] = np.broadcast_to(see, full).copy()
    return Call(arrays, static, values["do"], None)


def _own_tolerance(case):
    """{result: max abs error} of the system; a bare number is the finite difference probe."""
    tolerance = case["tolerance_max_abs"] or {}
    if not isinstance(tolerance, dict):
        tolerance = dict.fromkeys(("dq", "dk", "dv"), tolerance)
    return {RESULT_OF[n]: t for n, t in tolerance.items()}


def _digits(case):
    """(result, stored digits) of every result that the case looks at."""
    return [(RESULT_OF[n], d) for n, d in case["reference_f64"].items() if n in RESULT_OF]


ATTENTION = A + B
WAYS = [
    pytest.param(case, way, id=f"{case['name']}-{way}")
    for case in ATTENTION
    for way in (("window", "bias", "mask") if _window(case) is not None else ("window",))
]
MASKED = [c for c in A if _window(c) is not None]
by_name = {"argvalues": ATTENTION, "ids": [c["name"] for c in ATTENTION]}


# ---- The cases ----------------------------------------------------------------------------------


def test_every_attention_case_is_here():
    """13 of system A, 5 of system B (C's are layers: the causal_attention ones are at the end)."""
    assert (len(A), len(B)) == (13, 5)
    assert len(CASES) == 41
    assert [round(float(x), 7) for x in lcg(S0, 4)] == [
        round(x, 7) for x in DATA["meta"]["generators"]["first values of lcg(S0)"]
    ]
    assert {_window(c) for c in MASKED} == {16, 8}


@pytest.mark.parametrize("case", **by_name)
def test_reference_digits_match_the_oracle(case):
    """The stored float64 digits, computed elsewhere, and our oracle agree (7 digits are stored)."""
    wanted, _ = references(build(case))
    if not _digits(case):  # the finite difference case stores its probes (tested below)
        assert case["kind"] == "finite difference"
    for name, stored in _digits(case):
        value = wanted[name].want
        assert list(value.shape) == stored["shape"]
        flat, scale = value.ravel(), max(stored["max_abs"], 1e-12)
        for got, want in (
            (flat[:4], stored["first4"]),
            (flat[-2:], stored["last2"]),
            (np.abs(flat).max(), stored["max_abs"]),
            (flat.mean(), stored["mean"]),
        ):
            check_close(f"{case['name']} {name}", got, want, atol=2e-6 * scale)


@pytest.mark.parametrize(("case", "mask_as"), WAYS)
def test_case(case, mask_as, implementation):
    """Own tolerance, our rule on every result, and the stored digits."""
    call = build(case, mask_as=mask_as)
    got = check(call, implementation)
    wanted, _ = references(call)
    own = _own_tolerance(case)
    for name, tolerance in own.items():
        check_close(f"{case['name']} {name}", got[name], wanted[name].want, atol=tolerance)
    for name, stored in _digits(case):
        # 4 roundings of the result and 7 stored digits. A gradient is a difference: the terms of
        # dk in A's small backward case are 15 times as large as dk, each rounded to float32.
        rounding = 4 * epsilon(got[name].dtype) + 15 * epsilon(np.float32) + 1e-6
        tolerance = min(own.get(name, np.inf), rounding * stored["max_abs"])
        flat = got[name].astype(np.float64).ravel()
        check_close(f"{case['name']} {name}", flat[:4], stored["first4"], atol=tolerance)
        check_close(f"{case['name']} {name}", flat[-2:], stored["last2"], atol=tolerance)


@pytest.mark.parametrize("case", **by_name)
def test_normal_twin(case, implementation):
    """The same shapes and flags with N(0,1) values, where the softmax is far from uniform."""
    check(build(case, twin=True), implementation)


@pytest.mark.parametrize("twin", [False, True], ids=["own", "normal"])
@pytest.mark.parametrize("case", **by_name)
def test_wrong_answers_fail(case, twin):
    """Our rule rejects zeros for every result, and uniform attention: of a twin in every result, of
    the system's own inputs (where the softmax is nearly uniform) at least in L."""
    call = build(case, twin=twin)
    known = wanted, _ = references(call)
    right = {n: r.want.astype(_dtype(call, n)) for n, r in wanted.items()}
    verify(call, right, known)
    flat = Call({**call.arrays, "q": call.arrays["q"] * 0}, call.static, call.do, call.dlse)
    uniform, _ = references(flat)
    for name in wanted:
        wrong = {"zeros": np.zeros_like(right[name])}
        if twin or name == "lse":
            wrong["uniform"] = uniform[name].want.astype(right[name].dtype)
        for what, value in wrong.items():
            try:
                verify(call, {**right, name: value}, known)
            except Mismatch:
                continue
            pytest.fail(f"{name}: {what} was accepted")


def _dtype(call, name):
    return np.dtype(np.float32) if name == "lse" else call.dtype


@pytest.mark.parametrize("case", **by_name)
def test_strength_of_the_own_tolerances(case):
    """Where the data says that zeros (or uniform attention) pass the own tolerance, they do."""
    wanted, _ = references(build(case))
    strength, own = case.get("strength", {}), _own_tolerance(case)
    if "an all-zero answer passes for" in strength:
        probe = 1 if case["kind"] == "finite difference" else None  # it looks at one element only
        passing = {n for n, t in own.items() if np.abs(wanted[n].want.ravel()[:probe]).max() <= t}
        assert passing == set(strength["an all-zero answer passes for"])
    if "uniform" in strength.get("weak", ""):
        call = build(case)
        flat = Call({**call.arrays, "q": call.arrays["q"] * 0}, call.static, call.do, None)
        check_close("o", references(flat)[0]["o"].want, wanted["o"].want, atol=own["o"])


def test_strictly_lower_triangular(implementation):
    """A: keys 16.. set to 128 must not reach rows 0..15; ours bitwise, and with V perturbed too."""
    case = CASES["test_forward_causal_mask_strict_lower_triangular"]
    call = build(case)
    clean = run(call, implementation)
    loud = {n: x.copy() for n, x in call.arrays.items()}
    loud["k"][:, :, 16:] = 128.0
    changed = run(Call(loud, call.static, call.do, None), implementation)
    wanted = references(call)[0]["o"].want
    check_close("o", changed["o"][:, :, :16].astype(float), wanted[:, :, :16], atol=0.005)
    check_equal("o", changed["o"][:, :, :16], clean["o"][:, :, :16])
    loud["v"][:, :, 16:] = 128.0
    changed = run(Call(loud, call.static, call.do, None), implementation)
    check_equal("o", changed["o"][:, :, :16], clean["o"][:, :, :16])
    check_equal("lse", changed["lse"][:, :, :16], clean["lse"][:, :, :16])
    check_equal("dq", changed["dq"][:, :, :16], clean["dq"][:, :, :16])


def test_finite_difference_falsifier(implementation, x64):
    """A's probe of element 0 of q, k, v; ours adds float64, N(0,1), step 1e-4, relative error."""
    case = CASES["test_backward_finite_diff_falsifier"]
    got = run(build(case), implementation)
    for name, want in zip(("dq", "dk", "dv"), case["reference_f64"]["fd [q0,k0,v0]"], strict=True):
        assert abs(float(got[name].ravel()[0]) - want) <= case["tolerance_max_abs"]
    for name, want in zip(
        ("dq", "dk", "dv"),
        case["reference_f64"]["analytic on rounded inputs [q0,k0,v0]"],
        strict=True,
    ):
        # delta comes from the bfloat16 o: the probes of dq and dk are near its rounding.
        check_close(name, got[name].ravel()[:1].astype(float), [want], rtol=2e-2, atol=1e-4)

    call = build(case, twin=True)
    arrays = {n: x.astype(np.float64) for n, x in call.arrays.items()}
    do = call.do.astype(np.float64)
    got = run(Call(arrays, call.static, do, None), implementation)
    for name in "qkv":

        def loss(x, name=name):
            o, _ = oracle.attention(**{**arrays, name: x}, layout="BNTH")
            return (o * do).sum()

        step = np.zeros_like(arrays[name])
        step.ravel()[0] = 1e-4
        numeric = (loss(arrays[name] + step) - loss(arrays[name] - step)) / 2e-4
        check_close(name, got["d" + name].ravel()[:1], [numeric], rtol=1e-6)


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("lengths", [(4, 7), (7, 4)])
def test_causal_alignment_of_system_a(lengths, offset, implementation):
    """A's two oracles align differently for Sq != Sk; q_offset expresses either, in both passes."""
    Sq, Sk = lengths
    case = {
        "name": "alignment", "document": "reference system A",
        "shapes": {"B": 1, "Hq": 2, "Hkv": 2, "Sq": Sq, "Sk": Sk, "D": 64},
        "flags": {"causal": True, "mask": None}, "inputs": {},
    }  # fmt: skip
    call = build(case)
    call.static["q_offset"] = offset if offset == 0 else max(0, Sk - Sq)
    check(call, implementation)
    i, j = np.arange(Sq)[:, None], np.arange(Sk)
    call.static.pop("q_offset")
    call.static["causal"] = False
    call.arrays["mask"] = (j <= i + (0 if offset == 0 else max(0, Sk - Sq)))[None, None]
    check(call, implementation)


@pytest.mark.parametrize("case", MASKED, ids=[c["name"] for c in MASKED])
def test_window_three_ways_agree(case, implementation):
    """Native window, additive bias and bool mask of the same window give the same numbers."""
    answers = [run(build(case, mask_as=way), implementation) for way in ("window", "bias", "mask")]
    for other in answers[1:]:
        for name in ("o", "lse", "dq", "dk", "dv"):
            scale = np.abs(answers[0][name].astype(float)).max()
            check_close(
                name, other[name].astype(float), answers[0][name].astype(float), atol=0.01 * scale
            )


@pytest.mark.parametrize("name", ["test_forward_gqa_parity", "flash_forward_matches_cpu"])
def test_kernel_is_in_the_program(name, implementation):
    check_kernel_ran(build(CASES[name]), implementation)


#: (implementation, 4 flag bits, D, additive mask): all of them native, a quarter for the blockwise
#: code, which has no variants.
VARIANTS = [
    (implementation, flags, D, additive)
    for implementation in ("native", "jax")
    for flags in range(16)
    for D in (64, 256)
    for additive in (True, False)
    if (flags & 4 or additive) and (implementation == "native" or (D == 64 and flags % 4 == 2))
]


@pytest.mark.parametrize(("implementation", "flags", "head_dim", "additive"), VARIANTS)
def test_all_function_constant_combinations(implementation, flags, head_dim, additive):
    """A builds 1 of its 16 combinations (rows, keys on the tile or not, mask, causal): all here."""
    aligned_q, aligned_k, masked, causal = (bool(flags >> n & 1) for n in range(4))
    case = {
        "name": f"flags {flags}", "document": "reference system A",
        "shapes": {"B": 2, "Hq": 4, "Hkv": 2, "Sq": 32 if aligned_q else 37,
                   "Sk": 48 if aligned_k else 43, "D": head_dim},
        "flags": {"causal": causal, "mask": None}, "inputs": {},
    }  # fmt: skip
    call = build(case)
    if masked:
        shape = (2, 4, call.arrays["q"].shape[2], call.arrays["k"].shape[2])
        rng = np.random.default_rng(flags)
        see = rng.random(shape) < 0.7
        if additive:
            call.arrays["bias"] = np.where(see, 0, -np.inf).astype(ml_dtypes.bfloat16)
        else:
            call.arrays["mask"] = see
    check(call, implementation)


# ---- Cached attention of systems B and C --------------------------------------------------------


@pytest.mark.parametrize(("rows", "start"), [(1, 0), (1, 5), (1, 12), (4, 0), (4, 3), (4, 9)])
def test_cached_attention(rows, start, implementation):
    """B's decode and prefill, C's start_pos: query i sees keys 0..start+i; junk lies beyond."""
    rng = np.random.default_rng(start)
    cache = 13
    q = draw(rng, (rows, 4, 8), np.float32)
    k, v = (draw(rng, (cache, 2, 8), np.float32) for _ in range(2))
    k[start + rows :] = v[start + rows :] = np.nan
    call = Call(
        {"q": q, "k": k, "v": v, "q_offset": np.int32(start), "kv_lengths": np.int32(start + rows)},
        {"layout": "BTNH", "causal": True},
        draw(rng, q.shape, np.float32),
        None,
    )
    got = check(call, implementation)
    short = dict(call.arrays, k=k[: start + rows], v=v[: start + rows])
    short.pop("kv_lengths"), short.pop("q_offset")
    alone = run(Call(short, call.static, call.do, None), implementation)
    check_close("o", got["o"], alone["o"], atol=1e-6)
    assert np.all(got["dk"][start + rows :] == 0)
    assert np.all(got["dv"][start + rows :] == 0)


def test_start_beyond_the_cache_is_bounded(implementation):
    """C reads past its cache when start + i >= kv_len; the number of keys bounds ours."""
    rng = np.random.default_rng(0)
    q, k, v = (draw(rng, (4, 2, 8), np.float32) for _ in range(3))
    call = Call(
        {"q": q, "k": k, "v": v, "q_offset": np.int32(50)},
        {"layout": "BTNH", "causal": True}, draw(rng, q.shape, np.float32), None,
    )  # fmt: skip
    got = check(call, implementation)
    everything = run(Call({"q": q, "k": k, "v": v}, {}, call.do, None), implementation)
    check_close("o", got["o"], everything["o"], atol=1e-6)


# ---- The attention layer of system C ------------------------------------------------------------


def _layer(x, wq, wk, wv, wo, head_dim, implementation):
    """Causal GQA attention with projections stored [out, in]; no bias, no position encoding."""
    q, k, v = (jnp.reshape(x @ w.T, (len(x), -1, head_dim)) for w in (wq, wk, wv))
    o = flash_attention(q, k, v, causal=True, implementation=implementation)
    return o.reshape(len(x), -1) @ wo.T


def test_layer_zeros(implementation):
    x = jnp.asarray([[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]], jnp.float32)
    zero = jnp.zeros((8, 8))
    check_equal("y", _layer(x, zero, zero, zero, zero, 4, implementation), np.zeros((2, 8)))


def test_layer_identity(implementation):
    x, eye = jnp.asarray([[1.0, 2, 3, 4]]), jnp.eye(4)
    check_close("y", _layer(x, eye, eye, eye, eye, 4, implementation), x, atol=1e-6)


def test_layer_mask_works(implementation):
    x, eye = jnp.asarray([[1.0, 0, 0, 0], [0, 0, 0, 1.0]]), jnp.eye(4)
    want = np.reshape(CASES["causal_attention_mask_works"]["reference_f64"]["y"], (2, 4))
    check_close("y", _layer(x, eye, eye, eye, eye, 4, implementation), want, atol=1e-6)


def test_layer_gqa(implementation):
    """C looks at no value here; with one row the answer is x wv^T, heads repeated, times wo^T."""
    x = jnp.arange(1.0, 9.0)[None]
    y = _layer(x, jnp.zeros((8, 8)), jnp.zeros((4, 8)), jnp.zeros((4, 8)), jnp.zeros((8, 8)), 2,
               implementation)  # fmt: skip
    check_equal("y", y, np.zeros((1, 8)))
    rng = np.random.default_rng(1)
    wq, wk, wv, wo = (draw(rng, s, np.float32) for s in ((8, 8), (4, 8), (4, 8), (8, 8)))
    v = np.repeat(np.reshape(np.asarray(x) @ wv.T, (2, 2)), 2, axis=0).reshape(1, 8)
    check_close("y", _layer(x, wq, wk, wv, wo, 2, implementation), v @ wo.T, atol=1e-4)


def _c_weight(shape, s):
    i = np.arange(np.prod(shape))
    return jnp.asarray(((s * i + 3) % 17 * 0.1 - 0.8).reshape(shape), jnp.float32)


@pytest.mark.parametrize("wo_seed", [17, 5], ids=["own", "stronger"])
def test_layer_backward(wo_seed, implementation):
    """dx against the stored digits (s = 17 makes wo constant: a second seed tests its indexing)."""
    case = CASES["attention_backward_gradient_check"]
    wq, wk, wv = _c_weight((4, 4), 7), _c_weight((2, 4), 11), _c_weight((2, 4), 13)
    wo = _c_weight((4, 4), wo_seed)
    x = jnp.asarray([[0.5, -0.3, 0.8, 0.2], [1, 0.1, -0.5, 0.7]])

    dx = jax.grad(lambda x: _layer(x, wq, wk, wv, wo, 2, implementation).sum())(x)
    if wo_seed == 17:
        check_close("dx", np.ravel(dx), case["reference_f64"]["dx"], atol=1e-5)

    def loss64(x):
        heads = [(x @ np.asarray(w, float).T).reshape(2, -1, 2) for w in (wq, wk, wv)]
        o, _ = oracle.attention(*heads, causal=True)
        return (o.reshape(2, 4) @ np.asarray(wo, float).T).sum()

    x64 = np.asarray(x, float)
    for index in np.ndindex(2, 4):
        step = np.zeros((2, 4))
        step[index] = 1e-4
        numeric = (loss64(x64 + step) - loss64(x64 - step)) / 2e-4
        check_close("dx", dx[index], numeric, atol=2e-5)
