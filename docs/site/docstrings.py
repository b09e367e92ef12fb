"""Griffe extension: our docstrings mark preformatted blocks as reStructuredText does; the site
renders Markdown. The text of the docstrings is not changed otherwise."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Preformatted(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            text = re.sub(r"^::\n", "", text, flags=re.M)  # the block stays indented: code
            text = re.sub(r"^Example:$", "Examples:", text, flags=re.M)
            obj.docstring.value = text
