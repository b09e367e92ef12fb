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
    # The Hopper kernels. Share = spilled loads and stores among the instructions between the first
    # and the last matrix product, counted in the SASS of the bfloat16 kernels.
    r"forward_kernelINS0_13ForwardTraitsI.*RoadE[12]E": (
        216,
        "general and bias roads: facts of the tile beside the accumulators of s, o and p; "
        "share at most 0.7 %",
    ),
    r"backward_kernelINS0_14BackwardTraitsI.*RoadE1E": (
        28,
        "general road: coordinates beside 192 accumulators; share at most 0.2 %",
    ),
    r"backward_kernelINS0_14BackwardTraitsI.*RoadE2E": (
        188,
        "bias road: words of the bias beside 192 accumulators; share at most 0.8 %",
    ),
    r"query_gradient_kernelINS0_19QueryGradientTraitsI.*": (
        128,
        "head 256: 192 accumulators and 16 fragments; share at most 0.8 %",
    ),
    r"key_gradient_kernelINS0_17KeyGradientTraitsI.*Li256ELNS0_4RoadE2E": (
        64,
        "bias road: words of the bias beside 192 accumulators; share 0.3 %",
    ),
    r"bias_gradient_kernelINS0_18BiasGradientTraitsI": (
        48,
        "192 accumulators; coordinates of the block, none between the products",
    ),
    r"backward_prepareI.*Li64ELi128ELb1E": (8, "one word"),
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
