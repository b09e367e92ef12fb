"""The Metal kernels, run in the emulator, against the float64 oracle.

Verified by emulation, not on hardware. The shared suite runs on them too:
``pytest --backend metal-emulated``; here is what only this backend has.
"""

from __future__ import annotations

import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import check, check_kernel_ran, make_call, run
from metal.emulated import module

from jax_flashtrain import explain, flash_attention

SMALL = {"B": 2, "Sq": 21, "Sk": 35, "Hq": 4, "Hkv": 2, "D": 16}


@pytest.fixture(autouse=True)
def emulator():
    """The emulated device with its default settings."""
    device = module().emulator
    device.configure({"seed": 1, "wrap": 0, "memory_limit": -1, "lost": 0})
    yield device
    device.configure({"seed": 1, "wrap": 0, "memory_limit": -1, "lost": 0})
    module().set_flops_per_dispatch(1.0e11)


def options(rng, Sq=21, Sk=35, B=2, Hq=4):
    """Every option alone, and some together."""
    ids = (np.sort(rng.integers(0, 3, (B, Sq)), -1).astype(np.int32),
           np.sort(rng.integers(0, 3, (B, Sk)), -1).astype(np.int32))  # fmt: skip
    bias = rng.standard_normal((B, Hq, Sq, Sk)).astype(np.float32)
    mask = rng.random((B, Hq, Sq, Sk)) < 0.6
    mask[0, :, 3] = False
    rows = {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": (5, 2)},
        "causal window": {"causal": True, "window": (7, None)},
        "offset": {"causal": True, "q_offset": np.asarray([3, 30], np.int32)},
        "lengths": {
            "q_lengths": np.asarray([21, 9], np.int32),
            "kv_lengths": np.asarray([17, 0], np.int32),
        },
        "segments": {"segment_ids": ids, "causal": True},
        "bias": {"bias": bias},
        "bias f16": {"bias": bias[:, :1].astype(np.float16)},
        "bias -inf": {"bias": np.where(mask, bias, -np.inf).astype(np.float32)},
        "mask": {"mask": mask},
        "softcap": {"softcap": 1.5, "std": 2.0},
        "sinks": {
            "sinks": rng.standard_normal(Hq).astype(np.float32),
            "causal": True,
            "q_offset": -4,
        },
        "alibi": {"alibi_slopes": (0.1 * rng.random((B, Hq))).astype(np.float32), "causal": True},
        "dropout": {"dropout_rate": 0.3, "dropout_key": jax.random.key(5)},
        "scale": {"scale": 0.3},
        "layout": {"layout": "BNTH", "causal": True},
    }
    rows["all"] = {
        "causal": True, "window": (20, None), "segment_ids": ids, "bias": bias, "mask": mask,
        "softcap": 3.0,
        "sinks": rng.standard_normal(Hq).astype(np.float32), "dropout_rate": 0.2,
        "dropout_key": jax.random.key(6), "alibi_slopes": (0.1 * rng.random(Hq)).astype(np.float32),
        "kv_lengths": np.asarray([30, 12], np.int32),
    }  # fmt: skip
    return rows


OPTIONS = list(options(np.random.default_rng(0)))


def test_the_kernel_runs():
    check_kernel_ran(make_call(Sq=9), "metal")
    q = jax.ShapeDtypeStruct((1, 9, 2, 16), jnp.bfloat16)
    assert explain(q, q, q, implementation="metal")[:2] == ("metal", "metal (emulated)")


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, rng):
    check(make_call(1, **SMALL, **options(rng)[name]), "metal")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_options_in_half_types(dtype, rng):
    check(make_call(2, **SMALL, **options(rng)["all"], dtype=dtype), "metal")


@pytest.mark.parametrize(
    ("D", "Dv", "dtype"),
    [(1, 1, "float32"), (3, 5, "bfloat16"), (64, 64, "bfloat16"), (80, 80, "float16"),
     (96, 96, "bfloat16"),
     (128, 128, "bfloat16"), (128, 128, "float32"), (256, 256, "bfloat16"), (256, 256, "float32"),
     (192, 128, "bfloat16"), (40, 200, "float32"), (130, 9, "float16")],
)  # fmt: skip
def test_head_sizes(D, Dv, dtype):
    call = make_call(3, Sq=37, Sk=41, Hq=2, Hkv=1, D=D, Dv=Dv, dtype=dtype, causal=True)
    check(call, "metal")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("D", [64, 256])
def test_three_by_three_ragged_tiles(D, dtype):
    """At least 3 x 3 tiles with ragged ends on both sides, for every kernel."""
    tiles = module().tiles(D, D, 4 if dtype == "float32" else 2)
    rows = max(tiles["forward_rows"], tiles["backward_rows"])
    keys = max(tiles["forward_keys"], tiles["backward_staged"], tiles["backward_rows"])
    Sq, Sk = 2 * rows + 5, 2 * keys + 3
    bias = np.random.default_rng(0).standard_normal((1, 1, Sq, Sk)).astype(np.float32)
    check(
        make_call(4, Sq=Sq, Sk=Sk, D=D, Hq=2, Hkv=1, dtype=dtype, bias=bias, window=(50, 20)),
        "metal",
    )


def flag_combinations():
    """Every combination of the forward's and backward's function constants."""
    return list(itertools.product(("", "f32", "f16", "bf16"), *[(False, True)] * 7))


def _flags_call(rng, bias, mask, segments, softcap, alibi, sinks, dropout, dlse):
    given = {}
    if bias:
        dtype = {"f32": "float32", "f16": "float16", "bf16": jnp.bfloat16}[bias]
        given["bias"] = rng.standard_normal((1, 2, 5, 11)).astype(dtype)
    if mask:
        given["mask"] = rng.random((1, 1, 5, 11)) < 0.7
    if segments:
        given["segment_ids"] = (rng.integers(0, 2, (1, 5)).astype(np.int32),
                                rng.integers(0, 2, (1, 11)).astype(np.int32))  # fmt: skip
    if softcap:
        given["softcap"] = 2.0
    if alibi:
        given["alibi_slopes"] = np.asarray([0.1, 0.2], np.float32)
    if sinks:
        given["sinks"] = np.asarray([0.5, -0.5], np.float32)
    if dropout:
        given |= {"dropout_rate": 0.25, "dropout_key": jax.random.key(1)}
    return make_call(7, Sq=5, Sk=11, D=8, Hq=2, dlse=dlse, **given)


@pytest.mark.parametrize("part", range(16))
def test_function_constant_combinations(part, rng):
    """Every 7th of the 512 combinations (7 is odd, so all pairs of flags come up)."""
    chosen = flag_combinations()[::7]
    for flags in chosen[part::16]:
        check(_flags_call(rng, *flags), "metal")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(64))
def test_every_function_constant_combination(part, rng):
    for flags in flag_combinations()[part::64]:
        check(_flags_call(rng, *flags), "metal")


def equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize("D", [16, 144])
def test_schedules_give_the_same_bits(D, rng, emulator):
    """The order of threads does not show in any result (dbias and dsinks included)."""
    call = make_call(8, Sq=40, Sk=37, Hq=2, Hkv=1, D=D, causal=True, sinks=np.zeros(2, np.float32),
                     bias=rng.standard_normal((1, 1, 1, 37)).astype(np.float32))  # fmt: skip
    first = run(call, "metal")
    for seed in (2, 3, 99):
        emulator.configure({"seed": seed})
        equal(run(call, "metal"), first)


def test_wrapped_and_staged_buffers_agree(emulator, rng):
    call = make_call(9, **SMALL, **options(rng)["all"])
    module().take_buffer_counts()
    staged = run(call, "metal")
    assert module().take_buffer_counts()[0] == 0
    emulator.configure({"wrap": 1})
    equal(run(call, "metal"), staged)
    wrapped, copied = module().take_buffer_counts()
    assert wrapped > 0
    assert copied == 0


def test_cut_dispatches_agree(emulator, rng):
    """Work is cut along batch and heads, and along the rows of one head; the bits stay."""
    call = make_call(
        10,
        B=2,
        Sq=70,
        Sk=70,
        Hq=4,
        Hkv=2,
        D=16,
        bias=rng.standard_normal((1, 1, 70, 70)).astype(np.float32),
    )
    whole = run(call, "metal")
    emulator.take_records()
    for flops in (1.0, 4.0e5):
        module().set_flops_per_dispatch(flops)
        equal(run(call, "metal"), whole)
        grids = {}
        for record in emulator.take_records():
            grids.setdefault(record["kernel"], []).append(record["grid"])
        assert all(
            len(grids[k]) > 1 for k in ("flash_forward", "flash_dq", "flash_dkdv", "flash_dbias")
        )
    assert {g[0] for g in grids["flash_forward"]} <= {1, 2, 3}


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 3), (1, 3), (1, 3)),
        ((2, 3), (2, 1), (1, 1)),
        ((1, 3), (2, 3), (2, 1)),
        ((2, 1), (1, 1), (2, 3)),
    ],
)
@pytest.mark.parametrize("autodiff", [None, "jvp"])
def test_gradients_of_broadcast_batch_dimensions(q, k, v, autodiff, rng):
    """vmap with unmapped operands inside grad: gradients are summed over what they lack.

    With autodiff="jvp" the kernels do the sum, over different dimensions for dk and dv.
    """

    def array(batch, S, H):
        return jnp.asarray(rng.standard_normal((*batch, S, H, 8)), jnp.float32)

    args = array(q, 9, 4), array(k, 13, 2), array(v, 13, 2)
    weight = array((2, 3), 9, 4)

    def loss(implementation):
        def f(q, k, v):
            axes = [tuple(0 if x.shape[d] > 1 else None for x in (q, k, v)) for d in (0, 1)]

            def squeeze(x):
                return x.squeeze(tuple(d for d in (0, 1) if x.shape[d] == 1))

            inner = jax.vmap(
                lambda q, k, v: flash_attention(
                    q, k, v, causal=True, implementation=implementation, autodiff=autodiff
                ),
                axes[1],
            )
            out = jax.vmap(inner, axes[0])(squeeze(q), squeeze(k), squeeze(v))
            return (out * weight).sum()

        return jax.jit(jax.grad(f, (0, 1, 2)))

    for got, want in zip(loss("metal")(*args), loss("jax")(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("D", "dtype"), [(64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (64, "float32")]
)
def test_work_is_that_of_the_visible_tiles(D, dtype, causal, emulator):
    """Matrix products: at most 1.1 x the visible tiles. Device bytes: at most the tile model."""
    B, S, Hq, Hkv = 1, 160, 2, 1
    bytes_ = 4 if dtype == "float32" else 2
    t = module().tiles(D, D, bytes_)
    run(
        make_call(11, B=B, Sq=S, Hq=Hq, Hkv=Hkv, D=D, dtype=dtype, causal=causal, dlse=False),
        "metal",
    )
    records = {r["kernel"]: r for r in emulator.take_records()}

    def tiles(rows, keys):
        n = lambda size: -(-S // size)  # noqa: E731
        return [(i, j) for i in range(n(rows)) for j in range(n(keys))
                if not causal or j * keys <= min(S, (i + 1) * rows) - 1]  # fmt: skip

    fragments = D // 8
    # kernel: (rows, keys, products per pair of 8x8 blocks, arrays that a tile reads once)
    plan = {
        "flash_forward": (t["forward_rows"], t["forward_keys"], 2, 1),
        "flash_dq": (t["backward_rows"], t["backward_staged"], 3, 2),
        "flash_dkdv": (t["backward_staged"], t["backward_rows"], 4, 2),
    }
    for kernel, (rows, keys, products, kept) in plan.items():
        visible = tiles(rows, keys)
        r = records[kernel]
        wanted = B * Hq * len(visible) * (rows // 8) * (keys // 8) * fragments * products
        assert wanted <= r["matrix_ops"] <= 1.1 * wanted, kernel
        # Staged: two arrays of the other side per visible tile. Kept: the tile's own rows, once.
        owned, staged = (keys, rows) if kernel == "flash_dkdv" else (rows, keys)
        outer = -(-S // owned) * (Hkv if kernel == "flash_dkdv" else Hq)
        model = (
            B * Hq * len(visible) * 2 * staged * D * bytes_ + B * outer * kept * owned * D * bytes_
        )
        model += B * Hq * len(visible) * 3 * staged * 4 + B * outer * (
            3 * 4 * 4 * owned + 4 * 128 * 8
        )
        assert r["device_read_bytes"] <= model, kernel
        results = 2 if kernel == "flash_dkdv" else 1
        written = B * (Hkv if results == 2 else Hq) * S * D * bytes_ * results
        written += B * Hq * S * 8 if kernel == "flash_forward" else 0
        assert r["device_write_bytes"] == written, kernel
        assert r["threadgroup_memory"] <= 32768
        per_tile = 3 if t["split"] == 2 and kernel != "flash_forward" else 2
        assert r["barriers"] == B * Hq * len(visible) * per_tile, kernel


def test_refusals_have_reasons(x64):
    def error(**kwargs):
        with pytest.raises(NotImplementedError) as caught:
            run(make_call(Sq=4, **kwargs), "metal")
        return str(caught.value)

    assert "take float16, bfloat16 and float32, got float64" in error(dtype="float64")
    assert "take head sizes up to 256, got 257 and 257" in error(D=257)
    assert "take head sizes up to 256, got 16 and 300" in error(Dv=300)
    assert "float32 bias, got float64" in error(bias=np.zeros((1, 1, 4, 4)))


def test_out_of_memory_and_a_lost_device_are_errors(emulator):
    call = make_call(12, Sq=16)
    right = run(call, "metal")
    emulator.configure({"memory_limit": 3000})
    with pytest.raises(Exception, match="the Metal device has no memory for"):
        run(call, "metal")
    emulator.configure({"memory_limit": -1, "lost": 1})
    with pytest.raises(Exception, match=r"GPU did not finish the Metal kernels: .*Hang"):
        run(call, "metal")
    emulator.configure({"lost": 0})
    equal(run(call, "metal"), right)


ALONE = """
import jax.numpy as jnp
import jax_flashtrain as ft
from jax_flashtrain_native import metal
metal.emulator.configure({{"{setting}": 0}})
q = jnp.ones((1, 8, 1, 16))
assert ft.flash_attention(q, q, q, implementation="jax").shape == q.shape
try:
    ft.flash_attention(q, q, q, implementation="metal")
except NotImplementedError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("available", "this machine has no Metal device"),
        ("supports_family", "need an Apple M1 or newer, got emulated"),
    ],
)
def test_machines_without_a_usable_device(setting, reason):
    out = subprocess.run(
        [sys.executable, "-c", ALONE.format(setting=setting)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert reason in out


def test_compiler_errors_carry_the_message(emulator):
    """What a user of an OS whose compiler refuses our source would see."""
    call = make_call(13, Sq=4, D=24)
    right = module().sources()["forward"]
    emulator.set_source("forward", right.replace("float m = -INFINITY", "bfloat17 m = -INFINITY"))
    with pytest.raises(Exception, match=r"(?s)refused flash_forward for float.*name 'bfloat17'"):
        run(call, "metal")
    emulator.set_source("forward", right)
    check(call, "metal")


def test_selftest_cases_of_the_acceptance_list():
    """Its inputs are those of the reference cases; one case of each kind runs here."""
    import test_acceptance

    from jax_flashtrain._src import selftest_metal

    assert len(selftest_metal.CASES) == len(test_acceptance.A)
    for ours, case in zip(selftest_metal.CASES, test_acceptance.A, strict=True):
        s = case["shapes"]
        assert (ours.Hq, ours.Hkv, ours.S, ours.D) == (s["Hq"], s["Hkv"], s["Sq"], s["D"])
        assert case["inputs"]["q"] == f"bf16(lcg(S0+{ours.seed}))"
        assert ours.causal == case["flags"]["causal"]
        assert ours.window == test_acceptance._window(case)
    np.testing.assert_array_equal(
        selftest_metal.lcg(selftest_metal._SEED, (32,)), test_acceptance.lcg(test_acceptance.S0, 32)
    )
    for ours in (selftest_metal.CASES[0], selftest_metal.CASES[11]):
        for _, options, visible in selftest_metal.ways(ours):
            for normal in (False, True):
                selftest_metal.check(ours, normal, options, visible)
