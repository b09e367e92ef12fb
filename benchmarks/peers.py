"""Other attention implementations behind one signature, as far as they are installed.

Each entry maps a name to ``attend(q, k, v, bias, mask)`` for one row, or is left out when the
peer has no such option.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .shapes import GpuShape

WINDOW = 1024


def tokamax_module():
    """tokamax, or None where it is not installed."""
    try:
        # tokamax imports a profiler package that is not needed to run it.
        for name in ("xprof", "xprof.cli", "xprof.cli.tools"):
            sys.modules.setdefault(name, types.ModuleType(name))
        sys.modules["xprof.cli.tools"].get_kernel_stats_tool = None
        return importlib.import_module("tokamax")
    except ImportError:
        return None


def _optional(name: str):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def available(shape: GpuShape) -> dict[str, Callable]:
    """The JAX peers that can run this row."""
    peers: dict[str, Callable] = {}
    kind, half = shape.kind, shape.dtype != "float32"
    lengths = jnp.asarray(shape.lengths(), jnp.int32) if kind == "lengths" else None
    common = {
        "is_causal": shape.causal,
        "query_seq_lengths": lengths,
        "key_value_seq_lengths": lengths,
        "local_window_size": (WINDOW, 0) if kind == "window" else None,
    }
    if kind not in ("softcap", "alibi", "sinks", "segments"):
        names = ["xla"] + (["cudnn"] if half else [])
        if shape.S > 4096:
            names.remove("xla")  # an S x S matrix per head does not fit
        for name in names:
            peers[f"jax.nn {name}"] = lambda q, k, v, bias, mask, name=name: (
                jax.nn.dot_product_attention(
                    q, k, v, bias=bias, mask=mask, implementation=name, **common
                )
            )
    tokamax = tokamax_module()
    if tokamax is not None and kind not in ("alibi", "sinks", "segments"):
        cap = {"logits_soft_cap": 50.0} if kind == "softcap" else {}
        for name in (["mosaic"] if half else []) + ["triton"]:
            peers[f"tokamax {name}"] = lambda q, k, v, bias, mask, name=name: (
                tokamax.dot_product_attention(
                    q, k, v, bias=bias, mask=mask, implementation=name, **common, **cap
                )
            )
    fa3 = _optional("flash_attn3_jax")
    if fa3 is not None and half and shape.D == 128 and kind in ("plain", "window"):
        window = (WINDOW, 0) if kind == "window" else (-1, -1)
        peers["flash-attn3-jax"] = lambda q, k, v, bias, mask: fa3.flash_mha(
            q, k, v, is_causal=shape.causal, window_size=window
        )
    return peers
