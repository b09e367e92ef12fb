"""Reading text as tokens, in a stream: built-in texts, text files, JSONL and token files.

Bytes are the tokens of text. Nothing is held in memory: plain files are mapped, and what must be
decoded (JSONL, compressed files, the built-in texts) is written through to an unnamed temporary
file that is mapped and goes away with the process.
"""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import json
import lzma
import sysconfig
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np

from jax_flashtrain.train.errors import UserError

_OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)

#: Texts that every CPython brings along.
BUILT_IN_TEXTS = ("docs", "stdlib", "cpython")


@dataclasses.dataclass
class Source:
    """Tokens of one file: a (mapped) integer array, and where its documents begin."""

    name: str
    tokens: np.ndarray
    document_starts: np.ndarray
    is_text: bool = True  # tokens are bytes
    broken_lines: int = 0
    lines: int = 0
    first_broken: int | None = None


def built_in_text(name: str) -> Source:
    """``docs``: the language reference pages behind Python's help(); ``stdlib``: the sources of
    the standard library without its tests; ``cpython``: both, in this order."""
    documents = {"docs": _docs, "stdlib": _stdlib, "cpython": lambda: chain(_docs(), _stdlib())}
    return _spooled(f"built-in text {name!r}", documents[name]())


def _docs() -> Iterator[bytes]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            "this Python lacks the pydoc_data pages that are the default text: pass --data FILE"
        ) from None
    # Pages quote each other; a paragraph that was seen before would leak into the validation part.
    seen: set[str] = set()
    for title in sorted(topics):
        paragraphs = []
        for paragraph in topics[title].split("\n\n"):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                paragraphs.append(paragraph.strip("\n"))
        if paragraphs:
            yield ("\n\n".join(paragraphs) + "\n\n").encode()


def _stdlib() -> Iterator[bytes]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        if not skip.intersection(path.relative_to(root).parts):
            data = path.read_bytes()
            if data:
                yield data


def _spooled(name: str, documents: Iterable[bytes]) -> Source:
    """Documents written one after the other to a temporary file, which is mapped."""
    starts, size = [], 0
    with tempfile.TemporaryFile() as spool:
        for document in documents:
            starts.append(size)
            size += len(document)
            spool.write(document)
        if not size:
            raise UserError(f"{name}: holds no text")
        spool.flush()
        tokens = np.memmap(spool, np.uint8, "r", shape=(size,))
    return Source(name, tokens, np.array(starts, np.int64))


def open_source(path: Path, *, vocab_size: int, text_field: str) -> Source:
    """The tokens of a file; its kind goes by the suffix.

    ``.npy`` (one-dimensional integers) and ``.bin`` (little-endian uint16) are token files,
    ``.jsonl`` holds one document per line, anything else is text. ``.gz``, ``.bz2`` and ``.xz``
    are decompressed on the way.
    """
    suffixes = [s.lower() for s in path.suffixes]
    opener = _OPENERS.get(suffixes[-1]) if suffixes else None
    kind = suffixes[-2] if opener and len(suffixes) > 1 else suffixes[-1] if suffixes else ""
    try:
        if not path.exists():
            raise UserError(f"{path}: no such file")
        if path.is_dir():
            raise UserError(f"{path}: is a folder, not a file")
        if not path.stat().st_size:
            raise UserError(f"{path}: is empty")
        with path.open("rb") as probe:  # permission errors come here, before anything else
            probe.read(1)
        if kind in (".npy", ".bin") and opener is None:
            return _token_file(path, kind, vocab_size)
        if kind == ".jsonl":
            with (opener or open)(path, "rb") as lines:
                return _jsonl(path, lines, text_field)
        if opener is not None:
            with opener(path, "rb") as stream:
                source = _spooled(str(path), iter(lambda: stream.read(1 << 20), b""))
            source.document_starts = np.zeros(1, np.int64)
            return source
        return Source(str(path), np.memmap(path, np.uint8, "r"), np.zeros(1, np.int64))
    except _READ_ERRORS as e:
        reason = getattr(e, "strerror", None) or str(e) or type(e).__name__
        raise UserError(f"{path}: cannot be read: {reason}") from None


def _jsonl(path: Path, lines: IO[bytes], field: str) -> Source:
    counts = {"lines": 0, "broken": 0, "first": None}

    def documents() -> Iterator[bytes]:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            counts["lines"] += 1
            try:
                text = json.loads(line)[field]
                encoded = text.encode()
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                # UnicodeError (a lone surrogate) is a ValueError.
                counts["broken"] += 1
                counts["first"] = counts["first"] or number
                continue
            if encoded:
                yield encoded

    try:
        source = _spooled(str(path), documents())
    except UserError:
        raise UserError(
            f"{path}: none of its {counts['lines']} lines is a JSON object with text under "
            f"{field!r}"
        ) from None
    source.lines, source.broken_lines = counts["lines"], counts["broken"]
    source.first_broken = counts["first"]
    return source


def _token_file(path: Path, kind: str, vocab_size: int) -> Source:
    if kind == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError:
            raise UserError(f"{path}: is no readable .npy file of numbers") from None
    else:
        if path.stat().st_size % 2:
            raise UserError(f"{path}: a .bin token file holds uint16, got an odd number of bytes")
        tokens = np.memmap(path, "<u2", "r")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise UserError(
            f"{path}: tokens must be a one-dimensional integer array, got "
            f"{tokens.dtype}{tokens.shape}"
        )
    if not tokens.size:
        raise UserError(f"{path}: is empty")
    for start in range(0, tokens.size, 1 << 22):
        part = tokens[start : start + (1 << 22)]
        bad = (part < 0) | (part >= vocab_size)
        if bad.any():
            at = start + int(np.argmax(bad))
            raise UserError(
                f"{path}: token {int(tokens[at])} at position {at} is outside the vocabulary of "
                f"{vocab_size} (see --vocab-size)"
            )
    return Source(str(path), tokens, np.zeros(1, np.int64), is_text=False)
