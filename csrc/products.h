// Products of groups of rows, each group with a matrix of its own, as the experts of a mixture have.
#pragma once

#include <cstdint>

// Kernels for blocks of both factors, packed in the order in which products read them: of the left matrix up to `height`
// rows, as [inner][height] numbers; of the right matrix a panel of up to `width` columns, as [inner][width] numbers.
// Missing columns are zero.
//
// Each number of a result is a sum in the order of the inner dimension, in one accumulator, also across calls with
// `add`. So it does not depend on the number of rows or columns beside it, nor on how the rows are split into calls.
// Compiled once per instruction set, with FMA contraction: instruction sets may differ in the last bit.
template <typename T>
struct ProductKernelsOf {
  int64_t height, width;
  // Any number of rows, block after block; number (row, k) is from[row * row_step + k * inner_step].
  void (*pack_left)(const T* from, int64_t row_step, int64_t inner_step, int64_t rows, int64_t inner, T* blocks);
  // From [inner][columns], or transposed from [columns][inner]; fetches as many numbers from `next` into the cache.
  void (*pack_right)(const T* from, const T* next, int64_t stride, int64_t inner, int64_t columns, T* panel);
  void (*pack_transposed)(const T* from, const T* next, int64_t stride, int64_t inner, int64_t columns, T* panel);
  // out[rows][columns] = or += blocks x panel.
  void (*multiply)(const T* blocks, int64_t rows, const T* panel, int64_t inner, T* out, int64_t out_stride,
                   int64_t columns, bool add);
};

struct ProductKernels {
  ProductKernelsOf<float> of_floats;
  ProductKernelsOf<double> of_doubles;
};

extern const ProductKernels kProductKernels_baseline;
#ifdef SHARDWRIGHT_X86_LEVELS
extern const ProductKernels kProductKernels_avx2, kProductKernels_avx512;
#endif
