"""Problem shapes by name: the one list that tests and benchmarks draw from."""

from __future__ import annotations

#: Sequence lengths around every tile size in use, and the degenerate ones.
LENGTHS = (0, 1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1025)

#: Head sizes: all small ones, both sides of vector and tile widths, the largest.
HEAD_SIZES = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 64, 65, 72, 80, 96, 104, 127, 128,
              129, 160, 192, 255, 256, 257, 320, 511, 512)  # fmt: skip

#: (D, Dv) pairs with different sizes of keys and values.
UNEQUAL_HEAD_SIZES = ((1, 7), (32, 24), (24, 32), (64, 1), (192, 128), (3, 512), (512, 8))

#: (Hq, Hkv): no sharing, groups of 3 and 8, one key head for all.
HEADS = ((1, 1), (3, 1), (6, 2), (8, 1), (16, 2))

#: (Sq, Sk), each side longer, around tiles, and the reports' own numbers.
UNEQUAL_LENGTHS = ((1, 2), (2, 1), (2, 5), (5, 2), (1, 129), (129, 1), (7, 130), (130, 2), (64, 65),
                   (65, 64), (128, 1025), (300, 77))  # fmt: skip

#: Which dimensions of a bias or mask [B, H, Sq, Sk] are full (the others are 1).
BROADCAST_PATTERNS = tuple(tuple(bool(bits >> d & 1) for d in range(4)) for bits in range(16))


def broadcast_shape(pattern, full) -> tuple[int, ...]:
    """The shape of a bias or mask with the dimensions of ``pattern`` full and the others 1."""
    return tuple(size if keep else 1 for keep, size in zip(pattern, full, strict=True))


def pattern_name(pattern) -> str:
    """For test ids: a letter for a full dimension, 1 for a broadcast one."""
    return "".join(letter if keep else "1" for letter, keep in zip("BHQK", pattern, strict=True))
