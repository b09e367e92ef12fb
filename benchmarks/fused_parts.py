"""The parts of a transformer that are plain JAX, against a copy that moves the same bytes.

python benchmarks/fused_parts.py --rows 16384 --dim 2048 --dtype bf16

A kernel of our own could not be faster than the copy: it reads and writes as much. A ratio near 1
says that XLA has fused the part into one pass over memory; backward passes count too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_flashtrain.nn import cross_entropy, layer_norm, rms_norm, rope_tables, rotate, swiglu


def parts(rows: int, dim: int, dtype) -> dict:
    """name -> (function, arguments, arrays of [rows, dim] that it must read and write)."""
    x, y, dy = jax.random.normal(jax.random.key(0), (3, rows, dim), jnp.float32).astype(dtype)
    weight = jnp.ones(dim)
    targets = jnp.arange(rows) % dim
    cos, sin = rope_tables(jnp.arange(rows), 64)

    def turn(x):
        return rotate(x.reshape(rows, -1, 64), cos, sin).reshape(rows, dim)

    def backward(fn):
        return lambda dy, *arguments: jax.vjp(fn, *arguments)[1](dy)

    return {
        "rms_norm": (rms_norm, (x, weight), 2),
        "rms_norm backward": (backward(rms_norm), (dy, x, weight), 3),
        "layer_norm": (layer_norm, (x, weight), 2),
        "layer_norm backward": (backward(layer_norm), (dy, x, weight), 3),
        "rope": (turn, (x,), 2),
        "rope backward": (backward(turn), (dy, x), 2),
        "swiglu": (swiglu, (x, y), 3),
        "swiglu backward": (backward(swiglu), (dy, x, y), 5),
        "cross_entropy": (cross_entropy, (x, targets), 1),
        "cross_entropy backward": (jax.grad(cross_entropy), (x, targets), 2),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--rows", type=int, default=4096)
    add("--dim", type=int, default=1024)
    add("--dtype", choices=("f32", "bf16"), default="f32")
    add("--rounds", type=int, default=30)
    add("--inner", type=int, default=1, help="calls between two readings of the clock (GPU: 10)")
    add("--output", type=Path)
    args = parser.parse_args(arguments)
    dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16}[args.dtype]
    todo = parts(args.rows, args.dim, dtype)
    todo = {"copy": (lambda x: -x, (todo["rope"][1][0],), 2), **todo}
    compiled = {n: (jax.jit(f).lower(*a).compile(), a) for n, (f, a, _) in todo.items()}
    times: dict[str, list[float]] = {name: [] for name in todo}
    for turn in range(args.rounds + 1):
        for name, (fn, inputs) in compiled.items():
            began = time.perf_counter()
            for _ in range(args.inner):
                last = fn(*inputs)
            jax.block_until_ready(last)
            if turn:  # the first round warms up
                times[name].append((time.perf_counter() - began) / args.inner)
        print(f"\rround {turn}/{args.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    per_array = statistics.median(times["copy"]) / 2
    rows = []
    for name, (_, _, arrays) in todo.items():
        median = statistics.median(times[name])
        rows.append(
            {"part": name, "milliseconds": 1e3 * median, "copies": median / (arrays * per_array)}
        )
        print(f"{name:<24}{1e3 * median:>10.3f} ms{rows[-1]['copies']:>8.2f} x the copy")
    if args.output:
        device = jax.devices()[0]
        record = {
            "what": f"Parts that are plain JAX on {device.platform} ({device.device_kind})",
            "note": f"{args.rows} rows of {args.dim} numbers, {args.dtype}; copies: time by that "
            "of a copy of as many bytes",
            "command": f"python benchmarks/fused_parts.py --rows {args.rows} --dim {args.dim} "
            f"--dtype {args.dtype} --inner {args.inner} --output benchmarks/results/NAME.json",
            "versions": {name: metadata.version(name) for name in ("jax", "jaxlib")},
            "date": time.strftime("%Y-%m-%d"),
            "rounds": args.rounds,
            "rows": rows,
        }
        args.output.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
