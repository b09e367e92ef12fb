"""``python -m jax_flashtrain.selftest``: checks this installation in about a minute.

Every row runs the public operator and compares it with the formula in float64 NumPy (below), both
forward and gradients. The exit status is 0 when all rows passed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_flashtrain
from jax_flashtrain import flash_attention
from jax_flashtrain._src import selftest_metal

#: Largest error, relative to the largest value, that a row may show. float32 leaves room for TF32.
TOLERANCE = {"float32": 4e-3, "bfloat16": 3e-2, "float16": 4e-3}


class Answer(NamedTuple):
    """Results of one call: o, L and the gradients of sum(o * do) + sum(L * dL)."""

    o: Any
    lse: Any
    dq: Any
    dk: Any
    dv: Any


def formula(
    q: Any, k: Any, v: Any, do: Any, dlse: Any, *, bias: Any = 0.0, visible: Any = True
) -> Answer:
    """Attention and its gradients by the book, [B, S, H, D] arrays of equal head counts."""
    q, k, v, do, dlse = (np.asarray(x, np.float64) for x in (q, k, v, do, dlse))
    group = q.shape[2] // k.shape[2]
    kk, vv = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scale = q.shape[-1] ** -0.5
    s = scale * np.einsum("bihd,bjhd->bhij", q, kk) + np.asarray(bias, np.float64)
    s = np.where(visible, s, -np.inf)
    empty = ~np.isfinite(s).any(-1, keepdims=True)
    m = np.where(empty, 0.0, s.max(-1, keepdims=True))
    total = np.where(empty, 1.0, np.exp(s - m).sum(-1, keepdims=True))
    p = np.exp(s - m) / total
    lse = np.where(empty, -np.inf, m + np.log(total))[..., 0]
    o = np.einsum("bhij,bjhd->bihd", p, vv)
    delta = np.einsum("bihd,bihd->bhi", o, do) - dlse
    ds = p * (np.einsum("bihd,bjhd->bhij", do, vv) - delta[..., None])

    def per_group(x: Any) -> Any:
        return x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3)

    dq = scale * np.einsum("bhij,bjhd->bihd", ds, kk)
    dk = per_group(scale * np.einsum("bhij,bihd->bjhd", ds, q))
    dv = per_group(np.einsum("bhij,bihd->bjhd", p, do))
    return Answer(o, lse, dq, dk, dv)


def inputs(dtype: str, D: int = 64, Sq: int = 130, Sk: int = 150) -> list[Any]:
    """q, k, v, do, dL: N(0, 1), batch 2, 4 query heads on 2 key heads."""
    rng = np.random.default_rng(0)
    shapes = [(2, Sq, 4, D), (2, Sk, 2, D), (2, Sk, 2, D), (2, Sq, 4, D)]
    arrays: list[Any] = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    return [*arrays, jnp.asarray(rng.normal(size=(2, 4, Sq)), jnp.float32)]


def run(arrays: list[Any], **options: Any) -> Answer:
    """The same answer from the operator."""
    q, k, v, do, dlse = arrays

    @jax.jit
    def step(q: Any, k: Any, v: Any) -> Any:
        def call(q: Any, k: Any, v: Any) -> Any:
            return flash_attention(q, k, v, return_lse=True, **options)

        out, vjp = jax.vjp(call, q, k, v)
        return (*out, *vjp((do, dlse.astype(out[1].dtype))))

    return Answer(*step(q, k, v))


def error(got: Answer, want: Answer) -> float:
    """Largest error of any result, relative to the largest value of that result."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return float("inf")
        a, b = a[np.isfinite(a)], b[np.isfinite(b)]
        worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)))
    return worst


def compared(dtype: str, visible: Any = True, D: int = 64, **options: Any) -> str:
    """Runs one comparison; raises AssertionError with the figure where it is too far off."""
    arrays = inputs(dtype, D)
    want = formula(*arrays, bias=options.get("bias", 0.0), visible=visible)
    found = error(run(arrays, **options), want)
    text = f"error {found:.1e}, limit {TOLERANCE[dtype]:.0e}"
    if not found <= TOLERANCE[dtype]:
        raise AssertionError(text)
    return text


def checks(implementation: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """(name, check) of one implementation; a check returns a remark or raises."""
    options: dict[str, Any] = {"implementation": implementation}
    rows, cols = np.arange(130)[:, None], np.arange(150)
    causal = cols <= rows + 20
    local = causal & (cols >= rows + 20 - 32)
    ids = np.arange(150) // 60
    packed = ids[20:, None] == ids
    bias = np.random.default_rng(1).normal(size=(1, 4, 1, 150)).astype(np.float32)

    for dtype in ("float32", "bfloat16", "float16"):
        yield dtype, functools.partial(compared, dtype, **options)
    for D in (8, 72, 128, 256):
        yield f"head size {D}", functools.partial(compared, "float32", D=D, **options)
    yield "causal", lambda: compared("float32", causal, causal=True, **options)
    yield "window", lambda: compared("float32", local, causal=True, window=(32, 0), **options)
    yield "mask", lambda: compared("float32", local, mask=jnp.asarray(local), **options)
    yield "bias", lambda: compared("float32", bias=jnp.asarray(bias), **options)
    yield (
        "packed sequences",
        lambda: compared(
            "float32", packed, segment_ids=(jnp.asarray(ids[20:]), jnp.asarray(ids)), **options
        ),
    )
    yield (
        "empty rows",
        lambda: compared("float32", cols <= rows - 60, causal=True, q_offset=-60, **options),
    )
    yield "dropout", lambda: _dropout(options)
    yield "vmap", lambda: _vmap(options)
    yield "second order", lambda: _second_order(options)


def _dropout(options: dict[str, Any]) -> str:
    q, k, _, *_ = inputs("float32")
    v = jnp.ones_like(k)

    def mean(seed: int) -> Any:
        return flash_attention(
            q, k, v, dropout_rate=0.25, dropout_key=jax.random.key(seed), **options
        )

    if not jnp.array_equal(mean(0), mean(0)) or jnp.array_equal(mean(0), mean(1)):
        raise AssertionError("the mask does not follow the key")
    found = abs(float(mean(0).mean()) - 1.0)
    if found > 0.01:
        raise AssertionError(f"kept weights average {1 + found:.3f}, wanted 1")
    return "repeats with the key"


def _vmap(options: dict[str, Any]) -> str:
    q, k, v, *_ = inputs("float32", 32)
    many = jnp.stack([q, 2 * q, -q])

    def grad(q: Any) -> Any:
        return jax.grad(lambda q: (flash_attention(q, k, v, **options) ** 2).sum())(q)

    found = float(jnp.abs(jax.vmap(grad)(many) - jnp.stack([grad(x) for x in many])).max())
    if not found <= 1e-3:
        raise AssertionError(f"differs from a loop by {found:.1e}")
    return f"error {found:.1e}"


def _second_order(options: dict[str, Any]) -> str:
    q, k, v, *_ = (x[:, :9, :2, :4] if x.ndim == 4 else x for x in inputs("float32"))

    def loss(q: Any) -> Any:
        return (flash_attention(q, k, v, causal=True, **options) ** 2).sum()

    direction, step = jnp.cos(q), 1e-2
    exact = jax.grad(lambda q: jnp.vdot(jax.grad(loss)(q), direction))(q)
    ahead, behind = (jax.grad(loss)(q + h * direction) for h in (step, -step))
    found = float(jnp.abs((ahead - behind) / (2 * step) - exact).max() / jnp.abs(exact).max())
    if not found <= 2e-2:
        raise AssertionError(f"differs from finite differences by {found:.1e}")
    return f"error {found:.1e} (finite differences)"


def _versions() -> str:
    names = ("jax-flashtrain", "jax", "jaxlib", "numpy")
    parts = []
    for name in names:
        try:
            parts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            parts.append(f"{name} (not installed as a package)")
    return ", ".join([f"Python {platform.python_version()}", *parts])


def main(arguments: list[str] | None = None) -> int:
    """Runs all rows and prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jax_flashtrain.selftest")
    parser.add_argument("--backend", choices=["metal"], help="only this backend, in more depth")
    parser.add_argument("--report", default=selftest_metal.REPORT, help="JSON file of --backend")
    options = parser.parse_args(arguments)
    if options.backend == "metal":
        return selftest_metal.main(options.report)
    device = jax.devices()[0]
    print(_versions())
    print(f"device: {device.device_kind} ({device.platform}), {len(jax.devices())} in all")
    for row in jax_flashtrain.backends():
        print(f"  {row.name:5} {'available' if row.available else 'not available: ' + row.reason}")
    q = jax.ShapeDtypeStruct((2, 130, 4, 64), jnp.float32)
    found = jax_flashtrain.explain(q, q, q)
    print(f"a float32 call here runs: {found.backend} / {found.kernel} {found.reason}".rstrip())
    names = ["jax"] if found.backend == "jax" else ["native", "jax"]
    print(f"\n{'implementation':15} {'check':18} {'result':7} {'seconds':>7}  remark")
    failed = 0
    for name in names:
        for title, check in checks(name):
            start = time.perf_counter()
            try:
                remark, result = check(), "ok"
            except Exception as problem:
                remark, result = f"{type(problem).__name__}: {problem}".splitlines()[0], "FAILED"
                failed += 1
            seconds = time.perf_counter() - start
            print(f"{name:15} {title:18} {result:7} {seconds:7.1f}  {remark}", flush=True)
    print("\nall checks passed" if not failed else f"\n{failed} checks FAILED")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
