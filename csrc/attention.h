// Attention within short sequences: SiLU weights with a bias by distance, or softmax weights of all pairs.
#pragma once

#include <cstdint>

// One head of one sequence with `positions` rows. Widths of keys and values are multiples of 16.
struct AttentionHead {
  const float *queries, *keys, *values;
  int64_t query_stride, key_stride, value_stride;  // of rows
  int64_t positions, key_width, value_width;
  int64_t out_stride;  // of rows of the result and of its gradient
};

// The gradients of one head; rows of queries and keys have `key_stride` numbers, those of values `value_stride`.
struct AttentionGradients {
  float *queries, *keys, *values;
  int64_t key_stride, value_stride;
};

// Query i has the weight SiLU(q_i . k_j + bias[min(i - j, distances - 1)]) / positions of each key j <= i, or
// softmax over all keys j of scale * q_i . k_j. `scratch` has `scratch_size` numbers. `bias_gradient` is added to.
// Compiled once per instruction set, with FMA contraction: instruction sets may differ in the last bit.
struct AttentionKernels {
  int64_t (*scratch_size)(int64_t positions, int64_t key_width, int64_t value_width);
  void (*silu)(const AttentionHead& head, const float* bias, int64_t distances, float* scratch, float* out);
  void (*silu_gradients)(const AttentionHead& head, const float* bias, int64_t distances, const float* gradient,
                         float* scratch, const AttentionGradients& result, float* bias_gradient);
  void (*softmax)(const AttentionHead& head, float scale, float* scratch, float* out);
  void (*softmax_gradients)(const AttentionHead& head, float scale, const float* gradient, float* scratch,
                            const AttentionGradients& result);
};

extern const AttentionKernels kAttentionKernels_baseline;
#ifdef SHARDWRIGHT_X86_LEVELS
extern const AttentionKernels kAttentionKernels_avx2, kAttentionKernels_avx512;
#endif
