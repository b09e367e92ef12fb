"""Transforms, alone and composed, against a dense jnp attention or against a Python loop."""

from __future__ import annotations

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_flashtrain
from jax_flashtrain import flash_attention
from jax_flashtrain._src import lowering

TOLERANCE = 2e-5
BOTH_MODES = pytest.mark.parametrize("autodiff", ["vjp", "jvp"])


def dense(q, k, v, bias=0.0, causal=True):
    """(o, L) of plain attention, causal bottom-right, any leading dimensions."""
    Sq, Sk, G = q.shape[-3], k.shape[-3], q.shape[-2] // k.shape[-2]
    k, v = jnp.repeat(k, G, -2), jnp.repeat(v, G, -2)
    s = jnp.einsum("...ihd,...jhd->...hij", q, k) / np.sqrt(q.shape[-1]) + bias
    if causal:
        s = jnp.where(jnp.arange(Sk) <= jnp.arange(Sq)[:, None] + Sk - Sq, s, -jnp.inf)
    return jnp.einsum("...hij,...jhd->...ihd", jax.nn.softmax(s), v), jax.nn.logsumexp(s, -1)


def make(rng, *lead, Sq=5, Sk=7, Hq=4, Hkv=2, D=8, Dv=6):
    shapes = ((Sq, Hq, D), (Sk, Hkv, D), (Sk, Hkv, Dv), (Hq, Sq, Sk))
    return [jnp.asarray(rng.normal(size=(*lead, *s)), jnp.float32) for s in shapes]


def ours(implementation, autodiff=None, **options):
    def call(q, k, v, bias=None):
        return flash_attention(
            q,
            k,
            v,
            bias=bias,
            causal=True,
            return_lse=True,
            implementation=implementation,
            autodiff=autodiff,
            **options,
        )

    return call


def loss_of(function):
    def loss(*args):
        o, lse = function(*args)
        return (o**2).sum() + jnp.sin(lse).sum()

    return loss


def assert_close(got, want, atol=TOLERANCE):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol, rtol=1e-4)


# ---- vmap --------------------------------------------------------------------------------------

AXES = [axes for axes in itertools.product((None, 0), repeat=4) if any(a == 0 for a in axes)]


@pytest.mark.slow_if(implementation="jax")
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_vmap_of_value_and_grad_over_any_subset(axes, implementation, rng):
    """Map size 3, batch 2: a mix-up of the two would be seen."""
    args = [make(rng, 3, 2)[n] if axis == 0 else make(rng, 2)[n] for n, axis in enumerate(axes)]
    wanted = jax.vmap(jax.value_and_grad(loss_of(dense), (0, 1, 2, 3)), in_axes=axes)(*args)
    function = jax.value_and_grad(loss_of(ours(implementation)), (0, 1, 2, 3))
    assert_close(jax.jit(jax.vmap(function, in_axes=axes))(*args), wanted)


@BOTH_MODES
@pytest.mark.parametrize(
    "axes", [(0, None, None, None), (None, 0, 0, None), (0, 0, None, 0)], ids=str
)
def test_grad_of_vmap(axes, autodiff, implementation, rng):
    args = [make(rng, 3, 2)[n] if axis == 0 else make(rng, 2)[n] for n, axis in enumerate(axes)]

    def total(function):
        return lambda *a: jax.vmap(loss_of(function), in_axes=axes)(*a).sum()

    got = jax.grad(total(ours(implementation, autodiff)), (0, 1, 2, 3))(*args)
    assert_close(got, jax.grad(total(dense), (0, 1, 2, 3))(*args), atol=5e-5)


def test_nested_vmap_with_axes_in_the_middle(implementation, rng):
    q = jnp.asarray(rng.normal(size=(2, 3, 5, 4, 4, 8)), jnp.float32)  # [b, 3, S, 4, H, D]
    k, v = make(rng, 2)[1:3]
    bias = make(rng, 4)[3][:, :, :1]
    weights = jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)

    def nested(function):
        inner = jax.vmap(function, in_axes=(1, None, None, None))
        outer = jax.vmap(inner, in_axes=(3, None, None, 0), out_axes=1)
        return jax.grad(lambda *a: (outer(*a) * weights).sum(), (0, 1, 2, 3))

    got = nested(loss_of(ours(implementation)))(q, k, v, bias)
    assert_close(got, nested(loss_of(dense))(q, k, v, bias), atol=5e-5)


# NumPy, and the keys made in the test: a jax array here would start a backend at import, before
# conftest.py could ask for several devices.
OPERANDS = {
    "q_offset": np.array([[0, 2], [1, 3], [2, 2]]),
    "q_lengths": np.array([[5, 2], [0, 5], [3, 4]]),
    "kv_lengths": np.array([[7, 2], [3, 5], [6, 0]]),
    "mask": np.arange(3 * 7).reshape(3, 1, 7) % 3 > 0,
    "bias": np.sin(np.arange(3 * 4 * 7, dtype=np.float32)).reshape(3, 4, 1, 7),
    "alibi_slopes": np.arange(12, dtype=np.float32).reshape(3, 4) / 10,
    "sinks": np.arange(12, dtype=np.float32).reshape(3, 4) / 10,
    "segment_ids": (np.arange(3 * 5).reshape(3, 5) % 2, np.arange(3 * 7).reshape(3, 7) % 2),
    "dropout_key": None,
    "window": (np.array([0, 1, 4]), np.array([2, 0, 1])),
}


@pytest.mark.slow_if(implementation="jax")
@pytest.mark.parametrize("name", OPERANDS)
def test_vmap_over_each_operand_alone(name, implementation, rng):
    """Only this argument is mapped: forward and gradients equal a Python loop."""
    value, options = jax.tree.map(jnp.asarray, OPERANDS[name]), {}
    if name == "dropout_key":
        value, options = jax.random.split(jax.random.key(0), 3), {"dropout_rate": 0.4}
    q, k, v, _ = make(rng, 2)

    def grads(q, k, v, x):
        def loss(q, k, v):
            o, lse = flash_attention(
                q,
                k,
                v,
                causal=name != "window",
                return_lse=True,
                implementation=implementation,
                **{name: x},
                **options,
            )
            return (o**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (o, lse)

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

    mapped = jax.vmap(grads, in_axes=(None, None, None, 0))(q, k, v, value)
    for n in range(3):
        element = jax.tree.map(operator.itemgetter(n), value)
        assert_close(jax.tree.map(operator.itemgetter(n), mapped), grads(q, k, v, element))


@BOTH_MODES
def test_jacrev(autodiff, implementation, rng):
    q, k, v, bias = make(rng, 2, Sq=3, Sk=4, Hq=2, Hkv=1, D=4, Dv=3)
    got = jax.jacrev(ours(implementation, autodiff), (0, 1, 2, 3))(q, k, v, bias)
    assert_close(got, jax.jacrev(dense, (0, 1, 2, 3))(q, k, v, bias))


# ---- higher order, forward mode ----------------------------------------------------------------


def small(rng):
    q, k, v, bias = make(rng, 1, Sq=3, Sk=4, Hq=2, Hkv=1, D=4, Dv=3)
    return 0.5 * q, 0.5 * k, v, 0.5 * bias, jnp.array([0.3, -0.2], jnp.float32)


def with_everything(implementation, autodiff):
    def call(q, k, v, bias, sinks):
        return flash_attention(
            q,
            k,
            v,
            bias=bias,
            sinks=sinks,
            softcap=2.0,
            causal=True,
            dropout_rate=0.2,
            dropout_key=jax.random.key(1),
            return_lse=True,
            implementation=implementation,
            autodiff=autodiff,
        )

    return call


@pytest.mark.parametrize("order", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.slow_if(implementation="jax")
@BOTH_MODES
def test_check_grads_reverse(order, autodiff, implementation, rng):
    function = jax.jit(with_everything(implementation, autodiff))
    check_grads(function, small(rng), order=order, modes=("rev",), atol=0.05, rtol=0.05)


@pytest.mark.slow_if(implementation="jax")
def test_check_grads_default_modes_with_jvp(implementation, rng):
    function = jax.jit(with_everything(implementation, "jvp"))
    check_grads(function, small(rng), order=2, atol=0.05, rtol=0.05)


class TestForwardMode:
    def args(self, rng):
        return make(rng, 2, Sq=3, Sk=4, Hq=2, Hkv=1, D=4, Dv=3)

    def test_jvp(self, implementation, rng):
        args = self.args(rng)
        dots = [jnp.cos(x) for x in args]
        got = jax.jvp(ours(implementation, "jvp"), args, dots)
        assert_close(got, jax.jvp(dense, args, dots))

    def test_linearize(self, implementation, rng):
        args = self.args(rng)
        dots = [jnp.cos(x) for x in args]
        out, linear = jax.linearize(ours(implementation, "jvp"), *args)
        assert_close((out, linear(*dots)), jax.jvp(dense, args, dots))
        transposed = jax.linear_transpose(linear, *args)(out)
        assert_close(transposed, jax.vjp(dense, *args)[1](out), atol=1e-4)

    def test_jacfwd(self, implementation, rng):
        args = self.args(rng)
        got = jax.jacfwd(ours(implementation, "jvp"), (0, 1, 2, 3))(*args)
        assert_close(got, jax.jacfwd(dense, (0, 1, 2, 3))(*args))

    def test_hessian(self, implementation, rng):
        args = self.args(rng)
        got = jax.hessian(loss_of(ours(implementation, "jvp")), (0, 1))(*args)
        assert_close(got, jax.hessian(loss_of(dense), (0, 1))(*args), atol=1e-4)

    def test_jacfwd_of_vmap_of_grad(self, implementation, rng):
        args = self.args(rng)

        def nested(function):
            grad = jax.grad(lambda q, k, v: loss_of(function)(q, k, v))
            return jax.jacfwd(jax.vmap(grad))

        q, k, v = (jnp.stack([x, 0.5 * x]) for x in args[:3])
        got = nested(ours(implementation, "jvp"))(q, k, v)
        assert_close(got, nested(dense)(q, k, v), atol=1e-4)

    def test_hessian_vector_product_in_the_default_mode(self, implementation, rng):
        """Forward over reverse needs no option: only a plain call under jvp does."""
        q, k, v, _ = self.args(rng)

        def product(function):
            grad = jax.grad(lambda q: loss_of(function)(q, k, v))
            return jax.jvp(grad, (q,), (jnp.cos(q),))[1]

        assert_close(product(ours(implementation)), product(dense), atol=1e-4)

    def test_a_plain_call_leads_to_the_option(self, implementation, rng):
        q, k, v, _ = self.args(rng)
        function = functools.partial(flash_attention, k=k, v=v, implementation=implementation)
        sentence = r'flash_attention: forward-mode differentiation .* needs autodiff="jvp"'
        with pytest.raises(TypeError, match=sentence):
            jax.jvp(function, (q,), (q,))
        with pytest.raises(TypeError, match="forward-mode"):  # jax's own text: docs/transforms.md
            jax.jvp(jax.jit(function), (q,), (q,))


def test_second_order_memory_is_linear(implementation):
    """Temporary bytes grow at most 2.2 x when S doubles: nothing of size S x S is kept."""

    def temporary(S):
        x = jnp.ones((1, S, 1, 8))

        def loss(x):
            return (flash_attention(x, x, x, causal=True, implementation=implementation) ** 2).sum()

        def second(x):
            return jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum())(x)

        return jax.jit(second).lower(x).compile().memory_analysis().temp_size_in_bytes

    assert temporary(8192) <= 2.2 * temporary(4096)


# ---- control flow, remat, integers, debugging --------------------------------------------------


@BOTH_MODES
def test_scan_over_layers_with_traced_windows(autodiff, implementation, rng):
    """Local and global layers in one scan."""
    x = make(rng, 2, Sq=6, Sk=6, Hq=2, Hkv=2, D=4, Dv=4)[0]
    lefts = jnp.array([1, 6, 0])

    def layer(x, left):
        return x + flash_attention(
            x, x, x, window=(left, 0), implementation=implementation, autodiff=autodiff
        )

    def scanned(x):
        body = jax.checkpoint(lambda x, left: (layer(x, left), None))
        return (jax.lax.scan(body, x, lefts)[0] ** 2).sum()

    def unrolled(x):
        for left in (1, 6, 0):
            x = layer(x, left)
        return (x**2).sum()

    assert_close(jax.jit(jax.value_and_grad(scanned))(x), jax.value_and_grad(unrolled)(x))


def test_traced_negative_window_side_is_unbounded(implementation, rng):
    q, k, v, _ = make(rng, 2)
    call = functools.partial(flash_attention, q, k, v, implementation=implementation)
    assert_close(jax.jit(lambda w: call(window=(w, 1)))(-1), call(window=(None, 1)), atol=0)


@BOTH_MODES
def test_integer_operands_have_float0_cotangents(autodiff, implementation, rng):
    """A21: shared ids, differentiated by name and not."""
    x = make(rng, 2, Sq=6, Sk=6, Hq=2, Hkv=2, D=4, Dv=4)[0]
    ids = jnp.array([0, 0, 1, 1, 1, 2])
    call = functools.partial(flash_attention, implementation=implementation, autodiff=autodiff)

    def loss(x, ids):
        y = call(x, x, x, segment_ids=ids)
        return (call(y, x, x, segment_ids=ids) ** 2).sum()

    dx, dids = jax.grad(loss, (0, 1), allow_int=True)(x, ids)
    assert dids.dtype == jax.dtypes.float0
    assert_close(dx, jax.grad(loss)(x, ids), atol=0)


def test_disable_jit_and_checks(implementation, rng):
    args = make(rng, 2, Sq=3, Sk=4)
    function = jax.value_and_grad(loss_of(ours(implementation)), (0, 1, 2, 3))
    wanted = function(*args)
    with jax.enable_checks(True):
        assert_close(jax.jit(function)(*args), wanted)
    if implementation == "native":  # blockwise loops in Python would take minutes
        with jax.disable_jit():
            assert_close(function(*args), wanted)


def test_debug_nans_and_infs_stay_quiet(implementation, rng):
    """Empty rows hold finite sentinels inside; only an L that was asked for holds -inf."""
    q, k, v, _ = make(rng, 2, Sq=7, Sk=4)  # the first three rows see nothing

    def loss(q, k, v):
        return (flash_attention(q, k, v, causal=True, implementation=implementation) ** 2).sum()

    with jax.debug_nans(True), jax.debug_infs(True):
        grads = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    assert jnp.all(grads[0][:, :3] == 0)


def test_precision_setting_is_read(rng):
    x = jnp.ones((1, 4, 1, 8))

    def attribute(**options):
        text = jax.jit(lambda x: flash_attention(x, x, x, **options)).lower(x).as_text()
        return int(text.split("precision = ")[1].split(" ")[0])

    assert attribute() == 0
    assert attribute(precision="high") == 1
    assert attribute(precision=jax.lax.Precision.HIGHEST) == 2
    with jax.default_matmul_precision("float32"):
        assert attribute() == 2
    with jax.default_matmul_precision("tensorfloat32"):
        assert attribute() == 0


# ---- several devices, export -------------------------------------------------------------------


@BOTH_MODES
def test_shard_map_with_check_vma(autodiff, implementation, rng):
    """Batch sharded, a replicated bias: values and gradients, inside and outside the shard_map."""
    args = [*make(rng, 4)[:3], make(rng)[3]]
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), axis_types=auto, devices=jax.devices()[:2])
    specs = (P("x"), P("x"), P("x"), P())
    loss = loss_of(ours(implementation, autodiff))
    wanted = jax.value_and_grad(loss_of(dense), (0, 1, 2, 3))(*args)

    def inside(*args):
        value, grads = jax.value_and_grad(loss, (0, 1, 2, 3))(*args)
        return jax.lax.psum(value, "x"), grads

    mapped = jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=(P(), specs))
    assert_close(jax.jit(mapped)(*args), wanted, atol=1e-4)

    outside = jax.shard_map(
        lambda *a: jax.lax.psum(loss(*a), "x"), mesh=mesh, in_specs=specs, out_specs=P()
    )
    assert_close(jax.jit(jax.value_and_grad(outside, (0, 1, 2, 3)))(*args), wanted, atol=1e-4)


@pytest.mark.parametrize("symbolic", [False, True])
def test_export_round_trip(symbolic, rng):
    """A33: with the shipped disabled checks, a gradient, both platforms, a symbolic batch."""
    from jax import export

    q, k, v, _ = make(rng, 2)
    bias = make(rng)[3]

    def call(q, k, v, bias):
        return flash_attention(
            q,
            k,
            v,
            bias=bias,
            causal=True,
            window=(4, None),
            dropout_rate=0.1,
            dropout_key=jax.random.key(0),
            return_lse=True,
        )

    batch = export.symbolic_shape("n")[0] if symbolic else 2
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in (q, k, v)]
    shapes.append(jax.ShapeDtypeStruct(bias.shape, bias.dtype))
    has_cuda = bool(jax_flashtrain.supports("cuda"))
    exported = export.export(
        jax.jit(call),
        platforms=["cpu", "cuda"] if has_cuda else ["cpu"],
        disabled_checks=jax_flashtrain.export_disabled_checks,
    )(*shapes)
    loaded = export.deserialize(exported.serialize(vjp_order=1))
    assert_close(loaded.call(q, k, v, bias), call(q, k, v, bias), atol=0)
    got = jax.grad(loss_of(loaded.call), (0, 1, 2, 3))(q, k, v, bias)
    assert_close(got, jax.grad(loss_of(call), (0, 1, 2, 3))(q, k, v, bias), atol=0)


def test_export_for_a_platform_without_kernels(rng, monkeypatch):
    """One program for both: the custom call for the CPU, the blockwise code (with its warning)."""
    from jax import export

    q, k, v, _ = make(rng, 2)
    monkeypatch.setattr(lowering, "_warned", set())
    with pytest.warns(UserWarning, match="platform 'tpu' has no native kernels"):
        exported = export.export(
            jax.jit(flash_attention),
            platforms=["cpu", "tpu"],
            disabled_checks=jax_flashtrain.export_disabled_checks,
        )(q, k, v)
    assert exported.mlir_module().count("@jax_flashtrain_fwd_v1") == 1
    assert_close(exported.call(q, k, v), flash_attention(q, k, v), atol=0)


def test_export_is_refused_without_the_checks(rng):
    from jax import export

    q, k, v, _ = make(rng, 2)
    with pytest.raises(ValueError, match="jax_flashtrain_fwd_v1"):
        export.export(jax.jit(flash_attention))(q, k, v)
