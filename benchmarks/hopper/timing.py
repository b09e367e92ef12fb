"""Interleaved timing: ours, torch flash and cudnn SDPA, jax.nn cudnn, and a roof product in the
same rounds."""

from __future__ import annotations

import os
import statistics
import subprocess
import time

import torch
from binding import Case, Library
from cases import timing

ROUNDS = int(os.environ.get("JFT_ROUNDS", "8"))
WITH_PEERS = os.environ.get("JFT_PEERS", "1") == "1"
WITH_JAX = os.environ.get("JFT_JAX", "1") == "1"
BUDGET_S = float(os.environ.get("JFT_TIME_BUDGET", "150"))


def flops(case: Case, backward: bool) -> float:
    """4 B H S S D; half when causal; windows by their visible pairs; lengths by their squares."""
    pairs = case.Sq * case.Sk * (0.5 if case.causal else 1.0)
    total = case.B * pairs
    if case.left >= 0:
        total = case.B * sum(min(i, case.left) + 1 for i in range(case.Sq))
    if "kv_lengths" in case.arrays:
        total = sum(int(x) ** 2 for x in case.arrays["kv_lengths"]) * (0.5 if case.causal else 1.0)
    return 2.0 * total * case.Hq * (case.D + case.Dv) * (2.5 if backward else 1.0)


def event_ms(call, repeats: int) -> float:
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(repeats):
        call()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) / repeats


def torch_calls(case: Case, t: dict, backward: bool) -> dict:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.arrays or case.left >= 0 or case.softcap or case.Sq != case.Sk:
        return {}
    if case.deterministic or not WITH_PEERS:
        return {}
    calls = {}
    for name, backend in (
        ("torch flash", SDPBackend.FLASH_ATTENTION),
        ("torch cudnn", SDPBackend.CUDNN_ATTENTION),
    ):
        q, k, v = (t[n].transpose(1, 2).detach().requires_grad_(backward) for n in "qkv")

        def forward(q=q, k=k, v=v, backend=backend):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=case.causal, enable_gqa=case.Hq != case.Hkv
                )

        try:
            o = forward()
            if backward:
                do = t["do"].transpose(1, 2)
                calls[name] = lambda o=o, q=q, k=k, v=v, do=do: torch.autograd.grad(
                    o, (q, k, v), do, retain_graph=True
                )
            else:
                calls[name] = forward
            calls[name]()
        except RuntimeError as e:
            print(name, "refused:", str(e).splitlines()[0][:100])
            calls.pop(name, None)
    return calls


def jax_calls(case: Case, t: dict, backward: bool) -> dict:
    """jax.nn cudnn; milliseconds of one call from the host clock over several calls (device
    bound)."""
    if (
        case.arrays
        or case.left >= 0
        or case.softcap
        or case.Sq != case.Sk
        or case.D > 128
        or not WITH_JAX
        or case.deterministic
    ):
        return {}
    import jax

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=case.causal, implementation="cudnn")

    q, k, v = (jax.dlpack.from_dlpack(t[n].contiguous()) for n in "qkv")
    if backward:
        do = jax.dlpack.from_dlpack(t["do"])
        vjp = jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v)[1])(q, k, v)
        fn, args = jax.jit(lambda f, g: f(g)), (vjp, do)
    else:
        fn, args = jax.jit(attend), (q, k, v)
    jax.block_until_ready(fn(*args))

    def measure(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            out = fn(*args)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / repeats * 1e3

    return {"jax cudnn": measure}


def clock_mhz() -> str:
    query = ["nvidia-smi", "--query-gpu=clocks.sm,driver_version,name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def time_case(lib: Library, case: Case, backward: bool, roof) -> dict:
    from drive import make_tensors, outputs_backward, outputs_forward

    t = make_tensors(case, True, seed=1)
    outs = [x for x, _ in outputs_forward(case)]
    forward = lib.prepare(case, t, outs, False)
    forward()
    ours = forward
    if backward:
        dsinks = torch.empty(case.Hq, device="cuda") if "sinks" in t else None
        t |= {"o": outs[0], "row_max": outs[1], "row_log_sum": outs[2]}
        ours = lib.prepare(
            case, t, [x for x, _ in outputs_backward(case)] + [None, None, dsinks], True
        )
    calls = {"ours": ours, **torch_calls(case, t, backward)}
    host = {}
    try:
        host = jax_calls(case, t, backward)
    except Exception as e:
        print("jax cudnn refused:", str(e).splitlines()[0][:150])
    work = flops(case, backward)
    repeats = max(2, min(20, int(2e-3 / (work / 5e14))))
    samples = {name: [] for name in [*calls, *host, "roof"]}
    for call in calls.values():
        event_ms(call, 2)
    for _ in range(ROUNDS):
        for name, call in calls.items():
            samples[name].append(event_ms(call, repeats))
        for name, measure in host.items():
            samples[name].append(measure(repeats))
        samples["roof"].append(event_ms(roof, 1))
    row = {"case": case.label(), "pass": "backward" if backward else "forward", "repeats": repeats}
    for name, x in samples.items():
        x = sorted(x)
        median = statistics.median(x)
        row[name] = {
            "ms": median, "q1": x[len(x) // 4], "q3": x[3 * len(x) // 4],
            "tflops": (2 * 8192**3 if name == "roof" else work) / median / 1e9,
        }  # fmt: skip
    text = "  ".join(f"{n} {row[n]['ms']:.3f} ms {row[n]['tflops']:.0f}" for n in samples)
    print(f"{row['pass']:8s} {row['case']}: {text}", flush=True)
    return row


def run_timing(lib: Library, passes: list[str]) -> list[dict]:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    roof = lambda: a @ b  # noqa: E731
    end = time.time() + 1.0
    while time.time() < end:  # warm GPU
        event_ms(roof, 20)
    rows = [{"device": clock_mhz(), "torch": torch.__version__, "rounds": ROUNDS}]
    start = time.time()
    for kind in os.environ.get("JFT_KINDS", "plain options deterministic").split():
        for case in timing(kind):
            for backward in [
                p == "backward" for p in passes if p == "backward" or not case.deterministic
            ]:
                if time.time() - start > BUDGET_S:
                    print("time budget spent")
                    return rows
                try:
                    rows.append(time_case(lib, case, backward, roof))
                except NotImplementedError as e:
                    print("refused", case.label(), "backward" if backward else "forward", e)
                torch.cuda.empty_cache()
    rows.append({"device after": clock_mhz()})
    return rows
