"""One test per error text of the front end, and the keywords that people bring along."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flashtrain
from jax_flashtrain import explain, flash_attention

Q = np.zeros((2, 5, 4, 8), np.float32)
K = np.zeros((2, 7, 2, 8), np.float32)

VALUE, TYPE = ValueError, TypeError


def array(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


# (name, arguments replaced, kind of error, the whole text or a pattern of it)
CASES = [
    (
        "rank",
        dict(q=array(5, 8)),
        VALUE,
        r"q must have at least 3 dimensions \[\.\.\., seq, heads, ",
    ),
    (
        "rank differs",
        dict(k=K[0]),
        VALUE,
        r"k must have as many dimensions as q, got q \(2, 5, 4, 8\)",
    ),
    ("batch", dict(k=K[:1]), VALUE, r"k must have the leading \(batch\) dimensions of q"),
    ("heads", dict(q=array(2, 5, 3, 8)), VALUE, r"multiple of the heads of k and v .* got 3 and 2"),
    ("no heads", dict(q=array(2, 5, 0, 8)), VALUE, r"the heads of q must be at least 1, got 0"),
    (
        "no size",
        dict(q=array(2, 5, 4, 0), k=array(2, 7, 2, 0)),
        VALUE,
        r"head size of q and k must be",
    ),
    (
        "head size",
        dict(k=array(2, 7, 2, 9)),
        VALUE,
        r"k must have the head size of q, got q 8 and k 9",
    ),
    (
        "v length",
        dict(v=array(2, 6, 2, 8)),
        VALUE,
        r"v must have the sequence length and the heads",
    ),
    ("v heads", dict(v=array(2, 7, 1, 8)), VALUE, r"v must have the sequence length and the heads"),
    ("dtypes", dict(k=K.astype(np.float16)), TYPE, r"got q float32, k float16, v float32"),
    ("int", dict(q=Q.astype(int), k=K.astype(int), v=K.astype(int)), TYPE, r"float64, got q int"),
    ("complex", dict(q=Q + 0j), TYPE, r"must share one dtype .* got q complex64"),
    ("no array", dict(q="text"), TYPE, r"q must be an array, got 'text' \(str\)"),
    ("layout", dict(layout="BSHD"), VALUE, r"layout must be one of 'BTNH', 'BNTH', got 'BSHD'"),
    ("layout type", dict(layout=3), TYPE, r"layout must be a string"),
    (
        "implementation",
        dict(implementation="cuda"),
        VALUE,
        r"one of None, 'native', 'jax', 'metal'",
    ),
    ("autodiff", dict(autodiff="fwd"), VALUE, r"autodiff must be one of None, 'vjp', 'jvp'"),
    (
        "precision",
        dict(precision="tf32"),
        VALUE,
        r"one of 'default', 'high', 'highest', got 'tf32'",
    ),
    ("causal", dict(causal=1), TYPE, r"causal must be True or False"),
    ("return_lse", dict(return_lse="yes"), TYPE, r"return_lse must be True or False"),
    ("deterministic", dict(deterministic=1), TYPE, r"deterministic must be True or False"),
    ("offset type", dict(q_offset=1.5), TYPE, r"q_offset must be an int or an integer array"),
    (
        "offset dtype",
        dict(q_offset=array(2)),
        TYPE,
        r"q_offset must hold integers, got dtype float32",
    ),
    (
        "offset shape",
        dict(q_offset=array(3, dtype=np.int32)),
        VALUE,
        r"batch shape \[2\], got shape \[3\]",
    ),
    ("offset range", dict(q_offset=1 << 40), VALUE, r"q_offset must fit int32, got 1099511627776"),
    ("window int", dict(window=4), TYPE, r"window must be a pair .* got 4 \(int\)"),
    ("window length", dict(window=(1, 2, 3)), VALUE, r"window must have two sides .* got 3"),
    ("window negative", dict(window=(-1, 0)), VALUE, r"window left must be >= 0, got -1: use None"),
    ("window float", dict(window=(2.0, 0)), TYPE, r"window left must be an int"),
    ("window bool", dict(window=(True, 0)), TYPE, r"window left must be an int"),
    (
        "window array",
        dict(window=(None, np.zeros(2, int))),
        VALUE,
        r"window right must be a scalar",
    ),
    ("window dtype", dict(window=(None, np.zeros(()))), TYPE, r"window right must hold integers"),
    ("lengths float", dict(kv_lengths=array(2)), TYPE, r"kv_lengths must hold integers, got"),
    (
        "lengths shape",
        dict(q_lengths=array(3, dtype=np.int32)),
        VALUE,
        r"q_lengths must be a scalar or",
    ),
    ("lengths list", dict(q_lengths=[1, 2]), TYPE, r"q_lengths must be an integer array"),
    (
        "mask float",
        dict(mask=array(5, 7)),
        TYPE,
        r"mask must be boolean .* float32: an additive .* bias=",
    ),
    ("mask int", dict(mask=array(5, 7, dtype=np.int32)), TYPE, r"mask must be boolean .* bias="),
    (
        "mask shape",
        dict(mask=array(5, 6, dtype=bool)),
        VALUE,
        r"mask must be .*= \[2, 4, 5, 7\] .* \[5, 6\]",
    ),
    ("mask rank", dict(mask=array(1, 1, 1, 5, 7, dtype=bool)), VALUE, r"mask must be"),
    (
        "bias bool",
        dict(bias=array(5, 7, dtype=bool)),
        TYPE,
        r"bias must be .* a boolean mask goes to mask=",
    ),
    (
        "bias int",
        dict(bias=array(5, 7, dtype=np.int32)),
        TYPE,
        r"bias must be one of .* got dtype int32",
    ),
    (
        "bias shape",
        dict(bias=array(3, 1, 5, 7)),
        VALUE,
        r"bias must be .* got shape \[3, 1, 5, 7\]",
    ),
    (
        "slopes",
        dict(alibi_slopes=array(3)),
        VALUE,
        r"alibi_slopes must be \[\*batch, Hq\] with Hq = 4",
    ),
    (
        "slopes int",
        dict(alibi_slopes=array(4, dtype=np.int32)),
        TYPE,
        r"alibi_slopes must be one of",
    ),
    ("sinks", dict(sinks=array(2, 4)), VALUE, r"sinks must be \[Hq\]"),
    (
        "sinks heads",
        dict(sinks=array(2)),
        VALUE,
        r"sinks must be \[Hq\] with Hq = 4, got shape \(2,\)",
    ),
    (
        "ids single",
        dict(segment_ids=array(2, 5, dtype=np.int32)),
        VALUE,
        r"a pair .* Sq = 5, Sk = 7",
    ),
    (
        "ids length",
        dict(segment_ids=(array(5, dtype=int), array(5, dtype=int))),
        VALUE,
        r"Sk = 7 as last",
    ),
    ("ids float", dict(segment_ids=(array(5), array(7))), TYPE, r"segment_ids must hold integers"),
    ("ids three", dict(segment_ids=(1, 2, 3)), TYPE, r"segment_ids must be one integer array"),
    (
        "ids batch",
        dict(segment_ids=(array(3, 5, dtype=int), array(7, dtype=int))),
        VALUE,
        r"\[\*batch, Sq\]",
    ),
    ("scale type", dict(scale="big"), TYPE, r"scale must be a Python number"),
    (
        "scale traced",
        dict(scale=array(1)),
        TYPE,
        r"scale must be a Python number, .* multiply q",
    ),
    ("scale nan", dict(scale=float("nan")), VALUE, r"scale must be finite, got nan"),
    ("softcap zero", dict(softcap=0.0), VALUE, r"softcap must be > 0 \(None = off\), got 0\.0"),
    ("softcap inf", dict(softcap=float("inf")), VALUE, r"softcap must be finite"),
    ("rate", dict(dropout_rate=1.0), VALUE, r"dropout_rate must be in 0 <= rate < 1, got 1\.0"),
    ("rate negative", dict(dropout_rate=-0.1), VALUE, r"dropout_rate must be in 0 <= rate < 1"),
    (
        "key missing",
        dict(dropout_rate=0.1),
        VALUE,
        r"dropout_key must be given where dropout_rate > 0",
    ),
    (
        "key int",
        dict(dropout_rate=0.1, dropout_key=3),
        TYPE,
        r"dropout_key must be a jax\.random key",
    ),
    (
        "key dtype",
        dict(dropout_rate=0.1, dropout_key=array(2)),
        TYPE,
        r"dropout_key must be a jax\.random",
    ),
    (
        "keys",
        dict(dropout_rate=0.1, dropout_key=array(3, 2, dtype=np.uint32)),
        VALUE,
        r"dropout_key must be one key",
    ),
]


@pytest.mark.parametrize(
    ("replaced", "kind", "pattern"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_error_text(replaced, kind, pattern):
    arguments = dict(q=Q, k=K, v=K) | replaced
    for function in (flash_attention, explain):
        with pytest.raises(kind, match="^flash_attention: .*" + pattern):
            function(**arguments)


def test_errors_come_while_tracing():
    def call(q, k):
        return flash_attention(q, k, k)

    shape = jax.ShapeDtypeStruct
    with pytest.raises(ValueError, match="flash_attention: the heads of q"):
        jax.eval_shape(call, shape((2, 5, 3, 8), jnp.float32), shape((2, 7, 2, 8), jnp.float32))


def test_traced_options_are_refused_with_the_way_out():
    with pytest.raises(TypeError, match="multiply q by a traced scale"):
        jax.jit(lambda s: flash_attention(Q, K, K, scale=s))(2.0)
    with pytest.raises(TypeError, match="softcap must be a Python number, known while tracing"):
        jax.jit(lambda s: flash_attention(Q, K, K, softcap=s))(2.0)
    with pytest.raises(TypeError, match="causal must be True or False, known while tracing"):
        jax.jit(lambda c: flash_attention(Q, K, K, causal=c))(True)


def test_float8_is_refused():
    small = jnp.zeros((1, 2, 1, 4), jnp.float8_e4m3fn)
    with pytest.raises(TypeError, match="flash_attention: q, k and v must share one dtype"):
        flash_attention(small, small, small)


@pytest.mark.parametrize(
    ("keyword", "meant"),
    [
        ("softmax_scale", "scale"),
        ("sm_scale", "scale"),
        ("window_size", "window"),
        ("local_window_size", "window"),
        ("is_causal", "causal"),
        ("return_residual", "return_lse"),
        ("return_residuals", "return_lse"),
        ("logits_soft_cap", "softcap"),
        ("attn_mask", "mask"),
        ("query_seq_lengths", "q_lengths"),
        ("key_value_seq_lengths", "kv_lengths"),
        ("dropout_p", "dropout_rate"),
        ("cu_seqlens_q", "segment_ids"),
        ("causl", "causal"),
        ("segment_id", "segment_ids"),
    ],
)
def test_foreign_keywords(keyword, meant):
    with pytest.raises(TypeError, match=rf"'{keyword}', did you mean '{meant}'\?"):
        flash_attention(Q, K, K, **{keyword: None})
    with pytest.raises(TypeError, match=rf"explain: .*'{keyword}', did you mean '{meant}'\?"):
        explain(Q, K, K, **{keyword: None})


def test_unknown_keyword_lists_the_valid_ones():
    with pytest.raises(TypeError, match=r"'zzz', valid ones are q, k, v, bias, mask, "):
        flash_attention(Q, K, K, zzz=1)


def test_signature_is_the_contract():
    names = list(inspect.signature(flash_attention).parameters)
    expected = (
        "q k v bias mask causal window q_offset segment_ids q_lengths kv_lengths alibi_slopes "
        "sinks scale softcap dropout_rate dropout_key return_lse deterministic precision layout "
        "implementation autodiff"
    )
    assert names == expected.split()
    kinds = {p.kind for p in list(inspect.signature(flash_attention).parameters.values())[3:]}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    ours = list(inspect.signature(explain).parameters)
    assert ours == [*names[:3], "platform", *names[3:]]


def test_metal_and_foreign_platforms_give_their_reason():
    found = explain(Q, K, K, platform="tpu")
    assert found == (
        "jax",
        "blockwise",
        "platform 'tpu' has no native kernels (those are for cpu, cuda)",
    )
    assert not jax_flashtrain.supports("tpu")
    assert jax_flashtrain.supports("cpu", Q, K, K)
    assert jax_flashtrain.supports("cpu").supported
    rows = {row.name: row for row in jax_flashtrain.backends()}
    assert set(rows) == {"cpu", "cuda", "metal", "jax"}
    assert rows["jax"].available
    assert all(row.available or row.reason for row in rows.values())


def test_implementation_metal_without_metal():
    if {row.name: row for row in jax_flashtrain.backends()}["metal"].available:
        pytest.skip("needs a build without Metal kernels")
    with pytest.raises(
        NotImplementedError, match=r"implementation='metal' cannot run here: .*metal"
    ):
        flash_attention(Q, K, K, implementation="metal")


def test_native_refusal_names_the_reason():
    """Nine batch dimensions: beyond what the kernels index."""
    q = np.zeros((1,) * 8 + (2, 3, 1, 4), np.float32)
    with pytest.raises(NotImplementedError, match=r"at most 8 batch dimensions .*, got 9"):
        flash_attention(q, q, q, implementation="native")
    assert flash_attention(q, q, q, implementation="jax").shape == q.shape


def test_explain_takes_abstract_arguments_and_asks_the_lowering_predicate():
    shape = jax.ShapeDtypeStruct
    q = shape((2, 5, 4, 8), jnp.bfloat16)
    k = shape((2, 7, 2, 8), jnp.bfloat16)
    found = explain(
        q,
        k,
        k,
        bias=shape((4, 5, 7), jnp.float32),
        mask=shape((5, 7), jnp.bool_),
        q_offset=shape((2,), jnp.int32),
        window=(shape((), jnp.int32), None),
        kv_lengths=shape((2,), jnp.int32),
        dropout_rate=0.1,
        dropout_key=jax.random.key(0),
        platform="cpu",
    )
    assert found.backend == "cpu"
    assert found.kernel
    assert found.reason == ""
    assert explain(q, k, k, implementation="jax").backend == "jax"


class TestSegmentIdsFromCuSeqlens:
    def test_values(self):
        make = jax_flashtrain.segment_ids_from_cu_seqlens
        assert make(np.array([0, 2, 5]), 5).tolist() == [0, 0, 1, 1, 1]
        assert make(np.array([0, 2, 2, 5]), 6).tolist() == [0, 0, 2, 2, 2, 3]  # an empty one
        assert make(np.array([0]), 3).tolist() == [0, 0, 0]
        assert make(np.array([0, 2]), 0).shape == (0,)
        batched = jax.jit(make, static_argnums=1)(jnp.array([[0, 1, 4], [0, 3, 4]]), 4)
        assert batched.tolist() == [[0, 1, 1, 1], [0, 0, 0, 1]]

    def test_errors(self):
        make = jax_flashtrain.segment_ids_from_cu_seqlens
        with pytest.raises(TypeError, match="cu_seqlens must hold integers, got dtype float32"):
            make(np.zeros(3, np.float32), 5)
        with pytest.raises(ValueError, match=r"cu_seqlens must be \[\*batch, N \+ 1\]"):
            make(np.int32(3), 5)
        with pytest.raises(TypeError, match="length must be a Python int"):
            make(np.array([0, 2]), 2.0)
        with pytest.raises(ValueError, match="length must be >= 0, got -1"):
            make(np.array([0, 2]), -1)
