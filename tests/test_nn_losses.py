"""Cross entropy: formula, ignored targets, z-loss, smoothing; the chunked form against it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from tolerances import check_close, check_equal

from jax_flashtrain.nn import (
    cross_entropy,
    cross_entropy_sum,
    linear_cross_entropy,
    linear_cross_entropy_sum,
)

OPTIONS = [{}, {"z_loss": 1e-2}, {"label_smoothing": 0.1}, {"z_loss": 1e-2, "label_smoothing": 0.2}]


def oracle(logits, targets, counts, z_loss=0.0, label_smoothing=0.0):
    """(mean loss, gradient) in float64, from the formula, with explicit one-hot rows."""
    z = np.asarray(logits, np.float64)
    n, vocab = z.shape
    top = z.max(axis=1, keepdims=True)
    lse = (top + np.log(np.exp(z - top).sum(axis=1, keepdims=True)))[:, 0]
    want = np.zeros((n, vocab))
    want[counts, np.asarray(targets)[counts]] = 1.0 - label_smoothing
    want[counts] += label_smoothing / vocab
    count = max(int(counts.sum()), 1)
    rows = lse - (want * z).sum(axis=1) + z_loss * lse**2
    p = np.exp(z - lse[:, None])
    grad = (p * (1 + 2 * z_loss * lse[:, None]) - want) * counts[:, None] / count
    return float((rows * counts).sum() / count), grad


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ignore_id", [-100, 2, 2**32 - 1])
def test_value_and_gradient(rng, options, ignore_id):
    logits = (3 * rng.standard_normal((9, 7))).astype(np.float32)
    targets = rng.integers(0, 7, 9)
    targets[[1, 4]] = ignore_id
    counts = targets != ignore_id
    dtype = np.uint32 if ignore_id > 2**31 else np.int32
    value, grad = jax.value_and_grad(cross_entropy)(
        jnp.asarray(logits), jnp.asarray(targets.astype(dtype)), ignore_id=ignore_id, **options
    )
    want, want_grad = oracle(logits, targets, counts, **options)
    check_close("loss", value, want, rtol=2e-6)
    check_close("gradient", grad, want_grad, atol=2e-7)
    check_equal("ignored rows", grad[~counts], np.zeros_like(want_grad[~counts]))


def test_pad_of_all_ones_stored_as_int32(rng):
    logits = jnp.asarray(rng.standard_normal((3, 4)), jnp.float32)
    as_int = cross_entropy(logits, jnp.array([1, -1, 2]), ignore_id=2**32 - 1)
    check_equal("loss", as_int, cross_entropy(logits, jnp.array([1, -1, 2]), ignore_id=-1))


@pytest.mark.parametrize("loss", [cross_entropy_sum, linear_cross_entropy_sum])
def test_an_id_that_a_narrow_type_cannot_hold(loss):
    """-100 as uint8 is 156, which is a token."""
    targets = jnp.array([156, 3], jnp.uint8)
    arguments = (jnp.zeros((2, 256)),)
    if loss is linear_cross_entropy_sum:
        arguments = (jnp.zeros((2, 4)), jnp.zeros((4, 256)))
    with pytest.raises(ValueError, match=r"ignore_id must fit .* uint8, got -100"):
        loss(*arguments, targets, ignore_id=-100)
    assert float(loss(*arguments, targets, ignore_id=156)[1]) == 1
    assert float(loss(*arguments, targets.astype(jnp.int32), ignore_id=-100)[1]) == 2


@pytest.mark.parametrize("fn", ["plain", "linear"])
def test_nothing_counts(fn):
    targets = jnp.full((4,), -100)
    if fn == "plain":
        value, grad = jax.value_and_grad(cross_entropy)(jnp.ones((4, 5)), targets, ignore_id=-100)
    else:
        value, grad = jax.value_and_grad(linear_cross_entropy)(
            jnp.ones((4, 3)), jnp.ones((3, 5)), targets, ignore_id=-100
        )
    check_equal("loss", value, 0.0)
    check_equal("gradient", grad, np.zeros(grad.shape))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_ignored_rows_may_hold_anything(rng, bad):
    logits = rng.standard_normal((4, 5)).astype(np.float32)
    targets = jnp.array([1, -1, 3, -1])
    clean = jax.value_and_grad(cross_entropy)(jnp.asarray(logits), targets, ignore_id=-1)
    logits[[1, 3]] = bad
    dirty = jax.value_and_grad(cross_entropy)(jnp.asarray(logits), targets, ignore_id=-1)
    check_equal("loss", dirty[0], clean[0])
    check_equal("gradient", dirty[1], clean[1])

    hidden, weight = rng.standard_normal((4, 3)), jnp.asarray(rng.standard_normal((3, 5)))
    fn = jax.value_and_grad(linear_cross_entropy, (0, 1))
    clean = fn(jnp.asarray(hidden, jnp.float32), weight, targets, ignore_id=-1, chunk=3)
    hidden[[1, 3]] = bad
    dirty = fn(jnp.asarray(hidden, jnp.float32), weight, targets, ignore_id=-1, chunk=3)
    for name, got, want in zip(
        ("loss", "dhidden", "dweight"), jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True
    ):
        check_equal(name, got, want)


@pytest.mark.parametrize("target", [7, -3])
def test_target_outside_the_vocabulary_is_never_clamped(target):
    targets = jnp.array([0, target])
    assert np.isnan(cross_entropy(jnp.zeros((2, 7)), targets))
    assert np.isnan(linear_cross_entropy(jnp.zeros((2, 3)), jnp.zeros((3, 7)), targets))


def test_large_logits_do_not_overflow():
    logits = jnp.array([[1e4, 0.0, -1e4], [-3e38, 3e38, 0.0]])
    value, grad = jax.value_and_grad(cross_entropy)(logits, jnp.array([0, 1]))
    check_close("loss", value, 0.0, atol=1e-6)
    assert np.isfinite(grad).all()


def test_sums_add_up_over_parts_of_different_size(rng):
    """The mean over everything, not the mean of the parts' means."""
    logits = jnp.asarray(rng.standard_normal((10, 6)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 6, 10)).at[7].set(-1)
    parts = [
        cross_entropy_sum(logits[s], targets[s], ignore_id=-1) for s in (slice(3), slice(3, 10))
    ]
    total, count = (sum(column) for column in zip(*parts, strict=True))
    assert int(count) == 9
    check_close("loss", total / count, cross_entropy(logits, targets, ignore_id=-1), rtol=1e-6)


def test_bfloat16_logits(rng):
    logits = jnp.asarray(rng.standard_normal((8, 50)), jnp.bfloat16)
    targets = jnp.asarray(rng.integers(0, 50, 8))
    value, grad = jax.value_and_grad(cross_entropy)(logits, targets)
    assert value.dtype == jnp.float32
    assert grad.dtype == jnp.bfloat16
    want, want_grad = oracle(logits.astype(jnp.float32), targets, np.ones(8, bool))
    check_close("loss", value, want, rtol=2e-6)
    check_close("gradient", grad, want_grad, rtol=2**-8, atol=1e-7)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 5, 1000])
def test_linear_form_equals_the_plain_one(rng, options, chunk):
    hidden = jnp.asarray(rng.standard_normal((2, 7, 6)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((6, 11)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 11, (2, 7))).at[0, 3].set(-100)

    def plain(hidden, weight):
        return 3.0 * cross_entropy(hidden @ weight, targets, ignore_id=-100, **options)

    def chunked(hidden, weight):
        return 3.0 * linear_cross_entropy(
            hidden, weight, targets, ignore_id=-100, chunk=chunk, **options
        )

    want = jax.value_and_grad(plain, (0, 1))(hidden, weight)
    got = jax.jit(jax.value_and_grad(chunked, (0, 1)))(hidden, weight)
    check_close("value without gradient", chunked(hidden, weight), want[0], rtol=1e-6)
    check_close("value", got[0], want[0], rtol=1e-6)
    check_close("dhidden", got[1][0], want[1][0], atol=1e-6)
    check_close("dweight", got[1][1], want[1][1], atol=1e-6)


def test_linear_form_against_finite_differences(rng):
    hidden = jnp.asarray(rng.standard_normal((5, 3)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((3, 4)), jnp.float32)
    targets = jnp.array([0, 3, -1, 2, 1])

    def loss(hidden, weight):
        return linear_cross_entropy(
            hidden, weight, targets, ignore_id=-1, chunk=2, z_loss=0.01, label_smoothing=0.1
        )

    check_grads(loss, (hidden, weight), 1, ["rev"], rtol=2e-2, atol=2e-3)


def test_linear_form_never_holds_all_logits():
    tokens, dim, vocab, chunk = 512, 8, 4096, 32
    fn = jax.jit(jax.grad(lambda h, w, t: linear_cross_entropy(h, w, t, chunk=chunk), (0, 1)))
    arguments = (
        jax.ShapeDtypeStruct((tokens, dim), jnp.float32),
        jax.ShapeDtypeStruct((dim, vocab), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    compiled = fn.lower(*arguments).compile()
    assert f"{tokens},{vocab}" not in compiled.as_text()
    # A few chunks of logits and the weight's gradient; all logits would be 8 MiB.
    assert compiled.memory_analysis().temp_size_in_bytes < 3 << 20


def test_linear_form_in_bfloat16_keeps_float32_weights(rng):
    hidden = jnp.asarray(rng.standard_normal((64, 16)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((16, 32)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 32, 64))
    value, (dh, dw) = jax.value_and_grad(linear_cross_entropy, (0, 1))(
        hidden, weight, targets, chunk=16
    )
    assert (value.dtype, dh.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    want, (dh64, dw64) = jax.value_and_grad(
        lambda h, w: cross_entropy(h @ w, targets), (0, 1)
    )(hidden.astype(jnp.float32), weight)  # fmt: skip
    check_close("loss", value, want, rtol=1e-2)
    check_close("dhidden", dh, dh64, atol=2e-2 * float(jnp.abs(dh64).max()))
    check_close("dweight", dw, dw64, atol=2e-2 * float(jnp.abs(dw64).max()))


def test_sharded_batch_needs_no_gather(rng):
    """Tokens split over devices stay split; the only collectives are sums."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    hidden = jnp.asarray(rng.standard_normal((16, 8, 6)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((6, 11)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 11, (16, 8))).at[0].set(-1)
    fn = jax.jit(
        jax.value_and_grad(
            lambda h, w, t: linear_cross_entropy(h, w, t, ignore_id=-1, chunk=32), (0, 1)
        ),
        in_shardings=(split, whole, split),
    )
    want = jax.value_and_grad(lambda h, w: cross_entropy(h @ w, targets, ignore_id=-1), (0, 1))(
        hidden, weight
    )
    got = fn(hidden, weight, targets)
    for name, g, w in zip(
        ("loss", "dh", "dw"), jax.tree.leaves(got), jax.tree.leaves(want), strict=True
    ):
        check_close(name, g, w, atol=2e-6)
    text = fn.lower(hidden, weight, targets).compile().as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text
    assert "all-to-all" not in text


def test_linear_form_inside_shard_map(rng):
    """Tokens split by hand, the weight replicated, check_vma on."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    split, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    hidden = jnp.asarray(rng.standard_normal((8, 6)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((6, 11)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 11, 8)).at[1].set(-1)

    def local(h, w, t):
        total, count = linear_cross_entropy_sum(h, w, t, ignore_id=-1, chunk=2)
        return jax.lax.psum(total, "data") / jax.lax.psum(count, "data")

    loss = jax.shard_map(local, mesh=mesh, in_specs=(split, whole, split), out_specs=whole)
    got = jax.jit(jax.value_and_grad(lambda h, w: loss(h, w, targets), (0, 1)))(hidden, weight)
    want = jax.value_and_grad(lambda h, w: cross_entropy(h @ w, targets, ignore_id=-1), (0, 1))(
        hidden, weight
    )
    for name, g, w in zip(
        ("loss", "dh", "dw"), jax.tree.leaves(got), jax.tree.leaves(want), strict=True
    ):
        check_close(name, g, w, atol=2e-6)


def test_errors():
    with pytest.raises(ValueError, match=r"targets must have the shape .* \(4,\), got \(3,\)"):
        cross_entropy(jnp.zeros((4, 5)), jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeError, match="targets must be integers, got float32"):
        cross_entropy(jnp.zeros((4, 5)), jnp.zeros(4))
    with pytest.raises(ValueError, match=r"weight must have the shape \[3, vocab\], got \(5, 3\)"):
        linear_cross_entropy(jnp.zeros((4, 3)), jnp.zeros((5, 3)), jnp.zeros(4, jnp.int32))
    targets = jnp.zeros(4, jnp.int32)
    for loss, arrays in (
        (cross_entropy, (jnp.zeros((4, 5)),)),
        (linear_cross_entropy, (jnp.zeros((4, 3)), jnp.zeros((3, 5)))),
    ):
        for options, text in (
            ({"z_loss": -1e-4}, "z_loss must not be negative, got -0.0001"),
            ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\), got 1.0"),
            ({"label_smoothing": -0.1}, r"label_smoothing must be in \[0, 1\), got -0.1"),
        ):
            with pytest.raises(ValueError, match=text):
                loss(*arrays, targets, **options)
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        linear_cross_entropy(jnp.zeros((4, 3)), jnp.zeros((3, 5)), targets, chunk=0)
    total, count = linear_cross_entropy_sum(
        jnp.zeros((0, 3)), jnp.zeros((3, 5)), jnp.zeros(0, jnp.int32)
    )
    assert (float(total), float(count)) == (0.0, 0.0)
