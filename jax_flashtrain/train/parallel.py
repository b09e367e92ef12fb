"""Several devices: where the arrays of a run live, and what its parts do across them.

    axis       cuts
    data       the rows of a batch
    context    every row: ring attention in the zigzag order
    tensor     heads and the hidden units of the feed-forward

Parameters and optimizer state are cut over ``tensor`` and copied along the other axes. XLA puts in
the sums that the products need; attention over a cut row and the loss say their communication
themselves, in a ``shard_map``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flashtrain.distributed import mesh_attention, to_zigzag, zigzag_positions
from jax_flashtrain.nn import attention_fn
from jax_flashtrain.nn.attend import Attend
from jax_flashtrain.train.config import AXES, RunConfig
from jax_flashtrain.train.data import Batch
from jax_flashtrain.train.errors import UserError

#: Matrices that ``tensor`` cuts, by name: heads of attention, hidden units of the feed-forward.
_CUT = {
    "wq": P(None, "tensor"), "wk": P(None, "tensor"), "wv": P(None, "tensor"), "wo": P("tensor"),
    "gate": P(None, "tensor"), "up": P(None, "tensor"), "down": P("tensor"),
}  # fmt: skip


class Placement:
    """The mesh of a run, and the arrays and functions that depend on it."""

    def __init__(self, config: RunConfig):
        sizes = config.mesh_sizes
        count = config.device_count
        if count > jax.device_count():
            option = f"--mesh {config.mesh}" if config.mesh else f"--devices {config.devices}"
            raise UserError(f"{option}: needs {count} devices, there are {jax.device_count()}")
        if jax.process_count() > 1 and count != jax.device_count():
            raise UserError(
                f"--mesh must use all {jax.device_count()} devices of {jax.process_count()} "
                f"processes, got {count}"
            )
        self.mesh = Mesh(np.array(jax.devices()[:count]).reshape(sizes), AXES)
        self.context = sizes[1]
        self.copied = NamedSharding(self.mesh, P())

    def state(self, shapes: Any) -> Any:
        """Shardings of a TrainState, from its shapes: by the name of each matrix."""

        def one(path: tuple[Any, ...], _: Any) -> NamedSharding:
            names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            return NamedSharding(self.mesh, _CUT.get(names[-1], P()) if names else P())

        return jax.tree_util.tree_map_with_path(one, shapes)

    def batch(self, batch: Batch) -> Batch:
        """NumPy ``[..., B, S]`` onto the devices; every process brings what its devices hold."""
        leading = (None,) * (batch.tokens.ndim - 2)
        where = NamedSharding(self.mesh, P(*leading, "data", "context"))

        def put(x: np.ndarray) -> jax.Array:
            if self.context > 1:
                x = to_zigzag(x, self.context, -1)
            return jax.make_array_from_callback(x.shape, where, lambda index: x[index])

        return jax.tree.map(put, batch)

    def positions(self, length: int) -> jax.Array | None:
        """Of the tokens of a row, for RoPE; None = in their order."""
        return jnp.asarray(zigzag_positions(length, self.context)) if self.context > 1 else None

    def attend(self, name: str) -> Attend:
        """The attention called ``name``, over rows that are cut or whole."""
        if self.context == 1:
            return attention_fn(name)
        return partial(
            mesh_attention, mesh=self.mesh, ring="context", order="zigzag", batch="data",
            heads="tensor", implementation=name,
        )  # fmt: skip

    def loss(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function(hidden, head, targets) -> (sum, count)`` on every shard, added up over all."""
        if self.mesh.size == 1:
            return function

        def local(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> Any:
            sums = function(hidden, head, targets)
            # One psum each: jax 0.8 cannot transpose one of a loss and a count together.
            return tuple(jax.lax.psum(x, ("data", "context")) for x in sums)

        rows = P("data", "context")
        return jax.shard_map(local, mesh=self.mesh, in_specs=(rows, P(), rows), out_specs=P())

    def whole(self, tree: Any) -> Any:
        """Arrays of this process alone that hold all of ``tree`` (every process calls it)."""
        copied = jax.jit(lambda x: x, out_shardings=self.copied)(tree)
        return jax.tree.map(lambda x: x.addressable_data(0), copied)
