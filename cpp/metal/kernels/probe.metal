// Which element of an 8x8 matrix a lane holds is not documented by Apple; common.h counts on the
// layout of all GPUs so far. The host runs this once per process and refuses a device with another
// layout.
#include "common.h"

// out[i] = i iff every lane holds the elements that fragment_position says.
kernel void flash_probe(device float* out [[buffer(kBufO)]],
                        threadgroup float* matrix [[threadgroup(0)]],
                        uint lane [[thread_index_in_simdgroup]]) {
  matrix[2 * lane] = float(2 * lane);
  matrix[2 * lane + 1] = float(2 * lane + 1);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  Fragment f;
  simdgroup_load(f, matrix, 8);
  const At at = fragment_position(lane);
  for (int e = 0; e < 2; ++e) out[8 * at.x + at.y + e] = get(f, e);
}
