"""``python -m jax_flashtrain.selftest --backend metal``: for owners of an Apple GPU.

The Metal kernels were verified by emulation, not on hardware. This runs the acceptance cases of a
Metal attention library (its inputs by formula, its tolerances) and the common rows on the real
device, and writes a JSON file to attach to a report.
"""

from __future__ import annotations

import functools
import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import native

REPORT = "metal-selftest.json"
_SEED = 0x54524149_4E303031


class Case(NamedTuple):
    """One acceptance case: bf16 inputs lcg(seed + 0..3), [1, heads, S, D]."""

    name: str
    Hq: int
    Hkv: int
    S: int
    D: int
    seed: int
    causal: bool = False
    window: int | None = None
    lse: float = 3e-3  # absolute tolerances; every other result: 5e-3


CASES = (
    Case("forward o, D 64", 1, 1, 32, 64, 0),
    Case("forward L, D 64", 1, 1, 32, 64, 10),
    Case("forward o and L, D 256", 4, 4, 128, 256, 20),
    Case("forward causal", 2, 2, 64, 64, 30, causal=True),
    Case("forward strictly causal", 1, 1, 32, 64, 40, causal=True),
    Case("forward sliding window", 2, 2, 64, 64, 50, window=16),
    Case("forward grouped heads", 8, 2, 64, 64, 60),
    Case("backward D 64", 1, 1, 32, 64, 100),
    Case("backward D 256", 4, 4, 128, 256, 110),
    Case("backward of 8 rows", 1, 1, 8, 64, 200),
    Case("backward causal", 1, 1, 64, 64, 300, causal=True),
    Case("backward sliding window", 1, 1, 32, 64, 400, window=8),
    Case("backward grouped heads", 8, 2, 32, 64, 500),
)


def lcg(seed: int, shape: tuple[int, ...]) -> Any:
    """The generator of the cases: values in [-0.5, 0], float32."""
    state, values = seed, np.empty(int(np.prod(shape)), np.float32)
    for i in range(values.size):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        values[i] = np.float32(state >> 33) / np.float32(4294967295) - np.float32(0.5)
    return values.reshape(shape)


def arrays_of(case: Case, normal: bool) -> list[Any]:
    """q, k, v, do (bf16, [B, S, H, D]) and dL of a case, or of its N(0, 1) twin."""
    rng = np.random.default_rng(case.seed)
    out: list[Any] = []
    for n, heads in enumerate((case.Hq, case.Hkv, case.Hkv, case.Hq)):
        shape = (1, heads, case.S, case.D)
        values = rng.standard_normal(shape) if normal else lcg(_SEED + case.seed + n, shape)
        out.append(jnp.asarray(np.swapaxes(values, 1, 2), jnp.bfloat16))
    return [*out, jnp.zeros((1, case.Hq, case.S), jnp.float32)]


def ways(case: Case) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """(name, options, visible): a window also as an additive and as a boolean mask."""
    i, j = np.arange(case.S)[:, None], np.arange(case.S)
    if case.window is None:
        yield "", {"causal": case.causal}, (j <= i if case.causal else True)
        return
    see = (j <= i) & (j + case.window >= i)
    full = np.broadcast_to(see, (1, case.Hq, case.S, case.S))
    yield "", {"window": (case.window, 0)}, see
    additive = jnp.where(jnp.asarray(full), 0.0, -jnp.inf).astype(jnp.bfloat16)
    yield ", as bias", {"bias": additive}, see
    yield ", as mask", {"mask": jnp.asarray(full)}, see


def check(case: Case, normal: bool, options: dict[str, Any], visible: Any) -> str:
    """Runs one case in one way; a remark, or AssertionError."""
    from ..selftest import TOLERANCE, error, formula, run

    arrays = arrays_of(case, normal)
    want = formula(*arrays, visible=visible)
    got = run(arrays, implementation="metal", **options)
    relative = error(got, want)
    # the cases' own inputs make dq so small that rounding o to bf16 shows in it: absolute there
    if normal and not relative <= TOLERANCE["bfloat16"]:
        raise AssertionError(f"relative error {relative:.1e}")
    worst = 0.0
    for name, a, b in zip(want._fields, got, want, strict=True):
        off = float(np.abs(np.asarray(a, np.float64) - b).max())
        limit = case.lse if name == "lse" else 5e-3 + 2**-8 * float(np.abs(b).max())
        if not (normal or off <= limit):
            raise AssertionError(f"{name}: error {off:.1e}, limit {limit:.1e}")
        worst = max(worst, off)
    return f"largest error {worst:.1e}, relative {relative:.1e}"


def rows() -> Iterator[tuple[str, Callable[[], str]]]:
    """Every check: the acceptance cases, their twins, and the rows of the common self-test."""
    from ..selftest import checks

    for case in CASES:
        for name, options, visible in ways(case):
            for normal in (False, True):
                title = case.name + name + (", N(0,1)" if normal else "")
                yield title, functools.partial(check, case, normal, options, visible)
    yield from checks("metal")


def milliseconds(D: int = 64, S: int = 1024, count: int = 10) -> dict[str, float]:
    """Median wall time of a bf16 causal forward and gradient, to read beside the errors."""
    from ..selftest import run

    rng = np.random.default_rng(0)
    q, k, v, do = (jnp.asarray(rng.standard_normal((1, S, 8, D)), jnp.bfloat16) for _ in range(4))
    arrays = [q, k, v, do, jnp.zeros((1, 8, S), jnp.float32)]
    out = {}
    for name in ("metal", "native"):
        times = []
        for _ in range(count + 1):
            start = time.perf_counter()
            jax.block_until_ready(run(arrays, causal=True, implementation=name))
            times.append(1e3 * (time.perf_counter() - start))
        out[f"{name} S {S} D {D}"] = statistics.median(times[1:])
    return out


def main(report: str = REPORT) -> int:
    """Prints the table, writes the report; the exit status."""
    loaded = native.load("metal")
    if loaded.module is None:
        print(f"the Metal kernels are not available: {loaded.reason}")
        return 1
    emulated = bool(loaded.module.emulated)
    print("Metal kernels: verified by emulation, not on hardware" + (" (emulated)" * emulated))
    found, failed = [], 0
    for title, run_check in rows():
        start = time.perf_counter()
        try:
            remark, passed = run_check(), True
        except Exception as problem:
            remark, passed = f"{type(problem).__name__}: {problem}".splitlines()[0], False
            failed += 1
        seconds = time.perf_counter() - start
        found.append({"check": title, "passed": passed, "seconds": seconds, "remark": remark})
        print(f"{title:44} {'ok' if passed else 'FAILED':7} {seconds:7.2f}  {remark}", flush=True)
    times = {} if emulated else milliseconds()
    for name, value in times.items():
        print(f"{name:44} {value:9.2f} ms")
    machine: dict[str, Any] = {"machine": platform.platform(), "python": platform.python_version()}
    machine |= {"jax": jax.__version__, "emulated": emulated}
    text = json.dumps({**machine, "checks": found, "milliseconds": times}, indent=1)
    pathlib.Path(report).write_text(text + "\n", encoding="utf-8")
    print(f"\n{failed} checks FAILED" if failed else "\nall checks passed")
    print(f"report: {report}")
    return 1 if failed else 0
