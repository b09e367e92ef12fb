"""The bar that a run must beat: a bigram model with add-0.1 smoothing."""

from __future__ import annotations

import numpy as np

from jax_flashtrain.train.data import IGNORE, Batch, Corpus

#: A table of V x V counts beyond this vocabulary is no longer small.
MAX_VOCABULARY = 4096


def bigram_loss(corpus: Corpus, batches: list[Batch], vocab_size: int, add: float = 0.1) -> float:
    """Nats per token of ``batches`` under p(b | a) = (n_ab + add) / (n_a + add V), with the counts
    of the training part."""
    counts = np.zeros(vocab_size * vocab_size, np.int64)
    chunk = 1 << 22
    for start in range(0, corpus.train_size - 1, chunk):
        text = corpus.read(start, min(start + chunk + 1, corpus.train_size)).astype(np.int64)
        counts += np.bincount(text[:-1] * vocab_size + text[1:], minlength=counts.size)
    table = counts.reshape(vocab_size, vocab_size) + add
    log_p = np.log(table) - np.log(table.sum(axis=1, keepdims=True))
    total, number = 0.0, 0
    for batch in batches:
        counted = batch.targets != IGNORE
        total -= log_p[batch.tokens[counted], batch.targets[counted]].sum()
        number += int(counted.sum())
    return float(total / number)
