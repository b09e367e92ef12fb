"""Writes docs/benchmarks.md and its plots from benchmarks/results/*.json.

``python benchmarks/page.py``. Every result file is shown; one that no reader below understands is
an error with its name. tests/test_docs.py fails when the page is older than the results.
"""

from __future__ import annotations

import inspect
import json
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "docs" / "figures"))

import svg  # docs/figures/svg.py

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
FIGURES = ROOT / "docs" / "figures"
OUTPUT = "--output benchmarks/results/NAME.json"

INTRODUCTION = """\
# Benchmarks

<!-- Written by `python benchmarks/page.py` from benchmarks/results/*.json: change those, not this. -->

All contenders of a table were timed in one process, in turns: every round runs each of them once, so
that clock and load hit all alike. Times are medians over the rounds. Attentions are timed only after
their output and gradients were compared with a float64 reference, losses and training steps after
they were compared with each other. Causal and windowed rows count the visible pairs only; a backward
counts 2.5 times its forward.

A new result is one command, which stands below its table, and then `python benchmarks/page.py`.
"""  # noqa: E501


class Bars(NamedTuple):
    """A plot of horizontal bars: one panel per entry of ``panels``, more is better."""

    unit: str
    labels: list[str]
    panels: dict[str, dict[str, list[float | None]]]  # panel -> contender -> one value per label


class Section(NamedTuple):
    """What the page says about one file."""

    title: str
    facts: list[str]
    tables: list[str]
    command: str
    bars: Bars | None = None


class UnreadableError(Exception):
    """A result file that no reader understands."""


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def versions(document: dict[str, Any]) -> str:
    return ", ".join(f"{name} {text}" for name, text in document["versions"].items() if text)


# ---- readers: one per kind of file ---------------------------------------------------------------


def read_cuda(document: dict[str, Any]) -> Section:
    """benchmarks/run.py --backend cuda"""
    rows = document["rows"]
    names = [n for n in dict.fromkeys(n for r in rows for n in r["fwd"]) if n != "roof"]
    peers = [n for n in names if n != "native"]

    def rate(row: dict[str, Any], part: str, name: str) -> float | None:
        return row[part][name]["tflops"] if name in row[part] else None

    def both(row: dict[str, Any], name: str) -> str:
        if name in row["refused"]:
            return "refused"
        found = [rate(row, part, name) for part in ("fwd", "bwd")]
        return " / ".join("-" if x is None else f"{x:.0f}" for x in found) if any(found) else ""

    def against_best(row: dict[str, Any], part: str) -> float | None:
        """How much faster native is than the fastest peer of the row."""
        ratios = [row[part][n]["native_speedup"][1] for n in peers if n in row[part]]
        return min(ratios) if ratios else None

    def lines(rows: list[dict[str, Any]]) -> str:
        body = []
        for row in rows:
            ratios = [against_best(row, part) for part in ("fwd", "bwd")]
            text = " / ".join(f"{x:.2f}" for x in ratios if x is not None)
            body.append([row["shape"], *(both(row, n) for n in names), text])
        return table(["shape", *names, "native is x times the best peer"], body)

    facts = [
        f"{document['device']}, driver {document['driver']}; {versions(document)}; commit "
        f"{document['commit']}, {document['date'][:10]}; {document['rounds']} rounds. TFLOP/s, "
        "forward / backward."
    ]
    if "note" in document:
        facts.append(f"Note of the run: {document['note']}.")
    for part, label in (("fwd", "forward"), ("bwd", "backward")):
        ratios = [x for x in (against_best(row, part) for row in rows) if x is not None]
        ahead = sum(x >= 1 for x in ratios)
        facts.append(
            f"{label.capitalize()}: at least as fast as the best peer in {ahead} of {len(ratios)} "
            f"rows ({min(ratios):.2f} to {max(ratios):.2f} times its speed)."
        )
    errors = [max(row["errors"]["native"]) for row in rows if "float32" not in row["shape"]]
    facts.append(
        "Largest relative error (L2, of o, dq, dk, dv) of native in the half-precision rows: "
        f"{max(errors):.1e}."
    )
    tables = [lines(rows)]
    if "portable_only" in document:
        tables.append("The portable kernels alone:\n\n" + lines(document["portable_only"]))
    bars = Bars(
        "TFLOP/s",
        [row["shape"] for row in rows],
        {
            label: {n: [rate(row, part, n) for row in rows] for n in names}
            for part, label in (("fwd", "forward"), ("bwd", "backward"))
        },
    )
    command = f"python benchmarks/run.py --backend cuda --rounds {document['rounds']}"
    return Section(f"Attention on {document['device']}", facts, tables, command, bars)


def read_cpu(document: dict[str, Any]) -> Section:
    """benchmarks/run.py --backend cpu"""
    rows = document["rows"]
    found = dict.fromkeys(n for row in rows for n, x in row.items() if isinstance(x, dict))
    peers = [n for n in found if n not in ("native", "roof")]
    body = []
    for row in rows:
        cells = [
            f"{row[n]['gflop_per_cpu_s']:.0f} ({row[n]['native_speedup_quartiles'][1]:.2f})"
            if n in row
            else ""
            for n in peers
        ]
        native = f"{row['native']['gflop_per_cpu_s']:.0f}"
        share = f"{100 * row['share_of_roof']:.0f} %"
        body.append([row["shape"], row["pass"], native, share, *cells])
    kernels = dict.fromkeys(row.get("kernel") or document["isa"] for row in document["rows"])
    facts = [
        f"{document['device']}, {document['threads']} threads, kernel {', '.join(kernels)}; "
        f"{versions(document)}; commit {document['commit']}, {document['date'][:10]}; "
        f"{document['rounds']} rounds. GFLOP per CPU-second (all threads of the process), because "
        "the wall time of a small shared machine swings. In brackets: native is that many times as "
        "fast. Share: of a float32 matrix product in the same rounds."
    ]
    if "note" in document:
        facts.append(f"Note of the run: {document['note']}.")
    rate = lambda row, n: row[n]["gflop_per_cpu_s"] if n in row else None  # noqa: E731
    bars = Bars(
        "GFLOP per CPU-second",
        list(dict.fromkeys(row["shape"] for row in rows)),
        {
            part: {
                n: [rate(row, n) for row in rows if row["pass"] == part] for n in ("native", *peers)
            }
            for part in dict.fromkeys(row["pass"] for row in rows)
        },
    )
    command = f"python benchmarks/run.py --backend cpu --rounds {document['rounds']}"
    tables = [table(["shape", "pass", "native", "share", *peers], body)]
    return Section(f"Attention on {document['device']}", facts, tables, command, bars)


def read_train_step(document: dict[str, Any]) -> Section:
    """python -m jax_flashtrain.train.compare"""
    body = [
        [
            row["attention"],
            f"{row['milliseconds']:.1f}",
            f"{row['cpu_milliseconds']:.0f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['memory_bytes'] / 2**30:.2f}",
        ]
        for row in document["rows"]
    ]
    facts = [
        f"{document['device']}; {versions(document)}; commit {document['commit']}. Model "
        f"{document['config']}, {document['dtype']}, {document['batch_size']} rows of "
        f"{document['seq_len']} tokens; {document['rounds']} rounds, steps per round: "
        f"{document['inner']}."
    ]
    command = (
        f"python -m jax_flashtrain.train.compare --config {document['config']} --dtype "
        f"{document['dtype']} --batch-size {document['batch_size']} --seq-len "
        f"{document['seq_len']} --rounds {document['rounds']} --inner {document['inner']} "
        f"--attention {' '.join(row['attention'] for row in document['rows'])} {OUTPUT}"
    )
    head = ["attention", "ms per step", "CPU ms per step", "tokens/s", "GiB of the program"]
    bars = Bars(
        "tokens per second",
        [f"{document['config']} S{document['seq_len']}"],
        {"": {row["attention"]: [row["tokens_per_second"]] for row in document["rows"]}},
    )
    title = f"A training step on {document['device'].split(',')[0]}"
    return Section(title, facts, [table(head, body)], command, bars)


def read_loss(document: dict[str, Any]) -> Section:
    """benchmarks/linear_cross_entropy.py"""
    body = [
        [
            row["loss"],
            f"{row['milliseconds']:.2f}",
            f"{row['cpu_milliseconds']:.0f}",
            f"{row['temp_bytes'] / 2**20:,.0f}",
        ]
        for row in document["rows"]
    ]
    names = ("tokens", "vocab", "dim", "chunk", "dtype", "rounds")
    text = lambda x: " ".join(map(str, x)) if isinstance(x, list) else x  # noqa: E731
    options = " ".join(f"--{n} {text(document[n])}" for n in names)
    facts = [
        f"{document['device']}; {versions(document)}. Value and gradient of the loss of "
        f"{document['tokens']:,} tokens and {document['vocab']:,} classes, {document['dtype']}."
    ]
    head = ["loss", "ms", "CPU ms", "MiB of temporaries"]
    command = f"python benchmarks/linear_cross_entropy.py {options} {OUTPUT}"
    return Section(
        f"linear_cross_entropy on {document['device']}", facts, [table(head, body)], command
    )


def read_decode(document: dict[str, Any]) -> Section:
    """benchmarks/decode.py"""
    rows = document["attention"]
    names = [n for n in dict.fromkeys(n for r in rows for n in r) if _is_time(rows, n)]
    body = [
        [
            row["batch"],
            row["keys"],
            *(
                f"{row[n]['us_per_layer']:.1f} ({row[n]['share_of_copy']:.0%})" if n in row else ""
                for n in names
            ),
        ]
        for row in rows
    ]
    facts = [
        f"{document['device']}, driver {document['driver']}; {versions(document)}; commit "
        f"{document['commit']}, {document['date'][:10]}; {document['rounds']} rounds; "
        f"{document['note']}.",
        "Microseconds per layer that appends a token and attends to all keys; in brackets the rate "
        "at which keys and values are read, against a copy on the device.",
    ]
    tables = [table(["batch", "keys", *names], body)]
    return Section(document["what"], facts, tables, document["command"])


def _is_time(rows: list[dict[str, Any]], name: str) -> bool:
    return any(isinstance(r.get(name), dict) and "us_per_layer" in r[name] for r in rows)


def read_metal_counters(document: dict[str, Any]) -> Section:
    """tests/metal/counters.py"""
    columns = {
        "matrix_ops": "matrix ops",
        "device_read_bytes": "device bytes read",
        "device_write_bytes": "written",
        "threadgroup_bytes": "threadgroup bytes moved",
        "barriers": "barriers",
    }
    body = [
        [row["D"], row["dtype"], row["kernel"], *(f"{row[name]:,}" for name in columns)]
        for row in document["rows"]
        if not row["causal"] and row["matrix_ops"]
    ]
    facts = [
        f"{document['what'].capitalize()}; commit {document['commit'][:7]}. B = {document['B']}, "
        f"S = {document['S']}, {document['Hq']} query heads on {document['Hkv']} key head; one "
        "matrix op is an 8x8x8 product."
    ]
    tables = [table(["D", "dtype", "kernel", *columns.values()], body)]
    command = (
        "bash tests/metal/run.sh\n    PYTHONPATH=.:build/metal-emulated/stage JAX_PLATFORMS=cpu "
        "python tests/metal/counters.py benchmarks/results/metal-emulated-counters.json"
    )
    return Section("Metal: work per dispatch", facts, tables, command)


def read_rows(document: dict[str, Any]) -> Section:
    """Any other benchmark that tells how it is run again: {what, command, rows: [{column: value}]}.

    Values are numbers or texts, or a dict of them (one column each); lists named ``.._quartiles``
    stay in the file. ``device``, ``versions``, ``commit``, ``date``, ``rounds`` and ``note`` are
    told where they are there.
    """

    def columns(row: dict[str, Any]) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for name, value in row.items():
            if isinstance(value, dict):
                flat |= {f"{name} {part}": x for part, x in value.items()}
            elif not name.endswith("_quartiles"):
                flat[name] = value
        if any(isinstance(x, (dict, list)) for x in flat.values()):
            raise TypeError("rows must hold numbers, texts and dicts of them only")
        return flat

    rows = [columns(row) for row in document["rows"]]
    head = list(dict.fromkeys(name for row in rows for name in row))
    body = []
    for row in rows:
        values = [row.get(name, "") for name in head]
        body.append([f"{x:.4g}" if isinstance(x, float) else x for x in values])
    about = [str(document[name]) for name in ("device", "note") if name in document]
    if "versions" in document:
        about.append(versions(document))
    if "commit" in document:
        about.append(f"commit {document['commit']}")
    if "date" in document:
        about.append(document["date"][:10])
    if "rounds" in document:
        about.append(f"{document['rounds']} rounds")
    names = [name.replace("_", " ") for name in head]
    facts = ["; ".join(about) + "."] if about else []
    return Section(document["what"], facts, [table(names, body)], document["command"])


#: (is it this kind?, reader), tried in this order.
READERS: tuple[
    tuple[Callable[[dict[str, Any]], bool], Callable[[dict[str, Any]], Section]], ...
] = (
    (lambda d: "command" in d and "rows" in d, read_rows),
    (lambda d: d.get("backend") == "cuda", read_cuda),
    (lambda d: d.get("backend") == "cpu", read_cpu),
    (lambda d: "batch_size" in d and "attention" in d["rows"][0], read_train_step),
    (lambda d: "vocab" in d and "loss" in d["rows"][0], read_loss),
    (lambda d: "share_of_copy" in str(d.get("attention")), read_decode),
    (lambda d: "matrix_ops" in d["rows"][0], read_metal_counters),
)


def read(path: pathlib.Path) -> tuple[int, Section]:
    """(place on the page, section) of one file: attention, training, everything else."""
    try:
        document = json.loads(path.read_text("utf-8"))
        for place, (fits, reader) in enumerate(READERS):
            if fits(document):
                return (len(READERS) if reader is read_rows else place), reader(document)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UnreadableError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
    raise UnreadableError(f"{path}: no reader in benchmarks/page.py knows this kind of result")


# ---- writing -------------------------------------------------------------------------------------


def figure_of(path: pathlib.Path) -> pathlib.Path:
    return FIGURES / f"bench-{path.stem}.svg"


def draw(bars: Bars, path: pathlib.Path) -> None:
    from matplotlib import pyplot as plt

    count = max(len(contenders) for contenders in bars.panels.values())
    size = (9.6, 0.9 + len(bars.labels) * (0.14 * count + 0.1))
    figure, axes = plt.subplots(
        1, len(bars.panels), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    height = 0.84 / count
    for axis, (title, contenders) in zip(axes[0], bars.panels.items(), strict=True):
        for n, (name, values) in enumerate(contenders.items()):
            places = [i + (n + 0.5) * height - 0.42 for i in range(len(values))]
            axis.barh(places, [x or 0.0 for x in values], height, label=name)
        axis.set(title=title, xlabel=f"{bars.unit} (more is better)")
        axis.set_yticks(range(len(bars.labels)), bars.labels, fontsize=8)
        axis.grid(axis="x", lw=0.4)
        axis.set_axisbelow(True)
    axes[0, 0].set_ylim(len(bars.labels) - 0.5, -0.5)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=count, frameon=False)
    svg.save(figure, path, source(bars))
    plt.close(figure)


def source(bars: Bars) -> str:
    """Digest of what a plot shows and how."""
    return svg.digest(inspect.getsource(draw), bars)


def sections(results: pathlib.Path = RESULTS) -> dict[pathlib.Path, Section]:
    """One per file, by kind, newest first (the names hold dates)."""

    def date(path: pathlib.Path) -> str:
        found = re.search(r"\d{4}-\d\d-\d\d", path.stem)
        return found[0] if found else ""

    newest = sorted(sorted(results.glob("*.json")), key=date, reverse=True)
    found = {path: read(path) for path in newest}
    return {path: section for path, (_, section) in sorted(found.items(), key=lambda x: x[1][0])}


def page(found: dict[pathlib.Path, Section]) -> str:
    parts = [INTRODUCTION]
    for path, section in found.items():
        name = path.relative_to(ROOT).as_posix()
        parts.append(f"## {section.title} ({path.stem})\n")
        parts.append("\n\n".join(section.facts) + "\n")
        if section.bars is not None:
            parts.append(f"![{section.bars.unit} of every row](figures/{figure_of(path).name})\n")
        parts += [text + "\n" for text in section.tables]
        parts.append(f"Data: [{name}](../{name}). Again:\n\n    {section.command}\n")
    return "\n".join(parts)


def main() -> int:
    try:
        found = sections()
    except UnreadableError as error:
        print(error, file=sys.stderr)
        return 1
    PAGE.write_text(page(found), "utf-8")
    for stale in FIGURES.glob("bench-*.svg"):
        stale.unlink()
    for path, section in found.items():
        if section.bars is not None:
            draw(section.bars, figure_of(path))
    print(f"{PAGE}: {len(found)} results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
