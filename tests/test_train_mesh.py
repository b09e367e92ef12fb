"""The trainer over a mesh of virtual devices: the losses of one device, and what is moved."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from functools import partial

import jax
import jaxlib.version
import numpy as np
import pytest
from tolerances import check_close

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")

from conftest import FAST_COMPILE
from test_train_cli import LOSSES, TINY, refused, subprocess_env, text_file

from jax_flashtrain.nn import TransformerConfig
from jax_flashtrain.train import cli, loop, processes
from jax_flashtrain.train.config import make_config
from jax_flashtrain.train.data import IGNORE, Batch
from jax_flashtrain.train.metrics import read_curve
from jax_flashtrain.train.parallel import Placement
from jax_flashtrain.train.step import init_state, make_eval_step, make_train_step, state_shardings

# orbax and the libraries under it are not ours to clean.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SMALL = TransformerConfig(
    vocab_size=64, dim=16, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=24
)
ALL = "data=2,context=2,tensor=2"


def small(mesh=None, model=SMALL, **given):
    given = {"steps": 4, "seq_len": 32, "batch_size": 4, "warmup_steps": 1} | given
    config = make_config("tiny", given | ({"mesh": mesh} if mesh else {}))
    return dataclasses.replace(config, model=model)


def batches(config):
    """Rows of three documents; some targets do not count."""
    rng = np.random.default_rng(3)
    shape = (config.accumulate, config.batch_size, config.seq_len)
    for _ in range(config.steps):
        tokens, targets = rng.integers(0, 64, (2, *shape)).astype(np.int32)
        targets[0, 0, :5] = IGNORE
        segments = np.sort(rng.integers(0, 3, shape).astype(np.int32), -1)
        yield Batch(tokens, targets, segments if config.pack_documents else None)


def curve(config):
    """Losses and gradient norms of the steps, and the loss of an evaluation at the end."""
    placement = Placement(config)
    state = jax.jit(init_state, static_argnums=0,
                    out_shardings=state_shardings(config, placement))(config)  # fmt: skip
    step = make_train_step(config, placement=placement)
    found = []
    for batch in batches(config):
        state, metrics = step(state, placement.batch(batch))
        found += [float(metrics["loss"]), float(metrics["grad_norm"])]
    one = jax.tree.map(lambda x: x[0], batch)
    total, count = make_eval_step(config, placement=placement)(state.params, placement.batch(one))
    return np.array([*found, float(total / count), float(count)])


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (ALL, {"pack_documents": True, "accumulate": 2, "remat": "attention"}),
        *(
            pytest.param(mesh, options, marks=pytest.mark.slow)
            for mesh, options in (
                ("data=4,context=2", {}),
                ("data=4,tensor=2", {"pack_documents": True}),
                ("context=8", {"pack_documents": True}),
                ("context=4,tensor=2", {"scan_layers": True}),
                (ALL, {"attention": "jax", "remat": "full", "scan_layers": True}),
                ("data=2,tensor=2", {"attention": "xla"}),
                ("tensor=2", {"z_loss": 1e-2, "label_smoothing": 0.1}),
            )
        ),
    ],
    ids=str,
)
def test_a_mesh_has_the_losses_of_one_device(mesh, options):
    check_close("curve", curve(small(mesh, **options)), curve(small(**options)), rtol=2e-5)


@pytest.mark.slow
def test_a_large_vocabulary_over_a_mesh():
    model = dataclasses.replace(SMALL, vocab_size=8192)
    check_close("curve", curve(small(ALL, model)), curve(small(model=model)), rtol=2e-5)


@pytest.mark.slow
def test_bf16_over_a_mesh():
    want = curve(small(dtype="bf16"))
    check_close("curve", curve(small(ALL, dtype="bf16")), want, rtol=5e-3)


def compiled(mesh, model=SMALL, **given):
    config = small(mesh, model, **given)
    placement = Placement(config)
    shapes = jax.eval_shape(partial(init_state, config))
    state = jax.tree.map(
        lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where),
        shapes, state_shardings(config, placement),
    )  # fmt: skip
    batch = placement.batch(next(batches(config)))
    return make_train_step(config, placement=placement).lower(state, batch).compile()


COLLECTIVES = "all-gather|all-to-all|reduce-scatter|collective-permute|all-reduce"


def collectives(text):
    """How often each kind of collective occurs in compiled HLO."""
    return Counter(re.findall(rf" ({COLLECTIVES})(?:-start)?\(", text))


def test_what_a_step_moves():
    """One permute in a step of the ring and one that brings dk and dv home, in each of two layers;
    everything else is a sum: nothing is gathered."""
    found = collectives(compiled(ALL, pack_documents=True).as_text())
    assert set(found) == {"collective-permute", "all-reduce"}
    assert found["collective-permute"] == 2 * (1 + 1 + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "want"),
    [
        ("data=8", {"all-reduce"}),
        ("data=4,tensor=2", {"all-reduce"}),
        ("data=4,context=2", {"all-reduce", "collective-permute"}),
    ],
)
def test_what_other_meshes_move(mesh, want):
    batch = {"batch_size": 8} if mesh == "data=8" else {}
    assert set(collectives(compiled(mesh, **batch).as_text())) == want


def test_memory_of_a_step_falls_with_the_context():
    """The program's own memory is that of the activations."""
    sizes = {
        n: compiled(f"context={n}", seq_len=2048, batch_size=1).memory_analysis() for n in (2, 8)
    }
    assert sizes[8].temp_size_in_bytes < 0.26 * sizes[2].temp_size_in_bytes


def test_tensor_cuts_the_state():
    config = small("tensor=2")
    state = jax.eval_shape(partial(init_state, config))
    shardings = state_shardings(config, Placement(config))
    shapes = jax.tree.map(lambda s, where: where.shard_shape(s.shape), state, shardings)
    layer = shapes.params["layers"][0]
    assert layer["attention"]["wq"] == (16, 2, 8)
    whole = sum(s.size for s in jax.tree.leaves(state.params["layers"]))
    parts = jax.tree.leaves(shapes.params["layers"], is_leaf=lambda x: isinstance(x, tuple))
    part = sum(int(np.prod(shape)) for shape in parts)
    assert part < 0.55 * whole


# ---- The command ---------------------------------------------------------------------------------

RUN = [*TINY, "--steps", "400", "--batch-size", "4", "--checkpoint-every", "8",
       "--eval-every", "1000"]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return str(text_file(tmp_path_factory.mktemp("text")))


def run_until(stop, patch, *arguments):
    """The command, interrupted at a step; returns its exit code."""

    class Stop(loop.Interrupt):
        @property
        def requested(self):
            self.reads = getattr(self, "reads", -1) + 1
            return self.reads >= stop

        @requested.setter
        def requested(self, _):
            pass

    with patch.context() as here:
        here.setattr(loop, "Interrupt", Stop)
        return cli.main([str(a) for a in arguments])


@pytest.fixture(scope="module")
def one_device(text, tmp_path_factory):
    """Losses of the first 40 steps of RUN on one device."""
    output = tmp_path_factory.mktemp("one") / "out"
    with pytest.MonkeyPatch.context() as patch:
        assert run_until(40, patch, *RUN, "--data", text, "--output", output) == 130
    return read_curve(output / "metrics.jsonl", *LOSSES)


def compare_curves(output, want, at_least):
    steps, got = read_curve(output / "metrics.jsonl", *LOSSES)
    assert len(steps) >= at_least
    n = min(len(steps), len(want[0]))
    assert steps[:n] == want[0][:n]
    check_close("losses", got[:n], want[1][:n], atol=1e-4)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["--mesh", "data=2,context=2"], ["--mesh", "context=4"]),
        pytest.param(["--devices", "4"], ["--mesh", "data=1"], marks=pytest.mark.slow),
        pytest.param(["--mesh", "context=8"], ["--devices", "2"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_under_another_mesh(
    text, tmp_path, monkeypatch, capsys, one_device, first, second
):
    output = ["--output", tmp_path / "out"]
    assert run_until(5, monkeypatch, *RUN, "--data", text, *output, *first) == 130
    assert run_until(5, monkeypatch, *output, "--resume", *second) == 130
    assert "resumed   at step 5" in capsys.readouterr().out
    compare_curves(tmp_path / "out", one_device, 10)


@pytest.mark.slow
def test_tensor_parallel_checkpoints(text, tmp_path, monkeypatch):
    """Cut matrices in, cut otherwise or whole out."""
    run = ["--config", "tiny", "--steps", "20", "--seq-len", "32", "--attention", "native",
           "--data", text, "--sample-tokens", "0", "--log-every", "2"]  # fmt: skip
    curves = []
    for name, mesh in (("one", ["data=1"] * 2), ("cut", [ALL, "data=4,tensor=2"]),
                       ("joined", ["tensor=2", "data=2,context=2"])):  # fmt: skip
        output = ["--output", tmp_path / name]
        assert run_until(4, monkeypatch, *run, *output, "--mesh", mesh[0]) == 130
        assert run_until(4, monkeypatch, *output, "--resume", "--mesh", mesh[1]) == 130
        steps, losses = read_curve(tmp_path / name / "metrics.jsonl", *LOSSES)
        assert steps == list(range(1, 9))
        curves.append(losses)
    for losses in curves[1:]:
        check_close("losses", losses, curves[0], atol=1e-4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--mesh", "data=2,rows=2"], "--mesh must be data=N,context=N,tensor=N, got data=2,row"),
        (["--mesh", "data=2,data=2"], "--mesh must be data=N,context=N,tensor=N, got"),
        (["--mesh", "context=0"], "--mesh must be data=N,context=N,tensor=N, got context=0"),
        (["--mesh", "data=2", "--devices", "2"], "--devices and --mesh exclude each other"),
        (["--mesh", "data=3"], "--batch-size must be a multiple of data=3 of --mesh, got 4"),
        (["--mesh", "context=3"], "--seq-len must be a multiple of 2 * context = 6 of --mesh, got"),
        (["--mesh", "context=2", "--attention", "xla"],
         "--attention must be native or jax with context > 1 in --mesh, got xla"),
        (["--mesh", "tensor=2"], "--mesh: tensor=2 must divide the 1 kv heads of --config nano"),
        (["--mesh", "data=4,context=4"], "--mesh data=4,context=4: needs 16 devices, there are 8"),
        (["--processes", "2"], "--coordinator HOST:PORT, --processes N and --process I (or JAX_"),
        (["--coordinator", "here", "--processes", "2", "--process", "0"],
         "--coordinator must be HOST:PORT"),
        (["--coordinator", "here:77", "--processes", "2", "--process", "2"],
         "--process at least 0 and below --processes, got here:77, 2 and 2"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)  # fmt: skip
def test_meshes_that_cannot_work(capsys, tmp_path, options, text):
    refused(capsys, [*RUN, *options, "--output", tmp_path / "out"], text)
    assert not (tmp_path / "out").exists()


def test_several_processes_need_a_folder_that_all_see(capsys):
    several = ["--coordinator", "localhost:7000", "--processes", "2", "--process", "0"]
    refused(capsys, [*RUN, *several], "several processes need --output DIR")


def test_a_port_that_is_taken(capsys, tmp_path):
    with socket.create_server(("", 0)) as server:
        several = ["--coordinator", f"localhost:{server.getsockname()[1]}", "--processes", "2"]
        options = [*RUN, *several, "--process", "0", "--output", tmp_path / "out"]
        refused(capsys, options, f"--coordinator {several[1]}: Address already in use")


# ---- Several processes ---------------------------------------------------------------------------


class Processes:
    """Two local processes with two virtual devices each, on XLA's CPU collectives."""

    def __init__(self, folder, *arguments):
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        flags = f"{FAST_COMPILE} --xla_force_host_platform_device_count=2"
        self.logs = [folder / f"stderr_{i}" for i in range(2)]
        self.all = []
        for i, log in enumerate(self.logs):
            command = [sys.executable, "-m", "jax_flashtrain.train", *map(str, arguments),
                       "--coordinator", f"localhost:{port}", "--processes", "2",
                       "--process", str(i)]  # fmt: skip
            with log.open("w") as err, (folder / f"stdout_{i}").open("w") as out:
                env = subprocess_env() | {"XLA_FLAGS": flags}
                self.all.append(subprocess.Popen(command, stdout=out, stderr=err, env=env))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.all:
            if process.poll() is None:
                process.kill()
            process.wait()

    def errors(self, i):
        return [x for x in self.logs[i].read_text().splitlines() if not x.startswith("[Gloo]")]

    def wait_for_step(self, output, step):
        """Until a checkpoint of this step or a later one is whole."""
        index = output / "checkpoints" / "index.json"
        for _ in range(1200):
            if index.exists() and int(json.loads(index.read_text())["last"][5:]) >= step:
                return
            assert all(p.poll() is None for p in self.all), [self.errors(i) for i in range(2)]
            time.sleep(0.1)
        raise AssertionError("no checkpoint")


OLD = jaxlib.version.__version_info__ < processes.CPU_COLLECTIVES
several_processes = pytest.mark.skipif(OLD, reason="jaxlib's CPU collectives fail at random")


@pytest.mark.skipif(not OLD, reason="of old releases of jaxlib")
def test_two_processes_are_refused_on_a_jaxlib_that_cannot(text, tmp_path):
    with Processes(tmp_path, *RUN, "--data", text, "--output", tmp_path / "out") as both:
        assert [p.wait(timeout=120) for p in both.all] == [2, 2]
        assert [x[:45] for i in range(2) for x in both.errors(i)] == [
            "error: several processes on CPUs need jaxlib "
        ] * 2


@several_processes
def test_two_processes_one_dies_and_the_run_goes_on(text, tmp_path, monkeypatch, one_device):
    """The curve of one device; whoever is left says so and ends; the rest of the curve follows."""
    output = tmp_path / "out"
    mesh = ["--mesh", "data=2,context=2"]
    with Processes(tmp_path, *RUN, "--data", text, "--output", output, *mesh) as both:
        both.wait_for_step(output, 8)
        both.all[1].kill()
        assert both.all[0].wait(timeout=120) == 3
    lost = [x for x in both.errors(0) if not x.startswith("step ")]
    assert lost == ["error: process 1 is gone: process 0 of 2 ends too; go on from the last "
                    "checkpoint with --resume"]  # fmt: skip
    compare_curves(output, one_device, 8)
    (output / "metrics.jsonl").unlink()  # what follows is of the resumption alone
    last = int(json.loads((output / "checkpoints" / "index.json").read_text())["last"][5:])
    again = ["--output", output, "--resume", "--mesh", "data=4"]
    assert run_until(6, monkeypatch, *again) == 130
    steps, losses = read_curve(output / "metrics.jsonl", *LOSSES)
    assert steps == list(range(last + 1, last + 7))
    common = [s for s in steps if s <= len(one_device[1])]
    check_close("losses", losses[: len(common)], [one_device[1][s - 1] for s in common], atol=1e-4)


@several_processes
@pytest.mark.slow
@pytest.mark.parametrize(("which", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_process_that_is_killed_or_silent_ends_the_other(text, tmp_path, which, number):
    output = tmp_path / "out"
    with Processes(tmp_path, *RUN, "--data", text, "--output", output, "--mesh", "data=4",
                   "--steps", "1000000") as both:  # fmt: skip
        both.wait_for_step(output, 8)
        os.kill(both.all[which].pid, number)
        assert both.all[1 - which].wait(timeout=120) == 3
        lost = [x for x in both.errors(1 - which) if not x.startswith("step ")]
        assert len(lost) == 1
        assert lost[0].startswith(f"error: process {which} is gone")


@several_processes
@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_in_order_and_two_go_on(text, tmp_path):
    output = tmp_path / "out"
    run = [*RUN, "--data", text, "--output", output, "--mesh", "data=2,context=2"]
    with Processes(tmp_path, *run, "--steps", "1000000") as both:
        both.wait_for_step(output, 8)
        both.all[1].send_signal(signal.SIGTERM)
        assert [p.wait(timeout=120) for p in both.all] == [130, 130]
    last = int(json.loads((output / "checkpoints" / "index.json").read_text())["last"][5:])
    assert len(read_curve(output / "metrics.jsonl", *LOSSES)[0]) == last
    with Processes(
        tmp_path, "--output", output, "--resume", "--steps", last + 4, "--mesh", "context=4"
    ) as both:
        assert [p.wait(timeout=120) for p in both.all] == [0, 0], both.errors(0)
    assert len(read_curve(output / "metrics.jsonl", *LOSSES)[0]) == last + 4


@several_processes
@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_stays_alone_says_so(text, tmp_path, index):
    code = (
        "import sys; from jax_flashtrain.train import cli, processes\n"
        "processes.COMING = 4.0; sys.exit(cli.main(sys.argv[1:]))"
    )
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    several = ["--coordinator", address, "--processes", "2", "--process", str(index)]
    command = [sys.executable, "-c", code, *RUN, "--data", text, *several]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=120, env=subprocess_env(),
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr == (
        f"error: --coordinator {address}: not all 2 processes were there after 4 s\n"
    )
