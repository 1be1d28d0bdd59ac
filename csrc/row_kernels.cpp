// What is done to the rows of one tile: pooled, or their gradients summed and the optimizer's step taken.
//
// Compiled once per instruction set, LEVEL being its name; the threads are the callers' (lookup.cpp, update.cpp).

#include "optimizers.h"
#include "vectors.h"

namespace {

constexpr int64_t kAhead = 16;        // lookups to prefetch before their turn
constexpr int64_t kGradientsAhead = 4;

// One bag's columns from `column` on, GROUPS vectors wide, the last of them `tail` columns.
template <typename W, int GROUPS, bool AHEAD>
inline void pool_bag(const PoolTile& tile, int64_t column, int64_t tail, int64_t bag, int64_t begin, int64_t end,
                     int64_t last) {
  using A = typename Wide<W>::type;
  const W* table = static_cast<const W*>(tile.table->weight);
  const A* weights = static_cast<const A*>(tile.weights);
  const int64_t dim = tile.table->dim;
  V<A> sum[GROUPS];
  for (int group = 0; group < GROUPS; ++group) sum[group] = V<A>(0);
  for (int64_t i = begin; i < end; ++i) {
    if (AHEAD && i + kAhead < last) prefetch(table + tile.ids[i + kAhead] * dim, dim * sizeof(W));
    const W* row = table + tile.ids[i] * dim + column;
    for (int group = 0; group < GROUPS; ++group) {
      const V<A> part = load(row + group * kLanes, group + 1 < GROUPS ? kLanes : tail);
      sum[group] = sum[group] + (weights ? part * weights[i] : part);
    }
  }
  A* out = static_cast<A*>(tile.vectors) + bag * tile.stride + column;
  const A length = end > begin ? A(end - begin) : A(1);
  for (int group = 0; group < GROUPS; ++group) {
    if (tile.mean) sum[group] = sum[group] / length;
    put(sum[group], out + group * kLanes, group + 1 < GROUPS ? kLanes : tail);
  }
}

template <typename W, int GROUPS, bool AHEAD>
void pool_columns(const PoolTile& tile, int64_t column, int64_t tail) {
  const int64_t first = tile.offsets ? tile.offsets[0] : 0;
  const int64_t last = tile.offsets ? tile.offsets[tile.bags] - first : tile.bags;
  for (int64_t bag = 0; bag < tile.bags; ++bag) {
    const int64_t begin = tile.offsets ? tile.offsets[bag] - first : bag;
    const int64_t end = tile.offsets ? tile.offsets[bag + 1] - first : bag + 1;
    pool_bag<W, GROUPS, AHEAD>(tile, column, tail, bag, begin, end, last);
  }
}

template <typename W, bool AHEAD>
void pool_up_to_four(const PoolTile& tile, int64_t column, int64_t columns) {
  const int64_t tail = columns % kLanes ? columns % kLanes : kLanes;
  switch ((columns + kLanes - 1) / kLanes) {
    case 1: return pool_columns<W, 1, AHEAD>(tile, column, tail);
    case 2: return pool_columns<W, 2, AHEAD>(tile, column, tail);
    case 3: return pool_columns<W, 3, AHEAD>(tile, column, tail);
    default: return pool_columns<W, 4, AHEAD>(tile, column, tail);
  }
}

template <typename W>
void pool(const PoolTile& tile) {
  const int64_t dim = tile.table->dim, step = 4 * kLanes;
  pool_up_to_four<W, true>(tile, 0, dim < step ? dim : step);
  for (int64_t column = step; column < dim; column += step)
    pool_up_to_four<W, false>(tile, column, dim - column < step ? dim - column : step);
}

// The gradient of each id's weight: its row times the gradient of its bag.
template <typename W>
void dot(const PoolTile& tile, void* for_weights) {
  using A = typename Wide<W>::type;
  const W* table = static_cast<const W*>(tile.table->weight);
  A* out = static_cast<A*>(for_weights);
  const int64_t dim = tile.table->dim, first = tile.offsets ? tile.offsets[0] : 0;
  for (int64_t bag = 0; bag < tile.bags; ++bag) {
    const int64_t begin = tile.offsets ? tile.offsets[bag] - first : bag;
    const int64_t end = tile.offsets ? tile.offsets[bag + 1] - first : bag + 1;
    const A* gradient = static_cast<const A*>(tile.vectors) + bag * tile.stride;
    const A length = tile.mean ? A(end - begin) : A(1);
    for (int64_t i = begin; i < end; ++i) {
      const W* row = table + tile.ids[i] * dim;
      V<A> sum(0);
      for (int64_t column = 0; column < dim; column += kLanes) {
        const int64_t n = dim - column < kLanes ? dim - column : kLanes;
        sum = sum + load(row + column, n) * (load(gradient + column, n) / length);
      }
      out[i] = total<A>(sum);
    }
  }
}

template <typename A>
struct Gradient {
  const A* vector;
  A scale;
};

template <typename A>
inline Gradient<A> gradient_of(const UpdateTile& tile, uint32_t source) {
  const Lookups& lookups = *tile.lookups;
  const int64_t bag = tile.bag_of ? tile.bag_of[source] : source;
  const int64_t at = tile.only_feature >= 0 ? tile.only_feature : uint32_t(bag) / uint32_t(lookups.batch);
  const Feature& feature = tile.features[at];
  const int64_t first = at * lookups.batch;
  const int64_t place = feature.pooling == kNone ? source - lookups.offsets[first] : bag - first;
  A scale = 1;
  if (feature.pooling == kMean) scale /= A(lookups.offsets[bag + 1] - lookups.offsets[bag]);
  if (lookups.weights) scale *= static_cast<const A*>(lookups.weights)[source];
  return {static_cast<const A*>(feature.vectors) + place * feature.stride, scale};
}

// Sums at most a chunk of one row's gradients, in the order of the lookups.
template <typename A>
void sum_entries(const UpdateTile& tile, int64_t begin, int64_t end, void* into) {
  const int64_t dim = tile.table->dim;
  A* sum = static_cast<A*>(into);
  for (int64_t i = begin; i < end; ++i) {
    if (i + kGradientsAhead < tile.size)
      prefetch(gradient_of<A>(tile, tile.entries[i + kGradientsAhead].source).vector, dim * sizeof(A));
    const Gradient<A> gradient = gradient_of<A>(tile, tile.entries[i].source);
    for (int64_t column = 0; column < dim; column += kLanes) {
      const int64_t n = dim - column < kLanes ? dim - column : kLanes;
      const V<A> part = load(gradient.vector + column, n) * gradient.scale;
      put16<A>(i == begin ? part : get16(sum + column) + part, sum + column);
    }
  }
}

template <typename A>
void add_chunks(const UpdateTile& tile, const Segment& segment, A* sum) {
  const int64_t width = padded(tile.table->dim), chunks = (segment.end - segment.begin + kChunk - 1) / kChunk;
  const A* sums = static_cast<const A*>(segment.sums);
  std::memcpy(sum, sums, width * sizeof(A));
  for (int64_t chunk = 1; chunk < chunks; ++chunk)
    for (int64_t column = 0; column < width; column += kLanes)
      put16<A>(get16(sum + column) + get16(sums + chunk * width + column), sum + column);
}

template <typename W, typename Rule>
void update(const UpdateTile& tile) {
  using A = typename Wide<W>::type;
  const Table& table = *tile.table;
  const int64_t dim = table.dim;
  const Rule rule(table, *tile.settings);
  A* sum = static_cast<A*>(tile.scratch);
  const Segment* segment = tile.segments;
  const Entry* entries = tile.entries;
  int64_t i = tile.begin;
  while (i > 0 && i < tile.end && entries[i].row == entries[i - 1].row) ++i;
  while (i < tile.end) {
    const uint32_t row = entries[i].row;
    int64_t end = i + 1;
    while (end < tile.size && end < i + kChunk && entries[end].row == row) ++end;
    if (end < tile.size && entries[end].row == row) {
      while (segment->begin < i) ++segment;
      end = segment->end;
      add_chunks<A>(tile, *segment, sum);
    } else {
      sum_entries<A>(tile, i, end, sum);
    }
    const int64_t ahead = end + kAhead;
    for (int64_t soon = i + kAhead; soon < ahead && soon < tile.size; ++soon) {
      const uint32_t next = entries[soon].row;
      if (next == entries[soon - 1].row) continue;
      prefetch(static_cast<const W*>(table.weight) + next * dim, dim * sizeof(W));
      rule.prefetch_state(next);
    }
    rule.apply(static_cast<W*>(table.weight) + int64_t(row) * dim, sum, row);
    i = end;
  }
}

}  // namespace

#define SHARDWRIGHT_JOIN(a, b) a##b
#define SHARDWRIGHT_NAME(level) SHARDWRIGHT_JOIN(kRowKernels_, level)
#define SHARDWRIGHT_RULES(W)                                                                                  \
  {                                                                                                           \
    update<W, Sgd<W>>, update<W, Adagrad<W>>, update<W, RowwiseAdagrad<W>>, update<W, Adam<W>>,               \
        update<W, PartialRowwiseAdam<W>>, update<W, Lamb<W>>                                                  \
  }

const RowKernels SHARDWRIGHT_NAME(LEVEL) = {
    {pool<double>, pool<float>, pool<Float16>, pool<Bfloat16>},
    {dot<double>, dot<float>, dot<Float16>, dot<Bfloat16>},
    {sum_entries<float>, sum_entries<double>},
    {SHARDWRIGHT_RULES(double), SHARDWRIGHT_RULES(float), SHARDWRIGHT_RULES(Float16), SHARDWRIGHT_RULES(Bfloat16)},
};
