"""The CUDA kernels without a GPU: compiled as C++ over the emulator of cpp/cuda/emulator, then
random calls against the oracle, in a process of their own (the emulator stands in for the CPU
module).

What the emulator cannot show: speed, and races between warps that its changing order does not bring
out.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
VARIANTS = "BF16:64;F16:64;BF16:256;F16:256;TF32:64;TF32x3:64"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """A folder with the emulated native package, importable."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs cmake to build the emulator")
    pytest.importorskip("nanobind", reason="needs nanobind to build the emulator")
    build = tmp_path_factory.mktemp("emulated")
    configure = [
        cmake, "-S", str(ROOT / "cpp" / "cuda" / "emulator"), "-B", str(build),
        f"-DPython_EXECUTABLE={sys.executable}", f"-DJFT_EMULATED_VARIANTS={VARIANTS}",
    ]  # fmt: skip
    for command in (configure, [cmake, "--build", str(build), "-j", "2"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return build / "stage"


def _draws(stage, *arguments, capability=80):
    path = os.pathsep.join([str(stage), str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "cuda" / "draws.py"), *arguments],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "JAX_PLATFORMS": "cpu",
            "JFT_EMULATED_CAPABILITY": str(capability),
        },
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("start", [0, 40, 80])
def test_random_calls(stage, start):
    code, text = _draws(
        stage, "--start", str(start), "--count", "40", "--largest", "100", "--most-features", "64"
    )
    assert code == 0, text


@pytest.mark.parametrize("start", [0, 40, 80])
def test_random_calls_of_the_hopper_kernels(stage, start):
    arguments = ["--hopper", "--start", str(start), "--count", "40", "--largest", "320"]
    code, text = _draws(stage, *arguments, capability=90)
    assert code == 0, text
    assert "cuda_hopper forward" in text, text
    assert "cuda_hopper backward" in text, text


def test_a_broken_kernel_is_found(stage):
    """The harness itself: a dk that is 25 % off does not pass."""
    code, text = _draws(
        stage, "--start", "0", "--count", "6", "--largest", "40", "--most-features", "64",
        "--corrupt",
    )  # fmt: skip
    assert code == 1, text
    assert "FAIL" in text
