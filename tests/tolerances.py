"""The one rule of accuracy: error(kernel) <= 2 x error(plain attention in the same dtype) + floor.

With softcap the factor is 3. "Plain attention" is what ``jax.nn.dot_product_attention`` computes on
arrays of that dtype: logits and softmax in the accumulator type, the weights and their cotangents
rounded to the dtype, every result rounded once more; delta comes from the rounded o, as the
contract's backward has it. It runs here in NumPy, because a jnp version would compile two dozen
operations for every new shape (``test_tolerances.py`` holds it against a real jnp one). Both errors
are taken against the float64 oracle, as a maximum and as a root mean square. The floor is what a
correct kernel with another order of summation may differ by: one rounding of the result plus a few
roundings of the sums behind it (``oracle.Magnitudes``).

Comparisons fail on NaN on either side and treat equal infinities as equal.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import oracle

FACTOR = 2.0
FACTOR_SOFTCAP = 3.0

#: Units of epsilon that the floor allows for the last rounding, and for the accumulated terms.
RESULT_ROUNDINGS = 0.5
TERM_ROUNDINGS = 4.0


def epsilon(dtype) -> float:
    """Distance from 1 to the next number of a dtype."""
    return float(ml_dtypes.finfo(np.dtype(dtype)).eps)


def accumulator(dtype) -> np.dtype:
    """float64 for float64, float32 for everything else."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


class Mismatch(AssertionError):  # noqa: N818 (it reads better)
    """A comparison that failed; the text says where, what was wanted and what came."""


def check_close(name: str, got, want, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    """Elementwise ``|got - want| <= atol + rtol |want|``; NaN fails, equal infinities are equal."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = _error(name, got, want)
    limit = atol + rtol * np.abs(np.where(np.isfinite(want), want, 0.0))
    if (error > limit).any():
        _raise(name, got, want, error - limit, f"|error| above {atol:g} + {rtol:g} |want|")


def check_equal(name: str, got, want) -> None:
    """Bitwise equality of finite values (NaN fails on either side)."""
    check_close(name, got, want)


def _error(name, got, want):
    """|got - want|, after shapes, NaN and infinities were dealt with."""
    if got.shape != want.shape:
        raise Mismatch(f"{name}: wanted shape {want.shape}, got {got.shape}")
    if np.isnan(want).any():
        raise Mismatch(f"{name}: the wanted values hold NaN, first at {_first(np.isnan(want))}")
    if np.isnan(got).any():
        raise Mismatch(
            f"{name}: {np.isnan(got).sum()} of {got.size} values are NaN, "
            f"first at {_first(np.isnan(got))}"
        )
    infinite = np.isinf(got) | np.isinf(want)
    if (infinite & (got != want)).any():
        at = _first(infinite & (got != want))
        raise Mismatch(f"{name}: at {at} wanted {want[at]}, got {got[at]}")
    with np.errstate(invalid="ignore"):
        return np.where(infinite, 0.0, np.abs(got - want))


def _first(where) -> tuple[int, ...]:
    return tuple(int(x) for x in np.argwhere(where)[0])


def _raise(name, got, want, excess, rule):
    at = tuple(int(x) for x in np.unravel_index(np.argmax(excess), excess.shape))
    raise Mismatch(
        f"{name}: {rule}; worst at {at}: wanted {want[at]:.9g}, got {got[at]:.9g} "
        f"({(excess > 0).sum()} of {excess.size} values are off)"
    )


@dataclasses.dataclass(frozen=True)
class Reference:
    """What one result must be: the oracle's value, the plain one, and the sizes of the terms."""

    want: np.ndarray
    plain: np.ndarray
    magnitude: np.ndarray
    typical: np.ndarray | None = None  # from `typical_errors`

    def limits(self, dtype, *, sensitivity: float, softcap: bool) -> tuple[float, float]:
        """(maximum, root mean square) of the error that is allowed."""
        factor = FACTOR_SOFTCAP if softcap else FACTOR
        with np.errstate(invalid="ignore"):
            error = np.abs(np.asarray(self.plain, np.float64) - self.want)
        if self.typical is not None:
            error = np.maximum(error, self.typical)
        error = error[np.isfinite(error)]
        want = self.want[np.isfinite(self.want)]
        terms = np.abs(self.magnitude[np.isfinite(self.magnitude)]).max(initial=0.0)
        sums = TERM_ROUNDINGS * (1 + sensitivity) * epsilon(accumulator(dtype)) * terms
        last = RESULT_ROUNDINGS * epsilon(dtype)
        return (
            factor * error.max(initial=0.0) + last * np.abs(want).max(initial=0.0) + sums,
            factor * _rms(error) + last * _rms(want) + sums,
        )

    def check(self, name: str, got, dtype, *, sensitivity: float, softcap: bool = False) -> None:
        """Raises :class:`Mismatch` unless ``got`` obeys the rule. ``dtype`` is that of ``got``."""
        got = np.asarray(got)
        if got.dtype != np.dtype(dtype):
            raise Mismatch(f"{name}: wanted dtype {np.dtype(dtype)}, got {got.dtype}")
        got, want = got.astype(np.float64), np.asarray(self.want, np.float64)
        error = _error(name, got, want)
        most, rms_most = self.limits(dtype, sensitivity=sensitivity, softcap=softcap)
        if (error > most).any():
            _raise(
                name, got, want, error - most, f"maximum error {error.max():.3g} above {most:.3g}"
            )
        rms = _rms(error)
        if rms > rms_most:
            _raise(name, got, want, error, f"root mean square error {rms:.3g} above {rms_most:.3g}")

    def check_terms(self, name: str, got, unit: float, *, sensitivity: float) -> None:
        """Raises :class:`Mismatch` where the error exceeds ``unit`` (an epsilon) per term.

        For TF32, and for sums to a few numbers: how one such number happens to round in plain
        attention says nothing about another order of summation.
        """
        got, want = np.asarray(got, np.float64), np.asarray(self.want, np.float64)
        finite = np.isfinite(want)
        if not np.array_equal(np.isfinite(got), finite):
            raise Mismatch(f"{name}: other values are finite than should be")
        terms = np.abs(self.magnitude[np.isfinite(self.magnitude)]).max(initial=0.0)
        limit = unit * (1.5 + 0.5 * sensitivity) * terms + 1e-6
        error = np.abs(got[finite] - want[finite]).max(initial=0.0)
        if error > limit:
            raise Mismatch(f"{name}: error {error:.3g} above {limit:.3g}")


def typical_errors(call: oracle.Attention, ds, sink_rows, do, dtype) -> list[np.ndarray | None]:
    """The errors that every gradient but dv typically has: two standard deviations or so.

    Where a gradient is a handful of numbers, each the sum of many rounded terms, the one error that
    plain attention happens to make there says little, its terms may cancel.

    dbias, dalibi_slopes, dsinks: the errors of the terms of plain attention (``ds``, ``sink_rows``
    against the oracle's) are added as a random walk over the rows. The keys of a row share its
    delta: their errors are added as they are.
    dq, dk: what the rounding of o does to them through delta, half a unit for each product o * do.
    """
    with np.errstate(invalid="ignore"):
        error = np.nan_to_num(np.asarray(ds, np.float64) - call.ds)
        delta = 0.5 * epsilon(dtype) * np.sqrt(np.square(call._o * do).sum(-1, keepdims=True))
        weights = np.where(call.see, call.p, 0.0) * call.scale
        if call.softcap is not None:
            weights = weights * np.nan_to_num(1 - (call.capped / call.softcap) ** 2)
    dq = np.abs(delta * call._weighted(weights, call.k))
    dk = np.sqrt(call._to_keys(np.square(weights * delta), np.square(call.q)))
    bias = slopes = sinks = None
    if call.bias_shape is not None:
        keys_too = call.bias_shape[-1] == 1
        rows = error.sum(-1, keepdims=True) if keys_too else error
        bias = 2 * np.sqrt(call._sum_to_bias(rows**2))
    if call.slopes is not None:
        rows = (error * call.distance).sum(-1, keepdims=True)
        slopes = 2 * np.sqrt(call._sum_to_slopes(rows**2))
    if call.sinks is not None:
        rows = np.nan_to_num(np.asarray(sink_rows, np.float64) - call.sink_rows)
        sinks = 2 * np.sqrt((rows**2).sum((*range(len(call.batch)), -1)))
    return [call._as_given(dq), call._as_given(dk), None, bias, slopes, sinks]


def _rms(x) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if np.size(x) else 0.0


def _rounder(dtype):
    dtype = np.dtype(dtype)
    if dtype in (np.float32, np.float64):
        return lambda x: np.asarray(x, dtype)
    # float32 arithmetic, every result rounded: what XLA does with 16-bit operands.
    return lambda x: np.asarray(x, np.float32).astype(dtype).astype(np.float32)


def plain_attention(call: oracle.Attention, q, k, v, bias, do, dlse, dtype):
    """Plain attention of arrays of ``dtype``; gradients as autodiff makes them.

    Returns [o, lse, dq, dk, dv, dbias, dalibi_slopes, dsinks] in the caller's shapes, and the list
    of ``typical_errors`` of the gradients. ``call`` is the oracle's view of the same call, after
    its backward: it gives the visibility, the dropout factors and the distances.
    """
    r = _rounder(dtype)  # to the dtype of the arrays
    a = _rounder(accumulator(dtype))
    heads = call._heads_first
    # The oracle has replaced what nobody sees; the rest is the caller's own values.
    q, k, v = a(call.q), a(call.k), a(call.v)
    do = np.where(call.empty[..., None], a(0.0), a(heads(np.asarray(do, np.float64))))
    dlse = a(np.zeros(call.lse.shape) if dlse is None else dlse)
    distance, z, scale = a(call.distance), a(call.z), a(call.scale)
    slopes = None if call.slopes is None else a(call.slopes)[..., None, None]
    sinks = None if call.sinks is None else a(call.sinks)[:, None]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        s = call._scores(q, k) * scale
        if call.softcap is not None:
            cap = a(call.softcap)
            ratio = np.tanh(s / cap)
            s = cap * ratio
        if bias is not None:
            s = s + oracle._right_aligned(np.asarray(bias).astype(s.dtype), s.ndim)
        if slopes is not None:
            s = s - slopes * distance
        s = np.where(call.see, s, a(-np.inf))
        m = s.max(-1, initial=-np.inf)
        if sinks is not None:
            m = np.maximum(m, sinks)
        dead = m == -np.inf
        m = np.where(dead, a(0.0), m)
        e = np.exp(s - m[..., None])
        total = e.sum(-1)
        if sinks is not None:
            total = total + np.exp(sinks - m)
        lse = np.where(dead, a(-np.inf), m + np.log(total))
        p = e / np.where(dead, a(1.0), total)[..., None]
        pz = r(p * z)
        o = r(call._weighted(pz, v))

        dp = r(call._scores(do, v)) * z
        inner = (o * do).sum(-1)
        delta = inner - np.where(call.empty, a(0.0), dlse)
        ds = np.where(call.see, p * (dp - delta[..., None]), a(0.0))
        unrounded = ds
        dbias = call._sum_to_bias(ds)
        dslopes = call._sum_to_slopes(-ds * distance)
        dsinks = rows = None
        if sinks is not None:
            share = np.exp(sinks - np.where(dead, a(np.inf), lse))
            rows = np.where(share > 0, share * (inner - dlse), a(0.0))
            dsinks = -rows.sum((*range(len(call.batch)), -1))
        if call.softcap is not None:
            ds = ds * (1 - ratio * ratio)
        ds = r(ds)
        dq = r(scale * call._weighted(ds, k))
        dk = r(scale * call._to_keys(ds, q))
        dv = r(call._to_keys(pz, do))
        typical = typical_errors(call, unrounded, rows, do, dtype)
    return [heads(o), lse, heads(dq), heads(dk), heads(dv), dbias, dslopes, dsinks], typical
