// Sorts the lookups of a batch by table and row, in linear time.
#pragma once

#include <vector>

#include "threads.h"

// The lookups of a table, sorted by row; lookups of the same row are in the order of the batch.
struct SortedTable {
  const Entry* entries;
  int64_t size;
  int64_t only_feature;  // the only feature that reads it, or -1
  bool by_position;      // whether sources are positions instead of bags
};

struct Sorted {
  std::vector<SortedTable> tables;
  Scratch<Entry> entries, spare;
  Scratch<uint32_t> bag_of;  // bag of each position, for tables with `by_position`
  int64_t outside = -1;      // position of the first id that is outside its table (nothing is sorted then), or -1
};

// `positions`: sources are positions for every table, even if its gradients do not need them.
Sorted sort_by_row(const Table* tables, int64_t num_tables, const Feature* features, const Lookups& lookups,
                   bool positions);
