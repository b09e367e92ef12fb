"""CPU rows: our kernels, blockwise JAX, jax.nn (xla) and torch SDPA in one interleaved run.

Rates are GFLOP per CPU-second (all threads of the process), because the wall time of small shared
machines swings; the roof is torch.mm in float32 in the same rounds.
"""

from __future__ import annotations

import os
import pathlib
import platform
import sys
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle torch threads must not burn CPU time

import jax
import jax.numpy as jnp
import numpy as np

import jax_flashtrain
from jax_flashtrain import flash_attention

from . import shapes, timing
from .machine import versions

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:  # the table then has no torch columns and says so
    torch = None

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
import oracle


def inputs(shape: shapes.Shape) -> list[np.ndarray]:
    """q, k, v, do ~ N(0, 1), float32."""
    rng = np.random.default_rng(0)
    B, S = shape.B, shape.S
    return [
        rng.standard_normal((B, S, heads, shape.D), dtype=np.float32)
        for heads in (shape.Hq, shape.Hkv, shape.Hkv, shape.Hq)
    ]


def _jax_contender(attend: Callable, arrays, *, backward: bool) -> Callable[[], object]:
    q, k, v, do = arrays

    @jax.jit
    def forward(q, k, v):
        return attend(q, k, v)

    @jax.jit
    def both(q, k, v, do):
        out, pullback = jax.vjp(attend, q, k, v)
        return out, *pullback(do)

    if backward:
        return lambda: jax.block_until_ready(both(q, k, v, do))
    return lambda: jax.block_until_ready(forward(q, k, v))


def _torch_contender(shape: shapes.Shape, arrays, *, backward: bool) -> Callable[[], object]:
    dtype = getattr(torch, shape.dtype)
    q, k, v, do = (torch.from_numpy(np.moveaxis(x, 1, 2).copy()).to(dtype) for x in arrays)
    if backward:
        q, k, v = (x.requires_grad_() for x in (q, k, v))

    def call():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=shape.causal, enable_gqa=shape.Hq != shape.Hkv
            )
        if not backward:
            return out
        return torch.autograd.grad(out, (q, k, v), do)

    return call


def _roof() -> tuple[Callable[[], object], float]:
    n = 1536
    if torch is not None:
        a, b = torch.randn(n, n), torch.randn(n, n)
        return (lambda: a @ b), 2.0 * n**3
    x = jnp.asarray(np.random.default_rng(1).standard_normal((n, n), dtype=np.float32))
    product = jax.jit(lambda x: x @ x)
    return (lambda: product(x).block_until_ready()), 2.0 * n**3


def check(shape: shapes.Shape, outputs, arrays) -> float:
    """Largest relative L2 error of o, dq, dk, dv of batch 0, kv head 0 against float64."""
    group = shape.Hq // shape.Hkv
    q, k, v, do = (np.asarray(x, np.float64) for x in arrays)
    heads = slice(0, group)
    call = oracle.Attention(q[:1, :, heads], k[:1, :, :1], v[:1, :, :1], causal=shape.causal)
    gradients = call.backward(do[:1, :, heads])
    wanted = [call.o, gradients.dq, gradients.dk, gradients.dv]
    got = [outputs[0][:1, :, heads], outputs[1][:1, :, heads], outputs[2][:1, :, :1]]
    got.append(outputs[3][:1, :, :1])
    errors = []
    for a, b in zip(got, wanted, strict=True):
        a = np.asarray(a, np.float64)
        if not np.isfinite(a).all():
            return float("nan")
        errors.append(np.linalg.norm(a - b) / np.linalg.norm(b))
    return float(max(errors))


def run(selection, *, rounds: int, progress: Callable[[str], None]) -> Iterator[dict]:
    """The JSON document (device, versions, rows) after every row."""
    if torch is not None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    rows: list[dict] = []
    document = {
        "backend": "cpu",
        "device": _cpu_name(),
        "threads": len(os.sched_getaffinity(0)),
        "versions": versions("jax", "torch") | {"jax_flashtrain": jax_flashtrain.__version__},
        "rounds": rounds,
        "rows": rows,
    }
    for shape in selection:
        arrays = inputs(shape)
        dtype = jnp.dtype(shape.dtype)
        device_arrays = [jnp.asarray(x, dtype) for x in arrays]
        rounded = [np.asarray(x, np.float32) for x in device_arrays]

        def ours(q, k, v, implementation, shape=shape):
            return flash_attention(q, k, v, causal=shape.causal, implementation=implementation)

        attends = {
            "native": lambda q, k, v, f=ours: f(q, k, v, "native"),
            "blockwise": lambda q, k, v, f=ours: f(q, k, v, "jax"),
            "jax.nn xla": lambda q, k, v, s=shape: jax.nn.dot_product_attention(
                q, k, v, is_causal=s.causal, implementation="xla"
            ),
        }
        both = _jax_contender(attends["native"], device_arrays, backward=True)()
        error = check(shape, both, rounded)
        limit = 1e-4 if shape.dtype == "float32" else 2e-2
        if not error < limit:
            raise SystemExit(
                f"{shape.name}: native is wrong (relative error {error:.2e}); not timed"
            )
        for backward in (False, True):
            contenders = {
                name: _jax_contender(attend, device_arrays, backward=backward)
                for name, attend in attends.items()
            }
            if torch is not None:
                contenders["torch SDPA"] = _torch_contender(shape, arrays, backward=backward)
            roof_call, roof_flops = _roof()
            contenders["roof"] = roof_call
            label = f"{shape.name} {'fwd+bwd' if backward else 'fwd'}"
            samples = timing.interleave(
                contenders,
                rounds=rounds,
                on_round=lambda i, label=label: progress(f"{label} {i + 1}"),
            )
            flops = shape.flops(backward=backward)
            row = {"shape": shape.name, "pass": "fwd+bwd" if backward else "fwd", "error": error}
            for name, sample in samples.items():
                work = roof_flops if name == "roof" else flops
                row[name] = sample.summary() | {
                    "gflop_per_cpu_s": work / sample.summary()["cpu_median_s"] / 1e9,
                    "gflop_per_s": work / sample.summary()["wall_median_s"] / 1e9,
                }
            for name in contenders:
                if name not in ("native", "roof"):
                    low, mid, high = timing.median_ratio(samples[name].cpu, samples["native"].cpu)
                    row[name]["native_speedup_quartiles"] = [low, mid, high]
            row["share_of_roof"] = row["native"]["gflop_per_cpu_s"] / row["roof"]["gflop_per_cpu_s"]
            row["kernel"] = jax_flashtrain.explain(*device_arrays[:3]).kernel
            rows.append(row)
            yield document


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":")[1].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor()


def table(document: dict) -> str:
    """Rates in GFLOP per CPU-second, our share of the roof, and our speed-up over each peer."""
    names = [n for n in ("blockwise", "jax.nn xla", "torch SDPA") if n in document["rows"][0]]
    lines = [
        "| shape | pass | native | roof | share | "
        + " | ".join(f"{n} (native is x faster)" for n in names)
        + " |",
        "|---" * (5 + len(names)) + "|",
    ]
    for row in document["rows"]:
        peers = [
            f"{row[n]['gflop_per_cpu_s']:.0f} ({row[n]['native_speedup_quartiles'][1]:.2f})"
            for n in names
        ]
        lines.append(
            f"| {row['shape']} | {row['pass']} | {row['native']['gflop_per_cpu_s']:.0f} | "
            f"{row['roof']['gflop_per_cpu_s']:.0f} | {100 * row['share_of_roof']:.0f} % | "
            + " | ".join(peers)
            + " |"
        )
    return "\n".join(lines)
