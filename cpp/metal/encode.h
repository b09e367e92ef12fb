// Encodes one attention call into command encoders. Knows buffers and offsets, not who owns them: a
// host other than JAX's CPU client (MLX, a Metal PJRT plugin) only has to fill CallBuffers.
#pragma once

#include <Metal/Metal.hpp>
#include <string>

#include "pipelines.h"
#include "problem.h"

namespace jft::metal {

struct Slice {
  MTL::Buffer* buffer = nullptr;
  NS::UInteger offset = 0;  // bytes
};

struct CallBuffers {
  Slice in[kNumOperands];  // those that came
  Slice out[kNumResults];
  Slice delta, sink_terms, alibi_terms;  // scratch f32 [B, Hq, Sq], see scratch_bytes
  Slice dummy;  // anything: bound where an optional integer operand is absent
};

// Where encoders come from. Work is cut into pieces that stay well below the GPU watchdog's limit.
class Commands {
 public:
  virtual ~Commands() = default;
  virtual MTL::ComputeCommandEncoder* encoder() = 0;
  virtual void cut() = 0;  // ends the current command buffer; the next one runs after it
};

// "" or the reason why the Metal kernels do not take this call.
std::string unsupported(const Problem& p);

// Bytes of `delta`, and of each of the two term arrays that the gradients need.
std::size_t scratch_bytes(const Problem& p);
bool needs_sink_terms(const Problem& p);
bool needs_alibi_terms(const Problem& p);

// Both return "" or an error text.
std::string encode_forward(const Problem& p, const CallBuffers& buffers, Pipelines& pipelines,
                           Commands& commands);
std::string encode_backward(const Problem& p, const CallBuffers& buffers, Pipelines& pipelines,
                            Commands& commands);

// Multiplications and additions after which the work is cut (tests lower it).
extern double flops_per_dispatch;

}  // namespace jft::metal
