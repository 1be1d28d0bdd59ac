// Fused update: sorts a batch's lookups by row, sums the gradients of each row, and applies the optimizer once per row.
// Can also return the sums instead, for example to all-reduce them before the optimizer step.

#include <algorithm>
#include <cstring>
#include <memory>

#include "sort.h"

namespace {

constexpr int64_t kTileEntries = 512;

struct Work {
  int64_t table, begin, end;  // entries of a segment's chunk or of a tile
  char* sum;                  // output of a chunk's sum
  int64_t place;              // index of a tile's first row among the table's; set by `count`
};

// Rows with more lookups than a chunk. Their runs contain a multiple of kChunk, so only those positions are examined.
std::vector<Segment> segments_of(const SortedTable& sorted) {
  std::vector<Segment> found;
  const Entry* entries = sorted.entries;
  const auto before = [](const Entry& a, const Entry& b) { return a.row < b.row; };
  for (int64_t i = 0; i < sorted.size; i += kChunk) {
    if (!found.empty() && i < found.back().end) continue;
    const int64_t begin = std::lower_bound(entries, entries + i, entries[i], before) - entries;
    const int64_t end = std::upper_bound(entries + i, entries + sorted.size, entries[i], before) - entries;
    if (end - begin > kChunk) found.push_back({begin, end, nullptr});
  }
  return found;
}

int64_t chunks_of(const Segment& segment) { return (segment.end - segment.begin + kChunk - 1) / kChunk; }
int64_t width_of(const Table& table) { return table.dtype == kFloat64 ? 8 : 4; }
bool starts(const Entry* entries, int64_t i) { return i == 0 || entries[i].row != entries[i - 1].row; }

class Rows {
 public:
  Rows(const Table* tables, int64_t num_tables, const Feature* features, const Lookups& lookups,
       const Settings* settings)
      : tables_(tables), num_tables_(num_tables), features_(features), lookups_(lookups), settings_(settings) {
    sorted_ = sort_by_row(tables_, num_tables_, features_, lookups_, false);
    if (sorted_.outside < 0) plan();
  }

  int64_t outside() const { return sorted_.outside; }

  void update(int64_t optimizer) const {
    const RowKernels& kernels = row_kernels();
    const int64_t num_tiles = tiles_.size();
#pragma omp parallel num_threads(threads())
    {
      sum_chunks();
      const Scratch<char> sum = scratch<char>(widest_);
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < num_tiles; ++i)
        kernels.update[tables_[tiles_[i].table].dtype][optimizer](tile(tiles_[i], sum.get()));
    }
  }

  // Number of rows of each table that have a gradient.
  void count(int64_t* counts) {
    std::fill_n(counts, num_tables_, 0);
    for (Work& one : tiles_) {
      one.place = counts[one.table];
      const Entry* entries = sorted_.tables[one.table].entries;
      for (int64_t i = one.begin; i < one.end; ++i) counts[one.table] += starts(entries, i);
    }
  }

  // Rows of each table with a gradient, ascending, and the sums of their gradients. Call `count` first.
  void sums(int64_t* const* rows, char* const* sums) const {
    const int64_t num_tiles = tiles_.size();
#pragma omp parallel num_threads(threads())
    {
      sum_chunks();
      const Scratch<char> sum = scratch<char>(widest_);
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < num_tiles; ++i) {
        const int64_t t = tiles_[i].table, place = tiles_[i].place;
        sum_rows(tile(tiles_[i], sum.get()), rows[t] + place, sums[t] + place * tables_[t].dim * width_of(tables_[t]));
      }
    }
  }

 private:
  int threads() const { return threads_for(lookups_.offsets[lookups_.features * lookups_.batch]); }

  void sum_chunks() const {
    const RowKernels& kernels = row_kernels();
    const int64_t num_chunks = chunks_.size();
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_chunks; ++i) {
      const Work& chunk = chunks_[i];
      kernels.sum[tables_[chunk.table].dtype == kFloat64](tile(chunk, nullptr), chunk.begin, chunk.end, chunk.sum);
    }
  }

  void sum_rows(const UpdateTile& tile, int64_t* rows, char* sums) const {
    const auto sum_run = row_kernels().sum_run[tile.table->dtype == kFloat64];
    const Segment* segment = tile.segments;
    const int64_t row_bytes = tile.table->dim * width_of(*tile.table);
    int64_t i = tile.begin;
    while (i < tile.end && !starts(tile.entries, i)) ++i;
    for (; i < tile.end; sums += row_bytes) {
      *rows++ = tile.entries[i].row;
      i = sum_run(tile, i, &segment, tile.scratch);
      std::memcpy(sums, tile.scratch, row_bytes);
    }
  }

  void plan() {
    segments_.resize(num_tables_);
    int64_t bytes = 0;
    for (int64_t t = 0; t < num_tables_; ++t) {
      if (!tables_[t].trained) continue;
      const int64_t row = padded(tables_[t].dim) * width_of(tables_[t]);
      widest_ = std::max(widest_, row * group_of(tables_[t].dim));
      segments_[t] = segments_of(sorted_.tables[t]);
      for (const Segment& segment : segments_[t]) bytes += chunks_of(segment) * row;
      for (int64_t begin = 0; begin < sorted_.tables[t].size; begin += kTileEntries)
        tiles_.push_back({t, begin, std::min(sorted_.tables[t].size, begin + kTileEntries), nullptr, 0});
    }
    sums_ = scratch<char>(bytes);
    char* next = sums_.get();
    for (int64_t t = 0; t < num_tables_; ++t)
      for (Segment& segment : segments_[t]) {
        segment.sums = next;
        for (int64_t begin = segment.begin; begin < segment.end; begin += kChunk) {
          chunks_.push_back({t, begin, std::min(segment.end, begin + kChunk), next, 0});
          next += padded(tables_[t].dim) * width_of(tables_[t]);
        }
      }
  }

  UpdateTile tile(const Work& work, void* sum) const {
    const SortedTable& sorted = sorted_.tables[work.table];
    const std::vector<Segment>& segments = segments_[work.table];
    const auto from = std::lower_bound(segments.begin(), segments.end(), work.begin,
                                       [](const Segment& segment, int64_t begin) { return segment.begin < begin; });
    return {&tables_[work.table],
            sorted.entries,
            work.begin,
            work.end,
            sorted.size,
            segments.data() + (from - segments.begin()),
            features_,
            sorted.only_feature,
            &lookups_,
            sorted.by_position ? sorted_.bag_of.get() : nullptr,
            settings_,
            sum};
  }

  const Table* tables_;
  const int64_t num_tables_;
  const Feature* features_;
  const Lookups& lookups_;
  const Settings* settings_;
  Sorted sorted_;
  std::vector<std::vector<Segment>> segments_;  // by table
  std::vector<Work> chunks_, tiles_;
  Scratch<char> sums_;
  int64_t widest_ = 0;
};

}  // namespace

// `features` hold the gradients of their vectors. Returns -1, or the position of the first id that is outside its
// table; then no row has changed.
SHARDWRIGHT_API int64_t shardwright_update(const Table* tables, int64_t num_tables, const Feature* features,
                                           const Lookups* lookups, int64_t optimizer, const Settings* settings) {
  const Rows rows(tables, num_tables, features, *lookups, settings);
  if (rows.outside() < 0) rows.update(optimizer);
  return rows.outside();
}

// Gradient sums by row, in two calls, since the number of rows is not known before: this call returns `counts` by
// table, shardwright_sums_taken the rows and their sums by table. Returns null if an id is `outside` its table.
SHARDWRIGHT_API void* shardwright_sums_counted(const Table* tables, int64_t num_tables, const Feature* features,
                                               const Lookups* lookups, int64_t* counts, int64_t* outside) {
  auto rows = std::make_unique<Rows>(tables, num_tables, features, *lookups, nullptr);
  *outside = rows->outside();
  if (*outside >= 0) return nullptr;
  rows->count(counts);
  return rows.release();
}

SHARDWRIGHT_API void shardwright_sums_taken(void* counted, int64_t* const* rows, char* const* sums) {
  const std::unique_ptr<Rows> found(static_cast<Rows*>(counted));
  found->sums(rows, sums);
}
