// Places the ids of a batch on lines of caches, one for each table, and lists the rows that are to be copied.

#include <vector>

#include "cache_set.h"
#include "threads.h"

SHARDWRIGHT_API int64_t shardwright_distinct(const Table*, int64_t, const Feature*, const Lookups*, int64_t*, int64_t*,
                                             int64_t*);
SHARDWRIGHT_API int64_t shardwright_cache_place(const IndexBatch*, int64_t, const int64_t*, const float*, int64_t*,
                                                int64_t*, int64_t*, int64_t*, int64_t*, int64_t*);
SHARDWRIGHT_API int64_t shardwright_cache_away(const void*);

namespace {

// A line, the row that it gets and the one that it had, which was written; kNoWay: none.
struct Move {
  int64_t table, line, new_row, old_row;
};

}  // namespace

// Arguments as of shardwright_distinct, then an index for each table; `lines` has those of the distinct rows, `lines_N`
// those of all ids. Moves, of which the first `num_first` must be made before the others, go to `moves`, of as many as
// there are ids and rows that are not in their own set. `counts`: by table. Returns -1, the position of the first id
// outside its table, or -2 - t if table t has too few lines for the batches in flight.
SHARDWRIGHT_API int64_t shardwright_cache_place_ids(const Table* tables, int64_t num, const Feature* features,
                                                    const Lookups* lookups, void* const* indices, int64_t* rows,
                                                    int64_t* rows_of_tables, int64_t* lines, int32_t* lines_N,
                                                    Move* moves, int64_t* num_moves, int64_t* num_first,
                                                    Counts* counts) {
  const int64_t num_ids = lookups->offsets[lookups->features * lookups->batch];
  std::vector<int64_t> inverse(num_ids);
  const int64_t outside =
      shardwright_distinct(tables, num, features, lookups, rows, rows_of_tables, inverse.data());
  if (outside >= 0) return outside;
  std::vector<IndexBatch> batches;
  int64_t first = 0, first_written = 0;
  for (int64_t t = 0; t < num; ++t) {
    batches.push_back({indices[t], rows_of_tables[t], first, first_written});
    first += rows_of_tables[t];
    first_written += rows_of_tables[t] + shardwright_cache_away(indices[t]);
  }
  std::vector<int64_t> missing(first), old_rows(first), written_lines(first_written), written_rows(first_written);
  const int64_t failed =
      shardwright_cache_place(batches.data(), num, rows, nullptr, lines, missing.data(), old_rows.data(),
                              written_lines.data(), written_rows.data(), reinterpret_cast<int64_t*>(counts));
  if (failed >= 0) return -2 - failed;
#pragma omp parallel for num_threads(threads_for(num_ids)) schedule(static)
  for (int64_t i = 0; i < num_ids; ++i) lines_N[i] = int32_t(lines[inverse[i]]);
  int64_t n = 0;
  for (int64_t t = 0; t < num; ++t)
    for (int64_t i = counts[t].written - counts[t].emptied; i < counts[t].written; ++i) {
      const int64_t at = batches[t].first_written + i;
      moves[n++] = {t, written_lines[at], kNoWay, written_rows[at]};
    }
  *num_first = n;
  for (int64_t t = 0; t < num; ++t)
    for (int64_t i = 0; i < counts[t].missing; ++i) {
      const int64_t at = batches[t].first + missing[batches[t].first + i];
      moves[n++] = {t, lines[at], rows[at], old_rows[batches[t].first + i]};
    }
  *num_moves = n;
  return -1;
}
