// Prepares ids for their exchange: deduplicates them, reorders them, and splits them by row range.

#include <algorithm>
#include <atomic>
#include <cstring>

#include "sort.h"

namespace {

constexpr int64_t kTile = 1 << 13;

struct Tile {
  int64_t table, begin, end;
  int64_t place;  // index of its first distinct row
};

bool starts(const Entry* entries, int64_t i) { return i == 0 || entries[i].row != entries[i - 1].row; }

}  // namespace

// Native code that is called from this thread runs on so many threads.
SHARDWRIGHT_API void shardwright_use_threads(int64_t num) { omp_set_num_threads(int(num)); }

// Distinct rows of each table, ascending, and for each id the index of its row among all distinct rows. `distinct` and
// `inverse` have the size of all ids; `counts` is per table. Returns -1, or the position of the first id outside its
// table.
SHARDWRIGHT_API int64_t shardwright_distinct(const Table* tables, int64_t num_tables, const Feature* features,
                                             const Lookups* lookups, int64_t* distinct, int64_t* counts,
                                             int64_t* inverse) {
  const Sorted sorted = sort_by_row(tables, num_tables, features, *lookups, true);
  if (sorted.outside >= 0) return sorted.outside;
  std::vector<Tile> tiles;
  for (int64_t t = 0; t < num_tables; ++t)
    for (int64_t begin = 0; begin < sorted.tables[t].size; begin += kTile)
      tiles.push_back({t, begin, std::min(sorted.tables[t].size, begin + kTile), 0});
  const int64_t n = tiles.size();
  const int threads = threads_for(lookups->offsets[lookups->features * lookups->batch]);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t i = 0; i < n; ++i) {
    const Entry* entries = sorted.tables[tiles[i].table].entries;
    for (int64_t at = tiles[i].begin; at < tiles[i].end; ++at) tiles[i].place += starts(entries, at);
  }
  std::fill_n(counts, num_tables, 0);
  int64_t next = 0;
  for (Tile& tile : tiles) {
    const int64_t found = tile.place;
    counts[tile.table] += found;
    tile.place = next;
    next += found;
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t i = 0; i < n; ++i) {
    const Entry* entries = sorted.tables[tiles[i].table].entries;
    int64_t place = tiles[i].place - 1;
    for (int64_t at = tiles[i].begin; at < tiles[i].end; ++at) {
      if (starts(entries, at)) distinct[++place] = entries[at].row;
      inverse[entries[at].source] = place;
    }
  }
  return -1;
}

// Copies `num` segments of items: segment i from item `from[i]` to items `to[i]` .. `to[i + 1]` - 1 of `out`.
SHARDWRIGHT_API void shardwright_gather(const char* bytes, const int64_t* from, int64_t num, const int64_t* to,
                                        int64_t item, char* out) {
#pragma omp parallel for num_threads(threads_for(to[num])) schedule(dynamic, 16)
  for (int64_t i = 0; i < num; ++i)
    std::memcpy(out + to[i] * item, bytes + from[i] * item, (to[i + 1] - to[i]) * item);
}

namespace {

// The row range (piece) of a table that holds a row: the last whose first row is not above it.
inline int64_t piece_of(const int64_t* starts, int64_t pieces, int64_t row) {
  return std::upper_bound(starts + 1, starts + pieces, row) - starts - 1;
}

template <typename Id>
int64_t count_pieces(const Id* ids, const int64_t* offsets, int64_t features, int64_t batch, const int64_t* starts,
                     int64_t pieces, int64_t* lengths) {
  std::atomic<int64_t> outside{INT64_MAX};
  const int64_t bags = features * batch;
#pragma omp parallel for num_threads(threads_for(offsets[bags])) schedule(static)
  for (int64_t bag = 0; bag < bags; ++bag) {
    const int64_t* cuts = starts + bag / batch * (pieces + 1);
    for (int64_t i = offsets[bag]; i < offsets[bag + 1]; ++i) {
      const int64_t row = ids[i];
      if (row < 0 || row >= cuts[pieces]) {
        int64_t now = outside.load();
        while (i < now && !outside.compare_exchange_weak(now, i)) {
        }
        break;
      }
      ++lengths[piece_of(cuts, pieces, row) * bags + bag];
    }
  }
  return outside == INT64_MAX ? -1 : int64_t(outside);
}

template <typename Id>
void move_pieces(const Id* ids, const int64_t* offsets, int64_t features, int64_t batch, const int64_t* starts,
                 int64_t pieces, int64_t* next, Id* out, int64_t* positions) {
  const int64_t bags = features * batch;
#pragma omp parallel for num_threads(threads_for(offsets[bags])) schedule(static)
  for (int64_t bag = 0; bag < bags; ++bag) {
    const int64_t* cuts = starts + bag / batch * (pieces + 1);
    for (int64_t i = offsets[bag]; i < offsets[bag + 1]; ++i) {
      const int64_t piece = piece_of(cuts, pieces, ids[i]), place = next[piece * bags + bag]++;
      out[place] = Id(ids[i] - cuts[piece]);
      positions[place] = i;
    }
  }
}

}  // namespace

// Counts the ids of each bag in each row range (piece) of its table: `lengths` is (pieces, features, batch), initially
// zero; `starts` has pieces + 1 first rows for each feature, the last is its number of rows. Returns -1, or the
// position of the first id that is outside its table.
SHARDWRIGHT_API int64_t shardwright_count_pieces(const void* ids, int64_t wide, const int64_t* offsets,
                                                 int64_t features, int64_t batch, const int64_t* starts,
                                                 int64_t pieces, int64_t* lengths) {
  if (wide) return count_pieces(static_cast<const int64_t*>(ids), offsets, features, batch, starts, pieces, lengths);
  return count_pieces(static_cast<const int32_t*>(ids), offsets, features, batch, starts, pieces, lengths);
}

// Moves ids to their pieces, relative to the piece's first row, and writes the position that each came from. `next` has
// the offset of each (piece, feature, bag) and is overwritten.
SHARDWRIGHT_API void shardwright_move_pieces(const void* ids, int64_t wide, const int64_t* offsets, int64_t features,
                                             int64_t batch, const int64_t* starts, int64_t pieces, int64_t* next,
                                             void* out, int64_t* positions) {
  if (wide)
    move_pieces(static_cast<const int64_t*>(ids), offsets, features, batch, starts, pieces, next,
                static_cast<int64_t*>(out), positions);
  else
    move_pieces(static_cast<const int32_t*>(ids), offsets, features, batch, starts, pieces, next,
                static_cast<int32_t*>(out), positions);
}
