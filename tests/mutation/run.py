"""Breaks the C++ sources, one mutant at a time, and checks that the test-suite notices each.

    python tests/mutation/run.py --build FOLDER        all mutants
    python tests/mutation/run.py --build FOLDER --only softcap dropout

Further options (-G Ninja, -D...) go to CMake.

Copies the sources to FOLDER, puts every mutant of mutants.py behind one variable and builds the CPU
module once (CMake, as pip does it). A worker process then compiles the first calls of
tests/test_properties.py once, and runs and compares them again for every mutant; a mutant that
crashes or hangs it is killed too. What these calls do not notice goes to the rest of the suite, in
a pytest of its own. Prints one line per mutant and exits with 1 if one survived.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

from mutants import MUTANTS

ROOT = pathlib.Path(__file__).resolve().parents[2]
VARIABLE = "jft_mutant"
CALLS = 120  # the first draws of test_properties.test_native
SUITE = ("tests/test_numerics.py", "tests/test_user_reports.py", "tests/test_properties.py")
SELECT = "not jax and not blockwise and not thread and not memory and not a34 and not a28"
HANG = 300  # seconds without an answer

_DEFINITION = f"""
#include <cstdlib>
extern "C" {{
__attribute__((visibility("default"), used)) inline int {VARIABLE} =
    std::getenv("{VARIABLE}") ? std::atoi(std::getenv("{VARIABLE}")) : 0;
}}

namespace jft {{"""


def mutate(target: pathlib.Path) -> None:
    """A copy of the sources with every mutant behind the variable."""
    for name in ("cpp", "cmake", "CMakeLists.txt"):
        source, copy = ROOT / name, target / name
        if source.is_dir():
            shutil.copytree(source, copy, dirs_exist_ok=True)
        else:
            shutil.copy(source, copy)
    texts: dict[str, str] = {}
    for number, mutant in enumerate(MUTANTS, start=1):
        text = texts.get(mutant.file) or (target / "cpp" / mutant.file).read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.name}: its text occurs {text.count(mutant.old)} times")
        texts[mutant.file] = text.replace(mutant.old, mutant.text(number))
    texts["core/semantics.h"] = texts["core/semantics.h"].replace(
        "\nnamespace jft {", _DEFINITION, 1
    )
    for file, text in texts.items():
        (target / "cpp" / file).write_text(text)


def build(target: pathlib.Path, options: list[str]) -> pathlib.Path:
    """Compiles the CPU module; returns the folder to put on PYTHONPATH."""
    stage = target / "stage"
    configure = [
        "cmake", "-S", target, "-B", target / "build", "-DJFT_CUDA=OFF",
        f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_CXX_FLAGS=-Wno-error", *options,
    ]  # fmt: skip
    for command in (
        configure,
        ["cmake", "--build", target / "build", "-j2"],
        ["cmake", "--install", target / "build", "--prefix", stage],
    ):
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return stage


def environment(stage: pathlib.Path, number: int = 0) -> dict[str, str]:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", stage)))
    return os.environ | {VARIABLE: str(number), "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}


# ---- the worker: all mutants in one process ------------------------------------------------------


def work(numbers: list[int]) -> None:
    """Prints 'number seconds verdict' for each mutant; the first line is for no mutant at all."""
    import jax
    import jax_flashtrain_native.cpu as native
    import numpy as np
    from checking import references, value_and_grads, verify
    from drawing import build as build_call
    from drawing import draw_recipe
    from tolerances import Mismatch

    switch = ctypes.c_int.in_dll(ctypes.CDLL(native.__file__), VARIABLE)
    prepared = []
    for seed in range(CALLS):
        call = build_call(draw_recipe(seed))
        g, args = value_and_grads(call, "native")
        prepared.append((call, jax.jit(g).lower(*args).compile(), args, references(call)))

    def verdict() -> str:
        for n, (call, compiled, args, known) in enumerate(prepared):
            got = {name: np.asarray(x) for name, x in compiled(*args).items()}
            try:
                verify(call, got, known)
            except Mismatch as mismatch:
                return f"killed by draw {n}: {str(mismatch).split(' of ', 1)[0]}"
        return "unnoticed"

    for number in [0, *numbers]:
        switch.value = number
        start = time.monotonic()
        text = verdict()
        print(number, f"{time.monotonic() - start:.1f}", text, flush=True)


def verdicts(stage: pathlib.Path, numbers: list[int]):
    """(number, verdict) of every mutant, restarting the worker where a mutant took it down."""
    while True:
        command = [sys.executable, __file__, "--worker", *map(str, numbers)]
        worker = subprocess.Popen(
            command, env=environment(stage), stdout=subprocess.PIPE, text=True
        )
        left = list(numbers)
        last = [time.monotonic()]
        done = threading.Event()

        def watch(worker=worker, last=last, done=done):
            while not done.wait(5):
                if time.monotonic() - last[0] > HANG:
                    worker.kill()
                    return

        threading.Thread(target=watch, daemon=True).start()
        healthy = False
        for line in worker.stdout:
            last[0] = time.monotonic()
            number, _, text = line.strip().split(" ", 2)
            if number == "0":
                healthy = text == "unnoticed"
                if not healthy:
                    raise SystemExit(f"the calls fail without a mutant: {text}")
                continue
            left.remove(int(number))
            yield int(number), text
        done.set()
        code = worker.wait()
        if not left:
            return
        if not healthy:
            raise SystemExit(f"the worker ended with {code} before its first mutant")
        yield left[0], f"killed: crash or hang ({code})"
        numbers = left[1:]
        if not numbers:
            return


def suite_notices(stage: pathlib.Path, number: int) -> str:
    """The first test of the rest of the suite that fails with a mutant on, '' if none."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider",
               "-k", SELECT, *SUITE]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(stage, number),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode > 1:
        raise SystemExit(f"pytest could not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = [line[7:] for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return failed[0] if failed else "a crash" if done.returncode else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=pathlib.Path, help="folder for the copy")
    parser.add_argument("--only", nargs="*", default=[], help="words in the names of mutants")
    parser.add_argument("--worker", nargs="+", type=int, help=argparse.SUPPRESS)
    arguments, cmake_options = parser.parse_known_args()
    if arguments.worker:
        return work(arguments.worker)
    if arguments.build is None:
        parser.error("--build FOLDER is required")
    arguments.build.mkdir(parents=True, exist_ok=True)
    mutate(arguments.build)
    stage = build(arguments.build, cmake_options)

    chosen = [
        n for n, m in enumerate(MUTANTS, start=1)
        if not arguments.only or any(word in m.name for word in arguments.only)
    ]  # fmt: skip
    alive, suite_is_sound = [], False
    for number, text in verdicts(stage, chosen):
        name = MUTANTS[number - 1].name
        if text == "unnoticed":
            if not suite_is_sound:
                if test := suite_notices(stage, 0):
                    raise SystemExit(f"the suite fails without a mutant: {test}")
                suite_is_sound = True
            test = suite_notices(stage, number)
            text = f"killed by {test}" if test else "SURVIVED"
            if not test:
                alive.append(name)
        print(f"{number:3d}  {name}: {text}", flush=True)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutants killed")
    if alive:
        raise SystemExit(f"survivors: {alive}")


if __name__ == "__main__":
    main()
