"""The command line: ``python -m jax_flashtrain.train`` and ``jax-flashtrain-train``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from jax_flashtrain.train.errors import UserError

#: Distributions of the [train] extra and the modules they are imported as.
_NEEDED = {
    "optax": "optax",
    "orbax-checkpoint": "orbax.checkpoint",
    "matplotlib": "matplotlib",
    "tqdm": "tqdm",
}


class _Parser(argparse.ArgumentParser):
    """Complains in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def build_parser(
    presets: list[str], names: tuple[str, ...], texts: tuple[str, ...]
) -> argparse.ArgumentParser:
    """Every option defaults to "not given", so that a preset or a resumed run can supply it."""
    parser = _Parser(
        prog="python -m jax_flashtrain.train",
        description="Train a decoder-only transformer on text, through this package's attention.",
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Without options: a small model on the texts of Python's own help, in minutes on a "
        "CPU.\nCtrl-C saves a checkpoint and stops; --output DIR --resume goes on.",
    )
    add = parser.add_argument
    add("--config", choices=presets, help="model size and run defaults (tiny)")
    add("--attention", choices=names, help="native kernel, blockwise JAX, or jax.nn's xla or cudnn")

    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--output", type=Path, metavar="DIR", help="folder of the run (runs/<time>)")
    add("--resume", action="store_true", help="go on from the last checkpoint in --output")
    add("--overwrite", action="store_true", help="replace the run in --output")

    group = parser.add_argument_group("data")
    add = group.add_argument
    add("--data", nargs="+", metavar="FILE", help="text, .jsonl, .npy or .bin; also .gz .bz2 .xz")
    add("--text", choices=texts, help="built-in: Python's help pages, its sources, or both (docs)")
    add("--text-field", metavar="NAME", help="field of a JSONL line that holds the text (text)")
    add("--vocab-size", type=int, metavar="N", help="for token files (256, as for bytes)")
    add("--val-fraction", type=float, metavar="X", help="tail kept for validation (0.1)")
    add("--pack-documents", action="store_true", help="documents in a row do not see each other")

    group = parser.add_argument_group("training")
    add = group.add_argument
    for name, kind, text in (
        ("steps", int, "optimizer steps"),
        ("batch-size", int, "rows per step"),
        ("accumulate", int, "batches per optimizer step (1)"),
        ("seq-len", int, "tokens per row"),
        ("learning-rate", float, "peak rate"),
        ("min-learning-rate", float, "last rate as a share of the peak (0.1)"),
        ("warmup-steps", int, "steps of linear warm-up"),
        ("weight-decay", float, "decoupled, on matrices only (0.1)"),
        ("clip", float, "largest global gradient norm (1)"),
        ("z-loss", float, "weight of the squared log-partition (0)"),
        ("label-smoothing", float, "(0)"),
        ("seed", int, "of the weights and the order of the data (0)"),
    ):
        add(f"--{name}", type=kind, metavar="N" if kind is int else "X", help=text)
    add("--dtype", choices=("f32", "bf16"), help="arithmetic; weights stay float32 (f32)")
    add("--remat", choices=("none", "attention", "full"),
        help="recompute blocks in the backward: all but the attention, or all")  # fmt: skip
    add("--scan-layers", action="store_true", help="loop over layers: compiles faster")

    group = parser.add_argument_group("several devices and processes")
    add = group.add_argument
    add("--devices", type=int, metavar="N", help="the same as --mesh data=N (1)")
    add("--mesh", metavar="data=N,context=N,tensor=N",
        help="split batches, rows (ring attention) and heads over N devices each")  # fmt: skip
    add("--coordinator", metavar="HOST:PORT", help="of process 0 (JAX_COORDINATOR_ADDRESS)")
    add("--processes", type=int, metavar="N", help="of this run (JAX_NUM_PROCESSES)")
    add("--process", type=int, metavar="I", help="which one this is (JAX_PROCESS_ID)")

    group = parser.add_argument_group("evaluation and reports")
    add = group.add_argument
    add("--eval-every", type=int, metavar="N", help="steps between validations (100)")
    add("--eval-windows", type=int, metavar="N", help="rows of a validation on the way (32)")
    add("--final-eval-windows", type=int, metavar="N", help="rows of the last one (4096)")
    add("--checkpoint-every", type=int, metavar="N", help="steps between checkpoints (500)")
    add("--log-every", type=int, metavar="N", help="steps between reads of the loss (10)")
    add("--sample-tokens", type=int, metavar="N", help="length of the final sample (400)")
    add("--temperature", type=float, metavar="X", help="of the sample (0.8)")
    add("--top-k", type=int, metavar="K", help="of the sample (50)")
    add("--top-p", type=float, metavar="P", help="of the sample (off)")
    add("--peak-tflops", type=float, metavar="X", help="peak of one device, for MFU")
    add("--profile", metavar="FIRST:LAST", help="write a profiler trace of these steps")
    return parser


def _settings(given: dict[str, Any]) -> tuple[Any, Path, bool, bool]:
    """(config, output, resume, overwrite) from the options that were given."""
    from jax_flashtrain.train.config import check_same, from_json, make_config, to_json

    resume, overwrite = given.pop("resume", False), given.pop("overwrite", False)
    output: Path | None = given.pop("output", None)
    if "data" in given:
        given["data"] = tuple(given["data"])
        if "text" in given:
            raise UserError("--data and --text exclude each other")
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other")
    if (resume or overwrite) and output is None:
        raise UserError(f"--{'resume' if resume else 'overwrite'} needs --output DIR")
    if output is None:
        output = Path("runs") / time.strftime("%Y-%m-%d_%H-%M-%S")
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output}: is a file, not a folder")
    if resume:
        preset, saved = from_json(output / "config.json")
        preset = given.pop("config", preset)
        kept = dict(saved)
        for name, other in (("mesh", "devices"), ("devices", "mesh")):
            if name in given:
                kept.pop(other, None)  # says the same
        merged = make_config(preset, {**kept, **given})
        there = to_json(make_config(preset, saved))
        check_same(there, to_json(merged), output / "config.json")
        return merged, output, resume, overwrite
    if output.is_dir() and any(output.iterdir()) and not overwrite:
        raise UserError(
            f"--output {output}: is not empty; add --resume to go on or --overwrite to start anew"
        )
    config = make_config(given.pop("config", "tiny"), given)
    return config, output, resume, overwrite


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code (2 for anything the user can put right)."""
    group = None  # of processes
    ended = False  # in order, not in the middle of something
    try:
        missing = [name for name, module in _NEEDED.items() if not _importable(module)]
        if missing:
            raise UserError(
                f"training needs {', '.join(missing)}: pip install 'jax-flashtrain[train]'"
            )
        from jax_flashtrain.nn import ATTENTION_NAMES
        from jax_flashtrain.train import processes
        from jax_flashtrain.train.config import PRESETS
        from jax_flashtrain.train.loop import run
        from jax_flashtrain.train.sources import BUILT_IN_TEXTS

        given = vars(
            build_parser(list(PRESETS), ATTENTION_NAMES, BUILT_IN_TEXTS).parse_args(arguments)
        )
        several = processes.settings(given)
        if several and "output" not in given:
            raise UserError("several processes need --output DIR, a folder that all of them see")
        if several:
            group = processes.Group(*several)
        config, output, resume, overwrite = _settings(given)
        code = run(config, output, resume=resume, overwrite=overwrite)
        ended = True
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        code = 2
    except OSError as e:  # a full disk, a folder that went away
        print(f"error: {e.filename or 'input or output'}: {e.strerror or e}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except Exception:
        if group is None:
            raise
        time.sleep(5)  # if another process is gone, that is the reason, and this one ends here
        traceback.print_exc()
        code = 1
    if group is not None:
        group.close() if ended else group.abandon(code)
    return code


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False
