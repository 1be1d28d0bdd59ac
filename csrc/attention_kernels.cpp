// Attention within one sequence, a block of queries at a time: its scores stay in the caches, and are computed again for
// the gradients.

#include "attention.h"
#include "exponential.h"
#include "small_products.h"

namespace {

constexpr int64_t kQueries = 4 * kRows;  // of a block

int64_t scratch_size(int64_t positions, int64_t key_width, int64_t value_width) {
  const int64_t width = padded(positions);
  return (key_width + value_width) * width + 2 * kQueries * width + 2 * (2 * width + kLanes);
}

// Scratch memory of a head; rows of `keys` and `values` are their transposes, rows of the rest have a number per key.
struct Work {
  int64_t width;
  float *keys, *values, *weights, *slopes, *bias, *bias_sums;

  Work(const AttentionHead& head, float* memory) : width(padded(head.positions)) {
    keys = memory;
    values = keys + head.key_width * width;
    weights = values + head.value_width * width;
    slopes = weights + kQueries * width;
    bias = slopes + kQueries * width;
    bias_sums = bias + 2 * width + kLanes;
  }
};

constexpr int32_t kPlaces[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// The numbers of 16 places from `first`; `other` from place `end` on.
ALWAYS V<float> until(int64_t end, int64_t first, const V<float>& v, float other) {
  const int32_t num = int32_t(end - first);
  const V<int32_t> places = get16(kPlaces);
  return each<float>([&](int p) { return places.part[p] < num ? v.part[p] : Part<float>::type{} + other; });
}

template <int LANES>
ALWAYS float largest_of(const float* lanes) {
  if constexpr (LANES == 1) return lanes[0];
  else {
    const float low = largest_of<LANES / 2>(lanes), high = largest_of<LANES / 2>(lanes + LANES / 2);
    return high > low ? high : low;
  }
}

ALWAYS float largest(const V<float>& v) {
  float lanes[kLanes];
  put16(v, lanes);
  return largest_of<kLanes>(lanes);
}

// to[row][column] = the products of `rows` rows of the left matrix and the columns below `columns`.
ALWAYS void multiply(const float* rows, int64_t stride, int64_t num, int64_t inner, const float* terms, int64_t width,
                     int64_t columns, float* to) {
  blocks_of_rows(num, [&](int64_t first, auto count) {
    for (int64_t c = 0; c < columns; c += kLanes)
      product<decltype(count)::value>(rows + first * stride, stride, 1, inner, terms + c, width, to + first * width + c,
                                      width);
  });
}

// to[query] = the sum over keys of number (query, key) times row `key` of `terms`.
ALWAYS void sum_over_keys(const float* numbers, int64_t width, int64_t num, int64_t keys, const float* terms,
                          int64_t stride, int64_t columns, float* to, int64_t to_stride) {
  blocks_of_rows(num, [&](int64_t first, auto count) {
    for (int64_t c = 0; c < columns; c += kLanes)
      product<decltype(count)::value>(numbers + first * width, width, 1, keys, terms + c, stride,
                                      to + first * to_stride + c, to_stride);
  });
}

// to[key] += the sum over queries of number (query, key) times row `query` of `terms`.
ALWAYS void sum_over_queries(const float* numbers, int64_t width, int64_t num, int64_t keys, const float* terms,
                             int64_t stride, int64_t columns, float* to, int64_t to_stride) {
  blocks_of_rows(keys, [&](int64_t first, auto count) {
    for (int64_t c = 0; c < columns; c += kLanes)
      product<decltype(count)::value, true>(numbers + first, 1, width, num, terms + c, stride,
                                            to + first * to_stride + c, to_stride);
  });
}

void clear(float* rows, int64_t num, int64_t columns, int64_t stride) {
  for (int64_t row = 0; row < num; ++row) std::memset(rows + row * stride, 0, columns * sizeof(float));
}

// Weights of one kind, by query: `apply` turns a row of scores into weights, `derive` also the row of the weights'
// gradients into those of the scores, for the keys below `end`, a multiple of 16.
struct SiLU {
  const AttentionHead& head;
  const Work& work;
  float share;

  SiLU(const AttentionHead& of, const Work& in, const float* bias, int64_t distances)
      : head(of), work(in), share(1.0f / float(of.positions)) {
    for (int64_t place = 0; place < 2 * work.width + kLanes; ++place) {  // the bias of distance positions - 1 - place
      const int64_t distance = head.positions - 1 - place;
      work.bias[place] = distance < 0 ? 0 : bias[distance < distances ? distance : distances - 1];
      work.bias_sums[place] = 0;
    }
  }

  ALWAYS int64_t keys(int64_t last_query) const { return last_query + 1; }

  ALWAYS void apply(int64_t query, int64_t end, float* scores) const {
    const float* bias = work.bias + head.positions - 1 - query;
    for (int64_t c = 0; c < end; c += kLanes) {
      const V<float> score = get16(scores + c) + get16(bias + c);
      put16(until(query + 1, c, score * sigmoid(score) * share, 0.0f), scores + c);
    }
  }

  ALWAYS void derive(int64_t query, int64_t end, float* scores, float* slopes) const {
    const float* bias = work.bias + head.positions - 1 - query;
    float* bias_sums = work.bias_sums + head.positions - 1 - query;
    for (int64_t c = 0; c < end; c += kLanes) {
      const V<float> score = get16(scores + c) + get16(bias + c), gate = sigmoid(score), shared = gate * share;
      put16(until(query + 1, c, score * shared, 0.0f), scores + c);
      const V<float> slope = until(query + 1, c, get16(slopes + c) * shared * (score * (1.0f - gate) + 1.0f), 0.0f);
      put16(slope, slopes + c);
      if (c <= query) put16(get16(bias_sums + c) + slope, bias_sums + c);
    }
  }

  void add_bias_gradient(int64_t distances, float* to) const {
    for (int64_t place = 0; place < head.positions; ++place) {
      const int64_t distance = head.positions - 1 - place;
      to[distance < distances ? distance : distances - 1] += work.bias_sums[place];
    }
  }
};

struct Softmax {
  const AttentionHead& head;
  float scale;

  ALWAYS int64_t keys(int64_t) const { return head.positions; }

  ALWAYS void apply(int64_t, int64_t end, float* scores) const {
    V<float> highest(-__builtin_inff()), sum(0.0f);
    for (int64_t c = 0; c < end; c += kLanes) {
      const V<float> score = until(head.positions, c, get16(scores + c), -__builtin_inff());
      highest = each<float>([&](int p) { return score.part[p] > highest.part[p] ? score.part[p] : highest.part[p]; });
    }
    const float top = largest(highest);
    for (int64_t c = 0; c < end; c += kLanes) {
      const V<float> weight = until(head.positions, c, exponential((get16(scores + c) - top) * scale), 0.0f);
      put16(weight, scores + c);
      sum = sum + weight;
    }
    const float share = 1.0f / total(sum);
    for (int64_t c = 0; c < end; c += kLanes) put16(get16(scores + c) * share, scores + c);
  }

  ALWAYS void derive(int64_t query, int64_t end, float* scores, float* slopes) const {
    apply(query, end, scores);
    V<float> sum(0.0f);
    for (int64_t c = 0; c < end; c += kLanes) sum = sum + get16(scores + c) * get16(slopes + c);
    const float mean = total(sum);
    for (int64_t c = 0; c < end; c += kLanes)
      put16(get16(scores + c) * (get16(slopes + c) - mean) * scale, slopes + c);
  }
};

template <typename Weights>
ALWAYS void attend(const AttentionHead& head, const Work& work, const Weights& weights, float* out) {
  transpose(head.keys, head.positions, head.key_width, head.key_stride, work.keys, work.width);
  for (int64_t first = 0; first < head.positions; first += kQueries) {
    const int64_t num = first + kQueries <= head.positions ? kQueries : head.positions - first;
    const int64_t keys = weights.keys(first + num - 1), end = padded(keys);
    multiply(head.queries + first * head.query_stride, head.query_stride, num, head.key_width, work.keys, work.width, end,
             work.weights);
    for (int64_t query = 0; query < num; ++query) weights.apply(first + query, end, work.weights + query * work.width);
    sum_over_keys(work.weights, work.width, num, keys, head.values, head.value_stride, head.value_width,
                  out + first * head.out_stride, head.out_stride);
  }
}

template <typename Weights>
ALWAYS void differentiate(const AttentionHead& head, const Work& work, const Weights& weights, const float* gradient,
                          const AttentionGradients& result) {
  transpose(head.keys, head.positions, head.key_width, head.key_stride, work.keys, work.width);
  transpose(head.values, head.positions, head.value_width, head.value_stride, work.values, work.width);
  clear(result.keys, head.positions, head.key_width, result.key_stride);
  clear(result.values, head.positions, head.value_width, result.value_stride);
  for (int64_t first = 0; first < head.positions; first += kQueries) {
    const int64_t num = first + kQueries <= head.positions ? kQueries : head.positions - first;
    const int64_t keys = weights.keys(first + num - 1), end = padded(keys);
    const float *queries = head.queries + first * head.query_stride, *gradients = gradient + first * head.out_stride;
    multiply(queries, head.query_stride, num, head.key_width, work.keys, work.width, end, work.weights);
    multiply(gradients, head.out_stride, num, head.value_width, work.values, work.width, end, work.slopes);
    for (int64_t query = 0; query < num; ++query)
      weights.derive(first + query, end, work.weights + query * work.width, work.slopes + query * work.width);
    sum_over_queries(work.weights, work.width, num, keys, gradients, head.out_stride, head.value_width, result.values,
                     result.value_stride);
    sum_over_queries(work.slopes, work.width, num, keys, queries, head.query_stride, head.key_width, result.keys,
                     result.key_stride);
    sum_over_keys(work.slopes, work.width, num, keys, head.keys, head.key_stride, head.key_width,
                  result.queries + first * result.key_stride, result.key_stride);
  }
}

void silu(const AttentionHead& head, const float* bias, int64_t distances, float* scratch, float* out) {
  const Work work(head, scratch);
  attend(head, work, SiLU(head, work, bias, distances), out);
}

void silu_gradients(const AttentionHead& head, const float* bias, int64_t distances, const float* gradient,
                    float* scratch, const AttentionGradients& result, float* bias_gradient) {
  const Work work(head, scratch);
  const SiLU weights(head, work, bias, distances);
  differentiate(head, work, weights, gradient, result);
  weights.add_bias_gradient(distances, bias_gradient);
}

void softmax(const AttentionHead& head, float scale, float* scratch, float* out) {
  attend(head, Work(head, scratch), Softmax{head, scale}, out);
}

void softmax_gradients(const AttentionHead& head, float scale, const float* gradient, float* scratch,
                       const AttentionGradients& result) {
  differentiate(head, Work(head, scratch), Softmax{head, scale}, gradient, result);
}

}  // namespace

const AttentionKernels SHARDWRIGHT_AT_LEVEL(kAttentionKernels_) = {scratch_size, silu, silu_gradients, softmax,
                                                                   softmax_gradients};
