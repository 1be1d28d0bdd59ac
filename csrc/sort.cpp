// Stable radix sort of each table's lookups by row, over the bits that the table's row numbers need.
//
// Each pass counts the digits of every block, turns each table's counts into output places, and moves the entries of
// every block. The first pass reads the ids and checks them. Blocks depend only on positions, so the result does not
// depend on the number of threads.

#include "sort.h"

#include <algorithm>
#include <atomic>

namespace {

constexpr int64_t kBlock = 1 << 14;
constexpr int kWidestDigit = 11;

struct Block {
  int64_t table, feature;
  int64_t begin, end;  // positions
  int64_t place;       // index of its first lookup among the table's
  int64_t counts;      // index of its first counter
};

struct Digits {
  int passes, bits;
};

Digits digits_of(int64_t rows) {
  int bits = 1;
  while (bits < 32 && (int64_t(1) << bits) < rows) ++bits;
  const int passes = (bits + kWidestDigit - 1) / kWidestDigit;
  return {passes, (bits + passes - 1) / passes};
}

class Sort {
 public:
  Sort(const Table* tables, int64_t num_tables, const Feature* features, const Lookups& lookups, bool positions)
      : lookups_(lookups), first_(num_tables, 0), rows_(num_tables), digits_(num_tables), blocks_of_(num_tables) {
    total_ = lookups.offsets[lookups.features * lookups.batch];
    result_.tables.resize(num_tables, {nullptr, 0, -1, positions || lookups.weights});
    std::vector<int64_t> readers(num_tables, 0);
    for (int64_t f = 0; f < lookups.features; ++f) {
      SortedTable& table = result_.tables[features[f].table];
      table.only_feature = readers[features[f].table]++ ? -1 : f;
      table.by_position |= features[f].pooling == kNone;
    }
    for (int64_t t = 0; t < num_tables; ++t) {
      rows_[t] = tables[t].rows;
      digits_[t] = digits_of(tables[t].rows);
      first_[t] = t ? first_[t - 1] + result_.tables[t - 1].size : 0;
      cut(t, features);
    }
    result_.entries = scratch<Entry>(total_);
    result_.spare = scratch<Entry>(total_);
    counts_ = scratch<uint32_t>(num_counts_);
    for (const SortedTable& table : result_.tables)
      if (table.by_position && !result_.bag_of) result_.bag_of = scratch<uint32_t>(total_);
  }

  Sorted run() {
    int passes = 0;
    for (const Digits& digits : digits_) passes = std::max(passes, digits.passes);
    std::atomic<int64_t> outside{INT64_MAX};
    const int64_t num_blocks = blocks_.size(), num_tables = rows_.size();
    const int threads = threads_for(total_);
    for (int pass = 0; pass < passes; ++pass) {
#pragma omp parallel num_threads(threads)
      {
#pragma omp for schedule(dynamic)
        for (int64_t b = 0; b < num_blocks; ++b) {
          const int64_t found = count(blocks_[b], pass);
          int64_t now = outside.load();
          while (found >= 0 && found < now && !outside.compare_exchange_weak(now, found)) {
          }
        }
#pragma omp for schedule(dynamic)
        for (int64_t t = 0; t < num_tables; ++t) places(t, pass);
      }
      if (outside != INT64_MAX) {
        result_.outside = outside;
        return std::move(result_);
      }
#pragma omp parallel for num_threads(threads) schedule(dynamic)
      for (int64_t b = 0; b < num_blocks; ++b) move(blocks_[b], pass);
    }
    for (int64_t t = 0; t < num_tables; ++t)
      result_.tables[t].entries = (digits_[t].passes % 2 ? result_.entries.get() : result_.spare.get()) + first_[t];
    return std::move(result_);
  }

 private:
  void cut(int64_t t, const Feature* features) {
    blocks_of_[t].begin = blocks_.size();
    for (int64_t f = 0; f < lookups_.features; ++f) {
      if (features[f].table != t) continue;
      const int64_t end = lookups_.offsets[(f + 1) * lookups_.batch];
      for (int64_t begin = lookups_.offsets[f * lookups_.batch]; begin < end; begin += kBlock) {
        const int64_t stop = std::min(end, begin + kBlock);
        blocks_.push_back({t, f, begin, stop, result_.tables[t].size, num_counts_});
        num_counts_ += int64_t(1) << digits_[t].bits;
        result_.tables[t].size += stop - begin;
      }
    }
    blocks_of_[t].end = blocks_.size();
  }

  const Entry* from(int pass) const { return pass % 2 ? result_.entries.get() : result_.spare.get(); }
  Entry* to(int pass) const { return pass % 2 ? result_.spare.get() : result_.entries.get(); }

  // Returns the position of the first id outside the table, or -1.
  int64_t count(const Block& block, int pass) {
    const Digits digits = digits_[block.table];
    if (pass >= digits.passes) return -1;
    uint32_t* counts = counts_.get() + block.counts;
    std::fill_n(counts, int64_t(1) << digits.bits, 0);
    if (pass == 0)
      return lookups_.wide ? count_ids(static_cast<const int64_t*>(lookups_.ids), block, counts)
                           : count_ids(static_cast<const int32_t*>(lookups_.ids), block, counts);
    const uint32_t mask = (1u << digits.bits) - 1;
    const int shift = pass * digits.bits;
    const Entry* entries = from(pass) + first_[block.table] + block.place;
    for (int64_t i = 0; i < block.end - block.begin; ++i) ++counts[entries[i].row >> shift & mask];
    return -1;
  }

  template <typename Id>
  int64_t count_ids(const Id* ids, const Block& block, uint32_t* counts) {
    const uint64_t rows = rows_[block.table], mask = (uint64_t(1) << digits_[block.table].bits) - 1;
    for (int64_t i = block.begin; i < block.end; ++i) {
      const uint64_t row = uint64_t(int64_t(ids[i]));
      if (row >= rows) return i;
      ++counts[row & mask];
    }
    return -1;
  }

  // Turns counts of a table's blocks into the first output place of each (digit, block).
  void places(int64_t t, int pass) {
    if (pass >= digits_[t].passes) return;
    const int64_t radix = int64_t(1) << digits_[t].bits;
    uint32_t next = 0;
    for (int64_t digit = 0; digit < radix; ++digit)
      for (int64_t b = blocks_of_[t].begin; b < blocks_of_[t].end; ++b) {
        uint32_t& count = counts_[blocks_[b].counts + digit];
        const uint32_t here = count;
        count = next;
        next += here;
      }
  }

  void move(const Block& block, int pass) {
    const Digits digits = digits_[block.table];
    if (pass >= digits.passes) return;
    if (pass == 0)
      return lookups_.wide ? move_ids(static_cast<const int64_t*>(lookups_.ids), block)
                           : move_ids(static_cast<const int32_t*>(lookups_.ids), block);
    uint32_t* next = counts_.get() + block.counts;
    const uint32_t mask = (1u << digits.bits) - 1;
    const int shift = pass * digits.bits;
    const Entry* entries = from(pass) + first_[block.table] + block.place;
    Entry* out = to(pass) + first_[block.table];
    for (int64_t i = 0; i < block.end - block.begin; ++i) out[next[entries[i].row >> shift & mask]++] = entries[i];
  }

  template <typename Id>
  void move_ids(const Id* ids, const Block& block) {
    uint32_t* next = counts_.get() + block.counts;
    const uint32_t mask = (1u << digits_[block.table].bits) - 1;
    const bool by_position = result_.tables[block.table].by_position;
    const int64_t* bags = lookups_.offsets + block.feature * lookups_.batch;
    int64_t bag = std::upper_bound(bags, bags + lookups_.batch, block.begin) - lookups_.offsets - 1;
    Entry* out = to(0) + first_[block.table];
    for (int64_t i = block.begin; i < block.end; ++i) {
      while (lookups_.offsets[bag + 1] <= i) ++bag;
      if (by_position) result_.bag_of[i] = uint32_t(bag);
      const uint32_t row = uint32_t(ids[i]);
      out[next[row & mask]++] = {row, uint32_t(by_position ? i : bag)};
    }
  }

  struct Range {
    int64_t begin, end;
  };

  const Lookups& lookups_;
  int64_t total_ = 0, num_counts_ = 0;
  std::vector<int64_t> first_, rows_;
  std::vector<Digits> digits_;
  std::vector<Range> blocks_of_;
  std::vector<Block> blocks_;
  Scratch<uint32_t> counts_;
  Sorted result_;
};

}  // namespace

Sorted sort_by_row(const Table* tables, int64_t num_tables, const Feature* features, const Lookups& lookups,
                   bool positions) {
  return Sort(tables, num_tables, features, lookups, positions).run();
}
