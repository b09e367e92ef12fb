"""Parts of a transformer as pure functions on pytrees (needs nothing but JAX)."""

from jax_flashtrain.nn.attend import ATTENTION_NAMES, attention_fn
from jax_flashtrain.nn.attention import attention, init_attention
from jax_flashtrain.nn.embedding import embedding
from jax_flashtrain.nn.feed_forward import feed_forward, init_feed_forward, swiglu
from jax_flashtrain.nn.generate import decode_step, generate, sample
from jax_flashtrain.nn.kv_cache import KVCache
from jax_flashtrain.nn.losses import (
    cross_entropy,
    cross_entropy_sum,
    linear_cross_entropy,
    linear_cross_entropy_sum,
)
from jax_flashtrain.nn.norms import layer_norm, rms_norm
from jax_flashtrain.nn.rope import LlamaScaling, rope, rope_frequencies, rope_tables, rotate
from jax_flashtrain.nn.transformer import (
    REMAT_CHOICES,
    TransformerConfig,
    init_caches,
    init_transformer,
    logits_of,
    transformer,
    transformer_block,
    transformer_hidden,
)
from jax_flashtrain.nn.weights import attention_from_out_in, params_from_out_in

__all__ = [
    "ATTENTION_NAMES",
    "REMAT_CHOICES",
    "KVCache",
    "LlamaScaling",
    "TransformerConfig",
    "attention",
    "attention_fn",
    "attention_from_out_in",
    "cross_entropy",
    "cross_entropy_sum",
    "decode_step",
    "embedding",
    "feed_forward",
    "generate",
    "init_attention",
    "init_caches",
    "init_feed_forward",
    "init_transformer",
    "layer_norm",
    "linear_cross_entropy",
    "linear_cross_entropy_sum",
    "logits_of",
    "params_from_out_in",
    "rms_norm",
    "rope",
    "rope_frequencies",
    "rope_tables",
    "rotate",
    "sample",
    "swiglu",
    "transformer",
    "transformer_block",
    "transformer_hidden",
]
