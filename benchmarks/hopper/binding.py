"""ctypes binding of the Hopper kernels' C interface on torch CUDA tensors (BTNH or BNTH)."""

from __future__ import annotations

import ctypes
import dataclasses

import torch

OPERANDS = [
    "q",
    "k",
    "v",
    "q_offset",
    "window_left",
    "window_right",
    "q_segment_ids",
    "kv_segment_ids",
    "q_lengths",
    "kv_lengths",
    "mask",
    "bias",
    "alibi_slopes",
    "sinks",
    "dropout_seed",
    "dropout_origin",
    "o",
    "row_max",
    "row_log_sum",
    "do",
    "dlse",
]  # fmt: skip  (twin of cpp/core/attrs.h)


@dataclasses.dataclass
class Case:
    """One attention call; sizes, options, and the optional per-batch arrays by operand name."""

    B: int
    Sq: int
    Sk: int
    Hq: int
    Hkv: int
    D: int
    Dv: int = 0
    layout: int = 0
    half: bool = False
    causal: bool = False
    left: int = -1
    right: int = -1
    scale: float = 0.0
    softcap: float = 0.0
    deterministic: bool = False
    kv_broadcast: bool = False
    arrays: dict = dataclasses.field(default_factory=dict)
    dlse: bool = False
    nan_tail: bool = False

    def __post_init__(self):
        self.Dv = self.Dv or self.D
        self.scale = self.scale or self.D**-0.5

    @property
    def dtype(self):
        return torch.float16 if self.half else torch.bfloat16

    def label(self) -> str:
        skip = {"B", "Sq", "Sk", "Hq", "Hkv", "D", "arrays", "scale"}
        text = f"B{self.B} S{self.Sq}/{self.Sk} H{self.Hq}/{self.Hkv} D{self.D}"
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if (
                f.name not in skip
                and value != f.default
                and not (f.name == "Dv" and value == self.D)
            ):
                text += f" {f.name}={value}"
        return text + "".join(f" {name}" for name in self.arrays)


class Library:
    def __init__(self, path: str):
        self.lib = ctypes.CDLL(path)
        self.lib.jft_reason.restype = ctypes.c_char_p
        self.lib.jft_error.restype = ctypes.c_char_p
        self.lib.jft_workspace.restype = ctypes.c_int64
        self.scratch = {}

    def prepare(self, case: Case, tensors: dict, outputs: list, backward: bool):
        """A function without arguments that launches the call on the current stream."""
        c = case
        sizes = [
            c.B,
            c.Sq,
            c.Sk,
            c.Hq,
            c.Hkv,
            c.D,
            c.Dv,
            c.layout,
            c.half,
            c.causal,
            c.left,
            c.right,
            c.deterministic,
            c.kv_broadcast,
            4 * (backward and "sinks" in c.arrays),
        ]
        s = (ctypes.c_int64 * len(sizes))(*[int(x) for x in sizes])
        f = (ctypes.c_double * 2)(c.scale, c.softcap)
        ins = (ctypes.c_void_p * len(OPERANDS))(
            *[tensors[n].data_ptr() if tensors.get(n) is not None else None for n in OPERANDS]
        )
        outs = (ctypes.c_void_p * 6)(*[t.data_ptr() if t is not None else None for t in outputs])
        reason = self.lib.jft_reason(int(backward), s, f, ins, outs)
        if reason:
            raise NotImplementedError(reason.decode())
        size = self.lib.jft_workspace(int(backward), s, f, ins, outs)
        scratch = torch.full(
            (max(size, 1),), 0xFF, dtype=torch.uint8, device="cuda"
        )  # NaN when read as f32
        stream = torch.cuda.current_stream().cuda_stream

        def call(keep=(tensors, outputs, scratch)):
            e = self.lib.jft_run(
                int(backward),
                s,
                f,
                ins,
                outs,
                ctypes.c_void_p(scratch.data_ptr()),
                ctypes.c_void_p(stream),
            )
            if e:
                raise RuntimeError(self.lib.jft_error(e).decode())

        return call
