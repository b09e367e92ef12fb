"""Breaks the C++ sources, one mutant at a time, and checks that the test-suite notices each.

    python tests/mutation/run.py --build FOLDER        all mutants
    python tests/mutation/run.py --build FOLDER --only softcap dropout

Further options (-G Ninja, -D...) go to CMake.
Copies the sources to FOLDER, puts every mutant of mutants.py behind a switch, builds the CPU module
once (CMake, as pip does it) and runs the focused tests once per mutant with the switch set. First
the tests must pass with no mutant on. Prints one line per mutant and exits with 1 if one survived.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import time

from mutants import MUTANTS

ROOT = pathlib.Path(__file__).resolve().parents[2]
SWITCH = "JFT_MUTANT"
#: Killing tests first; -x stops at the first failure.
TESTS = (
    "tests/test_properties.py::test_native",
    "tests/test_numerics.py",
    "tests/test_user_reports.py",
)
SELECT = "not jax and not blockwise and not thread and not memory and not a34 and not a28"
SECONDS = 400  # a mutant that makes the kernels wait for each other counts as killed

_DEFINITION = f"""
#include <cstdlib>
namespace jft {{
inline const int kMutant = std::getenv("{SWITCH}") ? std::atoi(std::getenv("{SWITCH}")) : 0;
}}
namespace jft {{"""


def mutate(target: pathlib.Path) -> None:
    """A copy of the sources with every mutant behind the switch."""
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
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DCMAKE_CXX_FLAGS=-Wno-error", *options,
    ]  # fmt: skip
    for command in (
        configure,
        ["cmake", "--build", target / "build", "-j2"],
        ["cmake", "--install", target / "build", "--prefix", stage],
    ):
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return stage


def survives(stage: pathlib.Path, number: int) -> tuple[bool, str]:
    """Whether all focused tests pass with a mutant on, and the first line that says why not."""
    env = os.environ | {
        SWITCH: str(number),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{stage}",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider",
               "-k", SELECT, *TESTS]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False, "timeout"
    if done.returncode == 0:
        return True, ""
    if done.returncode != 1 and done.returncode > 0:
        raise SystemExit(f"pytest could not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return False, failed[0][7:] if failed else f"crash ({done.returncode})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=pathlib.Path, required=True, help="folder for the copy")
    parser.add_argument("--only", nargs="*", default=[], help="words in the names of mutants")
    arguments, cmake_options = parser.parse_known_args()
    arguments.build.mkdir(parents=True, exist_ok=True)
    mutate(arguments.build)
    stage = build(arguments.build, cmake_options)

    chosen = [
        (n, m) for n, m in enumerate(MUTANTS, start=1)
        if not arguments.only or any(word in m.name for word in arguments.only)
    ]  # fmt: skip
    passes, why = survives(stage, 0)
    if not passes:
        raise SystemExit(f"the tests fail without a mutant: {why}")
    alive = []
    for number, mutant in chosen:
        start = time.monotonic()
        survived, why = survives(stage, number)
        seconds = time.monotonic() - start
        verdict = "SURVIVED" if survived else "killed"
        print(f"{number:3d} {verdict:8s} {seconds:5.0f} s  {mutant.name}  {why}", flush=True)
        if survived:
            alive.append(mutant.name)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutants killed")
    if alive:
        raise SystemExit(f"survivors: {alive}")


if __name__ == "__main__":
    main()
