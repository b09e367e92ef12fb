// Error texts of the FFI handlers: "flash_attention: <argument> <what is required>, got <what
// came>". Python checks every argument first (validation.py); these catch a caller that went around
// it.
#pragma once

#include <cstdint>
#include <string>

#include "problem.h"
#include "xla/ffi/api/ffi.h"

namespace jft {

namespace ffi = ::xla::ffi;

inline const char* operand_name(int op) {
  static const char* const names[kNumOperands] = {"q",
                                                  "k",
                                                  "v",
                                                  "q_offset",
                                                  "window_left",
                                                  "window_right",
                                                  "q_segment_ids",
                                                  "kv_segment_ids",
                                                  "q_lengths",
                                                  "kv_lengths",
                                                  "mask",
                                                  "bias",
                                                  "alibi_slopes",
                                                  "sinks",
                                                  "dropout_seed",
                                                  "dropout_origin",
                                                  "o",
                                                  "row_max",
                                                  "row_log_sum",
                                                  "do",
                                                  "dlse"};
  return names[op];
}

inline std::string shape_text(const ffi::AnyBuffer& buffer) {
  std::string text = "[";
  auto dims = buffer.dimensions();
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

inline const char* dtype_text(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF32:
      return "float32";
    case DType::kF64:
      return "float64";
    case DType::kI32:
      return "int32";
    case DType::kU32:
      return "uint32";
    case DType::kBool:
      return "bool";
    case DType::kOther:
      return "another type";
  }
  return "?";
}

inline DType dtype_of(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F16:
      return DType::kF16;
    case ffi::DataType::BF16:
      return DType::kBF16;
    case ffi::DataType::F32:
      return DType::kF32;
    case ffi::DataType::F64:
      return DType::kF64;
    case ffi::DataType::S32:
      return DType::kI32;
    case ffi::DataType::U32:
      return DType::kU32;
    case ffi::DataType::PRED:
      return DType::kBool;
    default:
      return DType::kOther;
  }
}

inline ffi::Error invalid(const std::string& argument, const std::string& required,
                          const std::string& got) {
  return ffi::Error::InvalidArgument("flash_attention: " + argument + " " + required + ", got " +
                                     got);
}

}  // namespace jft
