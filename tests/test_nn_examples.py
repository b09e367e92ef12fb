"""Every example runs as a user runs it; those for other libraries end cleanly without them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(path, *arguments, **extra):
    inherited = os.environ.get("PYTHONPATH", "")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{inherited}", **extra}
    return subprocess.run(
        [sys.executable, *arguments, str(path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_example_runs(path):
    result = run(path)
    assert result.returncode == 0, result.stderr
    if result.stdout.startswith("skipped: "):
        pytest.skip(result.stdout.strip())
    assert result.stdout.strip()
