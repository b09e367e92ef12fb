"""What the options cost on the CPU: ``python benchmarks/options.py``.

Each row times forward + backward of one call with an option and of the plain call beside it, round
by round, in CPU seconds of the process, and compares the cost per visible (query, key) pair. Prints
a table and writes benchmarks/results/cpu-options-<date>.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import sys
from collections.abc import Callable

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

import jax_flashtrain
from benchmarks import run, timing
from jax_flashtrain import flash_attention

RESULTS = pathlib.Path(__file__).resolve().parent / "results"


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison. ``limit``: the largest cost per visible pair, relative to the plain call."""

    name: str
    S: int
    options: dict
    visible: float  # share of the S x S pairs
    limit: float = 1.25
    B: int = 1
    H: int = 4
    D: int = 64
    differentiate: tuple[str, ...] = ()
    plain_batch: int = 1  # the plain call's batch and length
    plain_length: int = 0


def window_share(S: int, left: int) -> float:
    return (S * (left + 1) - left * (left + 1) / 2) / S**2


def rows() -> list[Row]:
    rng = np.random.default_rng(0)
    S = 2048
    ids = jnp.asarray(np.arange(S) // 512, jnp.int32)[None]
    blocks = np.kron(rng.random((S // 128, S // 128)) < 0.5, np.ones((128, 128), bool))
    scattered = rng.random((S, S)) < 0.9
    bias = jnp.asarray(rng.standard_normal((1, 4, S, S), dtype=np.float32))
    lengths = {n: jnp.asarray([S // 2], jnp.int32) for n in ("q_lengths", "kv_lengths")}
    long = jnp.asarray(np.arange(4096) // 512, jnp.int32)[None]
    return [
        Row("causal", S, {"causal": True}, (S + 1) / (2 * S)),
        Row("window 256", S, {"causal": True, "window": (256, 0)}, window_share(S, 256)),
        Row("bias", S, {"bias": bias}, 1.0),
        Row("bias and its gradient", S, {"bias": bias}, 1.0, differentiate=("bias",)),
        Row("mask, blocks", S, {"mask": jnp.asarray(blocks)[None, None]}, float(blocks.mean())),
        Row("mask, 90 % of all pairs", S, {"mask": jnp.asarray(scattered)[None, None]}, 1.0),
        Row("segments", S, {"segment_ids": ids}, 0.25),
        Row("lengths", S, lengths, 0.25),
        Row("softcap", S, {"softcap": 30.0}, 1.0, limit=1.35),
        Row("alibi", S, {"alibi_slopes": jnp.full(4, 0.1)}, 1.0),
        Row("sinks", S, {"sinks": jnp.zeros(4)}, 1.0),
        Row("window 256 of 8192", 8192, {"causal": True, "window": (256, 0)},
            window_share(8192, 256), limit=1.5),
        Row("8 documents of 512 packed, against batch 8", 4096, {"segment_ids": long}, 1 / 8,
            limit=1.3, plain_batch=8, plain_length=512),
    ]  # fmt: skip


def contender(B: int, S: int, row: Row, options: dict) -> Callable[[], object]:
    rng = np.random.default_rng(1)
    q, k, v, do = (
        jnp.asarray(rng.standard_normal((B, S, row.H, row.D), dtype=np.float32)) for _ in range(4)
    )
    wanted = {n: options[n] for n in row.differentiate if n in options}
    rest = {n: x for n, x in options.items() if n not in wanted}

    @jax.jit
    def both(q, k, v, wanted, do):
        def attend(q, k, v, wanted):
            return flash_attention(q, k, v, implementation="native", **rest, **wanted)

        o, pullback = jax.vjp(attend, q, k, v, wanted)
        return o, pullback(do)

    return lambda: jax.block_until_ready(both(q, k, v, wanted, do))


def measure(row: Row, rounds: int) -> dict:
    plain_length = row.plain_length or row.S
    calls = {
        "option": contender(row.B, row.S, row, row.options),
        "plain": contender(row.plain_batch, plain_length, row, {}),
    }
    samples = timing.interleave(calls, rounds=rounds)
    low, mid, high = timing.median_ratio(samples["option"].cpu, samples["plain"].cpu)
    pairs = row.B * row.S**2 * row.visible / (row.plain_batch * plain_length**2)
    return {
        "name": row.name,
        "S": row.S,
        "visible_share": row.visible,
        "cost_of_plain": mid,
        "cost_per_pair": mid / pairs,
        "cost_per_pair_quartiles": [low / pairs, mid / pairs, high / pairs],
        "limit": row.limit,
        "cpu_s": {n: s.summary()["cpu_median_s"] for n, s in samples.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    results = []
    print(
        "| option | share of pairs | cost of plain | cost per pair | limit |\n|---|---|---|---|---|"
    )
    for row in rows():
        if args.only not in row.name:
            continue
        r = measure(row, args.rounds)
        results.append(r)
        print(
            f"| {r['name']} | {r['visible_share']:.3f} | {r['cost_of_plain']:.3f} | "
            f"{r['cost_per_pair']:.2f} | {r['limit']:.2f} |",
            flush=True,
        )
    date = datetime.datetime.now(datetime.UTC)
    document = {
        "backend": "cpu",
        "what": "float32 forward + backward, H 4, D 64; CPU time relative to the plain call",
        "command": "python benchmarks/options.py",
        "commit": run.commit(),
        "date": date.isoformat(timespec="seconds"),
        "versions": {"jax": jax.__version__, "jax_flashtrain": jax_flashtrain.__version__},
        "rounds": args.rounds,
        "rows": results,
    }
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / f"cpu-options-{date:%Y-%m-%d}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")
    return int(any(r["cost_per_pair"] > r["limit"] for r in results))


if __name__ == "__main__":
    sys.exit(main())
