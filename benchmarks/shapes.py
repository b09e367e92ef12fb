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
