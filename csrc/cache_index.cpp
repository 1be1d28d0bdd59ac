// The index of a cache for Python (cache_index.h), and calls for the caches of several tables at a time.

#include "cache_index.h"

#include <algorithm>

SHARDWRIGHT_API void* shardwright_cache_new(int64_t num_sets, int64_t half_life, int64_t adapts) {
  return new Index(num_sets, half_life, adapts);
}

SHARDWRIGHT_API void shardwright_cache_free(void* index) { delete static_cast<Index*>(index); }

SHARDWRIGHT_API void shardwright_cache_forget(void* index) { static_cast<Index*>(index)->forget(); }

// Threads for several indices, one after the other on each; a single one has threads of its own.
static int threads_for_all(const IndexBatch* batches, int64_t num) {
  int64_t rows = 0;
  for (int64_t i = 0; i < num; ++i) rows += batches[i].n;
  return num < 2 ? 1 : threads_for(rows);
}

// `announce` of several indices. Returns -1, or the position of the first that too many batches are announced to.
SHARDWRIGHT_API int64_t shardwright_cache_announce(const IndexBatch* batches, int64_t num, const int64_t* keys) {
  int64_t failed = num;
#pragma omp parallel for num_threads(threads_for_all(batches, num)) schedule(dynamic) reduction(min : failed)
  for (int64_t i = 0; i < num; ++i)
    if (static_cast<Index*>(batches[i].index)->announce(keys + batches[i].first, batches[i].n) < 0) failed = std::min(failed, i);
  return failed < num ? failed : -1;
}

// `place` of several indices. Returns -1, or the position of the first whose lines are too few.
SHARDWRIGHT_API int64_t shardwright_cache_place(const IndexBatch* batches, int64_t num, const int64_t* keys,
                                                const float* scores, int64_t* lines, int64_t* missing,
                                                int64_t* old_keys, int64_t* written_lines, int64_t* written_keys,
                                                int64_t* counts) {
  int64_t failed = num;
#pragma omp parallel for num_threads(threads_for_all(batches, num)) schedule(dynamic) reduction(min : failed)
  for (int64_t i = 0; i < num; ++i) {
    const IndexBatch& own = batches[i];
    if (!static_cast<Index*>(own.index)->place(keys + own.first, scores ? scores + own.first : nullptr, own.n, own.announced,
                          lines + own.first, missing + own.first, old_keys ? old_keys + own.first : nullptr,
                          written_lines + own.first_written, written_keys + own.first_written,
                          reinterpret_cast<Counts*>(counts) + i))
      failed = std::min(failed, i);
  }
  return failed < num ? failed : -1;
}

SHARDWRIGHT_API void shardwright_cache_release(const IndexBatch* batches, int64_t num, const int64_t* lines,
                                               const int64_t* written) {
#pragma omp parallel for num_threads(threads_for_all(batches, num)) schedule(dynamic)
  for (int64_t i = 0; i < num; ++i) static_cast<Index*>(batches[i].index)->release(lines + batches[i].first, batches[i].n, written[i]);
}

SHARDWRIGHT_API void shardwright_cache_find(const void* index, const int64_t* keys, int64_t n, int64_t* lines) {
  static_cast<const Index*>(index)->find_lines(keys, n, lines);
}

SHARDWRIGHT_API int64_t shardwright_cache_list(void* index, int64_t* lines, int64_t* keys, int64_t written,
                                               int64_t clear) {
  return static_cast<Index*>(index)->list(lines, keys, written, clear);
}

// Rows that are not in their own set: as many more lines than rows may be emptied by the next `place`.
SHARDWRIGHT_API int64_t shardwright_cache_away(const void* index) {
  return static_cast<const Index*>(index)->num_away();
}
