// The element-wise part of every backward kernel:
//     p = exp(s - max - ln sum),  dp' = Z dp,  ds = p (dp' - delta).
#pragma once

#include "../device/logits.h"

namespace jft::cuda {

// In: s = q k^T, dp = do v^T. Out: s = p Z (for dv), dp = ds times the softcap's slope (for dq,
// dk). `bits`: visible elements, if `masked`; `keep`: elements that dropout keeps, if `dropped`;
// `facts(m, n, e)`: RowFacts of an element's query row; `on_ds(m, n, e, ds)`
// sees ds before the softcap (dbias, dalibi).
template <bool kGeneral, bool kKeysFirst, int kM, int kN, class Facts, class OnDs>
JFT_DEV void gradient_tile(float (&s)[kM][kN][4], float (&dp)[kM][kN][4], const Params& params,
                           const LogitMath& logit, const Place<kKeysFirst>& at,
                           const u32 (&bits)[kM], bool masked, const u32 (&keep)[kM], bool dropped,
                           Facts facts, OnDs on_ds) {
  float cap_slope[kM][kN][4];
  if constexpr (kGeneral) logit.form(s, cap_slope, at);
  JFT_UNROLL
  for (int n = 0; n < kN; ++n) {
    JFT_UNROLL
    for (int m = 0; m < kM; ++m) {
      JFT_UNROLL
      for (int e = 0; e < 4; ++e) {
        const RowFacts f = facts(m, n, e);
        float p, z = 1.0f;
        if constexpr (kGeneral) {
          p = exp2_fast(mul_rn(add_rn(s[m][n][e], -f.max), kLog2e) - f.log_sum);
          if (dropped) z = keep[m] >> (4 * n + e) & 1 ? params.dropout_scale : 0.0f;
        } else {
          p = exp2_fast(fma_rn(s[m][n][e], params.scale_log2, -f.max) - f.log_sum);
        }
        float g = dp[m][n][e];
        if constexpr (kGeneral) g = z == 0.0f ? 0.0f : g * z;
        float ds = p * (g - f.delta);
        float through = kGeneral ? ds * cap_slope[m][n][e] : ds;
        if (masked && !(bits[m] >> (4 * n + e) & 1)) {
          // Select: a hidden key's products may be NaN.
          p = ds = through = 0.0f;
        }
        on_ds(m, n, e, ds);
        s[m][n][e] = kGeneral ? p * z : p;
        dp[m][n][e] = through;
      }
    }
  }
}

}  // namespace jft::cuda
