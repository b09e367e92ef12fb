"""Chooses the platform before jax is imported, and the fixtures that every test file shares.

pytest                      the quick suite on the CPU (slow and GPU tests are deselected)
pytest -m slow              the long tests
pytest --backend cuda -m "not slow"      the same suite on an NVIDIA GPU, with the GPU-only rows
pytest --backend metal-emulated          the tests of both implementations, on the emulated Metal
kernels
"""

from __future__ import annotations

import gc
import os
import platform
import re
import sys

import pytest

#: backend name -> value of JAX_PLATFORMS (the first platform is the default one).
BACKENDS = {"cpu": "cpu", "cuda": "cuda,cpu", "metal-emulated": "cpu"}
#: Compiling is most of the suite's time; the kernels under test are not compiled by XLA.
FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if platform.machine() == "x86_64":
    FAST_COMPILE += " --xla_cpu_max_isa=AVX"  # narrow vectors: less to generate
#: How many CPU devices the tests find.
VIRTUAL_DEVICES = 8
#: Files whose tests run on meshes of them.
MESH_TESTS = ("test_sharding.py", "test_distributed.py", "test_train_mesh.py")


def pytest_addoption(parser):
    parser.addoption(
        "--backend", default="cpu", choices=sorted(BACKENDS), help="platform the suite runs on"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: long tests, run by `pytest -m slow`")
    config.addinivalue_line(
        "markers", "slow_if(name=value): slow where the parameter has the value"
    )
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU, run by `pytest --backend cuda`")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the oracle's products are small
    gc.set_threshold(100_000, 50, 50)  # tracing makes many objects that live
    if "jax" in sys.modules:
        raise pytest.UsageError("jax was imported before conftest.py could choose the platform")
    os.environ["JAX_PLATFORMS"] = BACKENDS[config.getoption("--backend")]
    os.environ["JFT_TEST_BACKEND"] = config.getoption("--backend")
    if config.getoption("--backend") == "metal-emulated":
        os.environ["JFT_TEST_NATIVE"] = "metal"
    if config.getoption("--backend") == "cuda":
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several workers, one GPU
    elif "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILE}".strip()
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        flag = f"--xla_force_host_platform_device_count={VIRTUAL_DEVICES}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    # bfloat16 and float32 comparisons assume that nothing turns f64 on behind our back.
    os.environ.pop("JAX_ENABLE_X64", None)


def pytest_itemcollected(item):
    """``@pytest.mark.slow_if(implementation="jax")``: slow where the parameters are these."""
    for mark in item.iter_markers("slow_if"):
        if all(item.callspec.params[name] == value for name, value in mark.kwargs.items()):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """GPU tests need a GPU, meshes need devices."""
    backend = config.getoption("--backend")
    if backend == "cuda":
        import jax

        if len(jax.devices()) < VIRTUAL_DEVICES:
            skip = pytest.mark.skip(reason=f"needs {VIRTUAL_DEVICES} devices")
            for item in items:
                if item.path.name in MESH_TESTS:
                    item.add_marker(skip)
    if backend != "cuda":
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU: run pytest --backend cuda")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


#: The calls that a backend's kernels do not take (tests/test_metal_kernels.py holds Metal's list).
REFUSALS = {
    "metal-emulated": re.compile(
        r"the Metal kernels take (float16, bfloat16 and float32, got float64|"
        r"head sizes up to 256, got|a float16, bfloat16 or float32 bias, got float64)"
    ),
    "cuda": re.compile(
        r"the CUDA kernels take (float16, bfloat16 and float32, got float64|"
        r"head sizes up to 256, got)"
    ),
}


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """With another backend than the CPU, a documented refusal ends the test as skipped."""
    try:
        return (yield)
    except NotImplementedError as error:
        pattern = REFUSALS.get(pyfuncitem.config.getoption("--backend"))
        refused = pattern and pattern.search(str(error))
        if not refused:
            raise
        pytest.skip(f"refused, as documented: {refused[0]}")


@pytest.fixture(scope="session")
def backend(request) -> str:
    """Name of the backend that the suite runs on."""
    return request.config.getoption("--backend")


@pytest.fixture(params=["native", "jax"])
def implementation(request) -> str:
    """Both of our implementations; a test that uses it must hold for each."""
    if request.config.getoption("--backend") == "metal-emulated":
        if request.param == "jax":
            pytest.skip("a run with --backend metal-emulated tests the Metal kernels only")
        return "metal"
    return request.param


@pytest.fixture
def x64():
    """float64 enabled for one test."""
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def rng():
    import numpy as np

    return np.random.default_rng(20260)
