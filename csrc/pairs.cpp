// Dot products of all pairs of each sample's vectors.

#include <algorithm>

#include "threads.h"

namespace {

template <typename T, typename Do>
void for_each_sample(int64_t samples, int64_t vectors, int64_t dim, Do run) {
  const int64_t products = samples * vectors * vectors * dim;
#pragma omp parallel num_threads(products < 1 << 20 ? 1 : omp_get_max_threads())
  {
    const Scratch<T> memory = scratch<T>(pairs_scratch(vectors, dim));
    std::fill_n(memory.get(), pairs_scratch(vectors, dim), T(0));
#pragma omp for schedule(static)
    for (int64_t sample = 0; sample < samples; ++sample) run(sample, memory.get());
  }
}

template <typename T>
void dots(const PairKernelsOf<T>& kernels, const T* rows, int64_t samples, int64_t vectors, int64_t dim, T* out) {
  for_each_sample<T>(samples, vectors, dim, [&](int64_t sample, T* memory) {
    kernels.dots(rows + sample * vectors * dim, vectors, dim, memory, out + sample * pairs_of(vectors));
  });
}

template <typename T>
void gradients(const PairKernelsOf<T>& kernels, const T* rows, const T* for_dots, int64_t samples, int64_t vectors,
               int64_t dim, T* out) {
  for_each_sample<T>(samples, vectors, dim, [&](int64_t sample, T* memory) {
    const int64_t at = sample * vectors * dim;
    kernels.gradients(rows + at, for_dots + sample * pairs_of(vectors), vectors, dim, memory, out + at);
  });
}

}  // namespace

// Dot products: rows (samples, vectors, dim) -> dots (samples, pairs), as doubles or floats.
SHARDWRIGHT_API void shardwright_pair_dots(const void* rows, int64_t doubles, int64_t samples, int64_t vectors,
                                           int64_t dim, void* out) {
  if (doubles)
    dots(pair_kernels().of_doubles, static_cast<const double*>(rows), samples, vectors, dim, static_cast<double*>(out));
  else
    dots(pair_kernels().of_floats, static_cast<const float*>(rows), samples, vectors, dim, static_cast<float*>(out));
}

// Gradient of the rows from the gradient of their dot products.
SHARDWRIGHT_API void shardwright_pair_gradients(const void* rows, const void* for_dots, int64_t doubles,
                                                int64_t samples, int64_t vectors, int64_t dim, void* out) {
  if (doubles)
    gradients(pair_kernels().of_doubles, static_cast<const double*>(rows), static_cast<const double*>(for_dots),
              samples, vectors, dim, static_cast<double*>(out));
  else
    gradients(pair_kernels().of_floats, static_cast<const float*>(rows), static_cast<const float*>(for_dots), samples,
              vectors, dim, static_cast<float*>(out));
}
