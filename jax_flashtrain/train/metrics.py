"""Metrics as JSON lines, and the loss curve drawn from them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class MetricsLog:
    """Appends one JSON object per line: ``{"event": "train" | "eval" | ..., "step": n, ...}``."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("a")

    def write(self, event: str, step: int, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, "step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_curve(path: Path, event: str, key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one event; of a step that was run twice the later line counts."""
    points: dict[int, float] = {}
    with path.open() as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # the last line of a run that was killed
                continue
            if row.get("event") == event and key in row:
                points[row["step"]] = row[key]
    steps = sorted(points)
    return steps, [points[s] for s in steps]


def plot_losses(metrics: Path, picture: Path, *, bigram: float | None) -> None:
    """The loss curve in nats per token, with bits on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps, losses = read_curve(metrics, "train", "loss")
    axes.plot(steps, losses, lw=0.8, color="tab:blue", alpha=0.6, label="training")
    steps, losses = read_curve(metrics, "eval", "val_loss")
    axes.plot(steps, losses, "o-", ms=4, color="tab:orange", label="validation")
    if bigram is not None:
        axes.axhline(bigram, ls="--", color="tab:gray", label="bigram model, add 0.1")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    right = axes.secondary_yaxis(
        "right", functions=(lambda x: x / math.log(2), lambda x: x * math.log(2))
    )
    right.set_ylabel("bits per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)
