"""Figures as SVG files that know what they were drawn from.

matplotlib's output differs between its releases, so tests do not compare files: each file carries
a digest of everything it was drawn from, and that is compared.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
from typing import Any

import matplotlib

matplotlib.use("Agg")


def digest(*sources: object) -> str:
    """Of data (its ``repr``) and of scripts (the text of a path)."""
    texts = [s.read_text("utf-8") if isinstance(s, pathlib.Path) else repr(s) for s in sources]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def save(figure: Any, path: pathlib.Path, digest: str) -> None:
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None, "Description": f"drawn from {digest}"})
    # matplotlib puts every point of a line on a line of its own, and blanks behind some.
    text = re.sub(r"[ \t]*\n(?=[MLCQz\"])", " ", path.read_text("utf-8"))
    text = re.sub(r"[ \t]+$", "", text, flags=re.M)
    path.write_text(text, "utf-8")


def drawn_from(path: pathlib.Path) -> str:
    """The digest in a file."""
    found = re.search(r"drawn from (\w+)", path.read_text("utf-8"))
    return found[1] if found else "nothing that is known"
