"""What a result file says of the machine: the GPU as nvidia-smi tells it, and the software."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata


def clocks() -> str:
    return _query("clocks.sm,power.draw")


def driver() -> str:
    return _query("driver_version")


def versions(*packages: str) -> dict[str, str | None]:
    """Of Python and of packages; None = not installed."""
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found | {"python": platform.python_version()}


def _query(fields: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
