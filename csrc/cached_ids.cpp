// Places the rows of a batch's ids on lines of caches, one for each table, and lists the rows that are to be copied.

#include <vector>

#include "cache_set.h"
#include "threads.h"

SHARDWRIGHT_API int64_t shardwright_cache_place(const IndexBatch*, int64_t, const int64_t*, const float*, int64_t*,
                                                int64_t*, int64_t*, int64_t*, int64_t*, int64_t*);
SHARDWRIGHT_API int64_t shardwright_cache_away(const void*);

namespace {

// A line, the row that it gets and the one that it had, which was written; kNoWay: none.
struct Move {
  int64_t table, line, new_row, old_row;
};

}  // namespace

// `rows`: distinct rows of a batch, table by table, `rows_of_tables` of each; `inverse`: which of them each of `num_ids` ids
// reads. `indices`: of the tables; null for a table without cache, whose lines are its rows. `lines` has those of the
// distinct rows, `lines_N` those of all ids. Moves, of which the first `num_first` must be made before the others, go to
// `moves`, of as many as there are distinct rows and rows that are not in their own set. `counts`: by table. Returns -1,
// or t if table t has too few lines for the batches in flight.
SHARDWRIGHT_API int64_t shardwright_cache_place_rows(void* const* indices, int64_t num, int64_t announced,
                                                     const int64_t* rows, const int64_t* rows_of_tables,
                                                     const int64_t* inverse,
                                                     int64_t num_ids, int64_t* lines, int64_t* lines_N, Move* moves,
                                                     int64_t* num_moves, int64_t* num_first, Counts* counts) {
  std::vector<IndexBatch> batches;
  std::vector<int64_t> tables;  // of the batches
  int64_t first = 0, first_written = 0;
  for (int64_t t = 0; t < num; first += rows_of_tables[t++]) {
    counts[t] = {};
    if (!indices[t]) {
      for (int64_t i = first; i < first + rows_of_tables[t]; ++i) lines[i] = rows[i];
      continue;
    }
    tables.push_back(t);
    batches.push_back({indices[t], rows_of_tables[t], first, first_written, announced});
    first_written += rows_of_tables[t] + shardwright_cache_away(indices[t]);
  }
  std::vector<int64_t> missing(first), old_rows(first), written_lines(first_written), written_rows(first_written);
  std::vector<Counts> own(batches.size());
  const int64_t failed =
      shardwright_cache_place(batches.data(), batches.size(), rows, nullptr, lines, missing.data(), old_rows.data(),
                              written_lines.data(), written_rows.data(), reinterpret_cast<int64_t*>(own.data()));
  if (failed >= 0) return tables[failed];
#pragma omp parallel for num_threads(threads_for(num_ids)) schedule(static)
  for (int64_t i = 0; i < num_ids; ++i) lines_N[i] = lines[inverse[i]];
  int64_t n = 0;
  for (uint64_t b = 0; b < batches.size(); ++b) {
    counts[tables[b]] = own[b];
    for (int64_t i = own[b].written - own[b].emptied; i < own[b].written; ++i) {
      const int64_t at = batches[b].first_written + i;
      moves[n++] = {tables[b], written_lines[at], kNoWay, written_rows[at]};
    }
  }
  *num_first = n;
  for (uint64_t b = 0; b < batches.size(); ++b)
    for (int64_t i = 0; i < own[b].missing; ++i) {
      const int64_t at = batches[b].first + missing[batches[b].first + i];
      moves[n++] = {tables[b], lines[at], rows[at], old_rows[batches[b].first + i]};
    }
  *num_moves = n;
  return -1;
}
