"""Which blocks of keys a ring has to bring to its shards, known before anything runs.

In step t of a ring of n, shard r holds the keys of shard ``(r - t) % n``. What positions alone hide
(causal, a window, a query offset that is a number) is left out here: pairs of parts that no shard
sees in a step are never computed, and steps in which no shard sees anything are never visited.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .layout import part_start, parts_of


@dataclasses.dataclass(frozen=True)
class Pair:
    """A part of the queries against a part of the keys."""

    rows: int
    keys: int


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive steps ``first .. last`` that compute the same pairs."""

    first: int
    last: int
    pairs: tuple[Pair, ...]


@dataclasses.dataclass(frozen=True)
class Band:
    """Visible is ``low <= j - i <= high`` with global i and j; None = no bound."""

    low: int | None = None
    high: int | None = None


def plan(order: str, shards: int, rows: int, keys: int, band: Band) -> tuple[Run, ...]:
    """The steps of a ring.

    Args:
      order: of both sequences.
      shards: size n of the ring.
      rows, keys: length of one part of the queries and of the keys.
      band: what positions allow, as far as it is known.
    """
    runs: list[Run] = []
    for t in range(shards):
        pairs = _pairs(order, shards, rows, keys, band, t)
        if not pairs:
            continue
        if runs and runs[-1].last == t - 1 and runs[-1].pairs == pairs:
            runs[-1] = dataclasses.replace(runs[-1], last=t)
        else:
            runs.append(Run(t, t, pairs))
    return tuple(runs)


def _pairs(order: str, shards: int, rows: int, keys: int, band: Band, t: int) -> tuple[Pair, ...]:
    here = np.arange(shards, dtype=np.int64)
    there = (here - t) % shards
    found = []
    for x in range(parts_of(order)):
        for y in range(parts_of(order)):
            i0 = part_start(order, x, here, shards, rows)
            j0 = part_start(order, y, there, shards, keys)
            seen = np.ones(shards, bool)
            if band.low is not None:
                seen &= j0 + keys - 1 - i0 >= band.low
            if band.high is not None:
                seen &= j0 - (i0 + rows - 1) <= band.high
            if seen.any():
                found.append(Pair(x, y))
    return tuple(found)
