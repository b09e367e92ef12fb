"""A sequence cut over eight (virtual) devices: ring attention in the balanced zigzag order.

python examples/ring_attention.py
"""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_flashtrain import flash_attention
from jax_flashtrain.distributed import from_zigzag, ring_attention, to_zigzag

devices = jax.devices()
mesh = jax.sharding.Mesh(np.array(devices), ("context",))
cut = P(None, "context")
attend = jax.jit(
    jax.shard_map(
        functools.partial(ring_attention, axis_name="context", order="zigzag", causal=True),
        mesh=mesh,
        in_specs=(cut, cut, cut),
        out_specs=cut,
    )
)

keys = jax.random.split(jax.random.key(0), 3)
q = jax.random.normal(keys[0], (1, 1024, 4, 32))
k, v = (jax.random.normal(key, (1, 1024, 2, 32)) for key in keys[1:])
laid = [to_zigzag(x, len(devices)) for x in (q, k, v)]


def loss(q, k, v):
    return (attend(q, k, v) ** 2).sum()


o = from_zigzag(attend(*laid), len(devices))
gradients = jax.grad(loss, argnums=(0, 1, 2))(*laid)
error = jnp.abs(o - flash_attention(q, k, v, causal=True)).max()
print(f"{len(devices)} devices, {q.shape[1] // len(devices)} tokens each")
print(f"largest difference from one device: {error:.1e}")
assert error < 1e-5
assert all(bool(jnp.isfinite(g).all()) for g in gradients)
