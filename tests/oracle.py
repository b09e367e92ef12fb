"""The contract of attention in float64 NumPy: what every backend is compared with.

Independent on purpose: it imports nothing of the package, materialises the whole [Sq, Sk] matrix,
and follows the formulas of docs/contract.md line by line, not any kernel. ``tests/test_oracle.py``
checks it by finite differences, by plain loops and against the published Philox test vectors.

Shapes: B.. any number of leading dimensions, Hq query heads, Hkv key heads, G = Hq // Hkv.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_F64 = np.float64


class Gradients(NamedTuple):
    """Cotangents of the inputs in the caller's shapes; None for an input that was not given."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None
    dalibi_slopes: np.ndarray | None
    dsinks: np.ndarray | None


class Magnitudes(NamedTuple):
    """Sums of absolute terms behind each result: the scale at which rounding acts."""

    o: np.ndarray
    lse: np.ndarray
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None
    dbias: np.ndarray | None = None
    dalibi_slopes: np.ndarray | None = None
    dsinks: np.ndarray | None = None


# ---- Dropout ------------------------------------------------------------------------------------


def philox4x32_10(counter, key) -> tuple[np.ndarray, ...]:
    """Philox4x32-10 (Salmon et al. 2011) on broadcast uint32 arrays: 4 words in, 4 words out."""
    low = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = (np.asarray(k, np.uint64) for k in key)
    for _ in range(10):
        x = c0 * np.uint64(0xD2511F53)
        y = c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (y >> np.uint64(32)) ^ c1 ^ k0,
            y & low,
            (x >> np.uint64(32)) ^ c3 ^ k1,
            x & low,
        )
        k0 = (k0 + np.uint64(0x9E3779B9)) & low
        k1 = (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


def dropout_keep(seed, B: int, Hq: int, Sq: int, Sk: int, rate: float) -> np.ndarray:
    """True where a weight survives, [B, Hq, Sq, Sk]; ``seed`` holds two uint32 words."""
    threshold = round(rate * 65536)
    i = np.arange(Sq)[None, :, None]
    group = np.arange((Sk + 7) // 8)[None, None, :]
    bh = np.arange(B * Hq)[:, None, None]
    words = philox4x32_10((i, group, bh, 0), (int(seed[0]), int(seed[1])))
    shape = (B * Hq, Sq, group.size)
    draws = np.empty((*shape, 8), np.uint64)
    for n in range(8):  # draw n: word n // 2, low half first
        draws[..., n] = np.broadcast_to(
            (words[n // 2] >> np.uint64(16 * (n % 2))) & np.uint64(0xFFFF), shape
        )
    return (draws.reshape(B, Hq, Sq, -1) >= threshold)[..., :Sk]


# ---- Visibility ---------------------------------------------------------------------------------


def _per_batch(x, batch, tail: int) -> np.ndarray:
    """A scalar or a [B..] integer array as int64 [B.., 1 x tail]."""
    x = np.broadcast_to(np.asarray(x, np.int64), batch)
    return x.reshape(batch + (1,) * tail)


def _right_aligned(x, rank: int) -> np.ndarray:
    """Adds missing leading dimensions of size 1."""
    x = np.asarray(x)
    return x.reshape((1,) * (rank - x.ndim) + x.shape)


def positions(batch, Sq: int, Sk: int, q_offset=None) -> np.ndarray:
    """Absolute position of every query row, int64 [B.., 1, Sq, 1]."""
    offset = Sk - Sq if q_offset is None else q_offset
    return _per_batch(offset, batch, 3) + np.arange(Sq)[:, None]


def visible(
    batch,
    Hq: int,
    Sq: int,
    Sk: int,
    *,
    causal=False,
    window=None,
    q_offset=None,
    q_lengths=None,
    kv_lengths=None,
    segment_ids=None,
    mask=None,
) -> np.ndarray:
    """Which key each query may see, bool [B.., Hq, Sq, Sk]."""
    at = positions(batch, Sq, Sk, q_offset)
    j = np.arange(Sk)
    see = np.ones((*batch, Hq, Sq, Sk), bool)
    if causal:
        see &= j <= at
    if window is not None:
        left, right = window
        if left is not None:
            see &= j >= at - int(left)
        if right is not None:
            see &= j <= at + int(right)
    if q_lengths is not None:
        see &= np.arange(Sq)[:, None] < _per_batch(q_lengths, batch, 3)
    if kv_lengths is not None:
        see &= j < _per_batch(kv_lengths, batch, 3)
    if segment_ids is not None:
        q_ids, kv_ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids,) * 2
        q_ids = np.broadcast_to(np.asarray(q_ids), (*batch, Sq))
        kv_ids = np.broadcast_to(np.asarray(kv_ids), (*batch, Sk))
        see &= q_ids[..., None, :, None] == kv_ids[..., None, None, :]
    if mask is not None:
        see &= np.asarray(mask, bool)
    return see


# ---- Forward and backward -----------------------------------------------------------------------


class Attention:
    """One attention call: ``o`` and ``lse`` after construction, gradients from :meth:`backward`.

    Options have the names and meanings of ``flash_attention``; ``dropout_seed`` holds the two
    uint32 words that the call draws from its key.
    """

    def __init__(
        self,
        q,
        k,
        v,
        *,
        bias=None,
        alibi_slopes=None,
        sinks=None,
        scale=None,
        softcap=None,
        dropout_rate=0.0,
        dropout_seed=None,
        layout="BTNH",
        q_offset=None,
        **visibility,
    ):
        self.layout = layout
        q, k, v = (self._heads_first(np.asarray(x, _F64)) for x in (q, k, v))
        *batch, Hq, Sq, D = q.shape
        batch = tuple(batch)
        Hkv, Sk = k.shape[-3:-1]
        rank = len(batch) + 3
        self.batch, self.Hq, self.Hkv, self.Sq, self.Sk = batch, Hq, Hkv, Sq, Sk
        self.softcap = softcap
        self.scale = 1.0 / np.sqrt(D) if scale is None else float(scale)
        self.bias_shape = None if bias is None else np.shape(bias)
        self.slopes = None if alibi_slopes is None else np.asarray(alibi_slopes, _F64)
        self.sinks = None if sinks is None else np.asarray(sinks, _F64)

        see = visible(batch, Hq, Sq, Sk, q_offset=q_offset, **visibility)
        self.distance = np.abs(positions(batch, Sq, Sk, q_offset) - np.arange(Sk))

        # A key that no query of its group sees and a row that sees nothing may hold anything.
        key_seen = see.reshape(*batch, Hkv, Hq // Hkv * Sq, Sk).any(-2)
        self.k = np.where(key_seen[..., None], k, 0.0)
        self.v = np.where(key_seen[..., None], v, 0.0)
        self.q = np.where(see.any(-1)[..., None], q, 0.0)

        # Seen or not, a hidden logit is replaced, so NaN arithmetic on it is of no consequence.
        with np.errstate(invalid="ignore", over="ignore"):
            s = self.scale * self._scores(self.q, self.k)
            terms = abs(self.scale) * self._scores(np.abs(self.q), np.abs(self.k))
            if softcap is not None:
                s = softcap * np.tanh(s / softcap)
                terms = np.minimum(terms, softcap)
            self.capped = s
            if bias is not None:
                bias = _right_aligned(np.asarray(bias, _F64), rank)
                s = s + bias
                terms = terms + np.abs(bias)
            if self.slopes is not None:
                s = s - self.slopes[..., None, None] * self.distance
                terms = terms + np.abs(self.slopes[..., None, None]) * self.distance
            s = np.where(see, s, -np.inf)
        self.see = see

        m = s.max(-1, initial=-np.inf)
        if self.sinks is not None:
            m = np.maximum(m, self.sinks[:, None])
        dead = m == -np.inf  # nothing to normalise: no finite logit and no finite sink
        m = np.where(dead, 0.0, m)
        e = np.exp(s - m[..., None])
        total = e.sum(-1)
        if self.sinks is not None:
            total = total + np.exp(self.sinks[:, None] - m)
        with np.errstate(divide="ignore"):
            lse = np.where(dead, -np.inf, m + np.log(total))
        self.p = e / np.where(dead, 1.0, total)[..., None]
        self.empty = ~(self.p > 0).any(-1) & ~np.isnan(self.p).any(-1)

        self.z = np.ones_like(s)
        if dropout_rate > 0:
            keep = dropout_keep(dropout_seed, int(np.prod(batch)), Hq, Sq, Sk, dropout_rate)
            drop = round(dropout_rate * 65536)
            self.z = np.where(keep.reshape(s.shape), 65536 / (65536 - drop), 0.0)

        weights = self.p * self.z
        self.lse = lse
        self._o = self._weighted(weights, self.v)
        self.o = self._as_given(self._o)
        # How far rounding of the logits moves a row's result, in units of epsilon.
        with np.errstate(invalid="ignore"):
            seen_terms = np.where(self.p > 0, self.p * terms, 0.0).sum(-1)
        self.sensitivity = float(seen_terms.max(initial=0.0))
        self._magnitude_o = self._weighted(weights, np.abs(self.v))
        self._magnitude_lse = 1.0 + seen_terms

    def backward(self, do, dlse=None) -> Gradients:
        """Gradients for the cotangents of ``o`` and ``lse`` (natural log, [B.., Hq, Sq])."""
        live = ~self.empty
        do = self._heads_first(np.asarray(do, _F64))
        dlse = np.zeros(self.lse.shape) if dlse is None else np.asarray(dlse, _F64)
        do = np.where(live[..., None], do, 0.0)
        # delta of an empty row is -dL: only a sink may receive it.
        delta = (self._o * do).sum(-1) - dlse
        delta_live = np.where(live, delta, 0.0)

        dp = self.z * self._scores(do, self.v)
        ds = np.where(self.see, self.p * (dp - delta_live[..., None]), 0.0)
        size = np.where(self.see, self.p * (np.abs(dp) + np.abs(delta_live)[..., None]), 0.0)

        self.ds = ds  # the gradient of the logits before softcap, [B.., Hq, Sq, Sk]
        dbias = self._sum_to_bias(ds)
        dslopes = self._sum_to_slopes(-ds * self.distance)
        dsinks = size_sinks = self.sink_rows = None
        if self.sinks is not None:
            finite = np.isfinite(self.sinks)[:, None]
            share = np.where(finite, np.exp(self.sinks[:, None] - self._finite_lse()), 0.0)
            rows = np.where(share > 0, share * delta, 0.0)
            axes = (*range(len(self.batch)), -1)
            self.sink_rows = rows  # what each row takes from the gradient of its sink
            dsinks = -rows.sum(axes)
            size_sinks = np.abs(rows).sum(axes)

        magnitudes = [
            self._sum_to_bias(size),
            self._sum_to_slopes(size * self.distance),
            size_sinks,
        ]
        if self.softcap is not None:
            slope = 1.0 - (self.capped / self.softcap) ** 2
            ds, size = ds * slope, size * slope
        dq = self.scale * self._weighted(ds, self.k)
        dk = self.scale * self._to_keys(ds, self.q)
        dv = self._to_keys(self.p * self.z, do)
        factor = abs(self.scale)
        self.magnitudes = Magnitudes(
            self._as_given(self._magnitude_o),
            self._magnitude_lse,
            self._as_given(factor * self._weighted(size, np.abs(self.k))),
            self._as_given(factor * self._to_keys(size, np.abs(self.q))),
            self._as_given(self._to_keys(self.p * self.z, np.abs(do))),
            *magnitudes,
        )
        return Gradients(*(self._as_given(x) for x in (dq, dk, dv)), dbias, dslopes, dsinks)

    # -- shapes --

    def _heads_first(self, x):
        return np.swapaxes(x, -3, -2) if self.layout == "BTNH" else x

    _as_given = _heads_first  # its own inverse

    def _grouped(self, x):
        """[B.., Hq, ...] as [B.., Hkv, G, ...]."""
        head = len(self.batch)
        return x.reshape(*x.shape[:head], self.Hkv, self.Hq // self.Hkv, *x.shape[head + 1 :])

    def _ungrouped(self, x):
        head = len(self.batch)
        return x.reshape(*x.shape[:head], self.Hq, *x.shape[head + 2 :])

    def _scores(self, rows, keys):
        """rows . keys: [B.., Hq, Sq, D] x [B.., Hkv, Sk, D] -> [B.., Hq, Sq, Sk]."""
        return self._ungrouped(self._grouped(rows) @ np.swapaxes(keys, -1, -2)[..., None, :, :])

    def _weighted(self, weights, values):
        """sum_j weights_ij values_j."""
        return self._ungrouped(self._grouped(weights) @ values[..., None, :, :])

    def _to_keys(self, weights, rows):
        """sum over the group and i of weights_ij rows_i."""
        return (np.swapaxes(self._grouped(weights), -1, -2) @ self._grouped(rows)).sum(-3)

    def _sum_to_bias(self, x):
        if self.bias_shape is None:
            return None
        shape = (1,) * (x.ndim - len(self.bias_shape)) + tuple(self.bias_shape)
        axes = tuple(d for d in range(x.ndim) if shape[d] == 1)
        return x.sum(axes, keepdims=True).reshape(self.bias_shape)

    def _sum_to_slopes(self, x):
        if self.slopes is None:
            return None
        per_head = x.sum((-2, -1))
        return per_head.sum(tuple(range(per_head.ndim - self.slopes.ndim)))

    def _finite_lse(self):
        return np.where(np.isfinite(self.lse), self.lse, np.inf)


def attention(q, k, v, **options) -> tuple[np.ndarray, np.ndarray]:
    """(o, L) of one call."""
    call = Attention(q, k, v, **options)
    return call.o, call.lse
