"""nn.linear_cross_entropy against optax on full logits: time and memory of value and gradient.

    python benchmarks/linear_cross_entropy.py --tokens 32768 --vocab 131072 --dim 2048 \\
        --dtype bf16 --chunk 1024 2048
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from jax_flashtrain.nn import linear_cross_entropy


def full(hidden, weight, targets):
    logits = jnp.dot(hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def full_bf16(hidden, weight, targets):
    """Logits rounded to bfloat16: half the memory, and a less exact loss."""
    logits = jnp.dot(hidden, weight.astype(hidden.dtype))
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), targets
    ).mean()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--tokens", type=int, default=2048)
    add("--vocab", type=int, default=32768)
    add("--dim", type=int, default=256)
    add("--chunk", type=int, nargs="+", default=[1024])
    add("--dtype", choices=("f32", "bf16"), default="f32")
    add("--rounds", type=int, default=10)
    add("--output", type=Path)
    args = parser.parse_args(arguments)
    k1, k2, k3 = jax.random.split(jax.random.key(0), 3)
    dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16}[args.dtype]
    hidden = jax.random.normal(k1, (args.tokens, args.dim), dtype)
    weight = jax.random.normal(k2, (args.dim, args.vocab), jnp.float32) / args.dim**0.5
    targets = jax.random.randint(k3, (args.tokens,), 0, args.vocab)
    data = (hidden, weight, targets)

    losses = {"optax": full}
    if dtype == jnp.bfloat16:
        losses["optax, bf16 logits"] = full_bf16
    for chunk in args.chunk:
        losses[f"chunks of {chunk}"] = partial(linear_cross_entropy, chunk=chunk)
    compiled, differences, refused = {}, {}, {}
    reference = None
    for name, fn in losses.items():
        try:
            step = jax.jit(jax.value_and_grad(fn, (0, 1))).lower(*data).compile()
            value, grads = jax.block_until_ready(step(*data))
        except jax.errors.JaxRuntimeError as error:  # no memory for all logits
            refused[name] = str(error).splitlines()[0][:200]
            continue
        if reference is None:
            reference = (value, grads)
        ratios = [
            float(jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.linalg.norm(b))
            for a, b in zip(grads, reference[1], strict=True)
        ]
        differences[name] = [abs(float(value - reference[0])), *ratios]
        print(f"{name}: differences of loss, dhidden, dweight {differences[name]}", flush=True)
        if "bf16 logits" not in name and not (
            differences[name][0] < 1e-2 and max(differences[name][1:]) < 2e-2
        ):
            sys.exit(f"{name} differs from {next(iter(compiled))}")
        del value, grads
        compiled[name] = step
    reference = None
    times = {name: [] for name in compiled}
    for turn in range(args.rounds):
        for name, fn in compiled.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(fn(*data))
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        print(f"\rround {turn + 1}/{args.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    rows = []
    for name, fn in compiled.items():
        walls, cpus = zip(*times[name], strict=True)
        memory = fn.memory_analysis().temp_size_in_bytes
        row = {
            "loss": name,
            "milliseconds": 1e3 * statistics.median(walls),
            "cpu_milliseconds": 1e3 * statistics.median(cpus),
            "temp_bytes": memory,
            "differences": differences[name],
        }
        if "optax" in times:
            ratios = [a[0] / b[0] for a, b in zip(times["optax"], times[name], strict=True)]
            row["speed_against_optax_quartiles"] = statistics.quantiles(ratios, n=4)
        rows.append(row)
        print(
            f"{name:<20} {row['milliseconds']:9.2f} ms {row['cpu_milliseconds']:9.1f} CPU ms "
            f"{memory / 2**20:10.1f} MiB of temporaries"
        )
    if args.output:
        record = {name: value for name, value in vars(args).items() if name != "output"}
        record |= {
            "device": jax.devices()[0].device_kind,
            "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "optax")},
            "date": time.strftime("%Y-%m-%d"),
            "refused": refused,
            "rows": rows,
        }
        args.output.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
