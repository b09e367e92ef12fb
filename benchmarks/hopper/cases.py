"""Problems of the standalone driver: ugly shapes for correctness, targets for timing."""

from __future__ import annotations

import torch
from binding import Case


def ints(*x):
    return torch.tensor(x, dtype=torch.int32)


def correctness(D: int) -> list[Case]:
    s = []
    for half in (False, True):
        s.append(Case(2, 256, 256, 2, 2, D, half=half))
        s.append(Case(2, 300, 300, 4, 2, D, half=half, causal=True))
    s += [
        Case(1, 1, 1, 1, 1, D),
        Case(1, 7, 129, 3, 1, D, causal=True),
        Case(2, 127, 128, 2, 1, D, causal=True, layout=1),
        Case(1, 129, 77, 2, 2, D, causal=True),
        Case(1, 1000, 513, 2, 2, D, causal=True),
        Case(1, 513, 1000, 2, 1, D),
        Case(1, 1024, 1024, 2, 2, D, causal=True, left=100),
        Case(1, 700, 700, 2, 2, D, left=128, right=60),
        Case(1, 700, 700, 2, 2, D, left=300, right=0, layout=1),
        Case(
            3,
            400,
            400,
            4,
            4,
            D,
            arrays={"kv_lengths": ints(400, 131, 0)},
            nan_tail=True,
        ),
        Case(
            3,
            400,
            400,
            4,
            1,
            D,
            causal=True,
            arrays={
                "q_lengths": ints(400, 131, 0),
                "kv_lengths": ints(17, 400, 300),
            },
            nan_tail=True,
        ),
        Case(
            2,
            64,
            640,
            8,
            2,
            D,
            causal=True,
            arrays={"q_offset": ints(100, 576)},
            nan_tail=True,
        ),
        Case(2, 300, 300, 2, 2, D, causal=True, arrays={"window_left": ints(10, 200)}),
        Case(2, 256, 384, 4, 2, D, causal=True, kv_broadcast=True),
        Case(1, 200, 200, 2, 2, D, scale=40.0),
        Case(1, 300, 300, 2, 2, D, causal=True, softcap=5.0),
        Case(2, 300, 300, 2, 2, D, causal=True, arrays={"sinks": torch.tensor([0.5, 3.0])}),
        Case(1, 300, 200, 2, 2, D, causal=True, arrays={"sinks": torch.tensor([0.5, 3.0])}),
        Case(64, 200, 200, 16, 16, D, causal=True),
        Case(2, 2048, 2048, 4, 4, D, causal=True),
        Case(2, 500, 500, 4, 2, D, causal=True, dlse=True),
        Case(
            1,
            300,
            200,
            2,
            2,
            D,
            causal=True,
            dlse=True,
            nan_tail=True,
        ),
        Case(2, 300, 300, 4, 2, D, causal=True, softcap=2.0, scale=1.0),
        slopes(Case(2, 300, 300, 4, 2, D, causal=True, softcap=20.0)),
        slopes(Case(2, 400, 300, 4, 2, D)),
        Case(2, 1000, 700, 4, 2, D, deterministic=True),
        Case(2, 700, 1000, 4, 4, D, deterministic=True, causal=True),
        Case(2, 700, 1000, 4, 2, D, deterministic=True, left=100, right=50),
        Case(
            3,
            400,
            400,
            4,
            1,
            D,
            causal=True,
            deterministic=True,
            arrays={
                "q_lengths": ints(400, 131, 0),
                "kv_lengths": ints(17, 400, 300),
            },
            nan_tail=True,
        ),
        Case(1, 1601, 1700, 2, 1, D, causal=True),
        Case(
            2,
            1601,
            1601,
            2,
            2,
            D,
            left=300,
            right=20,
            arrays={
                "q_lengths": ints(1601, 700),
                "kv_lengths": ints(1000, 1601),
            },
            nan_tail=True,
        ),
    ]
    if D >= 64:
        s += [Case(1, 300, 300, 2, 2, D - 24, causal=True), Case(1, 300, 300, 2, 2, D, Dv=D - 8)]
    return s


def slopes(case: Case) -> Case:
    case.arrays["alibi_slopes"] = torch.rand(case.B, case.Hq) * 0.1
    return case


def timing(kind: str) -> list[Case]:
    if kind == "plain":
        return [
            Case(8, 2048, 2048, 16, 16, 128, causal=True),
            Case(8, 2048, 2048, 16, 16, 128),
            Case(2, 8192, 8192, 16, 16, 128, causal=True),
            Case(2, 8192, 8192, 16, 16, 128),
            Case(2, 8192, 8192, 32, 8, 128, causal=True),
            Case(8, 2048, 2048, 32, 32, 64, causal=True),
            Case(2, 8192, 8192, 32, 32, 64, causal=True),
            Case(2, 8192, 8192, 32, 32, 64),
            Case(2, 4096, 4096, 16, 16, 96, causal=True),
            Case(8, 2048, 2048, 8, 8, 256, causal=True),
            Case(2, 8192, 8192, 8, 8, 256, causal=True),
            Case(2, 8192, 8192, 8, 8, 256),
        ]
    if kind == "deterministic":
        return [
            Case(8, 2048, 2048, 16, 16, 128, causal=True, deterministic=True),
            Case(2, 8192, 8192, 16, 16, 128, causal=True, deterministic=True),
            Case(2, 8192, 8192, 16, 16, 128, deterministic=True),
            Case(2, 8192, 8192, 32, 32, 64, causal=True, deterministic=True),
        ]
    return [
        Case(1, 16384, 16384, 16, 16, 128, causal=True, left=1024),
        Case(
            4,
            4096,
            4096,
            16,
            16,
            128,
            arrays={
                "kv_lengths": ints(4096, 3000, 1024, 17),
                "q_lengths": ints(4096, 3000, 1024, 17),
            },
        ),
        Case(2, 8192, 8192, 16, 16, 128, causal=True, softcap=30.0),
        slopes(Case(2, 8192, 8192, 16, 16, 128, causal=True)),
        Case(2, 8192, 8192, 16, 16, 128, causal=True, arrays={"sinks": torch.zeros(16)}),
        Case(32, 512, 512, 16, 16, 64, causal=True),
        Case(32, 1000, 1000, 16, 16, 64, causal=True),
    ]
