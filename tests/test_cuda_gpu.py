"""Facts that only a GPU can show: grid limits, 64-bit offsets, bitwise reruns, command buffers.

pytest --backend cuda tests/test_cuda_gpu.py
"""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jax_flashtrain import explain, flash_attention

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def _arrays(shape, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(3), 4)
    return [jax.random.normal(k, shape, jnp.float32).astype(dtype) for k in keys]


def _all(q, k, v, do, **options):
    """o, dq, dk, dv of the native kernels."""

    @jax.jit
    def f(q, k, v, do):
        attend = lambda *x: flash_attention(*x, implementation="native", **options)  # noqa: E731
        o, pull = jax.vjp(attend, q, k, v)
        return (o, *pull(do))

    return f(q, k, v, do)


def _same(a, b):
    return all(bool(jnp.array_equal(x, y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("shape", [(80000, 16, 1, 16), (1, 10, 65536, 16)])
def test_more_batches_and_heads_than_a_grid_dimension_holds(shape):
    arrays = _arrays(shape)
    last = [x[-1:, :, -1:] for x in arrays]
    got = [x[-1:, :, -1:] for x in _all(*arrays, causal=True)]
    assert _same(got, _all(*last, causal=True))


@pytest.mark.parametrize("shape", [(1600, 729, 16, 72), (2200, 1024, 16, 64)])
def test_offsets_beyond_32_bits(shape):
    arrays = [_arrays((*shape[:1], 1, *shape[2:]))[0]] * 4
    arrays = [jnp.broadcast_to(x, shape) + jnp.arange(shape[1], dtype=x.dtype)[:, None, None] / 512
              for x in arrays]  # fmt: skip
    last = [x[-1:] for x in arrays]
    for got, want in zip(_all(*arrays), _all(*last), strict=True):
        # dq may be added up in another order.
        error = jnp.linalg.norm((got[-1:] - want).astype(jnp.float32))
        assert error <= 4e-3 * jnp.linalg.norm(want.astype(jnp.float32))
    exact = [x[-1:] for x in _all(*arrays, deterministic=True)]
    assert _same(exact, _all(*last, deterministic=True))


def test_no_keys():
    """Sk = 0 returns zeros on every road, and returns at all."""
    q, _, _, do = _arrays((2, 4, 2, 16))
    none = jnp.zeros((2, 0, 2, 16), q.dtype)
    o, dq, dk, dv = _all(q, none, none, do)
    assert not o.any()
    assert not dq.any()
    assert dk.shape == dv.shape == none.shape


@pytest.mark.parametrize("Hkv", [8, 2])
def test_deterministic_reruns_are_bitwise_equal(Hkv):
    q, _, _, do = _arrays((4, 1024, 8, 128))
    _, k, v, _ = _arrays((4, 1024, Hkv, 128))
    first = _all(q, k, v, do, causal=True, deterministic=True)
    for _ in range(19):
        assert _same(first, _all(q, k, v, do, causal=True, deterministic=True))


def test_ten_calls_replay_with_new_inputs():
    @jax.jit
    def layers(q, k, v):
        for _ in range(10):
            q = flash_attention(q, k, v, causal=True, implementation="native")
        return q

    for seed in range(4):
        arrays = [x + jnp.asarray(seed / 8, x.dtype) for x in _arrays((2, 512, 4, 64))[:3]]
        eager = arrays[0]
        for _ in range(10):
            eager = flash_attention(eager, *arrays[1:], causal=True, implementation="native")
        assert bool(jnp.array_equal(layers(*arrays), eager))


def test_explain_names_a_kernel_and_the_reason():
    shape = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)
    assert explain(shape, shape, shape, platform="cuda").kernel.startswith("cuda_")
    large = jax.ShapeDtypeStruct((2, 64, 4, 300), jnp.bfloat16)
    assert explain(large, large, large, platform="cuda").reason == (
        "the CUDA kernels take head sizes up to 256, got 300"
    )


@pytest.mark.parametrize("start", range(0, 1000, 125))
def test_random_calls(start):
    script = pathlib.Path(__file__).parent / "cuda" / "draws.py"
    done = subprocess.run(
        [sys.executable, str(script), "--start", str(start), "--count", "125"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
