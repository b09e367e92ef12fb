"""Key/value cache of one attention layer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

#: Keys that a part has at least where the keys of a cache are split (`few_rows`).
SHORTEST_PART = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values seen so far; every method returns a new cache (donate the old one).

    Attributes:
      keys: ``[*batch, max_seq, Hkv, D]``; rows at and beyond the length may hold anything.
      values: ``[*batch, max_seq, Hkv, Dv]``.
      lengths: int32 ``[*batch]``, rows in use.
      overflowed: bool ``[*batch]``, set once an append did not fit.
    """

    keys: jax.Array
    values: jax.Array
    lengths: jax.Array
    overflowed: jax.Array

    @classmethod
    def init(
        cls,
        batch: int | tuple[int, ...],
        max_seq: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: jnp.dtype = jnp.float32,
    ) -> KVCache:
        """An empty cache; ``batch`` is a size or a tuple of leading dimensions, () for none."""
        batch = (batch,) if isinstance(batch, int) else tuple(batch)
        shape = (*batch, max_seq, kv_heads)
        return cls(
            keys=jnp.zeros((*shape, head_dim), dtype),
            values=jnp.zeros((*shape, value_dim or head_dim), dtype),
            lengths=jnp.zeros(batch, jnp.int32),
            overflowed=jnp.zeros(batch, bool),
        )

    @property
    def max_seq(self) -> int:
        return self.keys.shape[-3]

    def append(self, k: jax.Array, v: jax.Array, *, new: jax.Array | None = None) -> KVCache:
        """Write ``k [*batch, n, Hkv, D]`` and ``v`` behind what is stored.

        Args:
          k, v: new rows.
          new: int ``[*batch]``, how many of the n rows count (a padded prompt); None = all.

        Returns:
          The grown cache. What does not fit is dropped, never written over stored rows: the
          length saturates at ``max_seq`` and ``overflowed`` is set.

        Raises:
          ValueError: a shape does not fit; or, outside jit, the rows do not fit into the cache.
        """
        batch = self.lengths.shape
        for name, given, stored in (("k", k, self.keys), ("v", v, self.values)):
            want = (*batch, k.shape[-3] if k.ndim >= 3 else 0, *stored.shape[-2:])
            if given.shape != want:
                raise ValueError(
                    f"KVCache.append: {name} must have the shape {want} ([*batch, new, kv_heads, "
                    f"head_dim]), got {given.shape}"
                )
        rows = k.shape[-3]
        count = jnp.full(batch, rows, jnp.int32) if new is None else jnp.clip(new, 0, rows)
        total = self.lengths + count.astype(jnp.int32)
        if not isinstance(total, jax.core.Tracer):
            over = total > self.max_seq
            if bool(over.any()):
                worst = int(jnp.argmax(over))
                length, added = (int(x.ravel()[worst]) for x in (self.lengths, count))
                raise ValueError(
                    f"KVCache.append: the rows do not fit, length {length} + new {added} > max "
                    f"{self.max_seq}"
                )
        offsets = jnp.arange(rows, dtype=jnp.int32)
        index = self.lengths[..., None] + offsets
        # Rows that do not count go to max_seq, outside the array, and are dropped there.
        index = jnp.where(offsets < count[..., None], index, self.max_seq)

        def write(buffer: jax.Array, at: jax.Array, rows: jax.Array) -> jax.Array:
            return buffer.at[at].set(rows.astype(buffer.dtype), mode="drop")

        for _ in batch:
            write = jax.vmap(write)
        return KVCache(
            keys=write(self.keys, index, k),
            values=write(self.values, index, v),
            lengths=jnp.minimum(total, self.max_seq),
            overflowed=self.overflowed | (total > self.max_seq),
        )

    def get(self) -> tuple[jax.Array, jax.Array]:
        """The rows in use, ``[*batch, max(lengths), Hkv, D]`` each (outside jit only).

        Under jit the length is no static shape: use ``keys``, ``values`` and ``lengths``.
        """
        if isinstance(self.lengths, jax.core.Tracer):
            raise TypeError("KVCache.get: works outside jit; inside use keys, values and lengths")
        used = int(self.lengths.max()) if self.lengths.size else 0
        return self.keys[..., :used, :, :], self.values[..., :used, :, :]

    def clear(self) -> KVCache:
        """The same memory with nothing in use."""
        return dataclasses.replace(
            self,
            lengths=jnp.zeros_like(self.lengths),
            overflowed=jnp.zeros_like(self.overflowed),
        )
