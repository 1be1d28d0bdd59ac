// Selects the kernels of the best instruction set of this machine.

#include <atomic>
#include <cstring>

#include "threads.h"

namespace {

struct Level {
  const char* name;
  const RowKernels* rows;
  const PairKernels* pairs;
  const ProductKernels* products;
  const AdamKernels* adam;
  const ActivationKernels* activations;
  const AttentionKernels* attention;
  bool (*here)();
};

const Level kLevels[] = {
#ifdef SHARDWRIGHT_X86_LEVELS
    {"avx512", &kRowKernels_avx512, &kPairKernels_avx512, &kProductKernels_avx512, &kAdamKernels_avx512,
     &kActivationKernels_avx512, &kAttentionKernels_avx512,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
     }},
    {"avx2", &kRowKernels_avx2, &kPairKernels_avx2, &kProductKernels_avx2, &kAdamKernels_avx2, &kActivationKernels_avx2,
     &kAttentionKernels_avx2,
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
     }},
#endif
    {"baseline", &kRowKernels_baseline, &kPairKernels_baseline, &kProductKernels_baseline, &kAdamKernels_baseline,
     &kActivationKernels_baseline, &kAttentionKernels_baseline,
     [] { return true; }},
};

const Level* best() {
  for (const Level& level : kLevels)
    if (level.here()) return &level;
  return nullptr;
}

std::atomic<const Level*> chosen{nullptr};

const Level* level() {
  const Level* now = chosen.load(std::memory_order_relaxed);
  if (!now) chosen.store(now = best(), std::memory_order_relaxed);
  return now;
}

}  // namespace

const RowKernels& row_kernels() { return *level()->rows; }
const PairKernels& pair_kernels() { return *level()->pairs; }
const ProductKernels& product_kernels() { return *level()->products; }
const AdamKernels& adam_kernels() { return *level()->adam; }
const ActivationKernels& activation_kernels() { return *level()->activations; }
const AttentionKernels& attention_kernels() { return *level()->attention; }

SHARDWRIGHT_API const char* shardwright_level() { return level()->name; }

// Selects a level by name; returns 0 if the level is unknown or this machine does not support it.
SHARDWRIGHT_API int64_t shardwright_set_level(const char* name) {
  for (const Level& level : kLevels)
    if (!std::strcmp(level.name, name) && level.here()) {
      chosen.store(&level, std::memory_order_relaxed);
      return 1;
    }
  return 0;
}
