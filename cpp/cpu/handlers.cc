// The two FFI targets of the CPU backend: decode, check, launch.
#include "handlers.h"

#include "ffi_problem.h"
#include "reference.h"

namespace jft::cpu {

static ffi::Error forward(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs,
                          ffi::ThreadPool) {
  Problem p;
  if (auto e = problem_from_ffi(Pass::kForward, args, rets, attrs, 0, p); e.failure()) return e;
  reference::forward(p);
  return ffi::Error::Success();
}

static ffi::Error backward(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs,
                           ffi::ThreadPool) {
  Problem p;
  if (auto e = problem_from_ffi(Pass::kBackward, args, rets, attrs, 0, p); e.failure()) return e;
  reference::backward(p);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(ForwardHandler, forward,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs()
                                  .Ctx<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(BackwardHandler, backward,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs()
                                  .Ctx<ffi::ThreadPool>());

}  // namespace jft::cpu
