// Activations inside experts, in parallel over chunks.

#include "activations.h"

#include <algorithm>

#include "threads.h"

namespace {

constexpr int64_t kChunk = 1 << 13;

template <typename Run>
void chunks(int64_t n, Run run) {
  const int64_t num = (n + kChunk - 1) / kChunk;
#pragma omp parallel for schedule(static) num_threads(threads_for(n))
  for (int64_t chunk = 0; chunk < num; ++chunk) run(chunk * kChunk, std::min(kChunk, n - chunk * kChunk));
}

template <typename T>
void gelu(const ActivationKernelsOf<T>& kernels, const void* x, int64_t n, void* out) {
  chunks(n, [&](int64_t i, int64_t num) { kernels.gelu(static_cast<const T*>(x) + i, num, static_cast<T*>(out) + i); });
}

template <typename T>
void gelu_gradient(const ActivationKernelsOf<T>& kernels, const void* gradient, const void* x, int64_t n, void* out) {
  chunks(n, [&](int64_t i, int64_t num) {
    kernels.gelu_gradient(static_cast<const T*>(gradient) + i, static_cast<const T*>(x) + i, num,
                          static_cast<T*>(out) + i);
  });
}

template <typename T>
void swiglu(const ActivationKernelsOf<T>& kernels, const void* gate, const void* up, int64_t n, void* out) {
  chunks(n, [&](int64_t i, int64_t num) {
    kernels.swiglu(static_cast<const T*>(gate) + i, static_cast<const T*>(up) + i, num, static_cast<T*>(out) + i);
  });
}

template <typename T>
void swiglu_gradient(const ActivationKernelsOf<T>& kernels, const void* gradient, const void* gate, const void* up,
                     int64_t n, void* of_gate, void* of_up) {
  chunks(n, [&](int64_t i, int64_t num) {
    kernels.swiglu_gradient(static_cast<const T*>(gradient) + i, static_cast<const T*>(gate) + i,
                            static_cast<const T*>(up) + i, num, static_cast<T*>(of_gate) + i,
                            static_cast<T*>(of_up) + i);
  });
}

}  // namespace

// All tensors have n numbers, doubles or floats.
SHARDWRIGHT_API void shardwright_gelu(const void* x, int64_t n, int64_t doubles, void* out) {
  const ActivationKernels& kernels = activation_kernels();
  doubles ? gelu(kernels.of_doubles, x, n, out) : gelu(kernels.of_floats, x, n, out);
}

SHARDWRIGHT_API void shardwright_gelu_gradient(const void* gradient, const void* x, int64_t n, int64_t doubles,
                                               void* out) {
  const ActivationKernels& kernels = activation_kernels();
  doubles ? gelu_gradient(kernels.of_doubles, gradient, x, n, out)
          : gelu_gradient(kernels.of_floats, gradient, x, n, out);
}

SHARDWRIGHT_API void shardwright_swiglu(const void* gate, const void* up, int64_t n, int64_t doubles, void* out) {
  const ActivationKernels& kernels = activation_kernels();
  doubles ? swiglu(kernels.of_doubles, gate, up, n, out) : swiglu(kernels.of_floats, gate, up, n, out);
}

SHARDWRIGHT_API void shardwright_swiglu_gradient(const void* gradient, const void* gate, const void* up, int64_t n,
                                                 int64_t doubles, void* of_gate, void* of_up) {
  const ActivationKernels& kernels = activation_kernels();
  doubles ? swiglu_gradient(kernels.of_doubles, gradient, gate, up, n, of_gate, of_up)
          : swiglu_gradient(kernels.of_floats, gradient, gate, up, n, of_gate, of_up);
}
