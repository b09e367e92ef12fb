"""One signature for the attention implementations that a model can be trained through.

    attend(q, k, v, *, causal, window, softcap, bias, segment_ids, q_offset, kv_lengths) -> o

``native`` and ``jax`` are this package's operator; ``xla`` and ``cudnn`` are
``jax.nn.dot_product_attention``, for comparison. Arguments mean the same everywhere (those of
`jax_flashtrain.flash_attention`); what jax.nn cannot express as an option becomes a mask there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

ATTENTION_NAMES = ("native", "jax", "xla", "cudnn")

Window = tuple[int | None, int | None]
Attend = Callable[..., jax.Array]


def attention_fn(name: str | None = None) -> Attend:
    """The attend function called ``name``; None = the operator's own choice of backend."""
    if name is None or name in ("native", "jax"):
        return partial(_flash, implementation=name)
    if name in ("xla", "cudnn"):
        return partial(_jax_nn, implementation=name)
    raise ValueError(f"attention_fn: name must be one of {ATTENTION_NAMES} or None, got {name!r}")


def _flash(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    # Imported on the first call: xla and cudnn work without the compiled package.
    from jax_flashtrain import flash_attention
    from jax_flashtrain.nn.few_rows import MAX_ROWS, few_rows

    of_a_cache = {"q_offset", "kv_lengths"} <= options.keys()
    if of_a_cache and q.shape[-3] <= MAX_ROWS and not {"bias", "segment_ids"} & options.keys():
        return few_rows(q, k, v, **options)
    return flash_attention(q, k, v, **options)


def _jax_nn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    implementation: str,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    bias: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    q_offset: jax.Array | int | None = None,
    kv_lengths: jax.Array | None = None,
) -> jax.Array:
    if softcap is not None:
        raise NotImplementedError(f"attention {implementation!r}: jax.nn has no softcap")
    rows, keys = q.shape[-3], k.shape[-3]
    plain = q_offset is None and rows == keys
    if plain and segment_ids is None and kv_lengths is None:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias,
            is_causal=causal,
            local_window_size=_window_argument(window),
            implementation=implementation,
        )
    offset = jnp.asarray(keys - rows if q_offset is None else q_offset, jnp.int32)
    i = offset[..., None, None] + jnp.arange(rows)[:, None]  # [*batch or none, Sq, 1]
    j = jnp.arange(keys)
    visible = jnp.ones((rows, keys), bool)
    if causal:
        visible = visible & (j <= i)
    if window is not None:
        left, right = window
        visible = visible if left is None else visible & (j >= i - left)
        visible = visible if right is None else visible & (j <= i + right)
    if kv_lengths is not None:
        visible = visible & (j < jnp.asarray(kv_lengths)[..., None, None])
    if segment_ids is not None:
        visible = visible & (segment_ids[..., :, None] == segment_ids[..., None, :])
    mask = visible[..., None, :, :]  # heads
    mask = mask.reshape((1,) * (q.ndim - mask.ndim) + mask.shape)
    return jax.nn.dot_product_attention(q, k, v, bias, mask, implementation=implementation)


def _window_argument(window: Window | None) -> Window | None:
    if window is None:
        return None
    if None in window:
        raise NotImplementedError(f"jax.nn's window needs two numbers, got {window}")
    return window
