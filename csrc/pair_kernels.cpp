// Dot products of pairs and their gradient, with blocks of rows in registers.

#include "pairs.h"
#include "small_products.h"

namespace {

template <typename T>
void dots(const T* rows, int64_t vectors, int64_t dim, T* scratch, T* out) {
  const int64_t width = padded(vectors), size = pairs_of(vectors);
  T *square = scratch, *columns = scratch + vectors * width;
  transpose(rows, vectors, dim, dim, columns, width);
  blocks_of_rows(vectors, [&](int64_t first, auto count) {
    constexpr int ROWS = decltype(count)::value;
    for (int64_t c = (first + 1) / kLanes * kLanes; c < width; c += kLanes)
      product<ROWS>(rows + first * dim, dim, 1, dim, columns + c, width, square + first * width + c, width);
  });
  int64_t at = 0;
  for (int64_t row = 0; row + 1 < vectors; ++row) {
    const int64_t n = vectors - row - 1;
    const T* from = square + row * width + row + 1;
    if (at + padded(n) <= size)  // whole vectors: the next row overwrites the surplus
      for (int64_t c = 0; c < n; c += kLanes) put16(get16(from + c), out + at + c);
    else
      std::memcpy(out + at, from, n * sizeof(T));
    at += n;
  }
}

template <typename T>
void gradients(const T* rows, const T* for_dots, int64_t vectors, int64_t dim, T* square, T* out) {
  const T* from = for_dots;
  for (int64_t i = 0; i < vectors; ++i) {
    square[i * vectors + i] = 0;
    for (int64_t j = i + 1; j < vectors; ++j) square[i * vectors + j] = square[j * vectors + i] = *from++;
  }
  blocks_of_rows(vectors, [&](int64_t first, auto count) {
    constexpr int ROWS = decltype(count)::value;
    int64_t c = 0;
    for (; c + kLanes <= dim; c += kLanes)
      product<ROWS>(square + first * vectors, vectors, 1, vectors, rows + c, dim, out + first * dim + c, dim);
    for (; c < dim; ++c)
      for (int64_t row = first; row < first + ROWS; ++row) {
        T sum = 0;
        for (int64_t j = 0; j < vectors; ++j) sum += square[row * vectors + j] * rows[j * dim + c];
        out[row * dim + c] = sum;
      }
  });
}

}  // namespace

const PairKernels SHARDWRIGHT_AT_LEVEL(kPairKernels_) = {
    {dots<float>, gradients<float>},
    {dots<double>, gradients<double>},
};
