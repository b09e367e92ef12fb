"""SwiGLU activation and feed-forward layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """``silu(gate) * up``, elementwise, with ``silu(x) = x / (1 + exp(-x))``.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), eq. 5.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"swiglu: gate and up must have the same shape and dtype, got "
            f"{gate.dtype}{gate.shape} and {up.dtype}{up.shape}"
        )
    return jax.nn.silu(gate) * up


def init_feed_forward(
    key: jax.Array, dim: int, hidden: int, *, stddev: float = 0.02, out_stddev: float | None = None
) -> Params:
    """float32 weights of `feed_forward`: gate and up ``[dim, hidden]``, down ``[hidden, dim]``."""
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "gate": stddev * jax.random.normal(k1, (dim, hidden), jnp.float32),
        "up": stddev * jax.random.normal(k2, (dim, hidden), jnp.float32),
        "down": (out_stddev or stddev) * jax.random.normal(k3, (hidden, dim), jnp.float32),
    }


def feed_forward(params: Params, x: jax.Array) -> jax.Array:
    """``swiglu(x gate, x up) down`` for ``x [..., dim]`` (rank 1 works).

    Weights are cast to the dtype of ``x``.
    """
    gate, up, down = (params[name].astype(x.dtype) for name in ("gate", "up", "down"))
    return jnp.dot(swiglu(jnp.dot(x, gate), jnp.dot(x, up)), down)
