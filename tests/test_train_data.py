"""Sources and corpus: every kind of file, broken lines, windows, packing, the bigram bar."""

import bz2
import gzip
import itertools
import json
import lzma

import numpy as np
import pytest
from tolerances import check_close, check_equal

pytest.importorskip("optax")

from jax_flashtrain.train.bigram import bigram_loss
from jax_flashtrain.train.data import IGNORE, Corpus
from jax_flashtrain.train.errors import UserError
from jax_flashtrain.train.sources import Source, built_in_text, open_source


def opened(path, **options):
    return open_source(path, **{"vocab_size": 256, "text_field": "text", **options})


def corpus_of(*arrays, seq_len=8, val_fraction=0.25, pack=False, starts=None):
    sources = [
        Source(str(i), np.asarray(a), np.array(starts[i] if starts else [0]))
        for i, a in enumerate(arrays)
    ]
    return Corpus(sources, seq_len=seq_len, val_fraction=val_fraction, pack_documents=pack)


# ---- Files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "opener"),
    [(".txt", open), (".md", open), ("", open), (".txt.gz", gzip.open), (".bz2", bz2.open),
     (".txt.xz", lzma.open)],
)  # fmt: skip
def test_text_files(tmp_path, suffix, opener):
    content = "Grüße\n".encode() + bytes(range(256))
    path = tmp_path / f"file{suffix}"
    with opener(path, "wb") as f:
        f.write(content)
    source = opened(path)
    assert bytes(source.tokens) == content
    check_equal("documents", source.document_starts, [0])


@pytest.mark.parametrize(
    ("suffix", "opener"), [(".jsonl", open), (".jsonl.gz", gzip.open), (".jsonl.xz", lzma.open)]
)
def test_jsonl_leaves_broken_lines_out_and_counts_them(tmp_path, suffix, opener):
    lines = [
        json.dumps({"text": "one", "more": 1}).encode(),
        b"",
        b'{"text": "cut off',
        b'"no object"',
        json.dumps({"body": "other field"}).encode(),
        json.dumps({"text": 5}).encode(),
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        json.dumps({"text": ""}).encode(),
        json.dumps({"text": "zwölf"}).encode(),
    ]
    path = tmp_path / f"file{suffix}"
    with opener(path, "wb") as f:
        f.write(b"\n".join(lines))
    source = opened(path)
    assert bytes(source.tokens) == "onezwölf".encode()
    check_equal("documents", source.document_starts, [0, 3])
    assert (source.lines, source.broken_lines, source.first_broken) == (10, 7, 3)


def test_text_field(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x y"}\n')
    assert bytes(opened(path, text_field="body").tokens) == b"x y"


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_token_files(tmp_path, dtype):
    tokens = np.array([0, 255, 7], dtype)
    np.save(tmp_path / "a.npy", tokens)
    check_equal("npy", opened(tmp_path / "a.npy").tokens, tokens)
    tokens.astype("<u2").tofile(tmp_path / "a.bin")
    check_equal("bin", opened(tmp_path / "a.bin").tokens, tokens)


def refused(path, **options):
    with pytest.raises(UserError) as e:
        opened(path, **options)
    assert "\n" not in str(e.value)
    assert str(path) in str(e.value)
    return str(e.value)


def test_bad_files_are_refused_in_one_line(tmp_path):
    assert "no such file" in refused(tmp_path / "none.txt")
    assert "is a folder" in refused(tmp_path)
    for name in ("a.txt", "a.jsonl", "a.npy", "a.gz"):
        (tmp_path / name).touch()
        assert "is empty" in refused(tmp_path / name)
    (tmp_path / "b.gz").write_bytes(b"no gzip")
    assert "cannot be read" in refused(tmp_path / "b.gz")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "abc"}\n' * 9999)[:-20])
    assert "cannot be read" in refused(tmp_path / "c.jsonl.gz")
    (tmp_path / "d.jsonl").write_text("nothing\nof use\n")
    assert "none of its 2 lines" in refused(tmp_path / "d.jsonl")
    (tmp_path / "e.npy").write_text("no array")
    assert "no readable .npy" in refused(tmp_path / "e.npy")
    np.save(tmp_path / "f.npy", np.zeros((2, 2), np.int32))
    assert "one-dimensional integer array, got int32(2, 2)" in refused(tmp_path / "f.npy")
    np.save(tmp_path / "g.npy", np.zeros(2))
    assert "got float64(2,)" in refused(tmp_path / "g.npy")
    (tmp_path / "h.bin").write_bytes(b"abc")
    assert "odd number of bytes" in refused(tmp_path / "h.bin")


@pytest.mark.parametrize("bad", [300, -1])
def test_ids_outside_the_vocabulary_are_refused_with_position(tmp_path, bad):
    tokens = np.zeros(1000, np.int32)
    tokens[[712, 900]] = bad
    np.save(tmp_path / "a.npy", tokens)
    text = refused(tmp_path / "a.npy", vocab_size=300)
    assert f"token {bad} at position 712 is outside the vocabulary of 300" in text


def test_built_in_texts():
    docs = built_in_text("docs")
    assert docs.tokens.size > 200_000
    assert docs.document_starts.size > 50
    # No paragraph occurs twice: a copy in the validation part would only be remembered.
    paragraphs = [" ".join(p.split()) for p in bytes(docs.tokens).decode().split("\n\n")]
    assert len(set(paragraphs)) == len(paragraphs) - paragraphs.count("") + (
        1 if "" in paragraphs else 0
    )


def test_cpython_is_both_texts():
    parts = [built_in_text(name).tokens for name in ("docs", "stdlib")]
    both = built_in_text("cpython")
    check_equal("tokens", both.tokens, np.concatenate(parts))
    assert both.tokens.size > 5_000_000
    assert both.document_starts.size > 500


# ---- Corpus --------------------------------------------------------------------------------------


def test_read_crosses_files():
    corpus = corpus_of([1, 2, 3], [4] * 20, [5, 6], seq_len=4)
    check_equal("middle", corpus.read(1, 6), [2, 3, 4, 4, 4])
    check_equal("end", corpus.read(21, 25), [4, 4, 5, 6])
    assert corpus.read(0, 25).size == 25


def test_an_epoch_takes_every_window_once():
    corpus = corpus_of(np.arange(200), seq_len=8, val_fraction=0.2)  # 160 for training
    windows = 159 // 8
    batches = [corpus.train_batch(seed=3, step=s, size=1) for s in range(2 * windows)]
    starts = [int(b.tokens[0, 0]) for b in batches]
    for epoch in (starts[:windows], starts[windows:]):
        phase = min(epoch)
        assert sorted(epoch) == list(range(phase, phase + 8 * windows, 8))
    assert starts[:windows] != sorted(starts[:windows])
    assert starts[:windows] != starts[windows:]
    for batch in batches:
        check_equal("targets", batch.targets, batch.tokens + 1)
        assert batch.targets.max() < 160  # nothing of the validation part
        assert batch.segment_ids is None


def test_batches_depend_on_seed_and_step_only():
    arrays = np.arange(500) % 256
    a, b = corpus_of(arrays), corpus_of(arrays)
    a.train_batch(0, 0, 4)
    check_equal("step 77", a.train_batch(0, 77, 4).tokens, b.train_batch(0, 77, 4).tokens)
    assert (a.train_batch(0, 5, 4).tokens != a.train_batch(1, 5, 4).tokens).any()


@pytest.mark.parametrize("size", [1, 3, 64])
def test_validation_targets_every_token_once(size):
    corpus = corpus_of(np.arange(210), seq_len=8, val_fraction=0.1)
    batches = corpus.val_batches(size, limit=10_000)
    assert {b.tokens.shape for b in batches} == {(size, 8)}
    targets = np.concatenate([b.targets.ravel() for b in batches])
    check_equal("targets", targets[targets != IGNORE], np.arange(190, 210))
    assert len(corpus.val_batches(1, limit=2)) == 2


def test_packed_documents():
    text = np.arange(40)
    corpus = corpus_of(text, starts=[[0, 5, 6, 20]], seq_len=10, val_fraction=0.1, pack=True)
    tokens, targets, segments = corpus._window(2, 12)
    check_equal("tokens", tokens, np.arange(2, 12))
    check_equal("segments", segments, [0, 0, 0, 1, 2, 2, 2, 2, 2, 2])
    # The last token of a document has no target: 4 -> 5 and 5 -> 6 do not count.
    check_equal("targets", targets, [3, 4, IGNORE, IGNORE, 7, 8, 9, 10, 11, 12])
    _, targets, segments = corpus._window(17, 21)
    check_equal("padding is a segment of its own", segments, [0, 0, 0, 1] + [2] * 6)
    check_equal("targets", targets, [18, 19, IGNORE, 21] + [IGNORE] * 6)


def test_too_short_a_text():
    with pytest.raises(UserError, match=r"10 tokens give 8 for training and 2 .*--seq-len 8"):
        corpus_of(np.arange(10))
    corpus_of(np.arange(14))


def test_fingerprint_tells_texts_apart():
    a, b = np.zeros(100, np.uint8), np.zeros(100, np.uint8)
    b[99] = 1
    assert corpus_of(a).fingerprint() == corpus_of(a.copy()).fingerprint()
    assert corpus_of(a).fingerprint() != corpus_of(b).fingerprint()


def test_bigram_by_formula():
    """p(b | a) = (n_ab + 0.1) / (n_a + 0.1 V), counted pair by pair."""
    text = np.array([0, 1, 0, 1, 1, 2, 0, 1, 2, 0, 1, 0, 0, 2, 1, 0, 2, 2, 1, 0])
    corpus = corpus_of(text, seq_len=3, val_fraction=0.3)
    train, val = text[:14], text[14:]
    nats = 0.0
    for a, b in itertools.pairwise(val):
        pairs = sum(1 for i in range(13) if (train[i], train[i + 1]) == (a, b))
        firsts = sum(1 for i in range(13) if train[i] == a)
        nats -= np.log((pairs + 0.1) / (firsts + 0.1 * 3))
    got = bigram_loss(corpus, corpus.val_batches(2, 100), vocab_size=3)
    check_close("bigram", got, nats / 5, rtol=1e-12)
