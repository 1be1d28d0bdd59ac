// Products of small matrices that fit into the first caches, with blocks of rows in registers.
//
// Included by files that are compiled once per instruction set, see vectors.h.
#pragma once

#include "vectors.h"

namespace {

constexpr int kRows = kRegister == 64 ? 12 : 6;  // rows of 16 numbers; leaves registers for another row and a factor

template <int N>
struct Count {
  static constexpr int value = N;
};

// Calls `run` with the first row of each block of kRows rows and of the smaller last block; block sizes are templates.
template <int ROWS, typename Run>
ALWAYS void last_rows(int64_t row, int64_t left, Run run) {
  if constexpr (ROWS > 0) {
    if (left == ROWS) return run(row, Count<ROWS>());
    last_rows<ROWS - 1>(row, left, run);
  }
}
template <typename Run>
ALWAYS void blocks_of_rows(int64_t rows, Run run) {
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) run(row, Count<kRows>());
  last_rows<kRows - 1>(row, rows - row, run);
}

// ROWS rows x 16 columns of a matrix product, or with ADD of a sum of products. Number (row, k) of the left matrix is
// factors[row * row_step + k * inner_step]; rows of the right one, `terms`, have `stride` numbers.
template <int ROWS, bool ADD = false, typename T>
ALWAYS void product(const T* factors, int64_t row_step, int64_t inner_step, int64_t inner, const T* terms, int64_t stride,
                    T* out, int64_t out_stride) {
  V<T> sum[ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) sum[r] = ADD ? get16(out + r * out_stride) : V<T>(0);
  for (int64_t k = 0; k < inner; ++k) {
    const V<T> term = get16(terms + k * stride);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) sum[r] = sum[r] + term * factors[r * row_step + k * inner_step];
  }
  for (int r = 0; r < ROWS; ++r) put16(sum[r], out + r * out_stride);
}

template <typename T>
ALWAYS void transpose_4x4(const T* from, int64_t from_stride, T* to, int64_t to_stride) {
  typedef T Four __attribute__((vector_size(4 * sizeof(T))));
  Four a[4], b[4];
  for (int r = 0; r < 4; ++r) std::memcpy(&a[r], from + r * from_stride, sizeof a[r]);
  for (int r = 0; r < 2; ++r) {
    b[r] = __builtin_shufflevector(a[r], a[r + 2], 0, 4, 1, 5);
    b[r + 2] = __builtin_shufflevector(a[r], a[r + 2], 2, 6, 3, 7);
  }
  for (int r = 0; r < 4; r += 2) {
    a[r] = __builtin_shufflevector(b[r], b[r + 1], 0, 4, 1, 5);
    a[r + 1] = __builtin_shufflevector(b[r], b[r + 1], 2, 6, 3, 7);
  }
  for (int r = 0; r < 4; ++r) std::memcpy(to + r * to_stride, &a[r], sizeof a[r]);
}

// Transposes in blocks of 4 x 4; if a side is not a multiple of 4, the last blocks overlap the previous blocks.
template <typename T>
ALWAYS void transpose(const T* from, int64_t rows, int64_t columns, int64_t from_stride, T* to, int64_t to_stride) {
  if (rows < 4 || columns < 4) {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t column = 0; column < columns; ++column) to[column * to_stride + row] = from[row * from_stride + column];
    return;
  }
  for (int64_t r = 0; r < rows; r += 4) {
    const int64_t row = r + 4 <= rows ? r : rows - 4;
    for (int64_t c = 0; c < columns; c += 4) {
      const int64_t column = c + 4 <= columns ? c : columns - 4;
      transpose_4x4(from + row * from_stride + column, from_stride, to + column * to_stride + row, to_stride);
    }
  }
}

}  // namespace
