"""The command as a user meets it: a run, its files, resuming, Ctrl-C, and every refusal."""

import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tolerances import check_equal

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")

from jax_flashtrain.train import cli, loop, report
from jax_flashtrain.train.metrics import read_curve

# orbax and the libraries under it are not ours to clean.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

TINY = [
    "--config", "nano", "--steps", "8", "--seq-len", "32", "--batch-size", "2", "--log-every", "2",
    "--eval-every", "4", "--eval-windows", "4", "--final-eval-windows", "8",
    "--checkpoint-every", "4", "--sample-tokens", "0", "--attention", "native",
]  # fmt: skip
LOSSES = ("train", "loss")


def text_file(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, again and again. " * 100)
    return path


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """(output folder, options) of a finished run; tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("run")
    options = [*TINY, "--data", str(text_file(folder))]
    assert cli.main([*options, "--output", str(folder / "out"), "--sample-tokens", "8"]) == 0
    return folder / "out", options


@pytest.fixture
def copied(done, tmp_path):
    shutil.copytree(done[0], tmp_path / "out")
    return tmp_path / "out"


def files_of(folder: Path) -> dict:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(capsys, arguments, *texts) -> str:
    """The command answers one line on stderr and exit code 2."""
    capsys.readouterr()
    assert cli.main([str(a) for a in arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    for text in texts:
        assert str(text) in lines[0]
    return lines[0]


# ---- A whole run ---------------------------------------------------------------------------------


def test_a_run_leaves_its_files(done):
    output, _ = done
    summary = json.loads((output / "summary.json").read_text())
    assert summary["step"] == 8
    assert math.isclose(summary["val_loss_bits"], summary["val_loss_nats"] / math.log(2))
    assert summary["bigram_nats"] > 0
    assert json.loads((output / "config.json").read_text())["seq_len"] == 32
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len((output / "sample.txt").read_text()) > 8
    steps, losses = read_curve(output / "metrics.jsonl", *LOSSES)
    assert steps == list(range(1, 9))
    assert losses[-1] < losses[0]
    assert read_curve(output / "metrics.jsonl", "eval", "val_loss")[0] == [4, 8]
    index = json.loads((output / "checkpoints" / "index.json").read_text())
    kept = {p.name for p in (output / "checkpoints").glob("step_*")}
    assert kept == {index["last"], index["best"]} == {"step_00000008"}


def test_all_paths_are_printed(tmp_path, capsys, done):
    _, options = done
    output = tmp_path / "out"
    more = ["--steps", "2", "--sample-tokens", "8"]
    assert cli.main([*options, *more, "--output", str(output)]) == 0
    out = capsys.readouterr().out
    for name in (
        "config.json",
        "metrics.jsonl",
        "loss.png",
        "sample.txt",
        "summary.json",
        "checkpoints",
    ):
        assert str(output / name) in out
    for text in (
        "device    cpu",
        "attention native: cpu kernel",
        "bigram model",
        "bits) per byte",
        "rough",
    ):
        assert text in out


def test_default_output_is_a_folder_under_runs(tmp_path, monkeypatch, done):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*done[1], "--steps", "1"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "config.json").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--dtype", "bf16", "--remat", "attention", "--attention", "jax"],
        ["--pack-documents", "--accumulate", "2", "--scan-layers", "--remat", "full"],
        ["--z-loss", "1e-4", "--label-smoothing", "0.1", "--profile", "1:2", "--peak-tflops", "1"],
    ],
    ids=str,
)
def test_options_run(tmp_path, capsys, done, options):
    output = tmp_path / "out"
    assert cli.main([*done[1], "--output", str(output), "--steps", "3", *options]) == 0
    assert read_curve(output / "metrics.jsonl", *LOSSES)[0] == [1, 2, 3]
    if "--profile" in options:
        assert list((output / "profile").rglob("*.xplane.pb"))
        summary = json.loads((output / "summary.json").read_text())
        assert math.isclose(summary["mfu"], summary["model_tflops"])
        assert "of the peak (MFU)" in capsys.readouterr().out


def test_jax_nn_trains_the_same(tmp_path, capsys, done):
    output = tmp_path / "out"
    assert cli.main([*done[1], "--output", str(output), "--attention", "xla"]) == 0
    assert "attention xla: jax.nn" in capsys.readouterr().out
    check = np.array(read_curve(output / "metrics.jsonl", *LOSSES)[1])
    want = np.array(read_curve(done[0] / "metrics.jsonl", *LOSSES)[1])
    assert np.abs(check - want).max() < 1e-4


def test_batch_split_over_devices(tmp_path, done):
    output = tmp_path / "out"
    assert cli.main([*done[1], "--output", str(output), "--devices", "2"]) == 0
    check = np.array(read_curve(output / "metrics.jsonl", *LOSSES)[1])
    want = np.array(read_curve(done[0] / "metrics.jsonl", *LOSSES)[1])
    assert np.abs(check - want).max() < 1e-4


# ---- Stopping and going on -----------------------------------------------------------------------


def test_resumed_losses_are_bitwise_the_same(tmp_path, capsys, monkeypatch, done):
    want = read_curve(done[0] / "metrics.jsonl", *LOSSES)

    class StopAt5(loop.Interrupt):
        def __init__(self):
            self._left, self._old = 5, {}

        @property
        def requested(self):
            self._left -= 1
            return self._left < 0

    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "Interrupt", StopAt5)
        assert cli.main([*done[1], "--output", str(output)]) == 130
    out = capsys.readouterr().out
    assert "stopped at step 5" in out
    assert f"--output {output} --resume" in out
    assert cli.main(["--output", str(output), "--resume"]) == 0
    assert "resumed   at step 5" in capsys.readouterr().out
    got = read_curve(output / "metrics.jsonl", *LOSSES)
    assert got[0] == want[0]
    check_equal("losses", got[1], want[1])
    for name in ("val_loss_nats", "bigram_nats"):
        got, ref = (json.loads((o / "summary.json").read_text())[name] for o in (output, done[0]))
        assert got == ref


def test_resuming_a_finished_run_evaluates_and_samples(copied, capsys):
    (copied / "sample.txt").unlink()
    assert cli.main(["--output", str(copied), "--resume", "--attention", "jax"]) == 0
    assert (copied / "sample.txt").exists()
    assert "resumed   at step 8" in capsys.readouterr().out


def test_more_steps_on_resuming(copied):
    options = ["--steps", "10", "--sample-tokens", "0"]
    assert cli.main(["--output", str(copied), "--resume", *options]) == 0
    assert read_curve(copied / "metrics.jsonl", *LOSSES)[0] == list(range(1, 11))


def test_best_and_last_are_kept(tmp_path, done, monkeypatch):
    # After each of three steps; at the end on the same windows, and on all of them.
    values = iter([3.0, 2.0, 2.5, 2.6, 1.9])
    monkeypatch.setattr(loop.Run, "evaluate", lambda self, batches: next(values))
    output = tmp_path / "out"
    options = ["--steps", "4", "--eval-every", "4", "--checkpoint-every", "1"]
    assert cli.main([*done[1], *options, "--output", str(output)]) == 0
    index = json.loads((output / "checkpoints" / "index.json").read_text())
    assert (index["best"], index["best_loss"], index["last"]) == (
        "step_00000002",
        2.0,
        "step_00000004",
    )
    assert {p.name for p in (output / "checkpoints").glob("step_*")} == {
        index["best"],
        index["last"],
    }
    assert json.loads((output / "summary.json").read_text())["val_loss_nats"] == 1.9


def test_interrupting_the_last_evaluation_loses_nothing(tmp_path, done, monkeypatch):
    def interrupted(job, log, speed):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "finish", interrupted)
    output = tmp_path / "out"
    options = ["--steps", "3", "--checkpoint-every", "100"]
    assert cli.main([*done[1], *options, "--output", str(output)]) == 130
    index = json.loads((output / "checkpoints" / "index.json").read_text())
    assert index["last"] == "step_00000003"


def subprocess_env() -> dict:
    root = str(Path(__file__).parent.parent)
    inherited = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{inherited}", "JAX_PLATFORMS": "cpu"}


def test_ctrl_c_saves_first(tmp_path, done):
    output = tmp_path / "out"
    command = [sys.executable, "-m", "jax_flashtrain.train", *done[1], "--output", str(output)]
    command += ["--steps", "100000", "--log-every", "1", "--checkpoint-every", "100000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=subprocess_env()
    ) as process:
        for line in process.stderr:  # the first progress line: training has begun
            if line.startswith("step"):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "stopped at step" in out
    assert "Traceback" not in err
    index = json.loads((output / "checkpoints" / "index.json").read_text())
    assert int(index["last"].removeprefix("step_")) >= 1


# ---- Refusals: one line, exit code 2, nothing destroyed ------------------------------------------


def test_unusable_data(capsys, tmp_path):
    refused(capsys, [*TINY, "--data", tmp_path / "no.txt"], "no.txt: no such file")
    (tmp_path / "empty.txt").touch()
    refused(capsys, [*TINY, "--data", tmp_path / "empty.txt"], "empty.txt: is empty")
    (tmp_path / "short.txt").write_text("short")
    refused(capsys, [*TINY, "--data", tmp_path / "short.txt"], "too short", "--seq-len 32")
    np.save(tmp_path / "t.npy", np.full(1000, 300))
    refused(capsys, [*TINY, "--data", tmp_path / "t.npy"], "token 300 at position 0")
    text = [*TINY, "--data", text_file(tmp_path), "--vocab-size", "255"]
    refused(capsys, text, "text.txt: the bytes of a text need --vocab-size 256 or more, got 255")


def test_output_that_cannot_be_written(capsys, copied, done, monkeypatch):
    before = files_of(copied)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop.tempfile, "TemporaryFile", full)
    options = [*done[1], "--output", copied, "--overwrite"]
    refused(capsys, options, "cannot be written to: No space left on device")
    assert files_of(copied) == before
    refused(capsys, [*done[1], "--output", copied / "config.json" / "out"], "config.json")


def test_a_disk_that_fills_up_is_one_line(capsys, tmp_path, done, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "step_1")

    monkeypatch.setattr(loop.Checkpoints, "save", full)
    options = [*done[1], "--steps", "1", "--output", str(tmp_path / "out")]
    capsys.readouterr()
    assert cli.main(options) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "error: step_1: No space left on device"


def test_a_kernel_that_says_no_destroys_nothing(capsys, copied, done, monkeypatch):
    """Such as cuDNN, which looks at the call only when the step is traced."""
    before = files_of(copied)

    def attend(*_, **__):
        raise NotImplementedError("no such mask\nmore")

    monkeypatch.setattr("jax_flashtrain.train.parallel.attention_fn", lambda name: attend)
    options = [*done[1], "--output", copied, "--overwrite"]
    refused(capsys, options, "--attention native cannot run here: no such mask")
    assert files_of(copied) == before


def test_out_of_memory_says_what_to_do(capsys, tmp_path, done, monkeypatch):
    def step(state, batch):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    step.lower = lambda *_: None
    monkeypatch.setattr(loop, "make_train_step", lambda *_, **__: step)
    options = [*done[1], "--output", tmp_path / "out"]
    refused(capsys, options, "out of memory: try a smaller --batch-size")


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() == 0, reason="needs a user who can be denied"
)
def test_unreadable_data(capsys, tmp_path):
    path = text_file(tmp_path)
    path.chmod(0)
    refused(capsys, [*TINY, "--data", path], "cannot be read: Permission denied")


def test_output_in_use(capsys, copied, done):
    before = files_of(copied)
    refused(capsys, [*done[1], "--output", copied], "is not empty", "--resume", "--overwrite")
    refused(capsys, [*done[1], "--output", copied, "--resume", "--overwrite"], "exclude each other")
    refused(capsys, [*done[1], "--output", copied / "config.json"], "is a file")
    refused(capsys, ["--resume"], "needs --output")
    refused(
        capsys,
        [*done[1], "--output", copied, "--overwrite", "--data", copied / "none"],
        "no such file",
    )
    assert files_of(copied) == before


def test_overwrite_removes_only_what_a_run_wrote(copied, done):
    (copied / "notes.md").write_text("mine")
    assert cli.main([*done[1], "--output", str(copied), "--overwrite", "--steps", "2"]) == 0
    assert (copied / "notes.md").read_text() == "mine"
    assert read_curve(copied / "metrics.jsonl", *LOSSES)[0] == [1, 2]


def test_checkpoint_of_another_config(capsys, copied, done):
    before = files_of(copied)
    resume = ["--output", copied, "--resume"]
    refused(capsys, [*resume, "--seq-len", "64"], "another config: seq_len is 32 there and 64 here")
    refused(capsys, [*resume, "--config", "30M"], "another config: ")
    refused(capsys, [*resume, "--seed", "5"], "another config: seed is 0 there and 5 here")
    refused(capsys, [*resume, "--text", "stdlib"], "another config: text")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "learning_rate": 1.0}))
    refused(capsys, resume, "another config: learning_rate")
    (copied / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    assert files_of(copied) == before


def test_another_text_than_the_checkpoint_saw(capsys, copied, done):
    config = json.loads((copied / "config.json").read_text())
    (path,) = config["data"]
    content = Path(path).read_text()
    try:
        Path(path).write_text(content.replace("fox", "cat"))
        refused(capsys, ["--output", copied, "--resume"], "trained on another text")
    finally:
        Path(path).write_text(content)


def damage_index(out):
    (out / "checkpoints" / "index.json").write_text('{"last": ')


def damage_meta(out):
    next((out / "checkpoints").glob("step_*/meta.json")).write_text("{}")


def damage_state(out):
    for path in (out / "checkpoints").glob("step_*/state/**/*"):
        if path.is_file():
            path.write_bytes(b"broken")


def remove_state(out):
    shutil.rmtree(next((out / "checkpoints").glob("step_*")) / "state")


def remove_step(out):
    shutil.rmtree(next((out / "checkpoints").glob("step_*")))


def damage_config(out):
    (out / "config.json").write_text("[]")


def change_config(out, **values):
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, **values}))


def unknown_preset(out):
    change_config(out, config="huge")


def steps_as_text(out):
    change_config(out, steps="many")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (damage_index, "cannot read"),
        (damage_meta, "cannot read"),
        (damage_state, "cannot read the checkpoint"),
        (remove_state, "cannot read the checkpoint"),
        (remove_step, "is missing"),
        (damage_config, "cannot read"),
        (unknown_preset, "cannot read"),
        (steps_as_text, "cannot read"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_unreadable_checkpoint(capsys, copied, damage, text):
    damage(copied)
    before = files_of(copied)
    refused(capsys, ["--output", copied, "--resume"], text)
    assert files_of(copied) == before


def test_nothing_to_resume(capsys, tmp_path):
    refused(capsys, ["--output", tmp_path / "none", "--resume"], "nothing to resume")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--steps", "-1"], "--steps must be 0 or more, got -1"),
        (["--val-fraction", "1"], "--val-fraction must be between 0 and 1, got 1.0"),
        (["--learning-rate", "0"], "--learning-rate must be positive, got 0.0"),
        (["--devices", "3"], "--batch-size must be a multiple of --devices 3, got 2"),
        (["--devices", "1000", "--batch-size", "1000"], "--devices 1000: needs 1000 devices"),
        (["--temperature", "-1"], "--temperature must be 0 or more, got -1.0"),
        (["--top-k", "0"], "--top-k must be at least 1, got 0"),
        (["--top-p", "1.5"], "--top-p must be above 0 and at most 1, got 1.5"),
        (["--sample-tokens", "-1"], "--sample-tokens must be 0 or more, got -1"),
        (["--warmup-steps", "-1"], "--warmup-steps must be 0 or more, got -1"),
        (["--seed", "-1"], "--seed must be between 0 and 2^32 - 1, got -1"),
        (["--clip", "0"], "--clip must be positive, got 0.0"),
        (["--clip", "nan"], "--clip must be positive, got nan"),
        (["--weight-decay", "-1"], "--weight-decay must be 0 or more, got -1.0"),
        (["--label-smoothing", "1"], "--label-smoothing must be at least 0 and below 1, got 1.0"),
        (["--z-loss", "-1"], "--z-loss must be 0 or more, got -1.0"),
        (["--vocab-size", "1"], "--vocab-size must be at least 2, got 1"),
        (["--vocab-size", "0"], "--vocab-size must be at least 2, got 0"),
        (["--min-learning-rate", "2"], "--min-learning-rate must be between 0 and 1, got 2.0"),
        (["--peak-tflops", "0"], "--peak-tflops must be positive, got 0.0"),
        (["--profile", "5"], "--profile must be FIRST:LAST steps, got 5"),
        (["--profile", "5:5"], "--profile must be FIRST:LAST steps, got 5:5"),
        (["--profile", "3:9"], "--profile must end within the 8 steps, got 3:9"),
        (["--learning-rate", "inf"], "--learning-rate must be a finite number, got inf"),
        (["--clip", "inf"], "--clip must be a finite number, got inf"),
        (["--data", "a.txt", "--text", "docs"], "--data and --text exclude each other"),
        (["--attention", "cudnn"], "--attention cudnn needs an NVIDIA GPU"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_options_that_cannot_work(capsys, tmp_path, options, text):
    refused(capsys, [*TINY, *options, "--output", tmp_path / "out"], text)
    assert not (tmp_path / "out").exists()


def test_argparse_errors_are_exit_code_2(capsys):
    refused(capsys, ["--steps", "many"], "argument --steps: invalid int value: 'many' (see --help)")
    refused(capsys, ["--config", "huge"], "argument --config: invalid choice: 'huge'")
    refused(capsys, ["--step-count", "5"], "unrecognized arguments: --step-count 5")


def test_missing_libraries_are_named(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("optax", "tqdm") else find(name)
    )
    refused(capsys, TINY, "training needs optax, tqdm", "jax-flashtrain[train]")


def test_a_loss_that_is_not_finite_stops_the_run(capsys, tmp_path, done):
    output = tmp_path / "out"
    options = [*done[1], "--output", output, "--learning-rate", "1e30", "--warmup-steps", "0"]
    capsys.readouterr()
    assert cli.main([str(o) for o in options]) == 2
    assert "smaller --learning-rate" in capsys.readouterr().err


# ---- What the start says -------------------------------------------------------------------------


def test_unused_gpu_is_mentioned(monkeypatch):
    monkeypatch.setattr(report.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "has an NVIDIA GPU, but JAX runs on cpu" in report.unused_gpu_warning()
    monkeypatch.setattr(report.jax, "default_backend", lambda: "gpu")
    assert report.unused_gpu_warning() is None


def test_flops_per_token_counts_the_products():
    from jax_flashtrain.nn import TransformerConfig

    model = TransformerConfig(
        vocab_size=256, dim=8, layers=2, heads=2, kv_heads=1, head_dim=4, hidden=16
    )
    matrices = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16) + 8 * 256
    vectors = 2 * 2 * 8 + 8
    attention = 2 * 12 * (32 / 2) * 2 * 4  # 4 forward and 8 backward per visible pair and channel
    got = report.flops_per_token(model, matrices + vectors + 256 * 8, 32)
    assert abs(got - 6 * matrices - attention) <= 6 * vectors
