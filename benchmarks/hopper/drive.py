"""Standalone test and timing of the Hopper kernels (torch on the GPU, no JAX build needed).

python drive.py unit|forward|backward LIB          correctness, one line per case; exit code 1 on a
failure
python drive.py time LIB OUT.json [forward] [backward]   interleaved timing against torch and jax.nn
(cudnn)
python drive.py all FOLDER OUT                     every group in a process of its own, with a time
limit
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import time

import torch
from binding import Case, Library
from cases import correctness
from reference import attention

HERE = pathlib.Path(__file__).resolve().parent


def make_tensors(case: Case, backward: bool, seed: int = 0) -> dict:
    g = torch.Generator("cuda").manual_seed(seed)

    def normal(B, S, H, D):
        shape = (B, S, H, D) if case.layout == 0 else (B, H, S, D)
        return torch.randn(shape, generator=g, device="cuda", dtype=torch.float32).to(case.dtype)

    kv = 1 if case.kv_broadcast else case.B
    t = {
        "q": normal(case.B, case.Sq, case.Hq, case.D),
        "k": normal(kv, case.Sk, case.Hkv, case.D),
        "v": normal(kv, case.Sk, case.Hkv, case.Dv),
        **{name: x.cuda() for name, x in case.arrays.items()},
    }
    if backward:
        t["do"] = normal(case.B, case.Sq, case.Hq, case.Dv)
        if case.dlse:
            t["dlse"] = torch.randn((case.B, case.Hq, case.Sq), generator=g, device="cuda")
    return t


def poison_hidden(case: Case, t: dict) -> None:
    """NaN and inf in everything that no output may depend on."""
    from reference import visibility

    seen, _ = visibility(case, t, "cuda")
    dead_key, dead_row = ~seen.any(1), ~seen.any(2)
    for name, dead in (("k", dead_key), ("v", dead_key), ("q", dead_row), ("do", dead_row)):
        if name in t and not (case.kv_broadcast and name in "kv"):
            shape = (
                (*dead.shape, 1, 1) if case.layout == 0 else (dead.shape[0], 1, dead.shape[1], 1)
            )
            t[name].masked_fill_(dead.view(shape), float("nan"))
    if t.get("dlse") is not None and t.get("sinks") is None:
        t["dlse"].masked_fill_(dead_row[:, None], float("inf"))


def guarded(shape, dtype):
    """NaN-filled output with a guard behind it: (view, guard)."""
    n = 1
    for x in shape:
        n *= x
    flat = torch.full((n + 4096,), float("nan"), device="cuda", dtype=dtype)
    flat[n:] = 7.0
    return flat[:n].view(shape), flat[n:]


def outputs_forward(case: Case):
    wide = (
        (case.B, case.Sq, case.Hq, case.Dv)
        if case.layout == 0
        else (case.B, case.Hq, case.Sq, case.Dv)
    )
    return [
        guarded(wide, case.dtype),
        guarded((case.B, case.Hq, case.Sq), torch.float32),
        guarded((case.B, case.Hq, case.Sq), torch.float32),
    ]


def outputs_backward(case: Case):
    kv = 1 if case.kv_broadcast else case.B

    def wide(B, S, H, D):
        return guarded((B, S, H, D) if case.layout == 0 else (B, H, S, D), case.dtype)

    return [
        wide(case.B, case.Sq, case.Hq, case.D),
        wide(kv, case.Sk, case.Hkv, case.D),
        wide(kv, case.Sk, case.Hkv, case.Dv),
    ]


def relative(x, ref) -> float:
    if not torch.isfinite(x).all():
        return float("nan")
    norm = ref.norm()
    return float((x.double() - ref).norm() / norm) if norm > 0 else float(x.double().norm())


def heads_first(case, x):
    return x.transpose(1, 2) if case.layout == 0 else x


def run_forward(lib: Library, case: Case, t: dict):
    outs = outputs_forward(case)
    lib.prepare(case, t, [x for x, _ in outs], False)()
    torch.cuda.synchronize()
    for name, (_, guard) in zip(["o", "m", "c"], outs, strict=True):
        assert (guard == 7.0).all(), f"wrote past the end of {name}"
    return [x for x, _ in outs]


def check_forward(lib: Library, case: Case) -> dict:
    t = make_tensors(case, False)
    if case.nan_tail:
        poison_hidden(case, t)
    o, m, c = run_forward(lib, case, t)
    ref = attention(case, t, False)
    live = ref["row_live"].expand_as(ref["L"])
    error = relative(heads_first(case, o), ref["o"])
    L = m.double() + c.double()
    has_sink = t.get("sinks") is not None
    good = live | has_sink
    bound = 3e-5 * (1 + ref["L"].abs())
    error_l = float(((L - ref["L"]).abs() / bound)[good].max()) if good.any() else 0.0
    error_m = float(((m.double() - ref["m"]).abs() / bound)[good].max()) if good.any() else 0.0
    empty_ok = bool((c[~good] == 1e30).all() and (m[~good] == 0).all())
    empty_ok = empty_ok and bool((heads_first(case, o)[~live] == 0).all())
    limit = (6e-4 if case.half else 4.5e-3) * (2 if case.softcap else 1)
    ok = error < limit and error_l < 1 and error_m < 1 and empty_ok
    return {"ok": ok, "o": error, "L": error_l, "m": error_m, "empty": empty_ok}


def check_backward(lib: Library, case: Case) -> dict:
    t = make_tensors(case, True)
    if case.nan_tail:
        poison_hidden(case, t)
    o, m, c = run_forward(lib, case, t)
    t |= {"o": o, "row_max": m, "row_log_sum": c}
    outs = outputs_backward(case)
    sinks = t.get("sinks")
    extra = [None, None, torch.full_like(sinks, float("nan"))] if sinks is not None else [None] * 3
    call = lib.prepare(case, t, [x for x, _ in outs] + extra, True)
    call()
    torch.cuda.synchronize()
    if case.deterministic:
        first = [x.clone() for x, _ in outs]
        for _ in range(5):
            call()
            torch.cuda.synchronize()
            assert all(torch.equal(x, y) for x, (y, _) in zip(first, outs, strict=True)), (
                "reruns differ"
            )
    ref = attention(case, t, True)
    report, ok = {}, True
    limit = (1e-3 if case.half else 6e-3) * (2 if case.softcap else 1)
    for name, (x, guard) in zip(["dq", "dk", "dv"], outs, strict=True):
        assert (guard == 7.0).all(), f"wrote past the end of {name}"
        report[name] = relative(heads_first(case, x), ref[name])
        ok = ok and report[name] < limit
    if sinks is not None:
        report["dsinks"] = relative(extra[2], ref["dsinks"])
        ok = ok and report["dsinks"] < limit
    return {"ok": ok, **report}


def run_cases(kind: str, lib: Library, dims) -> list[dict]:
    rows = []
    for D in dims:
        for case in correctness(D):
            try:
                row = check_forward(lib, case) if kind == "forward" else check_backward(lib, case)
            except NotImplementedError as e:
                row = {"ok": True, "refused": str(e)}
            except AssertionError as e:
                row = {"ok": False, "error": str(e)}
            rows.append({"case": case.label(), **row})
            mark = "ok  " if row["ok"] else "FAIL"
            print(
                mark,
                case.label(),
                {k: v if not isinstance(v, float) else f"{v:.2e}" for k, v in row.items()},
                flush=True,
            )
    return rows


def run_unit(lib: Library) -> list[dict]:
    import ctypes

    rows = []
    p = lambda x: ctypes.c_void_p(x.data_ptr())  # noqa: E731
    for half in (0, 1):
        dtype = torch.float16 if half else torch.bfloat16
        for form_a, name in enumerate(["k-major", "mn-major", "registers"]):
            for b_mn in (0, 1):
                a = torch.randn(64, 128, device="cuda").to(dtype)
                b = torch.randn(128, 128, device="cuda").to(dtype)  # [k, n]
                a_rows = 64 if form_a == 1 else 50
                stored_a = a.t().contiguous() if form_a == 1 else a[:a_rows].contiguous()
                stored_b = b if b_mn else b.t().contiguous()
                want = a.double() @ b.double()
                if form_a != 1:
                    want[a_rows:] = 0
                c = torch.full((64, 128), float("nan"), device="cuda")
                c16 = torch.full((64, 128), 7.0, device="cuda", dtype=dtype)
                total = torch.ones(64 * 128, device="cuda")
                e = lib.lib.jft_unit_product(
                    half,
                    form_a,
                    b_mn,
                    p(stored_a),
                    p(stored_b),
                    p(c16),
                    p(c),
                    p(total),
                    ctypes.c_int64(128 if form_a == 1 else a_rows),
                    ctypes.c_int64(40),
                    None,
                )
                torch.cuda.synchronize()
                fragments = (total.view(16, 128, 4) - 1) / 2
                thread = torch.arange(128, device="cuda").view(1, 128, 1)
                i, k4 = (
                    torch.arange(16, device="cuda").view(16, 1, 1),
                    torch.arange(4, device="cuda").view(1, 1, 4),
                )
                row = 16 * (thread // 32) + (thread % 32) // 4 + 8 * (k4 // 2)
                col = 8 * i + 2 * (thread % 4) + k4 % 2
                errors = {
                    "error": e,
                    "product": relative(c, want),
                    "store": relative(c16[:40], want[:40]),
                    "clip": bool((c16[40:] == 7).all()),
                    "reduce": relative(
                        fragments, want[row.expand(16, 128, 4), col.expand(16, 128, 4)]
                    ),
                }
                ok = (
                    e == 0
                    and errors["product"] < 1e-6
                    and errors["store"] < 4e-3
                    and errors["clip"]
                )
                ok = ok and errors["reduce"] < 1e-5
                rows.append(
                    {
                        "case": f"wgmma {dtype} A {name} B {'mn' if b_mn else 'k'}-major",
                        "ok": ok,
                        **errors,
                    }
                )
                print(rows[-1], flush=True)
    for tiles in (1, 2, 3, 7, 8):
        x = torch.randn(tiles * 64 - 5, 64, device="cuda").to(torch.bfloat16)
        out = torch.full((64, 64), float("nan"), device="cuda")
        e = lib.lib.jft_unit_ring(p(x), tiles, ctypes.c_int64(x.shape[0]), p(out), None)
        torch.cuda.synchronize()
        padded = torch.zeros(tiles * 64, 64, device="cuda", dtype=torch.double)
        padded[: x.shape[0]] = x.double()
        error = relative(out, padded.view(tiles, 64, 64).sum(0))
        rows.append(
            {
                "case": f"ring of 2 stages, {tiles} tiles",
                "ok": e == 0 and error < 1e-5,
                "error": error,
            }
        )
        print(rows[-1], flush=True)
    return rows


PLAN = {  # group -> (arguments, library, limit in seconds)
    "unit": (["unit"], "test", 60),
    "forward-test": (["forward"], "test", 60),
    "backward-test": (["backward"], "test", 60),
    "forward": (["forward"], "fast", 60),
    "backward": (["backward"], "fast", 60),
    "time-forward": (["time", "forward"], "fast", 150),
    "time-backward": (["time", "backward"], "fast", 150),
}


def run_all(folder: str, out: str, only: str = " ".join(PLAN)) -> None:
    """Each group in its own process: a trap or a hang in one does not take the others with it."""
    failed = set()
    for group in only.split():
        argv, kind, limit = PLAN[group]
        if group.startswith("time-") and group.removeprefix("time-") in failed:
            print(f"== {group}: skipped, its correctness group did not finish")
            continue
        lib = f"{folder}/libhopper{'_test' if kind == 'test' else ''}.so"
        command = [sys.executable, __file__, argv[0], lib, f"{out}/{group}.json", *argv[1:]]
        start = time.time()
        try:
            done = subprocess.run(
                command,
                timeout=limit,
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            code, text = done.returncode, done.stdout
        except subprocess.TimeoutExpired as e:
            code, text = "timeout", (e.stdout or b"").decode()
        if code not in (0, 1):
            failed.add(group)
        pathlib.Path(f"{out}/{group}.log").write_text(text)
        lines = text.splitlines()
        bad = [x[:250] for x in lines if "FAIL" in x or "'ok': False" in x]
        show = lines[-40:] if argv[0] == "time" else bad[:20] + lines[-3:]
        print(f"== {group}: exit {code}, {time.time() - start:.1f} s", *show, sep="\n", flush=True)


def main(argv: list[str]) -> int:
    if argv[0] == "all":
        run_all(*argv[1:])
        return 0
    lib = Library(argv[1])
    torch.cuda.init()
    if argv[0] == "time":
        from timing import run_timing

        rows = run_timing(lib, argv[3:] or ["forward", "backward"])
    elif argv[0] == "unit":
        rows = run_unit(lib)
    else:
        rows = run_cases(argv[0], lib, (64, 96, 128, 256) if argv[0] == "forward" else (128, 64))
    if len(argv) > 2:
        pathlib.Path(argv[2]).write_text(json.dumps(rows, indent=1))
    bad = [r for r in rows if not r.get("ok", True)]
    print(f"{len(rows)} rows, {len(bad)} failed")
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
