// Kernels for the combined format (concatenated lengths and values of all features).

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#define SHARDWRIGHT_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t kParallelFrom = 1 << 15;

struct Span {
  int64_t begin, end;
};

Span span_of(int64_t n, int part, int parts) { return {n * part / parts, n * (part + 1) / parts}; }

// Sums a span; returns the position of its first negative entry, or -1.
template <typename T>
int64_t sum_span(const T* lengths, Span span, int64_t* total) {
  int64_t sum = 0;
  for (int64_t i = span.begin; i < span.end; ++i) {
    if (lengths[i] < 0) return i;
    sum += lengths[i];
  }
  *total = sum;
  return -1;
}

template <typename T>
void scan_span(const T* lengths, Span span, int64_t start, int64_t* offsets) {
  for (int64_t i = span.begin; i < span.end; ++i) {
    offsets[i] = start;
    start += lengths[i];
  }
}

// Exclusive prefix sum in two passes: each thread sums its span, then scans it, starting at the sum of earlier spans.
template <typename T>
int64_t lengths_to_offsets(const T* lengths, int64_t n, int64_t* offsets) {
  const int parts = n < kParallelFrom ? 1 : omp_get_max_threads();
  std::vector<int64_t> totals(parts + 1, 0), negative(parts, -1);
#pragma omp parallel for num_threads(parts) schedule(static, 1)
  for (int part = 0; part < parts; ++part)
    negative[part] = sum_span(lengths, span_of(n, part, parts), &totals[part + 1]);

  const auto bad = std::find_if(negative.begin(), negative.end(), [](int64_t i) { return i >= 0; });
  if (bad != negative.end()) return *bad;

  for (int part = 0; part < parts; ++part) totals[part + 1] += totals[part];
#pragma omp parallel for num_threads(parts) schedule(static, 1)
  for (int part = 0; part < parts; ++part)
    scan_span(lengths, span_of(n, part, parts), totals[part], offsets);
  offsets[n] = totals[parts];
  return -1;
}

}  // namespace

// Both write n + 1 offsets and return -1, or return the position of the first negative length and write nothing.
SHARDWRIGHT_API int64_t shardwright_lengths_to_offsets_i64(const int64_t* lengths, int64_t n, int64_t* offsets) {
  return lengths_to_offsets(lengths, n, offsets);
}

SHARDWRIGHT_API int64_t shardwright_lengths_to_offsets_i32(const int32_t* lengths, int64_t n, int64_t* offsets) {
  return lengths_to_offsets(lengths, n, offsets);
}

// Whether an offset is negative or below the previous offset.
SHARDWRIGHT_API int64_t shardwright_falls(const int64_t* offsets, int64_t n) {
  uint64_t signs = n ? offsets[0] : 0;
  for (int64_t i = 1; i < n; ++i) signs |= uint64_t(offsets[i]) | (uint64_t(offsets[i]) - uint64_t(offsets[i - 1]));
  return signs >> 63;
}
