#include "launch.h"

#include <cstring>
#include <vector>

#include "half.h"
#include "isa.h"
#include "jobs.h"
#include "workspace.h"

namespace jft::cpu {
namespace {

int64_t elements(const Problem& p, const Tensor& t, int64_t heads, int64_t rows, int64_t cols) {
  // A stride of 0 marks a dimension of size 1 (or one beside a dimension of size 0).
  int64_t count = (t.head ? heads : 1) * (t.row ? rows : 1) * (t.col ? cols : 1);
  for (int d = 0; d < p.batch_dims; ++d) count *= t.batch[d] ? p.batch_size[d] : 1;
  return count;
}

// Whether the kernel sums this gradient over leading dimensions.
bool sums_batch(const Problem& p, const Tensor& t) {
  for (int d = 0; d < p.batch_dims; ++d) {
    if (t.batch[d] == 0 && p.batch_size[d] != 1) return true;
  }
  return false;
}

void store_value(const Tensor& t, int64_t n, double x) {
  switch (t.dtype) {
    case DType::kF64:
      static_cast<double*>(t.data)[n] = x;
      break;
    case DType::kF16:
      static_cast<uint16_t*>(t.data)[n] = float_to_f16(static_cast<float>(x));
      break;
    case DType::kBF16:
      static_cast<uint16_t*>(t.data)[n] = float_to_bf16(static_cast<float>(x));
      break;
    default:
      static_cast<float*>(t.data)[n] = static_cast<float>(x);
  }
}

// A result that several units add to: summed where it lies if it has the accumulator's type, else
// in a buffer of the same shape that is rounded once at the end.
template <typename T>
class Sum {
 public:
  Sum(const Tensor& result, int64_t count) : result_(result), count_(count), at_(result) {
    if (result.dtype == accumulator_type()) {
      std::memset(result.data, 0, static_cast<size_t>(count) * sizeof(T));
    } else {
      buffer_.assign(static_cast<size_t>(count), T(0));
      at_.data = buffer_.data();
      at_.dtype = accumulator_type();
    }
  }
  const Tensor& tensor() const { return at_; }
  void finish() const {
    if (buffer_.empty()) return;
    if constexpr (sizeof(T) == 4) {
      if (result_.dtype != DType::kF64) {
        return kernels().narrow(buffer_.data(), result_.data, result_.dtype, count_);
      }
    }
    for (int64_t n = 0; n < count_; ++n) {
      store_value(result_, n, static_cast<double>(buffer_[static_cast<size_t>(n)]));
    }
  }
  static constexpr DType accumulator_type() { return sizeof(T) == 8 ? DType::kF64 : DType::kF32; }

 private:
  Tensor result_;
  int64_t count_;
  Tensor at_;
  std::vector<T> buffer_;
};

// result[b, h, e * step] += parts[b, h, e], in this order whatever the threads did.
template <typename T>
void reduce_parts(const Problem& p, const Tensor& result, int64_t result_count,
                  const std::vector<T>& parts, int64_t per_head, int64_t step) {
  std::vector<double> sums(static_cast<size_t>(result_count), 0.0);
  const T* part = parts.data();
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t h = 0; h < p.Hq; ++h) {
      double* sum = sums.data() + batch_offset(p, result, b) + h * result.head;
      for (int64_t e = 0; e < per_head; ++e) sum[e * step] += static_cast<double>(*part++);
    }
  }
  for (int64_t n = 0; n < result_count; ++n) {
    store_value(result, n, sums[static_cast<size_t>(n)]);
  }
}

template <typename T>
bool run_backward(const Problem& p, Executor& pool) {
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  BackwardJob job{};
  job.p = &p;
  job.q_tiles = tiles(p.Sq);
  job.k_tiles = tiles(p.Sk);
  job.units = p.B * p.Hkv;

  std::vector<T> delta(size(p.B * p.Hq * p.Sq));
  std::vector<int64_t> progress(size(job.units * job.k_tiles), 0), unit_done(size(job.units), 0);
  job.delta = delta.data();
  job.progress = progress.data();
  job.unit_done = unit_done.data();

  // dq, dk, dv
  std::vector<Sum<T>> sums;
  sums.reserve(4);
  const auto place = [&](const Tensor& result, int64_t count, bool& across_units) -> Tensor {
    across_units = sums_batch(p, result);
    if (!across_units) return result;
    sums.emplace_back(result, count);
    return sums.back().tensor();
  };
  const Tensor &dq = p.out[kResDQ], &dk = p.out[kResDK], &dv = p.out[kResDV];
  job.dq = place(dq, elements(p, dq, p.Hq, p.Sq, p.D), job.dq_across_units);
  job.dk = place(dk, elements(p, dk, p.Hkv, p.Sk, p.D), job.dk_across_units);
  job.dv = place(dv, elements(p, dv, p.Hkv, p.Sk, p.Dv), job.dv_across_units);
  std::vector<T> slots;
  if (!job.dq_across_units && dq.dtype != Sum<T>::accumulator_type()) {
    job.dq_in_slots = true;
    const int64_t slot = p.G * p.Sq * padded(p.D);
    job.slots = dq_slots(slot * static_cast<int64_t>(sizeof(T)), pool.threads(), job.units);
    slots.resize(size(job.slots * slot));
    job.dq.data = slots.data();
    job.dq.dtype = Sum<T>::accumulator_type();
  }

  // dbias
  const Tensor& dbias = p.out[kResDBias];
  const int64_t dbias_count = dbias.data ? elements(p, dbias, p.Hq, p.Sq, p.Sk) : 0;
  std::vector<T> dbias_parts;
  if (dbias.data && dbias.row && dbias.col) {
    job.dbias_tiles = true;
    job.dbias_across_units = sums_batch(p, dbias) || dbias.head == 0;
    if (job.dbias_across_units) {
      sums.emplace_back(dbias, dbias_count);
      job.dbias = sums.back().tensor();
    } else {
      job.dbias = dbias;
      std::memset(dbias.data, 0, size(dbias_count * byte_width(dbias.dtype)));
    }
  } else if (dbias.data) {
    dbias_parts.assign(size(p.B * p.Hq * (dbias.row ? p.Sq : p.Sk)), T(0));
    (dbias.row ? job.dbias_rows : job.dbias_keys) = dbias_parts.data();
  }

  // dalibi, dsinks
  const Tensor &dalibi = p.out[kResDAlibi], &dsinks = p.out[kResDSinks];
  std::vector<T> dalibi_parts, dsink_parts;
  if (dalibi.data) {
    dalibi_parts.assign(size(p.B * p.Hq * job.k_tiles), T(0));
    job.dalibi_part = dalibi_parts.data();
  }
  if (dsinks.data) {
    dsink_parts.assign(size(p.B * p.Hq * job.q_tiles), T(0));
    job.dsink_part = dsink_parts.data();
  }

  const Passes& k = passes_for(kernels(), p.dtype);
  const bool ok = run_tasks(pool, p.B * p.Hq * job.q_tiles, k.delta_bytes(p.D, p.Dv),
                            [&](int64_t n, void* memory) { k.delta(job, n, memory); }) &&
                  run_tasks(pool, job.units * job.k_tiles, k.backward_bytes(p.D, p.Dv),
                            [&](int64_t n, void* memory) { k.backward(job, n, memory); });
  if (!ok) return false;

  for (const Sum<T>& sum : sums) sum.finish();
  if (!dbias_parts.empty() || (dbias.data && !job.dbias_tiles)) {
    reduce_parts(p, dbias, dbias_count, dbias_parts, dbias.row ? p.Sq : p.Sk,
                 dbias.row ? dbias.row : dbias.col);
  }
  if (dalibi.data) {
    reduce_parts(p, dalibi, elements(p, dalibi, p.Hq, 1, 1), dalibi_parts, job.k_tiles, 0);
  }
  if (dsinks.data) {
    reduce_parts(p, dsinks, elements(p, dsinks, p.Hq, 1, 1), dsink_parts, job.q_tiles, 0);
  }
  return true;
}

}  // namespace

bool launch_forward(const Problem& p, Executor& pool) {
  const ForwardJob job{&p, (tiles(p.Sq) + kQueryTiles - 1) / kQueryTiles};
  const Passes& k = passes_for(kernels(), p.dtype);
  return run_tasks(pool, p.B * p.Hq * job.tasks_per_head, k.forward_bytes(p.D, p.Dv),
                   [&](int64_t n, void* memory) { k.forward(job, n, memory); });
}

bool launch_backward(const Problem& p, Executor& pool) {
  return p.dtype == DType::kF64 ? run_backward<double>(p, pool) : run_backward<float>(p, pool);
}

}  // namespace jft::cpu
