"""The calls that hunt mutants: test_metal_kernels.py condensed, compiled once a process."""

from __future__ import annotations

import jax
import numpy as np
from checking import make_call, references, value_and_grads, verify


class Probe:
    """A call with its oracle answer; ``check`` raises where the kernels' answer is off."""

    def __init__(self, call, spoil=None):
        self.call, self.known = call, references(call)
        g, self.args = value_and_grads(call, "metal")
        self.args = spoil(self.args) if spoil else self.args
        self.run = jax.jit(g)

    def check(self) -> None:
        got = {name: np.asarray(x) for name, x in self.run(*self.args).items()}
        verify(self.call, got, self.known)


def _hidden_nan(args, rows_of_lse: bool = True):
    """NaN in everything that nobody sees: keys from 9 on of element 0, rows from 12 on.

    With sinks the dL of an empty row counts (dsinks receives it).
    """
    do, dlse, q, k, v, *rest = (np.array(x) if hasattr(x, "shape") else x for x in args)
    k[0, 9:], v[0, 9:] = np.nan, np.inf
    q[0, 12:], do[0, 12:] = np.nan, np.nan
    if rows_of_lse:
        dlse[0, :, 12:] = np.inf
    return (do, dlse, q, k, v, *rest)


def make() -> list[Probe]:
    rng = np.random.default_rng(3)
    f32 = np.float32
    base = {"B": 2, "Sq": 21, "Sk": 35, "Hq": 4, "Hkv": 2, "D": 16}
    ragged = {"Sq": 69, "Sk": 75, "Hq": 2, "Hkv": 1, "D": 16}
    ids = (np.sort(rng.integers(0, 3, (2, 21)), -1).astype(np.int32),
           np.sort(rng.integers(0, 3, (2, 35)), -1).astype(np.int32))  # fmt: skip
    mask = rng.random((2, 4, 21, 35)) < 0.6
    mask[0, :, 3] = False
    lengths = {
        "kv_lengths": np.asarray([9, 35], np.int32),
        "q_lengths": np.asarray([12, 21], np.int32),
    }
    slopes = np.asarray([0.1, 0.3, 0.05, 0.2], f32)
    sinks = rng.standard_normal(4).astype(f32)
    rows = np.resize(np.asarray([0, -1e9, 1e4, -65504], f32), 21).reshape(1, 1, 21, 1)

    def bias(*shape, dtype=f32):
        return rng.standard_normal(shape).astype(dtype)

    calls = [
        make_call(1, **ragged),
        # the windows' ends fall on the first and last row of a tile of 32
        make_call(2, **ragged, window=(7, 27)),
        make_call(3, **base, mask=mask, softcap=1.5, bias=bias(1, 4, 21, 35), std=2.0),
        make_call(4, **base, causal=True, q_offset=np.asarray([3, 30], np.int32),
                  alibi_slopes=slopes, softcap=2.0),
        make_call(5, **base, segment_ids=ids, sinks=sinks),
        make_call(6, **base, dropout_rate=0.3, dropout_key=jax.random.key(5)),
        make_call(7, **base, bias=bias(1, 1, 1, 35, dtype=np.float16)),
        make_call(8, **base, bias=bias(2, 1, 21, 1), softcap=2.0),
        make_call(9, **base, bias=rows),
        make_call(10, **ragged, bias=bias(1, 1, 1, 75), causal=True),
        make_call(11, Sq=40, Sk=37, Hq=2, Hkv=1, D=144, bias=bias(1, 1, 40, 37)),
        make_call(12, **(base | {"D": 13, "Dv": 33}), causal=True),
        make_call(13, **(base | {"D": 144, "Sq": 5, "Sk": 100})),
        # sums over more rows than one simdgroup takes
        make_call(14, **ragged, sinks=sinks[:2], alibi_slopes=slopes[:2]),
    ]  # fmt: skip
    probes = [Probe(c) for c in calls]
    probes += [
        Probe(make_call(20, **base, **lengths), _hidden_nan),
        Probe(make_call(21, **base, **lengths, sinks=sinks), lambda a: _hidden_nan(a, False)),
        BroadcastProbe(),
        HugeProbe(),
        ResidualProbe(),
    ]
    return probes


class ResidualProbe:
    """Rows without keys have m = 0 and c = 1e30, with a sink m = sink and c = 0; o is 0."""

    def __init__(self):
        from jax_flashtrain._src import native
        from jax_flashtrain._src.spec import AttentionSpec, Operand, present_mask

        rng = np.random.default_rng(8)
        q, k, v = rng.standard_normal((3, 1, 9, 2, 8)).astype(np.float32)
        shapes = [jax.ShapeDtypeStruct(q.shape, np.float32)]
        shapes += [jax.ShapeDtypeStruct((1, 2, 9), np.float32)] * 2
        sinks = np.asarray([[0.5, -2.0]], np.float32)

        def call(operands):
            spec = AttentionSpec(scale=0.3, causal=True)
            attributes = spec.attributes(present=present_mask(operands), batch_dims=1)
            target = native.METAL_FORWARD_TARGET
            return jax.ffi.ffi_call(target, shapes)(*operands.values(), **attributes)

        plain = {Operand.Q: q, Operand.K: k, Operand.V: v}
        plain[Operand.Q_OFFSET] = np.full((1,), -4, np.int32)  # rows 0..3 see nothing
        self.run = lambda: [jax.jit(call)(x) for x in (plain, plain | {Operand.SINKS: sinks})]

    def check(self) -> None:
        (o, m, c), (os, ms, cs) = (tuple(np.asarray(x) for x in y) for y in self.run())
        assert (o[:, :4] == 0).all()
        assert (os[:, :4] == 0).all()
        assert (m[:, :, :4] == 0).all(), m
        assert (c[:, :, :4] == np.float32(1e30)).all(), c
        np.testing.assert_array_equal(ms[0, :, :4], np.repeat([[0.5], [-2.0]], 4, 1))
        np.testing.assert_allclose(cs[:, :, :4], 0, atol=1e-6)


class HugeProbe:
    """At logits of -1e9 the weights of a row still sum to 1 in the backward: sum_j dv_j = rows."""

    def __init__(self):
        self.call = make_call(
            30, Sq=40, Sk=33, Hq=1, D=16, std=0.5, bias=np.full((1, 1, 40, 33), -1e9, np.float32)
        )
        g, (do, dlse, *arrays) = value_and_grads(self.call, "metal")
        self.run, self.args = jax.jit(g), (np.ones_like(do), np.zeros_like(dlse), *arrays)

    def check(self) -> None:
        dv = np.asarray(self.run(*self.args)["dv"])
        np.testing.assert_allclose(dv.sum(1), np.full((1, 1, 16), 40.0), rtol=1e-5)


class BroadcastProbe:
    """k and v without the mapped dimension: dk and dv are summed over it, in the kernel.

    That is what the transpose of a mapped forward asks for (autodiff="jvp"); the default backward
    is mapped itself, and its gradients are summed outside.
    """

    def __init__(self):
        from jax_flashtrain import flash_attention

        rng = np.random.default_rng(7)
        q, do = rng.standard_normal((2, 3, 9, 2, 8)).astype(np.float32)[:, :, None]
        k, v = rng.standard_normal((2, 11, 2, 8)).astype(np.float32)
        self.args = q[:, 0], k, v, do[:, 0]

        def grads(implementation):
            def loss(q, k, v, do):
                attend = jax.vmap(
                    lambda q: flash_attention(
                        q, k, v, implementation=implementation, autodiff="jvp"
                    )
                )
                return (attend(q) * do).sum()

            return jax.jit(jax.grad(loss, (0, 1, 2)))

        self.run, self.want = grads("metal"), grads("jax")(*self.args)

    def check(self) -> None:
        for got, want in zip(self.run(*self.args), self.want, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
