"""One training run, from the settings to the last printed path."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from jax_flashtrain.nn import generate
from jax_flashtrain.train import processes, report
from jax_flashtrain.train.bigram import MAX_VOCABULARY, bigram_loss
from jax_flashtrain.train.checkpoints import Checkpoints, write_json
from jax_flashtrain.train.config import RunConfig, check_same, to_json
from jax_flashtrain.train.data import Batch, Corpus
from jax_flashtrain.train.errors import UserError
from jax_flashtrain.train.metrics import MetricsLog, plot_losses
from jax_flashtrain.train.parallel import Placement
from jax_flashtrain.train.progress import Progress
from jax_flashtrain.train.sources import built_in_text, open_source
from jax_flashtrain.train.step import (
    DTYPES,
    TrainState,
    init_state,
    make_eval_step,
    make_train_step,
    state_shardings,
)

#: Attention of the sample where it is not that of the training: cuDNN has no cache offsets, and our
#: operator chooses for itself.
SAMPLE_ATTENTION = {"cudnn": "xla", "native": None}


def say(text: str) -> None:
    if processes.is_first():
        print(text, flush=True)


class Interrupt:
    """Ctrl-C (or SIGTERM) asks for a stop after the current step; a second one stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def agreed(self) -> bool:
        """Whether to stop now: some process was asked to (all call it at the same step)."""
        return processes.any_process(self.requested)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        text = "\nsaving and stopping after this step; once more stops at once"
        print(text, file=sys.stderr, flush=True)


def load_corpus(config: RunConfig) -> Corpus:
    """The text of a run; refuses files that cannot be used and reports broken lines."""
    if config.data:
        sources = [
            open_source(
                Path(name), vocab_size=config.model.vocab_size, text_field=config.text_field
            )
            for name in config.data
        ]
    else:
        sources = [built_in_text(config.text)]
    for source in sources:
        if source.is_text and config.model.vocab_size < 256:
            raise UserError(
                f"{source.name}: the bytes of a text need --vocab-size 256 or more, got "
                f"{config.model.vocab_size}"
            )
        if source.broken_lines:
            say(
                f"data      {source.name}: left out {source.broken_lines} broken of "
                f"{source.lines} lines (the first is line {source.first_broken})"
            )
    return Corpus(
        sources,
        seq_len=config.seq_len,
        val_fraction=config.val_fraction,
        pack_documents=config.pack_documents,
    )


class Run:
    """State of one run; `train` is the loop."""

    def __init__(self, config: RunConfig, output: Path, *, resume: bool):
        self.config = config
        self.output = output
        self.corpus = load_corpus(config)
        self.placement = Placement(config)
        self.attention = report.attention_line(config)
        self.checkpoints = Checkpoints(output / "checkpoints")
        self.data = self.corpus.fingerprint()
        if resume:
            self.checkpoints.read_index()
            meta = self.checkpoints.read_meta()
            where = self.checkpoints.folder / self.checkpoints.index["last"]
            check_same(meta["config"], json.loads(json.dumps(to_json(config))), where)
            if meta["data"] != self.data:
                raise UserError(
                    f"{where} was trained on another text ({meta['data']['tokens']} tokens there, "
                    f"{self.data['tokens']} here)"
                )
        where = state_shardings(config, self.placement)
        make = jax.jit(init_state, static_argnums=0, out_shardings=where)
        self.state: TrainState = make(config)
        if resume:
            self.state = self.checkpoints.restore(self.state)
        self.step = int(self.state.step)
        self.train_step = make_train_step(config, placement=self.placement)
        self.eval_step = make_eval_step(config, placement=self.placement)
        self.parameters = report.parameter_count(self.state.params)
        final = self.corpus.val_batches(config.batch_size, config.final_eval_windows)
        self.final_batches = final
        # Evaluations on the way take the first windows, in the same batch shape.
        self.eval_batches = final[: -(-config.eval_windows // config.batch_size)]
        self.bigram = (
            bigram_loss(self.corpus, final, config.model.vocab_size)
            if config.model.vocab_size <= MAX_VOCABULARY
            else None
        )

    def evaluate(self, batches: list[Batch]) -> float:
        """Nats per token: the sum over all targets by their number."""
        parts = [self.eval_step(self.state.params, self.placement.batch(b)) for b in batches]
        total, count = (sum(float(x) for x in column) for column in zip(*parts, strict=True))
        return total / count

    def save(self, val_loss: float | None = None) -> Path:
        meta = {"step": self.step, "config": to_json(self.config), "data": self.data}
        return self.checkpoints.save(self.state, meta, val_loss=val_loss)

    def check_step(self) -> None:
        """Lower the training step: what an attention refuses, it refuses here."""
        try:
            self.train_step.lower(self.state, self.next_batch())
        except NotImplementedError as e:
            reason = str(e).splitlines()[0]
            raise UserError(f"--attention {self.config.attention} cannot run here: {reason}") from e

    def next_batch(self) -> Batch:
        config = self.config
        rows = config.batch_size * config.accumulate
        batch = self.corpus.train_batch(config.seed, self.step, rows)
        shape = (config.accumulate, config.batch_size, config.seq_len)
        return self.placement.batch(jax.tree.map(lambda x: x.reshape(shape), batch))

    def train(self, log: MetricsLog, interrupt: Interrupt) -> float | None:
        """Run the remaining steps; returns tokens per second of the steps alone."""
        config = self.config
        progress = Progress(self.step, config.steps, tokens_per_step=config.tokens_per_step)
        first, last = _profile_range(config) or (-1, -1)
        tracing = False
        waiting: list[tuple[int, dict]] = []  # metrics still on the device
        stop = interrupt.agreed()

        def flush() -> None:
            for step, metrics in waiting:
                values = {name: float(value) for name, value in metrics.items()}
                log.write("train", step, **values, tokens=step * config.tokens_per_step)
                if not math.isfinite(values["loss"]):
                    raise FloatingPointError(f"the loss is {values['loss']} at step {step}")
            if waiting:
                progress.update(waiting[-1][0], values["loss"])
            waiting.clear()

        try:
            while self.step < config.steps and not stop:
                if self.step == first:
                    jax.profiler.start_trace(self.output / "profile")
                    tracing = True
                self.state, metrics = self.train_step(self.state, self.next_batch())
                self.step += 1
                waiting.append((self.step, metrics))
                if tracing and self.step == last:
                    jax.block_until_ready(self.state)
                    jax.profiler.stop_trace()
                    tracing = False
                save = self.step % config.checkpoint_every == 0 and self.step < config.steps
                evaluate = save or (self.step % config.eval_every == 0 and self.step < config.steps)
                if evaluate or self.step % config.log_every == 0:
                    flush()
                if evaluate:
                    began = time.perf_counter()
                    val_loss = self.evaluate(self.eval_batches)
                    log.write("eval", self.step, val_loss=val_loss)
                    progress.say(f"step {self.step}: validation {_nats_bits(val_loss)}")
                    if save:
                        self.save(val_loss)
                    progress.pause(time.perf_counter() - began)
                if jax.process_count() == 1 or self.step % config.log_every == 0:
                    stop = interrupt.agreed()
            flush()
            return progress.tokens_per_second
        finally:
            if tracing:  # interrupted in between
                jax.profiler.stop_trace()
            progress.close()

    def sample(self) -> str:
        """Text continued from the first validation bytes; only bytes can be shown as text."""
        config = self.config
        size = min(48, config.seq_len, self.corpus.val_size)
        prompt = self.corpus.read(self.corpus.train_size, self.corpus.train_size + size)
        params = self.placement.whole(self.state.params)
        tokens = generate(
            params, prompt[None], config.model, max_new=config.sample_tokens,
            key=jax.random.key(config.seed + 1), dtype=DTYPES[config.dtype],
            attention=SAMPLE_ATTENTION.get(config.attention, config.attention),
            temperature=config.temperature, top_k=config.top_k, top_p=config.top_p,
        )  # fmt: skip
        ids = [*prompt.tolist(), *tokens[0].tolist()]
        if config.model.vocab_size != 256:
            return " ".join(map(str, ids))
        return bytes(ids).decode(errors="replace")


def _profile_range(config: RunConfig) -> tuple[int, int] | None:
    """The steps to trace, counted from 0, the last one exclusive."""
    if config.profile is None:
        return None
    try:
        first, last = (int(part) for part in config.profile.split(":"))
        if not 0 <= first < last:
            raise ValueError
    except ValueError:
        raise UserError(f"--profile must be FIRST:LAST steps, got {config.profile}") from None
    if last > config.steps:
        raise UserError(f"--profile must end within the {config.steps} steps, got {config.profile}")
    return first, last


def _nats_bits(loss: float) -> str:
    return f"{loss:.4f} nats ({loss / math.log(2):.4f} bits)"


def run(config: RunConfig, output: Path, *, resume: bool, overwrite: bool) -> int:
    """Train, evaluate, sample; returns the exit code."""
    began = time.perf_counter()
    profile = _profile_range(config)
    say(f"device    {report.device_line()}")
    warning = report.unused_gpu_warning()
    if warning:
        print(warning, file=sys.stderr, flush=True)
    job = Run(config, output, resume=resume)
    say(f"attention {config.attention}: {job.attention}")
    corpus = job.corpus
    say(
        f"data      {', '.join(s.name for s in corpus.sources)}: {corpus.train_size:,} tokens for "
        f"training, {corpus.val_size:,} for validation"
    )
    say(
        f"model     {config.config}: {job.parameters:,} parameters, {config.model.layers} layers, "
        f"{config.dtype}; {config.tokens_per_step:,} tokens per step, {config.steps} steps"
    )
    if resume:
        say(f"resumed   at step {job.step}")
        if profile and profile[0] < job.step:
            say(f"profile   none: --profile {config.profile} begins before this step")
    job.check_step()
    # Nothing was written so far: every complaint about the input comes before this line.
    processes.barrier("checked")
    if processes.is_first():
        prepare_output(output, overwrite=overwrite)
    processes.barrier("prepared")
    paths = {
        "config": output / "config.json",
        "metrics": output / "metrics.jsonl",
        "loss curve": output / "loss.png",
        "sample": output / "sample.txt",
        "summary": output / "summary.json",
        "checkpoints": output / "checkpoints",
    }
    if processes.is_first():
        write_json(paths["config"], to_json(config))
    log = MetricsLog(paths["metrics"] if processes.is_first() else Path(os.devnull))
    try:
        with Interrupt() as interrupt:
            try:
                speed = job.train(log, interrupt)
            except FloatingPointError as e:
                raise UserError(
                    f"{e}; the last checkpoint is untouched. Try a smaller --learning-rate"
                ) from None
            except jax.errors.JaxRuntimeError as e:
                if "RESOURCE_EXHAUSTED" not in str(e):
                    raise
                raise UserError(
                    "the device is out of memory: try a smaller --batch-size with --accumulate, or "
                    "--remat attention"
                ) from None
            path = job.save()  # before the evaluation: whoever interrupts that loses nothing
            if interrupt.agreed():
                if processes.is_first():
                    plot_losses(paths["metrics"], paths["loss curve"], bigram=job.bigram)
                say(f"stopped at step {job.step}; saved {path}")
                say(f"go on with: --output {output} --resume")
                return 130
        summary = finish(job, log, speed)
    finally:
        log.close()
    text = job.sample() if config.sample_tokens else ""
    if not processes.is_first():
        return 0
    plot_losses(paths["metrics"], paths["loss curve"], bigram=job.bigram)
    if config.sample_tokens:
        paths["sample"].write_text(text + "\n")
        say("\nsample (rough: a small model after a short training)\n" + "-" * 60)
        say(text)
        say("-" * 60)
    summary["seconds"] = time.perf_counter() - began
    write_json(paths["summary"], summary)
    say("")
    for name, path in paths.items():
        if path.exists():
            say(f"{name:<12}{path}")
    if (output / "profile").exists():
        say(f"{'profile':<12}{output / 'profile'}")
    say(f"{'seconds':<12}{summary['seconds']:.0f}")
    return 0


def finish(job: Run, log: MetricsLog, speed: float | None) -> dict[str, Any]:
    """Final evaluation, which may make the last checkpoint the best one, and the report."""
    config = job.config
    # Which checkpoint is best is a matter of the windows that all of them were scored on.
    same_windows = job.evaluate(job.eval_batches)
    log.write("eval", job.step, val_loss=same_windows)
    job.save(same_windows)
    val_loss = job.evaluate(job.final_batches)
    log.write("final", job.step, val_loss=val_loss)
    summary: dict[str, Any] = {
        "step": job.step,
        "val_loss_nats": val_loss,
        "val_loss_bits": val_loss / math.log(2),
        "bigram_nats": job.bigram,
        "parameters": job.parameters,
        "attention": config.attention,
        "device": report.device_line(),
        "tokens_per_second": speed,
    }
    unit = "byte" if config.model.vocab_size == 256 else "token"
    say(f"\nvalidation loss  {_nats_bits(val_loss)} per {unit}")
    if job.bigram is not None:
        verdict = "below" if val_loss < job.bigram else "NOT below"
        say(f"bigram model     {_nats_bits(job.bigram)} on the same text: the run is {verdict} it")
    if speed:
        flops = speed * report.flops_per_token(config.model, job.parameters, config.seq_len)
        line = f"speed            {speed:,.0f} tokens/s, {flops / 1e12:.3g} TFLOP/s"
        summary["model_tflops"] = flops / 1e12
        peak = report.peak_flops(config)
        if peak:
            summary["mfu"] = flops / peak
            line += f", {100 * flops / peak:.1f} % of the peak (MFU)"
        say(line)
    where, memory = report.peak_memory_bytes()
    summary |= {f"peak_{where}_memory_bytes": memory}
    say(f"memory           {memory / 2**30:.2f} GiB at most ({where})")
    return summary


OWN_FILES = ("config.json", "metrics.jsonl", "loss.png", "sample.txt", "summary.json")


def prepare_output(output: Path, *, overwrite: bool) -> None:
    """Make the folder, or remove what an earlier run wrote into it, and nothing else."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):  # a folder that cannot be written to stays whole
            pass
    except OSError as e:
        raise UserError(f"--output {output}: cannot be written to: {e.strerror}") from None
    if overwrite:
        for name in OWN_FILES:
            (output / name).unlink(missing_ok=True)
        for name in ("checkpoints", "profile"):
            shutil.rmtree(output / name, ignore_errors=True)
