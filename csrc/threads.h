// Shared by all entry points: the export macro, the number of threads, and the kernels of this machine.
#pragma once

#include <omp.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "activations.h"
#include "adam.h"
#include "attention.h"
#include "embedding.h"
#include "pairs.h"
#include "products.h"

#define SHARDWRIGHT_API extern "C" __attribute__((visibility("default")))

constexpr int64_t kParallelFrom = 1 << 13;  // with fewer ids, waking threads costs more than it saves

inline int threads_for(int64_t ids) {
  return ids < kParallelFrom || omp_in_parallel() ? 1 : omp_get_max_threads();
}

// Kernels of the best instruction set of this machine, or of the level selected with set_level.
const RowKernels& row_kernels();
const PairKernels& pair_kernels();
const ProductKernels& product_kernels();
const AdamKernels& adam_kernels();
const ActivationKernels& activation_kernels();
const AttentionKernels& attention_kernels();

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Uninitialized memory, aligned for vectors.
template <typename T>
using Scratch = std::unique_ptr<T[], Free>;
template <typename T>
Scratch<T> scratch(int64_t size) {
  return Scratch<T>(static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 64) / 64 * 64)));
}
