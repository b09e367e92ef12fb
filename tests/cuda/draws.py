"""Random recipes (drawing.py) through the CUDA kernels (GPU or emulator), against the oracle.

    python tests/cuda/draws.py --start 0 --count 40 --seconds 60

A process of its own: the emulator takes the place of the CPU module, so it must not share a process
with it. Prints one line per failure and a summary last; exit status 1 if anything failed.

The rule is that of tolerances.py, with two additions: TF32 (float32 at default precision) is held
to TF32's epsilon; sums to a few numbers (dsinks, dalibi_slopes, a small dbias) are held to one
rounding of the inputs' dtype per term, since how one such number happens to round says nothing
about another kernel's.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import pathlib
import sys
import time

import numpy as np

sys.path[:0] = [str(pathlib.Path(__file__).parent.parent)]

import jax  # noqa: E402
from checking import Call, is_sum_to_few, references, result_dtype, run  # noqa: E402
from drawing import Recipe, build, draw_recipe  # noqa: E402
from tolerances import Mismatch, epsilon  # noqa: E402

from jax_flashtrain._src import backends  # noqa: E402

TF32_EPSILON = 2.0**-10
NOT_ON_HOPPER = {"dropout"}


def count_kernels() -> collections.Counter[str]:
    """Counts the kernels that the calls from here on choose (the emulator's as on its GPU)."""
    kernels: collections.Counter[str] = collections.Counter()
    choose, capability = backends.choose, os.environ.get("JFT_EMULATED_CAPABILITY")
    if capability:
        backends.compute_capability = lambda platform: int(capability)

    def counted(platform, query, *rest):
        choice = choose(platform, query, *rest)
        kernels[f"{choice.kernel} {'backward' if query.targets else 'forward'}"] += 1
        return choice

    backends.choose = counted
    return kernels


def judge(call: Call, got: dict[str, np.ndarray]) -> str:
    """What is wrong with the results, '' if nothing."""
    with np.errstate(all="ignore"):
        wanted, attention = references(call)
    single = call.dtype == np.float32
    tf32 = single and call.static.get("precision") not in ("high", "highest")
    for name, reference in wanted.items():
        dtype = result_dtype(call, name)
        try:
            if tf32 or is_sum_to_few(name, reference):
                unit = max(TF32_EPSILON if tf32 else epsilon(call.dtype), epsilon(dtype))
                reference.check_terms(name, got[name], unit, sensitivity=attention.sensitivity)
                continue
            reference.check(
                name,
                got[name],
                dtype,
                sensitivity=attention.sensitivity,
                softcap=call.static.get("softcap") is not None,
            )
        except Mismatch as mismatch:
            return str(mismatch)
    return ""


def for_hopper(recipe: Recipe) -> Recipe:
    """The recipe within what the Hopper kernels take: 16-bit types, head sizes divisible by 8."""
    rng = np.random.default_rng((recipe.seed, 4))
    D = int(rng.choice([8, 40, 64, 96, 128, 192, 200, 256]))
    Dv = int(rng.choice([32, 64, 128, 256])) if "unequal_head_sizes" in recipe.on else D
    on = recipe.on - {"scale", *(set() if rng.random() < 0.2 else NOT_ON_HOPPER)}
    return dataclasses.replace(recipe, D=D, Dv=Dv, on=on | {"small_dtype"})


def outcome(seed: int, largest: int | None, most_features: int, corrupt: bool, hopper: bool) -> str:
    """'skip', '' or what is wrong."""
    recipe = draw_recipe(seed, largest=largest)
    if hopper:
        recipe = for_hopper(recipe)
    call = build(recipe)
    if (
        call.dtype == np.float64
        or max(call.arrays["q"].shape[-1], call.arrays["v"].shape[-1]) > most_features
    ):
        return "skip"
    if call.dtype == np.float32 and seed % 3:
        call.static["precision"] = "highest"
    try:
        got = run(call, "native")
        if corrupt:
            got["dk"] = got["dk"] * np.asarray(1.25, got["dk"].dtype)
        return judge(call, got)
    except Exception as error:  # reported with its seed, never swallowed
        return f"{type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--largest", type=int, default=None, help="longest sequence drawn")
    parser.add_argument("--most-features", type=int, default=256)
    parser.add_argument("--hopper", action="store_true", help="calls for the Hopper kernels")
    parser.add_argument("--verbose", action="store_true", help="name every draw before it runs")
    parser.add_argument("--corrupt", action="store_true", help="scale dk: every draw must fail")
    args = parser.parse_args()
    began, done, failed = time.monotonic(), 0, 0
    kernels = count_kernels()
    for seed in range(args.start, args.start + args.count):
        if time.monotonic() - began > args.seconds:
            break
        if args.verbose:
            print(f"seed {seed}", end=" ", flush=True)
        wrong = outcome(seed, args.largest, args.most_features, args.corrupt, args.hopper)
        if wrong == "skip":
            continue
        done += 1
        if wrong:
            failed += 1
            print(f"FAIL seed {seed}: {wrong[:600]}", flush=True)
    print(dict(kernels))
    print(f"{jax.devices()[0]}: {done} draws from {args.start}, {failed} failed", flush=True)
    return 1 if failed or not done else 0


if __name__ == "__main__":
    sys.exit(main())
