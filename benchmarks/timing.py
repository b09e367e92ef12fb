"""Interleaved timing: every round runs every contender once, so that drift hits all alike."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence


@dataclasses.dataclass
class Sample:
    """Times of one contender in seconds, one entry per round."""

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)  # all threads of the process

    def summary(self) -> dict[str, float]:
        return {
            "wall_median_s": statistics.median(self.wall),
            "wall_min_s": min(self.wall),
            "cpu_median_s": statistics.median(self.cpu),
            "cpu_min_s": min(self.cpu),
        }


def interleave(
    contenders: dict[str, Callable[[], object]],
    *,
    rounds: int,
    min_seconds: float = 0.05,
    on_round: Callable[[int], None] | None = None,
) -> dict[str, Sample]:
    """Times each callable (which must block until its work is done) once per round.

    Calls shorter than ``min_seconds`` are repeated inside the round and averaged.
    """
    repeats = {}
    for name, call in contenders.items():
        call()  # compile, warm up
        start = time.perf_counter()
        call()
        elapsed = max(time.perf_counter() - start, 1e-6)
        repeats[name] = max(1, round(min_seconds / elapsed))
    samples = {name: Sample() for name in contenders}
    for index in range(rounds):
        for name, call in contenders.items():
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(repeats[name]):
                call()
            samples[name].wall.append((time.perf_counter() - wall) / repeats[name])
            samples[name].cpu.append((time.process_time() - cpu) / repeats[name])
        if on_round is not None:
            on_round(index)
    return samples


def median_ratio(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the per-round ratios a / b."""
    ratios = sorted(x / y for x, y in zip(a, b, strict=True))
    if len(ratios) < 2:
        return ratios[0], ratios[0], ratios[0]
    low, mid, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, mid, high
