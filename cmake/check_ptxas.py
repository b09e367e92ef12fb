"""Judges the ptxas report of a build log: spills, serialised wgmma, too much shared memory.

    python cmake/check_ptxas.py build.log [more.log ...]

nvcc prints the report with ``-Xptxas -v``; ``-Werror`` lets all of it pass, so a build that spills
looks like one that does not. Exit status 1 and one line per finding otherwise.
"""

from __future__ import annotations

import re
import sys

#: Kernels that may spill, by a pattern of their mangled name: (bytes of spill stores, reason).
ALLOWED_SPILLS: dict[str, tuple[int, str]] = {
    r"forward_kernelINS0_\d*(BF16|F16)ELi(96|128)ELb0E": (
        240,
        "O and S of 32 rows take 192 registers; what spills belongs to the edge tiles",
    ),
    r"forward_kernelINS0_\d*(BF16|F16)ELi128ELb1E": (
        64,
        "8 bytes on sm_80, 56 on sm_100, none on sm_90; not looked into",
    ),
    r"(dq|dkdv)_kernelINS0_\d*(BF16|F16)E": (
        72,
        "accumulators take 160 to 224 registers; a few words of the block's coordinates spill",
    ),
    r"_kernelINS0_\d*TF32x3E": (
        800,
        "3xTF32 splits every operand in registers; ptxas interleaves the splits of many products",
    ),
    r"dkdv_kernelINS0_\d*TF32E": (48, "a few words of the block's coordinates"),
    r"backward_kernelINS0_14BackwardTraitsI.*Li128ELb1E": (
        8,
        "softcap and ALiBi: one coordinate, outside the products",
    ),
    r"forward_kernelINS0_13ForwardTraitsI.*ForwardTile(192|256)ELb1E": (
        72,
        "softcap and ALiBi beside the accumulators of s and o; coordinates of the tile",
    ),
    r"query_gradient_kernelINS0_19QueryGradientTraitsI.*Li256E": (
        48,
        "192 accumulators and 16 fragments; facts of the rows, outside the products",
    ),
}

#: ptxas notes that mean slow or serialised wgmma (setmaxnreg ignored, calls, registers, sums).
BAD_NOTES = ("C7504", "C7508", "C7509", "C7510", "C7511", "C7512", "C7514", "C7515")

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"uses too much shared data|exceeds.*shared memory", re.IGNORECASE)


def allowed_spill(entry: str) -> int:
    """Bytes of spill stores that a kernel is allowed."""
    return max(
        (n for pattern, (n, _) in ALLOWED_SPILLS.items() if re.search(pattern, entry)), default=0
    )


def findings(lines: list[str]) -> tuple[list[str], int]:
    """(one text per fault, number of kernels seen)."""
    faults: list[str] = []
    entry, target, kernels = "?", "?", 0
    for line in lines:
        if found := _ENTRY.search(line):
            entry, target = found.groups()
            kernels += 1
        elif found := _SPILL.search(line):
            if int(found.group(1)) > allowed_spill(entry):
                faults.append(f"{target} {entry}: {found.group(0)}")
        elif any(note in line for note in BAD_NOTES) or _SHARED.search(line):
            faults.append(line.strip())
    return faults, kernels


def main(paths: list[str]) -> int:
    lines: list[str] = []
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as log:
            lines += log.readlines()
    faults, kernels = findings(lines)
    for fault in faults:
        print(fault)
    if kernels == 0:
        print("no ptxas report found: was the build made with -Xptxas -v?")
        return 1
    print(f"{kernels} kernels, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
