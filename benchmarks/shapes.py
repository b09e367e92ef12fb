"""The problem shapes that benchmarks time: one list, read by every backend's run."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One row of a benchmark. Lengths in tokens, D in features; arrays are [B, S, H, D]."""

    B: int
    S: int
    Hq: int
    Hkv: int
    D: int
    dtype: str
    causal: bool

    @property
    def name(self) -> str:
        heads = str(self.Hq) if self.Hq == self.Hkv else f"{self.Hq}/{self.Hkv}"
        kind = "causal" if self.causal else "full"
        return f"{self.dtype} B{self.B} S{self.S} H{heads} D{self.D} {kind}"

    def flops(self, *, backward: bool) -> float:
        """Multiply-adds counted twice; causal counts half; forward + backward = 3.5 x forward."""
        forward = 4.0 * self.B * self.Hq * self.S * self.S * self.D * (0.5 if self.causal else 1.0)
        return forward * (3.5 if backward else 1.0)


#: What a 2-core machine times in a few minutes (the rows of docs/benchmarks.md).
CPU = (
    Shape(1, 1024, 8, 8, 64, "float32", causal=False),
    Shape(1, 1024, 8, 8, 64, "float32", causal=True),
    Shape(1, 1024, 8, 8, 64, "bfloat16", causal=False),
    Shape(1, 2048, 8, 8, 64, "float32", causal=True),
    Shape(1, 2048, 8, 8, 64, "bfloat16", causal=True),
    Shape(1, 4096, 8, 8, 64, "float32", causal=False),
    Shape(1, 2048, 8, 2, 128, "float32", causal=False),
    Shape(1, 1024, 4, 4, 256, "float32", causal=False),
    Shape(8, 512, 12, 12, 64, "float32", causal=False),
    Shape(8, 512, 12, 12, 64, "bfloat16", causal=True),
    Shape(1, 512, 16, 8, 64, "float32", causal=True),
    Shape(1, 2048, 1, 1, 64, "float32", causal=False),
)


def _gpu(B, S, Hq, Hkv, D, causal, kind="plain", dtype="bfloat16"):
    return GpuShape(B, S, Hq, Hkv, D, dtype, causal, kind)


@dataclasses.dataclass(frozen=True)
class GpuShape(Shape):
    """A row with an option. kind: plain, bias, dbias, mask, window, lengths, softcap, alibi, sinks,
    segments. ``window`` shows 1024 keys before the query; ``lengths`` are S, 3/4 S, 1/4 S, 17."""

    kind: str = "plain"

    @property
    def name(self) -> str:
        return super().name + ("" if self.kind == "plain" else f" {self.kind}")

    def visible_share(self) -> float:
        """Share of the S x S pairs that is visible, beyond the causal half."""
        if self.kind == "window":
            w = min(1024, self.S)
            return (self.S * (w + 1) - w * (w + 1) / 2) / self.S**2 * (2.0 if self.causal else 1.0)
        if self.kind == "lengths":
            return sum((n / self.S) ** 2 for n in self.lengths()) / self.B
        if self.kind == "segments":
            return 1 / 4
        return 1.0

    def lengths(self) -> list[int]:
        pattern = [self.S, 3 * self.S // 4, self.S // 4, 17]
        return [pattern[b % 4] for b in range(self.B)]

    def flops(self, *, backward: bool) -> float:
        """Only visible pairs count. ``backward`` is the backward alone here (2.5 forwards)."""
        forward = super().flops(backward=False) * self.visible_share()
        return forward * (2.5 if backward else 1.0)


#: Rows timed on an H200 (targets: docs/benchmarks.md).
CUDA = (
    _gpu(8, 2048, 16, 16, 128, True),
    _gpu(8, 2048, 16, 16, 128, False),
    _gpu(2, 8192, 16, 16, 128, True),
    _gpu(2, 8192, 16, 16, 128, False),
    _gpu(1, 16384, 16, 16, 128, True),
    _gpu(2, 8192, 32, 8, 128, True),
    _gpu(8, 2048, 32, 32, 64, True),
    _gpu(2, 8192, 32, 32, 64, True),
    _gpu(2, 8192, 32, 32, 64, False),
    _gpu(2, 4096, 16, 16, 96, True),
    _gpu(2, 8192, 8, 8, 256, True),
    _gpu(2, 8192, 8, 8, 256, False),
    _gpu(2, 4096, 16, 16, 192, True),
    _gpu(2, 4096, 16, 16, 128, False, "bias"),
    _gpu(2, 4096, 16, 16, 128, False, "dbias"),
    _gpu(2, 4096, 32, 32, 64, False, "dbias"),
    _gpu(2, 4096, 16, 16, 128, False, "mask"),
    _gpu(1, 16384, 16, 16, 128, True, "window"),
    _gpu(4, 4096, 16, 16, 128, False, "lengths"),
    _gpu(2, 4096, 16, 16, 128, True, "segments"),
    _gpu(2, 4096, 16, 16, 128, True, "softcap"),
    _gpu(2, 4096, 16, 16, 128, True, "alibi"),
    _gpu(2, 4096, 16, 16, 128, True, "sinks"),
    _gpu(2, 4096, 16, 16, 64, True, "plain", "float32"),
    _gpu(1, 512, 16, 8, 64, True, "plain", "float32"),
    _gpu(32, 512, 16, 16, 64, True),
    _gpu(32, 128, 16, 16, 64, True),
)
