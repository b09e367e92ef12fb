"""Times one training step through several attention implementations, interleaved.

    python -m jax_flashtrain.train.compare --attention native jax xla
    python -m jax_flashtrain.train.compare --config 125M --dtype bf16 --seq-len 2048 \\
        --attention native cudnn xla --output step.json

Every round runs each of them once, in turn, so that a machine that slows down slows all of them.
All start from the same weights and see the same data: their losses are compared before any time is
shown. On a CPU that others use, the CPU time is the figure to look at.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jax_flashtrain.nn import ATTENTION_NAMES
from jax_flashtrain.train import report
from jax_flashtrain.train.config import PRESETS, RunConfig, make_config
from jax_flashtrain.train.data import Batch, Corpus
from jax_flashtrain.train.errors import UserError
from jax_flashtrain.train.loop import load_corpus
from jax_flashtrain.train.step import init_state, make_train_step

#: Two trainings from the same weights may drift apart by rounding alone.
LOSS_TOLERANCE = {"f32": 1e-3, "bf16": 5e-2}


class Contestant:
    """One attention: its compiled step, its own state, its times."""

    def __init__(self, config: RunConfig, batch: Batch):
        self.name = config.attention
        self.kernel = report.attention_line(config)
        self.state = jax.jit(init_state, static_argnums=0)(config)
        self.parameters = report.parameter_count(self.state.params)
        began = time.perf_counter()
        self.step = make_train_step(config).lower(self.state, batch).compile()
        self.compile_seconds = time.perf_counter() - began
        memory = self.step.memory_analysis()
        # Arguments are donated, so results take no memory of their own.
        self.memory = memory and memory.argument_size_in_bytes + memory.temp_size_in_bytes
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.losses: list[float] = []

    def run(self, batches: list[Batch]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        for batch in batches:
            self.state, metrics = self.step(self.state, batch)
        self.losses.append(float(metrics["loss"]))  # waits for the device
        self.wall.append((time.perf_counter() - wall) / len(batches))
        self.cpu.append((time.process_time() - cpu) / len(batches))

    def row(self, config: RunConfig) -> dict[str, Any]:
        wall = statistics.median(self.wall)
        quartiles = statistics.quantiles(self.wall, n=4) if len(self.wall) > 1 else [wall] * 3
        speed = config.tokens_per_step / wall
        flops = speed * report.flops_per_token(config.model, self.parameters, config.seq_len)
        peak = report.peak_flops(config)
        return {
            "attention": self.name,
            "kernel": self.kernel,
            "milliseconds": 1e3 * wall,
            "milliseconds_quartiles": [1e3 * q for q in quartiles],
            "cpu_milliseconds": 1e3 * statistics.median(self.cpu),
            "tokens_per_second": speed,
            "model_tflops": flops / 1e12,
            "mfu": flops / peak if peak else None,
            "memory_bytes": self.memory,
            "compile_seconds": self.compile_seconds,
            "last_loss": self.losses[-1],
        }


def compare(
    configs: list[RunConfig], corpus: Corpus, *, rounds: int, inner: int
) -> list[dict[str, Any]]:
    """One row per configuration; raises UserError when their losses disagree."""

    def batches(turn: int) -> list[Batch]:
        config = configs[0]
        rows = config.batch_size * config.accumulate
        shape = (config.accumulate, config.batch_size, config.seq_len)
        steps = range(turn * inner, (turn + 1) * inner)
        return [
            jax.device_put(
                jax.tree.map(
                    lambda x: x.reshape(shape), corpus.train_batch(config.seed, step, rows)
                )
            )
            for step in steps
        ]

    contestants = []
    for config in configs:
        contestants.append(Contestant(config, batches(0)[0]))
        print(f"compiled {config.attention}: {contestants[-1].kernel}", file=sys.stderr, flush=True)
    for turn in range(rounds + 1):
        order = contestants if turn % 2 == 0 else contestants[::-1]
        parts = batches(turn)
        jax.block_until_ready(parts)
        for contestant in order:
            contestant.run(parts)
        print(f"\rround {turn}/{rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    first, *others = contestants
    for other in others:
        difference = max(abs(a - b) for a, b in zip(first.losses, other.losses, strict=True))
        if not difference <= LOSS_TOLERANCE[configs[0].dtype]:
            raise UserError(f"the losses of {first.name} and {other.name} differ by {difference}")
    for contestant in contestants:  # the first round warms up
        del contestant.wall[0], contestant.cpu[0]
    return [c.row(config) for c, config in zip(contestants, configs, strict=True)]


def _commit() -> str | None:
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["attention    ms/step   CPU ms    tokens/s   TFLOP/s    MFU   memory  last loss"]
    for r in rows:
        mfu = "-" if r["mfu"] is None else f"{100 * r['mfu']:.1f} %"
        memory = "-" if not r["memory_bytes"] else f"{r['memory_bytes'] / 2**30:.2f} GiB"
        lines.append(
            f"{r['attention']:<10}{r['milliseconds']:>10.2f}{r['cpu_milliseconds']:>9.1f}"
            f"{r['tokens_per_second']:>12,.0f}{r['model_tflops']:>10.3f}{mfu:>8}{memory:>10}"
            f"{r['last_loss']:>11.5f}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jax_flashtrain.train.compare", description=__doc__.split("\n\n")[0]
    )
    add = parser.add_argument
    add("--config", choices=list(PRESETS), default="tiny")
    add("--attention", choices=ATTENTION_NAMES, nargs="+", default=["native", "jax", "xla"])
    add("--dtype", choices=("f32", "bf16"), default="f32")
    add("--seq-len", type=int)
    add("--batch-size", type=int)
    add("--remat", choices=("none", "attention", "full"), default="none")
    add("--scan-layers", action="store_true")
    add("--rounds", type=int, default=20)
    add("--inner", type=int, default=1, help="steps between two readings of the clock")
    add("--output", type=Path, help="write the rows as JSON")
    options = vars(parser.parse_args(arguments))
    names, rounds = options.pop("attention"), options.pop("rounds")
    inner, output = options.pop("inner"), options.pop("output")
    preset = options.pop("config")
    given = {name: value for name, value in options.items() if value is not None}
    try:
        configs = [make_config(preset, {**given, "attention": name}) for name in names]
        rows = compare(configs, load_corpus(configs[0]), rounds=rounds, inner=inner)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    one = configs[0]
    print(report.device_line())
    print(f"{preset}, {one.dtype}, {one.batch_size} rows of {one.seq_len} tokens, {rounds} rounds")
    print(_table(rows))
    if output:
        record = {
            "device": report.device_line(),
            "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "optax")},
            "commit": _commit(),
            "config": preset,
            "dtype": configs[0].dtype,
            "batch_size": configs[0].batch_size,
            "seq_len": configs[0].seq_len,
            "rounds": rounds,
            "inner": inner,
            "rows": rows,
        }
        output.write_text(json.dumps(record, indent=2) + "\n")
        print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
