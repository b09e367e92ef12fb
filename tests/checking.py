"""Builds one attention call, runs ours on it, and holds the answer against the oracle."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
from tolerances import Reference, accumulator, epsilon, plain_attention

from jax_flashtrain import flash_attention

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float64": np.dtype(np.float64),
}
FORWARD_TARGET = "jax_flashtrain_fwd_v1"
BACKWARD_TARGET = "jax_flashtrain_bwd_v1"
#: What "native" means in this run: `pytest --backend metal-emulated` makes it the Metal kernels.
NATIVE = os.environ.get("JFT_TEST_NATIVE", "native")
#: What `pytest --backend` was told (conftest.py).
BACKEND = os.environ.get("JFT_TEST_BACKEND", "cpu")
FEW = 2048  # elements of a gradient that is a sum over almost everything
METAL_TARGETS = ("jax_flashtrain_metal_fwd_v1", "jax_flashtrain_metal_bwd_v1")
#: The target of implementation="native" by way of ``function_of``.
NATIVE_FORWARD_TARGET = METAL_TARGETS[0] if NATIVE == "metal" else FORWARD_TARGET

#: Array arguments that have a gradient, in the order of ``oracle.Gradients``.
DIFFERENTIABLE = ("q", "k", "v", "bias", "alibi_slopes", "sinks")
#: Array arguments without one; they are traced too.
TRACED = ("mask", "q_offset", "q_lengths", "kv_lengths", "segment_ids", "dropout_key")


@dataclasses.dataclass
class Call:
    """One attention call: arrays by argument name (q, k, v always), static options, cotangents."""

    arrays: dict[str, Any]
    static: dict[str, Any]
    do: np.ndarray
    dlse: np.ndarray | None

    @property
    def dtype(self) -> np.dtype:
        return self.arrays["q"].dtype

    def describe(self) -> str:
        def text(x):
            return (
                f"{x.dtype}{list(x.shape)}"
                if hasattr(x, "shape") and np.ndim(x)
                else tuple(text(y) for y in x)
                if isinstance(x, tuple)
                else str(x)
            )

        return ", ".join(
            [f"{k}={text(x)}" for k, x in self.arrays.items()]
            + [f"{k}={x}" for k, x in self.static.items()]
        )


def draw(rng, shape, dtype, std: float = 1.0) -> np.ndarray:
    """N(0, std) values that ``dtype`` can hold."""
    return (rng.standard_normal(shape) * std).astype(dtype)


def make_call(
    seed: int = 0,
    *,
    B: int | tuple[int, ...] = 1,
    Sq: int = 16,
    Sk: int | None = None,
    Hq: int = 2,
    Hkv: int | None = None,
    D: int = 16,
    Dv: int | None = None,
    dtype: str | np.dtype = "float32",
    layout: str = "BTNH",
    std: float = 1.0,
    dlse: bool = True,
    **options,
) -> Call:
    """A call with N(0, std) inputs and cotangents; options that are arrays are traced."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else np.dtype(dtype)
    batch = (B,) if isinstance(B, int) else tuple(B)
    Sk = Sq if Sk is None else Sk
    Hkv = Hq if Hkv is None else Hkv
    Dv = D if Dv is None else Dv

    def shape(S, H, size):
        return (*batch, S, H, size) if layout == "BTNH" else (*batch, H, S, size)

    arrays = {
        "q": draw(rng, shape(Sq, Hq, D), dtype, std),
        "k": draw(rng, shape(Sk, Hkv, D), dtype, std),
        "v": draw(rng, shape(Sk, Hkv, Dv), dtype, std),
    }
    do = draw(rng, shape(Sq, Hq, Dv), dtype)
    lse_cotangent = draw(rng, (*batch, Hq, Sq), accumulator(dtype))
    static = {"layout": layout}
    for name, value in options.items():
        if value is None:
            continue
        traced = name in DIFFERENTIABLE or (name in TRACED and not isinstance(value, int))
        (arrays if traced else static)[name] = value
    return Call(arrays, static, do, lse_cotangent if dlse else None)


def oracle_options(call: Call) -> dict[str, Any]:
    """The call's options in the oracle's terms."""
    options = {k: x for k, x in {**call.arrays, **call.static}.items() if k not in ("q", "k", "v")}
    for ours in ("implementation", "deterministic", "precision", "autodiff"):
        options.pop(ours, None)
    key = options.pop("dropout_key", None)
    if key is not None:
        options["dropout_seed"] = np.asarray(jax.random.bits(key, (2,), jnp.uint32))
    return options


def references(call: Call) -> tuple[dict[str, Reference], oracle.Attention]:
    """The wanted results by name: o, lse, dq, dk, dv and d<argument> of the optional ones."""
    a = call.arrays
    attention = oracle.Attention(a["q"], a["k"], a["v"], **oracle_options(call))
    grads = attention.backward(call.do, call.dlse)
    plain, typical = plain_attention(
        attention, a["q"], a["k"], a["v"], a.get("bias"), call.do, call.dlse, call.dtype
    )
    names = ["o", "lse", *("d" + n for n in DIFFERENTIABLE)]
    wanted = [attention.o, attention.lse, *grads]
    found = {
        n: Reference(w, p, m, t)
        for n, w, p, m, t in zip(
            names, wanted, plain, attention.magnitudes, [None] * 2 + typical, strict=True
        )
        if w is not None
    }
    return found, attention


def function_of(call: Call, implementation=None):
    """(f, arguments): ``f`` maps the call's arrays to (o, L); jit, vjp and vmap apply to it."""
    names = list(call.arrays)
    static = dict(call.static)
    if BACKEND == "cuda" and call.dtype == np.float32:
        static.setdefault("precision", "highest")  # the default is TF32, as in jax
    if implementation is not None:
        static["implementation"] = NATIVE if implementation == "native" else implementation

    def f(*arrays):
        given = dict(zip(names, arrays, strict=True))
        q, k, v = given.pop("q"), given.pop("k"), given.pop("v")
        return flash_attention(q, k, v, return_lse=True, **given, **static)

    return f, tuple(call.arrays.values())


def value_and_grads(call: Call, implementation=None):
    """(g, arguments): ``g`` maps (do, dL, *arrays) to a dict with o, lse and every gradient."""
    f, args = function_of(call, implementation)
    wrt = [i for i, name in enumerate(call.arrays) if name in DIFFERENTIABLE]
    names = [name for name in call.arrays if name in DIFFERENTIABLE]

    def g(do, dlse, *arrays):
        def of(*picked):
            every = list(arrays)
            for i, x in zip(wrt, picked, strict=True):
                every[i] = x
            return f(*every)

        (o, lse), pull = jax.vjp(of, *(arrays[i] for i in wrt))
        grads = pull((do, jnp.zeros_like(lse) if dlse is None else dlse))
        return {"o": o, "lse": lse, **{"d" + n: x for n, x in zip(names, grads, strict=True)}}

    return g, (call.do, call.dlse, *args)


def run(call: Call, implementation=None, *, jit: bool = True) -> dict[str, np.ndarray]:
    """Our answer to the call: o, lse and every gradient, as NumPy arrays."""
    g, args = value_and_grads(call, implementation)
    out = (jax.jit(g) if jit else g)(*args)
    return {name: np.asarray(x) for name, x in out.items()}


def verify(call: Call, got: dict[str, np.ndarray], known=None) -> None:
    """Holds every result of ``run`` against the oracle under the rule of tolerances.py.

    ``known``: the result of ``references(call)`` where it is at hand.
    """
    wanted, attention = known or references(call)
    assert set(got) == set(wanted)
    for name, reference in wanted.items():
        title, dtype = f"{name} of flash_attention({call.describe()})", result_dtype(call, name)
        if BACKEND == "cuda" and is_sum_to_few(name, reference):
            unit = max(epsilon(call.dtype), epsilon(dtype))
            reference.check_terms(title, got[name], unit, sensitivity=attention.sensitivity)
            continue
        reference.check(
            title,
            got[name],
            dtype,
            sensitivity=attention.sensitivity,
            softcap=call.static.get("softcap") is not None,
        )


def is_sum_to_few(name: str, reference: Reference) -> bool:
    """Is the result a gradient of few numbers, each a sum over almost everything?"""
    return name in ("dbias", "dsinks", "dalibi_slopes") and reference.want.size <= FEW


def result_dtype(call: Call, name: str) -> np.dtype:
    """The dtype a result must have."""
    if name == "lse":
        return accumulator(call.dtype)
    if name == "o":
        return call.dtype
    return call.arrays[name[1:]].dtype


def check(call: Call, implementation=None, *, jit: bool = True) -> dict[str, np.ndarray]:
    """Runs the call and compares o, L and every gradient with the oracle."""
    got = run(call, implementation, jit=jit)
    verify(call, got)
    return got


def compiled_text(call: Call, implementation=None) -> str:
    """The optimised HLO of value_and_grads."""
    g, args = value_and_grads(call, implementation)
    return jax.jit(g).lower(*args).compile().as_text()


def check_kernel_ran(call: Call, implementation: str) -> None:
    """Native means that both our targets are in the program, jax that neither is."""
    text = compiled_text(call, implementation)
    implementation = NATIVE if implementation == "native" else implementation
    for target in (FORWARD_TARGET, BACKWARD_TARGET):
        assert (target in text) == (implementation == "native"), target
    for target in METAL_TARGETS:
        assert (target in text) == (implementation == "metal"), target
