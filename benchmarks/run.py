"""Times this library against its peers: ``python benchmarks/run.py --backend cpu``.

Prints a table and writes a JSON file and a PNG plot. Nothing is timed before its output was
compared with float64.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="benchmarks/run.py")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=None, help="rounds per row (cpu 5, cuda 20)")
    parser.add_argument(
        "--only",
        default="",
        help="only rows whose name holds this text (or one of several, after commas)",
    )
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args(argv)


def commit() -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("JFT_COMMIT", "unknown")
    return done.stdout.strip()


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def plot(document: dict, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows, rate, unit = plot_rows(document)
    names = list(dict.fromkeys(n for row in rows for n in row if isinstance(row[n], dict)))
    figure, axis = plt.subplots(figsize=(10, 0.5 * len(rows) + 2))
    height = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [i + index * height for i in range(len(rows))]
        axis.barh(places, [row.get(name, {}).get(rate, 0.0) for row in rows], height, label=name)
    labels = [f"{r['shape']} {r['pass']}" for r in rows]
    axis.set_yticks([i + 0.4 for i in range(len(rows))], labels)
    axis.invert_yaxis()
    axis.set_xlabel(f"{unit} (more is better)")
    axis.set_title(f"{document['device']}, commit {document['commit']}")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def plot_rows(document: dict) -> tuple[list[dict], str, str]:
    """Rows of the form {shape, pass, contender: {rate: ...}}, the name of the rate, its unit."""
    if document["backend"] == "cpu":
        kept = {"shape", "pass"}
        rows = [
            {n: x for n, x in row.items() if n in kept or isinstance(x, dict)}
            for row in document["rows"]
        ]
        return rows, "gflop_per_cpu_s", "GFLOP per CPU-second"
    rows = [
        {"shape": row["shape"], "pass": label, **row[label]}
        for row in document["rows"]
        for label in ("fwd", "bwd")
    ]
    return rows, "tflops", "TFLOP/s"


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.backend == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    from benchmarks import shapes

    def wanted(shape: shapes.Shape) -> bool:
        return any(text in shape.name for text in args.only.split(","))

    if args.backend == "cpu":
        from benchmarks import cpu as backend

        selection = [s for s in shapes.CPU if wanted(s)]
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs room too
        from benchmarks import cuda as backend

        selection = [s for s in shapes.CUDA if wanted(s)]
    if not selection:
        print(f"no row matches --only {args.only!r}", file=sys.stderr)
        return 2
    rounds = args.rounds or (5 if args.backend == "cpu" else 20)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    origin = {"commit": commit(), "date": date}
    args.output.mkdir(parents=True, exist_ok=True)
    stem = args.output / f"{args.backend}-{date[:10]}"
    document: dict = {}
    for document in backend.run(selection, rounds=rounds, progress=progress):
        document |= origin
        text = json.dumps(document, indent=1) + "\n"
        stem.with_suffix(".json").write_text(text, encoding="utf-8")
    print(file=sys.stderr)
    print(backend.table(document))
    plot(document, stem.with_suffix(".png"))
    print(f"\nwritten: {stem}.json, {stem}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
