// Flat C interface of the Hopper kernels for drive.py (contiguous tensors, one batch dimension).
#include <cuda_runtime_api.h>

#include <initializer_list>

#include "../../cpp/cuda/hopper/hopper.h"

using namespace jft;

namespace {

// sizes: B Sq Sk Hq Hkv D Dv layout half causal left right deterministic kv_broadcast grads
enum { kB, kSq, kSk, kHq, kHkv, kD, kDv, kLayout, kHalf, kCausal, kLeft, kRight, kDet, kKvOne, kGrads };

Problem make_problem(const int64_t* s, const double* f, void* const* in, void* const* out, bool backward) {
  Problem p = {};
  p.attrs.batch_dims = p.batch_dims = 1;
  p.attrs.layout = s[kLayout];
  p.attrs.causal = s[kCausal];
  p.attrs.window_left = s[kLeft];
  p.attrs.window_right = s[kRight];
  p.attrs.deterministic = s[kDet];
  p.attrs.grads = s[kGrads];
  p.attrs.scale = f[0];
  p.attrs.softcap = f[1];
  p.batch_size[0] = p.B = s[kB];
  p.Sq = s[kSq];
  p.Sk = s[kSk];
  p.Hq = s[kHq];
  p.Hkv = s[kHkv];
  p.G = p.Hq / p.Hkv;
  p.D = s[kD];
  p.Dv = s[kDv];
  p.dtype = s[kHalf] ? DType::kF16 : DType::kBF16;
  auto wide = [&](void* data, int64_t S, int64_t H, int64_t D, bool one) {
    Tensor t = {};
    t.data = data;
    t.dtype = p.dtype;
    const bool btnh = s[kLayout] == 0;
    t.batch[0] = one || p.B == 1 ? 0 : S * H * D;
    t.row = btnh ? H * D : D;
    t.head = btnh ? D : S * D;
    t.col = 1;
    return t;
  };
  auto narrow = [&](void* data, int64_t per_batch, int64_t head, int64_t row) {
    Tensor t = {};
    t.data = data;
    t.dtype = DType::kF32;
    t.batch[0] = p.B == 1 ? 0 : per_batch;
    t.head = head;
    t.row = row;
    return t;
  };
  for (int i = 0; i < kNumOperands; ++i)
    if (in[i]) p.attrs.present |= int64_t(1) << i;
  const bool one = s[kKvOne] != 0;
  p.in[kQ] = wide(in[kQ], p.Sq, p.Hq, p.D, false);
  p.in[kK] = wide(in[kK], p.Sk, p.Hkv, p.D, one);
  p.in[kV] = wide(in[kV], p.Sk, p.Hkv, p.Dv, one);
  for (int i : {kQOffset, kWindowLeft, kWindowRight, kQLengths, kKvLengths}) p.in[i] = narrow(in[i], 1, 0, 0);
  p.in[kAlibiSlopes] = narrow(in[kAlibiSlopes], p.Hq, 1, 0);
  p.in[kSinks] = narrow(in[kSinks], 0, 1, 0);
  if (backward) {
    p.in[kO] = wide(in[kO], p.Sq, p.Hq, p.Dv, false);
    p.in[kDO] = wide(in[kDO], p.Sq, p.Hq, p.Dv, false);
    for (int i : {kRowMax, kRowLogSum, kDLse}) p.in[i] = narrow(in[i], p.Hq * p.Sq, p.Sq, 1);
    p.out[kResDQ] = wide(out[kResDQ], p.Sq, p.Hq, p.D, false);
    p.out[kResDK] = wide(out[kResDK], p.Sk, p.Hkv, p.D, one);
    p.out[kResDV] = wide(out[kResDV], p.Sk, p.Hkv, p.Dv, one);
    p.out[kResDSinks] = narrow(out[kResDSinks], 0, 1, 0);
  } else {
    p.out[kResO] = wide(out[kResO], p.Sq, p.Hq, p.Dv, false);
    p.out[kResRowMax] = narrow(out[kResRowMax], p.Hq * p.Sq, p.Sq, 1);
    p.out[kResRowLogSum] = narrow(out[kResRowLogSum], p.Hq * p.Sq, p.Sq, 1);
  }
  return p;
}

}  // namespace

extern "C" {

const char* jft_reason(int backward, const int64_t* s, const double* f, void* const* in, void* const* out) {
  return hopper_reason(make_problem(s, f, in, out, backward), backward);
}

int64_t jft_workspace(int backward, const int64_t* s, const double* f, void* const* in, void* const* out) {
  return static_cast<int64_t>(hopper_workspace_bytes(make_problem(s, f, in, out, backward), backward));
}

int jft_run(int backward, const int64_t* s, const double* f, void* const* in, void* const* out, void* workspace,
            void* stream) {
  const Problem p = make_problem(s, f, in, out, backward);
  auto st = static_cast<cudaStream_t>(stream);
  return backward ? hopper_backward(p, workspace, st) : hopper_forward(p, workspace, st);
}

const char* jft_error(int e) { return cudaGetErrorString(static_cast<cudaError_t>(e)); }

}  // extern "C"
