"""One call over several devices: the right numbers, and no communication but the sums of gradients.

Auto axes (jit with shardings), Explicit axes (typed shardings), Manual axes (a user's shard_map).
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tolerances import check_close

from jax_flashtrain import flash_attention
from jax_flashtrain._src.problem import make_problem
from jax_flashtrain._src.sharding_plan import make_plan
from jax_flashtrain._src.spec import Layout, Operand

B, S, HQ, D = 4, 24, 8, 8
AXES = ("data", "model")
FULL = P("data", None, "model")
GRADIENTS = ("q", "k", "v", "bias", "sinks", "alibi_slopes")
COLLECTIVES = (
    "all-gather",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "collective-broadcast",
    "all-reduce",
)


def mesh_of(shape, kind=AxisType.Auto):
    count = math.prod(shape)
    if len(jax.devices()) < count and jax.default_backend() == "gpu":
        pytest.skip(f"needs {count} devices")
    return jax.make_mesh(shape, AXES, devices=jax.devices()[:count], axis_types=(kind,) * 2)


def collectives(compiled) -> dict[str, list[tuple[int, ...]]]:
    """Shapes (of one shard) of everything that is communicated, by collective."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for line in compiled.as_text().splitlines():
        for name in COLLECTIVES:
            match = re.search(rf"= (.*?) {name}(-start)?\(", line)
            if match:
                shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
                found.setdefault(name, []).extend(
                    tuple(int(n) for n in shape.split(",") if n) for shape in shapes
                )
    return found


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, how its arrays arrive, and the shapes (of a shard) that it may all-reduce."""

    mesh: tuple[int, int]
    q: Any
    k: Any
    reduced: tuple[tuple[int, ...], ...] = ()
    Hkv: int = 2
    Hq: int = HQ
    Sq: int = S
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)
    specs: dict[str, Any] = dataclasses.field(default_factory=dict)
    static: dict[str, Any] = dataclasses.field(default_factory=dict)
    layout: str = "BTNH"

    def inputs(self):
        arrays = {
            "q": draw(B, self.Sq, self.Hq, D, seed=1),
            "k": draw(B, S, self.Hkv, D, seed=2),
            "v": draw(B, S, self.Hkv, D, seed=3),
            **self.arrays,
        }
        do = draw(B, self.Sq, self.Hq, D, seed=4)
        if self.layout == "BNTH":
            arrays |= {n: np.swapaxes(arrays[n], 1, 2) for n in "qkv"}
            do = np.swapaxes(do, 1, 2)
        return arrays, do

    def spec(self, name):
        return {"q": self.q, "k": self.k, "v": self.k, **self.specs}.get(name, P())


def function(case: Case, implementation: str):
    """arrays, do -> (o, L, gradients); the cotangent of L is 1."""

    def f(arrays, do):
        moving = {n: x for n, x in arrays.items() if n in GRADIENTS}
        rest = {n: x for n, x in arrays.items() if n not in GRADIENTS}

        def g(moving):
            named = {**moving, **rest}
            return flash_attention(
                named.pop("q"),
                named.pop("k"),
                named.pop("v"),
                return_lse=True,
                implementation=implementation,
                layout=case.layout,
                **named,
                **case.static,
            )

        (o, lse), pull = jax.vjp(g, moving)
        # Finite: rows that see nothing have L = -inf, and their dL is ignored.
        return o, lse, pull((do, jnp.where(jnp.isfinite(lse), 1.0 + 0 * lse, 1.0)))[0]

    return f


def compare(got, want, names="o lse grads"):
    got, want = jax.tree.leaves_with_path(got), jax.tree.leaves(want)
    for (path, x), y in zip(got, want, strict=True):
        y = np.asarray(y)
        scale = np.abs(y[np.isfinite(y)]).max(initial=1.0)
        check_close(f"{names}{jax.tree_util.keystr(path)}", x, y, atol=1e-5 * scale)


def run(case: Case, kind, implementation="native", do_spec=None):
    """Runs a case sharded and whole, compares them, and returns what was communicated."""
    arrays, do = case.inputs()
    f = jax.jit(function(case, implementation))
    want = f(arrays, do)
    mesh = mesh_of(case.mesh, kind)
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    placed = {n: place(x, case.spec(n)) for n, x in arrays.items()}
    do = place(do, case.q if do_spec is None else do_spec)
    like_inputs = {n: x.sharding for n, x in placed.items() if n in GRADIENTS}
    f = jax.jit(function(case, implementation), out_shardings=(None, None, like_inputs))
    compiled = f.lower(placed, do).compile()
    if implementation == "native":
        assert "jax_flashtrain_bwd_v1" in compiled.as_text()
    got = f(placed, do)
    compare(got, want)
    expected = NamedSharding(mesh, case.q)
    if do_spec is None:
        assert got[0].sharding.is_equivalent_to(expected, got[0].ndim)
    return collectives(compiled)


def kv(shard_batch, heads):
    """Twice the shape of a shard's dk or dv."""
    return ((shard_batch, S, heads, D),) * 2


SEEN = np.random.default_rng(9).random((B, 1, 1, S)) < 0.7
IDS = np.sort(np.random.default_rng(8).integers(0, 4, (B, S)), axis=-1).astype(np.int32)
KEY = np.array([7, 9], np.uint32)

CASES = {
    "batch, 4x1": Case((4, 1), P("data"), P("data")),
    "heads, 1x4": Case((1, 4), P(None, None, "model"), P(None, None, "model"), Hkv=4),
    "batch and grouped heads, 2x2": Case((2, 2), FULL, FULL, static={"causal": True}),
    "BNTH": Case((2, 2), P("data", "model"), P("data", "model"), layout="BNTH"),
    "heads over both axes": Case(
        (2, 2), P(None, None, AXES), P(None, None, AXES), Hkv=4, static={"causal": True}
    ),
    "grouped heads over both axes": Case(
        (2, 2), P(None, None, AXES), P(None, None, "data"), kv(B, 1), static={"causal": True}
    ),
    "one key head for all": Case((2, 2), FULL, P("data"), kv(2, 1), Hkv=1),
    "fewer key heads than shards": Case((1, 4), P(None, None, "model"), P(), kv(B, 2)),
    "groups that straddle shards": Case(
        (1, 2), P(None, None, "model"), P(), kv(B, 3), Hkv=3, Hq=6, static={"causal": True}
    ),
    "replicated keys": Case((2, 2), FULL, P(), kv(B, 2), static={"causal": True}),
    "keys whole along heads": Case((2, 2), FULL, P("data"), kv(2, 2)),
    "rows": Case((4, 1), P(None, "data"), P(), kv(B, 2), static={"causal": True}),
    "rows, 2x2": Case(
        (2, 2),
        P("data", "model"),
        P("data"),
        kv(2, 2),
        static={"causal": True, "window": (9, None)},
    ),
    "rows and heads": Case(
        (2, 2), P(None, "data", "model"), P(None, None, "model"), kv(B, 1), static={"causal": True}
    ),
    "rows, all positions": Case(
        (4, 1),
        P(None, "data"),
        P(),
        (*kv(B, 2), (1, HQ), (1, HQ)),
        arrays={
            "alibi_slopes": np.linspace(0.1, 0.5, HQ, dtype=np.float32),
            "sinks": np.linspace(-1, 1, HQ, dtype=np.float32),
            "q_lengths": np.array([20, 24, 3, 9], np.int32),
            "kv_lengths": np.array([24, 11, 24, 7], np.int32),
            "q_offset": np.array([0, 3, -2, 5], np.int32),
            "segment_ids": IDS,
            "mask": SEEN,
        },
        static={"causal": True, "window": (7, 2)},
    ),
    "fewer rows than keys": Case(
        (4, 1), P(None, "data"), P(), kv(B, 2), Sq=8, static={"causal": True}
    ),
    "bias whole": Case(
        (2, 2),
        FULL,
        FULL,
        ((B, HQ, S, S), (1, HQ)),
        arrays={"bias": draw(B, HQ, S, S), "mask": SEEN, "sinks": draw(HQ)},
    ),
    "bias cut": Case(
        (2, 2),
        FULL,
        FULL,
        arrays={"bias": draw(B, HQ, S, S), "mask": SEEN},
        specs={"bias": P("data", "model"), "mask": P("data")},
    ),
    "bias cut along heads": Case(
        (2, 2),
        FULL,
        FULL,
        ((1, 4, 1, S),),
        arrays={"bias": draw(1, HQ, 1, S)},
        specs={"bias": P(None, "model")},
    ),
    "bias [Sq, Sk]": Case((2, 2), FULL, FULL, ((1, 1, S, S),), arrays={"bias": draw(S, S)}),
    "bias cut along rows": Case(
        (4, 1),
        P(None, "data"),
        P(),
        kv(B, 2),
        arrays={"bias": draw(1, HQ, S, S)},
        specs={"bias": P(None, None, "data")},
    ),
    "dropout": Case(
        (2, 2),
        FULL,
        FULL,
        arrays={"dropout_key": KEY},
        static={"dropout_rate": 0.3},
    ),
    "dropout over rows": Case(
        (2, 2),
        P(None, "data", "model"),
        P(None, None, "model"),
        kv(B, 1),
        arrays={"dropout_key": KEY},
        static={"dropout_rate": 0.3},
    ),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", CASES)
def test_same_numbers_and_only_the_sums_of_gradients(name, kind):
    case = CASES[name]
    found = run(case, kind)
    assert set(found) <= {"all-reduce"}, found
    # XLA may put several sums into one all-reduce and drops leading sizes of 1; shapes stay.
    strip = lambda shapes: Counter(tuple(n for n in s if n != 1) for s in shapes)  # noqa: E731
    assert strip(found.get("all-reduce", ())) == strip(case.reduced), found


@pytest.mark.parametrize("name", ["replicated keys", "rows, all positions", "bias cut along heads"])
def test_blockwise_code_is_split_alike(name):
    case = CASES[name]
    found = run(case, AxisType.Auto, "jax")
    assert set(found) == {"all-reduce"}, found


@pytest.mark.parametrize(
    ("q", "k", "do"),
    [
        (FULL, P("model", None, "data"), None),
        (P("data"), P(None, "model"), P("model")),
        (P(), P("data", None, "model"), P(None, "data", "model")),
    ],
)
def test_operands_that_arrive_cut_differently(q, k, do):
    """They are moved, so there is communication; the numbers are the same."""
    run(Case((2, 2), q, k, static={"causal": True}), AxisType.Auto, do_spec=do)


@pytest.mark.parametrize("k", [P("model", None, "data"), P(None, "model"), P("data", "model")])
def test_explicit_operands_that_arrive_cut_differently(k):
    run(Case((2, 2), FULL, k, static={"causal": True}), AxisType.Explicit)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_sizes_that_the_mesh_does_not_divide(kind):
    """An axis of 4 does not cut 2 key heads, and 22 rows are whole numbers of no 4 shards."""
    case = Case((2, 2), P("data"), P("data"), Hq=6, Sq=22, static={"causal": True})
    assert run(case, kind) == {}


# ---- transformations -----------------------------------------------------------------------------


def qkv(Hkv=2):
    return draw(B, S, HQ, D, seed=1), draw(B, S, Hkv, D, seed=2), draw(B, S, Hkv, D, seed=3)


def loss(q, k, v, **options):
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True, **options)
    return jnp.sum(o * jnp.sin(o)) + jnp.sum(lse)


GRAD = jax.grad(loss, (0, 1, 2))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_vmap_of_grad_and_grad_of_vmap(kind):
    mesh = mesh_of((2, 2), kind)
    q, k = draw(3, B, S, HQ, D), draw(3, B, S, 2, D)
    v = draw(B, S, 2, D)
    specs = P(None, *FULL), P(None, *FULL), FULL
    placed = [
        jax.device_put(x, NamedSharding(mesh, p)) for x, p in zip((q, k, v), specs, strict=True)
    ]
    mapped = jax.jit(jax.vmap(GRAD, in_axes=(0, 0, None)))

    def total(q, k, v):
        return jnp.sum(jax.vmap(loss, in_axes=(0, 0, None))(q, k, v))

    for f in (mapped, jax.jit(jax.grad(total, (0, 1, 2)))):
        assert collectives(f.lower(*placed).compile()) == {}
        compare(f(*placed), f(q, k, v))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_checkpoint_policy_keeps_one_forward(kind):
    mesh = mesh_of((2, 2), kind)
    placed = [jax.device_put(x, NamedSharding(mesh, FULL)) for x in qkv()]
    names = jax.checkpoint_policies.save_only_these_names("flashtrain_out", "flashtrain_lse")

    def forwards(policy):
        def layer(*a):
            return jnp.sin(flash_attention(*a, causal=True, implementation="native"))

        f = jax.grad(lambda *a: jnp.sum(jax.checkpoint(layer, policy=policy)(*a) ** 2), (0, 1, 2))
        text = jax.jit(f).lower(*placed).compile().as_text()
        return len(re.findall(r"custom-call.*jax_flashtrain_fwd", text))

    assert forwards(names) == 1
    if jax.__version_info__ >= (0, 11):  # older XLA merges the two calls of a program for several
        assert forwards(None) == 2


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_second_order_and_forward_mode(kind):
    mesh = mesh_of((2, 2), kind)
    arrays = qkv()
    placed = [jax.device_put(x, NamedSharding(mesh, FULL)) for x in arrays]

    def size(*a):
        return sum(jnp.sum(x * x) for x in GRAD(*a))

    def along(*a):
        return jax.jvp(lambda *a: flash_attention(*a, causal=True, autodiff="jvp"), a, a)

    for f in (jax.jit(jax.grad(size, (0, 1, 2))), jax.jit(along)):
        compare(f(*placed), f(*arrays))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_eager_calls(kind):
    mesh = mesh_of((2, 2), kind)
    arrays = qkv()
    placed = [jax.device_put(x, NamedSharding(mesh, FULL)) for x in arrays]
    o = flash_attention(*placed, causal=True)
    assert o.sharding.is_equivalent_to(NamedSharding(mesh, FULL), 4)
    compare(o, flash_attention(*arrays, causal=True))


# ---- the user's shard_map ------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    mesh = mesh_of((2, 2))
    arrays = qkv()
    whole = jax.shard_map(
        lambda *a: jax.lax.psum(loss(*a), AXES),
        mesh=mesh,
        in_specs=(FULL,) * 3,
        out_specs=P(),
        check_vma=check_vma,
    )
    f = jax.jit(jax.grad(whole, (0, 1, 2)))
    if check_vma:  # without it jax also sums the cotangent of its own psum
        assert collectives(f.lower(*arrays).compile()) == {}
    compare(f(*arrays), GRAD(*arrays))
    inner = jax.shard_map(
        GRAD, mesh=mesh, in_specs=(FULL,) * 3, out_specs=(FULL,) * 3, check_vma=check_vma
    )
    compare(jax.jit(inner)(*arrays), GRAD(*arrays))
    compare(inner(*arrays), GRAD(*arrays))  # a shard_map that runs eagerly


def test_replicated_keys_inside_shard_map():
    mesh = mesh_of((2, 2))
    arrays = qkv(Hkv=1)
    whole = jax.shard_map(
        lambda *a: jax.lax.psum(loss(*a), AXES),
        mesh=mesh,
        in_specs=(FULL, P("data"), P("data")),
        out_specs=P(),
    )
    f = jax.jit(jax.grad(whole, (0, 1, 2)))
    found = collectives(f.lower(*arrays).compile())
    assert found == {"all-reduce": [(2, S, 1, D)] * 2}
    compare(f(*arrays), GRAD(*arrays))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_shard_map_over_one_axis_alone(kind):
    """The other axis: Explicit ones are split as ever, along Auto ones the call stays whole."""
    mesh = mesh_of((2, 2), kind)
    arrays = qkv()
    placed = [jax.device_put(x, NamedSharding(mesh, FULL)) for x in arrays]
    half = jax.shard_map(
        lambda *a: jax.lax.psum(loss(*a), "data"),
        mesh=mesh,
        in_specs=(P("data"),) * 3,
        out_specs=P(),
        axis_names={"data"},
    )
    f = jax.jit(jax.grad(half, (0, 1, 2)))
    compare(f(*placed), GRAD(*arrays))
    if kind == AxisType.Explicit and jax.__version_info__ >= (0, 11):
        assert collectives(f.lower(*placed).compile()) == {}


# ---- what a program holds ------------------------------------------------------------------------


def test_programs_without_auto_axes_hold_no_address():
    """custom_partitioning puts an address into the module; then no cache entry ever fits again."""
    arrays = qkv()
    f = jax.jit(GRAD)
    assert "CustomSPMDPartitioning" not in f.lower(*arrays).as_text()
    explicit = mesh_of((2, 2), AxisType.Explicit)
    placed = [jax.device_put(x, NamedSharding(explicit, FULL)) for x in arrays]
    assert "CustomSPMDPartitioning" not in f.lower(*placed).as_text()
    auto = mesh_of((2, 2))
    placed = [jax.device_put(x, NamedSharding(auto, FULL)) for x in arrays]
    assert "CustomSPMDPartitioning" in f.lower(*placed).as_text()


def test_persistent_cache_serves_a_second_process(tmp_path):
    """One device, Explicit axes, and a shard_map: the second process compiles nothing."""
    script = textwrap.dedent(
        """
        import sys
        import jax, jax.numpy as jnp
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from jax_flashtrain import flash_attention

        jax.config.update("jax_compilation_cache_dir", sys.argv[1])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        x = jnp.ones((2, 8, 2, 4))

        def loss(x):
            return jnp.sum(flash_attention(x, x, x, causal=True))

        jax.block_until_ready(jax.jit(jax.grad(loss))(x))
        mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
        y = jax.device_put(x, NamedSharding(mesh, P("data")))
        with jax.set_mesh(mesh):
            jax.block_until_ready(jax.jit(jax.grad(loss))(y))
        auto = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
        f = jax.shard_map(
            lambda x: jax.lax.psum(loss(x), "data"), mesh=auto, in_specs=P("data"), out_specs=P()
        )
        jax.block_until_ready(jax.jit(jax.grad(f))(x))
        """
    )
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }

    def entries():
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            check=True,
            env=environment,
            cwd=Path(__file__).parent.parent,
        )
        return {x.name for x in tmp_path.iterdir() if not x.name.endswith("-atime")}

    first = entries()
    assert len(first) >= 3
    assert entries() == first


# ---- the plan ------------------------------------------------------------------------------------


def plan_for(Hq, Hkv, sizes, q, k=((), (), (), ())):
    shape_q, shape_k = (B, S, Hq, D), (B, S, Hkv, D)
    arrays = {
        Operand.Q: np.zeros(shape_q, np.float32),
        Operand.K: np.zeros(shape_k, np.float32),
        Operand.V: np.zeros(shape_k, np.float32),
    }
    problem = make_problem(Layout.BTNH, arrays)
    return make_plan(problem, sizes, [(Operand.Q, shape_q, q), (Operand.K, shape_k, k)])


def test_plan_cuts_key_heads_as_far_as_they_divide():
    sizes = {"a": 2, "b": 2}
    heads = ((), (), ("a", "b"), ())
    assert plan_for(8, 4, sizes, heads).kv == ("a", "b")
    assert plan_for(8, 2, sizes, heads).kv == ("a",)
    assert plan_for(8, 1, sizes, heads).kv == ()
    assert plan_for(6, 3, {"a": 2}, ((), (), ("a",), ())).kv_shared == ("a",)


def test_plan_uses_an_axis_once_and_follows_q():
    sizes = {"a": 2, "b": 2}
    plan = plan_for(8, 2, sizes, (("a",), (), (), ()), (("b",), (), ("a",), ()))
    assert plan.batch == (("a",),)
    assert plan.heads == ()
    plan = plan_for(8, 2, sizes, ((), (), (), ()), (("b",), (), ("a",), ()))
    assert plan.batch == (("b",),)
    assert plan.heads == ("a",)
    assert plan_for(6, 2, {"a": 4}, ((), (), ("a",), ())).used == ()
