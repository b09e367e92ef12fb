"""The oracle checked by what shares nothing with it: finite differences, loops, known vectors."""

import numpy as np
import oracle
import pytest


def _naive(q, k, v, see, *, bias, slopes, sinks, scale, softcap, z, offset):
    """Plain Python loops over one batch element: q [Sq,Hq,D], k [Sk,Hkv,D]; returns o, L."""
    Sq, Hq, _ = q.shape
    Sk, Hkv, Dv = v.shape
    o, L = np.zeros((Sq, Hq, Dv)), np.full((Hq, Sq), -np.inf)
    for h in range(Hq):
        for i in range(Sq):
            logits = []
            for j in range(Sk):
                s = scale * np.dot(q[i, h], k[j, h // (Hq // Hkv)])
                s = softcap * np.tanh(s / softcap)
                logits.append(s + bias[h, i, j] - slopes[h] * abs(i + offset - j))
            keys = [j for j in range(Sk) if see[h, i, j]]
            terms = [np.exp(logits[j]) for j in keys]
            total = sum(terms) + np.exp(sinks[h])
            L[h, i] = np.log(total)
            for j, t in zip(keys, terms, strict=True):
                o[i, h] += t / total * z[h, i, j] * v[j, h // (Hq // Hkv)]
    return o, L


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1), "q_offset": 3},
    "lengths": {"q_lengths": np.array([4, 6]), "kv_lengths": np.array([7, 3])},
    "softcap": {"softcap": 0.7},
    "dropout": {"dropout_rate": 0.4, "dropout_seed": (7, 9)},
    "bnth": {"layout": "BNTH"},
}
ARRAYS = ("bias", "alibi_slopes", "sinks")


def _inputs(rng, layout="BTNH"):
    B, Sq, Sk, Hq, Hkv, D, Dv = 2, 6, 7, 4, 2, 3, 5
    arrays = {
        "q": rng.standard_normal((B, Sq, Hq, D)),
        "k": rng.standard_normal((B, Sk, Hkv, D)),
        "v": rng.standard_normal((B, Sk, Hkv, Dv)),
        "bias": rng.standard_normal((1, Hq, Sq, Sk)),
        "alibi_slopes": rng.uniform(0.1, 0.5, Hq),
        "sinks": rng.standard_normal(Hq),
    }
    do, dlse = rng.standard_normal((B, Sq, Hq, Dv)), rng.standard_normal((B, Hq, Sq))
    if layout == "BNTH":
        for name in "qkv":
            arrays[name] = arrays[name].swapaxes(1, 2)
        do = do.swapaxes(1, 2)
    return arrays, do, dlse


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_equal_finite_differences(options):
    rng = np.random.default_rng(0)
    arrays, do, dlse = _inputs(rng, options.get("layout", "BTNH"))
    mask = rng.random((2, 1, 6, 7)) < 0.8

    def loss(**changed):
        a = {**arrays, **changed}
        o, lse = oracle.attention(a.pop("q"), a.pop("k"), a.pop("v"), mask=mask, **a, **options)
        return (o * do).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum()

    a = dict(arrays)
    call = oracle.Attention(a.pop("q"), a.pop("k"), a.pop("v"), mask=mask, **a, **options)
    grads = call.backward(do, dlse)
    step = 1e-5
    for name, grad in zip(("q", "k", "v", *ARRAYS), grads, strict=True):
        assert grad.shape == arrays[name].shape
        numeric = np.zeros_like(grad)
        for index in np.ndindex(grad.shape):
            up, down = arrays[name].copy(), arrays[name].copy()
            up[index] += step
            down[index] -= step
            numeric[index] = (loss(**{name: up}) - loss(**{name: down})) / (2 * step)
        np.testing.assert_allclose(grad, numeric, atol=2e-8, rtol=1e-6, err_msg=name)
        assert np.abs(grad).max() > 1e-3  # a vacuous zero would pass otherwise


def test_forward_equals_loops():
    rng = np.random.default_rng(1)
    arrays, _, _ = _inputs(rng)
    mask = rng.random((2, 4, 6, 7)) < 0.7
    ids = rng.integers(0, 2, (2, 6)), rng.integers(0, 2, (2, 7))
    o, lse = oracle.attention(
        arrays["q"], arrays["k"], arrays["v"], bias=arrays["bias"], mask=mask, segment_ids=ids,
        alibi_slopes=arrays["alibi_slopes"], sinks=arrays["sinks"], softcap=1.5, scale=0.8,
        causal=True,
        window=(3, None), q_offset=np.array([1, 2]), dropout_rate=0.3, dropout_seed=(1, 2),
        q_lengths=np.array([6, 5]), kv_lengths=np.array([99, 6]),
    )  # fmt: skip
    keep = oracle.dropout_keep((1, 2), 2, 4, 6, 7, 0.3)
    z = keep * 65536 / (65536 - round(0.3 * 65536))
    for b, offset, rows, keys in ((0, 1, 6, 7), (1, 2, 5, 6)):
        see = np.zeros((4, 6, 7), bool)
        for h, i, j in np.ndindex(see.shape):
            at = i + offset
            see[h, i, j] = (
                mask[b, h, i, j] and ids[0][b, i] == ids[1][b, j] and at - 3 <= j <= at
                and i < rows and j < keys
            )  # fmt: skip
        want_o, want_lse = _naive(
            arrays["q"][b], arrays["k"][b], arrays["v"][b], see, bias=arrays["bias"][0],
            slopes=arrays["alibi_slopes"], sinks=arrays["sinks"], scale=0.8, softcap=1.5, z=z[b],
            offset=offset,
        )  # fmt: skip
        np.testing.assert_allclose(o[b], want_o, atol=1e-14)
        np.testing.assert_allclose(lse[b], want_lse, atol=1e-14)


def test_philox_published_vectors():
    """The known-answer vectors of the Random123 distribution for philox4x32 with 10 rounds."""
    vectors = [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, want in vectors:
        assert tuple(int(w) for w in oracle.philox4x32_10(counter, key)) == want


def test_dropout_layout_of_the_draws():
    """Key j takes half j % 2 of word (j % 8) // 2 of the call (i, j // 8, b * Hq + h, 0)."""
    keep = oracle.dropout_keep((5, 6), 2, 3, 4, 21, 0.5)
    assert keep.shape == (2, 3, 4, 21)
    for b, h, i, j in np.ndindex(keep.shape):
        word = int(oracle.philox4x32_10((i, j // 8, b * 3 + h, 0), (5, 6))[j % 8 // 2])
        draw = word >> 16 if j % 2 else word & 0xFFFF
        assert keep[b, h, i, j] == (draw >= 32768)
    assert abs(oracle.dropout_keep((1, 1), 1, 8, 64, 64, 0.25).mean() - 0.75) < 0.01


def test_empty_rows_and_sinks():
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 3, 2, 4)) for _ in range(3))
    mask = np.array([[True] * 3, [False] * 3, [True, False, True]])[None, None]
    do, dlse = np.ones_like(q), np.ones((1, 2, 3))
    do[0, 1], dlse[0, :, 1] = np.nan, np.inf
    call = oracle.Attention(q, k, v, mask=mask)
    assert np.all(call.o[0, 1] == 0)
    assert np.all(call.lse[0, :, 1] == -np.inf)
    grads = call.backward(do, dlse)
    assert all(np.isfinite(g).all() for g in grads[:3])
    assert np.all(grads.dq[0, 1] == 0)

    call = oracle.Attention(q, k, v, mask=mask, sinks=np.array([0.5, -np.inf]))
    np.testing.assert_array_equal(call.lse[0, :, 1], [0.5, -np.inf])
    dlse[0, :, 1] = 3.0
    quiet = np.where(np.isnan(do), 0.0, do)
    base = oracle.Attention(q, k, v, mask=mask, sinks=np.array([0.5, -np.inf])).backward(
        quiet, np.where(mask.any(-1), dlse, 0.0)
    )
    grads = call.backward(do, dlse)
    np.testing.assert_allclose(grads.dsinks - base.dsinks, [3.0, 0.0], atol=1e-14)


def test_nan_at_hidden_places_reaches_nothing():
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 4, 2, 4)) for _ in range(3))
    bias = rng.standard_normal((1, 2, 4, 4))
    args = {"kv_lengths": np.array([3]), "q_lengths": np.array([3])}
    clean = oracle.Attention(q, k, v, bias=bias, **args)
    q2, k2, v2, bias2 = (x.copy() for x in (q, k, v, bias))
    q2[:, 3] = k2[:, 3] = v2[:, 3] = np.nan
    bias2[..., 3, :] = bias2[..., 3] = np.nan
    dirty = oracle.Attention(q2, k2, v2, bias=bias2, **args)
    np.testing.assert_array_equal(clean.o, dirty.o)
    do = rng.standard_normal(q.shape)
    for a, b in zip(clean.backward(do), dirty.backward(do), strict=True):
        if a is not None:
            np.testing.assert_array_equal(a, b)


def test_batch_dimensions_and_bias_patterns():
    """Two leading dimensions, a bias without the first: the sum runs over what is missing."""
    rng = np.random.default_rng(4)
    q, k, v, do = (rng.standard_normal((2, 3, 4, 2, 3)) for _ in range(4))
    bias = rng.standard_normal((3, 1, 4, 1))
    call = oracle.Attention(q, k, v, bias=bias)
    grads = call.backward(do)
    total = 0.0
    for a in range(2):
        part = oracle.Attention(q[a], k[a], v[a], bias=bias)
        np.testing.assert_allclose(call.o[a], part.o, atol=1e-14)
        total = total + part.backward(do[a]).dbias
    np.testing.assert_allclose(grads.dbias, total, atol=1e-14)
    assert grads.dbias.shape == bias.shape
    plain = oracle.attention(q[0, 0], k[0, 0], v[0, 0], bias=bias[0])
    np.testing.assert_allclose(call.o[0, 0], plain[0], atol=1e-14)


def test_no_keys_and_no_rows():
    o, lse = oracle.attention(np.ones((1, 4, 2, 3)), np.ones((1, 0, 1, 3)), np.ones((1, 0, 1, 3)))
    assert np.all(o == 0)
    assert np.all(lse == -np.inf)
    o, lse = oracle.attention(np.ones((1, 0, 2, 3)), np.ones((1, 4, 1, 3)), np.ones((1, 4, 1, 5)))
    assert o.shape == (1, 0, 2, 5)
    assert lse.shape == (1, 2, 0)
