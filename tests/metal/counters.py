"""Counts the work of every Metal kernel in the emulator and writes it as JSON.

``python tests/metal/counters.py OUTPUT.json``. Counts, not times: an emulator knows no speed.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
from checking import make_call, run

from metal.emulated import module

SHAPES = [(D, "bfloat16") for D in (64, 80, 96, 128, 256)]
SHAPES += [(D, "float32") for D in (64, 128, 256)]
S = 128


def main() -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    out = {"what": "counts of the emulator, not times", "commit": commit, "B": 1, "S": S, "Hq": 2,
           "Hkv": 1, "rows": []}  # fmt: skip
    device = module().emulator
    for D, dtype in SHAPES:
        bias = np.zeros((1, 1, S, S), np.float32)
        for causal in (False, True):
            device.take_records()
            run(
                make_call(1, Sq=S, Hq=2, Hkv=1, D=D, dtype=dtype, causal=causal, bias=bias), "metal"
            )
            tiles = module().tiles(D, D, 4 if dtype == "float32" else 2)
            for record in device.take_records():
                row = {"D": D, "dtype": dtype, "causal": causal} | record
                out["rows"].append(row | {"tiles": tiles})
    rows = out.pop("rows")
    head = json.dumps(out)[:-1]
    lines = ",\n".join(json.dumps(row) for row in rows)
    pathlib.Path(sys.argv[1]).write_text(f'{head}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
