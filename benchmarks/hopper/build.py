"""Builds the Hopper kernels with their C interface into one shared object.

Fails on register spills (kernels with softcap or alibi may keep up to 128 bytes on the stack) and
on ptxas lines that mean serialised wgmma (ptxas calls them "info", so
-Werror lets them pass).     python build.py OUT.so [nvcc flags, e.g. -DJFT_HOPPER_WATCHDOG]
"""

from __future__ import annotations

import concurrent.futures
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "cpp" / "cuda" / "hopper"
FLAGS = ["-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-O3", "-lineinfo", "-Xptxas", "-v"]
FLAGS += ["-Xcompiler", "-fPIC,-Wall,-Wextra"]
BAD = re.compile(r"C75(04|08|09|10|11|12|14|15)|: error|warning")
SPILL = re.compile(r"(\d+) bytes spill stores")


def complaints(log: str) -> list[str]:
    """One string per kernel that spills too much, and every bad line."""
    found = [line for line in log.splitlines() if BAD.search(line)]
    for kernel in log.split("Compiling entry function")[1:]:
        name = kernel.split("'")[1]
        allowed = 128 if "Lb1E" in name else 0  # the trait's last argument: kExtras
        spilled = sum(int(n) for n in SPILL.findall(kernel))
        if spilled > allowed:
            found.append(f"{spilled} bytes of spill stores in {name}")
    return found


def compile_one(source: pathlib.Path, folder: pathlib.Path, extra: list[str], newest: float) -> str:
    target = folder / (source.name + ".o")
    log = folder / (source.name + ".log")
    if not target.exists() or target.stat().st_mtime < newest:
        command = ["nvcc", *FLAGS, *extra, "-c", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        log.write_text(done.stdout + done.stderr)
        if done.returncode:
            target.unlink(missing_ok=True)
            raise SystemExit(log.read_text())
    return log.read_text()


def main(out: str, *extra: str) -> None:
    folder = pathlib.Path(out + ".objects")
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(
        [*HERE.glob("*.cu"), *HERE.glob("*.cc"), *KERNELS.glob("*.cu"), *KERNELS.glob("*.cc")]
    )
    everything = [
        *HERE.glob("*.c[uc]"),
        *KERNELS.rglob("*.*"),
        *KERNELS.parents[1].joinpath("core").glob("*.h"),
    ]
    newest = max(p.stat().st_mtime for p in everything)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        logs = list(pool.map(lambda s: compile_one(s, folder, list(extra), newest), sources))
    bad = [line for log in logs for line in complaints(log)]
    if (
        bad and "-DJFT_HOPPER_WATCHDOG" not in extra
    ):  # the watchdog costs registers; only speed suffers
        raise SystemExit("\n".join(bad))
    objects = [str(folder / (s.name + ".o")) for s in sources]
    subprocess.run(["nvcc", "-shared", "-cudart", "static", "-o", out, *objects], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
