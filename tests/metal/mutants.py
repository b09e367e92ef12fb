"""Bugs that the tests must catch: (file, text, replacement), plausible slips in a kernel."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

from .emulated import ROOT

KERNELS = ("forward", "delta", "dq", "dkdv", "dbias", "sum_rows")
_BARRIER_1 = (
    "threadgroup_barrier(mem_flags::mem_threadgroup);  // the previous step has read its tiles"
)


class Mutant(NamedTuple):
    name: str
    file: str  # below cpp/
    old: str
    new: str


def _k(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name, f"metal/kernels/{file}", old, new)


_LAST_BARRIER = {
    "forward.metal": "p.Dv, tid);\n    threadgroup_barrier(mem_flags::mem_threadgroup);",
    "dq.metal": "p.Dv, tid);\n      threadgroup_barrier(mem_flags::mem_threadgroup);",
    "dkdv.metal": "p.Dv, tid);\n        threadgroup_barrier(mem_flags::mem_threadgroup);",
    "dbias.metal": "p.Dv, tid);\n          threadgroup_barrier(mem_flags::mem_threadgroup);",
}

MUTANTS = [
    # barriers
    *(_k(f"{f}: no barrier before staging", f, _BARRIER_1, "") for f in _LAST_BARRIER),
    *(
        _k(f"{f}: no barrier after staging", f, old, "p.Dv, tid);")
        for f, old in _LAST_BARRIER.items()
    ),
    _k(
        "no barrier in the exchange of halves",
        "backward.h",
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
    ),
    _k(
        "dbias: no barrier before the row sums",
        "dbias.metal",
        "threadgroup_barrier(mem_flags::mem_threadgroup);  // the tiles become scratch",
        "",
    ),
    _k(
        "sum_rows: no barrier",
        "sum_rows.metal",
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
    ),
    # forward
    _k("O is not rescaled", "forward.metal", "get(out[d], e) * rescale", "get(out[d], e)"),
    _k(
        "l is not rescaled",
        "forward.metal",
        "l = l * rescale + row_sum(sum)",
        "l = l + row_sum(sum)",
    ),
    _k("l sums one lane", "forward.metal", "row_sum(sum)", "sum"),
    _k(
        "wrong kv head",
        "forward.metal",
        "head / p.G * p.in[kBufV].head",
        "head % (p.Hq / p.G) * p.in[kBufV].head",
    ),
    _k(
        "the sink has no weight",
        "forward.metal",
        "l * factor + exp_natural(sink - m_new)",
        "l * factor",
    ),
    _k(
        "o ignores the sink's maximum",
        "forward.metal",
        "get(out[d], e) * factor / l",
        "get(out[d], e) / l",
    ),
    _k("row_log_sum in base 2", "forward.metal", "precise::log(l)", "precise::log(l) * M_LOG2E_F"),
    _k(
        "forward drops the last keys",
        "forward.metal",
        "j0 < keys.end; j0",
        "j0 + kKeys <= keys.end; j0",
    ),
    _k(
        "forward lets hidden NaN through",
        "forward.metal",
        "edge ? any_in_column(seen, at) : ~0u",
        "any_in_column(seen, at) | ~0u",
    ),
    _k(
        "forward does not drop out", "forward.metal", "if (kHasDropout) weight", "if (false) weight"
    ),
    _k(
        "l sums the dropped weights only",
        "forward.metal",
        "        sum += weight;\n        if (kHasDropout) weight",
        "        if (kHasDropout) weight",
    ),
    _k("row_max of an empty row", "forward.metal", "empty ? 0.0f : m;", "m;"),
    _k(
        "edges by the first row",
        "forward.metal",
        "all_visible(scene, tile0, tile0 + kForwardRows",
        "all_visible(scene, tile0, tile0 + 1",
    ),
    # visibility and logits
    Mutant(
        "causal off by one",
        "core/semantics.h",
        "i + p.offset + p.right + 1, 0",
        "i + p.offset + p.right, 0",
    ),
    Mutant(
        "window off by one",
        "core/semantics.h",
        "i + p.offset - p.left, 0",
        "i + p.offset - p.left + 1, 0",
    ),
    Mutant(
        "rows of a key tile start late",
        "core/semantics.h",
        "j0 - p.offset - p.right, 0",
        "j0 - p.offset - p.right + 1, 0",
    ),
    Mutant(
        "rows of a key tile end early",
        "core/semantics.h",
        "j1 - 1 - p.offset + p.left + 1",
        "j1 - 1 - p.offset + p.left",
    ),
    _k("the mask is ignored", "logits.h", "if (kHasMask && seen)", "if (false && seen)"),
    _k(
        "the mask is transposed",
        "logits.h",
        "i * s.mask_row + j * s.mask_col",
        "j * s.mask_row + i * s.mask_col",
    ),
    _k("the mask of head 0", "logits.h", "head * p.in[kBufMask].head", "0 * p.in[kBufMask].head"),
    _k(
        "later segments are seen",
        "logits.h",
        "s.q_segments[i] == s.kv_segments[j]",
        "s.q_segments[i] >= s.kv_segments[j]",
    ),
    _k("touching segments are skipped", "logits.h", "a.hi < b.lo ||", "a.hi <= b.lo ||"),
    _k("softcap without its factor", "logits.h", "x.s = p.softcap * t", "x.s = t"),
    _k("softcap without its derivative", "logits.h", "1.0f - t * t", "1.0f"),
    _k(
        "bias rows swapped",
        "logits.h",
        "i * s.bias_row + j * s.bias_col",
        "j * s.bias_row + i * s.bias_col",
    ),
    _k(
        "bias before softcap",
        "logits.h",
        "x.s = dot * p.scale;",
        "x.s = dot * p.scale + (kHasSoftcap && kHasBias ? 0.5f : 0.0f);",
    ),
    _k("half bias read as bfloat", "logits.h", "kBiasType == 1", "kBiasType == 2"),
    _k("alibi with the wrong sign", "logits.h", "x.s -= s.slope", "x.s += s.slope"),
    _k(
        "alibi without the offset",
        "logits.h",
        "fabs(float(i + s.pos.offset - j))",
        "fabs(float(i - j))",
    ),
    _k("no scale", "logits.h", "x.s = dot * p.scale;", "x.s = dot;"),
    _k("dropout draw of another column", "logits.h", "int(col & 7u)", "int(col & 3u)"),
    _k("dropout of head 0", "logits.h", "s.bh = origin[2]", "s.bh = 0"),
    _k("q_offset is ignored", "logits.h", "if (came(p, kBufQOffset))", "if (false)"),
    _k("kv_lengths are ignored", "logits.h", "if (came(p, kBufKvLengths))", "if (false)"),
    _k("q_lengths are ignored", "logits.h", "if (came(p, kBufQLengths))", "if (false)"),
    # delta
    _k("dL with the wrong sign", "delta.metal", "delta -= dlse", "delta += dlse"),
    _k("dsinks with the wrong sign", "delta.metal", ": -fast::exp2", ": fast::exp2"),
    _k("delta of an empty row", "delta.metal", "if (x != 0.0f) sum", "sum"),
    _k("delta drops features", "delta.metal", "d < p.Dv; d += 32", "d < p.Dv - 1; d += 32"),
    # backward, shared
    _k("no delta", "backward.h", "(z * dp - row.delta)", "(z * dp)"),
    _k("dP without dropout", "backward.h", "(z * dp - row.delta)", "(dp - row.delta)"),
    _k("dv without dropout", "backward.h", "w.weight = prob * z", "w.weight = prob"),
    _k("halves of another row block", "backward.h", "(simd ^ 1u)", "(simd ^ 2u)"),
    _k("L instead of (m, c)", "backward.h", "(x.s - row.m) - row.c", "x.s - (row.m + row.c)"),
    _k("m of head 0", "backward.h", "head * p.in[kBufRowMax].head", "0 * p.in[kBufRowMax].head"),
    # dq
    _k("dq without scale", "dq.metal", "store_rows(acc, p.scale", "store_rows(acc, 1.0f"),
    _k(
        "dq lets hidden NaN through",
        "dq.metal",
        "edge ? any_in_column(seen, at) : ~0u",
        "any_in_column(seen, at) | ~0u",
    ),
    _k("dq drops the last keys", "dq.metal", "j0 < keys.end; j0", "j0 + kStaged <= keys.end; j0"),
    _k(
        "dq of the lower half twice",
        "dq.metal",
        "multiply(acc, s, k_tile + half_q",
        "multiply(acc, s, k_tile",
    ),
    _k("dalibi with the wrong sign", "dq.metal", "row] = -sum", "row] = sum"),
    _k(
        "dalibi after the softcap",
        "dq.metal",
        "distance_sum += w.ds",
        "distance_sum += w.ds * w.slope",
    ),
    _k("dq ignores the softcap", "dq.metal", "ds = w.ds * w.slope;", "ds = w.ds;"),
    # dk, dv
    _k(
        "only the first head of a group",
        "dkdv.metal",
        "head < (kv_head + 1) * p.G",
        "head < kv_head * p.G + 1",
    ),
    _k(
        "empty rows reach dk and dv",
        "dkdv.metal",
        "const uint keep = any_in_column(seen, at)",
        "const uint keep = any_in_column(seen, at) | ~0u",
    ),
    _k("dk without scale", "dkdv.metal", "store_rows(dk_acc, p.scale", "store_rows(dk_acc, 1.0f"),
    _k("dk ignores the softcap", "dkdv.metal", "ds = w.ds * w.slope;", "ds = w.ds;"),
    _k("statistics of the first row", "dkdv.metal", "head, i0 + tid)", "head, i0)"),
    _k(
        "dkdv drops the last rows",
        "dkdv.metal",
        "i0 < rows.end; i0",
        "i0 + kStaged <= rows.end; i0",
    ),
    _k(
        "dv of the lower half twice",
        "dkdv.metal",
        "do_tile + half_v, kLdV, keep",
        "do_tile, kLdV, keep",
    ),
    _k("dkdv does not sum over batch", "dkdv.metal", "r < p.reduced_batches", "r < 1"),
    # dbias
    _k(
        "dbias sums one element of two",
        "dbias.metal",
        "sum += get(acc[n], 0) + get(acc[n], 1)",
        "sum += get(acc[n], 0)",
    ),
    _k(
        "dbias sums the first row tile",
        "dbias.metal",
        "(rows_kept ? out_row + 1 : row_tiles)",
        "(rows_kept ? out_row + 1 : min(row_tiles, i64(1)))",
    ),
    _k("dbias of one head", "dbias.metal", "(heads_kept ? out_head + 1 : p.Hq)", "1"),
    _k(
        "dbias after the softcap",
        "dbias.metal",
        "stats, row, j).ds)",
        "stats, row, j).ds * logit(p, scene, get(s[n], e), row, j).slope)",
    ),
    _k("dbias does not sum over batch", "dbias.metal", "r < p.reduced_batches", "r < 1"),
    _k("dbias written as another type", "dbias.metal", "kBiasType == 1", "kBiasType == 2"),
    # sums and tiles
    _k("sum_rows sums one simdgroup", "sum_rows.metal", "s < kSimdgroups", "s < 1"),
    _k("sum_rows does not sum over batch", "sum_rows.metal", "r < p.reduced_batches", "r < 1"),
    _k(
        "fragment columns swapped",
        "common.h",
        "((lane >> 3) & 1) * 4 + (lane & 1) * 2",
        "((lane >> 3) & 1) * 2 + (lane & 1) * 4",
    ),
    _k("staging past the last row", "common.h", "row0 + row < rows && col < cols;", "col < cols;"),
    _k(
        "padded features are read",
        "common.h",
        "row0 + row < rows && col < cols;",
        "row0 + row < rows;",
    ),
    _k(
        "batch element 0 for all",
        "common.h",
        "b.at[d] = kept % size;",
        "b.at[d] = kept * 0;",
    ),
    _k(
        "padded features are written",
        "common.h",
        "if (row < rows && col < cols) x[",
        "if (row < rows) x[",
    ),
    _k(
        "rows past the end are written",
        "common.h",
        "if (row < rows && col < cols) x[",
        "if (col < cols) x[",
    ),
]


def expand(path: pathlib.Path, mutant: Mutant | None, seen: set | None = None) -> str:
    """embed.py's expansion, with the mutant's file changed."""
    seen = set() if seen is None else seen
    path = path.resolve()
    if path in seen:
        return ""
    seen.add(path)
    text = path.read_text()
    if mutant and path == (ROOT / "cpp" / mutant.file).resolve():
        if mutant.old not in text:
            raise ValueError(f"mutant {mutant.name!r}: its text is no longer in {mutant.file}")
        text = text.replace(mutant.old, mutant.new)
    out = []
    for line in text.splitlines():
        if line.strip().startswith('#include "'):
            out.append(expand(path.parent / line.split('"')[1], mutant, seen))
        elif line.strip() != "#pragma once":
            out.append(line)
    return "\n".join(out) + "\n"


def sources(mutant: Mutant | None) -> dict[str, str]:
    """Expanded kernel sources."""
    return {k: expand(ROOT / f"cpp/metal/kernels/{k}.metal", mutant) for k in KERNELS}
