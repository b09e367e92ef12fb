#include "hopper_emulated.h"

#include <cstring>

namespace jft::emu {

namespace {

constexpr uint32_t kPoison = 0x7FC0DEADu;  // a NaN that no computation makes

bool is_poison(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u == kPoison;
}

float poison() {
  float x;
  std::memcpy(&x, &kPoison, 4);
  return x;
}

Warpgroup& my_warpgroup() { return block->warpgroups[block->current / 128]; }

float to_float(uint16_t bits, bool half) {
  return half ? cuda::f16_to_float(bits) : cuda::bits_float(static_cast<uint32_t>(bits) << 16);
}

// 128-byte swizzle of an absolute address.
uint32_t swizzled(uint32_t address) { return address ^ (((address >> 7) & 7) << 4); }

// What wgmma and the copy engine read.
const char* async_read(uint32_t address, uint32_t bytes) {
  const char* at = read_shared(address, bytes);
  const uint32_t first = (address - kSharedStart) / 16;
  for (uint32_t c = first; c <= (address - kSharedStart + bytes - 1) / 16; ++c) {
    if (block->writer[c] != 0) {
      fail("wgmma or a bulk copy reads what thread %d wrote without fence.proxy.async",
           block->writer[c] - 1);
    }
  }
  return at;
}

// Element (mn, k) of an operand behind a descriptor: 128-byte swizzle.
float element(uint64_t descriptor, bool mn_major, int mn, int k, bool half) {
  const uint32_t start = static_cast<uint32_t>(descriptor & 0x3FFF) << 4;
  const uint32_t leading = static_cast<uint32_t>((descriptor >> 16) & 0x3FFF) << 4;
  const uint32_t stride = static_cast<uint32_t>((descriptor >> 32) & 0x3FFF) << 4;
  const uint32_t address = mn_major ? start + static_cast<uint32_t>(mn / 64) * leading +
                                          static_cast<uint32_t>(k / 8) * stride +
                                          static_cast<uint32_t>(k % 8 * 128 + mn % 64 * 2)
                                    : start + static_cast<uint32_t>(mn / 8) * stride +
                                          static_cast<uint32_t>(mn % 8 * 128 + k * 2);
  uint16_t bits;
  std::memcpy(&bits, async_read(swizzled(address), 2), 2);
  return to_float(bits, half);
}

}  // namespace

struct Product {
  int n;
  bool half, accumulate, b_transposed;
  Operand a;
  uint64_t b;
  uint32_t values[128][4];
  float* d[128];
  int issued = 0;
};

namespace {

InFlight& in_flight(Fiber& f, float* d) {
  for (InFlight& x : f.in_flight) {
    if (x.registers == d) return x;
  }
  fail("a product lost its accumulators");
}

void run_product(Warpgroup& group, Fiber* threads, Product& p) {
  if (p.issued != 128) fail("%d of 128 threads issued a product", p.issued);
  const int n = p.n;
  std::vector<float>& sum = group.sums[p.d[0]];
  const auto fragment = [n, &p](int t, int e) {  // index in `sum` of element e of thread t
    const int row = 16 * (t / 32) + t % 32 / 4 + 8 * ((e >> 1) & 1);
    return row * n + 8 * (e / 4) + 2 * (t % 4) + (e & 1);
  };
  if (sum.empty()) {
    sum.resize(64 * n);
    for (int t = 0; t < 128; ++t) {
      const InFlight& x = in_flight(threads[t], p.d[t]);
      for (int e = 0; e < n / 2; ++e) sum[fragment(t, e)] = x.saved[e];
    }
  }
  if (static_cast<int>(sum.size()) != 64 * n) fail("one accumulator, two widths");
  static thread_local std::vector<float> a(64 * 16), b;
  b.resize(16 * n);
  for (int k = 0; k < 16; ++k) {
    for (int j = 0; j < n; ++j) b[k * n + j] = element(p.b, p.b_transposed, j, k, p.half);
  }
  if (p.a.registers) {
    for (int t = 0; t < 128; ++t) {
      for (int r = 0; r < 4; ++r) {
        const int row = 16 * (t / 32) + t % 32 / 4 + 8 * (r & 1), k = 2 * (t % 4) + 8 * (r >> 1);
        for (int e = 0; e < 2; ++e) {
          a[row * 16 + k + e] = to_float(static_cast<uint16_t>(p.values[t][r] >> (16 * e)), p.half);
        }
      }
    }
  } else {
    for (int i = 0; i < 64; ++i) {
      for (int k = 0; k < 16; ++k) {
        a[i * 16 + k] = element(p.a.descriptor, p.a.transposed, i, k, p.half);
      }
    }
  }
  for (int i = 0; i < 64; ++i) {
    float* row = sum.data() + i * n;
    if (!p.accumulate) std::fill(row, row + n, 0.f);
    for (int k = 0; k < 16; ++k) {
      const float x = a[i * 16 + k];
      const float* y = b.data() + k * n;
      for (int j = 0; j < n; ++j) row[j] += x * y[j];
    }
  }
  bool last = false;
  for (int t = 0; t < 128; ++t) {
    InFlight& x = in_flight(threads[t], p.d[t]);
    if (--x.products > 0) continue;
    last = true;
    for (int e = 0; e < n / 2; ++e) {
      if (!is_poison(p.d[t][e])) fail("accumulators were written while a product was in flight");
      p.d[t][e] = sum[fragment(t, e)];
    }
    threads[t].in_flight.erase(threads[t].in_flight.begin() + (&x - threads[t].in_flight.data()));
  }
  if (last) group.sums.erase(p.d[0]);
}

void flip_if_complete(PhaseBarrier& b) {
  if (b.missing == 0 && b.bytes == 0) {
    b.missing = b.arrivals;
    ++b.phase;
  }
}

void deliver(uint32_t bar, uint32_t bytes) {
  const auto found = block->phases.find(bar);
  if (found == block->phases.end()) fail("a copy completes on a barrier that does not exist");
  found->second.bytes -= bytes;
  flip_if_complete(found->second);
}

PhaseBarrier& phase(uint32_t bar) {
  const auto found = block->phases.find(bar);
  if (found == block->phases.end()) fail("mbarrier at %u was not initialised", bar);
  return found->second;
}

// Calls visit(offset in the box's shared memory, global address or nullptr) for every element.
template <class Visit>
void each_element(const CUtensorMap& m, const int (&at)[5], Visit visit) {
  uint32_t offset = 0;
  for (uint32_t r = 0; r < m.box[1]; ++r) {
    for (uint32_t c = 0; c < m.box[0]; ++c, offset += 2) {
      const int64_t index[5] = {int64_t(at[0]) + c, int64_t(at[1]) + r, at[2], at[3], at[4]};
      char* p = m.base;
      bool inside = true;
      for (int d = 0; d < 5; ++d) {
        inside = inside && index[d] >= 0 && index[d] < static_cast<int64_t>(m.dims[d]);
        p += index[d] * static_cast<int64_t>(m.strides[d]);
      }
      visit(offset, inside ? p : nullptr);
    }
  }
}

void poison_shared(uint32_t smem, uint32_t bytes) {
  std::memset(read_shared(smem, bytes), 0xFF, bytes);
}

}  // namespace

void issue_product(int n, bool half, float* d, Operand a, uint64_t b, bool b_transposed,
                   bool accumulate) {
  Fiber& me = self();
  Warpgroup& group = my_warpgroup();
  if (!me.fenced) fail("a product without wgmma.fence");
  if (me.issued == group.products.size()) {
    auto p = std::make_shared<Product>();
    p->n = n;
    p->half = half;
    p->accumulate = accumulate;
    p->b_transposed = b_transposed;
    p->a = a;
    p->b = b;
    group.products.push_back(std::move(p));
  }
  Product& p = *group.products[me.issued++];
  if (p.n != n || p.b != b || p.a.descriptor != a.descriptor || p.accumulate != accumulate) {
    fail("threads of a warpgroup issue different products");
  }
  const int t = block->current % 128;
  if (a.registers) std::copy(a.values, a.values + 4, p.values[t]);
  p.d[t] = d;
  ++p.issued;
  for (InFlight& x : me.in_flight) {
    if (x.registers == d) {
      ++x.products;
      return;
    }
  }
  me.in_flight.push_back({d, n / 2, 1, std::vector<float>(d, d + n / 2)});
  std::fill(d, d + n / 2, poison());
}

void fence_products() { self().fenced = true; }

void commit_products() {
  Fiber& me = self();
  Warpgroup& group = my_warpgroup();
  if (me.commits == group.groups.size()) group.groups.push_back(me.issued);
  if (group.groups[me.commits++] != me.issued) fail("threads of a warpgroup commit apart");
}

void wait_products(int pending) {
  Fiber& me = self();
  Warpgroup& group = my_warpgroup();
  me.fenced = false;
  if (++group.arrived < 128) {
    me.wait = Wait::kWarpgroup;
    me.generation = group.generation + 1;
    yield();
    return;
  }
  const size_t commits = me.commits;
  const size_t until = commits > static_cast<size_t>(pending)
                           ? group.groups[commits - static_cast<size_t>(pending) - 1]
                           : 0;
  Fiber* threads = &block->fibers[block->current / 128 * 128];
  for (; group.finished < until; ++group.finished) {
    run_product(group, threads, *group.products[group.finished]);
    group.products[group.finished].reset();
  }
  group.arrived = 0;
  ++group.generation;
}

void named_barrier(int id, int threads, bool wait) {
  if (id < 1 || id > 15) fail("named barrier %d", id);
  NamedBarrier& b = block->named[id];
  if (b.arrived == 0) b.threads = threads;
  if (b.threads != threads) fail("named barrier %d: %d or %d threads?", id, b.threads, threads);
  const uint64_t next = b.generation + 1;
  if (++b.arrived == threads) {
    b.arrived = 0;
    ++b.generation;
    return;
  }
  if (!wait) return;
  self().wait = Wait::kNamed;
  self().object = static_cast<uint32_t>(id);
  self().generation = next;
  yield();
}

void phase_init(uint32_t bar, uint32_t arrivals) {
  if (bar % 8 != 0) fail("mbarrier at %u is not aligned", bar);
  read_shared(bar, 8);
  PhaseBarrier b;
  b.arrivals = b.missing = arrivals;
  block->phases[bar] = b;
}

void phase_arrive(uint32_t bar, uint32_t bytes) {
  PhaseBarrier& b = phase(bar);
  b.bytes += bytes;
  if (--b.missing < 0) fail("mbarrier at %u: more arrivals than it was made for", bar);
  flip_if_complete(b);
}

void phase_wait(uint32_t bar, uint32_t parity) {
  Fiber& me = self();
  while ((phase(bar).phase & 1) == parity) {
    me.wait = Wait::kPhase;
    me.object = bar;
    me.parity = parity;
    yield();
  }
}

char* read_shared(uint32_t address, uint32_t bytes) {
  if (address < kSharedStart || address % std::min(bytes, 16u) != 0) {
    fail("shared address %u of %u bytes is not aligned", address, bytes);
  }
  return shared_at(address - kSharedStart, bytes);
}

char* write_shared(uint32_t address, uint32_t bytes) {
  char* at = read_shared(address, bytes);
  const uint32_t chunk = (address - kSharedStart) / 16;
  block->writer[chunk] = static_cast<uint16_t>(block->current + 1);
  self().unfenced.push_back(chunk);
  return at;
}

void fence_proxy() {
  Fiber& me = self();
  for (uint32_t chunk : me.unfenced) {
    if (block->writer[chunk] == block->current + 1) block->writer[chunk] = 0;
  }
  me.unfenced.clear();
}

void load_box(uint32_t smem, const CUtensorMap* map, uint32_t bar, const int (&at)[5]) {
  if (smem % 1024 != 0) fail("a swizzled box must start at a multiple of 1024");
  const uint32_t bytes = map->box[0] * map->box[1] * 2;
  poison_shared(smem, bytes);
  block->landing.push_back(
      [smem, m = *map, bar, bytes, c0 = at[0], c1 = at[1], c2 = at[2], c3 = at[3], c4 = at[4]] {
        const int where[5] = {c0, c1, c2, c3, c4};
        each_element(m, where, [&](uint32_t offset, const char* from) {
          char* to = read_shared(swizzled(smem + offset), 2);
          if (from) {
            std::memcpy(to, from, 2);
          } else {
            std::memset(to, 0, 2);
          }
        });
        deliver(bar, bytes);
      });
}

void store_box(const CUtensorMap* map, uint32_t smem, const int (&at)[5]) {
  if (smem % 1024 != 0) fail("a swizzled box must start at a multiple of 1024");
  const CUtensorMap m = *map;
  const uint32_t size = m.box[0] * m.box[1] * 2;
  const std::vector<int> where(at, at + 5);
  BulkStore s;
  s.read = [smem, size](std::vector<char>& bytes) {
    bytes.resize(size);
    for (uint32_t offset = 0; offset < size; offset += 2) {
      std::memcpy(bytes.data() + offset, async_read(swizzled(smem + offset), 2), 2);
    }
  };
  s.write = [m, where](const std::vector<char>& bytes) {
    const int back[5] = {where[0], where[1], where[2], where[3], where[4]};
    each_element(m, back, [&](uint32_t offset, char* to) {
      if (to) std::memcpy(to, bytes.data() + offset, 2);
    });
  };
  self().open_stores.push_back(std::move(s));
}

void load_bytes(uint32_t smem, const void* global, uint32_t bytes, uint32_t bar) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0 || smem % 16 != 0) {
    fail("a bulk copy is not aligned to 16 bytes");
  }
  poison_shared(smem, bytes);
  block->landing.push_back([smem, global, bytes, bar] {
    std::memcpy(read_shared(smem, bytes), global, bytes);
    deliver(bar, bytes);
  });
}

void add_floats(float* global, uint32_t smem, uint32_t bytes) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0 || smem % 16 != 0) {
    fail("a bulk reduction is not aligned to 16 bytes");
  }
  BulkStore s;
  s.read = [smem, size = bytes](std::vector<char>& to) {
    to.resize(size);
    std::memcpy(to.data(), async_read(smem, size), size);
  };
  s.write = [global](const std::vector<char>& from) {
    for (size_t i = 0; i < from.size() / 4; ++i) {
      float x;
      std::memcpy(&x, from.data() + 4 * i, 4);
      global[i] += x;
    }
  };
  self().open_stores.push_back(std::move(s));
}

void commit_stores() {
  Fiber& me = self();
  me.stores.push_back(std::move(me.open_stores));
  me.open_stores.clear();
}

void wait_stores(int pending, bool written) {
  Fiber& me = self();
  const size_t keep = static_cast<size_t>(pending);
  for (; me.stores_read + keep < me.stores.size(); ++me.stores_read) {
    for (BulkStore& s : me.stores[me.stores_read]) s.read(s.bytes);
  }
  while (written && me.stores.size() > keep) {
    for (BulkStore& s : me.stores.front()) s.write(s.bytes);
    me.stores.erase(me.stores.begin());
    --me.stores_read;
  }
}

}  // namespace jft::emu

// ---- The runtime and the driver, as far as the host side asks ----

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute == cudaDevAttrMultiProcessorCount) {
    *value = jft::emu::kMultiprocessors;
    return cudaSuccess;
  }
  const char* text = std::getenv("JFT_EMULATED_CAPABILITY");
  const int capability = text ? std::atoi(text) : 80;
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? capability / 10 : capability % 10;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             cudaEntryPointFlags,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  std::memset(data, value, bytes);
  return cudaSuccess;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* base,
                                const cuuint64_t* dims, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
  bool ok = rank == 5 && reinterpret_cast<uintptr_t>(base) % 16 == 0 && box[0] == 64;
  map->base = static_cast<char*>(base);
  for (int d = 0; d < 5; ++d) {
    map->dims[d] = dims[d];
    map->strides[d] = d == 0 ? 2 : strides[d - 1];
    map->box[d] = box[d];
    ok = ok && dims[d] > 0 && dims[d] <= (uint64_t(1) << 32) && box[d] > 0 && box[d] <= 256;
    ok = ok && (d == 0 || (map->strides[d] % 16 == 0 && map->strides[d] < (uint64_t(1) << 40)));
  }
  return ok && box[2] == 1 && box[3] == 1 && box[4] == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
