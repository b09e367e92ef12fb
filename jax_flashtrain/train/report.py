"""What a run tells about the machine: device, kernel, speed against the peak, memory."""

from __future__ import annotations

import resource
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_flashtrain.nn import TransformerConfig
from jax_flashtrain.train.config import RunConfig
from jax_flashtrain.train.errors import UserError
from jax_flashtrain.train.step import DTYPES

#: Dense bf16 tensor-core peak in TFLOP/s by a part of the device's name (vendor data sheets).
PEAK_TFLOPS = {
    "H200": 989, "H100": 989, "GH200": 989, "B200": 2250, "A100": 312, "L40S": 362, "L4": 121,
    "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip


def device_line() -> str:
    device = jax.devices()[0]
    return f"{device.platform} ({device.device_kind}), {jax.device_count()} device(s) visible"


def unused_gpu_warning() -> str | None:
    """A warning when an NVIDIA GPU is there and JAX does not use it."""
    present = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    if not present or jax.default_backend() == "gpu":
        return None
    return (
        "warning: this machine has an NVIDIA GPU, but JAX runs on "
        f"{jax.default_backend()}: pip install 'jax[cuda13]' (or unset JAX_PLATFORMS)"
    )


def attention_line(config: RunConfig) -> str:
    """Which kernel the attention runs on; refuses what cannot run here, with the reason."""
    platform = jax.default_backend()
    if config.attention == "cudnn" and platform != "gpu":
        raise UserError(
            f"--attention cudnn needs an NVIDIA GPU, and JAX runs on {platform} here; "
            "choose native, jax or xla"
        )
    if config.attention == "cudnn" and config.dtype == "f32":
        raise UserError("--attention cudnn takes bf16 only: add --dtype bf16")
    if config.attention in ("xla", "cudnn"):
        return f"jax.nn.dot_product_attention, implementation {config.attention!r}"
    from jax_flashtrain import explain

    model = config.model
    rows = (config.batch_size, config.seq_len)
    dtype = DTYPES[config.dtype]
    q = jax.ShapeDtypeStruct((*rows, model.heads, model.head_dim), dtype)
    kv = jax.ShapeDtypeStruct((*rows, model.kv_heads, model.head_dim), dtype)
    segments = jax.ShapeDtypeStruct(rows, jnp.int32) if config.pack_documents else None
    try:
        answer = explain(
            q, kv, kv, causal=True, segment_ids=segments, implementation=config.attention
        )
    except NotImplementedError as e:
        raise UserError(f"--attention {config.attention} cannot run here: {e}") from None
    if config.attention == "native" and answer.backend == "jax":
        raise UserError(
            f"--attention native cannot run here: {answer.reason}; choose --attention jax or xla"
        )
    reason = f" ({answer.reason})" if answer.reason else ""
    return f"{answer.backend} kernel {answer.kernel}{reason}"


def parameter_count(params: object) -> int:
    return sum(p.size for p in jax.tree.leaves(params))


def flops_per_token(model: TransformerConfig, parameters: int, seq_len: int) -> float:
    """Forward and backward: 6 per matrix parameter, and causal attention (half of the square):
    (4 + 8) * S/2 * Hq * D per layer. Recomputation is not counted."""
    embedding = 0 if model.tied_head else model.vocab_size * model.dim
    attention = 6.0 * model.layers * seq_len * model.heads * model.head_dim
    return 6.0 * (parameters - embedding) + attention


def peak_flops(config: RunConfig) -> float | None:
    """FLOP/s of the devices used, from --peak-tflops or the table; None if unknown."""
    if config.peak_tflops:
        return config.peak_tflops * 1e12 * config.device_count
    if jax.default_backend() != "gpu" or config.dtype != "bf16":
        return None
    kind = jax.devices()[0].device_kind
    for name, tflops in PEAK_TFLOPS.items():
        if name in kind:
            return tflops * 1e12 * config.device_count
    return None


def peak_memory_bytes() -> tuple[str, int]:
    """(what, bytes): of the device where it keeps statistics, else of the process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return "device", int(stats["peak_bytes_in_use"])
    unit = 1 if sys.platform == "darwin" else 1024
    return "process", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
