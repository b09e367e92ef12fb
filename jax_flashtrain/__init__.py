"""FlashAttention for training in JAX: exact gradients under every transform, on every backend."""

from ._src.api import flash_attention
from ._src.backends import backends
from ._src.dot_product import dot_product_attention
from ._src.explain import explain, supports
from ._src.exporting import export_disabled_checks
from ._src.native import load_all as _load_all
from ._src.packing import segment_ids_from_cu_seqlens

_load_all()  # registers the compiled kernels (needs no device); a build that does not fit raises

__version__ = "0.1.0"

__all__ = [
    "backends",
    "dot_product_attention",
    "explain",
    "export_disabled_checks",
    "flash_attention",
    "segment_ids_from_cu_seqlens",
    "supports",
]
