"""cpp/core/semantics.h, the one home of the visibility rules, against brute force and the oracle.

The header is compiled alone: as C++ into a small library that ctypes calls, and (where nvcc is
installed) as CUDA. tests/cpp/semantics_test.cc checks the same header from C++ without Python.
"""

import ctypes
import itertools
import pathlib
import shutil
import subprocess

import numpy as np
import oracle
import pytest

CORE = pathlib.Path(__file__).resolve().parents[1] / "cpp" / "core"

_GLUE = """
#include "semantics.h"
using namespace jft;
extern "C" {
// r[0..1]: keys of row a; r[2..3], r[4..5]: of any, of all of the rows [a, b); r[6..7]: rows of any
// of the keys [c, d).
void ranges(const long long* p, long long a, long long b, long long c, long long d, long long* r) {
  const Positions q = make_positions(p[0], p[1], p[2], p[3], p[4], p[5] != 0, p[6], p[7]);
  const Range x[4] = {visible_keys(q, a), visible_keys_any(q, a, b), visible_keys_all(q, a, b),
                      visible_queries_any(q, c, d)};
  for (int n = 0; n < 4; ++n) { r[2 * n] = x[n].begin; r[2 * n + 1] = x[n].end; }
}
void philox(const unsigned* c, const unsigned* k, unsigned* out) {
  const Philox x = philox4x32_10(c[0], c[1], c[2], c[3], k[0], k[1]);
  for (int n = 0; n < 4; ++n) out[n] = x.w[n];
}
int keeps(unsigned row, unsigned key, unsigned bh, unsigned k0, unsigned k1, unsigned threshold) {
  const Philox draws = dropout_draws(row, key / 8, bh, k0, k1);
  return dropout_keeps(dropout_draw(draws, int(key % 8)), threshold);
}
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("semantics")
    (folder / "glue.cc").write_text(_GLUE)
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC",
               f"-I{CORE}", str(folder / "glue.cc"), "-o", str(folder / "glue.so")]  # fmt: skip
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "glue.so"))


def _ranges(library, positions, a, b, c, d):
    out = np.zeros(8, np.int64)
    pointer = ctypes.POINTER(ctypes.c_longlong)
    array = np.asarray(positions, np.int64)
    library.ranges(
        array.ctypes.data_as(pointer), *(ctypes.c_longlong(x) for x in (a, b, c, d)),
        out.ctypes.data_as(pointer),
    )  # fmt: skip
    return [slice(int(x), max(int(x), int(y))) for x, y in out.reshape(4, 2)]


def _see(Sq, Sk, q_length, kv_length, offset, causal, left, right):
    return oracle.visible(
        (), 1, Sq, Sk, causal=causal, q_offset=offset, q_lengths=q_length, kv_lengths=kv_length,
        window=(None if left < 0 else left, None if right < 0 else right),
    )[0]  # fmt: skip


def _small_problems():
    """All combinations for small sizes, thinned by a fixed stride to a few thousand."""
    every = itertools.product(
        (1, 2, 5), (0, 1, 4, 7), (-1, 0, 2, 9), (-2, 0, 3, 9), (-9, -3, -1, 0, 2, 8), (0, 1),
        (-1, 0, 2), (-1, 0, 1, 3),
    )  # fmt: skip
    return itertools.islice(every, 0, None, 3)


def test_ranges_equal_brute_force(library):
    count = 0
    for problem in _small_problems():
        Sq, Sk = problem[:2]
        see = _see(*problem)
        tiles = [(i, j) for i in range(Sq) for j in range(i + 1, Sq + 1)]
        for n, (a, b) in enumerate(tiles):
            c = n % max(Sk, 1)
            d = min(Sk, c + 1 + n // 2)
            row, any_keys, all_keys, any_rows = _ranges(library, problem, a, b, c, d)
            keys = np.zeros(Sk, bool)
            keys[row] = True
            np.testing.assert_array_equal(keys, see[a], err_msg=str(problem))
            # Loop bounds: nothing outside is visible, and no interval is tighter.
            seen = np.flatnonzero(see[a:b].any(0))
            if seen.size:
                assert (any_keys.start, any_keys.stop) == (seen[0], seen[-1] + 1), problem
            # Inside "all" every row sees every key.
            assert see[a:b, all_keys].all(), problem
            full = np.flatnonzero(see[a:b].all(0))
            if full.size:
                assert all_keys.start <= full[0], problem
                assert all_keys.stop >= full[-1] + 1, problem
            rows = np.flatnonzero(see[:, c:d].any(1))
            if rows.size:
                assert any_rows.start <= rows[0], problem
                assert any_rows.stop >= rows[-1] + 1, problem
            count += 1
    assert count > 10_000


def test_offsets_near_the_integer_limits(library):
    """q_offset is any int32: no overflow, everything or nothing is visible."""
    for offset in (2**31 - 1, -(2**31)):
        for causal in (0, 1):
            problem = (4, 6, 4, 6, offset, causal, -1, -1)
            see = _see(*problem)
            row, *_ = _ranges(library, problem, 1, 2, 0, 6)
            keys = np.zeros(6, bool)
            keys[row] = True
            np.testing.assert_array_equal(keys, see[1])


def test_philox_equals_the_oracle(library):
    rng = np.random.default_rng(0)
    pointer = ctypes.POINTER(ctypes.c_uint)
    for _ in range(200):
        counter, key = (rng.integers(0, 2**32, n, dtype=np.uint32) for n in (4, 2))
        out = np.zeros(4, np.uint32)
        library.philox(*(x.ctypes.data_as(pointer) for x in (counter, key, out)))
        assert [int(x) for x in oracle.philox4x32_10(counter, key)] == out.tolist()


def test_dropout_equals_the_oracle(library):
    threshold = round(0.3 * 65536)
    keep = oracle.dropout_keep((11, 12), 2, 3, 5, 21, 0.3)
    for b, h, i, j in np.ndindex(keep.shape):
        assert bool(library.keeps(i, j, b * 3 + h, 11, 12, threshold)) == keep[b, h, i, j]


def test_compiles_as_cuda(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    source = tmp_path / "glue.cu"
    source.write_text(
        '#include "semantics.h"\n'
        "__global__ void k(jft::i64* out, jft::Positions p) {\n"
        "  out[0] = jft::visible_keys(p, 1).end;\n"
        "  out[1] = jft::dropout_draw(jft::dropout_draws(1, 2, 3, 4, 5), 6);\n}\n"
    )
    subprocess.run(
        [nvcc, "-std=c++17", f"-I{CORE}", "-c", str(source), "-o", str(tmp_path / "glue.o")],
        check=True,
    )
