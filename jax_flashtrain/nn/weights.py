"""Weights stored as ``[out, in]`` matrices, the order most checkpoints use."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_flashtrain.nn.transformer import Params, TransformerConfig

#: Arrays of one block, in their order in the sequence.
BLOCK_ORDER = ("norm1", "wq", "wk", "wv", "wo", "norm2", "gate", "up", "down")


def params_from_out_in(arrays: Sequence[np.ndarray], config: TransformerConfig) -> Params:
    """The parameters of `transformer` from a flat list of ``[out, in]`` weights.

    Args:
      arrays: embedding ``[V, dim]``; per block norm1 ``[dim]``, wq ``[Hq*D, dim]``, wk and wv
        ``[Hkv*D, dim]``, wo ``[dim, Hq*D]``, norm2 ``[dim]``, gate and up ``[hidden, dim]``, down
        ``[dim, hidden]``; final norm ``[dim]``; head ``[V, dim]`` unless ``config.tied_head``.
      config: the model's sizes.

    Raises:
      ValueError: a wrong number of arrays, or a wrong shape (names the array).
    """
    dim, q, kv = config.dim, config.heads * config.head_dim, config.kv_heads * config.head_dim
    vocab = (config.vocab_size, dim)
    shapes = {
        "norm1": (dim,), "wq": (q, dim), "wk": (kv, dim), "wv": (kv, dim), "wo": (dim, q),
        "norm2": (dim,), "gate": (config.hidden, dim), "up": (config.hidden, dim),
        "down": (dim, config.hidden),
    }  # fmt: skip
    wanted = [("embedding", vocab)]
    for i in range(config.layers):
        wanted += [(f"block {i} {name}", shapes[name]) for name in BLOCK_ORDER]
    wanted.append(("final norm", (dim,)))
    if not config.tied_head:
        wanted.append(("head", vocab))
    if len(arrays) != len(wanted):
        raise ValueError(
            f"params_from_out_in: {config.layers} layers need {len(wanted)} arrays, got "
            f"{len(arrays)}"
        )
    for (name, shape), array in zip(wanted, arrays, strict=True):
        if np.shape(array) != shape:
            raise ValueError(
                f"params_from_out_in: {name} must have the shape {shape}, got {np.shape(array)}"
            )
    values = iter([jnp.asarray(a, jnp.float32) for a in arrays])
    params: Params = {"embedding": next(values), "layers": []}
    for _ in range(config.layers):
        block = {name: next(values) for name in BLOCK_ORDER}
        params["layers"].append(
            {
                "attention_norm": block["norm1"],
                "attention": attention_from_out_in(
                    block, config.heads, config.kv_heads, config.head_dim
                ),
                "mlp_norm": block["norm2"],
                "mlp": {name: block[name].T for name in ("gate", "up", "down")},
            }
        )
    params["norm"] = next(values)
    if not config.tied_head:
        params["head"] = next(values).T
    return params


def attention_from_out_in(
    block: dict[str, jax.Array], heads: int, kv_heads: int, head_dim: int
) -> dict[str, jax.Array]:
    """Weights of `attention` from wq, wk, wv ``[H*D, dim]`` and wo ``[dim, Hq*D]``."""
    dim = block["wo"].shape[0]
    return {
        "wq": block["wq"].T.reshape(dim, heads, head_dim),
        "wk": block["wk"].T.reshape(dim, kv_heads, head_dim),
        "wv": block["wv"].T.reshape(dim, kv_heads, head_dim),
        "wo": block["wo"].T.reshape(heads, head_dim, dim),
    }
