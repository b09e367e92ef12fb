"""dot_product_attention against jax.nn's: a grid, and the cases that JAX itself tests.

The drop-in means what jax.nn means (causal is top-left, int windows, 4-d masks), with two
differences that the documentation states: an empty row is 0 with L = -inf, and hidden NaN reaches
nothing.
"""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from checking import FORWARD_TARGET, draw
from tolerances import check_close

from jax_flashtrain import dot_product_attention

HAS_RESIDUAL = "return_residual" in inspect.signature(jax.nn.dot_product_attention).parameters


def _arrays(seed=0, B=2, T=9, S=9, N=4, K=2, H=8, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, H)}
    return {n: draw(rng, s, np.float32).astype(dtype) for n, s in shapes.items()}


def _answer(function, arrays, cotangent, *, bias=None, mask=None, **options):
    """o, then the gradients of query, key, value and (where there is one) bias."""
    static = {
        k: options.pop(k) for k in ("is_causal", "scale", "local_window_size") if k in options
    }

    @jax.jit
    def run(arrays, bias, mask, cotangent, options):
        def f(query, key, value, *b):
            return function(query, key, value, b[0] if b else None, mask, **static, **options)

        o, pull = jax.vjp(f, *arrays, *([] if bias is None else [bias]))
        return [o, *pull(cotangent)]

    return run(tuple(arrays.values()), bias, mask, cotangent, options)


def _theirs(arrays, cotangent, **options):
    """The answer of jax.nn; it refuses float16 on CPUs, so there in float32."""
    dtype = arrays["query"].dtype
    if dtype != np.float16:
        return _answer(jax.nn.dot_product_attention, arrays, cotangent, **options)
    wide = {name: x.astype(np.float32) for name, x in arrays.items()}
    cotangent = cotangent.astype(np.float32)
    return [
        x.astype(dtype) for x in _answer(jax.nn.dot_product_attention, wide, cotangent, **options)
    ]


def _compare(arrays, *, tolerance=2e-5, live=None, **options):
    """Ours against jax.nn, o and every gradient. ``live`` [B, T, 1, 1]: rows that see something."""
    query = arrays["query"]
    cotangent = draw(np.random.default_rng(9), query.shape, np.float32)
    if live is not None:
        cotangent = cotangent * live  # jax.nn gives empty rows a uniform gradient, ours none
    cotangent = cotangent.astype(query.dtype)
    ours = _answer(dot_product_attention, arrays, cotangent, **options)
    theirs = _theirs(arrays, cotangent, **options)
    names = ["o", "dquery", "dkey", "dvalue", "dbias"]
    for name, x, y in zip(names, ours, theirs, strict=False):
        assert x.dtype == y.dtype, name
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        if name == "o" and live is not None:
            assert np.all(np.where(live, 0, x) == 0)
            x, y = x * live, np.where(live, y, 0)
        check_close(name, x, y, atol=tolerance * max(1.0, np.abs(y).max(initial=0.0)))
    return ours


# ---- the grid -----------------------------------------------------------------------------------

SIZES = {"square": (9, 9), "long keys": (5, 12), "long queries": (12, 5)}
MASKS = {
    "none": None,
    "[1,1,T,S]": (1, 1, "T", "S"),
    "[B,1,1,S]": ("B", 1, 1, "S"),
    "[B,N,T,S]": ("B", "N", "T", "S"),
    "[N,T,S]": ("N", "T", "S"),
    "[1,S]": (1, "S"),
}


def _shape(letters, **sizes):
    return tuple(sizes.get(x, x) for x in letters)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_masks(sizes, mask, is_causal):
    """Every rank of mask, with causal: jax.nn's causal is top-left for T != S too."""
    T, S = sizes
    array = None
    if mask is not None:
        shape = _shape(mask, B=2, N=4, T=T, S=S)
        array = np.random.default_rng(1).random(shape) < 0.8
        array[..., 0] = True  # no empty row: those differ by intent
    _compare(_arrays(T=T, S=S), mask=array, is_causal=is_causal)


@pytest.mark.parametrize("bias", list(MASKS.values())[1:], ids=list(MASKS)[1:])
def test_biases(bias):
    array = draw(np.random.default_rng(2), _shape(bias, B=2, N=4, T=9, S=12), np.float32)
    _compare(_arrays(S=12), bias=array, is_causal=True)


WINDOWS = {"int": 2, "zero": 0, "pair": (3, 1), "left": (4, 0), "wide": (50, 50)}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_windows(window, is_causal):
    """An int is symmetric, both bounds are inclusive, and positions are top-left."""
    _compare(_arrays(T=7, S=9), local_window_size=window, is_causal=is_causal)


@pytest.mark.parametrize("which", ["query", "key", "both"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths(which, is_causal):
    options = {}
    if which != "key":
        options["query_seq_lengths"] = jnp.asarray([4, 9], jnp.int32)
    if which != "query":
        options["key_value_seq_lengths"] = jnp.asarray([9, 3], jnp.int32)
    lengths = np.asarray(options.get("query_seq_lengths", [9, 9]))
    live = (np.arange(9) < lengths[:, None])[..., None, None]
    _compare(_arrays(), is_causal=is_causal, live=live, **options)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_heads_and_scale(heads, scale):
    _compare(_arrays(N=heads[0], K=heads[1]), scale=scale)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_small_dtypes(dtype):
    _compare(_arrays(T=33, S=40, dtype=dtype), tolerance=0.02, is_causal=True)


def test_everything_together():
    rng = np.random.default_rng(3)
    mask = rng.random((2, 1, 9, 12)) < 0.8
    mask[..., :3] = True
    _compare(
        _arrays(S=12), bias=draw(rng, (1, 4, 1, 12), np.float32), mask=mask, is_causal=True,
        scale=0.4, local_window_size=(5, 2), key_value_seq_lengths=jnp.asarray([12, 10], jnp.int32),
    )  # fmt: skip


def test_unbatched():
    """[T, N, H] works, with the residual [T, N]."""
    arrays = {n: x[0] for n, x in _arrays().items()}
    _compare(arrays, is_causal=True)
    o, lse = dot_product_attention(*arrays.values(), return_residual=True)
    assert o.shape == (9, 4, 8)
    assert lse.shape == (9, 4)


# ---- the residual -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_residual(dtype):
    """Shape [B, T, N], the dtype of key, and no gradient flows through it."""
    arrays = _arrays(T=7, S=9, dtype=dtype)
    bias = draw(np.random.default_rng(1), (1, 4, 7, 9), np.float32)
    o, lse = dot_product_attention(*arrays.values(), bias, return_residual=True, is_causal=True)
    assert (lse.shape, lse.dtype) == ((2, 7, 4), jnp.dtype(dtype))
    _, want = oracle.attention(*arrays.values(), bias=bias, causal=True, q_offset=0)
    tolerance = 1e-5 if dtype == jnp.float32 else 0.03
    check_close("residual", np.asarray(lse, float), want.swapaxes(1, 2), atol=tolerance)
    if HAS_RESIDUAL:
        theirs = jax.nn.dot_product_attention(
            *arrays.values(), bias, return_residual=True, is_causal=True
        )
        assert (lse.shape, lse.dtype) == (theirs[1].shape, theirs[1].dtype)
        check_close(
            "residual", np.asarray(lse, float), np.asarray(theirs[1], float), atol=tolerance
        )
        check_close("o", np.asarray(o, float), np.asarray(theirs[0], float), atol=tolerance)

    def loss(q, k, v):
        return dot_product_attention(q, k, v, return_residual=True)[1].astype(jnp.float32).sum()

    for grad in jax.grad(loss, (0, 1, 2))(*arrays.values()):
        assert not np.asarray(grad, float).any()


def test_empty_rows_differ_by_intent():
    """jax.nn averages all values in a row that sees nothing; ours gives 0 and L = -inf."""
    arrays = _arrays()
    mask = np.ones((1, 1, 9, 9), bool)
    mask[..., 4, :] = False
    o, lse = dot_product_attention(*arrays.values(), mask=mask, return_residual=True)
    assert np.all(np.asarray(o[:, 4]) == 0)
    assert np.all(np.asarray(lse[:, 4]) == -np.inf)
    live = (np.arange(9) != 4)[None, :, None, None]
    _compare(arrays, mask=mask, live=live)


def test_hidden_nan_reaches_nothing():
    arrays = _arrays()
    clean = dot_product_attention(*arrays.values(), key_value_seq_lengths=jnp.asarray([5, 5]))
    arrays["key"][:, 5:] = arrays["value"][:, 5:] = np.nan
    dirty = dot_product_attention(*arrays.values(), key_value_seq_lengths=jnp.asarray([5, 5]))
    check_close("o", dirty, clean)


# ---- what JAX's own tests try -------------------------------------------------------------------


@pytest.mark.parametrize("use_vmap", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_jax_case_groups(dtype, groups, use_vmap):
    """B 2, T = S 128, N 4, H 32: GQA equals repeated keys and values, plain and under vmap."""
    N, H = 4, 32
    arrays = _arrays(T=128, S=128, N=N, K=N // groups, H=H, dtype=dtype)
    cotangent = draw(np.random.default_rng(4), (2, 128, N, H), np.float32).astype(dtype)
    repeated = dict(arrays)
    for name in ("key", "value"):
        repeated[name] = np.repeat(arrays[name], groups, axis=2)
    function = dot_product_attention
    if use_vmap:
        function = jax.vmap(function, in_axes=(0, 0, 0, None, None))
    o, dq, dk, dv = _answer(function, arrays, cotangent)
    want = _theirs(repeated, cotangent)
    summed = [np.asarray(x, float).reshape(2, 128, N // groups, groups, H).sum(3) for x in want[2:]]
    for name, x, y in zip(
        ("o", "dq", "dk", "dv"), (o, dq, dk, dv), (*want[:2], *summed), strict=True
    ):
        x, y = np.asarray(x, float), np.asarray(y, float)
        check_close(name, x, y, atol=0.01 * max(1, np.abs(y).max()), rtol=0.01)


JAX_MODES = [
    ("bias",), ("causal",), ("padding",), ("custom",), ("causal", "padding"), ("custom", "padding"),
    ("bias", "causal"), ("causal", "sliding_window"), ("sliding_window",),
]  # fmt: skip


@pytest.mark.parametrize("modes", JAX_MODES, ids="+".join)
def test_jax_case_masks(modes):
    """bf16, B 2, T = S 128, N 4, H 32: the combinations that JAX holds cuDNN to."""
    T = S = 128
    arrays = _arrays(T=T, S=S, N=4, K=4, H=32, dtype=jnp.bfloat16)
    options, live = {"is_causal": "causal" in modes}, None
    if "padding" in modes:
        options["query_seq_lengths"] = jnp.asarray([T // 2, T // 4], jnp.int32)
        options["key_value_seq_lengths"] = jnp.asarray([S // 4, S // 2], jnp.int32)
        live = (np.arange(T) < np.asarray([[T // 2], [T // 4]]))[..., None, None]
    if "custom" in modes:
        options["mask"] = np.tril(np.ones((T, S), bool))[None, None]
    if "bias" in modes:
        bias = draw(np.random.default_rng(4), (1, 4, T, S), np.float32)
        options["bias"] = bias.astype(jnp.bfloat16)
    if "sliding_window" in modes:
        options["local_window_size"] = (3, 2) if "causal" in modes else (3, 0)
    _compare(arrays, tolerance=0.02, live=live, **options)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("use_vmap", [False, True])
def test_jax_case_bias_gradient(batch, use_vmap):
    """bf16, one array as query, key and value, a bias per batch element and a mask of rank 3.

    cuDNN refuses dbias for a batch above 1; ours has it.
    """
    S, N, H = 128, 4, 32
    rng = np.random.default_rng(5)
    x = draw(rng, (batch, S, N, H), np.float32).astype(jnp.bfloat16)
    bias = draw(rng, (batch, N, S, S), np.float32).astype(jnp.bfloat16)
    mask = jnp.ones((1, 1, S), jnp.bool_)

    def both(function):
        def attention(x, bias, mask):
            return function(query=x, key=x, value=x, bias=bias, mask=mask)

        if use_vmap:
            attention = jax.vmap(attention, in_axes=(0, 0, None))

        def run(x, bias, mask):
            o, pull = jax.vjp(lambda x, bias: attention(x, bias, mask), x, bias)
            return o, *pull(x)

        return jax.jit(run)(x, bias, mask)

    ours, theirs = both(dot_product_attention), both(jax.nn.dot_product_attention)
    for name, a, b in zip(("o", "dx", "dbias"), ours, theirs, strict=True):
        a, b = np.asarray(a, float), np.asarray(b, float)
        check_close(name, a, b, atol=0.02 * max(1, np.abs(b).max()), rtol=0.02)


# ---- the signature and its errors ---------------------------------------------------------------


def test_signature():
    """Every parameter of jax.nn's function, with its kind and default."""
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(dot_product_attention).parameters
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name
        assert ours[name].default == parameter.default, name


def _zeros(**shapes):
    base = {"query": (2, 9, 4, 8), "key": (2, 9, 2, 8), "value": (2, 9, 2, 8)} | shapes
    return {n: jnp.zeros(s) for n, s in base.items()}


REFUSED = {
    "value shape": (_zeros(value=(2, 8, 2, 8)), {}, "value"),
    "value head size": (_zeros(value=(2, 9, 2, 4)), {}, "value"),
    "query head size": (_zeros(query=(2, 9, 4, 4)), {}, "query"),
    "query batch": (_zeros(query=(3, 9, 4, 8)), {}, "query"),
    "heads": (_zeros(query=(2, 9, 3, 8)), {}, "3.*2|multiple"),
    "query dtype": (_zeros() | {"query": jnp.zeros((2, 9, 4, 8), jnp.bfloat16)}, {}, "query"),
    "mask dtype": (_zeros(), {"mask": jnp.zeros((1, 1, 9, 9))}, "mask"),
    "bias rank": (_zeros(), {"bias": jnp.zeros((1, 1, 1, 9, 9))}, "bias"),
    "mask rank": (_zeros(), {"mask": jnp.zeros((1, 1, 1, 9, 9), bool)}, "mask"),
    "length dtype": (
        _zeros(), {"query_seq_lengths": jnp.zeros(2)}, "query_seq_lengths",
    ),
    "length shape": (
        _zeros(), {"key_value_seq_lengths": jnp.zeros(3, jnp.int32)}, "key_value_seq_lengths",
    ),
    "implementation": (_zeros(), {"implementation": "magic"}, "implementation"),
}  # fmt: skip


@pytest.mark.parametrize(("arrays", "options", "text"), REFUSED.values(), ids=REFUSED)
def test_errors(arrays, options, text):
    """What jax.nn refuses is refused, as a ValueError or TypeError that names jax's argument."""
    with pytest.raises(Exception):  # noqa: B017, PT011 (whatever jax.nn raises)
        jax.nn.dot_product_attention(**arrays, **options)
    with pytest.raises((ValueError, TypeError), match=f"(?s){text}"):
        dot_product_attention(**arrays, **options)


def test_implementations():
    """None and "native" run our kernel; "xla" (and "cudnn") are jax.nn's own."""
    arrays = list(_arrays().values())

    def text(implementation):
        f = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, implementation=implementation))
        return f.lower(*arrays).as_text()

    assert FORWARD_TARGET in text(None)
    assert FORWARD_TARGET not in text("xla")
    want = jax.nn.dot_product_attention(*arrays, implementation="xla")
    check_close("o", dot_product_attention(*arrays, implementation="xla"), want)
    if jax.default_backend() == "cpu":
        with pytest.raises(Exception):  # noqa: B017, PT011 (jax's own error)
            jax.block_until_ready(dot_product_attention(*arrays, implementation="cudnn"))


def test_positional_arguments():
    """(query, key, value, bias, mask) may be positional, as in jax.nn."""
    arrays = list(_arrays().values())
    rng = np.random.default_rng(6)
    bias, mask = draw(rng, (1, 4, 9, 9), np.float32), rng.random((1, 1, 9, 9)) < 0.9
    for parts in itertools.product((bias, None), (mask, None)):
        ours = dot_product_attention(*arrays, *parts)
        check_close("o", ours, jax.nn.dot_product_attention(*arrays, *parts), atol=2e-6)
