"""Ring attention over virtual devices: the numbers of one device, and nothing gathered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tolerances import check_close

from jax_flashtrain import flash_attention
from jax_flashtrain.distributed import (
    from_zigzag,
    local_positions,
    ring_attention,
    to_zigzag,
    zigzag_positions,
)
from jax_flashtrain.distributed.schedule import Band, plan

B, S, HQ, HKV, D = 2, 32, 4, 2, 8
AXIS = "context"
SEQUENCE = P(None, AXIS)
ORDERS = ["contiguous", "zigzag"]


def mesh_of(n):
    if len(jax.devices()) < n and jax.default_backend() == "gpu":
        pytest.skip(f"needs {n} devices")
    return jax.sharding.Mesh(np.array(jax.devices()[:n]), (AXIS,))


def draw(seed=0, Sq=S, Sk=S):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    return {"q": normal(B, Sq, HQ, D), "k": normal(B, Sk, HKV, D), "v": normal(B, Sk, HKV, D)}


SEGMENTS = np.repeat([[0, 1, 1, 2], [0, 0, 0, 3]], S // 4, axis=1).astype(np.int32)
RNG = np.random.default_rng(5)
#: name -> (static options, arrays, specification of each array)
CASES = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {}),
    "window": ({"causal": True, "window": (5, 0)}, {}),
    "wide window": ({"window": (9, 6), "softcap": 3.0}, {}),
    "offset hides all of some rows": ({"causal": True, "q_offset": -7}, {}),
    "alibi": ({"causal": True}, {"alibi_slopes": np.float32([0.5, 0.2, 0.1, 0.01])}),
    "sinks": ({"causal": True}, {"sinks": np.float32([0.5, -1.0, 2.0, 0.0])}),
    "bias": ({"causal": True}, {"bias": RNG.standard_normal((1, HQ, S, S)).astype(np.float32)}),
    "bias of columns": ({}, {"bias": RNG.standard_normal((B, 1, 1, S)).astype(np.float32)}),
    "mask": ({}, {"mask": RNG.random((B, 1, S, S)) < 0.6}),
    "segments": ({"causal": True}, {"segment_ids": SEGMENTS}),
    "dropout": ({"causal": True, "dropout_rate": 0.3, "dropout_key": 7}, {}),
}
#: Where each array is cut. Rows of bias and mask are those of the shard, if there are several.
CUT = {"segment_ids": SEQUENCE, "alibi_slopes": P(), "sinks": P()}


def cut_of(name, x):
    if name in ("bias", "mask"):
        return P(None, None, AXIS if x.shape[-2] > 1 else None)
    return CUT[name]


def outputs(attend, x, arrays):
    """o, L and the gradients of everything that has one, of a loss that uses o and L."""
    floats = {n: a for n, a in arrays.items() if n in ("bias", "sinks", "alibi_slopes")}
    rest = {n: a for n, a in arrays.items() if n not in floats}

    def loss(x, floats):
        o, lse = attend(x["q"], x["k"], x["v"], floats | rest)
        seen = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return (jnp.sin(3 * o)).sum() + 0.1 * (seen**2).sum(), (o, lse)

    (_, (o, lse)), (dx, dfloats) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, floats)
    return {"o": o, "lse": lse} | {f"d{n}": g for n, g in (dx | dfloats).items()}


def options_of(static):
    static = dict(static)
    if "dropout_key" in static:
        static["dropout_key"] = jax.random.key(static["dropout_key"])
    return static


def ring(mesh, order, static, x, arrays):
    """The same through the ring, everything laid out and brought back."""
    n = mesh.devices.size
    zigzag = order == "zigzag"
    rows = {"segment_ids": 1, "bias": -2, "mask": -2}

    def laid(name, a, axis):
        return to_zigzag(a, n, axis) if zigzag and a.shape[axis] > 1 else a

    def attend(q, k, v, arrays):
        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(SEQUENCE, SEQUENCE, SEQUENCE, {m: cut_of(m, a) for m, a in arrays.items()}),
            out_specs=(SEQUENCE, P(None, None, AXIS)),
        )
        def local(q, k, v, arrays):
            return ring_attention(
                q,
                k,
                v,
                axis_name=AXIS,
                order=order,
                return_lse=True,
                **options_of(static),
                **arrays,
            )

        return local(q, k, v, arrays)

    x = {m: laid(m, a, 1) for m, a in x.items()}
    arrays = {m: laid(m, a, rows[m]) if m in rows else a for m, a in arrays.items()}
    got = jax.jit(functools.partial(outputs, attend))(x, arrays)
    if zigzag:
        back = {"o": 1, "dq": 1, "dk": 1, "dv": 1, "lse": 2, "dbias": 2}
        for name, axis in back.items():
            if name in got and got[name].shape[axis] > 1:
                got[name] = from_zigzag(got[name], n, axis)
    return got


def whole(static, x, arrays):
    def attend(q, k, v, arrays):
        return flash_attention(q, k, v, return_lse=True, **options_of(static), **arrays)

    return jax.jit(functools.partial(outputs, attend))(x, arrays)


def compare(got, want):
    assert got.keys() == want.keys()
    for name in want:
        check_close(name, np.asarray(got[name]), np.asarray(want[name]), atol=2e-5, rtol=2e-5)


QUICK_ZIGZAG = ("causal", "bias", "dropout", "segments", "sinks")


@pytest.mark.parametrize(
    ("name", "order"),
    [(name, "contiguous") for name in CASES]
    + [
        pytest.param(name, "zigzag", marks=() if name in QUICK_ZIGZAG else pytest.mark.slow)
        for name in CASES
    ],
)
def test_ring_gives_the_numbers_of_one_device(name, order):
    static, arrays = CASES[name]
    x = draw()
    compare(ring(mesh_of(4), order, static, x, arrays), whole(static, x, arrays))


@pytest.mark.parametrize(
    ("n", "order"),
    [(1, "contiguous"), (2, "zigzag"), (8, "contiguous"), (8, "zigzag")],  # the last skips steps
)
def test_any_number_of_shards(n, order):
    static = {"causal": True, "window": (3, 0)}
    x = draw(1)
    compare(ring(mesh_of(n), order, static, x, {}), whole(static, x, {}))


@pytest.mark.parametrize(("Sq", "Sk"), [(16, 48), (48, 16)])
@pytest.mark.parametrize("order", ORDERS)
def test_unequal_lengths(Sq, Sk, order):
    """Bottom right: with more queries than keys the first rows see nothing, and stay empty."""
    x = draw(2, Sq, Sk)
    got = ring(mesh_of(4), order, {"causal": True}, x, {})
    compare(got, whole({"causal": True}, x, {}))
    if Sq > Sk:
        assert np.isneginf(np.asarray(got["lse"])[:, :, : Sq - Sk]).all()


def test_nothing_leaks_from_rows_without_keys(implementation):
    """With a sink their L is the sink; NaN in their do must reach nothing."""
    x = draw(4)
    sinks = np.float32([0.5, -1.0, 2.0, 0.0])
    empty = [3, 17]  # in the same tiles as rows that see keys
    mask = np.ones((1, 1, S, S), bool)
    mask[:, :, empty] = False
    rows = P(None, None, AXIS)

    def attend(q, k, v):
        def local(q, k, v, mask):
            options = {"sinks": sinks, "mask": mask, "implementation": implementation}
            return ring_attention(q, k, v, axis_name=AXIS, causal=True, **options)

        cut = (SEQUENCE, SEQUENCE, SEQUENCE, rows)
        return jax.shard_map(local, mesh=mesh_of(4), in_specs=cut, out_specs=SEQUENCE)(
            q, k, v, mask
        )

    o, pullback = jax.vjp(jax.jit(attend), *x.values())
    assert not np.asarray(o)[:, empty].any()
    do = np.ones_like(o)
    clean = pullback(jnp.asarray(do))
    do[:, empty] = np.nan
    for a, b in zip(pullback(jnp.asarray(do)), clean, strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))
        assert np.isfinite(np.asarray(b)).all()


def test_lengths_are_those_of_the_whole_sequence():
    static = {"causal": True}
    lengths = {"q_lengths": np.int32([32, 9]), "kv_lengths": np.int32([20, 13])}
    x = draw(3)
    got = ring_with_lengths(mesh_of(4), static, x, lengths)
    compare(got, whole(static, x, lengths))


def ring_with_lengths(mesh, static, x, lengths):
    def attend(q, k, v, arrays):
        local = functools.partial(ring_attention, axis_name=AXIS, return_lse=True, **static)
        return jax.shard_map(
            lambda q, k, v, arrays: local(q, k, v, **arrays),
            mesh=mesh,
            in_specs=(SEQUENCE, SEQUENCE, SEQUENCE, P()),
            out_specs=(SEQUENCE, P(None, None, AXIS)),
        )(q, k, v, arrays)

    return jax.jit(functools.partial(outputs, attend))(x, lengths)


def compiled_step(n, length, order="zigzag"):
    mesh = mesh_of(n)
    shape = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32,
                                 sharding=NamedSharding(mesh, SEQUENCE))  # fmt: skip

    def loss(q, k, v):
        attend = functools.partial(ring_attention, axis_name=AXIS, order=order, causal=True)
        o = jax.shard_map(attend, mesh=mesh, in_specs=(SEQUENCE,) * 3, out_specs=SEQUENCE)(q, k, v)
        return (o**2).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape).compile()


def test_only_permutes():
    text = compiled_step(4, 64).as_text()
    assert "collective-permute" in text
    for gathered in ("all-gather", "all-to-all", "reduce-scatter"):
        assert gathered not in text


def test_memory_per_device_falls_with_the_shards():
    sizes = {n: compiled_step(n, 4096).memory_analysis() for n in (2, 8)}  # of one device
    assert 4 * sizes[8].argument_size_in_bytes == sizes[2].argument_size_in_bytes
    assert sizes[8].temp_size_in_bytes < 0.26 * sizes[2].temp_size_in_bytes


def test_bfloat16():
    """Each step's share is rounded once: errors stay near those of one device."""
    x = {m: jnp.asarray(a, jnp.bfloat16) for m, a in draw(6).items()}
    static = {"causal": True}
    exact = whole(static, {m: a.astype(jnp.float32) for m, a in x.items()}, {})

    def errors(found):
        pairs = {m: (np.asarray(a, np.float64), np.asarray(exact[m])) for m, a in found.items()}
        return {m: np.linalg.norm(a - b) / np.linalg.norm(b) for m, (a, b) in pairs.items()}

    one = errors(whole(static, x, {}))
    for name, error in errors(ring(mesh_of(4), "contiguous", static, x, {})).items():
        assert error < 1.5 * one[name] + 1e-6, name


def test_zigzag_shares_the_work_of_a_causal_mask():
    """Visible pairs per shard: equal in the zigzag order (to 5 %), up to 2 n - 1 : 1 else."""

    def pairs(positions, n):
        return [int((p + 1).sum()) for p in positions.reshape(n, -1)]

    for n in (2, 4, 8):
        work = pairs(np.asarray(zigzag_positions(1024, n)), n)
        assert max(work) <= 1.05 * min(work)
        assert max(pairs(np.arange(1024), n)) > 2.5 * min(pairs(np.arange(1024), n))


def test_a_window_ends_the_ring_early():
    runs = plan("contiguous", 8, 16, 16, Band(-16, 0))
    assert max(run.last for run in runs) == 1


@pytest.mark.parametrize("order", ORDERS)
def test_local_positions(order):
    n = 4
    local = jax.shard_map(
        lambda x: local_positions(x.shape[0], AXIS, order),
        mesh=mesh_of(n), in_specs=P(AXIS), out_specs=P(AXIS),
    )  # fmt: skip
    want = zigzag_positions(S, n) if order == "zigzag" else np.arange(S)
    assert np.array_equal(local(jnp.zeros(S)), want)


def test_zigzag_and_back():
    x = np.arange(2 * 24 * 3).reshape(2, 24, 3)
    assert np.array_equal(from_zigzag(to_zigzag(x, 3), 3), x)
    assert np.array_equal(to_zigzag(x, 3)[0, :, 0] // 3, zigzag_positions(24, 3))


REFUSED = {
    "order": ({"order": "snake"}, ValueError, "ring_attention: order must be one of"),
    "autodiff": ({"autodiff": "jvp"}, NotImplementedError, 'ring_attention: autodiff must be None'),
    "columns": ({"bias": np.zeros((1, 1, 8, 8), np.float32)}, ValueError,
                r"ring_attention: bias must have the columns of the whole sequence \(32\) or 1"),
    "lengths": ({"order": "zigzag", "kv_lengths": np.int32([3, 4])}, NotImplementedError,
                "ring_attention: q_lengths and kv_lengths must be None in the zigzag order"),
    "keyword": ({"is_causal": True}, TypeError, "is_causal"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    options, error, text = REFUSED[name]
    x = draw()
    attend = functools.partial(ring_attention, axis_name=AXIS, **options)
    with pytest.raises(error, match=text):
        jax.shard_map(attend, mesh=mesh_of(4), in_specs=(SEQUENCE,) * 3, out_specs=SEQUENCE)(
            *x.values()
        )


def test_remat_by_name_runs_the_ring_once():
    """With output and row statistics kept by name, the backward makes no second forward."""
    attend = functools.partial(ring_attention, axis_name=AXIS, causal=True)
    cut = jax.shard_map(attend, mesh=mesh_of(4), in_specs=(SEQUENCE,) * 3, out_specs=SEQUENCE)

    def text(policy):
        step = jax.checkpoint(lambda *x: jnp.sin(cut(*x)).sum(), policy=policy)
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in draw().values()]
        return jax.jit(jax.value_and_grad(step, argnums=(0, 1, 2))).lower(*shapes).as_text()

    names = jax.checkpoint_policies.save_only_these_names("flashtrain_out", "flashtrain_lse")
    kept, again = (text(p).count("stablehlo.while") for p in (names, None))
    assert (kept, again) == (2, 3)
