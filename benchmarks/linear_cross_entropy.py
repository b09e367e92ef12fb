"""nn.linear_cross_entropy against optax on full logits: time and memory of value and gradient.

python benchmarks/linear_cross_entropy.py --tokens 32768 --vocab 131072 --dim 2048 --dtype bf16
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
import optax

from jax_flashtrain.nn import linear_cross_entropy


def full(hidden, weight, targets):
    logits = jnp.dot(hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--tokens", type=int, default=2048)
    add("--vocab", type=int, default=32768)
    add("--dim", type=int, default=256)
    add("--chunk", type=int, default=1024)
    add("--dtype", choices=("f32", "bf16"), default="f32")
    add("--rounds", type=int, default=10)
    add("--output", type=Path)
    args = parser.parse_args()
    k1, k2, k3 = jax.random.split(jax.random.key(0), 3)
    dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16}[args.dtype]
    hidden = jax.random.normal(k1, (args.tokens, args.dim), dtype)
    weight = jax.random.normal(k2, (args.dim, args.vocab), jnp.float32) / args.dim**0.5
    targets = jax.random.randint(k3, (args.tokens,), 0, args.vocab)
    data = (hidden, weight, targets)

    def chunked(h, w, t):
        return linear_cross_entropy(h, w, t, chunk=args.chunk)

    rows, compiled = [], {}
    for name, fn in (("chunked", chunked), ("optax", full)):
        compiled[name] = jax.jit(jax.value_and_grad(fn, (0, 1))).lower(*data).compile()
    results = {name: fn(*data) for name, fn in compiled.items()}
    value, want = (float(results[name][0]) for name in ("chunked", "optax"))
    if abs(value - want) > 1e-2:
        sys.exit(f"the losses differ: {value} and {want}")
    for i, name in enumerate(("dhidden", "dweight")):
        got, ref = (results[k][1][i].astype(jnp.float32) for k in ("chunked", "optax"))
        error = float(jnp.linalg.norm(got - ref) / jnp.linalg.norm(ref))
        print(f"{name}: relative difference {error:.1e}")
        if not error < 2e-2:
            sys.exit("the gradients differ")
    del results
    times = {name: [] for name in compiled}
    for turn in range(args.rounds):
        for name, fn in compiled.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(fn(*data))
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        print(f"\rround {turn + 1}/{args.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for name, fn in compiled.items():
        wall, cpu = (1e3 * statistics.median(column) for column in zip(*times[name], strict=True))
        memory = fn.memory_analysis().temp_size_in_bytes
        rows.append(
            {"loss": name, "milliseconds": wall, "cpu_milliseconds": cpu, "temp_bytes": memory}
        )
        print(
            f"{name:<8} {wall:9.2f} ms {cpu:9.1f} CPU ms {memory / 2**20:10.1f} MiB of temporaries"
        )
    if args.output:
        record = {name: value for name, value in vars(args).items() if name != "output"}
        record |= {
            "device": jax.devices()[0].device_kind,
            "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "optax")},
            "rows": rows,
        }
        args.output.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
