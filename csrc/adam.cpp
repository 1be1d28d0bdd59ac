// An Adam step on all parameters of an optimizer in one pass.

#include "adam.h"

#include <algorithm>
#include <vector>

#include "threads.h"

SHARDWRIGHT_API void shardwright_adam(const Parameter* parameters, const AdamNumbers* numbers, int64_t num) {
  std::vector<int64_t> tiles(num + 1, 0);  // number of tiles before each parameter
  int64_t size = 0;
  for (int64_t p = 0; p < num; ++p) {
    const int64_t end = parameters[p].place + parameters[p].size - 1;
    const int64_t mine = parameters[p].size ? (end >> kTileBits) - (parameters[p].place >> kTileBits) + 1 : 0;
    tiles[p + 1] = tiles[p] + mine;
    size += parameters[p].size;
  }
  const AdamKernels& kernels = adam_kernels();
#pragma omp parallel for schedule(static) num_threads(threads_for(size))
  for (int64_t tile = 0; tile < tiles[num]; ++tile) {
    const int64_t p = std::upper_bound(tiles.begin(), tiles.end(), tile) - tiles.begin() - 1;
    const Parameter& parameter = parameters[p];
    const int64_t start = ((parameter.place >> kTileBits) + tile - tiles[p]) << kTileBits;
    const int64_t begin = std::max<int64_t>(0, start - parameter.place);
    const int64_t end = std::min(parameter.size, start + (int64_t(1) << kTileBits) - parameter.place);
    kernels.step[parameter.moments](parameter, numbers[p], begin, end);
  }
}
