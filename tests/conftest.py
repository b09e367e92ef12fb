"""Chooses the platform before jax is imported, and the fixtures that every test file shares.

pytest                      the quick suite on the CPU (slow and GPU tests are deselected)
pytest -m slow              the long tests
pytest --backend cuda -m "not slow"      the same suite on an NVIDIA GPU, with the GPU-only rows
"""

from __future__ import annotations

import os
import sys

import pytest

#: backend name -> value of JAX_PLATFORMS (the first platform is the default one).
BACKENDS = {"cpu": "cpu", "cuda": "cuda,cpu"}
#: How many CPU devices a test marked ``multidevice`` finds.
VIRTUAL_DEVICES = 8


def pytest_addoption(parser):
    parser.addoption(
        "--backend", default="cpu", choices=sorted(BACKENDS), help="platform the suite runs on"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: long tests, run by `pytest -m slow`")
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU, run by `pytest --backend cuda`")
    config.addinivalue_line("markers", "multidevice: needs several (virtual) CPU devices")
    if "jax" in sys.modules:
        raise pytest.UsageError("jax was imported before conftest.py could choose the platform")
    os.environ["JAX_PLATFORMS"] = BACKENDS[config.getoption("--backend")]
    # bfloat16 and float32 comparisons assume that nothing turns f64 on behind our back.
    os.environ.pop("JAX_ENABLE_X64", None)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Runs after deselection. JAX's backends do not exist yet: flags still have an effect."""
    backend = config.getoption("--backend")
    if backend != "cuda":
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU: run pytest --backend cuda")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
    if any(item.get_closest_marker("multidevice") for item in items):
        flag = f"--xla_force_host_platform_device_count={VIRTUAL_DEVICES}"
        flags = os.environ.get("XLA_FLAGS", "")
        if "xla_force_host_platform_device_count" not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


@pytest.fixture(scope="session")
def backend(request) -> str:
    """Name of the backend that the suite runs on."""
    return request.config.getoption("--backend")


@pytest.fixture(params=["native", "jax"])
def implementation(request) -> str:
    """Both of our implementations; a test that uses it must hold for each."""
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
