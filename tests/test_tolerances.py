"""The accuracy rule must reject wrong answers and accept right ones."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances
from tolerances import Mismatch, Reference, check_close, check_equal, plain_attention

DTYPES = ("float32", "float16", "bfloat16", "float64")
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "softcap": {"softcap": 2.0},
    "window": {"window": (9, 3)},
}


def _call(dtype, std=1.0, Sq=33, Sk=47, **options):
    rng = np.random.default_rng(5)
    dtype = jnp.dtype(dtype)
    q = (rng.standard_normal((2, Sq, 4, 16)) * std).astype(dtype)
    k, v = ((rng.standard_normal((2, Sk, 2, 16)) * std).astype(dtype) for _ in range(2))
    do = rng.standard_normal(q.shape).astype(dtype)
    dlse = rng.standard_normal((2, 4, Sq)).astype(np.float32)
    call = oracle.Attention(q, k, v, **options)
    grads = call.backward(do, dlse)
    plain, call.typical = plain_attention(call, q, k, v, None, do, dlse, dtype)
    return (q, k, v, do, dlse), call, grads, plain


def _references(call, grads, plain):
    wanted = [call.o, call.lse, *grads[:3]]
    typical = [None, None, *call.typical[:3]]
    return [
        Reference(*parts)
        for parts in zip(wanted, plain[:5], call.magnitudes[:5], typical, strict=True)
    ]


def _result_dtype(name, dtype):
    return (
        np.dtype(np.float64 if dtype == "float64" else np.float32)
        if name == "lse"
        else jnp.dtype(dtype)
    )


NAMES = ("o", "lse", "dq", "dk", "dv")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_oracle_passes_and_wrong_answers_fail(dtype, options):
    (q, k, v, do, dlse), call, grads, plain = _call(dtype, **options)
    uniform = oracle.Attention(q * 0, k, v, **options)
    uniform_grads = uniform.backward(do, dlse)
    no_dlse = call.backward(do, None)
    for n, (name, reference) in enumerate(zip(NAMES, _references(call, grads, plain), strict=True)):
        result = _result_dtype(name, dtype)

        def check(value, name=name, reference=reference, result=result):
            reference.check(
                name, np.asarray(value).astype(result), result,
                sensitivity=call.sensitivity, softcap="softcap" in options,
            )  # fmt: skip

        check(reference.want)
        wrong = {
            "zeros": np.zeros_like(reference.want),
            "uniform": [uniform.o, uniform.lse, *uniform_grads][n],
            "5 percent off": reference.want * 1.05,
            "another head": np.roll(reference.want, 1, axis=1 if name == "lse" else 2),
        }
        if name in ("dq", "dk"):
            wrong["without dL"] = no_dlse[n - 2]
        for what, value in wrong.items():
            try:
                check(value)
            except Mismatch:
                continue
            pytest.fail(f"{name}: {what} was accepted")


@pytest.mark.parametrize("dtype", DTYPES)
def test_limits_stay_small(dtype):
    """The whole allowance, in units of the largest wanted value: no floor swallows a result."""
    _, call, grads, plain = _call(dtype)
    allowed = {"float64": 1e-13, "float32": 4e-5, "float16": 3e-3, "bfloat16": 2.5e-2}[dtype]
    for name, reference in zip(NAMES, _references(call, grads, plain), strict=True):
        result = _result_dtype(name, dtype)
        most, _ = reference.limits(result, sensitivity=call.sensitivity, softcap=False)
        assert most < allowed * np.abs(reference.want).max(), name


def _jnp_attention(q, k, v, see, softcap):
    """Plain attention of arrays of one dtype, as jax.nn computes it: float32 logits and softmax."""
    G = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, G, axis=2) for x in (k, v))
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    s = s * q.shape[-1] ** -0.5
    if softcap:
        s = softcap * jnp.tanh(s / softcap)
    s = jnp.where(see, s, -jnp.inf)
    p = jax.nn.softmax(s).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v), jax.nn.logsumexp(s, axis=-1)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_plain_attention_errs_like_jnp(dtype, options):
    """The NumPy stand-in has the error of the real jnp computation, within a factor of 1.6 (2.5 for
    gradients: autodiff orders a few operations otherwise)."""
    (q, k, v, do, dlse), call, grads, plain = _call(dtype, Sq=47, **options)
    (o, lse), pull = jax.vjp(
        lambda q, k, v: _jnp_attention(q, k, v, call.see, options.get("softcap")), q, k, v
    )
    real = [o, lse, *pull((do, dlse.astype(lse.dtype)))]
    for name, mine, theirs, want in zip(
        NAMES, plain[:5], real, [call.o, call.lse, *grads[:3]], strict=True
    ):
        mine, theirs = (
            np.sqrt(np.mean((np.asarray(x, np.float64) - want) ** 2)) for x in (mine, theirs)
        )
        assert mine < theirs * (1.6 if name in ("o", "lse") else 2.5), (name, mine, theirs)
        assert mine > theirs / 4, (name, mine, theirs)


def test_nan_fails_on_either_side():
    good = np.ones(3)
    for bad_at in range(3):
        bad = good.copy()
        bad[bad_at] = np.nan
        for got, want in ((bad, good), (good, bad), (bad, bad)):
            with pytest.raises(Mismatch, match="NaN"):
                check_close("x", got, want, atol=1e9)
            with pytest.raises(Mismatch, match="NaN"):
                Reference(want, want, want).check("x", got, got.dtype, sensitivity=1.0)


def test_infinities_are_equal_only_to_themselves():
    inf = np.array([np.inf, -np.inf, 1.0])
    check_equal("x", inf, inf)
    Reference(inf, inf, inf).check("x", inf, inf.dtype, sensitivity=1.0)
    for other in (-inf, np.array([np.inf, 0.0, 1.0]), np.array([np.inf, -np.inf, np.inf])):
        with pytest.raises(Mismatch):
            check_close("x", other, inf, atol=1e9)
        with pytest.raises(Mismatch):
            Reference(inf, inf, inf).check("x", other, inf.dtype, sensitivity=1.0)


def test_shape_and_dtype_are_compared():
    one = np.ones((2, 1))
    with pytest.raises(Mismatch, match="shape"):
        check_close("x", np.ones((1, 2)), one)
    with pytest.raises(Mismatch, match="dtype"):
        Reference(one, one, one).check("x", one, np.float32, sensitivity=1.0)


def test_factor_is_larger_with_softcap():
    want, plain = np.zeros(4), np.full(4, 0.1)
    reference = Reference(want, plain, want)
    reference.check("x", want + 0.19, want.dtype, sensitivity=0.0)
    with pytest.raises(Mismatch):
        reference.check("x", want + 0.21, want.dtype, sensitivity=0.0)
    reference.check("x", want + 0.29, want.dtype, sensitivity=0.0, softcap=True)
    assert (tolerances.FACTOR, tolerances.FACTOR_SOFTCAP) == (2.0, 3.0)
