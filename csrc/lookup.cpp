// Rows of many tables, pooled by bag: every table in one call, ids checked on the way.

#include <algorithm>
#include <atomic>
#include <vector>

#include "threads.h"

namespace {

constexpr int64_t kTileIds = 1024;

// Some bags of every pooled feature, so that a tile writes whole rows of vectors; or ids of one that is not pooled.
struct Tile {
  int64_t feature;  // or -1: all pooled ones
  int64_t begin, end;
};

void cut(std::vector<Tile>& tiles, int64_t feature, int64_t items, int64_t ids) {
  const int64_t step = std::max<int64_t>(1, std::min(kTileIds, items * kTileIds / std::max<int64_t>(ids, 1)));
  for (int64_t begin = 0; begin < items; begin += step) tiles.push_back({feature, begin, std::min(items, begin + step)});
}

std::vector<Tile> tiles_of(const Feature* features, const Lookups& lookups) {
  std::vector<Tile> tiles;
  int64_t pooled = 0, num_pooled = 0;
  for (int64_t f = 0; f < lookups.features; ++f) {
    const int64_t ids = lookups.offsets[(f + 1) * lookups.batch] - lookups.offsets[f * lookups.batch];
    if (features[f].pooling == kNone) {
      cut(tiles, f, ids, ids);
    } else {
      pooled += ids;
      ++num_pooled;
    }
  }
  if (num_pooled) cut(tiles, -1, lookups.batch, std::max(pooled, num_pooled * lookups.batch));
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

// The parts of one tile, and their ids in the order in which they are looked up.
class Parts {
 public:
  Parts(const Table* tables, const Feature* features, const Lookups& lookups)
      : tables_(tables), features_(features), lookups_(lookups) {}

  // Returns the position of the first id that is outside its table, or -1.
  int64_t take(const Tile& tile) {
    parts_.clear();
    ids_.clear();
    int64_t outside = -1;
    const int64_t first = std::max<int64_t>(tile.feature, 0), last = tile.feature < 0 ? lookups_.features : first + 1;
    for (int64_t f = first; f < last; ++f)
      if (tile.feature >= 0 || features_[f].pooling != kNone) {
        const int64_t found = add(f, tile.begin, tile.end);
        if (found >= 0 && (outside < 0 || found < outside)) outside = found;
      }
    int64_t at = 0;
    for (PoolTile& part : parts_) {
      part.ids = ids_.data() + at;
      at += part.num_ids;
    }
    for (size_t i = 0; i + 1 < parts_.size(); ++i) parts_[i].next = parts_[i + 1].num_ids ? &parts_[i + 1] : nullptr;
    return outside;
  }

  const std::vector<PoolTile>& parts() const { return parts_; }

 private:
  int64_t add(int64_t f, int64_t first, int64_t last) {
    const Feature& feature = features_[f];
    const Table& table = tables_[feature.table];
    const int64_t* offsets = lookups_.offsets + f * lookups_.batch;
    const bool pooled = feature.pooling != kNone;
    const int64_t begin = pooled ? offsets[first] : offsets[0] + first;
    const int64_t end = pooled ? offsets[last] : offsets[0] + last;
    const int64_t width = table.dtype == kFloat64 ? 8 : 4, at = ids_.size();
    ids_.resize(at + end - begin);
    const char* weights = static_cast<const char*>(lookups_.weights);
    PoolTile part = {};
    part.table = &table;
    part.begin = begin;
    part.num_ids = end - begin;
    part.offsets = pooled ? offsets + first : nullptr;
    part.bags = last - first;
    part.mean = feature.pooling == kMean;
    part.weights = weights ? weights + begin * width : nullptr;
    part.vectors = static_cast<char*>(feature.vectors) + first * feature.stride * width;
    part.stride = feature.stride;
    parts_.push_back(part);
    const int64_t found =
        lookups_.wide ? checked(static_cast<const int64_t*>(lookups_.ids) + begin, end - begin, table.rows, &ids_[at])
                      : checked(static_cast<const int32_t*>(lookups_.ids) + begin, end - begin, table.rows, &ids_[at]);
    return found < 0 ? -1 : begin + found;
  }

  const Table* tables_;
  const Feature* features_;
  const Lookups& lookups_;
  std::vector<PoolTile> parts_;
  std::vector<int64_t> ids_;
};

template <typename Do>
int64_t for_each_part(const Table* tables, const Feature* features, const Lookups& lookups, Do run) {
  const std::vector<Tile> tiles = tiles_of(features, lookups);
  const int64_t none = INT64_MAX, n = tiles.size();
  std::atomic<int64_t> bad{none};
#pragma omp parallel num_threads(threads_for(lookups.offsets[lookups.features * lookups.batch]))
  {
    Parts parts(tables, features, lookups);
#pragma omp for schedule(dynamic)
    for (int64_t at = 0; at < n; ++at) {
      const int64_t outside = parts.take(tiles[at]);
      if (outside < 0) {
        for (const PoolTile& part : parts.parts()) run(part);
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

// Both return -1, or the position of the first id that is outside its table (and then nothing is complete).
SHARDWRIGHT_API int64_t shardwright_lookup(const Table* tables, const Feature* features, const Lookups* lookups) {
  const RowKernels& kernels = row_kernels();
  return for_each_part(tables, features, *lookups,
                       [&](const PoolTile& part) { kernels.pool[part.table->dtype](part); });
}

// The gradients of the weights of ids; features carry the gradients of their vectors.
SHARDWRIGHT_API int64_t shardwright_weight_gradients(const Table* tables, const Feature* features,
                                                     const Lookups* lookups, char* for_weights) {
  const RowKernels& kernels = row_kernels();
  return for_each_part(tables, features, *lookups, [&](const PoolTile& part) {
    kernels.dot[part.table->dtype](part, for_weights + part.begin * (part.table->dtype == kFloat64 ? 8 : 4));
  });
}
