"""What nvidia-smi tells about the GPU of a run."""

from __future__ import annotations

import subprocess


def clocks() -> str:
    return _query("clocks.sm,power.draw")


def driver() -> str:
    return _query("driver_version")


def _query(fields: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
