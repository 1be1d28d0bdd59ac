// The embedding kernels without Python, for the sanitizers: random tables, features and ids, every dtype and optimizer,
// in memory cut to size so that any read or write beyond it is seen. What is computed is held against plain loops only
// roughly; tests/unit/test_embedding_kernels.py does that exactly.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "../../csrc/adam.h"
#include "../../csrc/embedding.h"

extern "C" {
int64_t shardwright_lookup(const Table*, const Feature*, const Lookups*);
int64_t shardwright_weight_gradients(const Table*, const Feature*, const Lookups*, char*);
int64_t shardwright_update(const Table*, int64_t, const Feature*, const Lookups*, int64_t, const Settings*);
int64_t shardwright_distinct(const Table*, int64_t, const Feature*, const Lookups*, int64_t*, int64_t*, int64_t*);
void* shardwright_sums_counted(const Table*, int64_t, const Feature*, const Lookups*, int64_t*, int64_t*);
void shardwright_sums_taken(void*, int64_t* const*, char* const*);
void shardwright_gather(const char*, const int64_t*, int64_t, const int64_t*, int64_t, char*);
int64_t shardwright_count_pieces(const void*, int64_t, const int64_t*, int64_t, int64_t, const int64_t*, int64_t,
                                 int64_t*);
void shardwright_move_pieces(const void*, int64_t, const int64_t*, int64_t, int64_t, const int64_t*, int64_t, int64_t*,
                             void*, int64_t*);
int64_t shardwright_lengths_to_offsets_i64(const int64_t*, int64_t, int64_t*);
void shardwright_adam(const Parameter*, const AdamNumbers*, int64_t);
void shardwright_pair_dots(const void*, int64_t, int64_t, int64_t, int64_t, void*);
void shardwright_pair_gradients(const void*, const void*, int64_t, int64_t, int64_t, int64_t, void*);
}

namespace {

std::mt19937_64 draw(1);
int64_t below(int64_t n) { return int64_t(draw() % uint64_t(n)); }

using Memory = std::unique_ptr<char[]>;
Memory zeros(int64_t bytes) { return Memory(new char[bytes]()); }

// Random numbers of the vectors' type.
Memory numbers(int64_t n, int64_t width) {
  Memory memory = zeros(n * width);
  for (int64_t i = 0; i < n; ++i) {
    const double x = double(below(2001) - 1000) / 1000;
    if (width == 8)
      reinterpret_cast<double*>(memory.get())[i] = x;
    else
      reinterpret_cast<float*>(memory.get())[i] = float(x);
  }
  return memory;
}

struct Case {
  std::vector<Memory> kept;
  std::vector<Table> tables;
  std::vector<Feature> features;
  std::vector<int64_t> offsets;
  Lookups lookups;
  int64_t width;

  char* keep(Memory memory) {
    kept.push_back(std::move(memory));
    return kept.back().get();
  }

  Case(int64_t dtype, int64_t batch, int64_t longest, bool spoiled) {
    const int64_t bytes[] = {8, 4, 2, 2}, dims[] = {1, 7, 16, 33, 64, 128, 130};
    width = dtype == kFloat64 ? 8 : 4;
    for (int64_t t = 1 + below(3); t > 0; --t) {
      const int64_t rows = 1 + below(t % 2 ? 20 : 5000), dim = dims[below(7)];
      tables.push_back({keep(zeros(rows * dim * bytes[dtype])), {keep(numbers(rows * dim, width)), nullptr}, rows, dim,
                        dtype, 1 + below(5), draw(), 1});
      tables.back().state[1] = keep(zeros(rows * dim * width));
      for (int64_t i = 0; i < rows * dim; ++i)  // squares are not negative
        for (int64_t w = 0; w < 2; ++w) reinterpret_cast<uint8_t*>(tables.back().state[w])[(i + 1) * width - 1] &= 0x7f;
    }
    const int64_t num_features = 1 + below(4);
    offsets.push_back(0);
    std::vector<int64_t> ids;
    for (int64_t f = 0; f < num_features; ++f) {
      const int64_t t = below(tables.size()), pooling = below(3), before = ids.size();
      const bool hot = below(2);
      for (int64_t b = 0; b < batch; ++b) {
        for (int64_t i = below(longest + 1); i > 0; --i) ids.push_back(hot ? 0 : below(tables[t].rows));
        offsets.push_back(ids.size());
      }
      const int64_t bags = pooling == kNone ? int64_t(ids.size()) - before : batch;
      features.push_back({t, pooling, keep(numbers(bags * tables[t].dim, width)), tables[t].dim});
    }
    for (int64_t left = spoiled && !ids.empty() ? 1 + below(50) : 0; left > 0; --left)
      ids[below(ids.size())] = below(2) ? -1 : 1 << 30;
    const int64_t wide = below(2);
    Memory memory = zeros(ids.size() * (wide ? 8 : 4));
    if (wide)
      std::copy(ids.begin(), ids.end(), reinterpret_cast<int64_t*>(memory.get()));
    else
      std::copy(ids.begin(), ids.end(), reinterpret_cast<int32_t*>(memory.get()));
    lookups = {keep(std::move(memory)), wide, offsets.data(), below(2) ? keep(numbers(ids.size(), width)) : nullptr,
               num_features, batch};
  }
};

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::exit(1);
}

using Numbers = std::vector<int64_t>;

// Cuts the ids by row ranges, then puts the segments (of a piece and a feature) in another order. Returns whether an id
// was outside.
bool move_about(const Case& made) {
  const Lookups& lookups = made.lookups;
  const int64_t pieces = 1 + below(3), bags = lookups.features * lookups.batch, n = made.offsets.back();
  Numbers cuts;
  for (const Feature& feature : made.features) {
    const int64_t rows = made.tables[feature.table].rows;
    Numbers inner(pieces - 1);
    for (int64_t& cut : inner) cut = below(rows + 1);
    std::sort(inner.begin(), inner.end());
    cuts.push_back(0);
    cuts.insert(cuts.end(), inner.begin(), inner.end());
    cuts.push_back(rows);
  }
  Numbers lengths(pieces * bags), begins(pieces * bags + 1), positions(n);
  if (shardwright_count_pieces(lookups.ids, lookups.wide, lookups.offsets, lookups.features, lookups.batch, cuts.data(),
                               pieces, lengths.data()) >= 0)
    return true;
  require(shardwright_lengths_to_offsets_i64(lengths.data(), lengths.size(), begins.data()) < 0, "lengths");
  const int64_t segments = pieces * lookups.features, item = lookups.wide ? 8 : 4;
  Numbers from(segments), to(segments + 1);
  for (int64_t i = 0; i < segments; ++i) {
    const int64_t stretch = below(segments);
    from[i] = begins[stretch * lookups.batch];
    to[i + 1] = to[i] + begins[(stretch + 1) * lookups.batch] - from[i];
  }
  Memory cut = zeros(n * item), moved = zeros(to.back() * item);
  shardwright_move_pieces(lookups.ids, lookups.wide, lookups.offsets, lookups.features, lookups.batch, cuts.data(),
                          pieces, begins.data(), cut.get(), positions.data());
  shardwright_gather(cut.get(), from.data(), segments, to.data(), item, moved.get());
  std::sort(positions.begin(), positions.end());
  for (int64_t i = 0; i < n; ++i) require(positions[i] == i, "every id goes to one place");
  return false;
}

// Dots of pairs and their gradient, in memory cut to size.
void dot_pairs() {
  const int64_t width = below(2) ? 8 : 4, samples = below(200), vectors = 1 + below(40), dim = 1 + below(70);
  const int64_t pairs = vectors * (vectors - 1) / 2;
  const Memory rows = numbers(samples * vectors * dim, width), for_dots = numbers(samples * pairs, width);
  Memory dots = zeros(samples * pairs * width), for_rows = zeros(samples * vectors * dim * width);
  shardwright_pair_dots(rows.get(), width == 8, samples, vectors, dim, dots.get());
  shardwright_pair_gradients(rows.get(), for_dots.get(), width == 8, samples, vectors, dim, for_rows.get());
}

// A step of Adam on parameters of any size and place, in memory cut to size.
void step_densely() {
  std::vector<Memory> memory;
  std::vector<Parameter> parameters;
  int64_t place = below(1 << 20);
  for (int64_t num = 1 + below(5); num; --num) {
    const int64_t size = below(4) ? below(100) : below(1 << 16), kind = below(kMomentKinds);
    const int64_t width = kind == kDoubles ? 8 : 4, kept = kind == kRounded ? 2 : width;
    for (const int64_t bytes : {width, width, kept, kept}) memory.push_back(zeros(size * bytes));
    Memory* const mine = &memory[memory.size() - 4];
    parameters.push_back({mine[0].get(), mine[1].get(), mine[2].get(), mine[3].get(), size, place, kind, draw()});
    place += size;
  }
  const std::vector<AdamNumbers> numbers(parameters.size(), {0.999, 0.1, 0.001, 0.01, 3.0, 1e-8, 0.1, 0.9, -1.0});
  shardwright_adam(parameters.data(), numbers.data(), parameters.size());
}

// Sums of gradients by row; whether an id is outside.
bool sum_up(const Case& made) {
  std::vector<int64_t> counts(made.tables.size());
  int64_t outside = 0;
  void* counted = shardwright_sums_counted(made.tables.data(), made.tables.size(), made.features.data(), &made.lookups,
                                           counts.data(), &outside);
  require((counted == nullptr) == (outside >= 0), "sums begin where no id is outside");
  if (!counted) return true;
  std::vector<Memory> memory;
  std::vector<int64_t*> rows;
  std::vector<char*> sums;
  for (size_t t = 0; t < counts.size(); ++t) {
    memory.push_back(zeros(counts[t] * 8));
    rows.push_back(reinterpret_cast<int64_t*>(memory.back().get()));
    memory.push_back(zeros(counts[t] * made.tables[t].dim * made.width));
    sums.push_back(memory.back().get());
  }
  shardwright_sums_taken(counted, rows.data(), sums.data());
  return false;
}

}  // namespace

int main() {
  for (int64_t round = 0; round < 400; ++round) {
    omp_set_num_threads(1 + int(below(4)));
    const bool large = below(4) == 0, spoiled = below(5) == 0;
    Case made(below(kDtypes), 1 + below(large ? 3000 : 9), 6, spoiled);
    const int64_t n = made.offsets.back();
    const bool outside = shardwright_lookup(made.tables.data(), made.features.data(), &made.lookups) >= 0;
    require(outside == (spoiled && n > 0), "an id outside is found, and none otherwise");
    Memory for_weights = zeros(n * made.width), distinct = zeros(n * 8), inverse = zeros(n * 8), counts = zeros(8 * 8);
    shardwright_weight_gradients(made.tables.data(), made.features.data(), &made.lookups, for_weights.get());
    shardwright_distinct(made.tables.data(), made.tables.size(), made.features.data(), &made.lookups,
                         reinterpret_cast<int64_t*>(distinct.get()), reinterpret_cast<int64_t*>(counts.get()),
                         reinterpret_cast<int64_t*>(inverse.get()));
    const Settings settings = {0.1, 1e-8, 0.9, 0.999, 0.5, 0.01, double(below(2)), double(below(2))};
    const int64_t bad = shardwright_update(made.tables.data(), made.tables.size(), made.features.data(), &made.lookups,
                                           below(kOptimizers), &settings);
    require((bad >= 0) == outside, "an update refuses what a lookup refuses");
    require(sum_up(made) == outside, "so do sums by row");
    require(move_about(made) == outside, "so does a cut by rows");
    dot_pairs();
    step_densely();
  }
  std::puts("400 rounds without a fault");
  return 0;
}
