// Runs the native kernels without Python, under sanitizers: random tables, features and ids, every dtype and optimizer,
// in buffers of exact size so that any access out of bounds is detected. Results are checked only roughly;
// tests/unit/test_embedding_kernels.py compares them with a reference.

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
double shardwright_sum_of_squares(const float*, int64_t);
void shardwright_adam(const Parameter*, const AdamNumbers*, int64_t);
void shardwright_pair_dots(const void*, int64_t, int64_t, int64_t, int64_t, void*);
void shardwright_pair_gradients(const void*, const void*, int64_t, int64_t, int64_t, int64_t, void*);
void shardwright_silu_attention(const void*, const float*, int64_t, float*);
void shardwright_silu_attention_gradients(const void*, const float*, int64_t, const float*, float* const*, float*);
void shardwright_softmax_attention(const void*, double, float*);
void shardwright_softmax_attention_gradients(const void*, double, const float*, float* const*, int64_t);
}

namespace {

std::mt19937_64 generator(1);

// A random integer in [0, n).
int64_t pick(int64_t n) { return int64_t(generator() % uint64_t(n)); }

using Memory = std::unique_ptr<char[]>;
Memory zeros(int64_t bytes) { return Memory(new char[bytes]()); }

// Random numbers in [-1, 1], float64 if `width` is 8, else float32.
Memory floats(int64_t n, int64_t width) {
  Memory memory = zeros(n * width);
  for (int64_t i = 0; i < n; ++i) {
    const double x = double(pick(2001) - 1000) / 1000;
    if (width == 8)
      reinterpret_cast<double*>(memory.get())[i] = x;
    else
      reinterpret_cast<float*>(memory.get())[i] = float(x);
  }
  return memory;
}

struct Case {
  std::vector<Memory> buffers;
  std::vector<Table> tables;
  std::vector<Feature> features;
  std::vector<int64_t> offsets;
  Lookups lookups;
  int64_t width;

  char* keep(Memory memory) {
    buffers.push_back(std::move(memory));
    return buffers.back().get();
  }

  // `has_invalid_ids`: some ids are out of range.
  Case(int64_t dtype, int64_t batch, int64_t max_length, bool has_invalid_ids) {
    const int64_t bytes[] = {8, 4, 2, 2}, dims[] = {1, 7, 16, 33, 64, 128, 130};
    width = dtype == kFloat64 ? 8 : 4;
    for (int64_t t = 1 + pick(3); t > 0; --t) {
      const int64_t rows = 1 + pick(t % 2 ? 20 : 5000), dim = dims[pick(7)];
      tables.push_back({keep(zeros(rows * dim * bytes[dtype])), {keep(floats(rows * dim, width)), nullptr}, rows, dim,
                        dtype, 1 + pick(5), generator(), 1});
      tables.back().state[1] = keep(zeros(rows * dim * width));
      for (int64_t i = 0; i < rows * dim; ++i)  // clear sign bits: sums of squares are not negative
        for (int64_t w = 0; w < 2; ++w) reinterpret_cast<uint8_t*>(tables.back().state[w])[(i + 1) * width - 1] &= 0x7f;
    }
    const int64_t num_features = 1 + pick(4);
    offsets.push_back(0);
    std::vector<int64_t> ids;
    for (int64_t f = 0; f < num_features; ++f) {
      const int64_t t = pick(tables.size()), pooling = pick(3), before = ids.size();
      const bool single_id = pick(2);
      for (int64_t b = 0; b < batch; ++b) {
        for (int64_t i = pick(max_length + 1); i > 0; --i) ids.push_back(single_id ? 0 : pick(tables[t].rows));
        offsets.push_back(ids.size());
      }
      const int64_t bags = pooling == kNone ? int64_t(ids.size()) - before : batch;
      features.push_back({t, pooling, keep(floats(bags * tables[t].dim, width)), tables[t].dim});
    }
    for (int64_t num = has_invalid_ids && !ids.empty() ? 1 + pick(50) : 0; num > 0; --num)
      ids[pick(ids.size())] = pick(2) ? -1 : 1 << 30;
    const int64_t wide = pick(2);
    Memory memory = zeros(ids.size() * (wide ? 8 : 4));
    if (wide)
      std::copy(ids.begin(), ids.end(), reinterpret_cast<int64_t*>(memory.get()));
    else
      std::copy(ids.begin(), ids.end(), reinterpret_cast<int32_t*>(memory.get()));
    lookups = {keep(std::move(memory)), wide, offsets.data(), pick(2) ? keep(floats(ids.size(), width)) : nullptr,
               num_features, batch};
  }
};

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

using Numbers = std::vector<int64_t>;

// Splits the ids by row ranges, then gathers random segments (one row range and feature each). Returns whether an id
// was out of range.
bool split_and_gather(const Case& input) {
  const Lookups& lookups = input.lookups;
  const int64_t pieces = 1 + pick(3), bags = lookups.features * lookups.batch, n = input.offsets.back();
  Numbers cuts;
  for (const Feature& feature : input.features) {
    const int64_t rows = input.tables[feature.table].rows;
    Numbers inner(pieces - 1);
    for (int64_t& cut : inner) cut = pick(rows + 1);
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
    const int64_t segment = pick(segments);
    from[i] = begins[segment * lookups.batch];
    to[i + 1] = to[i] + begins[(segment + 1) * lookups.batch] - from[i];
  }
  Memory split = zeros(n * item), gathered = zeros(to.back() * item);
  shardwright_move_pieces(lookups.ids, lookups.wide, lookups.offsets, lookups.features, lookups.batch, cuts.data(),
                          pieces, begins.data(), split.get(), positions.data());
  shardwright_gather(split.get(), from.data(), segments, to.data(), item, gathered.get());
  std::sort(positions.begin(), positions.end());
  for (int64_t i = 0; i < n; ++i) require(positions[i] == i, "every id has one position");
  return false;
}

// Dot products of pairs and their gradient, in buffers of exact size.
void dot_pairs() {
  const int64_t width = pick(2) ? 8 : 4, samples = pick(200), vectors = 1 + pick(40), dim = 1 + pick(70);
  const int64_t pairs = vectors * (vectors - 1) / 2;
  const Memory rows = floats(samples * vectors * dim, width), for_dots = floats(samples * pairs, width);
  Memory dots = zeros(samples * pairs * width), for_rows = zeros(samples * vectors * dim * width);
  shardwright_pair_dots(rows.get(), width == 8, samples, vectors, dim, dots.get());
  shardwright_pair_gradients(rows.get(), for_dots.get(), width == 8, samples, vectors, dim, for_rows.get());
}

// Attention of both kinds and its gradients, in buffers of exact size.
void attend() {
  const int64_t sequences = pick(8), heads = 1 + pick(3), keys = 16 * (1 + pick(2)), values = 16 * (1 + pick(2));
  const int64_t distances = 1 + pick(60), length = 1 + pick(70);
  Numbers starts(sequences + 1);
  for (int64_t i = 0; i < sequences; ++i) starts[i + 1] = starts[i] + pick(120);
  for (const bool is_softmax : {false, true}) {
    const int64_t rows = is_softmax ? sequences * length : starts.back(), key_size = rows * heads * keys;
    const int64_t value_size = rows * heads * values, bias_size = heads * distances;
    const Memory queries = floats(key_size, 4), of_keys = floats(key_size, 4), of_values = floats(value_size, 4);
    const Memory gradient = floats(value_size, 4), bias = floats(bias_size, 4);
    Memory out = zeros(value_size * 4), to_queries = zeros(key_size * 4), to_keys = zeros(key_size * 4);
    Memory to_values = zeros(value_size * 4), to_bias = zeros(sequences * bias_size * 4);
    const auto as_floats = [](const Memory& memory) { return reinterpret_cast<float*>(memory.get()); };
    float* const to[] = {as_floats(to_queries), as_floats(to_keys), as_floats(to_values)};
    const auto number = [](const void* address) { return reinterpret_cast<int64_t>(address); };
    const Numbers call = {number(queries.get()), number(of_keys.get()), number(of_values.get()), heads * keys,
                          heads * keys, heads * values, is_softmax ? 0 : number(starts.data()),
                          is_softmax ? length : 0, sequences, heads, keys, values};
    if (is_softmax) {
      shardwright_softmax_attention(call.data(), 0.25, as_floats(out));
      if (keys == values)  // rows of all gradients have one stride
        shardwright_softmax_attention_gradients(call.data(), 0.25, as_floats(gradient), to, heads * keys);
    } else {
      shardwright_silu_attention(call.data(), as_floats(bias), distances, as_floats(out));
      shardwright_silu_attention_gradients(call.data(), as_floats(bias), distances, as_floats(gradient), to,
                                           as_floats(to_bias));
    }
  }
}

// One Adam step on parameters of random sizes and first positions, in buffers of exact size.
void step_adam() {
  std::vector<Memory> memory;
  std::vector<Parameter> parameters;
  int64_t first = pick(1 << 20);
  for (int64_t num = 1 + pick(5); num; --num) {
    const int64_t size = pick(4) ? pick(100) : pick(1 << 16), kind = pick(kMomentKinds);
    const int64_t width = kind == kDoubles ? 8 : 4, moment_width = kind == kRounded ? 2 : width;
    for (const int64_t bytes : {width, width, moment_width, moment_width}) memory.push_back(zeros(size * bytes));
    Memory* const own = &memory[memory.size() - 4];
    parameters.push_back({own[0].get(), own[1].get(), own[2].get(), own[3].get(), size, first, kind, generator()});
    first += size;
  }
  const std::vector<AdamNumbers> numbers(parameters.size(), {0.999, 0.1, 0.001, 0.01, 3.0, 1e-8, 0.1, 0.9, -1.0});
  shardwright_adam(parameters.data(), numbers.data(), parameters.size());
}

// Sums gradients by row. Returns whether an id is out of range.
bool sum_by_row(const Case& input) {
  std::vector<int64_t> counts(input.tables.size());
  int64_t outside = 0;
  void* counted = shardwright_sums_counted(input.tables.data(), input.tables.size(), input.features.data(),
                                           &input.lookups, counts.data(), &outside);
  require((counted == nullptr) == (outside >= 0), "sums by row start unless an id is out of range");
  if (!counted) return true;
  std::vector<Memory> memory;
  std::vector<int64_t*> rows;
  std::vector<char*> sums;
  for (size_t t = 0; t < counts.size(); ++t) {
    memory.push_back(zeros(counts[t] * 8));
    rows.push_back(reinterpret_cast<int64_t*>(memory.back().get()));
    memory.push_back(zeros(counts[t] * input.tables[t].dim * input.width));
    sums.push_back(memory.back().get());
  }
  shardwright_sums_taken(counted, rows.data(), sums.data());
  return false;
}

}  // namespace

int main() {
  for (int64_t round = 0; round < 400; ++round) {
    omp_set_num_threads(1 + int(pick(4)));
    const std::vector<float> ones(pick(round % 8 ? 40 : 40000), 1.0f);
    require(shardwright_sum_of_squares(ones.data(), ones.size()) == double(ones.size()), "a sum of squares is exact");
    const bool large = pick(4) == 0, has_invalid_ids = pick(5) == 0;
    Case input(pick(kDtypes), 1 + pick(large ? 3000 : 9), 6, has_invalid_ids);
    const int64_t n = input.offsets.back();
    const bool outside = shardwright_lookup(input.tables.data(), input.features.data(), &input.lookups) >= 0;
    require(outside == (has_invalid_ids && n > 0), "a lookup reports ids out of range, and no others");
    Memory for_weights = zeros(n * input.width), distinct = zeros(n * 8), inverse = zeros(n * 8), counts = zeros(8 * 8);
    shardwright_weight_gradients(input.tables.data(), input.features.data(), &input.lookups, for_weights.get());
    shardwright_distinct(input.tables.data(), input.tables.size(), input.features.data(), &input.lookups,
                         reinterpret_cast<int64_t*>(distinct.get()), reinterpret_cast<int64_t*>(counts.get()),
                         reinterpret_cast<int64_t*>(inverse.get()));
    const Settings settings = {0.1, 1e-8, 0.9, 0.999, 0.5, 0.01, double(pick(2)), double(pick(2))};
    const int64_t bad = shardwright_update(input.tables.data(), input.tables.size(), input.features.data(),
                                           &input.lookups, pick(kOptimizers), &settings);
    require((bad >= 0) == outside, "an update reports the ids that a lookup reports");
    require(sum_by_row(input) == outside, "sums by row report the ids that a lookup reports");
    require(split_and_gather(input) == outside, "a split by row ranges reports the ids that a lookup reports");
    dot_pairs();
    attend();
    step_adam();
  }
  std::puts("400 rounds without an error");
  return 0;
}
