// Rows of many tables, pooled by bag: every table in one call, ids checked on the way.

#include <algorithm>
#include <atomic>
#include <vector>

#include "threads.h"

namespace {

constexpr int64_t kTileIds = 2048;

struct Tile {
  int64_t feature, begin, end;  // bags; ids of a feature that is not pooled
};

std::vector<Tile> tiles_of(const Feature* features, const Lookups& lookups) {
  std::vector<Tile> tiles;
  for (int64_t f = 0; f < lookups.features; ++f) {
    const int64_t first = lookups.offsets[f * lookups.batch], ids = lookups.offsets[(f + 1) * lookups.batch] - first;
    const bool pooled = features[f].pooling != kNone;
    const int64_t items = pooled ? lookups.batch : ids;
    const int64_t step = std::max<int64_t>(1, std::min(kTileIds, items * kTileIds / std::max<int64_t>(ids, 1)));
    for (int64_t begin = 0; begin < items; begin += step) tiles.push_back({f, begin, std::min(items, begin + step)});
  }
  return tiles;
}

// Copies ids, widened, and returns the position of the first that is outside the table, or -1.
template <typename Id>
int64_t checked(const Id* ids, int64_t n, int64_t rows, int64_t* out) {
  bool outside = false;
  for (int64_t i = 0; i < n; ++i) {
    out[i] = ids[i];
    outside |= uint64_t(out[i]) >= uint64_t(rows);
  }
  if (!outside) return -1;
  return std::find_if(out, out + n, [=](int64_t id) { return uint64_t(id) >= uint64_t(rows); }) - out;
}

template <typename Do>
int64_t for_each_tile(const Table* tables, const Feature* features, const Lookups& lookups, Do run) {
  const std::vector<Tile> tiles = tiles_of(features, lookups);
  const int64_t none = INT64_MAX, n = tiles.size();
  std::atomic<int64_t> bad{none};
#pragma omp parallel num_threads(threads_for(lookups.offsets[lookups.features * lookups.batch]))
  {
    std::vector<int64_t> ids;
#pragma omp for schedule(dynamic)
    for (int64_t at = 0; at < n; ++at) {
      const Tile& tile = tiles[at];
      const Feature& feature = features[tile.feature];
      const int64_t* offsets = lookups.offsets + tile.feature * lookups.batch;
      const bool pooled = feature.pooling != kNone;
      const int64_t begin = pooled ? offsets[tile.begin] : offsets[0] + tile.begin;
      const int64_t end = pooled ? offsets[tile.end] : offsets[0] + tile.end;
      const Table& table = tables[feature.table];
      ids.resize(std::max<int64_t>(ids.size(), end - begin));
      const int64_t found =
          lookups.wide ? checked(static_cast<const int64_t*>(lookups.ids) + begin, end - begin, table.rows, ids.data())
                       : checked(static_cast<const int32_t*>(lookups.ids) + begin, end - begin, table.rows, ids.data());
      if (found >= 0) {
        int64_t first = bad.load();
        while (begin + found < first && !bad.compare_exchange_weak(first, begin + found)) {
        }
        continue;
      }
      const int64_t width = table.dtype == kFloat64 ? 8 : 4;
      const char* weights = static_cast<const char*>(lookups.weights);
      const PoolTile work = {&table,
                             ids.data(),
                             pooled ? offsets + tile.begin : nullptr,
                             tile.end - tile.begin,
                             feature.pooling == kMean,
                             weights ? weights + begin * width : nullptr,
                             static_cast<char*>(feature.vectors) + tile.begin * feature.stride * width,
                             feature.stride};
      run(work, begin * width);
    }
  }
  return bad == none ? -1 : int64_t(bad);
}

}  // namespace

// Both return -1, or the position of the first id that is outside its table (and then nothing is complete).
SHARDWRIGHT_API int64_t shardwright_lookup(const Table* tables, const Feature* features, const Lookups* lookups) {
  const RowKernels& kernels = row_kernels();
  return for_each_tile(tables, features, *lookups,
                       [&](const PoolTile& tile, int64_t) { kernels.pool[tile.table->dtype](tile); });
}

// The gradients of the weights of ids; features carry the gradients of their vectors.
SHARDWRIGHT_API int64_t shardwright_weight_gradients(const Table* tables, const Feature* features,
                                                     const Lookups* lookups, char* for_weights) {
  const RowKernels& kernels = row_kernels();
  return for_each_tile(tables, features, *lookups, [&](const PoolTile& tile, int64_t at) {
    kernels.dot[tile.table->dtype](tile, for_weights + at);
  });
}
