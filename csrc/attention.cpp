// Attention within short sequences, in parallel over sequences and heads.

#include "attention.h"

#include <algorithm>

#include "threads.h"

namespace {

// The arguments of a call, as kernels/native_attention.py packs them. Heads of a row are one after the other.
struct Call {
  const float *queries, *keys, *values;
  int64_t query_stride, key_stride, value_stride;
  const int64_t* starts;  // of each sequence, and the end of the last; null: all have `length` rows
  int64_t length, sequences, heads, key_width, value_width;
};

template <typename Run>
void for_each_head(const Call& call, Run run) {
  const AttentionKernels& kernels = attention_kernels();
  int64_t longest = call.length;
  for (int64_t i = 0; call.starts && i < call.sequences; ++i)
    longest = std::max(longest, call.starts[i + 1] - call.starts[i]);
  const int64_t size = kernels.scratch_size(longest, call.key_width, call.value_width), num = call.sequences * call.heads;
  const bool is_small = num * longest * longest * (call.key_width + call.value_width) < 1 << 20;
#pragma omp parallel num_threads(is_small || omp_in_parallel() ? 1 : omp_get_max_threads())
  {
    const Scratch<float> memory = scratch<float>(size);
    std::fill_n(memory.get(), size, 0.0f);
#pragma omp for schedule(dynamic, 16)
    for (int64_t i = 0; i < num; ++i) {
      const int64_t sequence = i / call.heads, head = i % call.heads;
      const int64_t first = call.starts ? call.starts[sequence] : sequence * call.length;
      const int64_t positions = call.starts ? call.starts[sequence + 1] - first : call.length;
      const AttentionHead of{call.queries + first * call.query_stride + head * call.key_width,
                             call.keys + first * call.key_stride + head * call.key_width,
                             call.values + first * call.value_stride + head * call.value_width,
                             call.query_stride, call.key_stride, call.value_stride, positions, call.key_width,
                             call.value_width, call.heads * call.value_width};
      if (positions) run(kernels, of, first, sequence, head, memory.get());
    }
  }
}

AttentionGradients gradients_of(const Call& call, float* const* to, int64_t key_stride, int64_t value_stride,
                                int64_t first, int64_t head) {
  const int64_t key_at = first * key_stride + head * call.key_width;
  return {to[0] + key_at, to[1] + key_at, to[2] + first * value_stride + head * call.value_width, key_stride, value_stride};
}

}  // namespace

// bias: (heads, distances).
SHARDWRIGHT_API void shardwright_silu_attention(const void* arguments, const float* bias, int64_t distances, float* out) {
  const Call& call = *static_cast<const Call*>(arguments);
  for_each_head(call, [&](const AttentionKernels& kernels, const AttentionHead& of, int64_t first, int64_t, int64_t head,
                          float* memory) {
    kernels.silu(of, bias + head * distances, distances, memory, out + first * of.out_stride + head * call.value_width);
  });
}

// to: gradients of queries, keys and values. bias_gradients: (sequences, heads, distances), zeros before the call.
SHARDWRIGHT_API void shardwright_silu_attention_gradients(const void* arguments, const float* bias, int64_t distances,
                                                          const float* gradient, float* const* to,
                                                          float* bias_gradients) {
  const Call& call = *static_cast<const Call*>(arguments);
  for_each_head(call, [&](const AttentionKernels& kernels, const AttentionHead& of, int64_t first, int64_t sequence,
                          int64_t head, float* memory) {
    kernels.silu_gradients(of, bias + head * distances, distances,
                           gradient + first * of.out_stride + head * call.value_width, memory,
                           gradients_of(call, to, call.heads * call.key_width, call.heads * call.value_width, first, head),
                           bias_gradients + (sequence * call.heads + head) * distances);
  });
}

SHARDWRIGHT_API void shardwright_softmax_attention(const void* arguments, double scale, float* out) {
  const Call& call = *static_cast<const Call*>(arguments);
  for_each_head(call, [&](const AttentionKernels& kernels, const AttentionHead& of, int64_t first, int64_t, int64_t head,
                          float* memory) {
    kernels.softmax(of, float(scale), memory, out + first * of.out_stride + head * call.value_width);
  });
}

// stride: of the rows of `to`.
SHARDWRIGHT_API void shardwright_softmax_attention_gradients(const void* arguments, double scale, const float* gradient,
                                                             float* const* to, int64_t stride) {
  const Call& call = *static_cast<const Call*>(arguments);
  for_each_head(call, [&](const AttentionKernels& kernels, const AttentionHead& of, int64_t first, int64_t, int64_t head,
                          float* memory) {
    kernels.softmax_gradients(of, float(scale), gradient + first * of.out_stride + head * call.value_width, memory,
                              gradients_of(call, to, stride, stride, first, head));
  });
}
