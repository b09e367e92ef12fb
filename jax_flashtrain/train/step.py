"""The jitted training and evaluation steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_flashtrain.nn import (
    TransformerConfig,
    attention_fn,
    cross_entropy_sum,
    init_transformer,
    linear_cross_entropy_sum,
    logits_of,
    transformer_hidden,
)
from jax_flashtrain.nn.attend import Attend
from jax_flashtrain.nn.transformer import head_weight
from jax_flashtrain.train.config import RunConfig
from jax_flashtrain.train.data import IGNORE, Batch
from jax_flashtrain.train.parallel import Placement

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}

#: Vocabularies from here on use the loss that never holds all logits.
CHUNKED_LOSS_VOCABULARY = 8192


class TrainState(NamedTuple):
    """Everything that training changes: float32 master weights, optimizer state, step."""

    params: Any
    opt_state: Any
    step: jax.Array


def learning_rate(config: RunConfig) -> optax.Schedule:
    """Linear warm-up, then a cosine down to ``min_learning_rate * learning_rate``."""
    warmup = min(config.warmup_steps, max(config.steps // 2, 1))
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(config.steps, warmup + 1),
        end_value=config.min_learning_rate * config.learning_rate,
    )


def decayed(params: Any) -> Any:
    """Which parameters weight decay acts on: matrices, not the norms' vectors."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def make_optimizer(config: RunConfig) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW (decoupled decay)."""
    schedule = learning_rate(config)

    def next_rate(count: jax.Array) -> jax.Array:
        return schedule(count + 1)  # optax counts from 0: the first step would have rate 0

    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            next_rate, b1=config.beta1, b2=config.beta2, eps=config.eps,
            weight_decay=config.weight_decay, mask=decayed,
        ),
    )  # fmt: skip


def init_state(config: RunConfig) -> TrainState:
    params = init_transformer(jax.random.key(config.seed), config.model)
    return TrainState(params, make_optimizer(config).init(params), jnp.zeros((), jnp.int32))


def loss_sum(
    params: Any,
    batch: Batch,
    config: RunConfig,
    *,
    plain: bool = False,
    attend: Attend | None = None,
    placement: Placement | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(sum of the losses, number of targets that count) of one batch ``[B, S]``; ``plain`` leaves
    z-loss and label smoothing out, as evaluation does. ``attend`` None = ``config.attention``;
    ``placement`` None = one device."""
    model: TransformerConfig = config.model
    if placement is not None and attend is None:
        attend = placement.attend(config.attention)
    hidden, _ = transformer_hidden(
        params,
        batch.tokens,
        model,
        attend=attend or attention_fn(config.attention),
        segment_ids=batch.segment_ids,
        positions=placement.positions(batch.tokens.shape[-1]) if placement else None,
        dtype=DTYPES[config.dtype],
        remat="none" if plain else config.remat,
        scan_layers=config.scan_layers,
    )
    options: dict[str, Any] = {"ignore_id": IGNORE}
    if not plain:
        options |= {"z_loss": config.z_loss, "label_smoothing": config.label_smoothing}

    def losses(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> Any:
        if model.vocab_size >= CHUNKED_LOSS_VOCABULARY:
            return linear_cross_entropy_sum(hidden, head, targets, **options)
        return cross_entropy_sum(logits_of({"head": head}, hidden), targets, **options)

    over_all = placement.loss(losses) if placement else losses
    return over_all(hidden, head_weight(params), batch.targets)


def global_norm(tree: Any) -> jax.Array:
    """Root of the sum of all squares."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))


def make_train_step(
    config: RunConfig, *, attend: Attend | None = None, placement: Placement | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, dict]]:
    """``step(state, batch [accumulate, B, S]) -> (state, metrics)``; the state is donated.

    The loss is the sum over all accumulated batches divided by the number of targets in all.
    ``attend`` takes the place of ``config.attention`` (for comparisons with other libraries);
    ``placement`` says where things live, None = on one device.
    """
    optimizer = make_optimizer(config)
    schedule = learning_rate(config)
    loss = partial(loss_sum, config=config, attend=attend, placement=placement)
    grad_fn = jax.value_and_grad(loss, has_aux=True)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
        def add(carry: Any, part: Batch) -> tuple[Any, None]:
            (loss, count), grads = grad_fn(state.params, part)
            return jax.tree.map(jnp.add, carry, (loss, count, grads)), None

        if config.accumulate == 1:
            one = jax.tree.map(lambda x: x[0], batch)
            (loss, count), grads = grad_fn(state.params, one)
        else:
            zero = jnp.zeros((), jnp.float32)
            start = (zero, zero, jax.tree.map(jnp.zeros_like, state.params))
            (loss, count, grads), _ = jax.lax.scan(add, start, batch)
        scale = 1.0 / jnp.maximum(count, 1.0)
        grads = jax.tree.map(lambda g: g * scale, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = {
            "loss": loss * scale,
            "grad_norm": global_norm(grads),
            "learning_rate": schedule(state.step + 1),
        }
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.step + 1), metrics

    if placement is None:
        return jax.jit(step, donate_argnums=0)
    return jax.jit(
        step, donate_argnums=0, out_shardings=(state_shardings(config, placement), placement.copied)
    )


def state_shardings(config: RunConfig, placement: Placement) -> Any:
    """Where each array of the TrainState lives."""
    return placement.state(jax.eval_shape(partial(init_state, config)))


def make_eval_step(
    config: RunConfig, *, placement: Placement | None = None
) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
    """``eval(params, batch [B, S]) -> (sum, count)``."""
    return jax.jit(
        partial(loss_sum, config=config, plain=True, placement=placement),
        out_shardings=placement.copied if placement else None,
    )
