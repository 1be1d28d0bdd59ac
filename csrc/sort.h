// The lookups of a batch in the order of the rows they touch, table by table, in time linear in their number.
#pragma once

#include <vector>

#include "threads.h"

// What one table's lookups are, sorted by row and for one row in the order of the batch.
struct SortedTable {
  const Entry* entries;
  int64_t size;
  int64_t only_feature;  // the one that reads it, or -1
  bool by_position;      // sources are positions, else bags
};

struct Sorted {
  std::vector<SortedTable> tables;
  Scratch<Entry> entries, spare;
  Scratch<uint32_t> bag_of;  // by position, for tables by position
  int64_t outside = -1;      // position of the first id that is outside its table; then nothing is sorted
};

// `positions`: every table by position, whether its gradients need it or not.
Sorted sort_by_row(const Table* tables, int64_t num_tables, const Feature* features, const Lookups& lookups,
                   bool positions);
