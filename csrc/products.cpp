// Products of groups of rows with each group's matrix, and the gradients of the matrices.

#include <algorithm>
#include <utility>
#include <vector>

#include "threads.h"

namespace {

constexpr int64_t kInner = 384;  // of a panel: it stays in a core's first cache
constexpr int64_t kRows = 240;  // of packed blocks: they stay in the second

// Products of a group: of `rows` x `inner` numbers with `inner` x `columns` numbers.
template <typename T>
struct Product {
  const T* left;
  int64_t row_step, inner_step, rows, inner;
  const T* right;
  int64_t right_stride;
  bool transposed;  // right is [columns][inner]
  T* out;
  bool add;

  const T* panel(int64_t k, int64_t column) const {
    return transposed ? right + column * right_stride + k : right + k * right_stride + column;
  }
};

// Runs the product of each group; tasks are kRows rows of one group.
template <typename T, typename Make>
void multiply_groups(const ProductKernelsOf<T>& kernels, int64_t groups, int64_t columns, Make make_product) {
  std::vector<std::pair<int64_t, int64_t>> tasks;  // group, first row
  int64_t work = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const Product<T> product = make_product(group);
    work += product.rows * product.inner * columns;
    for (int64_t row = 0; row < product.rows; row += kRows) tasks.emplace_back(group, row);
  }
#pragma omp parallel num_threads(work < 1 << 20 ? 1 : omp_get_max_threads())
  {
    const Scratch<T> panel = scratch<T>(kInner * kernels.width), blocks = scratch<T>(kInner * (kRows + kernels.height));
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < tasks.size(); ++i) {
      const Product<T> product = make_product(tasks[i].first);
      const int64_t row = tasks[i].second, num = std::min(kRows, product.rows - row);
      T* out = product.out + row * columns;
      if (!product.inner && !product.add) std::fill_n(out, num * columns, T(0));
      for (int64_t k = 0; k < product.inner; k += kInner) {
        const int64_t length = std::min(kInner, product.inner - k);
        kernels.pack_left(product.left + row * product.row_step + k * product.inner_step, product.row_step,
                          product.inner_step, num, length, blocks.get());
        for (int64_t first = 0; first < columns; first += kernels.width) {
          const int64_t width = std::min(kernels.width, columns - first);
          const bool is_last = first + width == columns;
          const T* right = product.panel(k, first);
          const T* next = product.panel(is_last ? std::min(k + kInner, product.inner - 1) : k, is_last ? 0 : first + width);
          (product.transposed ? kernels.pack_transposed : kernels.pack_right)(right, next, product.right_stride, length,
                                                                              width, panel.get());
          kernels.multiply(blocks.get(), num, panel.get(), length, out + first, columns, width, product.add || k > 0);
        }
      }
    }
  }
}

template <typename T>
void rows_times_matrices(const ProductKernelsOf<T>& kernels, const T* rows, const T* matrices, const int64_t* starts,
                         int64_t groups, int64_t inner, int64_t columns, bool transposed, T* out) {
  multiply_groups(kernels, groups, columns, [&](int64_t group) {
    const int64_t start = starts[group];
    return Product<T>{rows + start * inner, inner, 1, starts[group + 1] - start, inner,
                      matrices + group * inner * columns, transposed ? inner : columns, transposed,
                      out + start * columns, false};
  });
}

template <typename T>
void rows_times_rows(const ProductKernelsOf<T>& kernels, const T* left, const T* right, const int64_t* starts,
                     int64_t groups, int64_t height, int64_t columns, int64_t left_stride, bool add, T* out) {
  multiply_groups(kernels, groups, columns, [&](int64_t group) {
    const int64_t start = starts[group];
    return Product<T>{left + start * left_stride, 1, left_stride, height, starts[group + 1] - start,
                      right + start * columns, columns, false, out + group * height * columns, add};
  });
}

}  // namespace

// out (R, columns) = rows (R, inner) x the matrix of their group: rows starts[g]..starts[g+1] belong to group g.
// Matrices are (groups, inner, columns), or (groups, columns, inner) if transposed; all are doubles, or all floats.
SHARDWRIGHT_API void shardwright_rows_times_matrices(const void* rows, const void* matrices, const int64_t* starts,
                                                     int64_t groups, int64_t inner, int64_t columns,
                                                     int64_t transposed, int64_t doubles, void* out) {
  if (doubles)
    rows_times_matrices(product_kernels().of_doubles, static_cast<const double*>(rows),
                        static_cast<const double*>(matrices), starts, groups, inner, columns, transposed,
                        static_cast<double*>(out));
  else
    rows_times_matrices(product_kernels().of_floats, static_cast<const float*>(rows),
                        static_cast<const float*>(matrices), starts, groups, inner, columns, transposed,
                        static_cast<float*>(out));
}

// out (groups, height, columns) = or += sum over the rows of each group of left (R, height) x right (R, columns). Rows of
// left begin `left_stride` numbers apart.
SHARDWRIGHT_API void shardwright_rows_times_rows(const void* left, const void* right, const int64_t* starts,
                                                 int64_t groups, int64_t height, int64_t columns, int64_t left_stride,
                                                 int64_t add, int64_t doubles, void* out) {
  if (doubles)
    rows_times_rows(product_kernels().of_doubles, static_cast<const double*>(left), static_cast<const double*>(right),
                    starts, groups, height, columns, left_stride, add, static_cast<double*>(out));
  else
    rows_times_rows(product_kernels().of_floats, static_cast<const float*>(left), static_cast<const float*>(right),
                    starts, groups, height, columns, left_stride, add, static_cast<float*>(out));
}
