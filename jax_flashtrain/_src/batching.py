"""vmap: every map adds one leading batch dimension, of size 1 to the operands it does not map.

The kernels read a dimension of size 1 with stride 0, so nothing is ever broadcast in memory and a
nest of maps is still one call. Gradients of a mapped backward are full in the mapped dimension
(each element has its own), also those of unmapped operands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from . import compat
from .primitive import Target, backward_p, forward_p, tangent_p
from .problem import trailing_dims
from .spec import Operand


def _place(
    values: Sequence[Any], dims: Sequence[int | None], kinds: Sequence[Operand]
) -> tuple[list[Any], int]:
    """Gives every operand the mapped dimension at one common position among its batch dims.

    The position is the one that moves the fewest operands: vmap over axis 1 of [B, N, ...] inserts
    the map there and no transpose is needed.
    """
    batch_dims = max(
        x.ndim - trailing_dims(op) - (d is not None)
        for x, d, op in zip(values, dims, kinds, strict=True)
    )
    wanted = Counter(d for d in dims if d is not None and d <= batch_dims)
    position = wanted.most_common(1)[0][0] if wanted else 0
    placed = [
        jnp.expand_dims(x, position) if d is None else jnp.moveaxis(x, d, position)
        for x, d in zip(values, dims, strict=True)
    ]
    return placed, position


def _batch_forward(args: Sequence[Any], dims: Sequence[int | None], **params: Any) -> Any:
    placed, position = _place(args, dims, params["present"])
    outs = forward_p.bind(*placed, **params)
    return outs, [position] * len(outs)


def _batch_tangent(args: Sequence[Any], dims: Sequence[int | None], **params: Any) -> Any:
    placed, position = _place(args, dims, (*params["present"], *params["along"]))
    outs = tangent_p.bind(*placed, **params)
    return outs, [position] * len(outs)


def _batch_backward(
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    targets: tuple[Target, ...],
    **params: Any,
) -> Any:
    placed, position = _place(args, dims, params["present"])
    full = tuple(Target(t.operand, (*t.full[:position], True, *t.full[position:])) for t in targets)
    outs = backward_p.bind(*placed, targets=full, **params)
    return outs, [position] * len(outs)


compat.batching.primitive_batchers[forward_p] = _batch_forward
compat.batching.primitive_batchers[tangent_p] = _batch_tangent
compat.batching.primitive_batchers[backward_p] = _batch_backward
