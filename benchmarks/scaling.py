"""Attention and training over several GPUs of one host against one of them.

    python benchmarks/scaling.py --output benchmarks/results/scaling-NAME.json
    python benchmarks/scaling.py --toy --output scaling.json     # eight virtual CPU devices
    python benchmarks/scaling.py --compile 2                     # for two H200, without a GPU

attention  forward and backward of one causal sequence: the plain operator on one device against
           ring, all-to-all and both over all devices. Results are compared before they are timed,
           in turns. efficiency = time on one / (devices x time on all).
           "beside": asynchronous permutes of the scheduled program that straddle a kernel.
training   steps over meshes against one device: losses and times.

Leave NVLink multicast off (NCCL_NVLS_ENABLE=0). ``--compile`` only compiles, and tells what runs
beside the kernels; it needs jax's CUDA plugin (jax-cuda13-plugin, jax-cuda13-pjrt; no CUDA
libraries) and a build of this package with CUDA kernels.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import re
import statistics
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

HEADS, KV_HEADS, D = 32, 8, 128
LENGTHS = (65536, 131072)
TOY_LENGTHS = (512,)
LIMIT = 1.2e-2  # relative L2 error of bfloat16 results
LOSS_LIMIT = 2e-2  # difference of bfloat16 losses
STEPS = 5
KERNEL = "jax_flashtrain"  # in the names of our custom calls
ORDER = "zigzag"

#: What XLA wants to know about the GPU that it compiles for.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


def straddling(text: str) -> tuple[int, int]:
    """(permutes between whose start and end a kernel runs, all permutes), in the scheduled HLO of
    a program. A kernel is a custom call of ours, or a fusion around one."""
    around: set[str] = set()  # what calls a computation that holds a kernel
    computation = ""
    for line in text.splitlines():
        if line.endswith("{") and "->" in line:
            computation = line.split()[0]
        elif "custom-call(" in line and KERNEL in line:
            around.add(f"calls={computation},")
    beside = total = 0
    pending: dict[str, bool] = {}  # start -> whether a kernel was called since
    for line in text.splitlines():
        start = re.search(r"(%?[\w.-]+) = .* collective-permute-start\(", line)
        done = re.search(r" collective-permute-done\(.*?(%?[\w.-]+)\)", line)
        if line.endswith("{"):  # another computation
            pending = {}
        elif start:
            pending[start[1]] = False
        elif done and done[1] in pending:
            beside, total = beside + pending.pop(done[1]), total + 1
        elif " collective-permute(" in line:
            total += 1
        elif ("custom-call(" in line and KERNEL in line) or any(x in f"{line}," for x in around):
            pending = dict.fromkeys(pending, True)
    return beside, total


def schemes(devices: int) -> dict[str, tuple[int, int]]:
    """name -> (ring, all-to-all), over all devices."""
    found = {"ring": (devices, 1), "Ulysses": (1, devices)}
    if devices >= 4:
        found["ring x Ulysses"] = (devices // 2, 2)
    return found


def step_of(attend: Any) -> Any:
    """o, dq, dk, dv of (q, k, v, do)."""
    import jax

    def step(q: Any, k: Any, v: Any, do: Any) -> tuple[Any, ...]:
        o, pullback = jax.vjp(attend, q, k, v)
        return o, *pullback(do)

    return jax.jit(step)


def over(devices: Any, ring: int, ulysses: int) -> tuple[Any, Any]:
    """(attention over the devices, where its arguments live)."""
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jax_flashtrain.distributed import mesh_attention

    mesh = Mesh(np.array(devices).reshape(ring, ulysses), ("ring", "ulysses"))
    axes = {a: a for a, n in (("ring", ring), ("ulysses", ulysses)) if n > 1}
    where = NamedSharding(mesh, PartitionSpec(None, ("ring", "ulysses")))
    return functools.partial(mesh_attention, mesh=mesh, causal=True, order=ORDER, **axes), where


def compile_only(count: int) -> None:
    """Compiles for GPUs that are not there."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(
        "", "cuda", target_config=H200, topology=f"1x1x{count}"
    ).devices
    for length in LENGTHS:
        for name, (ring, ulysses) in schemes(count).items():
            attend, where = over(devices, ring, ulysses)
            attend = functools.partial(attend, implementation="native")
            shapes = [
                jax.ShapeDtypeStruct((1, length, h, D), jnp.bfloat16, sharding=where)
                for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)
            ]
            lowered = step_of(attend).trace(*shapes).lower(lowering_platforms=("cuda",))
            beside, total = straddling(lowered.compile().as_text())
            print(f"S{length} {name} over {count}: {beside} of {total} permutes straddle kernels")


def attention_rows(lengths: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    import jax
    import jax.numpy as jnp

    from benchmarks.timing import interleave, median_ratio
    from jax_flashtrain import flash_attention
    from jax_flashtrain.distributed import from_zigzag, to_zigzag

    devices = jax.devices()
    rows = []

    @jax.jit
    def error(got: Any, want: Any) -> Any:
        got, want = got.astype(jnp.float32), want.astype(jnp.float32)
        return jnp.linalg.norm((got - want).ravel()) / jnp.linalg.norm(want.ravel())

    for length in lengths:
        keys = jax.random.split(jax.random.key(0), 4)
        heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
        one = [
            jax.device_put(jax.random.normal(key, (1, length, h, D), jnp.bfloat16), devices[0])
            for key, h in zip(keys, heads, strict=True)
        ]
        plain = step_of(functools.partial(flash_attention, causal=True))
        want = plain(*one)
        contenders = {"one device": functools.partial(_done, plain, one)}
        about: dict[str, dict[str, Any]] = {}
        for name, (ring, ulysses) in schemes(len(devices)).items():
            attend, where = over(devices, ring, ulysses)
            there = [jax.device_put(to_zigzag(x, ring, 1), where) for x in one]
            compiled = step_of(attend).lower(*there).compile()
            errors = [
                float(error(from_zigzag(jax.device_put(x, devices[0]), ring, 1), y))
                for x, y in zip(compiled(*there), want, strict=True)
            ]
            if not max(errors) < LIMIT:
                raise AssertionError(f"{name}: relative errors of o, dq, dk, dv: {errors}")
            beside, total = straddling(compiled.as_text())
            memory = compiled.memory_analysis()
            about[name] = {
                "largest error": max(errors),
                "beside": f"{beside} of {total}",
                "temporary MiB per device": memory.temp_size_in_bytes / 2**20,
            }
            contenders[name] = functools.partial(_done, compiled, there)
        samples = interleave(contenders, rounds=rounds)
        for name, facts in about.items():
            low, mid, high = median_ratio(samples["one device"].wall, samples[name].wall)
            n = len(devices)
            rows.append(
                {
                    "what": f"S{length} H{HEADS}/{KV_HEADS} D{D} causal, {name}",
                    "devices": n,
                    "ms": {
                        "one": 1e3 * statistics.median(samples["one device"].wall),
                        "all": 1e3 * statistics.median(samples[name].wall),
                    },
                    "efficiency": mid / n,
                    "efficiency_quartiles": [low / n, mid / n, high / n],
                    **facts,
                }
            )
            print(rows[-1], flush=True)
    return rows


def _done(function: Any, arguments: list[Any]) -> Any:
    import jax

    return jax.block_until_ready(function(*arguments))


def meshes(devices: int) -> list[str]:
    """Every axis alone, and all of them where there are devices enough."""
    found = [f"{axis}={devices}" for axis in ("data", "context")] + ["tensor=2"]
    return [*found, "data=2,context=2,tensor=2"] if devices >= 8 else found


def training_rows(toy: bool) -> list[dict[str, Any]]:
    import jax
    import numpy as np

    from jax_flashtrain.train.config import make_config
    from jax_flashtrain.train.data import Batch
    from jax_flashtrain.train.parallel import Placement
    from jax_flashtrain.train.step import init_state, make_train_step, state_shardings

    preset, given = ("tiny", {"seq_len": 64}) if toy else ("125M", {"seq_len": 8192})
    given |= {"batch_size": 8, "dtype": "bf16", "steps": STEPS}

    def run(mesh: str) -> tuple[list[float], float]:
        config = make_config(preset, given | {"mesh": mesh})
        placement = Placement(config)
        make = jax.jit(
            init_state, static_argnums=0, out_shardings=state_shardings(config, placement)
        )
        state, step = make(config), make_train_step(config, placement=placement)
        rng = np.random.default_rng(0)
        shape = (1, config.batch_size, config.seq_len + 1)
        losses, times = [], []
        for _ in range(STEPS):
            text = rng.integers(0, 256, shape).astype(np.int32)
            batch = placement.batch(Batch(text[..., :-1], text[..., 1:], None))
            began = time.perf_counter()
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            times.append(time.perf_counter() - began)
        return losses, statistics.median(times[2:])

    want, alone = run("data=1")
    rows = []
    for mesh in meshes(jax.device_count()):
        losses, seconds = run(mesh)
        difference = max(abs(a - b) for a, b in zip(losses, want, strict=True))
        if not difference < LOSS_LIMIT:
            raise AssertionError(f"--mesh {mesh}: losses {losses}, on one device {want}")
        rows.append(
            {
                "what": f"{preset} step, --mesh {mesh}",
                "devices": make_config(preset, given | {"mesh": mesh}).device_count,
                "ms": {"one": 1e3 * alone, "all": 1e3 * seconds},
                "largest difference of losses": difference,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--toy", action="store_true", help="small sizes on virtual CPU devices")
    parser.add_argument("--compile", type=int, metavar="N", help="only compile, for N GPUs")
    args = parser.parse_args(argv)
    if args.compile:
        compile_only(args.compile)
        return 0
    if args.output is None:
        parser.error("--output FILE is missing")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if args.toy:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flags = os.environ.get("XLA_FLAGS", "")
        if "device_count" not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"
    import jax

    from benchmarks.training_gpu import about, write

    if jax.device_count() < 2:
        parser.error(f"needs 2 devices or more, there is {jax.device_count()}")
    began = time.perf_counter()
    document: dict[str, Any] = {
        "what": f"{jax.device_count()} devices against one",
        "command": "NCCL_NVLS_ENABLE=0 python benchmarks/scaling.py --output "
        "benchmarks/results/NAME.json",
        "rounds": args.rounds,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "rows": [],
    }
    for part in (
        functools.partial(attention_rows, TOY_LENGTHS if args.toy else LENGTHS, args.rounds),
        functools.partial(training_rows, args.toy),
    ):
        document["rows"] += part()
        write(args.output, document | about(time.perf_counter() - began))
    return 0


if __name__ == "__main__":
    sys.exit(main())
