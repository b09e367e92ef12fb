"""RMS norm and layer norm over the last dimension.

The statistics are taken in float32 (float64 for float64 inputs) whatever the dtype of ``x``; the
result has the dtype of ``x``, the gradient of the weight that of the weight. Plain JAX, as
measured in docs/training.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _wide(x: jax.Array) -> jax.Array:
    """x in the dtype that statistics are accumulated in."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _check_weight(name: str, x: jax.Array, weight: jax.Array) -> None:
    if x.ndim < 1 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{name}: weight must have the shape of x's last dimension {x.shape[-1:]}, "
            f"got {weight.shape}"
        )


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float = 1e-6) -> jax.Array:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    Args:
      x: ``[..., D]``, any float dtype.
      weight: ``[D]``; keep it in float32 when ``x`` is bfloat16.
      eps: added to the mean square, inside the root.

    Returns:
      ``[..., D]`` in the dtype of ``x``.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), eq. 4.

    >>> import jax.numpy as jnp
    >>> rms_norm(jnp.array([3.0, 4.0, 0.0]), jnp.ones(3)).round(3).tolist()
    [1.0390000343322754, 1.3860000371932983, 0.0]
    """
    _check_weight("rms_norm", x, weight)
    wide = _wide(x)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight).astype(x.dtype)


def layer_norm(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, *, eps: float = 1e-5
) -> jax.Array:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dimension.

    Args:
      x: ``[..., D]``, any float dtype.
      weight: ``[D]``.
      bias: ``[D]`` or None.
      eps: added to the (biased) variance, inside the root.

    Returns:
      ``[..., D]`` in the dtype of ``x``.

    Source: Ba, Kiros and Hinton, "Layer Normalization" (2016), eq. 4.
    """
    _check_weight("layer_norm", x, weight)
    wide = _wide(x)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    y = centred * scale * weight
    if bias is not None:
        _check_weight("layer_norm", x, bias)
        y = y + bias
    return y.astype(x.dtype)
