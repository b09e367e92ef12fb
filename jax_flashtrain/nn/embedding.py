"""Token embedding."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def embedding(table: jax.Array, ids: jax.Array, *, dtype: jnp.dtype | None = None) -> jax.Array:
    """Rows ``table[ids]``.

    Args:
      table: ``[V, D]``.
      ids: integers of any shape.
      dtype: dtype of the result; None = that of the table. Rows are gathered first and cast then.

    Returns:
      ``[*ids.shape, D]``. An id outside ``[0, V)`` gives a row of NaN and no gradient: it is never
      clamped to another token. Repeated ids add their gradients up in float32.

    Raises:
      TypeError: ``ids`` are not integers.
    """
    table, ids = jnp.asarray(table), jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"embedding: ids must be integers, got {ids.dtype}")
    valid = (ids >= 0) & (ids < table.shape[0])
    safe = jnp.where(valid, ids, 0).astype(jnp.int32)
    # The cast comes before the gather so that its transpose, the scatter-add, runs in float32.
    wide = table.astype(jnp.promote_types(table.dtype, jnp.float32))
    rows = wide.at[safe].get(mode="promise_in_bounds")
    return jnp.where(valid[..., None], rows, jnp.nan).astype(dtype or table.dtype)
