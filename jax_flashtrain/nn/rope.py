"""Rotary position embedding, exact at positions of a million without 64-bit types.

A pair of channels at position ``p`` turns by ``p * frequency``. In float32 that product is off by
up to 0.03 rad at p = 1e6. Only its fraction of a full turn matters, so the frequency (in turns per
position) is held as a 64-bit fixed-point fraction in two uint32 words and the product is taken
modulo one turn in integers: cos and sin are then right to float32 rounding at every int32 position.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class LlamaScaling(NamedTuple):
    """Frequency scaling by wavelength, as introduced with Llama 3.1.

    Wavelengths above ``original_max / low_factor`` are stretched by ``factor``, those below
    ``original_max / high_factor`` stay, those between are interpolated.
    """

    factor: float = 8.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_max: int = 8192


def rope_frequencies(
    head_dim: int, *, base: float = 10000.0, scaling: float | LlamaScaling | None = None
) -> np.ndarray:
    """Angle per position, in radians, of each channel pair: float64 ``[head_dim // 2]``.

    ``base ** (-2 i / head_dim)``, divided by ``scaling`` if that is a number (position
    interpolation), or scaled by wavelength if it is a `LlamaScaling`.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"rope: head_dim must be even and at least 2, got {head_dim}")
    if not base > 0:
        raise ValueError(f"rope: base must be positive, got {base}")
    frequencies = float(base) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies
    if isinstance(scaling, LlamaScaling):
        turns = scaling.original_max * frequencies / (2 * math.pi)
        blend = (turns - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return frequencies * (blend + (1.0 - blend) / scaling.factor)
    if not scaling > 0:
        raise ValueError(f"rope: scaling must be positive, got {scaling}")
    return frequencies / float(scaling)


def _high_word(a: jax.Array, b: np.ndarray) -> jax.Array:
    """The upper 32 bits of the 64-bit product of two uint32 values, through 16-bit halves."""
    a0, a1, b0, b1 = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    low, cross1, cross2 = a0 * b0, a1 * b0, a0 * b1
    carry = ((low >> 16) + (cross1 & 0xFFFF) + (cross2 & 0xFFFF)) >> 16
    return a1 * b1 + (cross1 >> 16) + (cross2 >> 16) + carry


def rope_tables(
    positions: jax.Array,
    head_dim: int,
    *,
    base: float = 10000.0,
    scaling: float | LlamaScaling | None = None,
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every pair's angle, float32 ``[*positions.shape, head_dim // 2]``.

    Args:
      positions: integer array of any shape, traced or not.
      head_dim: channels per head, even.
      base: wavelengths grow as powers of it.
      scaling: see `rope_frequencies`.

    The error of cos and sin is at most 1e-6 at every int32 position.
    """
    positions = jnp.asarray(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"rope: positions must be integers, got {positions.dtype}")
    turns = rope_frequencies(head_dim, base=base, scaling=scaling) / (2 * math.pi)
    words = [math.floor(f % 1.0 * 2.0**64) for f in turns]
    high = np.array([w >> 32 for w in words], np.uint32)
    low = np.array([w & 0xFFFFFFFF for w in words], np.uint32)

    positions = positions.astype(jnp.int32)[..., None]
    magnitude = jnp.abs(positions).astype(jnp.uint32)
    # Fraction of a turn in units of 2^-32; unsigned products wrap, which drops whole turns.
    fraction = magnitude * high + _high_word(magnitude, low)
    half_turns = jax.lax.bitcast_convert_type(fraction, jnp.int32)  # in [-1/2, 1/2) turn
    angle = half_turns.astype(jnp.float32) * np.float32(2 * math.pi / 2**32)
    return jnp.cos(angle), jnp.sin(jnp.where(positions < 0, -angle, angle))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Turn the channel pairs of ``x [..., S, H, D]`` by tables ``[..., S, D // 2]``.

    Pairs are ``(i, i + D/2)`` ("rotate-half"), or ``(2i, 2i + 1)`` if ``interleaved``. The
    backward is the turn by the negative angle.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    cos, sin = cos[..., None, :], sin[..., None, :]  # the same for every head
    if interleaved:
        x1, x2 = wide[..., 0::2], wide[..., 1::2]
    else:
        x1, x2 = jnp.split(wide, 2, axis=-1)
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    if interleaved:
        y = jnp.stack([y1, y2], axis=-1).reshape(x.shape)
    else:
        y = jnp.concatenate([y1, y2], axis=-1)
    return y.astype(x.dtype)


def rope(
    x: jax.Array,
    start: int | jax.Array = 0,
    *,
    base: float = 10000.0,
    max_positions: int | None = None,
    interleaved: bool = False,
    scaling: float | LlamaScaling | None = None,
) -> jax.Array:
    """Rotary position embedding of queries or keys.

    Args:
      x: ``[..., S, H, D]``, D even.
      start: position of the first row: an int, or an integer array (traced or not) of shape
        ``[]`` or of the leading dimensions of ``x``.
      base: wavelengths are ``2 pi base^(2i/D)``.
      max_positions: with a start that is known while tracing, ``start + S`` beyond it is an error.
      interleaved: pairs ``(2i, 2i+1)`` in place of ``(i, i + D/2)``.
      scaling: a number (position interpolation) or `LlamaScaling`.

    Returns:
      An array like ``x``; arithmetic in float32, rounded once.

    Raises:
      ValueError: odd D, rank below 3, a negative start, or ``start + S > max_positions``.
      TypeError: ``start`` is no integer.

    Source: Su et al., "RoFormer" (2021), eq. 34.
    """
    if x.ndim < 3:
        raise ValueError(f"rope: x must have the shape [..., seq, heads, head_dim], got {x.shape}")
    length, head_dim = x.shape[-3], x.shape[-1]
    start = jnp.asarray(start) if not isinstance(start, (int, np.integer)) else start
    if isinstance(start, jax.Array):
        if not jnp.issubdtype(start.dtype, jnp.integer):
            raise TypeError(f"rope: start must be integers, got {start.dtype}")
        if start.ndim and start.shape != x.shape[:-3]:
            raise ValueError(
                f"rope: start must have shape [] or {x.shape[:-3]} (the leading dimensions of x), "
                f"got {start.shape}"
            )
    if not isinstance(start, jax.core.Tracer):
        first, last = int(np.min(start)), int(np.max(start)) + length
        if first < 0:
            raise ValueError(f"rope: start must not be negative, got {first}")
        if max_positions is not None and last > max_positions:
            raise ValueError(
                f"rope: start + length must not exceed max_positions, got "
                f"{last - length} + {length} > {max_positions}"
            )
    positions = jnp.asarray(start, jnp.int32)[..., None] + jnp.arange(length, dtype=jnp.int32)
    cos, sin = rope_tables(positions, head_dim, base=base, scaling=scaling)
    return rotate(x, cos, sin, interleaved=interleaved)
