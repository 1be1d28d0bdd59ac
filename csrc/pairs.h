// Dot products of all pairs of a sample's vectors, and their gradient, without a tensor of square matrices.
#pragma once

#include "embedding.h"

// Kernels for a sample with `vectors` rows of `dim` numbers; pairs are (0, 1), (0, 2), ... (1, 2), ... `scratch` has
// `pairs_scratch` numbers. Compiled once per instruction set, with FMA contraction: unlike the row kernels, results may
// differ in the last bit between instruction sets.
template <typename T>
struct PairKernelsOf {
  void (*dots)(const T* rows, int64_t vectors, int64_t dim, T* scratch, T* dots);
  void (*gradients)(const T* rows, const T* for_dots, int64_t vectors, int64_t dim, T* scratch, T* for_rows);
};

struct PairKernels {
  PairKernelsOf<float> of_floats;
  PairKernelsOf<double> of_doubles;
};

extern const PairKernels kPairKernels_baseline;
#ifdef SHARDWRIGHT_X86_LEVELS
extern const PairKernels kPairKernels_avx2, kPairKernels_avx512;
#endif

constexpr int64_t pairs_of(int64_t vectors) { return vectors * (vectors - 1) / 2; }
constexpr int64_t pairs_scratch(int64_t vectors, int64_t dim) { return (vectors + dim) * padded(vectors); }
