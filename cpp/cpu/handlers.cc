// The two FFI targets of the CPU backend: decode, check, launch.
#include "handlers.h"

#include <exception>
#include <utility>

#include "ffi_problem.h"
#include "launch.h"

namespace jft::cpu {
namespace {

// XLA's intra-op pool.
class XlaPool : public Executor {
 public:
  explicit XlaPool(ffi::ThreadPool pool) : pool_(std::move(pool)) {}
  int64_t threads() const override {
    const int64_t n = pool_.num_threads();
    return n > 1 ? n : 1;
  }
  void schedule(std::function<void()> work) override { pool_.Schedule(std::move(work)); }

 private:
  ffi::ThreadPool pool_;
};

ffi::Error run(Pass pass, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
               const ffi::Dictionary& attrs, const ffi::ThreadPool& threads) {
  try {
    Problem p;
    if (auto e = problem_from_ffi(pass, args, rets, attrs, 0, p); e.failure()) return e;
    XlaPool pool(threads);
    const bool ok = pass == Pass::kForward ? launch_forward(p, pool) : launch_backward(p, pool);
    if (ok) return ffi::Error::Success();
  } catch (const std::exception&) {  // only std::bad_alloc can get here
  }
  return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                    "flash_attention: the CPU kernels ran out of memory for scratch");
}

ffi::Error forward(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs,
                   ffi::ThreadPool pool) {
  return run(Pass::kForward, args, rets, attrs, pool);
}

ffi::Error backward(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs,
                    ffi::ThreadPool pool) {
  return run(Pass::kBackward, args, rets, attrs, pool);
}

auto binding() {
  return ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs().Ctx<ffi::ThreadPool>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ForwardHandler, forward, binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(BackwardHandler, backward, binding());

}  // namespace jft::cpu
