"""The emulator catches a fault of every kind, computes what MSL defines, accepts no more."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess

import ml_dtypes
import numpy as np
import pytest
from metal.emulated import ROOT, module, run

THREADS = "uint tid [[thread_index_in_threadgroup]]"
ZEROS = np.zeros(64, np.float32)


def shared(body: str) -> str:
    """A kernel of 64 threads with 64 floats of threadgroup memory."""
    return (
        "kernel void f(device float* o [[buffer(0)]], threadgroup float* sh [[threadgroup(0)]], "
        f"{THREADS}, uint lane [[thread_index_in_simdgroup]], "
        f"uint simd [[simdgroup_index_in_threadgroup]]) {{ {body} }}"
    )


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMD_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"


@pytest.mark.parametrize("seed", range(4))
def test_barrier_makes_the_exchange_right(seed):
    fault, (o,), _ = run(
        shared(f"sh[tid] = float(tid); {BARRIER} o[tid] = sh[63 - tid];"),
        [ZEROS],
        threadgroup=256,
        seed=seed,
    )
    assert fault == ""
    np.testing.assert_array_equal(o, np.arange(63, -1, -1))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sh[tid] = 1.0f; o[tid] = sh[63 - tid];", "threadgroup memory"),
        (f"sh[tid] = 1.0f; {SIMD_BARRIER} o[tid] = sh[63 - tid];", "threadgroup memory"),
        ("sh[lane] = float(tid);", "write after write"),
        ("sh[tid & ~1u] = 1.0f;", "write after write"),
        (f"sh[tid] = 1.0f; {BARRIER} o[tid] = sh[63 - tid]; sh[tid] = 2.0f;", "after"),
        (f"sh[tid] = 1.0f; {BARRIER} o[tid] = sh[tid ^ 1u]; sh[tid] = 2.0f;", "after"),
    ],
    ids=["no barrier", "simdgroup barrier only", "two simdgroups write", "two lanes write",
         "overwritten too early", "overwritten too early in a simdgroup"],
)  # fmt: skip
def test_races_on_threadgroup_memory_are_found(body, message):
    fault, _, _ = run(shared(body), [ZEROS], threadgroup=256)
    assert message in fault


def test_simdgroup_barrier_orders_the_lanes_of_a_simdgroup():
    body = (
        f"sh[tid] = float(tid); {SIMD_BARRIER} o[tid] = sh[tid ^ 1u]; {SIMD_BARRIER} sh[tid] = 2;"
    )
    fault, (o,), _ = run(shared(body), [ZEROS], threadgroup=256)
    assert fault == ""
    np.testing.assert_array_equal(o, np.arange(64) ^ 1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("o[64 + tid] = 1.0f;", "device write outside"),
        ("o[int(tid) - 1] = 1.0f;", "device write outside"),
        ("sh[tid] = o[tid + 1];", "device read outside"),
        ("sh[tid + 1] = 1.0f;", "threadgroup write outside"),
        (f"sh[tid] = 1.0f; {BARRIER} o[tid] = sh[int(tid) - 1];", "threadgroup read outside"),
        ("o[tid] = sh[tid];", "nobody wrote"),
        (f"if (tid < 32) {{ {BARRIER} }}", "divergence"),
        (f"if (lane < 16) {{ {BARRIER} }}", "divergence"),
        (f"if (tid == 3) return; {BARRIER}", "divergence"),
        ("if (lane != 3) o[tid] = simd_sum(1.0f);", "divergence"),
        ("if (lane < 8) o[tid] = simd_sum(1.0f);\n else o[tid] = simd_sum(2.0f);", "divergence"),
    ],
)
def test_faults_are_found(body, message):
    fault, _, _ = run(shared(body), [ZEROS], threadgroup=256)
    assert message in fault


def test_a_fault_does_not_spoil_the_next_run():
    assert "outside" in run(shared("o[64 + tid] = 1.0f;"), [ZEROS], threadgroup=256)[0]
    assert run(shared("o[tid] = 1.0f;"), [ZEROS], threadgroup=256)[0] == ""


@pytest.mark.parametrize(("bytes_", "fits"), [(32768, True), (32784, False), (100, False)])
def test_threadgroup_memory_limit(bytes_, fits):
    fault, _, _ = run(shared("o[tid] = 1.0f;"), [ZEROS], threadgroup=bytes_)
    assert (fault == "") == fits, fault


def test_unbound_arguments_are_found():
    source = (
        "constant bool kOn [[function_constant(5)]];\n"
        "kernel void f(device float* o [[buffer(0)]], "
        f"device float* p [[buffer(1), function_constant(kOn)]], {THREADS}) "
        "{ o[tid] = kOn ? p[tid] : 3.0f; }"
    )
    off, on = {5: b"\0"}, {5: b"\1"}
    fault, (o,), _ = run(source, [ZEROS], constants=off)
    assert fault == ""
    assert (o == 3).all()
    assert "buffer 1 (p)" in run(source, [ZEROS], constants=on)[0]
    assert "function constant kOn" in run(source, [ZEROS])[0]
    fault, (o, _), _ = run(source, [ZEROS, ZEROS + 7], constants=on)
    assert fault == ""
    assert (o == 7).all()


LANGUAGE = {
    "double": ("double x = 1; o[tid] = float(x);", "poisoned"),
    "unsuffixed literal": ("float x = o[tid]; o[tid] = float(x * 1.5);", "double"),
    "lambda": ("auto g = [](float x) { return x; }; o[tid] = g(1.0f);", "lambda"),
    "exception": ("if (tid > 99) throw 1;", "poisoned"),
    "static local": ("static int n; n = 1; o[tid] = float(n);", "poisoned"),
    "goto": ("goto end; end: o[tid] = 1.0f;", "poisoned"),
    "new": ("thread float* x = new float; o[tid] = *x;", "poisoned"),
    "C++17": ("if constexpr (sizeof(int) == 4) o[tid] = 1.0f;", "C\\+\\+17 extension"),
    "device pointer as thread pointer": (
        "thread float* x = o; x[tid] = 1.0f;",
        "cannot initialize",
    ),
    "device pointer as threadgroup pointer": (
        "threadgroup float* x = o; x[tid] = 1.0f;",
        "cannot initialize",
    ),
    "device pointer as constant pointer": ("constant float* x = o; (void)x;", "cannot initialize"),
    "pointer without an address space": (
        "float y = o[tid]; float* x = &y; o[tid] = *x;",
        "address space",
    ),
    "matrices of another size": ("simdgroup_matrix<float, 4, 8> m; (void)m;", "is 8x8"),
    "float matrix by a half matrix": (
        "simdgroup_float8x8 a; simdgroup_matrix<half, 8, 8> b; "
        "simdgroup_multiply_accumulate(a, b, a, a);",
        "no matching function",
    ),
}


@pytest.mark.parametrize("kind", LANGUAGE)
def test_what_msl_lacks_does_not_compile(kind):
    body, message = LANGUAGE[kind]
    with pytest.raises(ValueError, match=message):
        run(f"kernel void f(device float* o [[buffer(0)]], {THREADS}) {{ {body} }}", [ZEROS])


def test_recursion_does_not_compile():
    source = (
        "inline int g(int n) { return n <= 0 ? 0 : 1 + g(n - 1); }\n"
        f"kernel void f(device float* o [[buffer(0)]], {THREADS}) "
        "{ o[tid] = float(g(int(tid))); }"
    )
    with pytest.raises(ValueError, match="recursion"):
        run(source, [ZEROS])


@pytest.mark.parametrize(
    "argument",
    [
        "float* p [[buffer(1)]]",
        "threadgroup float* p [[buffer(1)]]",
        "int t [[thread_index_in_threadgroup]]",
        "device float* p",
    ],
)
def test_kernel_arguments_that_msl_refuses(argument):
    with pytest.raises(ValueError, match=r"argument|must|address space"):
        run(
            f"kernel void f(device float* o [[buffer(0)]], {argument}, {THREADS}) {{ o[0] = 1; }}",
            [ZEROS, ZEROS],
        )


def test_matrix_product_and_its_layout(rng):
    a, b, c = (rng.standard_normal((8, 8)).astype(np.float32) for _ in range(3))
    source = """
    kernel void f(device const float* a [[buffer(0)]], device const float* b [[buffer(1)]],
                  device const float* c [[buffer(2)]], device float* d [[buffer(3)]],
                  uint lane [[thread_index_in_simdgroup]]) {
      int row = int(lane / 16) * 4 + int(lane / 2) % 4;
      int col = int(lane / 8) % 2 * 4 + int(lane % 2) * 2;
      simdgroup_float8x8 x, y, z;
      for (int e = 0; e < 2; ++e) {
        x.thread_elements()[e] = a[row * 8 + col + e];
        y.thread_elements()[e] = b[row * 8 + col + e];
        z.thread_elements()[e] = c[row * 8 + col + e];
      }
      simdgroup_multiply_accumulate(z, x, y, z);
      for (int e = 0; e < 2; ++e) d[row * 8 + col + e] = z.thread_elements()[e];
    }"""
    fault, out, counters = run(source, [a, b, c, np.zeros((8, 8), np.float32)], threads=32)
    assert fault == ""
    np.testing.assert_allclose(out[3], a @ b + c, rtol=1e-5, atol=1e-5)
    assert counters["matrix_ops"] == 1
    assert counters["device_read_bytes"] == 3 * 256
    assert counters["device_write_bytes"] == 256


def test_simdgroup_functions(rng):
    x = rng.standard_normal(32).astype(np.float32)
    source = """
    kernel void f(device const float* x [[buffer(0)]], device float* o [[buffer(1)]],
                  uint lane [[thread_index_in_simdgroup]]) {
      o[lane] = simd_sum(x[lane]);
      o[32 + lane] = simd_max(x[lane]);
      o[64 + lane] = simd_min(x[lane]);
      o[96 + lane] = simd_shuffle(x[lane], ushort((lane * 7) % 32));
      o[128 + lane] = simd_shuffle_xor(x[lane], ushort(5));
      o[160 + lane] = simd_any(lane == 9) && !simd_all(lane == 9) ? 1.0f : 0.0f;
    }"""
    fault, (_, o), _ = run(source, [x, np.zeros((6, 32), np.float32)], threads=32)
    assert fault == ""
    lanes = np.arange(32)
    np.testing.assert_allclose(o[0], x.sum(dtype=np.float64), rtol=1e-5)
    np.testing.assert_array_equal(o[1], np.full(32, x.max()))
    np.testing.assert_array_equal(o[2], np.full(32, x.min()))
    np.testing.assert_array_equal(o[3], x[lanes * 7 % 32])
    np.testing.assert_array_equal(o[4], x[lanes ^ 5])
    assert (o[5] == 1).all()


@pytest.mark.parametrize(("msl", "dtype"), [("bfloat", ml_dtypes.bfloat16), ("half", np.float16)])
def test_half_types_round_to_nearest_even(rng, msl, dtype):
    x = np.concatenate(
        [
            rng.standard_normal(4096) * 10.0 ** rng.integers(-8, 5, 4096),
            [np.inf, -np.inf, np.nan, 0, -0.0],
        ]
    ).astype(np.float32)
    x = np.pad(x, (0, -x.size % 32))
    source = (
        f"kernel void f(device const float* x [[buffer(0)]], device {msl}* o [[buffer(1)]], "
        f"device float* back [[buffer(2)]], uint3 g [[threadgroup_position_in_grid]], {THREADS}) "
        f"{{ uint i = g.x * 32 + tid; o[i] = {msl}(x[i]); back[i] = float(o[i]); }}"
    )
    fault, (_, o, back), _ = run(source, [x, x.astype(dtype), x], threads=32, grid=x.size // 32)
    assert fault == ""
    with np.errstate(over="ignore"):
        want = x.astype(dtype)
    np.testing.assert_array_equal(o.astype(np.float64), want.astype(np.float64))
    np.testing.assert_array_equal(back, want.astype(np.float32))


def test_seeds_change_the_order_of_threads():
    source = (
        "kernel void f(device int* o [[buffer(0)]], device int* next [[buffer(1)]], "
        f"{THREADS}) {{ o[tid] = next[0]; next[0] = o[tid] + 1; }}"
    )
    orders = [
        run(source, [np.zeros(64, np.int32), np.zeros(1, np.int32)], seed=seed)[1][0].tolist()
        for seed in range(5)
    ]
    assert all(sorted(order) == list(range(64)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5


def test_counters_of_a_known_kernel():
    body = f"sh[tid] = o[tid]; {BARRIER} o[tid] = sh[tid ^ 1u] + sh[tid]; {BARRIER}"
    fault, _, counters = run(shared(body), [ZEROS], threadgroup=256, grid=3)
    assert fault == ""
    assert counters["threadgroups"] == 3
    assert counters["barriers"] == 6
    assert counters["device_read_bytes"] == 3 * 256
    assert counters["device_write_bytes"] == 3 * 256
    assert counters["threadgroup_bytes"] == 3 * 3 * 256
    assert counters["threadgroup_memory"] == 256
    assert counters["matrix_ops"] == 0


def test_the_module_runs_the_sources_of_this_tree():
    import sys

    for name, text in module().sources().items():
        expanded = subprocess.run(
            [sys.executable, ROOT / "cpp/metal/embed.py", "--print",
             ROOT / f"cpp/metal/kernels/{name}.metal"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert text.strip() == expanded.strip(), f"{name}.metal changed: rebuild"


def _definitions(function: str) -> dict[str, str]:
    """Name -> right-hand side of every value in one function of LLVM IR."""
    return dict(re.findall(r"^\s*(%[\w.]+) = (.*?)(?:, !.*)?$", function, flags=re.M))


def narrow_offsets(ir: str) -> list[str]:
    """Device addresses with a 32-bit product of two variables, which wraps beyond 2^31."""
    found = []
    for function in re.split(r"^define ", ir, flags=re.M)[1:]:
        values = _definitions(function)
        for address in re.findall(r"getelementptr .*ptr addrspace\(1\) .*", function):
            stack, seen = re.findall(r"i\d+ (%[\w.]+)", address), set()
            while stack:
                name = stack.pop()
                value = values.get(name, "")
                if name in seen or "load" in value:  # a loaded number is its own fact
                    continue
                seen.add(name)
                if re.match(r"(mul|shl) .*\bi32 %\S+, %", value):
                    found.append(f"{address.strip()} <- {name} = {value}")
                stack += re.findall(r"%[\w.]+", value)
    return found


def _ir(source: str, *macros: str) -> str:
    spec = importlib.util.spec_from_file_location("msl", ROOT / "cpp/metal/emulator/compile.py")
    msl = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(msl)
    blanked = re.sub(r"\[\[threadgroup\(.*?\)\]\]", "", source)
    command = [os.environ.get("CLANG", "clang++-19"), *msl.FLAGS, "-w", "-O1", "-S", "-emit-llvm"]
    command += ["-isystem", str(msl.SHIM), *(f"-D{m}" for m in macros), "-x", "c++", "-", "-o", "-"]
    return subprocess.run(command, input=blanked, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", ["forward", "delta", "dq", "dkdv", "dbias", "sum_rows"])
def test_device_offsets_are_64_bit(name):
    ir = _ir(module().sources()[name], "JFT_T=bfloat", "JFT_DP=64", "JFT_DVP=64")
    assert "getelementptr" in ir
    assert narrow_offsets(ir) == []


def test_a_32_bit_offset_is_found():
    source = """#include <metal_stdlib>
    using namespace metal;
    kernel void f(device float* o [[buffer(0)]], constant int& stride [[buffer(1)]],
                  uint3 g [[threadgroup_position_in_grid]]) { o[int(g.x) * stride + 3] = 1.0f; }"""
    assert len(narrow_offsets(_ir(source))) >= 1
    assert narrow_offsets(_ir(source.replace("int(g.x)", "long(g.x)"))) == []
