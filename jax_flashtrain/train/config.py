"""Settings of a run, model presets, and which settings a checkpoint is bound to."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_flashtrain.nn import TransformerConfig
from jax_flashtrain.train.errors import UserError

#: Axes of the device mesh, outermost first.
AXES = ("data", "context", "tensor")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One run. ``model`` holds the sizes; everything else is about data and optimisation."""

    config: str
    model: TransformerConfig
    # Data.
    data: tuple[str, ...] = ()
    text: str = "docs"
    text_field: str = "text"
    vocab_size: int | None = None
    val_fraction: float = 0.1
    pack_documents: bool = False
    # Optimisation.
    steps: int = 100
    batch_size: int = 8
    accumulate: int = 1
    seq_len: int = 256
    learning_rate: float = 1e-3
    min_learning_rate: float = 0.1  # as a share of learning_rate
    warmup_steps: int = 50
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    dtype: str = "f32"
    seed: int = 0
    # How it runs: none of these changes what is computed beyond rounding.
    attention: str = "native"
    remat: str = "none"
    scan_layers: bool = False
    devices: int = 1
    mesh: str | None = None
    eval_every: int = 100
    eval_windows: int = 32
    final_eval_windows: int = 4096
    checkpoint_every: int = 500
    log_every: int = 10
    sample_tokens: int = 400
    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float | None = None
    peak_tflops: float | None = None
    profile: str | None = None

    @property
    def mesh_sizes(self) -> tuple[int, int, int]:
        """Devices along each of AXES."""
        if self.mesh is None:
            return self.devices, 1, 1
        sizes: dict[str, int] = {}
        for part in self.mesh.split(","):
            name, _, size = part.partition("=")
            if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
                _refuse("mesh", "data=N,context=N,tensor=N", self.mesh)
            sizes[name] = int(size)
        data, context, tensor = (sizes.get(name, 1) for name in AXES)
        return data, context, tensor

    @property
    def device_count(self) -> int:
        return math.prod(self.mesh_sizes)

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.accumulate * self.seq_len


#: Settings that may differ between a run and its resumption.
FREE_FIELDS = frozenset(
    ("config", "steps", "attention", "remat", "scan_layers", "devices", "mesh", "eval_every",
     "eval_windows", "final_eval_windows", "checkpoint_every", "log_every", "sample_tokens",
     "temperature", "top_k", "top_p", "peak_tflops", "profile")
)  # fmt: skip

_WIDE = {"head_dim": 64, "rope_base": 10000.0}

#: name -> (model sizes, run defaults). The names count the parameters with the byte vocabulary.
PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nano": (  # seconds, for trying things out
        {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "hidden": 64},
        {"steps": 100, "batch_size": 4, "seq_len": 64, "learning_rate": 1e-2},
    ),
    "tiny": (
        {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 32, "hidden": 352},
        {"steps": 600, "batch_size": 8, "seq_len": 256, "learning_rate": 2e-3},
    ),
    "30M": (
        {"dim": 512, "layers": 10, "heads": 8, "kv_heads": 4, "hidden": 1408, **_WIDE},
        {"steps": 2000, "batch_size": 16, "seq_len": 1024, "learning_rate": 1e-3,
         "warmup_steps": 100},
    ),
    "125M": (
        {"dim": 768, "layers": 20, "heads": 12, "kv_heads": 4, "hidden": 2048, **_WIDE},
        {"steps": 5000, "batch_size": 16, "seq_len": 2048, "learning_rate": 6e-4,
         "warmup_steps": 200},
    ),
    "350M": (
        {"dim": 1024, "layers": 30, "heads": 16, "kv_heads": 8, "hidden": 2816, **_WIDE},
        {"steps": 5000, "batch_size": 8, "seq_len": 2048, "learning_rate": 3e-4,
         "warmup_steps": 200},
    ),
}  # fmt: skip

_POSITIVE = (
    "batch_size", "accumulate", "seq_len", "devices", "eval_every", "eval_windows",
    "final_eval_windows", "checkpoint_every", "log_every",
)  # fmt: skip

#: setting -> (what it must be, whether it is); None (not given) is always allowed.
_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **{name: ("at least 1", lambda x: x >= 1) for name in _POSITIVE},
    "steps": ("0 or more", lambda x: x >= 0),
    "warmup_steps": ("0 or more", lambda x: x >= 0),
    "sample_tokens": ("0 or more", lambda x: x >= 0),
    "seed": ("between 0 and 2^32 - 1", lambda x: 0 <= x < 2**32),
    "vocab_size": ("at least 2", lambda x: x >= 2),
    "val_fraction": ("between 0 and 1", lambda x: 0 < x < 1),
    "learning_rate": ("positive", lambda x: x > 0),
    "min_learning_rate": ("between 0 and 1", lambda x: 0 <= x <= 1),
    "weight_decay": ("0 or more", lambda x: x >= 0),
    "clip": ("positive", lambda x: x > 0),
    "z_loss": ("0 or more", lambda x: x >= 0),
    "label_smoothing": ("at least 0 and below 1", lambda x: 0 <= x < 1),
    "temperature": ("0 or more", lambda x: x >= 0),
    "top_k": ("at least 1", lambda x: x >= 1),
    "top_p": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "peak_tflops": ("positive", lambda x: x > 0),
}


def make_config(preset: str, given: dict[str, Any]) -> RunConfig:
    """The preset with the given settings on top; refuses values that cannot work."""
    model, run = PRESETS[preset]
    settings = {"config": preset, **run, **given}
    model = TransformerConfig(**model, vocab_size=settings.get("vocab_size") or 256)
    config = RunConfig(model=model, **settings)
    for name, (required, holds) in _RULES.items():
        value = getattr(config, name)
        if value is not None and not holds(value):
            _refuse(name, required, value)
        if isinstance(value, float) and not math.isfinite(value):
            _refuse(name, "a finite number", value)
    _check_mesh(config)
    return config


def _check_mesh(config: RunConfig) -> None:
    """What the axes of the mesh must divide."""
    if config.mesh and config.devices > 1:
        raise UserError("--devices and --mesh exclude each other")
    data, context, tensor = config.mesh_sizes
    option = f"data={data} of --mesh" if config.mesh else f"--devices {data}"
    if config.batch_size % data:
        _refuse("batch_size", f"a multiple of {option}", config.batch_size)
    if context > 1 and config.seq_len % (2 * context):
        _refuse("seq_len", f"a multiple of 2 * context = {2 * context} of --mesh", config.seq_len)
    if context > 1 and config.attention not in ("native", "jax"):
        _refuse("attention", "native or jax with context > 1 in --mesh", config.attention)
    for what, size in (("kv heads", config.model.kv_heads), ("hidden units", config.model.hidden)):
        if size % tensor:
            raise UserError(
                f"--mesh: tensor={tensor} must divide the {size} {what} of --config {config.config}"
            )


def _refuse(name: str, required: str, got: Any) -> None:
    raise UserError(f"--{name.replace('_', '-')} must be {required}, got {got}")


def to_json(config: RunConfig) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_json(path: Path) -> tuple[str, dict[str, Any]]:
    """(preset, settings) of a saved config.json, for `make_config`."""
    try:
        saved = json.loads(path.read_text())
        saved.pop("model")
        saved["data"] = tuple(saved["data"])
        names = {field.name for field in dataclasses.fields(RunConfig)}
        unknown = set(saved) - names
        if unknown:
            raise ValueError(f"unknown settings {sorted(unknown)}")
        preset = saved.pop("config")
        make_config(preset, saved)  # a damaged value shows here
        return preset, saved
    except FileNotFoundError:
        raise UserError(f"nothing to resume: {path} does not exist") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"cannot read {path}: {type(e).__name__}: {e}") from None


def check_same(saved: dict[str, Any], here: dict[str, Any], where: Path) -> None:
    """Refuse to continue a checkpoint of another config."""
    for name, there in saved.items():
        value = here.get(name)
        if name not in FREE_FIELDS and value != there:
            raise UserError(
                f"{where} is a checkpoint of another config: {name} is {_short(there)} there and "
                f"{_short(value)} here"
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 80 else text[:77] + "..."
