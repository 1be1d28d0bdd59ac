// Arguments of the embedding kernels: plain structs of 8-byte fields, filled by kernels/embedding.py.
#pragma once

#include <cstdint>

enum Dtype : int64_t { kFloat64, kFloat32, kFloat16, kBfloat16, kDtypes };
enum Pooling : int64_t { kSum, kMean, kNone };
enum Optimizer : int64_t { kSgd, kAdagrad, kRowwiseAdagrad, kAdam, kPartialRowwiseAdam, kLamb, kOptimizers };

struct Table {
  void* weight;
  void* state[2];  // depends on the optimizer: momentum; sum; mean and square
  int64_t rows, dim;
  int64_t dtype;
  int64_t step;  // number of this update, from 1
  uint64_t key;  // key of stochastic rounding
  int64_t trained;
  const int64_t* row_numbers;  // by which values are rounded, where `weight` has lines of a cache; or null
};

// A feature: its table, and the memory of its vectors or their gradients. Their numbers are doubles for float64 tables,
// else floats; `stride` is the count of numbers from one bag (or, if unpooled, one id) to the next.
struct Feature {
  int64_t table;
  int64_t pooling;
  void* vectors;
  int64_t stride;
};

// The ids of all features of a batch, feature by feature, bag by bag. Weights have the vectors' type, or are null.
struct Lookups {
  const void* ids;
  int64_t wide;            // whether ids are int64 instead of int32
  const int64_t* offsets;  // features * batch + 1
  const void* weights;
  int64_t features, batch;
};

struct Settings {
  double lr, eps, beta1, beta2, momentum, weight_decay, clip, decoupled;  // spec/optimizer.py: NUMBERS
};

// Some bags (or single ids) of a feature; the ids are within the table and int64.
struct PoolTile {
  const Table* table;
  const int64_t* ids;
  int64_t begin, num_ids;  // position of the first id among all ids of the batch, and number of ids
  const int64_t* offsets;  // offset of the first bag; null: every id is a bag
  int64_t bags;
  int64_t mean;
  const void* weights;  // weight of the first id, or null
  void* vectors;        // vector of the first bag
  int64_t stride;
};

// A lookup, sorted by row: `source` is its bag, or, if the bag does not determine its gradient (unpooled, weighted),
// its position among all ids.
struct Entry {
  uint32_t row, source;
};

// A row with more lookups than a chunk. Its gradient is the sum of the sums of its chunks, on any thread, so that
// neither the number of threads nor the other lookups of the batch change a bit.
constexpr int64_t kChunk = 256;

struct Segment {
  int64_t begin, end;  // entries
  void* sums;          // a row of `padded(dim)` numbers per chunk
};

struct UpdateTile {
  const Table* table;
  const Entry* entries;  // all entries of the table
  int64_t begin, end;    // the tile has the runs (entries of a row) that begin in this range
  int64_t size;          // number of entries of the table
  const Segment* segments;  // segments from `begin` on, ascending, whose chunks are summed already
  const Feature* features;
  int64_t only_feature;  // the only feature that reads the table, or -1
  const Lookups* lookups;
  const uint32_t* bag_of;  // bag of each position; null: sources are bags
  const Settings* settings;
  void* scratch;  // `group_of(dim)` rows of `padded(dim)`
};

// Row kernels, compiled once per instruction set. Results are bitwise equal: all use vectors of 16 numbers, no FMA
// contraction, and the same order of sums.
struct RowKernels {
  void (*pool[kDtypes])(const PoolTile&);
  void (*dot[kDtypes])(const PoolTile&, void* for_weights);  // gradients of id weights; vectors are gradients
  void (*sum[2])(const UpdateTile&, int64_t begin, int64_t end, void* sum);  // a chunk; for floats, doubles
  int64_t (*sum_run[2])(const UpdateTile&, int64_t begin, const Segment** segment, void* sum);  // all entries of a row
  void (*update[kDtypes][kOptimizers])(const UpdateTile&);
};

extern const RowKernels kRowKernels_baseline;
#ifdef SHARDWRIGHT_X86_LEVELS
extern const RowKernels kRowKernels_avx2, kRowKernels_avx512;
#endif

constexpr int64_t kLanes = 16;
constexpr int64_t padded(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

// Rows updated together: their gradients must take only a part of the L1 cache.
constexpr int64_t kGroup = 16;
constexpr int64_t group_of(int64_t dim) { return dim <= 64 ? kGroup : dim <= 512 ? 1024 / dim : 2; }
