"""KV cache and generation: nothing stored is lost, one compiled step, equal to the full forward."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import check_close, check_equal

from jax_flashtrain import flash_attention
from jax_flashtrain.nn import (
    KVCache,
    TransformerConfig,
    attention_fn,
    decode_step,
    generate,
    init_caches,
    init_transformer,
    logits_of,
    sample,
    transformer,
    transformer_hidden,
)
from jax_flashtrain.nn import few_rows as few_rows_module
from jax_flashtrain.nn.few_rows import number_of_parts

generate_module = importlib.import_module("jax_flashtrain.nn.generate")

CONFIG = TransformerConfig(
    vocab_size=13, dim=12, layers=2, heads=4, kv_heads=2, head_dim=4, hidden=16
)
NAMES = ["native", "jax", "xla"]


def rows_of(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


# ---- The cache -----------------------------------------------------------------------------------


def test_append_in_pieces(rng):
    k, v = rows_of(rng, 2, 5, 3, 4), rows_of(rng, 2, 5, 3, 6)
    cache = KVCache.init(2, 8, 3, 4, value_dim=6)
    for s in (slice(0, 2), slice(2, 3), slice(3, 5)):
        cache = cache.append(k[:, s], v[:, s])
    check_equal("lengths", cache.lengths, [5, 5])
    for name, got, want in zip("kv", cache.get(), (k, v), strict=True):
        check_equal(name, got, want)
    assert cache.clear().get()[0].shape == (2, 0, 3, 4)


def test_ragged_append(rng):
    k = rows_of(rng, 3, 4, 1, 2)
    cache = KVCache.init(3, 6, 1, 2).append(k, k, new=jnp.array([4, 0, 2]))
    cache = cache.append(k[:, :1], k[:, :1])
    check_equal("lengths", cache.lengths, [5, 1, 3])
    check_equal("row 0", cache.keys[0, :5], jnp.concatenate([k[0], k[0, :1]]))
    check_equal("row 1", cache.keys[1, :1], k[1, :1])
    check_equal("row 2", cache.keys[2, :3], jnp.concatenate([k[2, :2], k[2, :1]]))
    check_equal("beyond the length nothing was written", cache.keys[1, 1:], np.zeros((5, 1, 2)))


def test_overflow_outside_jit_shows_the_numbers(rng):
    cache = KVCache.init(1, 4, 1, 2).append(rows_of(rng, 1, 3, 1, 2), rows_of(rng, 1, 3, 1, 2))
    with pytest.raises(ValueError, match=r"length 3 \+ new 2 > max 4"):
        cache.append(rows_of(rng, 1, 2, 1, 2), rows_of(rng, 1, 2, 1, 2))


def test_overflow_under_jit_keeps_what_is_stored(rng):
    append = jax.jit(lambda cache, k: cache.append(k, k))
    k = rows_of(rng, 2, 3, 1, 2)
    cache = append(KVCache.init(2, 4, 1, 2), k)
    assert not cache.overflowed.any()
    full = append(cache, 100 + k)
    check_equal("lengths", full.lengths, [4, 4])
    assert full.overflowed.all()
    check_equal("stored rows", full.keys[:, :3], k)
    check_equal("the row that fits", full.keys[:, 3], 100 + k[:, 0])
    again = append(full, 200 + k)
    check_equal("a full cache", again.keys, full.keys)
    assert append(again.clear(), k).overflowed.sum() == 0


def test_wrong_shapes(rng):
    cache = KVCache.init(2, 4, 3, 5)
    with pytest.raises(ValueError, match=r"k must have the shape \(2, 1, 3, 5\).*\(2, 1, 3, 4\)"):
        cache.append(jnp.zeros((2, 1, 3, 4)), jnp.zeros((2, 1, 3, 5)))
    with pytest.raises(ValueError, match=r"v must have the shape \(2, 1, 3, 5\)"):
        cache.append(jnp.zeros((2, 1, 3, 5)), jnp.zeros((2, 2, 3, 5)))
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda c: c.get())(cache)


# ---- Decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, {}) for name in NAMES]
    + [("native", option) for option in ({"window": (2, 0)}, {"softcap": 0.5})],
)
def test_prefill_and_decode_equal_the_full_forward(rng, name, option):
    config = dataclasses.replace(CONFIG, **option)
    params = jax.tree.map(lambda p: 4 * p, init_transformer(jax.random.key(0), config))
    tokens = jnp.asarray(rng.integers(0, 13, (2, 9)))
    attend = attention_fn(name)
    want = transformer(params, tokens, config, attend=attend)
    caches, got = init_caches(config, 2, 12), []
    step = jax.jit(lambda c, t: transformer_hidden(params, t, config, attend=attend, caches=c))
    for s in (slice(0, 4), slice(4, 5), slice(5, 6), slice(6, 9)):
        hidden, caches = step(caches, tokens[:, s])
        got.append(logits_of(params, hidden))
    check_close("logits", jnp.concatenate(got, 1), want, atol=2e-5)


@pytest.mark.parametrize("name", ["native", "jax"])
def test_unwritten_tail_may_hold_nan(rng, name):
    params = init_transformer(jax.random.key(0), CONFIG)
    tokens = jnp.asarray(rng.integers(0, 13, (2, 3)))
    clean = init_caches(CONFIG, 2, 8)
    dirty = [
        KVCache(c.keys + jnp.nan, c.values + jnp.inf, c.lengths, c.overflowed) for c in clean
    ]  # fmt: skip
    attend = attention_fn(name)
    want, _ = transformer_hidden(params, tokens, CONFIG, attend=attend, caches=clean)
    got, _ = transformer_hidden(params, tokens, CONFIG, attend=attend, caches=dirty)
    check_equal("hidden", got, want)


def test_generate_greedily_equals_repeated_forwards(rng):
    params = jax.tree.map(lambda p: 4 * p, init_transformer(jax.random.key(0), CONFIG))
    prompts = [rng.integers(0, 13, n) for n in (5, 2, 3)]
    padded = np.zeros((3, 5), np.int32)
    want = []
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
        text = list(prompt)
        for _ in range(6):
            logits = transformer(params, jnp.array([text + [0] * (11 - len(text))]), CONFIG)
            text.append(int(jnp.argmax(logits[0, len(text) - 1])))
        want.append(text[len(prompt) :])
    got = generate(
        params, padded, CONFIG, max_new=6, key=jax.random.key(0), temperature=0,
        prompt_lengths=np.array([5, 2, 3]),
    )  # fmt: skip
    check_equal("tokens", got, want)


def test_one_compiled_step_for_all_positions():
    params = init_transformer(jax.random.key(0), CONFIG)
    decode_step.clear_cache()
    for max_new in (3, 9):
        generate(
            params, jnp.ones((1, 4), jnp.int32), CONFIG, max_new=max_new, key=jax.random.key(0),
            max_seq=16,
        )  # fmt: skip
    assert decode_step._cache_size() == 2  # the prompt's length, and one token


def test_same_key_same_text():
    params = init_transformer(jax.random.key(0), CONFIG)
    prompt = jnp.ones((2, 3), jnp.int32)
    a, b, c = (
        generate(params, prompt, CONFIG, max_new=8, key=jax.random.key(seed)) for seed in (5, 5, 6)
    )
    check_equal("tokens", a, b)
    assert (a != c).any()
    assert (a[0] != a[1]).any()


def test_generate_checks_its_arguments():
    params = init_transformer(jax.random.key(0), CONFIG)
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=r"got 4 \+ 5 - 1 > max_seq 7"):
        generate(params, jnp.ones((1, 4), jnp.int32), CONFIG, max_new=5, key=key, max_seq=7)
    with pytest.raises(ValueError, match=r"prompt must be .* got \(1, 0\)"):
        generate(params, jnp.ones((1, 0), jnp.int32), CONFIG, max_new=5, key=key)
    with pytest.raises(ValueError, match="max_new must be at least 1, got 0"):
        generate(params, jnp.ones((1, 4), jnp.int32), CONFIG, max_new=0, key=key)
    with pytest.raises(ValueError, match=r"within 1\.\.4, got \[5\]"):
        generate(
            params, jnp.ones((1, 4), jnp.int32), CONFIG, max_new=1, key=key,
            prompt_lengths=np.array([5]),
        )  # fmt: skip


def test_generate_refuses_a_text_that_overflowed(monkeypatch):
    """Its own arithmetic keeps the text inside the cache; what the cache says counts too."""
    params = init_transformer(jax.random.key(0), CONFIG)
    small = init_caches(CONFIG, 1, 4)
    monkeypatch.setattr(generate_module, "init_caches", lambda *_: small)
    with pytest.raises(RuntimeError, match="overflowed"):
        generate(params, jnp.ones((1, 4), jnp.int32), CONFIG, max_new=3, key=jax.random.key(0))


# ---- Sampling ------------------------------------------------------------------------------------

LOGITS = jnp.log(jnp.array([0.1, 0.4, 0.05, 0.3, 0.15]))


def frequencies(**options):
    keys = jax.random.split(jax.random.key(3), 4000)
    draws = jax.vmap(lambda k: sample(k, LOGITS, **options))(keys)
    return np.bincount(np.asarray(draws), minlength=5) / 4000


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"temperature": 0.5}, np.array([1, 16, 0.25, 9, 2.25]) / 28.5),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_k": 1}, [0, 1, 0, 0, 0]),
        ({"top_k": 99}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"top_p": 0.6}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.75}, [0, 4 / 8.5, 0, 3 / 8.5, 1.5 / 8.5]),
        ({"top_p": 0.01}, [0, 1, 0, 0, 0]),
        ({"top_p": 1.0}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"top_k": 3, "top_p": 0.8}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"temperature": 0}, [0, 1, 0, 0, 0]),
    ],
    ids=str,
)
def test_sample_draws_from_the_right_tokens(options, want):
    got = frequencies(**options)
    check_equal("never drawn", got[np.array(want) == 0], np.zeros((np.array(want) == 0).sum()))
    check_close("frequency", got, want, atol=0.04)


def test_equal_logits_let_no_extra_token_in():
    draws = {int(sample(jax.random.key(i), jnp.zeros(6), top_k=2)) for i in range(60)}
    assert len(draws) == 2


def test_sample_checks_its_arguments():
    for options, text in (
        ({"temperature": -1}, "temperature must not be negative, got -1"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
    ):
        with pytest.raises(ValueError, match=text):
            sample(jax.random.key(0), LOGITS, **options)


# ---- Few rows over many keys ---------------------------------------------------------------------


def test_number_of_parts():
    """Enough parts to keep a GPU busy, none shorter than 256 keys, all of the same length."""
    found = {case: number_of_parts(*case) for case in [(8, 32768), (64, 32768), (8, 8192)]}
    assert found == {(8, 32768): 16, (64, 32768): 2, (8, 8192): 16}
    assert number_of_parts(1, 1024) == 4
    assert number_of_parts(8, 255) == number_of_parts(1, 521) == number_of_parts(512, 8192) == 1
    assert number_of_parts(1, 768 * 3) == 9


@pytest.mark.parametrize("name", ["native", "jax"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("option", [{}, {"window": (5, 0)}, {"softcap": 2.0}, {"causal": False}])
def test_split_keys_equal_one_call(rng, monkeypatch, name, rows, option):
    """Parts that are empty, half full and full; nothing beyond the lengths is read."""
    monkeypatch.setattr(few_rows_module, "BUSY", 64)
    monkeypatch.setattr(few_rows_module, "SHORTEST_PART", 8)
    start = np.array([0, 10, 61 - rows, 64 - rows])
    q, k, v = (rows_of(rng, 4, *s) for s in ((rows, 6, 8), (64, 2, 8), (64, 2, 4)))
    hidden = (np.arange(64) >= (start + rows)[:, None])[..., None, None]
    k, v = (jnp.where(hidden, jnp.nan, x) for x in (k, v))
    options = {"causal": True, "q_offset": start, "kv_lengths": start + rows, **option}
    assert number_of_parts(8, 64) == 8
    got = attention_fn(name)(q, k, v, **options)
    want = flash_attention(q, k, v, implementation="jax", **options)
    check_close("o", got, want, atol=2e-6)


def test_split_keys_have_gradients(rng, monkeypatch):
    monkeypatch.setattr(few_rows_module, "BUSY", 8)
    monkeypatch.setattr(few_rows_module, "SHORTEST_PART", 8)
    arrays = [rows_of(rng, 2, *s) for s in ((1, 4, 8), (16, 2, 8), (16, 2, 8))]
    lengths = jnp.array([3, 16])
    options = {"causal": True, "q_offset": lengths - 1, "kv_lengths": lengths}

    def loss(attend, *arrays):
        return jnp.sum(attend(*arrays, **options) ** 2)

    got = jax.grad(lambda *a: loss(attention_fn("jax"), *a), (0, 1, 2))(*arrays)
    want = jax.grad(lambda *a: loss(flash_attention, *a), (0, 1, 2))(*arrays)
    for label, g, w in zip("qkv", got, want, strict=True):
        check_close(f"d{label}", g, w, atol=5e-6)


def test_rows_that_see_nothing_are_zero(rng, monkeypatch):
    monkeypatch.setattr(few_rows_module, "SHORTEST_PART", 8)
    q, k = rows_of(rng, 1, 1, 2, 4), rows_of(rng, 1, 32, 2, 4)
    options = {"q_offset": jnp.array([0]), "kv_lengths": jnp.array([0])}
    check_equal("o", attention_fn("jax")(q, k, k, **options), np.zeros((1, 1, 2, 4)))
