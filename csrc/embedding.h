// What the embedding kernels work on: plain structs of 8-byte fields, filled by kernels/embedding.py.
#pragma once

#include <cstdint>

enum Dtype : int64_t { kFloat64, kFloat32, kFloat16, kBfloat16, kDtypes };
enum Pooling : int64_t { kSum, kMean, kNone };
enum Optimizer : int64_t { kSgd, kAdagrad, kRowwiseAdagrad, kAdam, kPartialRowwiseAdam, kLamb, kOptimizers };

struct Table {
  void* weight;
  void* state[2];  // by optimizer: momentum; sum; mean and square
  int64_t rows, dim;
  int64_t dtype;
  int64_t step;  // of this update, from 1
  uint64_t key;  // of its stochastic rounding
  int64_t trained;
};

// One feature: the table it reads and where its vectors, or their gradients, lie. They are doubles beside float64
// tables and floats beside all others; `stride` counts them from one bag (or, unpooled, one id) to the next.
struct Feature {
  int64_t table;
  int64_t pooling;
  void* vectors;
  int64_t stride;
};

// The ids of all features of a batch, feature by feature, bag by bag. Weights are of the vectors' type, or absent.
struct Lookups {
  const void* ids;
  int64_t wide;            // ids are int64, else int32
  const int64_t* offsets;  // features * batch + 1
  const void* weights;
  int64_t features, batch;
};

struct Settings {
  double lr, eps, beta1, beta2, momentum, weight_decay, clip, decoupled;  // spec/optimizer.py: NUMBERS
};

// Some bags (or single ids) of one feature; its ids are checked and widened.
struct PoolTile {
  const Table* table;
  const int64_t* ids;
  int64_t begin, num_ids;  // the first id's position among all, and how many there are
  const int64_t* offsets;  // of the first bag; null: every id is a bag
  int64_t bags;
  int64_t mean;
  const void* weights;  // of the first id, or null
  void* vectors;        // of the first bag
  int64_t stride;
};

// One lookup, sorted by row: `source` is its bag, or where the table's bags are not enough to know its gradient, its
// position among all ids.
struct Entry {
  uint32_t row, source;
};

// A row with more lookups than one chunk: its gradient is the sum of the sums of its chunks. That holds whoever sums
// them, so that neither the number of threads nor what else is in the batch changes a bit.
constexpr int64_t kChunk = 256;

struct Segment {
  int64_t begin, end;  // entries
  void* sums;          // one row of `padded(dim)` per chunk
};

struct UpdateTile {
  const Table* table;
  const Entry* entries;  // all of the table's
  int64_t begin, end;    // the runs that begin here are this tile's
  int64_t size;          // entries of the table
  const Segment* segments;  // the next rows of many chunks, ascending, summed before
  const Feature* features;
  int64_t only_feature;  // or -1 where several read the table
  const Lookups* lookups;
  const uint32_t* bag_of;  // by position; null: sources are bags
  const Settings* settings;
  void* scratch;  // `group_of(dim)` rows of `padded(dim)`
};

// The row kernels, compiled once per instruction set. All give the same bits: vectors of 16 in every one of them, no
// contraction, sums in one order.
struct RowKernels {
  void (*pool[kDtypes])(const PoolTile&);
  void (*dot[kDtypes])(const PoolTile&, void* for_weights);  // of the ids; the tile's vectors are gradients
  void (*sum[2])(const UpdateTile&, int64_t begin, int64_t end, void* sum);  // of a chunk; of floats, doubles
  int64_t (*sum_run[2])(const UpdateTile&, int64_t begin, const Segment** segment, void* sum);  // entries of one row
  void (*update[kDtypes][kOptimizers])(const UpdateTile&);
};

extern const RowKernels kRowKernels_baseline;
#ifdef SHARDWRIGHT_X86_LEVELS
extern const RowKernels kRowKernels_avx2, kRowKernels_avx512;
#endif

constexpr int64_t kLanes = 16;
constexpr int64_t padded(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

// How many rows are updated together: as many as leave the nearest cache room for more than their gradients.
constexpr int64_t kGroup = 16;
constexpr int64_t group_of(int64_t dim) { return dim <= 64 ? kGroup : dim <= 512 ? 1024 / dim : 2; }
