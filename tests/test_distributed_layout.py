"""Orders of a sequence over a mesh axis, the steps of a ring, and merged partial attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec as P
from tolerances import check_close

from jax_flashtrain._src.spec import EMPTY_ROW, Layout
from jax_flashtrain.distributed import (
    from_zigzag,
    local_positions,
    merging,
    schedule,
    to_zigzag,
    zigzag_positions,
)
from jax_flashtrain.distributed.layout import part_start, parts_of


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_zigzag_there_and_back(axis):
    x = np.arange(16 * 16).reshape(16, 16)
    there = to_zigzag(x, 4, axis)
    assert isinstance(there, np.ndarray)
    np.testing.assert_array_equal(there, np.take(x, zigzag_positions(16, 4), axis))
    np.testing.assert_array_equal(from_zigzag(there, 4, axis), x)


def test_wrong_lengths_are_refused():
    with pytest.raises(ValueError, match=r"^to_zigzag: .*multiple of 2 \* shards = 8, got 12"):
        to_zigzag(np.zeros((1, 12)), 4)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_positions_inside_shard_map(order):
    mesh = jax.make_mesh((8,), ("context",))
    f = jax.shard_map(
        lambda: local_positions(4, "context", order), mesh=mesh, in_specs=(), out_specs=P("context")
    )
    want = zigzag_positions(32, 8) if order == "zigzag" else np.arange(32)
    np.testing.assert_array_equal(jax.jit(f)(), want)


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_zigzag_balances_the_causal_load(shards):
    length = 64 * shards
    at = zigzag_positions(length, shards).reshape(shards, -1)
    load = (at + 1).sum(1)  # keys that the queries of a shard see
    assert load.max() <= 1.05 * load.min()
    contiguous = (np.arange(length).reshape(shards, -1) + 1).sum(1)
    assert contiguous.max() > 1.05 * contiguous.min()


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("low", "high"), [(None, None), (None, 0), (-5, 0), (-5, 3), (50, None)])
def test_plan_visits_what_somebody_sees_and_nothing_else(order, low, high):
    shards, rows, keys = 4, 3, 2
    rel = np.arange(100)[None, :] - np.arange(100)[:, None]
    seen = (rel >= (-99 if low is None else low)) & (rel <= (99 if high is None else high))
    found = set()
    for run in schedule.plan(order, shards, rows, keys, schedule.Band(low, high)):
        for t in range(run.first, run.last + 1):
            found |= {(t, p.rows, p.keys) for p in run.pairs}
    want = set()
    for t in range(shards):
        for x in range(parts_of(order)):
            for y in range(parts_of(order)):
                some = []
                for r in range(shards):
                    i = part_start(order, x, r, shards, rows)
                    j = part_start(order, y, (r - t) % shards, shards, keys)
                    some.append(seen[i : i + rows, j : j + keys].any())
                if any(some):
                    want.add((t, x, y))
    assert found == want


@pytest.mark.parametrize("sinks", [None, np.array([0.5, -np.inf])])
def test_merged_states_are_attention_over_all_keys(sinks):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 2, 4)).astype(np.float32) for n in (6, 9, 9))
    mask = rng.random((1, 1, 6, 9)) < 0.4
    mask[0, 0, 2] = False
    want = oracle.Attention(q, k, v, mask=mask, **({} if sinks is None else {"sinks": sinks}))
    state = None
    for cut in (slice(0, 4), slice(4, 5), slice(5, 9)):
        part = oracle.Attention(q, k[:, cut], v[:, cut], mask=mask[..., cut])
        empty = np.isinf(part.lse)
        one = merging.State(
            jnp.asarray(part.o, jnp.float32),
            jnp.asarray(np.where(empty, 0, part.lse), jnp.float32),
            jnp.where(empty, EMPTY_ROW, 0.0).astype(jnp.float32),
        )
        state = one if state is None else merging.merge(Layout.BTNH, state, one)
    if sinks is not None:
        state = merging.with_sinks(Layout.BTNH, state, jnp.asarray(sinks, jnp.float32)[None])
    lse = np.where(merging.is_empty(state.row_log_sum), -np.inf, state.row_max + state.row_log_sum)
    check_close("o", state.o, want.o, atol=2e-6)
    check_close("L", lse, want.lse, atol=2e-6)
