"""Turn the kernel sources into C++ strings: includes of our own headers are expanded in place.

Users compile the result at run time (newLibraryWithSource), so they need no Xcode. Usage:
``embed.py OUTPUT.cc NAME=FILE.metal ...``; ``--print FILE`` writes the expanded text of one file.
"""

from __future__ import annotations

import pathlib
import re
import sys


def expand(path: pathlib.Path, seen: set[pathlib.Path] | None = None) -> str:
    """The text of ``path`` with every ``#include "..."`` replaced by the file, once each."""
    seen = set() if seen is None else seen
    path = path.resolve()
    if path in seen:
        return ""
    seen.add(path)
    out = []
    for line in path.read_text().splitlines():
        include = re.fullmatch(r'\s*#include "(.+)"\s*', line)
        if include:
            out.append(expand(path.parent / include[1], seen))
        elif line.strip() != "#pragma once":
            out.append(line)
    return "\n".join(out) + "\n"


def main() -> int:
    if sys.argv[1] == "--print":
        sys.stdout.write(expand(pathlib.Path(sys.argv[2])))
        return 0
    out = [
        "// Made by embed.py from cpp/metal/kernels.",
        '#include "sources.h"\n\nnamespace jft::metal {\n',
    ]
    for item in sys.argv[2:]:
        name, _, file = item.partition("=")
        text = expand(pathlib.Path(file))
        out.append(f'const char* {name} = R"JFT_METAL(\n{text})JFT_METAL";\n')
    out.append("}  // namespace jft::metal\n")
    pathlib.Path(sys.argv[1]).write_text("\n".join(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
