// Matrix products of one panel, with blocks of rows in registers.

#include "products.h"
#include "vectors.h"

namespace {

constexpr int kRows = kRegister == 64 ? 12 : 6;  // with two registers a row; leaves some for a panel's row and a factor

template <typename T>
using Register = typename Part<T>::type;

template <typename T>
constexpr int kWidth = 2 * kPart<T>;  // columns of a panel

template <typename T>
ALWAYS Register<T> get_register(const T* from) {
  Register<T> value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename T>
ALWAYS void put_register(const Register<T>& value, T* to) {
  std::memcpy(to, &value, sizeof value);
}

// ROWS rows of a packed block of the left matrix x panel.
template <int ROWS, typename T>
ALWAYS void block(const T* left, const T* panel, int64_t inner, T* out, int64_t out_stride, bool add) {
  Register<T> sums[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
    for (int half = 0; half < 2; ++half)
      sums[r][half] = add ? get_register(out + r * out_stride + half * kPart<T>) : Register<T>{};
  for (int64_t k = 0; k < inner; ++k, left += kRows, panel += kWidth<T>) {
    const Register<T> low = get_register(panel), high = get_register(panel + kPart<T>);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const Register<T> factor = Register<T>{} + left[r];
      sums[r][0] += factor * low;
      sums[r][1] += factor * high;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
    for (int half = 0; half < 2; ++half) put_register(sums[r][half], out + r * out_stride + half * kPart<T>);
}

// The last block, of 1 to ROWS rows.
template <int ROWS, typename T>
ALWAYS void last_block(int64_t rows, const T* left, const T* panel, int64_t inner, T* out, int64_t out_stride, bool add) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return block<ROWS>(left, panel, inner, out, out_stride, add);
    last_block<ROWS - 1>(rows, left, panel, inner, out, out_stride, add);
  }
}

template <typename T>
void multiply_panel(const T* blocks, int64_t rows, const T* panel, int64_t inner, T* out, int64_t out_stride, bool add) {
  for (; rows >= kRows; rows -= kRows, blocks += inner * kRows, out += kRows * out_stride)
    block<kRows>(blocks, panel, inner, out, out_stride, add);
  last_block<kRows - 1>(rows, blocks, panel, inner, out, out_stride, add);
}

template <typename T>
void multiply(const T* blocks, int64_t rows, const T* panel, int64_t inner, T* out, int64_t out_stride, int64_t columns,
              bool add) {
  if (columns == kWidth<T>) return multiply_panel(blocks, rows, panel, inner, out, out_stride, add);
  T square[kRows * kWidth<T>];  // the last panel of a matrix: with all columns of a panel, then copied
  for (int64_t row = 0; row < rows; row += kRows, blocks += inner * kRows) {
    const int64_t num = row + kRows <= rows ? kRows : rows - row;
    for (int64_t r = 0; r < num; ++r)
      for (int64_t c = 0; c < kWidth<T>; ++c)
        square[r * kWidth<T> + c] = add && c < columns ? out[(row + r) * out_stride + c] : T(0);
    multiply_panel(blocks, num, panel, inner, square, kWidth<T>, true);
    for (int64_t r = 0; r < num; ++r)
      std::memcpy(out + (row + r) * out_stride, square + r * kWidth<T>, columns * sizeof(T));
  }
}

template <typename T>
ALWAYS void transpose_4x4(const T* from, int64_t stride, T* to, int64_t to_stride) {
  typedef T Four __attribute__((vector_size(4 * sizeof(T))));
  Four a[4], b[4];
  for (int r = 0; r < 4; ++r) std::memcpy(&a[r], from + r * stride, sizeof a[r]);
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

// to[inner][TO_STRIDE] from from[rows][inner]; rows are a multiple of 4 at most.
template <int TO_STRIDE, typename T>
ALWAYS void transpose(const T* from, int64_t stride, int64_t rows, int64_t inner, T* to) {
  const int64_t whole = inner / 4 * 4;
  for (int64_t k = 0; k < whole; k += 4)
    for (int64_t r = 0; r + 4 <= rows; r += 4) transpose_4x4(from + r * stride + k, stride, to + k * TO_STRIDE + r, TO_STRIDE);
  for (int64_t r = rows / 4 * 4; r < rows; ++r)
    for (int64_t k = 0; k < whole; ++k) to[k * TO_STRIDE + r] = from[r * stride + k];
  for (int64_t k = whole; k < inner; ++k)
    for (int64_t r = 0; r < rows; ++r) to[k * TO_STRIDE + r] = from[r * stride + k];
}

template <typename T>
void pack_left(const T* from, int64_t row_step, int64_t inner_step, int64_t rows, int64_t inner, T* blocks) {
  for (int64_t row = 0; row < rows; row += kRows, from += kRows * row_step, blocks += inner * kRows) {
    const int64_t num = row + kRows <= rows ? kRows : rows - row;
    if (inner_step == 1)
      transpose<kRows>(from, row_step, num, inner, blocks);
    else
      for (int64_t k = 0; k < inner; ++k)
        for (int64_t r = 0; r < num; ++r) blocks[k * kRows + r] = from[k * inner_step + r * row_step];
  }
}

template <typename T>
void pack_right(const T* from, const T* next, int64_t stride, int64_t inner, int64_t columns, T* panel) {
  for (int64_t k = 0; k < inner; ++k, from += stride, next += stride, panel += kWidth<T>) {
    for (int c = 0; c < kWidth<T>; c += 64 / int(sizeof(T))) __builtin_prefetch(next + c, 0, 2);
    if (columns == kWidth<T>) {
      put_register(get_register(from), panel);
      put_register(get_register(from + kPart<T>), panel + kPart<T>);
    } else {
      std::memcpy(panel, from, columns * sizeof(T));
      std::memset(panel + columns, 0, (kWidth<T> - columns) * sizeof(T));
    }
  }
}

template <typename T>
void pack_transposed(const T* from, const T* next, int64_t stride, int64_t inner, int64_t columns, T* panel) {
  constexpr int64_t kLine = 64 / sizeof(T);
  if (columns < kWidth<T>) std::memset(panel, 0, inner * kWidth<T> * sizeof(T));
  for (int64_t k = 0; k < inner; k += kLine) {
    for (int c = 0; c < kWidth<T>; ++c) __builtin_prefetch(next + c * stride + k, 0, 2);
    transpose<kWidth<T>>(from + k, stride, columns, inner - k < kLine ? inner - k : kLine, panel + k * kWidth<T>);
  }
}

template <typename T>
constexpr ProductKernelsOf<T> kernels() {
  return {kRows, kWidth<T>, pack_left<T>, pack_right<T>, pack_transposed<T>, multiply<T>};
}

}  // namespace

const ProductKernels SHARDWRIGHT_AT_LEVEL(kProductKernels_) = {kernels<float>(), kernels<double>()};
