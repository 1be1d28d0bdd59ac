// Runs the caches of rows, the files behind them and the map of ids without Python, under sanitizers: random batches
// through a cache in front of files, beside a reader of snapshots, compared with a plain array; random ids through a map.

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/row_log.h"

struct IndexBatch {
  void* index;
  int64_t n, first, first_written, announced;
};

extern "C" {
void* shardwright_cache_new(int64_t, int64_t, int64_t);
void shardwright_cache_free(void*);
int64_t shardwright_cache_announce(void*, const int64_t*, int64_t);
int64_t shardwright_cache_place(const IndexBatch*, int64_t, const int64_t*, const float*, int64_t*, int64_t*, int64_t*,
                                int64_t*, int64_t*, int64_t*);
void shardwright_cache_release(const IndexBatch*, int64_t, const int64_t*, const int64_t*);
void shardwright_cache_find(const void*, const int64_t*, int64_t, int64_t*);
int64_t shardwright_cache_list(void*, int64_t*, int64_t*, int64_t, int64_t);
int64_t shardwright_cache_away(const void*);
void shardwright_cache_forget(void*);
int64_t shardwright_cache_place_rows(void* const*, int64_t, int64_t, const int64_t*, const int64_t*, const int64_t*,
                                     int64_t, int64_t*, int64_t*, void*, int64_t*, int64_t*, void*);
void* shardwright_page_readers_new(int64_t, int64_t);
void shardwright_page_readers_free(void*);
void* shardwright_row_log_new(const char*, int64_t, int64_t, int64_t, const void*, int64_t);
void shardwright_row_log_free(void*);
int64_t shardwright_row_logs_read(void* const*, int64_t, const int64_t*, const int64_t*, const int64_t*,
                                  const RowPart*, int64_t, int64_t*, int64_t*);
int64_t shardwright_row_log_write(void*, const int64_t*, const int64_t*, int64_t, const void*, int64_t);
int64_t shardwright_row_log_compact(void*, double, int64_t);
int64_t shardwright_row_log_snapshot(void*);
void shardwright_row_log_release(void*, int64_t);
int64_t shardwright_row_log_read_snapshot(void*, int64_t, int64_t, int64_t, const void*, int64_t, int64_t*);
void* shardwright_id_map_new(const int64_t*, int64_t*);
void shardwright_id_map_free(void*);
int64_t shardwright_id_map_place(void*, const int64_t*, int64_t, int64_t, int64_t*, int64_t*, int64_t*, int64_t*,
                                 int64_t*, int64_t*);
void shardwright_id_map_release(void*, const int64_t*, int64_t);
void shardwright_id_map_find(void*, const int64_t*, int64_t, int64_t*);
void shardwright_id_map_remove(void*, const int64_t*, int64_t);
int64_t shardwright_id_map_take_removed(void*, int64_t*);
}

namespace {

std::mt19937_64 generator(1);
int64_t pick(int64_t n) { return int64_t(generator() % uint64_t(n)); }

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::abort();
}

std::vector<int64_t> distinct_rows(int64_t num_rows, int64_t n) {
  std::set<int64_t> rows;
  while (int64_t(rows.size()) < n) rows.insert(pick(num_rows));
  return {rows.begin(), rows.end()};
}

// Places distinct rows as shardwright_cache_place does, with the call for ids, each of which reads two rows.
void place_rows(void* index, int64_t announced, const std::vector<int64_t>& rows, std::vector<int64_t>& lines,
                std::vector<int64_t>& missing, std::vector<int64_t>& written_lines, std::vector<int64_t>& written_rows,
                std::vector<int64_t>& counts) {
  struct Move {
    int64_t table, line, new_row, old_row;
  };
  const int64_t n = rows.size();
  std::vector<int64_t> inverse(2 * n), lines_of_ids(2 * n);
  for (int64_t i = 0; i < 2 * n; ++i) inverse[i] = i / 2;
  std::vector<Move> moves(written_lines.size());
  int64_t num_moves = 0, num_first = 0;
  check(shardwright_cache_place_rows(&index, 1, announced, rows.data(), &n, inverse.data(), 2 * n, lines.data(),
                                     lines_of_ids.data(), moves.data(), &num_moves, &num_first, counts.data()) < 0,
        "a batch has no place");
  for (int64_t i = 0; i < 2 * n; ++i) check(lines_of_ids[i] == lines[i / 2], "a line of an id");
  int64_t num_missing = 0, num_written = 0;
  for (int64_t i = 0; i < num_moves; ++i) {
    const Move& move = moves[i];
    if (move.old_row >= 0) written_lines[num_written] = move.line, written_rows[num_written++] = move.old_row;
    for (int64_t at = 0; move.new_row >= 0 && at < n; ++at)
      if (rows[at] == move.new_row) missing[num_missing++] = at;
  }
  check(num_missing == counts[0] && num_written == counts[1], "moves");
}

// Trains rows through a cache in front of files; each has its value twice, once in each of two tensors.
void train(int64_t in_flight, int64_t num_steps) {
  constexpr int64_t kRows = 3000, kSets = 24, kLines = 32 * kSets, kBatch = 150;
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / ("rows-" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  void* readers = shardwright_page_readers_new(in_flight, 4);
  void* log = shardwright_row_log_new(folder.c_str(), kRows, 16, 1 << 20, readers, 0);
  shardwright_page_readers_free(readers);
  void* index = shardwright_cache_new(kSets, 8, 1);
  std::vector<int64_t> table(kRows), first(kLines), second(kLines);
  const RowPart parts[] = {{reinterpret_cast<char*>(first.data()), 8}, {reinterpret_cast<char*>(second.data()), 8}};
  for (int64_t step = 0; step < num_steps; ++step) {
    const std::vector<int64_t> rows = distinct_rows(kRows, 1 + pick(kBatch));
    const int64_t n = rows.size(), room = n + shardwright_cache_away(index);
    if (step % 17 == 16) shardwright_cache_forget(index);
    const int64_t announced = step % 3 == 0;
    if (announced) shardwright_cache_announce(index, rows.data(), n);
    std::vector<int64_t> lines(n), missing(n), written_lines(room), written_rows(room), counts(5), old_rows(n), never(room);
    const IndexBatch batch{index, n, 0, 0, announced};
    if (step % 2) {
      check(shardwright_cache_place(&batch, 1, rows.data(), nullptr, lines.data(), missing.data(), old_rows.data(),
                                    written_lines.data(), written_rows.data(), counts.data()) < 0,
            "a batch has no place");
    } else {
      place_rows(index, announced, rows, lines, missing, written_lines, written_rows, counts);
    }
    check(shardwright_row_log_write(log, written_rows.data(), written_lines.data(), counts[1], parts, 2), "write");
    std::vector<int64_t> new_rows(counts[0]), new_lines(counts[0]);
    for (int64_t i = 0; i < counts[0]; ++i) new_rows[i] = rows[missing[i]], new_lines[i] = lines[missing[i]];
    never.resize(counts[0]);
    int64_t num_never = 0;
    check(shardwright_row_logs_read(&log, 1, counts.data(), new_rows.data(), new_lines.data(), parts, 2, never.data(),
                                    &num_never) < 0,
          "read");
    for (int64_t i = 0; i < num_never; ++i) first[new_lines[never[i]]] = second[new_lines[never[i]]] = 0;
    for (int64_t i = 0; i < n; ++i) {
      check(first[lines[i]] == table[rows[i]] && second[lines[i]] == table[rows[i]], "a row on a line");
      first[lines[i]] = second[lines[i]] = table[rows[i]] = step + 1;
    }
    const int64_t written = 1;
    shardwright_cache_release(&batch, 1, lines.data(), &written);
    check(shardwright_row_log_compact(log, 0.5, 4), "compact");
    if (step % 50 != 49) continue;
    const int64_t num = shardwright_cache_list(index, nullptr, nullptr, 1, 0);
    std::vector<int64_t> all_lines(num), all_rows(num);
    shardwright_cache_list(index, all_lines.data(), all_rows.data(), 1, 1);
    check(shardwright_row_log_write(log, all_rows.data(), all_lines.data(), num, parts, 2), "write all");
    const int64_t snapshot = shardwright_row_log_snapshot(log);
    const std::vector<int64_t> wanted = table;
    std::thread reader([&, snapshot, wanted] {
      std::vector<int64_t> values(kRows), copies(kRows), unwritten(kRows);
      const RowPart into[] = {{reinterpret_cast<char*>(values.data()), 8}, {reinterpret_cast<char*>(copies.data()), 8}};
      const int64_t n =
          shardwright_row_log_read_snapshot(log, snapshot, 0, kRows, into, 2, unwritten.data());
      check(n >= 0, "read a snapshot");
      for (int64_t i = 0; i < n; ++i) values[unwritten[i]] = 0;
      check(values == wanted, "a snapshot");
    });
    for (int64_t more = 0; more < 5; ++more) {
      const std::vector<int64_t> others = distinct_rows(kRows, kBatch);
      std::vector<int64_t> zeros(kBatch);
      for (const int64_t row : others) table[row] = first[0];
      check(shardwright_row_log_write(log, others.data(), zeros.data(), kBatch, parts, 2), "write beside a reader");
      std::vector<int64_t> found(kBatch);
      shardwright_cache_find(index, others.data(), kBatch, found.data());
      for (int64_t i = 0; i < kBatch; ++i)
        if (found[i] >= 0) first[found[i]] = second[found[i]] = table[others[i]];
    }
    reader.join();
    shardwright_row_log_release(log, snapshot);
  }
  shardwright_cache_free(index);
  shardwright_row_log_free(log);
  std::filesystem::remove_all(folder);
}

// Places random ids; each line must be of one id only.
void grow(int64_t expire_after) {
  constexpr int64_t kRows = 200, kSpares = 400, kBatch = 60;
  const int64_t options[] = {kRows, kSpares, 2, expire_after, 5, 1};
  std::vector<int64_t> key_of_line(kRows + 1 + kSpares);
  void* map = shardwright_id_map_new(options, key_of_line.data());
  for (int64_t step = 0; step < 400; ++step) {
    std::vector<int64_t> ids(kBatch);
    for (int64_t& id : ids) id = pick(2) ? pick(50) : int64_t(generator());
    const bool training = step % 5 != 4;
    std::vector<int64_t> lines(kBatch), update_lines(kBatch), fresh(kBatch), fresh_ids(kBatch), spares(kBatch), counts(2);
    check(shardwright_id_map_place(map, ids.data(), kBatch, training, lines.data(), update_lines.data(), fresh.data(),
                                   fresh_ids.data(), spares.data(), counts.data()) == 1,
          "ids have no place");
    for (int64_t i = 0; i < kBatch; ++i) check(key_of_line[lines[i]] == ids[i], "the id of a line");
    shardwright_id_map_release(map, spares.data(), counts[1]);
    if (step % 7 == 0) shardwright_id_map_remove(map, ids.data(), 5);
    if (step % 11 == 0) {
      std::vector<int64_t> removed(shardwright_id_map_take_removed(map, nullptr));
      shardwright_id_map_take_removed(map, removed.data());
    }
    shardwright_id_map_find(map, ids.data(), kBatch, lines.data());
  }
  shardwright_id_map_free(map);
}

}  // namespace

int main(int argc, char**) {
  // The race detector does not see what the kernel writes: with any argument, threads read the files.
  train(argc > 1 ? 0 : 8, 200);
  train(0, 200);
  grow(0);
  grow(20);
  std::puts("caches of rows, their files and the map of ids: no faults");
}
