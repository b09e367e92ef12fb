"""The corpus of a run: training windows in a seeded random order, validation windows in order.

Batches are a pure function of (seed, step), so a resumed run sees what it would have seen.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np

from jax_flashtrain.train.errors import UserError
from jax_flashtrain.train.sources import Source

#: Target that does not count in the loss.
IGNORE = -1


class Batch(NamedTuple):
    """int32 arrays ``[..., S]``; ``segment_ids`` is None unless documents are packed."""

    tokens: np.ndarray
    targets: np.ndarray
    segment_ids: np.ndarray | None


class Corpus:
    """All sources as one sequence of tokens; its tail is the validation part."""

    def __init__(
        self, sources: list[Source], *, seq_len: int, val_fraction: float, pack_documents: bool
    ):
        self.sources = sources
        self.seq_len = seq_len
        self.pack_documents = pack_documents
        sizes = [s.tokens.size for s in sources]
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes
        self.size = int(self._ends[-1])
        self.document_starts = np.concatenate(
            [s.document_starts + base for s, base in zip(sources, self._starts, strict=True)]
        )
        self.train_size = self.size - int(self.size * val_fraction)
        self.val_size = self.size - self.train_size
        if self.train_size < seq_len + 2 or self.val_size < 2:
            raise UserError(
                f"the text is too short: {self.size} tokens give {self.train_size} for training "
                f"and {self.val_size} for validation, but --seq-len {seq_len} needs at least "
                f"{seq_len + 2} and 2"
            )
        self._epoch: tuple[int, int] | None = None
        self._order = np.zeros(0, np.int64)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop`` of the whole sequence, int32."""
        first = int(np.searchsorted(self._ends, start, side="right"))
        parts = []
        while start < stop:
            base, end = int(self._starts[first]), int(self._ends[first])
            parts.append(self.sources[first].tokens[start - base : min(stop, end) - base])
            start, first = end, first + 1
        return np.concatenate(parts).astype(np.int32)

    def fingerprint(self) -> dict[str, int]:
        """Tells another text apart: the size, and a checksum of the first and the last MiB."""
        ends = [
            self.read(0, min(self.size, 1 << 20)),
            self.read(max(0, self.size - (1 << 20)), self.size),
        ]
        return {"tokens": self.size, "checksum": zlib.crc32(np.concatenate(ends).tobytes())}

    def _window(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, targets, segment ids) of ``start`` to ``stop``, padded to seq_len."""
        length = stop - start
        text = self.read(start, stop + 1)
        tokens = np.zeros(self.seq_len, np.int32)
        targets = np.full(self.seq_len, IGNORE, np.int32)
        tokens[:length], targets[:length] = text[:-1], text[1:]
        segments = np.zeros(self.seq_len, np.int32)
        if self.pack_documents:
            ids = np.searchsorted(self.document_starts, np.arange(start, stop + 1), side="right")
            ids = (ids - ids[0]).astype(np.int32)
            segments[:length] = ids[:-1]
            segments[length:] = ids[-1] + 1
            targets[:length][ids[:-1] != ids[1:]] = IGNORE  # the next document is no continuation
        return tokens, targets, segments

    def _stack(self, spans: list[tuple[int, int]]) -> Batch:
        windows = [self._window(*span) for span in spans]
        tokens, targets, segments = (np.stack(x) for x in zip(*windows, strict=True))
        return Batch(tokens, targets, segments if self.pack_documents else None)

    def train_batch(self, seed: int, step: int, size: int) -> Batch:
        """``[size, S]``. An epoch takes every window once, in random order, from a random phase."""
        windows = (self.train_size - self.seq_len - 1) // self.seq_len + 1
        spans = []
        for i in range(step * size, (step + 1) * size):
            epoch = i // windows
            if self._epoch != (seed, epoch):
                rng = np.random.default_rng((seed, epoch))
                last = self.train_size - 1 - windows * self.seq_len
                phase = rng.integers(0, max(last, 0) + 1)
                self._order = phase + self.seq_len * rng.permutation(windows)
                self._epoch = (seed, epoch)
            start = int(self._order[i % windows])
            spans.append((start, start + self.seq_len))
        return self._stack(spans)

    def val_batches(self, size: int, limit: int) -> list[Batch]:
        """The first ``limit`` validation windows in order, ``size`` to a batch. Every validation
        token but the first is a target exactly once; the rest of the last batch is padding."""
        last = self.size - 1
        spans = [
            (start, min(start + self.seq_len, last))
            for start in range(self.train_size, last, self.seq_len)
        ][:limit]
        batches = []
        for at in range(0, len(spans), size):
            batch = self._stack(spans[at : at + size])
            missing = size - batch.tokens.shape[0]
            if missing:
                pad = ((0, missing), (0, 0))
                batch = Batch(
                    np.pad(batch.tokens, pad),
                    np.pad(batch.targets, pad, constant_values=IGNORE),
                    None if batch.segment_ids is None else np.pad(batch.segment_ids, pad),
                )
            batches.append(batch)
        return batches
