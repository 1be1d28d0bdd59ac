// What is done to the rows of one tile: pooled, or their gradients summed and the optimizer's step taken.
//
// Compiled once per instruction set, LEVEL being its name; the threads are the callers' (lookup.cpp, update.cpp).

#include "optimizers.h"
#include "vectors.h"

namespace {

constexpr int64_t kAhead = 16;        // lookups to prefetch before their turn
constexpr int64_t kGradientsAhead = 4;
constexpr int64_t kBytes[kDtypes] = {8, 4, 2, 2};

// The row of this tile's i-th id, or when they are used up, of the next tile's.
template <typename W>
inline void prefetch_row(const PoolTile& tile, int64_t i) {
  const PoolTile* at = &tile;
  if (i >= tile.num_ids) {
    at = tile.next;
    i -= tile.num_ids;
    if (!at || i >= at->num_ids) return;
  }
  const int64_t dim = at->table->dim;
  prefetch(static_cast<const char*>(at->table->weight) + at->ids[i] * dim * kBytes[at->table->dtype],
           dim * kBytes[at->table->dtype]);
}

// One bag's columns from `column` on, GROUPS vectors wide, the last of them `tail` columns.
template <typename W, int GROUPS, bool AHEAD>
inline void pool_bag(const PoolTile& tile, int64_t column, int64_t tail, int64_t bag, int64_t begin, int64_t end) {
  using A = typename Wide<W>::type;
  const W* table = static_cast<const W*>(tile.table->weight);
  const A* weights = static_cast<const A*>(tile.weights);
  const int64_t dim = tile.table->dim;
  V<A> sum[GROUPS];
  for (int group = 0; group < GROUPS; ++group) sum[group] = V<A>(0);
  for (int64_t i = begin; i < end; ++i) {
    if (AHEAD) prefetch_row<W>(tile, i + kAhead);
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
  for (int64_t bag = 0; bag < tile.bags; ++bag) {
    const int64_t begin = tile.offsets ? tile.offsets[bag] - first : bag;
    const int64_t end = tile.offsets ? tile.offsets[bag + 1] - first : bag + 1;
    pool_bag<W, GROUPS, AHEAD>(tile, column, tail, bag, begin, end);
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

// Where a lookup's gradient lies. PLAIN: a bag of the only feature that reads the table, summed and without weights.
template <typename A, bool PLAIN>
struct Gradients {
  explicit Gradients(const UpdateTile& tile) : tile(tile), lookups(*tile.lookups) {
    if (!PLAIN) return;
    const Feature& feature = tile.features[tile.only_feature];
    stride = feature.stride;
    first = static_cast<const A*>(feature.vectors) - tile.only_feature * lookups.batch * stride;
  }

  Gradient<A> of(uint32_t source) const {
    if (PLAIN) return {first + source * stride, A(1)};
    const int64_t bag = tile.bag_of ? tile.bag_of[source] : source;
    const int64_t at = tile.only_feature >= 0 ? tile.only_feature : uint32_t(bag) / uint32_t(lookups.batch);
    const Feature& feature = tile.features[at];
    const int64_t before = at * lookups.batch;
    const int64_t place = feature.pooling == kNone ? source - lookups.offsets[before] : bag - before;
    A scale = 1;
    if (feature.pooling == kMean) scale /= A(lookups.offsets[bag + 1] - lookups.offsets[bag]);
    if (lookups.weights) scale *= static_cast<const A*>(lookups.weights)[source];
    return {static_cast<const A*>(feature.vectors) + place * feature.stride, scale};
  }

  const UpdateTile& tile;
  const Lookups& lookups;
  const A* first = nullptr;
  int64_t stride = 0;
};

// Sums some columns of at most a chunk of one row's gradients, in the order of the lookups.
template <typename A, bool PLAIN, int GROUPS, bool AHEAD>
inline void sum_columns(const Gradients<A, PLAIN>& gradients, int64_t begin, int64_t end, int64_t column, int64_t tail,
                        A* into) {
  const UpdateTile& tile = gradients.tile;
  V<A> sum[GROUPS];
  for (int group = 0; group < GROUPS; ++group) sum[group] = V<A>(0);
  for (int64_t i = begin; i < end; ++i) {
    if (AHEAD && i + kGradientsAhead < tile.size)
      prefetch(gradients.of(tile.entries[i + kGradientsAhead].source).vector, tile.table->dim * sizeof(A));
    const Gradient<A> gradient = gradients.of(tile.entries[i].source);
    for (int group = 0; group < GROUPS; ++group) {
      V<A> part = load(gradient.vector + column + group * kLanes, group + 1 < GROUPS ? kLanes : tail);
      if (!PLAIN) part = part * gradient.scale;
      sum[group] = sum[group] + part;
    }
  }
  for (int group = 0; group < GROUPS; ++group) put16(sum[group], into + column + group * kLanes);
}

template <typename A, bool PLAIN, bool AHEAD>
inline void sum_up_to_four(const Gradients<A, PLAIN>& gradients, int64_t begin, int64_t end, int64_t column,
                           int64_t columns, A* into) {
  const int64_t tail = columns % kLanes ? columns % kLanes : kLanes;
  switch ((columns + kLanes - 1) / kLanes) {
    case 1: return sum_columns<A, PLAIN, 1, AHEAD>(gradients, begin, end, column, tail, into);
    case 2: return sum_columns<A, PLAIN, 2, AHEAD>(gradients, begin, end, column, tail, into);
    case 3: return sum_columns<A, PLAIN, 3, AHEAD>(gradients, begin, end, column, tail, into);
    default: return sum_columns<A, PLAIN, 4, AHEAD>(gradients, begin, end, column, tail, into);
  }
}

template <typename A, bool PLAIN>
void sum_entries(const Gradients<A, PLAIN>& gradients, int64_t begin, int64_t end, A* into) {
  const int64_t dim = gradients.tile.table->dim, step = 4 * kLanes;
  sum_up_to_four<A, PLAIN, true>(gradients, begin, end, 0, dim < step ? dim : step, into);
  for (int64_t column = step; column < dim; column += step)
    sum_up_to_four<A, PLAIN, false>(gradients, begin, end, column, dim - column < step ? dim - column : step, into);
}

template <typename A>
void sum_chunk(const UpdateTile& tile, int64_t begin, int64_t end, void* into) {
  sum_entries(Gradients<A, false>(tile), begin, end, static_cast<A*>(into));
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

// Rows are taken in groups: while the gradients of a group are summed, its rows and their state are on their way.
template <typename W, typename Rule, bool PLAIN>
void update_rows(const UpdateTile& tile) {
  using A = typename Wide<W>::type;
  const Table& table = *tile.table;
  const Rule rule(table, *tile.settings);
  const Gradients<A, PLAIN> gradients(tile);
  const Entry* entries = tile.entries;
  const Segment* segment = tile.segments;
  const int64_t width = padded(table.dim), group = group_of(table.dim);
  W* weight = static_cast<W*>(table.weight);
  uint32_t rows[kGroup];
  int64_t i = tile.begin;
  while (i > 0 && i < tile.end && entries[i].row == entries[i - 1].row) ++i;
  while (i < tile.end) {
    int64_t taken = 0;
    for (; taken < group && i < tile.end; ++taken) {
      const uint32_t row = rows[taken] = entries[i].row;
      prefetch(weight + row * table.dim, table.dim * sizeof(W));
      rule.prefetch_state(row);
      A* sum = static_cast<A*>(tile.scratch) + taken * width;
      int64_t end = i + 1;
      while (end < tile.size && end < i + kChunk && entries[end].row == row) ++end;
      if (end < tile.size && entries[end].row == row) {
        while (segment->begin < i) ++segment;
        end = segment->end;
        add_chunks<A>(tile, *segment, sum);
      } else {
        sum_entries(gradients, i, end, sum);
      }
      i = end;
    }
    for (int64_t at = 0; at < taken; ++at)
      rule.apply(weight + rows[at] * table.dim, static_cast<A*>(tile.scratch) + at * width, rows[at]);
  }
}

template <typename W, template <typename, bool> class Rule>
void update(const UpdateTile& tile) {
  const bool plain = tile.only_feature >= 0 && !tile.bag_of && tile.features[tile.only_feature].pooling == kSum;
  const bool whole = tile.table->dim % kLanes == 0;
  if (whole)
    plain ? update_rows<W, Rule<W, true>, true>(tile) : update_rows<W, Rule<W, true>, false>(tile);
  else
    plain ? update_rows<W, Rule<W, false>, true>(tile) : update_rows<W, Rule<W, false>, false>(tile);
}

}  // namespace

#define SHARDWRIGHT_JOIN(a, b) a##b
#define SHARDWRIGHT_NAME(level) SHARDWRIGHT_JOIN(kRowKernels_, level)
#define SHARDWRIGHT_RULES(W)                                                                                  \
  {                                                                                                           \
    update<W, Sgd>, update<W, Adagrad>, update<W, RowwiseAdagrad>, update<W, Adam>,                           \
        update<W, PartialRowwiseAdam>, update<W, Lamb>                                                        \
  }

const RowKernels SHARDWRIGHT_NAME(LEVEL) = {
    {pool<double>, pool<float>, pool<Float16>, pool<Bfloat16>},
    {dot<double>, dot<float>, dot<Float16>, dot<Bfloat16>},
    {sum_chunk<float>, sum_chunk<double>},
    {SHARDWRIGHT_RULES(double), SHARDWRIGHT_RULES(float), SHARDWRIGHT_RULES(Float16), SHARDWRIGHT_RULES(Bfloat16)},
};
