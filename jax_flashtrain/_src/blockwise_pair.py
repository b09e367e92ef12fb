"""One tile of queries against one tile of keys: logits, weights, and the gradients of both.

Everything is in the accumulator dtype; the loops are elsewhere. Shapes as in blockwise_tiles.

Two kinds of junk must never spread: what lies in keys that nobody sees, and what lies in rows that
see nothing. ``0 * NaN`` is NaN in a product of tiles, so both are replaced by zeros before any
product, and what is hidden is selected away, never multiplied away. That holds for derivatives of
any order too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from . import philox
from .blockwise_tiles import Geometry, accumulator, grouped, is_one, matmul_precision, tile_dot
from .blockwise_visibility import Visibility
from .spec import EMPTY_ROW, AttentionSpec, Operand


class Seen(NamedTuple):
    """Visibility of a tile; None where everything is visible."""

    pairs: Array | None  # [b.., K|1, G|1, block_q|1, block_k|1]
    rows: Array | None  # [b.., K|1, G|1, block_q|1]    the row sees a key of this tile
    keys: Array | None  # [b.., K|1, block_k|1]         some row of the group sees the key


class Logits(NamedTuple):
    """Logits of a tile (-inf where hidden) and the derivative of the cap (None without softcap)."""

    s: Array
    slope: Array | None


def select(seen: Array | None, x: Array) -> Array:
    """x where it is seen, else 0."""
    return x if seen is None else jnp.where(seen, x, jnp.zeros((), x.dtype))


@dataclasses.dataclass(frozen=True)
class Tile:
    """Where a pair of blocks lies: first row, first key, and what data says about visibility."""

    i0: Array
    j0: Array
    listed: Array | None


class Pair:
    """The arithmetic of one pair of tiles, with everything that is the same for all pairs."""

    def __init__(self, spec: AttentionSpec, geo: Geometry, operands: dict[Operand, Array]):
        self.spec = spec
        self.geo = geo
        self.visibility = Visibility(spec, geo, operands)
        dtype = operands[Operand.Q].dtype
        self.dtype = accumulator(dtype)
        self.precision = matmul_precision(spec, dtype)
        slopes = operands.get(Operand.ALIBI_SLOPES)
        #: [b.., K, G, 1, 1]
        self.slopes = None if slopes is None else self.per_head(slopes)

    def per_head(self, x: Array) -> Array:
        """[b.., Hq] as [b.., K, G, 1, 1] in the accumulator dtype."""
        return grouped(self.geo, x)[..., None, None].astype(self.dtype)

    def dot(
        self, equation: str, x: Array, y: Array, out_batch: Sequence[int] | None = None
    ) -> Array:
        return tile_dot(self.geo, equation, x, y, self.precision, out_batch)

    def seen(self, at: Tile, bias: Array | None) -> Seen:
        pairs = self.visibility.tile(at.i0, at.j0, at.listed)
        keys = None if pairs is None else jnp.any(pairs, (-3, -2))
        rows = pairs
        if bias is not None:
            # A row with nothing but -inf is as empty as one that sees nothing.
            finite = bias != -jnp.inf
            rows = finite if rows is None else rows & finite
        return Seen(pairs, None if rows is None else jnp.any(rows, -1), keys)

    def logits(self, at: Tile, seen: Seen, q: Array, k: Array, bias: Array | None) -> Logits:
        """softcap(scale q.k) + bias - slope |i + offset - j|, -inf where hidden."""
        s = self.dot("KGqd,Ksd->KGqs", q, k) * self.spec.scale
        slope = None
        cap = self.spec.softcap
        if cap is not None:
            ratio = jnp.tanh(s / cap)
            s, slope = cap * ratio, 1 - ratio * ratio
        if bias is not None:
            s = s + select(seen.pairs, bias)
        if self.slopes is not None:
            s = s - self.slopes * self.visibility.distance(at.i0, at.j0, self.dtype)
        if seen.pairs is not None:
            s = jnp.where(seen.pairs, s, jnp.asarray(-np.inf, s.dtype))
        return Logits(s, slope)

    def dropped(self, at: Tile, weights: Array) -> Array:
        """Z * weights: survivors are scaled up, the others are zero."""
        keep = self.visibility.keep(at.i0, at.j0)
        if keep is None:
            return weights
        return select(keep, weights * philox.dropout_factor(self.spec.dropout_rate))

    def scrub_rows(self, seen: Seen, x: Array | None) -> Array | None:
        """A query-side tile without the rows that take no part."""
        return x if x is None or seen.rows is None else select(seen.rows[..., None], x)

    def scrub_keys(self, seen: Seen, x: Array | None) -> Array | None:
        """A key-side tile without the keys that nobody sees."""
        return x if x is None or seen.keys is None else select(seen.keys[..., None], x)

    def scrubbed(self, seen: Seen, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """q, k, v without the rows and keys that take no part in this tile."""
        rows = None if seen.rows is None else seen.rows[..., None]
        keys = None if seen.keys is None else seen.keys[..., None]
        return select(rows, q), select(keys, k), select(keys, v)

    # ---- backward -------------------------------------------------------------------------------

    def gradients(
        self,
        at: Tile,
        rows: dict[str, Array],
        keys: dict[str, Array],
        bias: Array | None,
        shapes: dict[str, tuple[int, ...]],
        wants: frozenset[str],
    ) -> dict[str, Array]:
        """What this pair of tiles adds to every gradient in ``wants`` (and the rows it serves).

        ``rows`` holds q, o, do, dlse (may be absent), row_max, row_log_sum; ``keys`` holds k, v.
        ``shapes`` gives the shape of each whole gradient: batch dimensions of 1 are summed over,
        and so are those of a bias.
        """
        rank = self.geo.rank
        seen = self.seen(at, bias)
        live = rows["row_log_sum"] < EMPTY_ROW / 2
        live = live if seen.rows is None else live & seen.rows
        q, k, v = self.scrubbed(seen._replace(rows=live), rows["q"], keys["k"], keys["v"])
        do = select(live[..., None], rows["do"])
        # delta_i = rowsum(o_i * do_i) - dL_i
        delta = jnp.sum(rows["o"] * do, -1)
        if "dlse" in rows:
            delta = delta - select(live, rows["dlse"])

        logits = self.logits(at, seen, q, k, bias)
        # p = exp((s - m) - c), exact for any |L|
        p = jnp.exp((logits.s - rows["row_max"][..., None]) - rows["row_log_sum"][..., None])
        out = {}
        if "v" in wants:
            weights = self.dropped(at, p)
            out["v"] = self.dot("KGqs,KGqd->Ksd", weights, do, shapes["v"][:rank])
        # ds = p * (dp - delta)
        dp = self.dropped(at, self.dot("KGqd,Ksd->KGqs", do, v))
        ds = select(seen.pairs, p * (dp - delta[..., None]))
        if "bias" in wants:
            out["bias"] = self._sum_to_bias(ds, shapes["bias"])
        if "alibi" in wants:
            distance = self.visibility.distance(at.i0, at.j0, self.dtype)
            out["alibi"] = self.sum_batch(-jnp.sum(ds * distance, (-2, -1)), shapes["alibi"])
        if logits.slope is not None:
            ds = ds * logits.slope
        if "q" in wants:
            out["q"] = self.dot("KGqs,Ksd->KGqd", ds, k, shapes["q"][:rank]) * self.spec.scale
        if "k" in wants:
            out["k"] = self.dot("KGqs,KGqd->Ksd", ds, q, shapes["k"][:rank]) * self.spec.scale
        if "seen" in wants:
            out["seen"] = live
        return out

    def sum_batch(self, x: Array, shape: tuple[int, ...]) -> Array:
        axes = [d for d in range(self.geo.rank) if is_one(shape[d])]
        return jnp.sum(x, axes, keepdims=True) if axes else x

    def _sum_to_bias(self, ds: Array, shape: tuple[int, ...]) -> Array:
        """Sums over every dimension in which the bias [b.., Hq|1, Sq|1, Sk|1] is 1."""
        rank = self.geo.rank
        heads = shape[rank]
        kept = [*shape[:rank], heads, heads, *shape[rank + 1 :]]
        if heads == 1:
            axes = [d for d, size in enumerate(kept) if size == 1]
        else:
            axes = [d for d, size in enumerate(kept) if size == 1 and d not in (rank, rank + 1)]
        return jnp.sum(ds, axes, keepdims=True) if axes else ds

    # ---- tangent --------------------------------------------------------------------------------

    def logits_tangent(
        self,
        at: Tile,
        seen: Seen,
        logits: Logits,
        qk: tuple[Array, Array],
        qk_dot: tuple[Array | None, Array | None],
        bias_dot: Array | None,
        slopes_dot: Array | None,
    ) -> Array | None:
        """Tangent of the logits of a tile, 0 where hidden; None if nothing moves."""
        (q, k), (q_dot, k_dot) = qk, qk_dot
        terms = []
        if q_dot is not None:
            terms.append(self.dot("KGqd,Ksd->KGqs", q_dot, k) * self.spec.scale)
        if k_dot is not None:
            terms.append(self.dot("KGqd,Ksd->KGqs", q, k_dot) * self.spec.scale)
        if logits.slope is not None:
            terms = [term * logits.slope for term in terms]
        if bias_dot is not None:
            terms.append(bias_dot)
        if slopes_dot is not None:
            terms.append(-slopes_dot * self.visibility.distance(at.i0, at.j0, self.dtype))
        if not terms:
            return None
        s_dot = functools.reduce(jnp.add, terms)
        s_dot = select(seen.pairs, s_dot)
        return s_dot if seen.rows is None else select(seen.rows[..., None], s_dot)
