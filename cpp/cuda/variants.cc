// The dispatch table, from the generated list of variants.
#include "launch/launch.h"
#include "tiles.h"

namespace jft::cuda {

static_assert(all_tiles_fit(), "a tile row needs more shared memory than the smallest GPU has");

namespace {

struct Variant {
  DType dtype;
  bool full_float32;
  KernelSet kernels;
};

// What selects an element type; R: the type of its row pass.
template <DType kDType, bool kFullFloat32, class R>
struct Selection {
  static constexpr DType kType = kDType;
  static constexpr bool kFull = kFullFloat32;
  using Rows = R;
};
template <class T>
struct Selects;
template <>
struct Selects<F16> : Selection<DType::kF16, false, F16> {};
template <>
struct Selects<BF16> : Selection<DType::kBF16, false, BF16> {};
template <>
struct Selects<TF32> : Selection<DType::kF32, false, TF32> {};
template <>
struct Selects<TF32x3> : Selection<DType::kF32, true, TF32> {};

template <class T, int kHead>
constexpr Variant variant(const char* name) {
  using S = Selects<T>;
  using H = HeadKernels<T, kHead>;
  return {S::kType,
          S::kFull,
          {H::forward, H::dq, H::dkdv, H::bias_gradient, RowKernels<typename S::Rows>::rows,
           S::kType == DType::kF32 ? 4 : 2, kHead, name}};
}

#define JFT_VARIANT(type, head) variant<type, head>(#type "_" #head),
// Ascending heads within a type (variants.cmake): the first that fits is the smallest.
const Variant kVariants[] = {
#include "variants.inc"
};
#undef JFT_VARIANT

}  // namespace

const KernelSet* find_kernels(DType dtype, bool full_float32, int64_t features) {
  const bool full = full_float32 && dtype == DType::kF32;
  for (const Variant& v : kVariants) {
    if (v.dtype == dtype && v.full_float32 == full && features <= v.kernels.head) {
      return &v.kernels;
    }
  }
  return nullptr;
}

}  // namespace jft::cuda
