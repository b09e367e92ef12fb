"""What a training step costs on many GPUs: compute and communication of each scheme, on paper.

    python benchmarks/scaling_model.py            # writes the tables of docs/scaling.md
    python benchmarks/scaling_model.py --network 25e9 --print

Rates of kernels and products are read from a result file; everything about links is a parameter.
The bytes are those that the code moves: tests/test_scaling.py counts them in traced programs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "scaling.md"
MEASURED = ROOT / "benchmarks" / "results" / "cuda-hopper-2026-12-01.json"
#: Rows of the result file whose kernels compute blocks of these lengths without a mask.
BLOCK_ROWS = {
    2048: "bfloat16 B8 S2048 H16 D128 full",
    8192: "bfloat16 B2 S8192 H16 D128 full",
}
BF16, F32 = 2, 4


@dataclasses.dataclass(frozen=True)
class Model:
    """A transformer; its attention has the shape of the scaling benchmark."""

    layers: int = 32
    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 14336
    vocab: int = 131072

    @property
    def layer_parameters(self) -> int:
        attention = 2 * self.dim * (self.heads + self.kv_heads) * self.head_dim
        return attention + 3 * self.dim * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + 2 * self.dim * self.vocab


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Links, all of them parameters. Bytes per second and GPU in one direction."""

    gpus_per_host: int = 8
    host: float = 450e9  # vendor: NVLink of H100 and H200, 900 GB/s both ways
    network: float = 50e9  # vendor: one 400 Gb/s adapter per GPU
    reached: float = 0.8  # share of either that a collective reaches: an assumption
    latency: float = 10e-6  # seconds per collective: an assumption


@dataclasses.dataclass(frozen=True)
class Rates:
    """Measured FLOP/s of one GPU: matrix products, and the kernels by the length of a block."""

    products: float
    forward: dict[int, float]
    backward: dict[int, float]

    def attention(self, block: float, *, backward: bool) -> float:
        """That of the longest measured block that is not longer, else of the shortest."""
        table = self.backward if backward else self.forward
        return table[max((n for n in table if n <= block), default=min(table))]


def measured(path: pathlib.Path = MEASURED) -> Rates:
    rows = {row["shape"]: row for row in json.loads(path.read_text())["rows"]}
    found = {n: rows[name] for n, name in BLOCK_ROWS.items()}

    def rate(row: dict, which: str, name: str = "native") -> float:
        return row[which][name]["tflops"] * 1e12

    return Rates(
        rate(found[8192], "fwd", "roof"),
        {n: rate(row, "fwd") for n, row in found.items()},
        {n: rate(row, "bwd") for n, row in found.items()},
    )


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A sequence over ``ring * ulysses`` GPUs; neighbours in the all-to-all are neighbours."""

    ring: int
    ulysses: int

    @property
    def size(self) -> int:
        return self.ring * self.ulysses

    @property
    def name(self) -> str:
        if self.ring == 1:
            return "Ulysses"
        return "ring" if self.ulysses == 1 else f"{self.ring} x {self.ulysses}"


def local_kv_heads(model: Model, ulysses: int) -> int:
    """kv heads of a GPU after the all-to-all, as `ulysses_attention` splits or replicates them."""
    heads, group = model.heads // ulysses, model.heads // model.kv_heads
    return heads // math.gcd(heads, group)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that a GPU sends for the attention of one layer."""

    ring_forward: float  # keys and values, in one step of the ring
    ring_backward: float  # and with their gradients
    ring_home: float  # gradients after the last step
    all_to_all: float  # forward or backward: q, k, v, o or their gradients


def traffic(model: Model, scheme: Scheme, sequence: int, value: int = BF16) -> Traffic:
    """``value``: bytes of an element of q, k, v and o; dk and dv go round in float32."""
    kv = 2 * (sequence // scheme.ring) * local_kv_heads(model, scheme.ulysses) * model.head_dim
    moves = scheme.ring > 1
    tokens = sequence // scheme.size
    heads = 2 * model.heads + 2 * scheme.ulysses * local_kv_heads(model, scheme.ulysses)
    exchanged = tokens * heads * model.head_dim * value
    sent = (scheme.ulysses - 1) / scheme.ulysses
    return Traffic(
        moves * kv * value, moves * kv * (value + F32), moves * kv * value, sent * exchanged
    )


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of the attention of one layer, forward and backward."""

    compute: float
    exposed: float  # communication that no kernel hides

    @property
    def total(self) -> float:
        return self.compute + self.exposed


def attention(model: Model, cluster: Cluster, rates: Rates, scheme: Scheme, sequence: int) -> Times:
    """Causal, zigzag: every step of the ring has the same work. Permutes run beside the kernels,
    all-to-alls before and after them."""
    moved = traffic(model, scheme, sequence)
    forward = 2.0 * sequence**2 * model.heads * model.head_dim / scheme.size
    block = sequence / (2 * scheme.ring)
    compute = [
        forward / rates.attention(block, backward=False),
        2.5 * forward / rates.attention(block, backward=True),
    ]
    exposed = 0.0
    if scheme.ring > 1:
        inside = scheme.size <= cluster.gpus_per_host
        link = (cluster.host if inside else cluster.network) * cluster.reached
        for seconds, sent in zip(compute, (moved.ring_forward, moved.ring_backward), strict=True):
            step = sent / link + cluster.latency
            exposed += scheme.ring * max(0.0, step - seconds / scheme.ring)
        exposed += moved.ring_home / link + cluster.latency
    if scheme.ulysses > 1:
        exposed += 2 * _all_to_all(cluster, scheme.ulysses, moved.all_to_all)
    return Times(sum(compute), exposed)


def _all_to_all(cluster: Cluster, ulysses: int, sent: float) -> float:
    """Two exchanges (q, k, v; then o) of ``sent`` bytes in all."""
    outside = max(0, ulysses - cluster.gpus_per_host) / max(1, ulysses - 1)
    seconds = max(outside / cluster.network, (1 - outside) / cluster.host) * sent
    return seconds / cluster.reached + 2 * cluster.latency


def products(model: Model, rates: Rates, tokens: float) -> float:
    """Seconds of a layer's matrix products, forward and backward, for the tokens of a GPU."""
    return 6.0 * model.layer_parameters * tokens / rates.products


def gradients(model: Model, cluster: Cluster, gpus: int) -> float:
    """Sum of the float32 gradients over all GPUs: within hosts, between them, within hosts."""
    size = F32 * model.parameters
    local = min(gpus, cluster.gpus_per_host)
    hosts = gpus // local
    inside = 2 * size * (local - 1) / local / cluster.host
    outside = 2 * size / local * (hosts - 1) / hosts / cluster.network
    return (inside + outside) / cluster.reached + 3 * cluster.latency


def schemes(model: Model, size: int, sequence: int) -> Iterator[Scheme]:
    """Every split of ``size`` GPUs that the code takes."""
    ulysses = 1
    while ulysses <= min(size, model.heads):
        ring = size // ulysses
        if model.heads % ulysses == 0 and sequence % (2 * ring * ulysses) == 0:
            yield Scheme(ring, ulysses)
        ulysses *= 2


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of the whole model: ``sequences`` of them over ``data`` groups of GPUs."""

    data: int
    scheme: Scheme
    compute: float
    exposed: float  # of the attention
    gradients: float

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.gradients


def step(
    model: Model, cluster: Cluster, rates: Rates, gpus: int, scheme: Scheme, sequence: int,
    sequences: int,
) -> Step:  # fmt: skip
    data = gpus // scheme.size
    each = sequences / data  # sequences that a group computes, one after the other
    layer = attention(model, cluster, rates, scheme, sequence)
    tokens = sequence / scheme.size
    head = 6.0 * model.dim * model.vocab * tokens / rates.products
    compute = model.layers * (layer.compute + products(model, rates, tokens)) + head
    return Step(
        data, scheme, each * compute, each * model.layers * layer.exposed,
        gradients(model, cluster, gpus),
    )  # fmt: skip


def best_step(
    model: Model, cluster: Cluster, rates: Rates, gpus: int, sequence: int, sequences: int
) -> Step:
    """The fastest split of ``gpus`` into data, ring and all-to-all."""
    found = []
    data = 1
    while data <= min(gpus, sequences):
        if gpus % data == 0:
            for scheme in schemes(model, gpus // data, sequence):
                found.append(step(model, cluster, rates, gpus, scheme, sequence, sequences))
        data *= 2
    return min(found, key=lambda s: s.total)


# ---- tables ----

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LENGTHS = {"128k": 131072, "1M": 1048576}
TOKENS = 4 * 1048576  # of a step in the second table


def attention_table(model: Model, cluster: Cluster, rates: Rates, sequence: int) -> str:
    lines = [
        "| GPUs | kernels ms | ring MiB | ring ms | Ulysses MiB | Ulysses ms | ring x Ulysses "
        "| MiB | ms | fastest |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for n in GPUS:
        found = {s: attention(model, cluster, rates, s, sequence)
                 for s in schemes(model, n, sequence)}  # fmt: skip
        ring, whole = Scheme(n, 1), Scheme(1, n)
        mixed = {s: t for s, t in found.items() if s.ring > 1 and s.ulysses > 1}
        mix = min(mixed, key=lambda s: mixed[s].total)

        def cells(scheme: Scheme, found: dict = found) -> str:
            if scheme not in found:
                return "– | –"
            moved = traffic(model, scheme, sequence)
            ring = scheme.ring * (moved.ring_forward + moved.ring_backward) + moved.ring_home
            return f"{_short((ring + 2 * moved.all_to_all) / 2**20)} | {_ms(found[scheme])}"

        fastest = min(found, key=lambda s: found[s].total)
        star = "*" if sequence / (2 * n) < min(BLOCK_ROWS) else ""
        lines.append(
            f"| {n} | {_short(1e3 * found[ring].compute)}{star} | {cells(ring)} | {cells(whole)} "
            f"| {mix.name} | {cells(mix)} | {fastest.name} |"
        )
    return "\n".join(lines)


def _short(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def _ms(times: Times) -> str:
    return _short(1e3 * times.total)


def step_table(model: Model, cluster: Cluster, rates: Rates, sequence: int) -> str:
    sequences = TOKENS // sequence
    lines = [
        "| GPUs | data | context | step s | compute | attention's communication | gradients "
        "| tokens/s and GPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for n in GPUS:
        s = best_step(model, cluster, rates, n, sequence, sequences)
        context = f"{s.scheme.ring} x {s.scheme.ulysses}"
        shares = " | ".join(
            f"{100 * x / s.total:.0f} %" for x in (s.compute, s.exposed, s.gradients)
        )
        speed = TOKENS / s.total / n
        lines.append(
            f"| {n} | {s.data} | {context} | {_short(s.total)} | {shares} | {speed:,.0f} |"
        )
    return "\n".join(lines)


def parameter_table(model: Model, cluster: Cluster, rates: Rates) -> str:
    def tflops(x: float) -> str:
        return f"{x / 1e12:.0f} TFLOP/s"

    rows = [
        ("matrix products (8192 x 8192 x 8192, bf16)", tflops(rates.products), "measured, H200"),
        *((f"{name} kernel, blocks of {n}", tflops(rate), "measured, H200")
          for name, table in (("forward", rates.forward), ("backward", rates.backward))
          for n, rate in table.items()),
        ("NVLink, per GPU and direction", f"{cluster.host / 1e9:.0f} GB/s", "vendor"),
        ("network, per GPU and direction", f"{cluster.network / 1e9:.0f} GB/s",
         "vendor (400 Gb/s)"),
        ("share of either that is reached", f"{cluster.reached:.0%}", "assumed"),
        ("latency of a collective", f"{1e6 * cluster.latency:.0f} µs", "assumed"),
        ("GPUs per host", f"{cluster.gpus_per_host}", "chosen"),
        ("model", f"{model.parameters / 1e9:.1f} G parameters, {model.layers} layers, width "
         f"{model.dim}, {model.heads}/{model.kv_heads} heads x {model.head_dim}, hidden "
         f"{model.hidden}, vocabulary {model.vocab}", "chosen"),
    ]  # fmt: skip
    lines = [f"| {name} | {value} | {source} |" for name, value, source in rows]
    return "\n".join(["| parameter | value | source |", "|---|---|---|", *lines])


def tables(model: Model, cluster: Cluster, rates: Rates) -> dict[str, str]:
    """Name of a place in the page -> its table."""
    found = {"parameters": parameter_table(model, cluster, rates)}
    for name, sequence in LENGTHS.items():
        found[f"attention {name}"] = attention_table(model, cluster, rates, sequence)
        found[f"step {name}"] = step_table(model, cluster, rates, sequence)
    return found


PLACE = r"(<!-- table: {} -->\n)[^<]*(<!-- end -->)"


def written(text: str, found: dict[str, str]) -> str:
    """The page with these tables."""
    for name, table in found.items():
        place = re.compile(PLACE.format(re.escape(name)))
        if not place.search(text):
            raise ValueError(f"{PAGE} has no place for the table {name!r}")
        text = place.sub(lambda m, table=table: m[1] + table + "\n" + m[2], text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for field in dataclasses.fields(Cluster):
        kind = int if field.name == "gpus_per_host" else float
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    parser.add_argument("--rates", type=pathlib.Path, default=MEASURED, help="result file")
    parser.add_argument("--print", action="store_true", help="leave docs/scaling.md alone")
    given = vars(parser.parse_args())
    only_print, rates = given.pop("print"), measured(given.pop("rates"))
    found = tables(Model(), Cluster(**given), rates)
    if only_print:
        for name, table in found.items():
            print(f"\n{name}\n\n{table}")
        return 0
    if Cluster(**given) != Cluster():
        parser.error("the page holds the default parameters: add --print")
    PAGE.write_text(written(PAGE.read_text("utf-8"), found), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
