// Tiles between memory (any dtype, any stride) and scratch (accumulator type, row-major or
// transposed). Reads never pass the end of a row: a tail goes through a small buffer.
#pragma once

#include "call.h"
#include "half.h"
#include "simd.h"

namespace jft::cpu::JFT_ISA {

template <DType dtype>
struct Storage;
template <>
struct Storage<DType::kF16> {
  using Type = uint16_t;
};
template <>
struct Storage<DType::kBF16> {
  using Type = uint16_t;
};
template <>
struct Storage<DType::kF32> {
  using Type = float;
};
template <>
struct Storage<DType::kF64> {
  using Type = double;
};

template <DType dtype>
JFT_INLINE float widen_scalar(uint16_t x) {
  return dtype == DType::kF16 ? f16_to_float(x) : bf16_to_float(x);
}

// A vector of T from kLanes<T> stored values.
template <typename T, DType dtype>
JFT_INLINE Vec<T> load_as(const typename Storage<dtype>::Type* p) {
  constexpr int L = kLanes<T>;
  if constexpr (sizeof(T) == 4 && dtype == DType::kF32) {
    return load(p);
  } else if constexpr (sizeof(T) == 8 && dtype == DType::kF64) {
    return load(p);
  } else if constexpr (sizeof(T) == 4 && dtype == DType::kBF16) {
    U16 half;
    __builtin_memcpy(&half, p, sizeof half);
    return (Vec<T>)(__builtin_convertvector(half, U32) << 16);
#if defined(__AVX512F__)
  } else if constexpr (sizeof(T) == 4 && dtype == DType::kF16) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  } else if constexpr (sizeof(T) == 4 && dtype == DType::kF16) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__)
  } else if constexpr (sizeof(T) == 4 && dtype == DType::kF16) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#endif
  } else {  // not on the path of any benchmark: f16 without hardware, bias of another precision
    T lanes[L];
    for (int n = 0; n < L; ++n) {
      if constexpr (sizeof(typename Storage<dtype>::Type) == 2) {
        lanes[n] = static_cast<T>(widen_scalar<dtype>(p[n]));
      } else {
        lanes[n] = static_cast<T>(p[n]);
      }
    }
    return load(lanes);
  }
}

// The first n values; the other lanes are 0.
template <typename T, DType dtype>
JFT_INLINE Vec<T> load_head(const typename Storage<dtype>::Type* p, int n) {
  typename Storage<dtype>::Type head[kLanes<T>] = {};
  __builtin_memcpy(head, p, static_cast<size_t>(n) * sizeof *p);
  return load_as<T, dtype>(head);
}

template <typename T, DType dtype>
JFT_INLINE void store_as(typename Storage<dtype>::Type* p, Vec<T> v) {
  constexpr int L = kLanes<T>;
  if constexpr (sizeof(T) == 4 && dtype == DType::kF32) {
    store(p, v);
  } else if constexpr (sizeof(T) == 8 && dtype == DType::kF64) {
    store(p, v);
  } else if constexpr (sizeof(T) == 4 && dtype == DType::kBF16) {
    const U32 u = (U32)v;
    const U32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const U32 quiet = (u >> 16) | 0x40u;
    const U32 is_nan = (U32)((I32)(u & 0x7fffffffu) > 0x7f800000);
    const U16 half = __builtin_convertvector((quiet & is_nan) | (rounded & ~is_nan), U16);
    __builtin_memcpy(p, &half, sizeof half);
#if defined(__AVX512F__)
  } else if constexpr (sizeof(T) == 4 && dtype == DType::kF16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  } else if constexpr (sizeof(T) == 4 && dtype == DType::kF16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__aarch64__)
  } else if constexpr (sizeof(T) == 4 && dtype == DType::kF16) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v)));
#endif
  } else {
    for (int n = 0; n < L; ++n) {
      if constexpr (dtype == DType::kF16) {
        p[n] = float_to_f16(static_cast<float>(v[n]));
      } else if constexpr (dtype == DType::kBF16) {
        p[n] = float_to_bf16(static_cast<float>(v[n]));
      } else {
        p[n] = static_cast<typename Storage<dtype>::Type>(v[n]);
      }
    }
  }
}

template <typename T, DType dtype>
JFT_INLINE void store_head(typename Storage<dtype>::Type* p, Vec<T> v, int n) {
  typename Storage<dtype>::Type head[kLanes<T>];
  store_as<T, dtype>(head, v);
  __builtin_memcpy(p, head, static_cast<size_t>(n) * sizeof *p);
}

// A tile that a product can read: where it lies, if it has the right type, else a converted copy.
template <typename T>
struct Rows {
  const T* data;
  int64_t ld;
};

// Calls f.run<dtype>() for the storage type `dtype`.
template <typename F>
JFT_INLINE void with_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kF16:
      return f.template run<DType::kF16>();
    case DType::kBF16:
      return f.template run<DType::kBF16>();
    case DType::kF64:
      return f.template run<DType::kF64>();
    default:
      return f.template run<DType::kF32>();
  }
}

// Asks for row r of a piece that will be loaded soon, a few rows at a time between other work.
struct Prefetch {
  const char* data;
  int64_t row_bytes;
  int rows, lines;

  Prefetch() : data(nullptr), row_bytes(0), rows(0), lines(0) {}
  explicit Prefetch(const Piece& p)
      : data(static_cast<const char*>(p.data)),
        row_bytes(p.row * byte_width(p.dtype)),
        rows(p.rows),
        lines(static_cast<int>((p.cols * byte_width(p.dtype) + 63) / 64)) {}
  JFT_SELF void operator()(int r) const {
    if (r >= rows) return;
    for (int n = 0; n < lines; ++n) __builtin_prefetch(data + r * row_bytes + n * 64);
  }
};

// In-register transposition of kLanes x kLanes: log2(kLanes) rounds of interleaving v[i] with
// v[i + kLanes / 2].
template <typename T>
JFT_INLINE void transpose(Vec<T> (&v)[kLanes<T>]) {
  constexpr int L = kLanes<T>;
  Vec<T> w[L];
#pragma GCC unroll 4
  for (int step = 1; step < L; step *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < L / 2; ++i) zip(v[i], v[i + L / 2], w[2 * i], w[2 * i + 1]);
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) v[i] = w[i];
  }
}

// dst[r * ld + c] = src(r, c), zero for c in [cols, round_up(cols, lanes)). ld >= that.
template <typename T>
struct LoadRows {
  Piece src;
  T* dst;
  int64_t ld;

  template <DType dtype>
  __attribute__((noinline)) void run() const {
    constexpr int L = kLanes<T>;
    const auto* base = static_cast<const typename Storage<dtype>::Type*>(src.data);
    for (int r = 0; r < src.rows; ++r) {
      const auto* p = base + r * src.row;
      T* d = dst + r * ld;
      if (src.col == 0) {  // one value for the whole row
        const Vec<T> x = splat<T>(load_head<T, dtype>(p, 1)[0]);
        for (int c = 0; c < src.cols; c += L) store(d + c, x);
        continue;
      }
      int c = 0;
      for (; c + L <= src.cols; c += L) store(d + c, load_as<T, dtype>(p + c));
      if (c < src.cols) store(d + c, load_head<T, dtype>(p + c, src.cols - c));
    }
  }
};

// dst[c * kTile + r] = src(r, c) for r < kTile, zero for r in [rows, kTile). src.col is 1 or 0.
template <typename T>
struct LoadTransposed {
  Piece src;
  T* dst;

  template <DType dtype>
  __attribute__((noinline)) void run() const {
    constexpr int L = kLanes<T>;
    for (int c = 0; c < src.cols; c += L) {
      for (int r = 0; r < kTile; r += L) {
        if (src.col == 1 && c + L <= src.cols && r + L <= src.rows) {
          block<dtype, true>(r, c);
        } else {
          block<dtype, false>(r, c);
        }
      }
    }
  }

  // kLanes x kLanes values at (r, c); `whole`: all of them exist and lie side by side.
  template <DType dtype, bool whole>
  JFT_SELF void block(int r, int c) const {
    constexpr int L = kLanes<T>;
    const auto* base = static_cast<const typename Storage<dtype>::Type*>(src.data);
    const int width = whole || src.cols - c > L ? L : src.cols - c;
    Vec<T> v[L];
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) {
      const auto* p = base + (r + i) * src.row + c * src.col;
      if (whole) {
        v[i] = load_as<T, dtype>(p);
      } else if (r + i >= src.rows) {
        v[i] = Vec<T>{};
      } else if (src.col == 0) {
        v[i] = splat<T>(load_head<T, dtype>(p, 1)[0]);
      } else {
        v[i] = load_head<T, dtype>(p, width);
      }
    }
    transpose<T>(v);
    T* d = dst + static_cast<int64_t>(c) * kTile + r;
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) {
      if (whole || i < width) store(d + i * kTile, v[i]);
    }
  }
};

// dst(r, c) = src[c * kTile + r] * row_factor[r] (factor may be null).
template <typename T>
struct StoreTransposed {
  const T* src;
  const T* row_factor;
  Piece dst;

  template <DType dtype>
  __attribute__((noinline)) void run() const {
    constexpr int L = kLanes<T>;
    auto* base = static_cast<typename Storage<dtype>::Type*>(dst.data);
    for (int c = 0; c < dst.cols; c += L) {
      const int width = dst.cols - c < L ? dst.cols - c : L;
      for (int r = 0; r < dst.rows; r += L) {
        const Vec<T> factor = row_factor ? load(row_factor + r) : splat<T>(T(1));
        Vec<T> v[L];
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) {
          v[i] =
              i < width ? load(src + static_cast<int64_t>(c + i) * kTile + r) * factor : Vec<T>{};
        }
        transpose<T>(v);
        const int height = dst.rows - r < L ? dst.rows - r : L;
        auto* p = base + r * dst.row + c;
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) {
          if (i >= height) continue;
          if (width == L) {
            store_as<T, dtype>(p + i * dst.row, v[i]);
          } else {
            store_head<T, dtype>(p + i * dst.row, v[i], width);
          }
        }
      }
    }
  }
};

// dst(r, c) = src[r * ld + c].
template <typename T>
struct StoreRows {
  const T* src;
  int64_t ld;
  Piece dst;

  template <DType dtype>
  __attribute__((noinline)) void run() const {
    constexpr int L = kLanes<T>;
    auto* base = static_cast<typename Storage<dtype>::Type*>(dst.data);
    for (int r = 0; r < dst.rows; ++r) {
      const T* s = src + r * ld;
      auto* p = base + r * dst.row;
      int c = 0;
      for (; c + L <= dst.cols; c += L) store_as<T, dtype>(p + c, load(s + c));
      if (c < dst.cols) store_head<T, dtype>(p + c, load(s + c), dst.cols - c);
    }
  }
};

template <typename T>
JFT_INLINE void load_rows(const Piece& src, T* dst, int64_t ld) {
  with_dtype(src.dtype, LoadRows<T>{src, dst, ld});
}
template <typename T>
JFT_INLINE void load_transposed(const Piece& src, T* dst) {
  with_dtype(src.dtype, LoadTransposed<T>{src, dst});
}
template <typename T>
JFT_INLINE void store_transposed(const T* src, const T* row_factor, const Piece& dst) {
  with_dtype(dst.dtype, StoreTransposed<T>{src, row_factor, dst});
}
template <typename T>
JFT_INLINE void store_rows(const T* src, int64_t ld, const Piece& dst) {
  with_dtype(dst.dtype, StoreRows<T>{src, ld, dst});
}

// `copy` forces one, for a tile whose rows must be changed.
template <typename T>
JFT_INLINE Rows<T> tile_rows(const Piece& src, T* scratch, int64_t ld, bool copy) {
  if (!copy && src.dtype == kTypeOf<T>) return {static_cast<const T*>(src.data), src.row};
  load_rows(src, scratch, ld);
  return {scratch, ld};
}

}  // namespace jft::cpu::JFT_ISA
