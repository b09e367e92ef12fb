"""GPU rows: device time of forward and backward apart, all contenders interleaved, medians.

The forward is timed as a jitted ``jax.vjp`` (it must save its residual), the backward as a second
jit that applies the saved function. Calls under 0.3 ms are timed as 16 dependent calls in one jit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jax_flashtrain
from jax_flashtrain import flash_attention

from . import peers
from .machine import clocks, driver, versions
from .shapes import GpuShape

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    torch = None

CHAIN = 16  # dependent calls in one jit for short rows
SAMPLE_SECONDS = 0.012  # device work per sample
CHECK_LIMIT = {"bfloat16": 1.2e-2, "float16": 3e-3, "float32": 3e-3}


def _arrays(shape: GpuShape) -> dict[str, jax.Array | None]:
    keys = jax.random.split(jax.random.key(0), 6)
    dtype = jnp.dtype(shape.dtype)

    def normal(key, *size):
        return jax.random.normal(key, size, jnp.float32).astype(dtype)

    B, S, D = shape.B, shape.S, shape.D
    out: dict[str, jax.Array | None] = {
        "q": normal(keys[0], B, S, shape.Hq, D),
        "k": normal(keys[1], B, S, shape.Hkv, D),
        "v": normal(keys[2], B, S, shape.Hkv, D),
        "do": normal(keys[3], B, S, shape.Hq, D),
        "bias": None,
        "mask": None,
    }
    if shape.kind in ("bias", "dbias"):
        out["bias"] = normal(keys[4], 1, shape.Hq, S, S)
    if shape.kind == "mask":
        out["mask"] = jax.random.bernoulli(keys[5], 0.9, (B, 1, S, S))
    return out


def _options(shape: GpuShape) -> dict:
    """The keywords of a row beside bias and mask."""
    options: dict = {"causal": shape.causal, "implementation": "native"}
    if shape.kind == "window":
        options["window"] = (peers.WINDOW, 0)
    elif shape.kind == "lengths":
        lengths = jnp.asarray(shape.lengths(), jnp.int32)
        options |= {"q_lengths": lengths, "kv_lengths": lengths}
    elif shape.kind == "segments":
        ids = jnp.arange(shape.S, dtype=jnp.int32) // (shape.S // 4)
        options["segment_ids"] = jnp.broadcast_to(ids, (shape.B, shape.S))
    elif shape.kind == "softcap":
        options["softcap"] = 50.0
    elif shape.kind == "alibi":
        options["alibi_slopes"] = 2.0 ** -jnp.linspace(1.0, 8.0, shape.Hq)
    elif shape.kind == "sinks":
        options["sinks"] = jnp.zeros(shape.Hq)
    return options


def _ours(shape: GpuShape) -> Callable:
    options = _options(shape)
    return lambda q, k, v, bias, mask: flash_attention(q, k, v, bias=bias, mask=mask, **options)


class _Jax:
    """One JAX contender of one row: compiled forward and backward, and how to time them."""

    def __init__(self, attend: Callable, arrays: dict, shape: GpuShape):
        wrt_bias = shape.kind == "dbias"
        self.args = [arrays[n] for n in ("q", "k", "v", "bias", "mask")]
        self.do = arrays["do"]

        def forward(q, k, v, bias, mask):
            if wrt_bias:
                return jax.vjp(lambda q, k, v, bias: attend(q, k, v, bias, mask), q, k, v, bias)
            return jax.vjp(lambda q, k, v: attend(q, k, v, bias, mask), q, k, v)

        def chained(q, k, v, bias, mask):
            for _ in range(CHAIN):
                q = attend(q, k, v, bias, mask)
            return q

        def chained_back(pullback, do):
            for _ in range(CHAIN):
                do = pullback(do)[0]
            return do

        self.forward = jax.jit(forward)
        self.backward = jax.jit(lambda pullback, do: pullback(do))
        self.chained, self.chained_back = jax.jit(chained), jax.jit(chained_back)
        self.out, self.pullback = jax.block_until_ready(self.forward(*self.args))
        self.grads = jax.block_until_ready(self.backward(self.pullback, self.do))

    def timer(self, *, backward: bool) -> Callable[[], float]:
        if backward:
            calls = (
                lambda: self.backward(self.pullback, self.do),
                lambda: self.chained_back(self.pullback, self.do),
            )
        else:
            calls = (lambda: self.forward(*self.args)[0], lambda: self.chained(*self.args))
        seconds = _async_time(calls[0], 5)
        call, per_call = calls[0], 1
        if seconds < 3e-4:
            call, per_call = calls[1], CHAIN
            seconds = _async_time(call, 3)
        repeats = max(1, round(SAMPLE_SECONDS / seconds))
        return lambda: _async_time(call, repeats) / per_call


def _async_time(call: Callable, repeats: int) -> float:
    jax.block_until_ready(call())
    start = time.perf_counter()
    for _ in range(repeats):
        last = call()
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / repeats


class _Torch:
    """torch SDPA (flash): forward and backward timed alone with CUDA events."""

    def __init__(self, arrays: dict, shape: GpuShape):
        to = lambda x: torch.from_dlpack(x).transpose(1, 2).contiguous()  # noqa: E731
        self.q, self.k, self.v, self.do = (to(arrays[n]) for n in ("q", "k", "v", "do"))
        for x in (self.q, self.k, self.v):
            x.requires_grad_()
        self.shape = shape
        self.out = self._forward()

    def _forward(self):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                self.q, self.k, self.v, is_causal=self.shape.causal,
                enable_gqa=self.shape.Hq != self.shape.Hkv,
            )  # fmt: skip

    def _backward(self):
        return torch.autograd.grad(self.out, (self.q, self.k, self.v), self.do, retain_graph=True)

    def timer(self, *, backward: bool) -> Callable[[], float]:
        call = self._backward if backward else self._forward
        seconds = self._time(call, 3)
        repeats = max(1, round(SAMPLE_SECONDS / max(seconds, 1e-5)))
        return lambda: self._time(call, repeats)

    def _time(self, call, repeats):
        call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats


def _roof_timer() -> Callable[[], float]:
    x = jax.random.normal(jax.random.key(9), (8192, 8192), jnp.bfloat16)
    product = jax.jit(lambda x: x @ x)
    return lambda: _async_time(lambda: product(x), 4)


def _reference(shape: GpuShape, arrays: dict) -> list[np.ndarray] | None:
    """float64 o, dq, dk, dv of one batch element and the first kv group (None without torch)."""
    if torch is None:
        return None
    group = shape.Hq // shape.Hkv
    b = 0 if shape.kind == "lengths" else shape.B - 1
    get = lambda n: torch.from_dlpack(arrays[n])[b].double()  # noqa: E731
    q, k, v, do = get("q")[:, :group], get("k")[:, 0], get("v")[:, 0], get("do")[:, :group]
    S = shape.S
    i = torch.arange(S, device=q.device)
    keep = torch.ones(S, S, dtype=torch.bool, device=q.device)
    if shape.causal:
        keep &= i[None] <= i[:, None]
    if shape.kind == "window":
        keep &= i[None] >= i[:, None] - peers.WINDOW
    if shape.kind == "segments":
        keep &= (i[None] // (S // 4)) == (i[:, None] // (S // 4))
    if arrays["mask"] is not None:
        keep &= torch.from_dlpack(arrays["mask"].astype(jnp.uint8))[b, 0].bool()
    out, dq, dk, dv = [], [], torch.zeros_like(k), torch.zeros_like(v)
    for h in range(group):
        s = q[:, h] @ k.T / shape.D**0.5
        inner = None
        if shape.kind == "softcap":
            inner = torch.tanh(s / 50.0)
            s = 50.0 * inner
        if arrays["bias"] is not None:
            s += torch.from_dlpack(arrays["bias"])[0, h].double()
        if shape.kind == "alibi":
            slope = 2.0 ** -np.linspace(1.0, 8.0, shape.Hq)[h]
            s -= slope * (i[:, None] - i[None]).abs()
        s.masked_fill_(~keep, float("-inf"))
        lse = torch.logsumexp(s, -1, keepdim=True)
        if shape.kind == "sinks":
            lse = torch.logaddexp(lse, torch.zeros_like(lse))
        p = s.sub_(lse).exp_()
        o = p @ v
        ds = p * (do[:, h] @ v.T - (o * do[:, h]).sum(-1, keepdim=True))
        dv += p.T @ do[:, h]
        if inner is not None:
            ds *= 1 - inner * inner
        ds /= shape.D**0.5
        out.append(o)
        dq.append(ds @ k)
        dk += ds.T @ q[:, h]
    out, dq = (torch.stack(x, 1).cpu().numpy() for x in (out, dq))
    return [out, dq, dk.cpu().numpy(), dv.cpu().numpy()]


def _errors(shape: GpuShape, reference, contender) -> list[float]:
    """Relative L2 errors of o, dq, dk, dv; NaN never passes."""
    group = shape.Hq // shape.Hkv
    b = 0 if shape.kind == "lengths" else shape.B - 1
    dq, dk, dv = contender.grads[:3]
    got = [contender.out[b, :, :group], dq[b, :, :group], dk[b, :, 0], dv[b, :, 0]]
    return [
        float(np.linalg.norm(np.asarray(a, np.float64) - r) / np.linalg.norm(r))
        for a, r in zip(got, reference, strict=True)
    ]


def run(selection, *, rounds: int, progress: Callable[[str], None]) -> Iterator[dict]:
    """The document after every row; a contender that fails or is wrong is named with the reason,
    not timed."""
    rows: list[dict] = []
    document = {
        "backend": "cuda",
        "device": jax.devices()[0].device_kind,
        "driver": driver(),
        "versions": versions("jax", "torch") | {"jax_flashtrain": jax_flashtrain.__version__},
        "rounds": rounds,
        "rows": rows,
    }
    roof_timer = _roof_timer()
    for shape in selection:
        arrays = _arrays(shape)
        reference = _reference(shape, arrays)
        contenders: dict = {}
        row: dict = {"shape": shape.name, "refused": {}, "errors": {}}
        for name, attend in {"native": _ours(shape), **peers.available(shape)}.items():
            try:
                contender = _Jax(attend, arrays, shape)
            except Exception as error:  # a peer may refuse in any way; the row records it
                row["refused"][name] = f"{type(error).__name__}: {error}"[:300]
                continue
            if reference is not None:
                errors = _errors(shape, reference, contender)
                row["errors"][name] = errors
                if not max(errors) < CHECK_LIMIT[shape.dtype]:
                    row["refused"][name] = f"wrong: relative errors {errors}"
                    continue
            contenders[name] = contender
        if torch is not None and shape.kind == "plain" and shape.dtype != "float32":
            contenders["torch flash"] = _Torch(arrays, shape)
        row["kernel"] = _kernel(shape, arrays)
        for backward in (False, True):
            label = "bwd" if backward else "fwd"
            timers = {n: c.timer(backward=backward) for n, c in contenders.items()}
            timers["roof"] = roof_timer
            times: dict[str, list[float]] = {n: [] for n in timers}
            for _ in range(rounds):
                for name, timer in timers.items():
                    times[name].append(timer())
            row[label] = {
                n: _summary(
                    t,
                    times.get("native"),
                    2.0 * 8192**3 if n == "roof" else shape.flops(backward=backward),
                )
                for n, t in times.items()
            }
        row["clock"] = clocks()
        progress(_line(row))
        rows.append(row)
        yield document
        jax.clear_caches()


def _kernel(shape: GpuShape, arrays: dict) -> str:
    arrays = {n: arrays[n] for n in ("q", "k", "v", "bias", "mask")}
    return jax_flashtrain.explain(**arrays, **_options(shape)).kernel


def _summary(times: list[float], native: list[float] | None, flops: float) -> dict:
    quartiles = (
        statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    )
    out = {"ms": [1e3 * t for t in quartiles], "tflops": flops / quartiles[1] / 1e12}
    if native:
        ratios = [t / n for t, n in zip(times, native, strict=True)]
        out["native_speedup"] = (
            statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        )
    return out


def _line(row: dict) -> str:
    parts = [row["shape"]]
    for label in ("fwd", "bwd"):
        rates = " ".join(f"{n}={r['tflops']:.0f}" for n, r in row[label].items())
        parts.append(f"{label}: {rates}")
    if row["refused"]:
        parts.append("refused: " + ", ".join(row["refused"]))
    return " | ".join(parts)


def table(document: dict) -> str:
    """TFLOP/s, forward / backward, one column per contender."""
    names: list[str] = []
    for row in document["rows"]:
        names += [n for n in row["fwd"] if n not in names]
    lines = ["| shape | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for row in document["rows"]:
        cells = [
            f"{row['fwd'][n]['tflops']:.0f} / {row['bwd'][n]['tflops']:.0f}"
            if n in row["fwd"]
            else "-"
            for n in names
        ]
        lines.append(f"| {row['shape']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
