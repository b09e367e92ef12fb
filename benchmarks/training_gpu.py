"""Everything around the operator in one visit to a GPU machine, in parts with time limits.

    python benchmarks/training_gpu.py --out DIR

steps   training steps of the 125M and 350M models, interleaved: ours, jax.nn, tokamax
decode  a cache of 8k and 32k keys, ours against jax.nn
loss    linear_cross_entropy against optax: 32k tokens, 128k classes
run     the 30M model trained on Python's documentation and sources, twice
parts   norms, rotation, SwiGLU and loss as plain JAX against a copy of as many bytes

Every part is a process of its own and rewrites DIR/<part>.json with each new row; what fails or
runs out of time leaves its traces in DIR/training_gpu.log, and the next part starts. ``--toy`` runs
all of it at small sizes, also on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import logging
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

#: Part -> its seconds.
PARTS = {"steps": 150, "decode": 80, "loss": 50, "run": 170, "parts": 30}

#: XLA tries dozens of Triton kernels for every matrix product, which takes most of the compilation;
#: these parts leave the products to cuBLAS.
CUBLAS_ONLY = ("steps", "decode", "run")

ALL = ("native", "cudnn", "tokamax")
#: (preset, tokens per row, rows per step, attentions) of the training steps, by worth. jax.nn's xla
#: keeps all weights for the backward: at 8192 tokens they fit no GPU.
STEPS = (
    ("125M", 2048, 16, ("native", "cudnn", "xla", "tokamax")),
    ("350M", 2048, 8, ALL),
    ("125M", 8192, 4, ALL),
    ("350M", 8192, 2, ALL),
)
TOY_STEPS = (
    ("nano", 64, 4, ("native", "cudnn", "xla", "tokamax")),
    ("nano", 128, 2, ALL),
)

#: What the training run must reach, in nats per byte; stated before it was run.
TARGET_NATS = 1.1


def write(path: pathlib.Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def about(seconds: float) -> dict[str, Any]:
    """What every result file says about where it comes from."""
    import jax

    from benchmarks.machine import clocks, driver, versions

    return {
        "device": jax.devices()[0].device_kind,
        "driver": driver(),
        "clock": clocks(),
        "versions": versions("jax", "jaxlib", "optax", "tokamax"),
        "commit": os.environ.get("JFT_COMMIT", "unknown"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": seconds,
    }


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:300]


# ---- training steps ------------------------------------------------------------------------------


def tokamax_attend(q, k, v, *, causal=False):
    from benchmarks import peers

    tokamax = peers.tokamax_module()
    if tokamax is None:
        raise ImportError("tokamax is not installed")
    return tokamax.dot_product_attention(q, k, v, is_causal=causal, implementation="mosaic")


@dataclasses.dataclass
class Contender:
    """One attention in one model's step."""

    name: str
    kernel: str
    step: Any = None
    state: Any = None
    compile_seconds: float = 0.0
    memory: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)


def random_state(config: Any) -> Any:
    """A training state on the host: making it with JAX would compile a program per shape."""
    import jax
    import numpy as np

    from jax_flashtrain.train.step import init_state

    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_state(config))
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    params = jax.tree.map(
        lambda x: 0.02 * rng.standard_normal(x.shape, x.dtype) if x.ndim > 1 else x + 1,
        state.params,
    )
    return state._replace(params=jax.tree.map(lambda x: x.astype(np.float32), params))


def steps_part(out: pathlib.Path, seconds: float, toy: bool) -> None:
    """Model after model, by worth; a row per contender is written as soon as it is timed."""
    import jax
    import numpy as np

    from jax_flashtrain.train import report
    from jax_flashtrain.train.config import make_config
    from jax_flashtrain.train.data import Batch
    from jax_flashtrain.train.sources import built_in_text
    from jax_flashtrain.train.step import make_train_step

    logging.getLogger("absl").setLevel(logging.ERROR)  # tokamax tells of every layer
    began = time.perf_counter()
    shapes = TOY_STEPS if toy else STEPS
    inner, rounds = (1, 3) if toy else (3, 12)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 1 << 40)
    document: dict[str, Any] = {
        "what": f"Training steps on {jax.devices()[0].device_kind}",
        "command": "python benchmarks/training_gpu.py --out DIR --parts steps",
        "note": f"bfloat16 with float32 masters, AdamW, layers in a loop (scan_layers), XLA_FLAGS="
        f"{os.environ.get('XLA_FLAGS', '')!r}; at most {rounds} rounds of {inner} steps; memory: "
        "arguments and temporaries of the compiled step; tokamax as shipped (not tuned)",
        "rows": [],
        "refused": {},
    }

    def save() -> None:
        write(out / "steps.json", document | about(time.perf_counter() - began))

    def log(text: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {text}", flush=True)

    text = built_in_text("docs").tokens

    def batch_of(number: int, rows: int, seq_len: int) -> Batch:
        start = number * rows * seq_len
        window = np.take(text, np.arange(start, start + rows * seq_len + 1), mode="wrap")
        shape = (1, rows, seq_len)
        window = window.astype(np.int32)
        return jax.device_put(Batch(window[:-1].reshape(shape), window[1:].reshape(shape), None))

    for preset, seq_len, batch, names in shapes:
        left = seconds - (time.perf_counter() - began)
        if left < (1 if toy else 25):
            document["refused"][f"{preset} S{seq_len}"] = "not run: no time left"
            save()
            continue
        label = f"{preset} S{seq_len}"
        log(f"{label}: state")
        sizes = {"seq_len": seq_len, "batch_size": batch, "dtype": "bf16", "scan_layers": True}
        config = make_config(preset, sizes)
        state = random_state(config)
        parameters = report.parameter_count(state.params)
        first_batch = batch_of(0, batch, seq_len)
        contenders: list[Contender] = []
        for name in names:
            if contenders and seconds - (time.perf_counter() - began) < (1 if toy else 20):
                document["refused"][f"{label} {name}"] = "not run: no time left"
                continue
            try:
                if name == "tokamax":
                    kernel, attend, mine = "tokamax mosaic", tokamax_attend, config
                else:
                    mine = make_config(preset, {**sizes, "attention": name})
                    kernel, attend = report.attention_line(mine), None
                start = time.perf_counter()
                lowered = make_train_step(mine, attend=attend).lower(state, first_batch)
                log(f"{label} {name}: lowered")
                contender = Contender(name, kernel, step=lowered.compile())
                contender.compile_seconds = time.perf_counter() - start
                memory = contender.step.memory_analysis()
                contender.memory = memory.argument_size_in_bytes + memory.temp_size_in_bytes
                log(f"{label} {name}: compiled, {contender.memory / 2**30:.1f} GiB")
                if contender.memory > 0.9 * limit:
                    raise MemoryError(f"needs {contender.memory / 2**30:.0f} GiB")
                contender.state = jax.device_put(state)
                contenders.append(contender)
            except Exception as error:  # a contender may refuse in any way; the file records it
                document["refused"][f"{label} {name}"] = reason(error)
                log(f"{label} {name}: {reason(error)}")
        del state
        for turn in range(rounds + 1):
            if turn > 3 and time.perf_counter() - began > seconds - 8:
                break
            parts = [batch_of(turn * inner + i, batch, seq_len) for i in range(inner)]
            jax.block_until_ready(parts)
            for contender in contenders[:: 1 if turn % 2 else -1]:
                try:
                    start = time.perf_counter()
                    for part in parts:
                        contender.state, metrics = contender.step(contender.state, part)
                    contender.losses.append(float(metrics["loss"]))
                    if turn:  # the first round warms up
                        contender.seconds.append((time.perf_counter() - start) / inner)
                except Exception as error:
                    contenders.remove(contender)
                    document["refused"][f"{label} {contender.name}"] = reason(error)
        log(f"{label}: timed")
        for contender in contenders:
            low, median, high = quartiles(contender.seconds)
            speed = config.tokens_per_step / median
            flops = speed * report.flops_per_token(config.model, parameters, seq_len)
            peak = report.peak_flops(config)
            first = contenders[0]
            row = {
                "model": preset,
                "seq_len": seq_len,
                "batch_size": batch,
                "attention": contender.name,
                "kernel": contender.kernel,
                "ms": 1e3 * median,
                "ms_quartiles": [1e3 * low, 1e3 * median, 1e3 * high],
                "tokens_per_second": speed,
                "mfu": flops / peak if peak else None,
                "memory_gib": contender.memory / 2**30,
                "native_speedup_quartiles": quartiles(
                    [b / a for a, b in zip(first.seconds, contender.seconds, strict=True)]
                ),
                "last_loss": contender.losses[-1],
                "largest_loss_difference": max(
                    abs(a - b) for a, b in zip(first.losses, contender.losses, strict=True)
                ),
                "rounds": len(contender.seconds),
                "compile_seconds": contender.compile_seconds,
            }
            document["rows"].append(row)
            print(json.dumps(row), flush=True)
        for contender in contenders:
            contender.state = contender.step = None
        save()
    for label, text in document["refused"].items():
        print(f"refused: {label}: {text}", flush=True)


# ---- the training run ----------------------------------------------------------------------------


def run_part(out: pathlib.Path, seconds: float, toy: bool, names: list[str]) -> None:
    """The trainer itself, through its command line, with our kernel and with jax.nn."""
    from jax_flashtrain.train.metrics import read_curve

    began = time.perf_counter()
    options = ["--config", "30M", "--dtype", "bf16", "--text", "cpython", "--steps", "1000"]
    options += ["--eval-every", "125", "--checkpoint-every", "500", "--final-eval-windows", "512"]
    if toy:
        options = ["--config", "nano", "--steps", "40", "--eval-every", "20", "--text", "cpython"]
        options += ["--final-eval-windows", "64"]
    document: dict[str, Any] = {
        "what": "A training run on CPython's documentation and standard library",
        "target_nats": TARGET_NATS,
        "runs": {},
    }
    for name in names:
        start = time.perf_counter()
        folder = pathlib.Path(tempfile.mkdtemp()) / name
        command = ["-m", "jax_flashtrain.train", *options, "--attention", name]
        left = seconds - (start - began)
        record: dict[str, Any] = {"command": " ".join(["python", *command])}
        document["runs"][name] = record
        try:
            done = subprocess.run(
                [sys.executable, *command, "--output", str(folder)],
                timeout=left / 2 if name != names[-1] else left,
                capture_output=True, text=True,
            )  # fmt: skip
            record |= {"exit_code": done.returncode, "output": done.stdout[-6000:]}
            record["errors"] = done.stderr[-2000:] if done.returncode else ""
            print(done.stdout[-3000:], done.stderr[-3000:], sep="\n", flush=True)
        except subprocess.TimeoutExpired as error:
            record["errors"] = f"stopped after {error.timeout:.0f} s"
            print(f"{name}: {record['errors']}", flush=True)
        record["wall_seconds"] = time.perf_counter() - start
        metrics, summary = folder / "metrics.jsonl", folder / "summary.json"
        if metrics.exists():
            for event, key in (("train", "loss"), ("train", "grad_norm"), ("eval", "val_loss")):
                at, values = read_curve(metrics, event, key)
                record[key] = {"step": at, "value": [round(x, 5) for x in values]}
        if summary.exists():
            record["summary"] = json.loads(summary.read_text())
            record["reached"] = record["summary"]["val_loss_nats"] <= TARGET_NATS
        write(out / "run.json", document | {"commit": os.environ.get("JFT_COMMIT", "unknown")})
    write(out / "run.json", document | about(time.perf_counter() - began))


# ---- parts that are scripts of their own ---------------------------------------------------------


def loss_part(out: pathlib.Path, seconds: float, toy: bool) -> None:
    from benchmarks import linear_cross_entropy

    sizes = "--tokens 32768 --vocab 131072 --dim 2048 --dtype bf16 --rounds 15"
    if toy:
        sizes = "--tokens 512 --vocab 1024 --dim 32 --dtype bf16 --rounds 2"
    chunks = "64 128" if toy else "1024 2048 4096"
    linear_cross_entropy.main(
        [*sizes.split(), "--chunk", *chunks.split(), "--output", str(out / "loss.json")]
    )


def parts_part(out: pathlib.Path, seconds: float, toy: bool) -> None:
    from benchmarks import fused_parts

    sizes = "--rows 131072 --dim 2048 --dtype bf16 --inner 10 --rounds 20"
    if toy:
        sizes = "--rows 256 --dim 64 --dtype bf16 --inner 2 --rounds 2"
    fused_parts.main([*sizes.split(), "--output", str(out / "parts.json")])


def decode_part(out: pathlib.Path, seconds: float, toy: bool) -> None:
    from benchmarks import decode

    extra = ["--toy"] if toy else []
    decode.main(["--seconds", str(seconds - 5), "--output", str(out / "decode.json"), *extra])


# ---- one after the other -------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--out", type=pathlib.Path, required=True, help="folder for the results and the log")
    add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    add("--runs", nargs="+", choices=("native", "xla"), default=["native", "xla"])
    add("--toy", action="store_true", help="small sizes: does every part run?")
    add("--inside", action="store_true", help=argparse.SUPPRESS)  # this process is the part
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.inside:
        part = args.parts[0]
        if part == "run":
            run_part(args.out.absolute(), PARTS[part], args.toy, args.runs)
        else:
            globals()[f"{part}_part"](args.out.absolute(), PARTS[part], args.toy)
        return 0
    # The states of all contenders of a step live side by side: take nearly all of the device.
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    failed = []
    with (args.out / "training_gpu.log").open("a") as log:
        for part in args.parts:
            log.write(f"== {part}\n")
            log.flush()
            command = [sys.executable, __file__, "--inside", "--out", str(args.out)]
            command += ["--parts", part, "--runs", *args.runs, *(["--toy"] if args.toy else [])]
            start = time.perf_counter()
            flags = "--xla_gpu_enable_triton_gemm=false" if part in CUBLAS_ONLY else ""
            flags = " ".join(filter(None, [os.environ.get("XLA_FLAGS"), flags]))
            process = subprocess.Popen(
                command, env=environment | {"XLA_FLAGS": flags}, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code: int | str = process.wait(timeout=PARTS[part] + 5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)  # the part and whatever it started
                process.wait()
                code = "stopped at its time limit"
            taken = time.perf_counter() - start
            print(f"{part}: exit code {code} after {taken:.0f} s", flush=True)
            if code != 0:
                failed.append(part)
    lines = (args.out / "training_gpu.log").read_text().splitlines()
    print("\n".join(lines[-40:]))
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
