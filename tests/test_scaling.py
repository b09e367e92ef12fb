"""The scaling model counts what the code moves, and its page holds its tables."""

import dataclasses
import functools
import json
import math
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_flashtrain.distributed import ring_attention, ulysses_attention

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import scaling  # noqa: E402
import scaling_model as model  # noqa: E402


def test_the_page_holds_the_tables():
    """After a change: ``python benchmarks/scaling_model.py``."""
    page = model.PAGE.read_text("utf-8")
    found = model.tables(model.Model(), model.Cluster(), model.measured())
    assert model.written(page, found) == page
    assert all(f"\n{table}\n" in page for table in found.values())
    with pytest.raises(ValueError, match="no place for the table 'x'"):
        model.written(page, {"x": ""})


def test_rates_are_those_of_the_result_file():
    rows = {r["shape"]: r for r in json.loads(model.MEASURED.read_text())["rows"]}
    row = rows["bfloat16 B2 S8192 H16 D128 full"]
    rates = model.measured()
    assert rates.products == row["fwd"]["roof"]["tflops"] * 1e12
    assert rates.attention(10000, backward=False) == row["fwd"]["native"]["tflops"] * 1e12
    assert rates.attention(8000, backward=True) < rates.attention(8192, backward=True)
    assert rates.attention(1, backward=True) == rates.attention(2048, backward=True)


def sent(jaxpr, sizes, times=1):
    """Bytes that a GPU sends in a traced program, by primitive."""
    found = {"ppermute": 0.0, "all_to_all": 0.0}
    for e in jaxpr.eqns:
        size = sum(v.aval.size * v.aval.dtype.itemsize for v in e.invars if hasattr(v, "aval"))
        if e.primitive.name == "ppermute":
            found["ppermute"] += times * size
        # In float32: the row statistics, for an L that nobody asked for here; XLA removes them.
        if e.primitive.name == "all_to_all" and e.invars[0].aval.dtype == jnp.bfloat16:
            axes = e.params["axis_name"]
            n = math.prod(sizes[a] for a in ([axes] if isinstance(axes, str) else axes))
            found["all_to_all"] += times * size * (n - 1) / n
        inner = times * e.params.get("length", 1) if e.primitive.name == "scan" else times
        for p in e.params.values():
            for x in p if isinstance(p, (tuple, list)) else (p,):
                x = getattr(x, "jaxpr", x)
                if hasattr(x, "eqns"):
                    for name, n in sent(x, sizes, inner).items():
                        found[name] += n
    return found


@pytest.mark.parametrize(("ring", "ulysses"), [(4, 1), (8, 1), (1, 4), (2, 4), (4, 2), (1, 8)])
def test_bytes_are_those_of_the_code(ring, ulysses):
    shape = model.Model(heads=8, kv_heads=2, head_dim=16)
    scheme, length = model.Scheme(ring, ulysses), 64
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[: scheme.size]).reshape(ring, ulysses), ("r", "u")
    )
    options = {"order": "zigzag", "causal": True}
    if ulysses == 1:
        attend = functools.partial(ring_attention, axis_name="r", **options)
    else:
        attend = functools.partial(
            ulysses_attention, axis_name="u", ring_axis="r" if ring > 1 else None, **options
        )
    cut = P(None, ("r", "u") if ring > 1 and ulysses > 1 else "r" if ring > 1 else "u")
    f = jax.shard_map(attend, mesh=mesh, in_specs=(cut,) * 3, out_specs=cut)
    q, k = (jax.ShapeDtypeStruct((1, length, heads, 16), jnp.bfloat16) for heads in (8, 2))
    step = jax.value_and_grad(lambda *x: f(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    got = sent(jax.make_jaxpr(step)(q, k, k).jaxpr, mesh.shape)
    want = model.traffic(shape, scheme, length)
    in_ring = ring * (want.ring_forward + want.ring_backward) + want.ring_home
    assert got == {"ppermute": in_ring, "all_to_all": 2 * want.all_to_all}


def test_limits():
    """Without communication only compute is left; a slower network never helps."""
    shape, rates = model.Model(), model.measured()
    free = model.Cluster(host=math.inf, network=math.inf, latency=0.0)
    slow = dataclasses.replace(model.Cluster(), network=1e9)
    for scheme in model.schemes(shape, 64, 131072):
        times = [
            model.attention(shape, c, rates, scheme, 131072) for c in (free, model.Cluster(), slow)
        ]
        assert times[0].exposed == 0
        assert times[0].total <= times[1].total <= times[2].total
    assert {s.size for s in model.schemes(shape, 4096, 131072)} == {4096}
    assert max(s.ulysses for s in model.schemes(shape, 4096, 131072)) == shape.heads
    one = model.step(shape, free, rates, 1, model.Scheme(1, 1), 131072, 1)
    flops = 6 * (shape.parameters - shape.dim * shape.vocab) * 131072
    assert one.total > flops / rates.products


# ---- the measurement -----------------------------------------------------------------------------

SCHEDULED = """
%around (p: bf16[8,4]) -> bf16[8,4] {
  ROOT %call.3 = (bf16[8,4]) custom-call(%q), custom_call_target="jax_flashtrain_bwd_v1"
}
%body (p: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %cp-start.1 = (bf16[8,4], bf16[8,4]) collective-permute-start(%x.1), channel_id=1
  %cp-start.2 = (bf16[8,4], bf16[8,4]) collective-permute-start(%y.1), channel_id=2
  %cp-done.2 = bf16[8,4] collective-permute-done(%cp-start.2)
  %call.1 = (bf16[8,4]) custom-call(%q), custom_call_target="jax_flashtrain_fwd_v1"
  %cp-done.1 = bf16[8,4] collective-permute-done((bf16[8,4], bf16[8,4]) %cp-start.1)
}
ENTRY %main (x: bf16[8,4]) -> bf16[8,4] {
  %cp-start.3 = (bf16[8,4], bf16[8,4]) collective-permute-start(%x), channel_id=3
  %call.2 = (bf16[8,4]) custom-call(%q), custom_call_target="__cublas$gemm"
  %cp-done.3 = bf16[8,4] collective-permute-done(%cp-start.3)
  %cp-start.4 = (bf16[8,4], bf16[8,4]) collective-permute-start(%x), channel_id=4
  %kernel = bf16[8,4] fusion(%q), kind=kCustom, calls=%around, metadata={op_name="x"}
  %cp-done.4 = bf16[8,4] collective-permute-done(%cp-start.4)
  %cp.5 = bf16[8,4] collective-permute(%x), channel_id=5
}
"""


def test_straddling_permutes_are_found():
    assert scaling.straddling(SCHEDULED) == (2, 5)


@pytest.mark.slow
def test_the_measurement_runs(tmp_path):
    path = tmp_path / "scaling.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "scaling.py"), "--toy", "--rounds", "1"]
    subprocess.run([*command, "--output", str(path)], check=True, timeout=600)
    rows = json.loads(path.read_text())["rows"]
    assert [row["devices"] for row in rows] == [8, 8, 8, 8, 8, 2, 8]
    assert all(row["largest error"] < 1.2e-2 for row in rows[:3])
    assert all(row["largest difference of losses"] < 2e-2 for row in rows[3:])
