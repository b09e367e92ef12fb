"""Print the folder of the metal-cpp headers, fetched into the given one if not installed.

They ship (Apache-2.0) in the macOS wheel of mlx-metal, so neither Xcode extras nor a copy in this
repository is needed. On a Mac with mlx-metal installed nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "mlx-metal==0.32.4"
HEADERS = "mlx/include/metal_cpp"


def installed() -> pathlib.Path | None:
    spec = importlib.util.find_spec("mlx")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folder = pathlib.Path(root).parent / HEADERS
        if (folder / "Metal" / "Metal.hpp").exists():
            return folder
    return None


def fetch(target: pathlib.Path) -> pathlib.Path:
    folder = target / HEADERS
    if not (folder / "Metal" / "Metal.hpp").exists():
        with tempfile.TemporaryDirectory() as tmp:
            subprocess.run(
                [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
                 "--platform", "macosx_14_0_arm64", "-d", tmp, PACKAGE],
                check=True, stdout=sys.stderr,
            )  # fmt: skip
            (wheel,) = pathlib.Path(tmp).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target, [n for n in archive.namelist() if n.startswith(HEADERS)])
    return folder


if __name__ == "__main__":
    print(installed() or fetch(pathlib.Path(sys.argv[1])))
