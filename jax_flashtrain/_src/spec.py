"""Static choices of one attention call, and the operand order of the native targets.

Twin of ``cpp/core/attrs.h``; ``tests/test_interface.py`` fails when the two differ.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable

import numpy as np

INTERFACE_VERSION = 1

#: Row residual of a row that sees no key (see ``cpp/core/attrs.h``): finite on purpose.
EMPTY_ROW = 1.0e30

#: Largest number of leading (batch) dimensions that the native kernels index.
MAX_BATCH_DIMS = 8


class Operand(enum.IntEnum):
    """Operands in their fixed order. ``b..`` are leading dimensions, each 1 or full."""

    Q = 0  # [b.., Sq, Hq, D] or [b.., Hq, Sq, D]
    K = 1  # [b.., Sk, Hkv, D]
    V = 2  # [b.., Sk, Hkv, Dv]
    Q_OFFSET = 3  # i32 [b..]
    WINDOW_LEFT = 4  # i32 [b..]
    WINDOW_RIGHT = 5  # i32 [b..]
    Q_SEGMENT_IDS = 6  # i32 [b.., Sq]
    KV_SEGMENT_IDS = 7  # i32 [b.., Sk]
    Q_LENGTHS = 8  # i32 [b..]
    KV_LENGTHS = 9  # i32 [b..]
    MASK = 10  # bool [b.., Hq|1, Sq|1, Sk|1]
    BIAS = 11  # float [b.., Hq|1, Sq|1, Sk|1]
    ALIBI_SLOPES = 12  # accumulator dtype [b.., Hq]
    SINKS = 13  # accumulator dtype [b.., Hq]
    DROPOUT_SEED = 14  # u32 [b.., 2]
    DROPOUT_ORIGIN = 15  # u32 [b.., Hq, 3]: first row, first column, b * Hq + h as written
    O = 16  # (backward only, from here on)
    ROW_MAX = 17  # accumulator dtype [b.., Hq, Sq]
    ROW_LOG_SUM = 18  # accumulator dtype [b.., Hq, Sq]
    DO = 19
    DLSE = 20  # accumulator dtype [b.., Hq, Sq], optional


class Grad(enum.IntFlag):
    """Optional gradients that the backward target emits after dq, dk, dv, in this order."""

    BIAS = 1
    ALIBI = 2
    SINKS = 4


#: Operands that have a gradient, in the order of the backward's results, with the short names that
#: ``blockwise`` and the error texts use.
DIFFERENTIABLE: dict[Operand, str] = {
    Operand.Q: "q",
    Operand.K: "k",
    Operand.V: "v",
    Operand.BIAS: "bias",
    Operand.ALIBI_SLOPES: "alibi",
    Operand.SINKS: "sinks",
}

#: Bit of the attribute ``grads`` for each optional gradient (dq, dk, dv are always computed).
OPTIONAL_GRADS: dict[Operand, Grad] = {
    Operand.BIAS: Grad.BIAS,
    Operand.ALIBI_SLOPES: Grad.ALIBI,
    Operand.SINKS: Grad.SINKS,
}

#: Operands of the backward beyond those of the forward.
RESIDUALS = (Operand.O, Operand.ROW_MAX, Operand.ROW_LOG_SUM)


class Layout(enum.IntEnum):
    BTNH = 0
    BNTH = 1


class Precision(enum.IntEnum):
    DEFAULT = 0
    HIGH = 1
    HIGHEST = 2


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Everything about a call that is known while tracing (hashable, compared by value).

    Attributes:
      scale: multiplies ``q.k`` (already resolved, never None).
      softcap: cap of the logits, or None.
      causal: hide keys after the query's position.
      window: (left, right) counts of visible keys beside the position, None = unbounded. A side
        that is given as a traced operand is None here.
      dropout_rate: probability of dropping a weight, ``0 <= rate < 1``.
      deterministic: gradients bitwise equal from run to run (None was resolved by the api).
      precision: meaning for float32 inputs.
      layout: order of the sequence and head dimensions.
    """

    scale: float
    softcap: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    dropout_rate: float = 0.0
    deterministic: bool = False
    precision: Precision = Precision.DEFAULT
    layout: Layout = Layout.BTNH

    def attributes(self, *, present: int, batch_dims: int, grads: int = 0) -> dict[str, np.generic]:
        """The FFI attributes: plain scalars of fixed width, in the fields of ``attrs.h``."""
        left, right = (-1 if side is None else side for side in self.window)
        return {
            "present": np.int64(present),
            "grads": np.int64(grads),
            "batch_dims": np.int64(batch_dims),
            "layout": np.int64(self.layout),
            "causal": np.int64(self.causal),
            "window_left": np.int64(left),
            "window_right": np.int64(right),
            "deterministic": np.int64(self.deterministic),
            "precision": np.int64(self.precision),
            "scale": np.float64(self.scale),
            "softcap": np.float64(self.softcap or 0.0),
            "dropout_rate": np.float64(self.dropout_rate),
        }


def present_mask(operands: Iterable[Operand]) -> int:
    """Bit set of the operands that are given."""
    return sum(1 << op for op in operands)
