"""Rotary embedding: exact tables at a million, both pairings, starts, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from tolerances import check_close, check_equal

from jax_flashtrain.nn import LlamaScaling, rope, rope_frequencies, rope_tables, rotate

HUGE = np.array([0, 1, 5, 4095, 4096, 999_999, 1_000_000, 16_777_217, 2**31 - 1], np.int32)


def exact(positions, head_dim, base, scaling=None):
    """cos and sin in extended precision."""
    frequencies = rope_frequencies(head_dim, base=base, scaling=scaling).astype(np.longdouble)
    angle = positions.astype(np.longdouble)[..., None] * frequencies
    return np.cos(angle).astype(np.float64), np.sin(angle).astype(np.float64)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("scaling", [None, 4.0, LlamaScaling()])
def test_tables_are_exact_at_a_million(base, scaling):
    got = jax.jit(lambda p: rope_tables(p, 64, base=base, scaling=scaling))(HUGE)
    for name, g, want in zip(("cos", "sin"), got, exact(HUGE, 64, base, scaling), strict=True):
        assert g.dtype == jnp.float32
        check_close(name, g, want, atol=1e-6)


def test_plain_float32_would_fail():
    angle = HUGE.astype(np.float32)[:, None] * rope_frequencies(64).astype(np.float32)
    assert np.abs(np.cos(angle) - exact(HUGE, 64, 10000.0)[0]).max() > 1e-3


def test_negative_positions_turn_back():
    positions = np.array([-3, -1_000_000], np.int32)
    for g, want in zip(rope_tables(positions, 8), exact(positions, 8, 10000.0), strict=True):
        check_close("table", g, want, atol=1e-6)


def test_frequencies_by_formula():
    want = [500000.0 ** (-2 * i / 8) for i in range(4)]
    check_close("base", rope_frequencies(8, base=500000.0), want, rtol=1e-15)
    check_close(
        "linear", rope_frequencies(8, base=500000.0, scaling=4.0), np.array(want) / 4, rtol=1e-15
    )


def test_llama_scaling_by_wavelength():
    plain = rope_frequencies(128, base=500000.0)
    scaled = rope_frequencies(128, base=500000.0, scaling=LlamaScaling(8.0, 1.0, 4.0, 8192))
    wavelength = 2 * np.pi / plain
    check_equal("short waves stay", scaled[wavelength < 2048], plain[wavelength < 2048])
    check_close("long waves", scaled[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-15)
    between = (wavelength > 2048) & (wavelength < 8192)
    assert between.any()
    assert (scaled < plain)[between].all()
    assert (scaled > plain / 8)[between].all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_every_pair_turns_by_its_angle(rng, interleaved):
    x = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
    got = rope(jnp.asarray(x), 7, interleaved=interleaved)
    cos, sin = exact(np.arange(7, 12), 8, 10000.0)
    want = np.empty_like(x)
    for pair in range(4):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 4)
        c, s = cos[:, None, pair], sin[:, None, pair]
        want[..., a] = x[..., a] * c - x[..., b] * s
        want[..., b] = x[..., b] * c + x[..., a] * s
    check_close("y", got, want, atol=1e-6)


def test_scores_depend_on_the_distance_only(rng):
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 64)), jnp.float32) for _ in range(2))

    def score(i, j):
        return float(jnp.sum(rope(q, i) * rope(k, j)))

    assert score(1_000_003, 1_000_000) == pytest.approx(score(3, 0), abs=1e-4)
    assert abs(score(3, 0) - score(9, 0)) > 1e-2


def test_starts_traced_and_per_batch(rng):
    x = jnp.asarray(rng.standard_normal((3, 4, 2, 6)), jnp.float32)
    starts = jnp.array([0, 11, 4])
    one_by_one = jnp.stack([rope(x[b], int(starts[b])) for b in range(3)])
    check_close("per batch", rope(x, starts), one_by_one, atol=1e-6)
    check_close("traced per batch", jax.jit(rope)(x, starts), one_by_one, atol=1e-6)
    check_close("traced scalar", jax.jit(rope)(x, 5), rope(x, 5), atol=1e-6)
    check_close("vmapped", jax.vmap(rope)(x, starts), one_by_one, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_backward_is_the_inverse_turn(rng, interleaved):
    x, dy = (jnp.asarray(rng.standard_normal((4, 2, 8)), jnp.float32) for _ in range(2))
    (dx,) = jax.vjp(lambda x: rope(x, 9, interleaved=interleaved), x)[1](dy)
    cos, sin = rope_tables(jnp.arange(9, 13), 8)
    check_close("dx", dx, rotate(dy, cos, -sin, interleaved=interleaved), atol=1e-6)
    check_grads(lambda x: rope(x, 9, interleaved=interleaved), (x,), 2, ["rev"], rtol=1e-2)


def test_bfloat16_rounds_once(rng):
    x = jnp.asarray(rng.standard_normal((5, 2, 16)), jnp.bfloat16)
    got = rope(x, 3)
    assert got.dtype == jnp.bfloat16
    check_equal("y", got, rope(x.astype(jnp.float32), 3).astype(jnp.bfloat16))


def test_errors_show_the_numbers():
    x = jnp.zeros((4, 2, 8))
    with pytest.raises(ValueError, match=r"head_dim must be even and at least 2, got 7"):
        rope(jnp.zeros((4, 2, 7)))
    with pytest.raises(ValueError, match=r"got 30 \+ 4 > 32"):
        rope(x, 30, max_positions=32)
    with pytest.raises(ValueError, match=r"got 29 \+ 4 > 32"):
        rope(x[None], jnp.array([29]), max_positions=32)
    rope(x, 28, max_positions=32)
    with pytest.raises(ValueError, match=r"shape \[\.\.\., seq, heads, head_dim\], got \(4, 8\)"):
        rope(jnp.zeros((4, 8)))
    with pytest.raises(ValueError, match="start must not be negative, got -1"):
        rope(x, -1)
    with pytest.raises(ValueError, match=r"start must have shape \[\] or \(\).*got \(3,\)"):
        rope(x, jnp.arange(3))
    with pytest.raises(TypeError, match="start must be integers, got float32"):
        rope(x, jnp.float32(1.0))
    with pytest.raises(TypeError, match="positions must be integers, got float32"):
        rope_tables(jnp.zeros(3), 8)
    with pytest.raises(ValueError, match="base must be positive, got -1"):
        rope(x, base=-1)
