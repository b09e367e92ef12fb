"""All-to-all over heads, its combination with the ring, and the wrapper that takes a mesh."""

import functools
import inspect

import checking
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_distributed import CASES, SEGMENTS, compare, options_of, outputs, whole

from jax_flashtrain import flash_attention
from jax_flashtrain.distributed import mesh_attention, ring_attention, ulysses_attention

B, S, HQ, HKV, D = 2, 32, 4, 2, 8
#: name -> (axes of the mesh, the arguments that say what they are for)
MESHES = {
    "ring 8": ({"r": 8}, {"ring": "r"}),
    "ulysses 4": ({"u": 4}, {"ulysses": "u"}),
    "ulysses 2, batch 2": ({"b": 2, "u": 2}, {"ulysses": "u", "batch": "b"}),
    "4x2": ({"r": 4, "u": 2}, {"ring": "r", "ulysses": "u"}),
    "2x2x2": ({"b": 2, "r": 2, "u": 2}, {"batch": "b", "ring": "r", "ulysses": "u"}),
    "2x2x2 heads": ({"b": 2, "r": 2, "h": 2}, {"batch": "b", "ring": "r", "heads": "h"}),
    "heads 2, batch 2": ({"b": 2, "h": 2}, {"batch": "b", "heads": "h"}),
}


def make(axes):
    n = int(np.prod(list(axes.values())))
    if len(jax.devices()) < n and jax.default_backend() == "gpu":
        pytest.skip(f"needs {n} devices")
    return jax.sharding.Mesh(np.array(jax.devices()[:n]).reshape(*axes.values()), tuple(axes))


def draw(seed=0, Sq=S, Sk=S, hq=HQ, hkv=HKV):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    return {"q": normal(B, Sq, hq, D), "k": normal(B, Sk, hkv, D), "v": normal(B, Sk, hkv, D)}


def on_mesh(name, static, x, arrays, **more):
    axes, roles = MESHES[name]

    def attend(q, k, v, arrays):
        return mesh_attention(q, k, v, mesh=make(axes), return_lse=True, **roles, **more,
                              **options_of(static), **arrays)  # fmt: skip

    return jax.jit(functools.partial(outputs, attend))(x, arrays)


CASES = CASES | {
    "mask of heads": ({}, {"mask": np.random.default_rng(1).random((1, HQ, S, S)) < 0.6}),
    "bias of heads": (
        {"causal": True},
        {"bias": np.random.default_rng(2).standard_normal((1, HQ, 1, S)).astype(np.float32)},
    ),
    "pair of segments": ({}, {"segment_ids": (SEGMENTS, SEGMENTS[::-1].copy())}),
    "lengths": (
        {"causal": True},
        {"q_lengths": np.int32([32, 9]), "kv_lengths": np.int32([20, 13])},
    ),
    "offsets": ({"causal": True}, {"q_offset": np.int32([-3, 5])}),
}
QUICK = {
    "ulysses 4": ("causal", "bias", "bias of heads", "dropout", "segments", "alibi"),
    "2x2x2": ("dropout", "sinks", "mask"),
    "2x2x2 heads": ("dropout",),
    "4x2": ("causal",),
    "ring 8": (),
    "ulysses 2, batch 2": ("lengths",),
    "heads 2, batch 2": ("alibi",),
}


@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        pytest.param(m, n, marks=() if n in QUICK[m] else pytest.mark.slow)
        for m in MESHES
        for n in CASES
    ],
)
def test_a_mesh_gives_the_numbers_of_one_device(mesh, name):
    static, arrays = CASES[name]
    x = draw()
    compare(on_mesh(mesh, static, x, arrays), whole(static, x, arrays))


ORACLE = {
    "causal": {"causal": True},
    "all gradients": {
        "causal": True,
        "softcap": 3.0,
        "bias": np.random.default_rng(8).standard_normal((1, 4, S, S)),
        "sinks": np.random.default_rng(9).standard_normal(4),
        "alibi_slopes": np.array([0.5, 0.2, 0.1, 0.01]),
    },
    "empty rows": {"causal": True, "q_offset": -9, "window": (12, 0)},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("mesh", "name", "order"),
    [
        ("ring 8", "causal", "zigzag"),
        ("4x2", "all gradients", "contiguous"),
        *(
            pytest.param(mesh, name, order, marks=pytest.mark.slow)
            for mesh in ("ring 8", "ulysses 4", "2x2x2", "2x2x2 heads")
            for name in ORACLE
            for order in ("contiguous", "zigzag")
        ),
    ],
)
def test_the_rule_of_the_suite_against_float64(monkeypatch, mesh, name, order, dtype):
    axes, roles = MESHES[mesh]
    attend = functools.partial(mesh_attention, mesh=make(axes), order=order, rearrange=True)
    monkeypatch.setattr(checking, "flash_attention", functools.partial(attend, **roles))
    given = {
        n: x.astype(checking.DTYPES[dtype] if n == "bias" else np.float32)
        if isinstance(x, np.ndarray)
        else x
        for n, x in ORACLE[name].items()
    }
    checking.check(checking.make_call(B=B, Sq=S, Hq=4, Hkv=2, D=16, dtype=dtype, **given))


def test_every_option_is_taken_or_refused():
    """A new option of the operator has to say what it is over a mesh."""
    more = {"scale": 0.3, "deterministic": True, "precision": "highest", "implementation": "jax",
            "q_offset": 2, "causal": True}  # fmt: skip
    tested = {name for static, arrays in CASES.values() for name in (*static, *arrays)}
    elsewhere = {"layout", "return_lse", "autodiff"}
    options = set(inspect.signature(flash_attention).parameters) - {"q", "k", "v"}
    assert options == tested | set(more) | elsewhere
    x = draw(6)
    compare(on_mesh("2x2x2", more, x, {}), whole(more, x, {}))


@pytest.mark.parametrize("name", ["ring 8", "4x2"])
def test_results_are_reproducible(name):
    axes, roles = MESHES[name]
    x = draw(7)

    def attend(q, k, v, arrays):
        return mesh_attention(q, k, v, mesh=make(axes), causal=True, return_lse=True, **roles)

    step = jax.jit(functools.partial(outputs, attend))
    first = jax.device_get(step(x, {}))
    for _ in range(3):
        for one, again in zip(*map(jax.tree.leaves, (first, step(x, {}))), strict=True):
            assert np.array_equal(one, again)


@pytest.mark.parametrize("mesh", ["2x2x2", pytest.param("4x2", marks=pytest.mark.slow)])
def test_zigzag_made_and_undone(mesh):
    static = {"causal": True, "window": (9, 0)}
    arrays = {"segment_ids": SEGMENTS, "bias": CASES["bias"][1]["bias"]}
    x = draw(1)
    got = on_mesh(mesh, static, x, arrays, order="zigzag", rearrange=True)
    compare(got, whole(static, x, arrays))


@pytest.mark.parametrize(
    ("hq", "hkv"),
    [(4, 1), (12, 3), pytest.param(8, 2, marks=pytest.mark.slow),
     pytest.param(12, 6, marks=pytest.mark.slow)],
)  # fmt: skip
def test_key_heads_that_do_not_divide(hq, hkv):
    """Replicated (1 over 4), or groups that lie across shards (3 and 6 over 4)."""
    x = draw(2, hq=hq, hkv=hkv)
    compare(on_mesh("ulysses 4", {"causal": True}, x, {}), whole({"causal": True}, x, {}))


def test_unequal_lengths_and_layout():
    x = draw(3, Sq=16, Sk=48)
    static = {"causal": True, "layout": "BNTH"}
    x = {name: np.swapaxes(a, 1, 2) for name, a in x.items()}
    compare(on_mesh("4x2", static, x, {}), whole(static, x, {}))


def test_traced_window_in_a_scan_with_remat():
    """One body for local and global layers; the residuals are kept by name."""
    x = draw(4)
    axes, roles = MESHES["2x2x2"]

    def model(attend, q):
        policy = jax.checkpoint_policies.save_only_these_names("flashtrain_out", "flashtrain_lse")

        @functools.partial(jax.checkpoint, policy=policy)
        def layer(q, left):
            return q + attend(q, x["k"], x["v"], causal=True, window=(left, None)), None

        return (jax.lax.scan(layer, q, jnp.array([5, -1], jnp.int32))[0] ** 2).sum()

    ours = functools.partial(mesh_attention, mesh=make(axes), **roles)
    got, want = (
        jax.jit(jax.grad(functools.partial(model, attend)))(x["q"])
        for attend in (ours, flash_attention)
    )
    np.testing.assert_allclose(got, want, atol=2e-4, rtol=2e-4)


def compiled(mesh, attend, length, cut, heads=8):
    shape = jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32,
                                 sharding=NamedSharding(mesh, cut))  # fmt: skip

    def loss(q, k, v):
        o = jax.shard_map(attend, mesh=mesh, in_specs=(cut,) * 3, out_specs=cut)(q, k, v)
        return (o**2).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape).compile()


def test_only_the_collectives_expected():
    u = make({"u": 4})
    text = compiled(u, functools.partial(ulysses_attention, axis_name="u", causal=True), 64,
                    P(None, "u")).as_text()  # fmt: skip
    assert "all-to-all" in text
    for other in ("all-gather", "collective-permute", "reduce-scatter"):
        assert other not in text
    both = make({"r": 2, "u": 2})
    attend = functools.partial(
        ulysses_attention, axis_name="u", ring_axis="r", order="zigzag", causal=True
    )
    text = compiled(both, attend, 64, P(None, ("r", "u"))).as_text()
    assert "all-to-all" in text
    assert "collective-permute" in text
    assert "all-gather" not in text


def test_memory_per_device_falls_with_the_shards():
    sizes = {}
    for n in (2, 8):
        mesh = make({"u": n})
        attend = functools.partial(ulysses_attention, axis_name="u", causal=True)
        sizes[n] = compiled(mesh, attend, 4096, P(None, "u")).memory_analysis()
    assert 4 * sizes[8].argument_size_in_bytes == sizes[2].argument_size_in_bytes
    assert sizes[8].temp_size_in_bytes < 0.29 * sizes[2].temp_size_in_bytes


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_permutes_do_not_wait_for_the_kernel(order):
    """In a step of the ring, forward and backward, the one permute reads what came in and not what
    is computed, so a compiler with asynchronous permutes may start it before the kernel and end it
    after (XLA for GPUs does: ``benchmarks/scaling.py --compile``)."""
    attend = functools.partial(ring_attention, axis_name="r", order=order, causal=True)
    mesh = make({"r": 4})
    cut = P(None, "r")
    f = jax.shard_map(attend, mesh=mesh, in_specs=(cut,) * 3, out_specs=cut)
    x = jnp.zeros((1, S, HQ, D))
    step = jax.grad(lambda *x: f(*x).sum(), argnums=(0, 1, 2))
    permutes = []
    for loop in _equations(jax.make_jaxpr(step)(x, x, x).jaxpr):
        if loop.primitive.name != "scan":
            continue
        tainted = set()
        permutes.append(0)
        for e in loop.params["jaxpr"].jaxpr.eqns:
            reads = any(not hasattr(v, "val") and v in tainted for v in e.invars)
            if e.primitive.name == "ppermute":
                permutes[-1] += 1
                assert not reads
            if reads or "flash" in e.primitive.name or "attention" in e.primitive.name:
                tainted |= set(e.outvars)
        assert tainted  # the kernel was found
    assert set(permutes) == {1}


def _equations(jaxpr):
    for e in jaxpr.eqns:
        yield e
        for p in e.params.values():
            for inner in p if isinstance(p, (tuple, list)) else (p,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


REFUSED = {
    "heads": ({"ulysses": "u"}, draw(hq=2), ValueError, "ulysses_attention: q must have a number"),
    "axis": ({"ring": "x"}, draw(), ValueError, "mesh_attention: ring must be an axis of the mesh"),
    "length": ({"ring": "u"}, draw(Sq=30), ValueError, "mesh_attention: mesh must have axes that "
               "divide the queries, got 30 over 4"),
    "order": ({"ring": "u", "order": "snake"}, draw(), ValueError, "mesh_attention: order must be"),
    "jvp": ({"ring": "u", "autodiff": "jvp"}, draw(), NotImplementedError, "ring_attention: auto"),
    "keyword": ({"ulysses": "u", "is_causal": True}, draw(), TypeError, "is_causal"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    options, x, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        mesh_attention(*x.values(), mesh=make({"u": 4}), **options)


def test_forward_mode_without_a_ring():
    x = draw(5)
    options = {"ulysses": "u", "causal": True, "autodiff": "jvp"}
    attend = jax.jit(functools.partial(mesh_attention, mesh=make({"u": 4}), **options))
    _, got = jax.jvp(lambda q: attend(q, x["k"], x["v"]), (x["q"],), (x["q"],))
    step = 1e-2
    ends = [attend(x["q"] * (1 + s), x["k"], x["v"]) for s in (step, -step)]
    np.testing.assert_allclose(got, (ends[0] - ends[1]) / (2 * step), atol=2e-3)
