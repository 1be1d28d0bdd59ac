// The interface of logs of rows (row_files.h).

#include "row_files.h"
#include "threads.h"

// Readers for logs; may be freed before them. `in_flight`, `threads`: of reads, see PageReader.
SHARDWRIGHT_API void* shardwright_page_readers_new(int64_t in_flight, int64_t threads) {
  return new std::shared_ptr<PageReaders>(std::make_shared<PageReaders>(in_flight, threads));
}

SHARDWRIGHT_API void shardwright_page_readers_free(void* readers) {
  delete static_cast<std::shared_ptr<PageReaders>*>(readers);
}

SHARDWRIGHT_API void* shardwright_row_log_new(const char* folder, int64_t num_rows, int64_t row_bytes,
                                              int64_t segment_bytes, const void* readers, int64_t direct) {
  return new RowLog(folder, num_rows, row_bytes, segment_bytes, *static_cast<const std::shared_ptr<PageReaders>*>(readers),
                    direct);
}

SHARDWRIGHT_API void shardwright_row_log_free(void* log) { delete static_cast<RowLog*>(log); }

// Reads `counts` rows of each log; `rows`, `lines` and `never` have those of all, one after the other; each log has
// `num_parts` parts. Returns -1, or the position of a log with an error.
SHARDWRIGHT_API int64_t shardwright_row_logs_read(void* const* logs, int64_t num, const int64_t* counts,
                                                  const int64_t* rows, const int64_t* lines, const RowPart* parts,
                                                  int64_t num_parts, int64_t* never, int64_t* num_never) {
  std::vector<PagesToRead> pages(num);
  for (int64_t i = 0, first = 0; i < num; first += counts[i++])
    if (!static_cast<RowLog*>(logs[i])->begin_read(rows + first, lines + first, counts[i], parts + i * num_parts,
                                                   num_parts, never + first, num_never + i, pages[i]))
      return i;
  if (!num || RowLog::end_read(static_cast<RowLog*>(logs[0])->reader(), pages)) return -1;
  for (int64_t i = 0; i < num; ++i)
    if (!static_cast<RowLog*>(logs[i])->error().empty()) return i;
  return 0;
}

SHARDWRIGHT_API int64_t shardwright_row_log_write(void* log, const int64_t* rows, const int64_t* lines, int64_t n,
                                                  const void* parts, int64_t num_parts) {
  return static_cast<RowLog*>(log)->write(rows, lines, n, static_cast<const RowPart*>(parts), num_parts);
}

SHARDWRIGHT_API int64_t shardwright_row_log_compact(void* log, double share, int64_t max) {
  return static_cast<RowLog*>(log)->compact(share, max);
}

SHARDWRIGHT_API int64_t shardwright_row_log_snapshot(void* log) { return static_cast<RowLog*>(log)->take_snapshot(); }

SHARDWRIGHT_API void shardwright_row_log_release(void* log, int64_t snapshot) {
  static_cast<RowLog*>(log)->release_snapshot(snapshot);
}

SHARDWRIGHT_API int64_t shardwright_row_log_read_snapshot(void* log, int64_t snapshot, int64_t first, int64_t n,
                                                          const void* parts, int64_t num_parts, int64_t* never) {
  return static_cast<RowLog*>(log)->read_snapshot(snapshot, first, n, static_cast<const RowPart*>(parts), num_parts,
                                                  never);
}

// Bytes read and written; records that are live, and that are dead; 1 if reads go through io_uring.
SHARDWRIGHT_API void shardwright_row_log_numbers(const void* log, int64_t* numbers) {
  static_cast<const RowLog*>(log)->numbers(numbers);
}

// The first error, as text of at most `size` bytes; empty without one.
SHARDWRIGHT_API void shardwright_row_log_error(void* log, char* text, int64_t size) {
  const std::string error = static_cast<RowLog*>(log)->error();
  std::strncpy(text, error.c_str(), size - 1);
  text[size - 1] = 0;
}
