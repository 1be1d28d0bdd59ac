// Kernels for the rows of a tile: pool them, or sum their gradients and apply the optimizer.
//
// Compiled once per instruction set, whose name is LEVEL; the callers (lookup.cpp, update.cpp) run the threads.

#include "optimizers.h"
#include "vectors.h"

namespace {

constexpr int64_t kAhead = 16;        // number of lookups to prefetch ahead
constexpr int64_t kGradientsAhead = 4;

// Pools some columns of every bag: GROUPS whole vectors, or, if not WHOLE, a vector of `tail` columns.
template <typename W, int GROUPS, bool WHOLE, bool WEIGHTED>
void pool_columns(const PoolTile& tile, int64_t column, int64_t tail) {
  using A = typename Wide<W>::type;
  const W* table = static_cast<const W*>(tile.table->weight);
  const A* weights = static_cast<const A*>(tile.weights);
  const int64_t dim = tile.table->dim, first = tile.offsets ? tile.offsets[0] : 0;
  const int64_t n = WHOLE ? kLanes : tail, last = column ? 0 : tile.num_ids - kAhead;
  A* out = static_cast<A*>(tile.vectors) + column;
  int64_t i = 0;
  for (int64_t bag = 0; bag < tile.bags; ++bag, out += tile.stride) {
    const int64_t begin = i, end = tile.offsets ? tile.offsets[bag + 1] - first : bag + 1;
    V<A> sum[GROUPS];
    for (int group = 0; group < GROUPS; ++group) sum[group] = V<A>(0);
    for (; i < end; ++i) {
      if (i < last) prefetch(table + tile.ids[i + kAhead] * dim, dim * sizeof(W));
      const W* row = table + tile.ids[i] * dim + column;
      for (int group = 0; group < GROUPS; ++group) {
        const V<A> part = load(row + group * kLanes, n);
        sum[group] = sum[group] + (WEIGHTED ? part * weights[i] : part);
      }
    }
    const A length = end > begin ? A(end - begin) : A(1);
    for (int group = 0; group < GROUPS; ++group)
      put(tile.mean ? sum[group] / length : sum[group], out + group * kLanes, n);
  }
}

template <typename W, bool WEIGHTED>
void pool_rows(const PoolTile& tile) {
  const int64_t dim = tile.table->dim, whole = dim / kLanes * kLanes;
  for (int64_t column = 0; column < whole; column += 4 * kLanes) switch ((whole - column) / kLanes) {
      case 1: pool_columns<W, 1, true, WEIGHTED>(tile, column, kLanes); break;
      case 2: pool_columns<W, 2, true, WEIGHTED>(tile, column, kLanes); break;
      case 3: pool_columns<W, 3, true, WEIGHTED>(tile, column, kLanes); break;
      default: pool_columns<W, 4, true, WEIGHTED>(tile, column, kLanes);
    }
  if (whole < dim) pool_columns<W, 1, false, WEIGHTED>(tile, whole, dim - whole);
}

template <typename W>
void pool(const PoolTile& tile) {
  tile.weights ? pool_rows<W, true>(tile) : pool_rows<W, false>(tile);
}

// Gradient of each id's weight: the dot product of its row and the gradient of its bag.
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

// Finds the gradient of a lookup. PLAIN: only one feature reads the table, sum-pooled and without id weights.
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

// Sums some columns of a row's gradients, of at most a chunk of lookups, in their order.
template <typename A, bool PLAIN, int GROUPS, bool WHOLE>
inline void sum_columns(const Gradients<A, PLAIN>& gradients, int64_t begin, int64_t end, int64_t column, int64_t tail,
                        A* into) {
  const Entry* entries = gradients.tile.entries;
  const int64_t n = WHOLE ? kLanes : tail, last = column ? 0 : gradients.tile.size - kGradientsAhead;
  const int64_t bytes = gradients.tile.table->dim * sizeof(A);
  V<A> sum[GROUPS];
  for (int group = 0; group < GROUPS; ++group) sum[group] = V<A>(0);
  for (int64_t i = begin; i < end; ++i) {
    if (i < last) prefetch(gradients.of(entries[i + kGradientsAhead].source).vector, bytes);
    const Gradient<A> gradient = gradients.of(entries[i].source);
    for (int group = 0; group < GROUPS; ++group) {
      const V<A> part = load(gradient.vector + column + group * kLanes, n);
      sum[group] = sum[group] + (PLAIN ? part : part * gradient.scale);
    }
  }
  for (int group = 0; group < GROUPS; ++group) put16(sum[group], into + column + group * kLanes);
}

template <typename A, bool PLAIN>
void sum_entries(const Gradients<A, PLAIN>& gradients, int64_t begin, int64_t end, A* into) {
  const int64_t dim = gradients.tile.table->dim, whole = dim / kLanes * kLanes;
  for (int64_t column = 0; column < whole; column += 4 * kLanes) switch ((whole - column) / kLanes) {
      case 1: sum_columns<A, PLAIN, 1, true>(gradients, begin, end, column, kLanes, into); break;
      case 2: sum_columns<A, PLAIN, 2, true>(gradients, begin, end, column, kLanes, into); break;
      case 3: sum_columns<A, PLAIN, 3, true>(gradients, begin, end, column, kLanes, into); break;
      default: sum_columns<A, PLAIN, 4, true>(gradients, begin, end, column, kLanes, into);
    }
  if (whole < dim) sum_columns<A, PLAIN, 1, false>(gradients, begin, end, whole, dim - whole, into);
}

// Whether only one feature reads the table, sum-pooled and without id weights.
bool plain(const UpdateTile& tile) {
  return tile.only_feature >= 0 && !tile.bag_of && tile.features[tile.only_feature].pooling == kSum;
}

template <typename A>
void sum_chunk(const UpdateTile& tile, int64_t begin, int64_t end, void* into) {
  if (plain(tile))
    sum_entries(Gradients<A, true>(tile), begin, end, static_cast<A*>(into));
  else
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

// Sums all gradients of the row whose run begins at `i`; returns the run's end. Advances `segment` to the row's.
template <typename A>
int64_t sum_run(const UpdateTile& tile, int64_t i, const Segment** segment, void* into) {
  const Entry* entries = tile.entries;
  const uint32_t row = entries[i].row;
  int64_t end = i + 1;
  while (end < tile.size && end < i + kChunk && entries[end].row == row) ++end;
  if (end == tile.size || entries[end].row != row) {
    sum_chunk<A>(tile, i, end, into);
    return end;
  }
  while ((*segment)->begin < i) ++*segment;
  add_chunks<A>(tile, **segment, static_cast<A*>(into));
  return (*segment)->end;
}

// Updates rows in groups: while the gradients of a group are summed, its rows and their state are prefetched.
template <typename W, typename Rule>
void update_rows(const UpdateTile& tile) {
  using A = typename Wide<W>::type;
  const Table& table = *tile.table;
  const Rule rule(table, *tile.settings);
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
      i = sum_run<A>(tile, i, &segment, static_cast<A*>(tile.scratch) + taken * width);
    }
    for (int64_t at = 0; at < taken; ++at)
      rule.apply(weight + rows[at] * table.dim, static_cast<A*>(tile.scratch) + at * width, rows[at]);
  }
}

template <typename W, template <typename, bool> class Rule>
void update(const UpdateTile& tile) {
  tile.table->dim % kLanes ? update_rows<W, Rule<W, false>>(tile) : update_rows<W, Rule<W, true>>(tile);
}

}  // namespace

#define SHARDWRIGHT_RULES(W)                                                                                  \
  {                                                                                                           \
    update<W, Sgd>, update<W, Adagrad>, update<W, RowwiseAdagrad>, update<W, Adam>,                           \
        update<W, PartialRowwiseAdam>, update<W, Lamb>                                                        \
  }

const RowKernels SHARDWRIGHT_AT_LEVEL(kRowKernels_) = {
    {pool<double>, pool<float>, pool<Float16>, pool<Bfloat16>},
    {dot<double>, dot<float>, dot<Float16>, dot<Bfloat16>},
    {sum_chunk<float>, sum_chunk<double>},
    {sum_run<float>, sum_run<double>},
    {SHARDWRIGHT_RULES(double), SHARDWRIGHT_RULES(float), SHARDWRIGHT_RULES(Float16), SHARDWRIGHT_RULES(Bfloat16)},
};
