"""Progress of a run: a tqdm bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from jax_flashtrain.train import processes


class Progress:
    """Shows step, loss, tokens per second and the time left.

    ``every`` is the shortest time in seconds between two lines where stderr is no terminal.
    """

    def __init__(self, first: int, total: int, *, tokens_per_step: int, every: float = 10.0):
        self._first, self._total, self._tokens = first, total, tokens_per_step
        self._every = every
        self._bar: Any = None
        self._step = first
        # The clock starts with the first finished steps: compilation is no speed.
        self._started: tuple[float, int] | None = None
        self._printed = 0.0
        self._paused = 0.0
        if sys.stderr.isatty() and processes.is_first():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total, initial=first, unit="step", dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
            )  # fmt: skip

    def pause(self, seconds: float) -> None:
        """Time spent on something else (evaluation, checkpoints) is left out of the speed."""
        self._paused += seconds

    @property
    def tokens_per_second(self) -> float | None:
        if self._started is None:
            return None
        since, step = self._started
        elapsed = time.perf_counter() - since - self._paused
        done = self._step - step
        return done * self._tokens / elapsed if done and elapsed > 0 else None

    def update(self, step: int, loss: float) -> None:
        """``step`` steps are done and the last one had this loss."""
        now = time.perf_counter()
        advance, self._step = step - self._step, step
        if self._started is None:
            self._started, self._paused = (now, step), 0.0
        speed = self.tokens_per_second
        parts = [f"loss {loss:.4f}"]
        if speed:
            left = (self._total - step) * self._tokens / speed
            parts += [f"{speed:,.0f} tokens/s", f"{_clock(left)} left"]
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(parts), refresh=False)
            self._bar.update(advance)
        elif now - self._printed >= self._every or step == self._total:
            self._printed = now
            self.say(f"step {step}/{self._total}: {', '.join(parts)}")

    def say(self, text: str) -> None:
        """A line of text that does not tear the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        elif processes.is_first():
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
