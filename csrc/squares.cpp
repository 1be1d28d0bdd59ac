// The sum of squares of float32 numbers in double precision, for norms of gradients.

#include <algorithm>
#include <vector>

#include "threads.h"

namespace {

constexpr int64_t kTile = 1 << 14;
constexpr int kSums = 16;  // independent sums, so that additions do not wait for each other

double tile_squares(const float* values, int64_t n) {
  double sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums)
    for (int k = 0; k < kSums; ++k) {
      const double value = values[i + k];
      sums[k] += value * value;
    }
  for (; i < n; ++i) sums[0] += double(values[i]) * values[i];
  double total = 0;
  for (int k = 0; k < kSums; ++k) total += sums[k];
  return total;
}

}  // namespace

// The order of additions does not depend on the number of threads.
SHARDWRIGHT_API double shardwright_sum_of_squares(const float* values, int64_t n) {
  const int64_t tiles = (n + kTile - 1) / kTile;
  std::vector<double> sums(tiles);
#pragma omp parallel for schedule(static) num_threads(threads_for(n))
  for (int64_t tile = 0; tile < tiles; ++tile)
    sums[tile] = tile_squares(values + tile * kTile, std::min(kTile, n - tile * kTile));
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}
