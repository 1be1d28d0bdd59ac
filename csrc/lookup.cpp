// Embedding lookup: rows of all tables pooled by bag in one call, with a check of the ids.

#include <algorithm>
#include <atomic>
#include <vector>

#include "threads.h"

namespace {

constexpr int64_t kTileIds = 8192;

// Bags of a feature, or ids if it is not pooled. Tiles of a table are consecutive, so that its hot rows stay in cache.
struct Tile {
  int64_t feature, begin, end;
};

std::vector<Tile> tiles_of(const Feature* features, const Lookups& lookups) {
  std::vector<Tile> tiles;
  for (int64_t f = 0; f < lookups.features; ++f) {
    const int64_t ids = lookups.offsets[(f + 1) * lookups.batch] - lookups.offsets[f * lookups.batch];
    const int64_t items = features[f].pooling == kNone ? ids : lookups.batch;
    const int64_t step = std::max<int64_t>(1, std::min(kTileIds, items * kTileIds / std::max<int64_t>(ids, 1)));
    for (int64_t begin = 0; begin < items; begin += step) tiles.push_back({f, begin, std::min(items, begin + step)});
  }
  return tiles;
}

// Copies ids to int64, and returns the position of the first id that is outside the table, or -1.
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

// Fills in the work of a tile and writes its ids, as int64, to `ids`; returns the position of the first id that is
// outside the table, or -1.
int64_t take(const Tile& tile, const Table* tables, const Feature& feature, const Lookups& lookups,
             std::vector<int64_t>& ids, PoolTile* work) {
  const Table& table = tables[feature.table];
  const int64_t* offsets = lookups.offsets + tile.feature * lookups.batch;
  const bool pooled = feature.pooling != kNone;
  const int64_t begin = pooled ? offsets[tile.begin] : offsets[0] + tile.begin;
  const int64_t end = pooled ? offsets[tile.end] : offsets[0] + tile.end;
  const int64_t width = table.dtype == kFloat64 ? 8 : 4;
  ids.resize(std::max<int64_t>(ids.size(), end - begin));
  const char* weights = static_cast<const char*>(lookups.weights);
  *work = {&table,
           ids.data(),
           begin,
           end - begin,
           pooled ? offsets + tile.begin : nullptr,
           tile.end - tile.begin,
           feature.pooling == kMean,
           weights ? weights + begin * width : nullptr,
           static_cast<char*>(feature.vectors) + tile.begin * feature.stride * width,
           feature.stride};
  const int64_t found =
      lookups.wide ? checked(static_cast<const int64_t*>(lookups.ids) + begin, end - begin, table.rows, ids.data())
                   : checked(static_cast<const int32_t*>(lookups.ids) + begin, end - begin, table.rows, ids.data());
  return found < 0 ? -1 : begin + found;
}

template <typename Do>
int64_t for_each_tile(const Table* tables, const Feature* features, const Lookups& lookups, Do run) {
  const std::vector<Tile> tiles = tiles_of(features, lookups);
  const int64_t none = INT64_MAX, n = tiles.size();
  std::atomic<int64_t> bad{none};
#pragma omp parallel num_threads(threads_for(lookups.offsets[lookups.features * lookups.batch]))
  {
    std::vector<int64_t> ids;
    PoolTile work;
#pragma omp for schedule(dynamic)
    for (int64_t at = 0; at < n; ++at) {
      const int64_t outside = take(tiles[at], tables, features[tiles[at].feature], lookups, ids, &work);
      if (outside < 0) {
        run(work);
        continue;
      }
      int64_t first = bad.load();
      while (outside < first && !bad.compare_exchange_weak(first, outside)) {
      }
    }
  }
  return bad == none ? -1 : int64_t(bad);
}

}  // namespace

// Both functions return -1, or the position of the first id that is outside its table; the output is then incomplete.
SHARDWRIGHT_API int64_t shardwright_lookup(const Table* tables, const Feature* features, const Lookups* lookups) {
  const RowKernels& kernels = row_kernels();
  return for_each_tile(tables, features, *lookups,
                       [&](const PoolTile& tile) { kernels.pool[tile.table->dtype](tile); });
}

// Gradients of the id weights; `features` hold the gradients of their vectors.
SHARDWRIGHT_API int64_t shardwright_weight_gradients(const Table* tables, const Feature* features,
                                                     const Lookups* lookups, char* for_weights) {
  const RowKernels& kernels = row_kernels();
  return for_each_tile(tables, features, *lookups, [&](const PoolTile& tile) {
    kernels.dot[tile.table->dtype](tile, for_weights + tile.begin * (tile.table->dtype == kFloat64 ? 8 : 4));
  });
}
