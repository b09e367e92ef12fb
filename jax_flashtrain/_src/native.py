"""Loads and registers the compiled modules of ``jax_flashtrain_native``. Never needs a device.

Interface of a module ``jax_flashtrain_native.<name>``:

    interface_version: int                     must equal spec.INTERFACE_VERSION
    ffi_version: tuple[int, int]               of the XLA FFI headers it was built with
    registrations() -> dict[str, PyCapsule]    FFI target name -> handler
    explain(facts) -> tuple[str, str]          (kernel, ""), or ("", reason why no kernel serves)
    workspace_bytes(facts) -> int              only where both targets end in a uint8 result
    preferred(facts) -> bool                   metal only: expected to beat the CPU kernel

``facts`` is a dict of plain ints, made by ``backends.Query.facts``. A module without ``explain``
serves everything (the CPU kernels); ``isa()`` then names the kernel.
"""

from __future__ import annotations

import functools
import importlib
import pathlib
import re
from types import ModuleType
from typing import NamedTuple

import jax
from jaxlib.version import __version__ as jaxlib_version

from .spec import INTERFACE_VERSION

PACKAGE = "jax_flashtrain_native"

#: Module name -> (jax platform of the lowering, platform name of the FFI registration).
#: The Metal kernels run on JAX's CPU platform: memory is unified, so they take its host buffers.
MODULES: dict[str, tuple[str, str]] = {
    "cpu": ("cpu", "cpu"),
    "cuda": ("cuda", "CUDA"),
    "metal": ("cpu", "cpu"),
}

FORWARD_TARGET = f"jax_flashtrain_fwd_v{INTERFACE_VERSION}"
BACKWARD_TARGET = f"jax_flashtrain_bwd_v{INTERFACE_VERSION}"
METAL_FORWARD_TARGET = f"jax_flashtrain_metal_fwd_v{INTERFACE_VERSION}"
METAL_BACKWARD_TARGET = f"jax_flashtrain_metal_bwd_v{INTERFACE_VERSION}"
TARGETS = (FORWARD_TARGET, BACKWARD_TARGET, METAL_FORWARD_TARGET, METAL_BACKWARD_TARGET)

_REMEDY = (
    "Reinstall jax_flashtrain in this environment (pip install --force-reinstall --no-deps, from "
    "the same source), or install the jax and jaxlib it was built for."
)


class Loaded(NamedTuple):
    """A native module, or None and the reason."""

    module: ModuleType | None
    reason: str


def installed_ffi_version() -> tuple[int, int] | None:
    """XLA FFI version of the installed jaxlib, from the header it ships (None if there is none)."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if found[0] is None or found[1] is None:
        return None
    return int(found[0].group(1)), int(found[1].group(1))


def check_versions(
    interface: int | None, built_ffi: tuple[int, int], installed_ffi: tuple[int, int] | None
) -> None:
    """Raises ImportError where registering the module would break the user's process.

    jaxlib checks the FFI version when the backend starts, and a mismatch takes the whole backend
    down ("Unable to initialize backend"): so compare before anything is registered. Older headers
    run on every newer jaxlib, never the reverse.
    """
    if interface != INTERFACE_VERSION:
        raise ImportError(
            f"jax_flashtrain: the compiled part has interface version {interface}, the Python part "
            f"needs {INTERFACE_VERSION}: they come from different builds. {_REMEDY}"
        )
    if installed_ffi is None:
        return
    if built_ffi[0] != installed_ffi[0] or built_ffi[1] > installed_ffi[1]:
        raise ImportError(
            f"jax_flashtrain: the compiled part was built with XLA FFI {built_ffi[0]}."
            f"{built_ffi[1]}, the installed jaxlib {jaxlib_version} has "
            f"{installed_ffi[0]}.{installed_ffi[1]} and cannot run it. {_REMEDY}"
        )


@functools.cache
def load(name: str) -> Loaded:
    """Loads and registers one module, once per process.

    Raises:
      ImportError: the module is there but its version does not fit (with the remedy).
    """
    try:
        package = importlib.import_module(PACKAGE)
    except ModuleNotFoundError:
        return Loaded(None, f"the compiled package {PACKAGE} is not installed")
    if name not in package.BUILT_BACKENDS:
        return Loaded(None, f"this build of {PACKAGE} has no {name} kernels")
    try:
        module = importlib.import_module(f"{PACKAGE}.{name}")
    except ImportError as error:
        return Loaded(None, f"the compiled module {PACKAGE}.{name} does not load: {error}")
    check_versions(
        getattr(module, "interface_version", None), module.ffi_version, installed_ffi_version()
    )
    for target, handler in module.registrations().items():
        jax.ffi.register_ffi_target(target, handler, platform=MODULES[name][1])
    return Loaded(module, "")


def load_all() -> None:
    """Registers every module of this build; called when the package is imported."""
    for name in MODULES:
        load(name)
