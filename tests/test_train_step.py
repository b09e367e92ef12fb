"""The training step: AdamW by its formula, accumulation, decay, agreement of the attentions."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import check_close, check_equal

pytest.importorskip("optax")
import optax

from jax_flashtrain.nn import TransformerConfig
from jax_flashtrain.train.config import make_config
from jax_flashtrain.train.data import IGNORE, Batch
from jax_flashtrain.train.loop import load_corpus
from jax_flashtrain.train.step import (
    decayed,
    global_norm,
    init_state,
    learning_rate,
    loss_sum,
    make_eval_step,
    make_optimizer,
    make_train_step,
)

SMALL = TransformerConfig(
    vocab_size=256, dim=16, layers=2, heads=2, kv_heads=1, head_dim=8, hidden=24
)


def small(**given):
    given = {"steps": 20, "seq_len": 12, "batch_size": 4, "warmup_steps": 5} | given
    return dataclasses.replace(make_config("tiny", given), model=SMALL)


def batch_of(rng, config, parts=1):
    shape = (parts, config.batch_size, config.seq_len)
    tokens = rng.integers(0, 256, shape).astype(np.int32)
    targets = rng.integers(0, 256, shape).astype(np.int32)
    targets[0, 0, :5] = IGNORE
    return Batch(tokens, targets, None)


def test_adamw_by_its_formula(rng):
    """m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, t from 1,
    p -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + wd p), no decay on vectors."""
    config = small(learning_rate=0.1, weight_decay=0.3)
    config = dataclasses.replace(
        config, clip=math.inf, eps=1e-3
    )  # a large eps: where it stands shows
    optimizer = make_optimizer(config)
    params = {"w": rng.standard_normal((3, 2)), "norm": rng.standard_normal(4)}
    params = jax.tree.map(lambda p: p.astype(np.float32), params)
    want = jax.tree.map(np.float64, params)
    m, v = (jax.tree.map(np.zeros_like, want) for _ in range(2))
    state = optimizer.init(params)
    for t in range(1, 8):
        grads = jax.tree.map(
            lambda p: 0.01 * rng.standard_normal(p.shape).astype(np.float32), params
        )
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        rate = float(learning_rate(config)(t))
        for name, decay in (("w", 0.3), ("norm", 0.0)):
            g = grads[name].astype(np.float64)
            m[name] = config.beta1 * m[name] + (1 - config.beta1) * g
            v[name] = config.beta2 * v[name] + (1 - config.beta2) * g * g
            mean, square = m[name] / (1 - config.beta1**t), v[name] / (1 - config.beta2**t)
            want[name] -= rate * (mean / (np.sqrt(square) + config.eps) + decay * want[name])
            check_close(f"{name} after step {t}", params[name], want[name], atol=2e-6)


def test_learning_rate_warms_up_and_decays():
    config = small(steps=100, warmup_steps=10, learning_rate=2.0)
    rate = [float(learning_rate(config)(t)) for t in range(1, 101)]
    check_close("warm-up", rate[:10], 0.2 * np.arange(1, 11), rtol=1e-6)
    assert all(a > b for a, b in itertools.pairwise(rate[9:]))
    check_close("last", rate[-1], 0.2, rtol=1e-5)


def test_decay_leaves_norms_alone():
    mask = decayed(init_state(small()).params)
    flat = {
        jax.tree_util.keystr(path): on for path, on in jax.tree_util.tree_leaves_with_path(mask)
    }
    assert {name for name, on in flat.items() if not on} == {
        name for name in flat if "norm" in name
    }
    assert sum(not on for on in flat.values()) == 5


def test_clipping(rng):
    config = small(clip=0.5)
    grads = {"w": jnp.asarray(rng.standard_normal((4, 4)), jnp.float32) * 100}
    clipped, _ = optax.clip_by_global_norm(config.clip).update(grads, None)
    check_close("norm", global_norm(clipped), 0.5, rtol=1e-6)


def test_accumulation_is_the_mean_over_all_targets(rng):
    """Two batches with a different number of targets equal one batch of both."""
    config = small(batch_size=4, accumulate=2)
    batch = batch_of(rng, config, parts=2)
    state, metrics = make_train_step(config)(init_state(config), batch)
    whole = small(batch_size=8)
    joined = jax.tree.map(lambda x: x.reshape(1, 8, -1), batch)
    want_state, want = make_train_step(whole)(init_state(whole), joined)
    check_close("loss", metrics["loss"], want["loss"], rtol=1e-6)
    check_close("norm", metrics["grad_norm"], want["grad_norm"], rtol=1e-5)
    means = [
        float(total / count)
        for total, count in (
            loss_sum(init_state(config).params, Batch(t, y, None), config)
            for t, y in zip(batch.tokens, batch.targets, strict=True)
        )
    ]
    assert abs(np.mean(means) - float(want["loss"])) > 1e-5  # the mean of means is another number
    # Adam divides by |g|: compare the moments, not the parameters.
    for got, ref in zip(
        jax.tree.leaves(state.opt_state), jax.tree.leaves(want_state.opt_state), strict=True
    ):
        check_close("moments", got, ref, atol=1e-6)


def test_the_state_is_donated(rng):
    config = small()
    state = init_state(config)
    make_train_step(config)(state, batch_of(rng, config))
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_evaluation_leaves_the_extras_out(rng):
    config = small(z_loss=0.1, label_smoothing=0.2)
    params = init_state(config).params
    batch = jax.tree.map(lambda x: x[0], batch_of(rng, config))
    plain = make_eval_step(small())(params, batch)
    check_equal("sum", make_eval_step(config)(params, batch)[0], plain[0])
    assert float(loss_sum(params, batch, config)[0]) > float(plain[0]) + 1


def test_large_vocabulary_uses_the_chunked_loss(rng):
    config = small()
    params = init_state(config).params
    batch = jax.tree.map(lambda x: x[0], batch_of(rng, config))
    big = dataclasses.replace(config, model=dataclasses.replace(SMALL, vocab_size=8192))
    wide = init_state(big).params
    text = jax.jit(lambda p: loss_sum(p, batch, big)[0]).lower(wide).as_text()
    assert "while" in text
    assert "while" not in jax.jit(lambda p: loss_sum(p, batch, config)[0]).lower(params).as_text()
    want = small()
    want = dataclasses.replace(want, model=dataclasses.replace(SMALL, vocab_size=8191))
    cut = {**wide, "embedding": wide["embedding"][:-1], "head": wide["head"][:, :-1]}
    got, near = loss_sum(wide, batch, big)[0], loss_sum(cut, batch, want)[0]
    check_close("loss", got, near, rtol=1e-3)


def losses(name, steps, **given):
    """The first losses of the default run, on the default text, through one attention."""
    config = make_config("tiny", {"steps": 200, "attention": name, **given})
    corpus = load_corpus(config)
    state, step = init_state(config), make_train_step(config)
    values = []
    for i in range(steps):
        batch = corpus.train_batch(config.seed, i, config.batch_size)
        state, metrics = step(state, jax.tree.map(lambda x: x[None], batch))
        values.append(metrics["loss"])
    return np.array(values, np.float64)


def test_20_steps_agree():
    short = {"seq_len": 64, "batch_size": 4}
    want = losses("xla", 20, **short)
    assert want[-1] < want[0] - 1.0  # it learns
    for name in ("native", "jax"):
        check_close(name, losses(name, 20, **short), want, atol=1e-4)


@pytest.mark.slow
def test_20_steps_agree_on_packed_documents():
    short = {"seq_len": 96, "batch_size": 4, "pack_documents": True}
    want = losses("xla", 20, **short)
    for name in ("native", "jax"):
        check_close(name, losses(name, 20, **short), want, atol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_200_steps_agree():
    want = losses("xla", 200)
    assert want[-10:].mean() < 2.0
    for name in ("native", "jax"):
        check_close(name, losses(name, 200), want, atol=1e-3)
