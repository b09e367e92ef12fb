"""Cross entropy over logits, and over hidden states without ever holding all logits.

Both return the mean over the targets that count: ``sum / count`` in float32, 0 with zero gradient
when none counts. The ``_sum`` forms return (sum, count), for losses that are added up over
accumulation steps: divide once, at the end, never a mean of means.

Loss of one target t with logits z and L = ln sum exp(z):

    L - (1 - e) z_t - e mean(z) + z_loss L^2         e = label_smoothing
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_flashtrain._src.compat import match_varying

IgnoreId = int | None


def _check_options(name: str, z_loss: float, label_smoothing: float) -> None:
    if not z_loss >= 0:
        raise ValueError(f"{name}: z_loss must not be negative, got {z_loss}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"{name}: label_smoothing must be in [0, 1), got {label_smoothing}")


def _counts(targets: jax.Array, ignore_id: IgnoreId) -> jax.Array:
    """bool like targets: which count. The id may lie outside the vocabulary: in 32 and 64 bits it
    is compared modulo the type (a pad of 2^32 - 1 stored as int32 is -1); a narrower type must be
    able to hold it, or it would stand for another token (-100 is 156 in uint8)."""
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"cross_entropy: targets must be integers, got {targets.dtype}")
    if ignore_id is None:
        return jnp.ones(targets.shape, bool)
    limits = jnp.iinfo(targets.dtype)
    if limits.bits < 32 and not limits.min <= ignore_id <= limits.max:
        raise ValueError(
            f"cross_entropy: ignore_id must fit the targets' dtype {targets.dtype}, got {ignore_id}"
        )
    return targets != np.asarray(ignore_id).astype(targets.dtype)


def _row_losses(
    logits: jax.Array, targets: jax.Array, z_loss: float, label_smoothing: float
) -> tuple[jax.Array, jax.Array]:
    """Loss of each row, and L; float32 logits ``[..., V]``. A target outside [0, V) gives NaN."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    vocabulary = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    # A comparison fuses into the reduction; a gather (and its scatter) would not.
    hit = vocabulary == targets.astype(jnp.int32)[..., None]
    picked = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
    loss = lse - (1.0 - label_smoothing) * picked
    if label_smoothing:
        loss = loss - label_smoothing * jnp.mean(logits, axis=-1)
    if z_loss:
        loss = loss + z_loss * lse * lse
    valid = (targets >= 0) & (targets < logits.shape[-1])
    return jnp.where(valid, loss, jnp.nan), lse


def cross_entropy_sum(
    logits: jax.Array,
    targets: jax.Array,
    *,
    ignore_id: IgnoreId = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """(sum of the losses, number of targets that count); see `cross_entropy`."""
    _check_options("cross_entropy", z_loss, label_smoothing)
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy: targets must have the shape of logits without its last dimension "
            f"{logits.shape[:-1]}, got {targets.shape}"
        )
    counts = _counts(targets, ignore_id)
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # Select before and after: whatever an ignored row holds, its gradient is exactly zero.
    wide = jnp.where(counts[..., None], wide, 0.0)
    loss, _ = _row_losses(wide, jnp.where(counts, targets, 0), z_loss, label_smoothing)
    total = jnp.sum(jnp.where(counts, loss, 0.0))
    return total, jnp.sum(counts, dtype=jnp.float32)


def _mean(total: jax.Array, count: jax.Array) -> jax.Array:
    return total / jnp.maximum(count, 1.0)


def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    *,
    ignore_id: IgnoreId = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> jax.Array:
    """Mean cross entropy of the targets that count.

    Args:
      logits: ``[..., V]``, any float dtype; arithmetic in float32.
      targets: integers ``[...]``. A target that counts and lies outside ``[0, V)`` makes the
        loss NaN: it is never clamped to another class.
      ignore_id: targets equal to it do not count; it may lie outside the vocabulary.
      z_loss: weight of ``L^2``, at least 0, which keeps logits from drifting.
      label_smoothing: share of the target's weight that is spread over all classes, in [0, 1).

    Returns:
      float32 scalar; 0, with zero gradient, when nothing counts.
    """
    return _mean(
        *cross_entropy_sum(
            logits, targets, ignore_id=ignore_id, z_loss=z_loss, label_smoothing=label_smoothing
        )
    )


def linear_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    *,
    ignore_id: IgnoreId = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk: int = 1024,
) -> jax.Array:
    """``cross_entropy(hidden @ weight, targets)`` with at most ``chunk x V`` logits alive.

    Args:
      hidden: ``[..., D]``.
      weight: ``[D, V]``.
      targets, ignore_id, z_loss, label_smoothing: as in `cross_entropy`.
      chunk: tokens per step of the loop.

    Under differentiation the forward also computes the gradients, chunk by chunk, from the logits
    it holds; the backward only scales them. Products take operands in the dtype of ``hidden`` and
    accumulate in float32; so does the sum over chunks that is the weight's gradient.
    """
    return _mean(
        *linear_cross_entropy_sum(
            hidden, weight, targets, ignore_id=ignore_id, z_loss=z_loss,
            label_smoothing=label_smoothing, chunk=chunk,
        )
    )  # fmt: skip


def linear_cross_entropy_sum(
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    *,
    ignore_id: IgnoreId = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk: int = 1024,
) -> tuple[jax.Array, jax.Array]:
    """(sum of the losses, number of targets that count); see `linear_cross_entropy`."""
    _check_options("linear_cross_entropy", z_loss, label_smoothing)
    if chunk < 1:
        raise ValueError(f"linear_cross_entropy: chunk must be at least 1, got {chunk}")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy: targets must have the shape of hidden without its last "
            f"dimension {hidden.shape[:-1]}, got {targets.shape}"
        )
    if weight.ndim != 2 or weight.shape[0] != hidden.shape[-1]:
        raise ValueError(
            f"linear_cross_entropy: weight must have the shape [{hidden.shape[-1]}, vocab], "
            f"got {weight.shape}"
        )
    counts = _counts(targets, ignore_id)
    tokens = targets.size
    chunk = min(chunk, max(tokens, 1))
    steps = -(-tokens // chunk)
    pad = steps * chunk - tokens

    def chunks(x: jax.Array) -> jax.Array:
        """[tokens, ...] as [steps, chunk, ...]. A chunk takes every steps-th token, so that a
        batch dimension sharded over devices stays sharded inside every chunk."""
        x = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1))
        return jnp.moveaxis(x.reshape(chunk, steps, *x.shape[1:]), 1, 0)

    count = jnp.sum(counts, dtype=jnp.float32)
    if not tokens:
        return jnp.zeros((), jnp.float32), count
    operands = (
        chunks(hidden.reshape(tokens, hidden.shape[-1])),
        weight,
        chunks(jnp.where(counts, targets, 0).reshape(-1)),
        chunks(counts.reshape(-1)),
    )
    # Inside a shard_map the replicated weight becomes varying here; the transpose is the psum that
    # its gradient needs.
    return _chunked_sum((z_loss, label_smoothing), *match_varying(operands)), count


Options = tuple[float, float]


def _chunk_logits(h: jax.Array, weight: jax.Array, counts: jax.Array) -> jax.Array:
    """float32 logits [chunk, V]; zero in rows that do not count. Both operands share a dtype."""
    logits = jnp.dot(h, weight, preferred_element_type=jnp.promote_types(h.dtype, jnp.float32))
    return jnp.where(counts[:, None], logits, 0.0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_sum(
    options: Options, hidden: jax.Array, weight: jax.Array, targets: jax.Array, counts: jax.Array
) -> jax.Array:
    """Sum of the losses; hidden [steps, chunk, D], targets and counts [steps, chunk]."""
    operand = weight.astype(hidden.dtype)  # once, outside the loop

    def step(total: jax.Array, xs: tuple) -> tuple[jax.Array, None]:
        h, t, c = xs
        loss, _ = _row_losses(_chunk_logits(h, operand, c), t, *options)
        return total + jnp.sum(jnp.where(c, loss, 0.0)), None

    zero = jnp.zeros((), jnp.promote_types(hidden.dtype, jnp.float32))
    zero = match_varying([zero, hidden])[0]
    return jax.lax.scan(step, zero, (hidden, targets, counts))[0]


def _chunked_forward(
    options: Options, hidden: jax.Array, weight: jax.Array, targets: jax.Array, counts: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    z_loss, smoothing = options
    operand = weight.astype(hidden.dtype)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    columns = jnp.arange(weight.shape[1], dtype=jnp.int32)

    def step(carry: tuple, xs: tuple) -> tuple[tuple, jax.Array]:
        total, dweight = carry
        h, t, c = xs
        logits = _chunk_logits(h, operand, c)
        loss, lse = _row_losses(logits, t, *options)
        # d loss / d z = p (1 + 2 z_loss L) - (1 - e) onehot - e / V
        p = jnp.exp(logits - lse[:, None])
        onehot = columns == t.astype(jnp.int32)[:, None]
        dlogits = p * (1.0 + 2.0 * z_loss * lse[:, None]) - smoothing / weight.shape[1]
        dlogits = dlogits - jnp.where(onehot, 1.0 - smoothing, 0.0)
        counted = c & (t >= 0) & (t < weight.shape[1])
        dlogits = jnp.where(counted[:, None], dlogits, 0.0).astype(h.dtype)
        dh = jnp.dot(dlogits, operand.T, preferred_element_type=wide)
        # An ignored row may hold NaN, and 0 * NaN is NaN in the product over tokens.
        h = jnp.where(counted[:, None], h, 0)
        dweight = dweight + jnp.dot(h.T, dlogits, preferred_element_type=wide)
        total = total + jnp.sum(jnp.where(c, loss, 0.0))
        return (total, dweight), dh.astype(h.dtype)

    zero = tuple(match_varying([jnp.zeros((), wide), jnp.zeros(weight.shape, wide), hidden])[:2])
    (total, dweight), dhidden = jax.lax.scan(step, zero, (hidden, targets, counts))
    return total, (dhidden, dweight.astype(weight.dtype))


def _chunked_backward(
    options: Options, residual: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple:
    del options
    dhidden, dweight = residual
    return (
        (cotangent * dhidden).astype(dhidden.dtype),
        (cotangent * dweight).astype(dweight.dtype),
        None,
        None,
    )


_chunked_sum.defvjp(_chunked_forward, _chunked_backward)
