// Activations inside experts: kernels of one thread, for n numbers.
#pragma once

#include <cstdint>

// Every number is computed by the same instructions wherever it stands, so that its bits do not depend on the numbers
// beside it. Compiled once per instruction set, with FMA contraction: instruction sets may differ in the last bit.
template <typename T>
struct ActivationKernelsOf {
  void (*gelu)(const T* x, int64_t n, T* out);
  void (*gelu_gradient)(const T* gradient, const T* x, int64_t n, T* out);
  void (*swiglu)(const T* gate, const T* up, int64_t n, T* out);
  void (*swiglu_gradient)(const T* gradient, const T* gate, const T* up, int64_t n, T* of_gate, T* of_up);
};

struct ActivationKernels {
  ActivationKernelsOf<float> of_floats;
  ActivationKernelsOf<double> of_doubles;
};

extern const ActivationKernels kActivationKernels_baseline;
#ifdef SHARDWRIGHT_X86_LEVELS
extern const ActivationKernels kActivationKernels_avx2, kActivationKernels_avx512;
#endif
