// The border between a compiled .metal file and the emulator's machine: plain C, so that the same
// header serves the shim (C++14, no standard library) and the machine (C++17).
#pragma once

struct EmuApi {
  // Every lane of a simdgroup calls this with the same `name` and `line`; when all 32 have arrived,
  // `compute` runs once over their arguments, and every lane goes on.
  void (*collective)(void (*compute)(void* const in[32], void* const out[32]), const char* name,
                     int line, void* in, void* out);
  void (*threadgroup_barrier)(int flags, int line);
  void (*simdgroup_barrier)(int flags, int line);
  // Inserted by compile.py before each access to device (1) and threadgroup (3) memory.
  void (*device_access)(unsigned long address, unsigned long bytes, int is_write);
  void (*threadgroup_access)(unsigned long address, unsigned long bytes, int is_write);
  void (*matrix_op)();
  unsigned (*lane)();  // of the calling thread, in its simdgroup
};

struct EmuThread {
  unsigned threadgroup_position_in_grid[3];
  unsigned threads_per_threadgroup[3];
  unsigned threadgroups_per_grid[3];
  unsigned thread_position_in_threadgroup[3];
  unsigned thread_index_in_threadgroup;
  unsigned thread_index_in_simdgroup;
  unsigned simdgroup_index_in_threadgroup;
};

struct EmuArguments {
  void* buffer[31];
  void* arena[8];  // threadgroup memory
  struct EmuThread ids;
};
