// Adam step on dense parameters: its arguments, filled by kernels/adam_step.py.
#pragma once

#include <cstdint>

enum MomentKind : int64_t { kDoubles, kFloats, kRounded, kMomentKinds };  // kRounded: floats with moments in bf16

// A parameter, or a part of it. `place` is the index of its first number among all numbers of the optimizer: the random
// bits for a number's moments are a function of (start, its index) only.
struct Parameter {
  void* weight;
  const void* gradient;
  void* mean;
  void* square;
  int64_t size, place;
  int64_t moments;
  uint64_t start;  // key of the hashes of this step
};

// Mirrors AdamNumbers of kernels/reference.py.
struct AdamNumbers {
  double beta2, rest1, rest2, rate, scale, eps, decay, shrink, sign;
};

// Compiled once per instruction set, without FMA contraction: results are bitwise equal. A tile is numbers begin..end.
struct AdamKernels {
  void (*step[kMomentKinds])(const Parameter&, const AdamNumbers&, int64_t begin, int64_t end);
};

extern const AdamKernels kAdamKernels_baseline;
#ifdef SHARDWRIGHT_X86_LEVELS
extern const AdamKernels kAdamKernels_avx2, kAdamKernels_avx512;
#endif

constexpr int64_t kTileBits = 14;  // no tile crosses a multiple of 2^14 places
