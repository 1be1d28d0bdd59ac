// What every entry point shares: the export mark, tiles for threads, and the row kernels of this machine.
#pragma once

#include <omp.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "adam.h"
#include "embedding.h"
#include "pairs.h"

#define SHARDWRIGHT_API extern "C" __attribute__((visibility("default")))

constexpr int64_t kParallelFrom = 1 << 13;  // below this many ids, waking threads costs more than they save

inline int threads_for(int64_t ids) { return ids < kParallelFrom ? 1 : omp_get_max_threads(); }

// The kernels of the best instruction set that this machine has, or of the one asked for with set_level.
const RowKernels& row_kernels();
const PairKernels& pair_kernels();
const AdamKernels& adam_kernels();

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Uninitialised memory, aligned for any vector.
template <typename T>
using Scratch = std::unique_ptr<T[], Free>;
template <typename T>
Scratch<T> scratch(int64_t size) {
  return Scratch<T>(static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 64) / 64 * 64)));
}
