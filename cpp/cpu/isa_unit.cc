// The kernels of one instruction set. CMake compiles this file once per level, each time with other
// flags and another JFT_ISA (the name of the namespace that everything in it lives in).
#include "backward.h"
#include "delta.h"
#include "forward.h"
#include "isa.h"
#if defined(__AMX_BF16__)
#include "amx.h"
#endif

namespace jft::cpu {

namespace JFT_ISA {

// Rows of at most this many values, so that int sizes are enough.
constexpr int64_t kChunk = 1 << 20;

static void widen(const void* src, DType dtype, float* dst, int64_t n) {
  for (int64_t at = 0; at < n; at += kChunk) {
    const int cols = static_cast<int>(n - at < kChunk ? n - at : kChunk);
    char* from = static_cast<char*>(const_cast<void*>(src)) + at * byte_width(dtype);
    const int whole = cols / kLanes<float> * kLanes<float>;
    load_rows(Piece{from, dtype, 0, 1, 1, whole}, dst + at, cols);
    if (whole == cols) continue;
    float tail[kLanes<float>];  // load_rows writes whole vectors
    from += whole * byte_width(dtype);
    load_rows(Piece{from, dtype, 0, 1, 1, cols - whole}, tail, kLanes<float>);
    __builtin_memcpy(dst + at + whole, tail, static_cast<size_t>(cols - whole) * sizeof(float));
  }
}

static void narrow(const float* src, void* dst, DType dtype, int64_t n) {
  for (int64_t at = 0; at < n; at += kChunk) {
    const int cols = static_cast<int>(n - at < kChunk ? n - at : kChunk);
    char* to = static_cast<char*>(dst) + at * byte_width(dtype);
    const int whole = cols / kLanes<float> * kLanes<float>;
    store_rows(src + at, cols, Piece{to, dtype, 0, 1, 1, whole});
    if (whole == cols) continue;
    float tail[kLanes<float>] = {};  // store_rows reads whole vectors
    __builtin_memcpy(tail, src + at + whole, static_cast<size_t>(cols - whole) * sizeof(float));
    store_rows(tail, kLanes<float>,
               Piece{to + whole * byte_width(dtype), dtype, 0, 1, 1, cols - whole});
  }
}

// With no memory the constructors only count.
template <typename T, template <typename> class Products>
static int64_t forward_bytes(int64_t D, int64_t Dv) {
  Arena<T> arena{nullptr};
  ForwardScratch<T> scratch(arena, Dv);
  Products<T> products(arena, D, Dv);
  return reinterpret_cast<intptr_t>(arena.next);
}

template <typename T, template <typename> class Products>
static int64_t backward_bytes(int64_t D, int64_t Dv) {
  Arena<T> arena{nullptr};
  BackwardScratch<T> scratch(arena, D, Dv);
  Products<T> products(arena, D, Dv);
  return reinterpret_cast<intptr_t>(arena.next);
}

template <typename T>
static int64_t delta_bytes(int64_t D, int64_t Dv) {
  return backward_bytes<T, VectorBackward>(D, Dv) +
         static_cast<int64_t>(sizeof(T)) * kTile * padded(Dv);
}

template <typename T, template <typename> class Forward, template <typename> class Backward>
constexpr Passes passes() {
  return {forward_tile<T, Forward>,  delta_tile<T>,  backward_tile<T, Backward>,
          forward_bytes<T, Forward>, delta_bytes<T>, backward_bytes<T, Backward>};
}

}  // namespace JFT_ISA

extern const Kernels JFT_ISA_TABLE;
const Kernels JFT_ISA_TABLE = {
    JFT_ISA::passes<float, JFT_ISA::VectorForward, JFT_ISA::VectorBackward>(),
    JFT_ISA::passes<double, JFT_ISA::VectorForward, JFT_ISA::VectorBackward>(),
#if defined(__AMX_BF16__)
    JFT_ISA::passes<float, JFT_ISA::AmxForward, JFT_ISA::AmxBackward>(),
#else
    JFT_ISA::passes<float, JFT_ISA::VectorForward, JFT_ISA::VectorBackward>(),
#endif
    JFT_ISA::widen,
    JFT_ISA::narrow,
};

}  // namespace jft::cpu
