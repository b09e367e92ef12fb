"""Sizes of one call, computed once from the operands' shapes (twin of ``cpp/core/problem.h``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .spec import DIFFERENTIABLE, Layout, Operand

#: Dimensions of each operand behind the batch dimensions.
_TRAILING: dict[Operand, int] = {
    Operand.Q: 3,
    Operand.K: 3,
    Operand.V: 3,
    Operand.Q_OFFSET: 0,
    Operand.WINDOW_LEFT: 0,
    Operand.WINDOW_RIGHT: 0,
    Operand.Q_SEGMENT_IDS: 1,
    Operand.KV_SEGMENT_IDS: 1,
    Operand.Q_LENGTHS: 0,
    Operand.KV_LENGTHS: 0,
    Operand.MASK: 3,
    Operand.BIAS: 3,
    Operand.ALIBI_SLOPES: 1,
    Operand.SINKS: 1,
    Operand.DROPOUT_SEED: 1,
    Operand.DROPOUT_ORIGIN: 2,
    Operand.O: 3,
    Operand.ROW_MAX: 2,
    Operand.ROW_LOG_SUM: 2,
    Operand.DO: 3,
    Operand.DLSE: 2,
}


def trailing_dims(op: Operand) -> int:
    """Number of dimensions of an operand behind its batch dimensions."""
    return _TRAILING[op]


def accumulator_dtype(dtype: Any) -> np.dtype[Any]:
    """float64 for float64 inputs, else float32: logits, residuals and sums."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def broadcast_size(sizes: Sequence[Any]) -> Any:
    """The size that is not 1 (symbolic sizes count as not 1), or 1."""
    for size in sizes:
        if size != 1:
            return size
    return 1


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of a call. ``batch`` holds the full leading dimensions; sizes may be symbolic."""

    batch: tuple[Any, ...]
    Sq: Any
    Sk: Any
    Hq: int
    Hkv: int
    D: int
    Dv: int
    dtype: np.dtype[Any]
    layout: Layout

    @property
    def accumulator(self) -> np.dtype[Any]:
        return accumulator_dtype(self.dtype)

    @property
    def out_shape(self) -> tuple[Any, ...]:
        """Shape of o."""
        if self.layout == Layout.BTNH:
            return (*self.batch, self.Sq, self.Hq, self.Dv)
        return (*self.batch, self.Hq, self.Sq, self.Dv)

    @property
    def row_shape(self) -> tuple[Any, ...]:
        """Shape of row_max, row_log_sum and L."""
        return (*self.batch, self.Hq, self.Sq)


def make_problem(layout: Layout, operands: Mapping[Operand, Any]) -> Problem:
    """Reads the sizes off anything with ``shape`` and ``dtype``.

    Operands carry the same number of leading batch dimensions, each of size 1 or full.
    """
    q, k, v = operands[Operand.Q], operands[Operand.K], operands[Operand.V]
    batch_dims = len(q.shape) - 3
    batch = tuple(
        broadcast_size([x.shape[d] for x in operands.values()]) for d in range(batch_dims)
    )
    seq, head = (-3, -2) if layout == Layout.BTNH else (-2, -3)
    return Problem(
        batch=batch,
        Sq=q.shape[seq],
        Sk=k.shape[seq],
        Hq=q.shape[head],
        Hkv=k.shape[head],
        D=q.shape[-1],
        Dv=v.shape[-1],
        dtype=np.dtype(q.dtype),
        layout=layout,
    )


def gradient_shape(
    op: Operand, problem: Problem, operands: Mapping[Operand, Any], full: Sequence[bool]
) -> tuple[Any, ...]:
    """Shape of the gradient of an operand whose batch dimensions are full where ``full`` says."""
    if op not in DIFFERENTIABLE:
        raise ValueError(f"operand {op.name} has no gradient")
    shape = operands[op].shape
    batch = tuple(n if f else 1 for n, f in zip(problem.batch, full, strict=True))
    return (*batch, *shape[len(problem.batch) :])
