"""The emulated Metal module, or a skip that says what is missing."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"


def module():
    """``jax_flashtrain_native.metal`` of an emulated build."""
    metal = pytest.importorskip(
        "jax_flashtrain_native.metal", reason="needs the emulated Metal build (docs/metal.md)"
    )
    if not metal.emulated:
        pytest.skip("needs the emulated Metal build, this one drives a real GPU")
    return metal


def run(
    source: str,
    buffers=(),
    *,
    kernel="f",
    threadgroup=None,
    threads=64,
    grid=1,
    seed=1,
    constants=None,
    macros=(),
):
    """Run kernel ``f`` of an MSL snippet: (fault, output arrays, counters)."""
    arrays = [np.ascontiguousarray(b) for b in buffers]
    fault, out, counters = module().emulator.run(
        HEADER + source,
        kernel,
        {i: a.tobytes() for i, a in enumerate(arrays)},
        constants or {},
        {0: threadgroup} if threadgroup else {},
        [grid, 1, 1],
        [threads, 1, 1],
        seed,
        list(macros),
    )
    results = [np.frombuffer(out[i], a.dtype).reshape(a.shape) for i, a in enumerate(arrays)]
    return fault, results, counters
