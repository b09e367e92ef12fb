"""Decoding from a full key/value cache: ours against jax.nn, and a copy of the device.

    python benchmarks/decode.py --output decode.json

attention  one token per row: append its key and value to nn.KVCache, attend to all keys. Several
           layers with a cache each in one jit, so that the keys come from memory and not from L2;
           bandwidth = bytes of keys and values by the time of a layer. "native" is what the layers
           of nn do (keys split, heads of a group together), "keys whole" one flash_attention.
model      nn.decode_step of a whole model, tokens per second.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.training_gpu import about, quartiles, reason, write
from jax_flashtrain import explain, flash_attention
from jax_flashtrain.nn import (
    KVCache,
    attention_fn,
    decode_step,
    few_rows,
    init_caches,
    init_transformer,
)
from jax_flashtrain.train.config import PRESETS, make_config

HEADS, KV_HEADS, D = 32, 8, 128
SHAPES = ((8, 32768), (1, 32768), (8, 8192), (1, 8192))  # (batch, keys), by worth
MODEL_SHAPES = ((8, 32768), (1, 8192))
LAYERS = 8  # at most
LIMIT = 1.2e-2  # relative L2 error of a bfloat16 output


def contenders() -> dict[str, Callable]:
    """name -> attend(q, cache, position of q)."""

    def ours(attend: Callable) -> Callable:
        return lambda q, cache, before: attend(
            q, cache.keys, cache.values, causal=True, q_offset=before, kv_lengths=cache.lengths
        )

    def plain(attend: Callable, name: str) -> Callable:
        return lambda q, cache, before: attend(
            q, cache.keys, cache.values, key_value_seq_lengths=cache.lengths, implementation=name
        )

    def in_parts(busy: int) -> Callable:
        attend = ours(attention_fn("native"))

        def call(*arguments):  # while it is traced
            before, few_rows.BUSY = few_rows.BUSY, busy
            try:
                return attend(*arguments)
            finally:
                few_rows.BUSY = before

        return call

    one_call = functools.partial(flash_attention, implementation="native")
    found = {
        "native": ours(attention_fn("native")),
        "native, half as many parts": in_parts(few_rows.BUSY // 2),
        "native, twice as many parts": in_parts(few_rows.BUSY * 2),
        "native, keys whole": ours(one_call),
    }
    for name in ("xla", "cudnn"):
        found[f"jax.nn {name}"] = plain(jax.nn.dot_product_attention, name)
    return found


def full_caches(layers: int, batch: int, keys: int) -> list[KVCache]:
    """Caches in which one row is free."""

    def one(key: jax.Array) -> KVCache:
        k, v = jax.random.normal(key, (2, batch, keys, KV_HEADS, D), jnp.bfloat16)
        lengths = jnp.full(batch, keys - 1, jnp.int32)
        return KVCache(k, v, lengths, jnp.zeros(batch, bool))

    return [jax.jit(one)(key) for key in jax.random.split(jax.random.key(1), layers)]


def layers_step(attend: Callable) -> Callable:
    """step(caches, q, row) -> (last output, the first one, caches); every call writes the same
    last row."""

    def step(caches: list[KVCache], q: jax.Array, row: jax.Array) -> tuple:
        grown, outputs = [], []
        for cache in caches:
            start = cache.lengths
            after = cache.append(row, row)
            q = attend(q, after, start)
            outputs.append(q)
            grown.append(dataclasses.replace(after, lengths=start))
        return q, outputs[0], grown

    return jax.jit(step, donate_argnums=0)


def error_of(out: jax.Array, q: jax.Array, cache: KVCache, row: jax.Array) -> float:
    """Relative L2 error of the last batch element's first kv group against float64."""
    wide = lambda x: np.asarray(x.astype(jnp.float32), np.float64)  # noqa: E731
    group = HEADS // KV_HEADS
    k, v = (
        np.concatenate([wide(x[-1, :-1, 0]), wide(row[-1, :, 0])])
        for x in (cache.keys, cache.values)
    )
    s = wide(q[-1, 0, :group]) @ k.T / D**0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    want = p @ v / p.sum(-1, keepdims=True)
    return float(np.linalg.norm(wide(out[-1, 0, :group]) - want) / np.linalg.norm(want))


def copy_timer(size: int) -> Callable[[], float]:
    """Bytes per second, read and written, of a copy on the device."""
    x = jnp.zeros(size // 4, jnp.float32)
    copy = jax.jit(lambda x: -x)

    def run() -> float:
        jax.block_until_ready(copy(x))
        start = time.perf_counter()
        for _ in range(8):
            last = copy(x)
        jax.block_until_ready(last)
        return 8 * 2 * size / (time.perf_counter() - start)

    return run


def attention_row(
    batch: int, keys: int, most_layers: int, rounds: int, copy: Callable, end: float
) -> dict[str, Any]:
    one = 2 * batch * keys * KV_HEADS * D * 2  # bytes of keys and values
    layers = max(2, min(most_layers, (2 << 30) // one))
    caches = full_caches(layers, batch, keys)
    q = jax.random.normal(jax.random.key(2), (batch, 1, HEADS, D), jnp.bfloat16)
    row = jax.random.normal(jax.random.key(3), (batch, 1, KV_HEADS, D), jnp.bfloat16)
    result: dict[str, Any] = {"batch": batch, "keys": keys, "layers": layers, "refused": {}}
    steps: dict[str, Callable] = {}
    errors: dict[str, float] = {}
    for name, attend in contenders().items():
        try:
            start = time.perf_counter()
            step = layers_step(attend)
            _, first, caches = jax.block_until_ready(step(caches, q, row))
            compiled = time.perf_counter() - start
            errors[name] = error_of(first, q, caches[0], row)
            print(f"{batch} x {keys} {name}: {compiled:.1f} s to compile", flush=True)
            if not errors[name] < LIMIT:
                raise ValueError(f"wrong: relative error {errors[name]:.1e}")
            steps[name] = step
        except Exception as error:  # a peer may refuse in any way; the row records it
            result["refused"][name] = reason(error)
            if any(x.is_deleted() for x in jax.tree.leaves(caches)):
                caches = full_caches(layers, batch, keys)
    result["kernel"] = explain(
        q, caches[0].keys, caches[0].values, causal=True, q_offset=keys - 1,
        kv_lengths=jnp.full(batch, keys),
    ).kernel  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    rates: list[float] = []
    repeats = max(1, round(0.02 / max(1e-4, layers * one / 3e12)))
    for turn in range(rounds):
        if turn > 3 and time.perf_counter() > end:
            break
        rates.append(copy())
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(repeats):
                out, _, caches = step(caches, q, row)
            jax.block_until_ready(out)
            seconds[name].append((time.perf_counter() - start) / repeats / layers)
    rate = quartiles(rates)[1]
    result["copy_tb_s"] = rate / 1e12
    for name, times in seconds.items():
        median = quartiles(times)[1]
        result[name] = {
            "us_per_layer": 1e6 * median,
            "us_quartiles": [1e6 * t for t in quartiles(times)],
            "share_of_copy": one / median / rate,
            "error": errors[name],
            "native_speedup_quartiles": quartiles(
                [b / a for a, b in zip(seconds["native"], times, strict=True)]
            )
            if "native" in seconds
            else None,
        }
    return result


def model_rows(preset: str, shapes: tuple, rounds: int, end: float, add: Callable) -> None:
    """decode_step of a whole model, ours and jax.nn."""
    config = make_config(preset, {}).model
    params = jax.jit(init_transformer, static_argnums=1)(jax.random.key(0), config)
    key = jax.random.key(5)
    steps = max(8, 4 * rounds)

    def arguments(batch: int) -> tuple[jax.Array, jax.Array]:
        return jnp.ones((batch, 1), jnp.int32), jnp.ones(batch, jnp.int32)

    def lower(batch: int, keys: int, attention: str | None) -> Any:
        caches = jax.eval_shape(lambda: init_caches(config, batch, keys, jnp.bfloat16))
        return decode_step.lower(
            params, caches, *arguments(batch), key, config=config, attention=attention,
            dtype=jnp.dtype(jnp.bfloat16), temperature=0.0,
        )  # fmt: skip

    names = {"native": None, "jax.nn xla": "xla"}
    for batch, keys in shapes:
        row: dict[str, Any] = {"model": preset, "batch": batch, "keys": keys}
        step = {name: lower(batch, keys, attention).compile() for name, attention in names.items()}
        print(f"{preset} {batch} x {keys}: compiled", flush=True)
        tokens, new = arguments(batch)
        caches = init_caches(config, batch, keys, jnp.bfloat16)
        times: dict[str, list[float]] = {name: [] for name in names}
        drawn: dict[str, list[int]] = {}
        for turn in range(rounds + 1):
            if turn > 3 and time.perf_counter() > end:
                break
            for name in names:
                at = jnp.full(batch, keys - steps, jnp.int32)
                caches = [dataclasses.replace(c, lengths=at + 0) for c in caches]
                last = tokens
                jax.block_until_ready(caches)
                start = time.perf_counter()
                for _ in range(8):
                    last, caches = step[name](params, caches, last, new, key)
                    last = last[:, None]
                jax.block_until_ready(last)
                if turn:
                    times[name].append((time.perf_counter() - start) / 8)
                drawn[name] = np.asarray(last).ravel().tolist()
        for name in names:
            median = quartiles(times[name])[1]
            row[name] = {
                "ms_per_token": 1e3 * median,
                "tokens_per_second": batch / median,
                "native_speedup_quartiles": quartiles(
                    [b / a for a, b in zip(times["native"], times[name], strict=True)]
                ),
            }
        row["same_tokens"] = drawn["native"] == drawn["jax.nn xla"]
        add(row)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--model", choices=list(PRESETS), default="125M")
    add("--rounds", type=int, default=12)
    add("--seconds", type=float, default=1e9, help="rounds stop after this time")
    add("--toy", action="store_true", help="small sizes: does it run?")
    add("--output", type=pathlib.Path, default=pathlib.Path("decode.json"))
    args = parser.parse_args(arguments)
    began = time.perf_counter()
    shapes, models, preset = SHAPES, MODEL_SHAPES, args.model
    if args.toy:
        shapes, models, preset, args.rounds = ((1, 256), (2, 512)), ((2, 128),), "nano", 2
    document: dict[str, Any] = {
        "what": f"Decoding on {jax.devices()[0].device_kind}",
        "command": f"python benchmarks/decode.py --model {args.model} --rounds {args.rounds}",
        "note": f"bfloat16; attention: {HEADS} heads on {KV_HEADS} kv heads of {D}",
        "rounds": args.rounds,
        "attention": [],
        "model": [],
    }

    def save() -> None:
        write(args.output, document | about(time.perf_counter() - began))

    copy = copy_timer(1 << (22 if args.toy else 31))
    for number, (batch, keys) in enumerate(shapes):
        end = began + 0.7 * args.seconds * (number + 1) / len(shapes)
        row = attention_row(batch, keys, 2 if args.toy else LAYERS, args.rounds, copy, end)
        document["attention"].append(row)
        print(json.dumps(row), flush=True)
        save()

    def append(row: dict[str, Any]) -> None:
        document["model"].append(row)
        print(json.dumps(row), flush=True)
        save()

    try:
        model_rows(preset, models, args.rounds, began + args.seconds, append)
    except Exception as error:
        document["model_failed"] = reason(error)
        save()
        raise
    return 0


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    sys.exit(main())
