// FFI handlers: decode, check, launch on XLA's stream. They allocate nothing, read nothing back and
// never synchronise, so XLA may record them into CUDA graphs (the command-buffer trait).
#include "handlers.h"

#include "ffi_problem.h"
#include "run.h"

namespace jft::cuda {

namespace {

ffi::Error run(Pass pass, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
               const ffi::Dictionary& attrs, Stream stream) {
  Problem p;
  int results = 0;
  if (auto e = problem_from_ffi(pass, args, rets, attrs, /*extra_results=*/1, p, &results);
      e.failure()) {
    return e;
  }
  auto workspace = rets.get<ffi::AnyBuffer>(static_cast<size_t>(results));
  if (!workspace.has_value()) return workspace.error();
  void* scratch = (*workspace)->untyped_data();
  const int64_t bytes = static_cast<int64_t>((*workspace)->size_bytes());
  const std::string error = pass == Pass::kForward ? run_forward(p, scratch, bytes, stream)
                                                   : run_backward(p, scratch, bytes, stream);
  return error.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kInternal, error);
}

#if defined(JFT_EMULATE)
ffi::Error forward(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return run(Pass::kForward, args, rets, attrs, nullptr);
}
ffi::Error backward(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return run(Pass::kBackward, args, rets, attrs, nullptr);
}
#define JFT_BIND ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs()
#else
ffi::Error forward(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs,
                   cudaStream_t stream) {
  return run(Pass::kForward, args, rets, attrs, stream);
}
ffi::Error backward(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs,
                    cudaStream_t stream) {
  return run(Pass::kBackward, args, rets, attrs, stream);
}
#define JFT_BIND \
  ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs().Ctx<ffi::PlatformStream<cudaStream_t>>()
#endif

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JftCudaForward, forward, JFT_BIND,
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(JftCudaBackward, backward, JFT_BIND,
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jft::cuda
