"""The faults that the test-suite must notice: one small change of the sources each.

A mutant names a file under cpp/, a text that occurs there exactly once (``tests/test_mutants.py``
says so when the sources move on) and what stands in its place. ``MUTANT`` in the new text is the
condition "this mutant is on". An entry without it is an expression: it becomes
``(MUTANT ? (new) : (old))``. So all mutants live in one build, and an environment variable picks
one (run.py).
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str

    def text(self, number: int) -> str:
        """What replaces ``old``."""
        condition = f"(::jft_mutant == {number})"
        if "MUTANT" in self.new:
            return self.new.replace("MUTANT", condition)
        return f"({condition} ? ({self.new}) : ({self.old}))"


def _without(name: str, file: str, statement: str) -> Mutant:
    """A statement left out."""
    return Mutant(name, file, statement, f"if (!MUTANT) {{ {statement} }}")


_SEMANTICS, _CALL, _LAUNCH = "core/semantics.h", "cpu/call.h", "cpu/launch.cc"
_VISIBILITY, _LOGITS, _PRODUCTS = "cpu/visibility.h", "cpu/logits.h", "cpu/products.h"
_FORWARD, _BACKWARD, _DELTA = "cpu/forward.h", "cpu/backward.h", "cpu/delta.h"

MUTANTS = [
    # ---- positions, windows, lengths
    Mutant("window: left off by one", _SEMANTICS,
           "clamp_to(i + p.offset - p.left, 0, p.kv_length)",
           "clamp_to(i + p.offset - p.left + 1, 0, p.kv_length)"),
    Mutant("window and causal: right off by one", _SEMANTICS,
           "clamp_to(i + p.offset + p.right + 1, 0, p.kv_length)",
           "clamp_to(i + p.offset + p.right, 0, p.kv_length)"),
    Mutant("q_lengths off by one", _SEMANTICS,
           "clamp_to(q_length, 0, Sq)", "clamp_to(q_length + 1, 0, Sq)"),
    Mutant("kv_lengths off by one", _SEMANTICS,
           "clamp_to(kv_length, 0, Sk)", "clamp_to(kv_length + 1, 0, Sk)"),
    Mutant("causal ignored beside a window", _SEMANTICS,
           "if (causal && p.right > 0) p.right = 0;",
           "if (causal && (MUTANT ? p.right == kUnbounded : p.right > 0)) p.right = 0;"),
    Mutant("rows past q_lengths see keys", _SEMANTICS,
           "if (i >= p.q_length) {", "if (MUTANT ? false : i >= p.q_length) {"),
    Mutant("loop over keys ends with the first row's", _SEMANTICS,
           "r.end = visible_keys(p, i1 - 1).end;",
           "r.end = visible_keys(p, MUTANT ? i0 : i1 - 1).end;"),
    Mutant("edge test forgets the window's left side", _SEMANTICS,
           "r.begin = visible_keys(p, i1 - 1).begin;",
           "r.begin = visible_keys(p, MUTANT ? i0 : i1 - 1).begin;"),
    Mutant("edge test forgets the causal side", _SEMANTICS,
           "r.end = visible_keys(p, i0).end;",
           "r.end = visible_keys(p, MUTANT ? i1 - 1 : i0).end;"),
    Mutant("edge test forgets q_lengths", _SEMANTICS,
           "if (i1 > p.q_length) {", "if (MUTANT ? false : i1 > p.q_length) {"),
    Mutant("loop over queries starts late", _SEMANTICS,
           "clamp_to(j0 - p.offset - p.right, 0, p.q_length)",
           "clamp_to(j0 - p.offset - p.right + 64, 0, p.q_length)"),
    Mutant("loop over queries ends early", _SEMANTICS,
           "clamp_to(j1 - 1 - p.offset + p.left + 1, 0, p.q_length)",
           "clamp_to(j1 - 1 - p.offset + p.left + 1 - 64, 0, p.q_length)"),
    Mutant("causal is top-left by default", _CALL,
           "scalar(kQOffset, p.Sk - p.Sq)", "scalar(kQOffset, 0)"),
    # ---- masks and segments
    Mutant("mask of another head", _CALL,
           "batch_offset(p, t, b) + h * t.head;\n    f.mask_row",
           "batch_offset(p, t, b) + (MUTANT ? 0 : h * t.head);\n    f.mask_row"),
    Mutant("mask without a key dimension ignored", _VISIBILITY,
           "bits &= *m ? ~uint64_t{0} : 0;", "bits &= (MUTANT || *m) ? ~uint64_t{0} : 0;"),
    Mutant("mask tail of a tile ignored", _VISIBILITY,
           "__builtin_memcpy(tail, m, static_cast<size_t>(t.nk));",
           "__builtin_memset(tail, 1, sizeof tail);\n"
           "        if (!MUTANT) __builtin_memcpy(tail, m, static_cast<size_t>(t.nk));"),
    Mutant("segments that touch are skipped", _VISIBILITY,
           "q.hi < kv.lo || kv.hi < q.lo", "q.hi <= kv.lo || kv.hi <= q.lo"),
    Mutant("one side with a single id counts as clean", _VISIBILITY,
           "!(q.lo == q.hi && kv.lo == kv.hi)", "!(q.lo == q.hi || kv.lo == kv.hi)"),
    Mutant("ids compared with the first row's", _VISIBILITY,
           "f.q_ids[t.i0 + r]", "f.q_ids[t.i0]"),
    # ---- terms of the logits
    Mutant("softcap after bias", _LOGITS,
           "if (f.softcap) s = softcap(s, unused);\n"
           "      if (f.bias) s += load(w.bias + k * kTile + n);",
           "if (!MUTANT && f.softcap) s = softcap(s, unused);\n"
           "      if (f.bias) s += load(w.bias + k * kTile + n);\n"
           "      if (MUTANT && f.softcap) s = softcap(s, unused);"),
    Mutant("softcap is s * tanh", _LOGITS, "return t * cap;", "return MUTANT ? t * s : t * cap;"),
    Mutant("softcap derivative wrong", _LOGITS,
           "factor = T(1) - t * t;", "factor = MUTANT ? T(1) - t : T(1) - t * t;"),
    Mutant("alibi rewards distance (forward)", _LOGITS,
           "fma(splat<T>(-alibi.slope), alibi.distance_over_queries(k, n), s)",
           "fma(splat<T>(alibi.slope), alibi.distance_over_queries(k, n), s)"),
    Mutant("alibi without the absolute value", _LOGITS, "return max(x, -x);",
           "return MUTANT ? x : max(x, -x);"),
    Mutant("alibi without the offset", _LOGITS,
           "static_cast<T>(t.i0 + f.pos.offset - t.j0)", "static_cast<T>(t.i0 - t.j0)"),
    # ---- dropout
    Mutant("dropout: threshold off by one", _VISIBILITY,
           "return draw >= f.threshold;",
           "return MUTANT ? draw > f.threshold : draw >= f.threshold;"),
    Mutant("dropout: every batch element alike", _VISIBILITY,
           "c2[r] = f.flat_head;", "c2[r] = MUTANT ? static_cast<uint32_t>(f.h) : f.flat_head;"),
    Mutant("dropout: every tile of rows alike", _VISIBILITY,
           "f.row0 + static_cast<uint32_t>(t.i0) + static_cast<uint32_t>(r)",
           "f.row0 + static_cast<uint32_t>(r)"),
    Mutant("dropout: kept weights not scaled up (forward)", _LOGITS,
           "select(lane_mask(keep[k] >> n, at), load(at) * z, Vec<T>{})",
           "select(lane_mask(keep[k] >> n, at), load(at), Vec<T>{})"),
    Mutant("dropout: scale from the rate, not the threshold", _CALL,
           "65536.0 / (65536.0 - p.dropout_threshold)", "1.0 / (1.0 - p.attrs.dropout_rate)"),
    # ---- softmax and residual
    Mutant("row sum not rescaled", _FORWARD,
           "fma(load(w.l + n), rescale, sum)", "load(w.l + n) + sum"),
    Mutant("sink outside the maximum", _FORWARD,
           "const T m = w.m[r] > sink ? w.m[r] : sink;",
           "const T m = (MUTANT ? w.m[r] > -kInf : w.m[r] > sink) ? w.m[r] : sink;"),
    Mutant("sink missing in the row sum", _FORWARD,
           "l * shrink + static_cast<T>(__builtin_exp(static_cast<double>(sink - m)))",
           "l * shrink"),
    Mutant("value head of another group", _FORWARD,
           "piece(p, p.in[kV], f.b, f.h / p.G, t.j0, t.nk, 0, p.Dv)",
           "piece(p, p.in[kV], f.b, f.h % p.Hkv, t.j0, t.nk, 0, p.Dv)"),
    Mutant("key head of another group (forward)", _FORWARD,
           "piece(p, p.in[kK], f.b, f.h / p.G, t.j0, t.nk, 0, p.D)",
           "piece(p, p.in[kK], f.b, f.h % p.Hkv, t.j0, t.nk, 0, p.D)"),
    Mutant("hidden NaN in v reaches o", _PRODUCTS, "v = kept_rows(src, v_scratch, ldv, keep);",
           "v = kept_rows(src, v_scratch, ldv, MUTANT ? ~uint64_t{0} : keep);"),
    # ---- gradient terms
    Mutant("no dL", _DELTA, "(dl ? dl[r] : T(0))", "T(0)"),
    Mutant("NaN in do of an empty row with a sink", _DELTA,
           "whole ? sums[r] : zero_row", "whole ? sums[r] : MUTANT ? false : zero_row"),
    Mutant("delta from the weights of one key tile where there are more", _DELTA,
           "meets.end - meets.begin == 1", "meets.end - meets.begin >= 1"),
    Mutant("delta from weights without dropout", _DELTA, "f.threshold ? w.pz : w.p", "w.p"),
    Mutant("no delta (plain tiles)", _BACKWARD,
           "load(p + r * kTile + n) * (load(at) - delta)", "load(p + r * kTile + n) * load(at)"),
    Mutant("no delta (tiles with options)", _BACKWARD,
           "load(w.p + at) * (dp - delta)", "load(w.p + at) * dp"),
    Mutant("m left out of p (plain tiles)", _BACKWARD,
           "exp<T>((load(at) - m) - c)", "exp<T>(load(at) - c)"),
    Mutant("p from the rounded L = m + c", _BACKWARD,
           "exp<T>((s - m) - c)", "exp<T>(s - (m + c))"),
    Mutant("no GQA sum", _BACKWARD,
           "Vec<T> dalibi{};\n    for (int n",
           "Vec<T> dalibi{};\n    if (MUTANT) __builtin_memset(w.dkt, 0, sizeof(T) * "
           "static_cast<size_t>(p.D * kTile));\n    for (int n"),
    Mutant("dk without scale", _BACKWARD,
           "w.dkt, static_cast<T>(p.attrs.scale), b",
           "w.dkt, MUTANT ? T(1) : static_cast<T>(p.attrs.scale), b"),
    Mutant("dq without scale", _PRODUCTS,
           "StoreScaled<T>{out, ldk, factor}", "StoreScaled<T>{out, ldk, MUTANT ? T(1) : factor}"),
    Mutant("dv without the dropout mask", _BACKWARD, "keep ? w.pz : w.p;",
           "keep && !MUTANT ? w.pz : w.p;"),
    Mutant("dp without the dropout mask", _BACKWARD,
           "if (keep) dp = select(", "if (MUTANT ? false : keep != nullptr) dp = select("),
    Mutant("dq, dk not through softcap", _BACKWARD, "f.softcap ? w.dsc : w.ds;",
           "f.softcap && !MUTANT ? w.dsc : w.ds;"),
    Mutant("dbias after softcap", _BACKWARD,
           "store(w.column + n, load(w.column + n) + ds);",
           "store(w.column + n, load(w.column + n) + "
           "(MUTANT && f.softcap ? ds * load(w.dsc + at) : ds));"),
    Mutant("dsinks with the wrong sign", _DELTA,
           "dsink -= static_cast<T>(sink_weight) * delta[r];",
           "dsink -= (MUTANT ? T(-1) : T(1)) * static_cast<T>(sink_weight) * delta[r];"),
    Mutant("delta from the weights of a part of the keys", _DELTA, "missing < 1e-3", "missing < 2"),
    Mutant("dalibi with the wrong sign", _BACKWARD, "-sum_lanes<T>(dalibi)",
           "sum_lanes<T>(dalibi)"),
    Mutant("alibi rewards distance (backward)", _BACKWARD,
           "fma(splat<T>(-alibi.slope), alibi.distance_over_keys(r, n), s)",
           "fma(splat<T>(alibi.slope), alibi.distance_over_keys(r, n), s)"),
    Mutant("bias missing in the backward", _BACKWARD,
           "if (f.bias) s += load(bias.data + r * bias.ld + n);",
           "if (!MUTANT && f.bias) s += load(bias.data + r * bias.ld + n);"),
    Mutant("empty rows take part in the backward", _BACKWARD,
           "static_cast<uint64_t>(c[n] >= static_cast<T>(kEmptyRow / 2)) << n",
           "uint64_t{0}"),
    Mutant("hidden NaN in k reaches dq", _PRODUCTS, "if (k_nonfinite && (~keep & low_bits(nk))) {",
           "if (!MUTANT && k_nonfinite && (~keep & low_bits(nk))) {"),
    Mutant("NaN in q of an empty row reaches dk", _PRODUCTS,
           "q = kept_rows(queries, q_scratch, ldk, keep);",
           "q = kept_rows(queries, q_scratch, ldk, MUTANT ? ~uint64_t{0} : keep);"),
    Mutant("NaN in do of an empty row reaches dv", _PRODUCTS,
           "d_o = kept_rows(cotangents, do_scratch, ldv, keep);",
           "d_o = kept_rows(cotangents, do_scratch, ldv, MUTANT ? ~uint64_t{0} : keep);"),
    Mutant("dq of queries without keys left unwritten", _DELTA,
           "if (meets.begin == meets.end && !job.dq_across_units) {",
           "if (MUTANT ? false : meets.begin == meets.end && !job.dq_across_units) {"),
    # ---- reductions
    Mutant("dbias of a broadcast head: last head only", _LAUNCH,
           "sums_batch(p, dbias) || dbias.head == 0", "sums_batch(p, dbias)"),
    Mutant("sums over batch and heads keep the last", _LAUNCH,
           "sum[e * step] += static_cast<double>(*part++);",
           "sum[e * step] = (MUTANT ? 0.0 : sum[e * step]) + static_cast<double>(*part++);"),
]  # fmt: skip
