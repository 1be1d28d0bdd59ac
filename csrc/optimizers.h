// Optimizers of embedding tables: each updates a row and its state with the row's summed gradient.
//
// WHOLE: the dim is a multiple of a vector's 16 columns. Formulas follow kernels/reference.py line by line. `load`
// fills columns beyond the dim with zeros, so that sums over a row are correct.
#pragma once

#include "vectors.h"

namespace {

template <typename W, bool WHOLE>
struct Rule {
  using A = typename Wide<W>::type;

  Rule(const Table& table, const Settings& settings)
      : table(table), dim(table.dim), lr(A(settings.lr)), eps(A(settings.eps)), decay(A(settings.weight_decay)),
        clip(A(settings.clip)), decoupled(settings.decoupled != 0) {}

  ALWAYS A* state(int which, int64_t row) const { return static_cast<A*>(table.state[which]) + row * dim; }
  ALWAYS A& state_of_row(int which, int64_t row) const { return static_cast<A*>(table.state[which])[row]; }
  // Only 16-bit weights use stochastic rounding.
  ALWAYS uint32_t key_of(uint32_t row) const {
    return sizeof(W) == 2 ? row_key(table, table.row_numbers ? uint64_t(table.row_numbers[row]) : row) : 0;
  }
  ALWAYS int64_t columns(int64_t column) const { return WHOLE || dim - column >= kLanes ? kLanes : dim - column; }

  ALWAYS A sum_of_squares(const A* gradient) const {
    V<A> squares(0);
    for (int64_t c = 0; c < dim; c += kLanes) {
      const V<A> g = load(gradient + c, columns(c));
      squares = squares + g * g;
    }
    return total<A>(squares);
  }

  ALWAYS void clip_by_norm(A* gradient) const {
    if (!(clip > 0)) return;
    const A norm = root(sum_of_squares(gradient));
    if (norm > clip)
      for (int64_t c = 0; c < dim; c += kLanes) put16<A>(get16(gradient + c) * (clip / norm), gradient + c);
  }

  // Clips the gradient, then adds weight decay to it, unless decay is decoupled.
  ALWAYS void prepare(const W* weight, A* gradient) const {
    clip_by_norm(gradient);
    if (decay != 0 && !decoupled)
      for (int64_t c = 0; c < dim; c += kLanes)
        put16<A>(get16(gradient + c) + decay * load(weight + c, columns(c)), gradient + c);
  }

  // weight -= change (and lr * decay * weight, if decoupled).
  ALWAYS void step(W* weight, int64_t column, const V<A>& change, uint32_t key) const {
    const int64_t n = columns(column);
    V<A> w = load(weight + column, n);
    w = decay != 0 && decoupled ? w - lr * decay * w - change : w - change;
    store(w, weight + column, n, key, column);
  }

  const Table& table;
  const int64_t dim;
  const A lr, eps, decay, clip;
  const bool decoupled;
};

template <typename W, bool WHOLE>
struct Sgd : Rule<W, WHOLE> {
  using A = typename Rule<W, WHOLE>::A;
  Sgd(const Table& table, const Settings& settings) : Rule<W, WHOLE>(table, settings), momentum(A(settings.momentum)) {}

  ALWAYS void prefetch_state(int64_t row) const {
    if (momentum != 0) prefetch(this->state(0, row), this->dim * sizeof(A));
  }

  ALWAYS void apply(W* weight, A* gradient, uint32_t row) const {
    this->prepare(weight, gradient);
    const uint32_t key = this->key_of(row);
    for (int64_t c = 0; c < this->dim; c += kLanes) {
      V<A> g = get16(gradient + c);
      if (momentum != 0) {
        A* held = this->state(0, row) + c;
        g = momentum * load(held, this->columns(c)) + g;
        put<A>(g, held, this->columns(c));
      }
      this->step(weight, c, this->lr * g, key);
    }
  }

  const A momentum;
};

template <typename W, bool WHOLE>
struct Adagrad : Rule<W, WHOLE> {
  using A = typename Rule<W, WHOLE>::A;
  using Rule<W, WHOLE>::Rule;

  ALWAYS void prefetch_state(int64_t row) const { prefetch(this->state(0, row), this->dim * sizeof(A)); }

  ALWAYS void apply(W* weight, A* gradient, uint32_t row) const {
    this->prepare(weight, gradient);
    const uint32_t key = this->key_of(row);
    for (int64_t c = 0; c < this->dim; c += kLanes) {
      A* held = this->state(0, row) + c;
      const V<A> g = get16(gradient + c), sum = load(held, this->columns(c)) + g * g;
      put<A>(sum, held, this->columns(c));
      this->step(weight, c, this->lr * g / (root(sum) + this->eps), key);
    }
  }
};

template <typename W, bool WHOLE>
struct RowwiseAdagrad : Rule<W, WHOLE> {
  using A = typename Rule<W, WHOLE>::A;
  using Rule<W, WHOLE>::Rule;

  ALWAYS void prefetch_state(int64_t row) const { __builtin_prefetch(&this->state_of_row(0, row)); }

  ALWAYS void apply(W* weight, A* gradient, uint32_t row) const {
    this->prepare(weight, gradient);
    const uint32_t key = this->key_of(row);
    A& sum = this->state_of_row(0, row);
    sum += this->sum_of_squares(gradient) / A(this->dim);
    const A rate = this->lr / (root(sum) + this->eps);
    for (int64_t c = 0; c < this->dim; c += kLanes) this->step(weight, c, rate * get16(gradient + c), key);
  }
};

// Adam's moments; direction: bias-corrected mean / root of bias-corrected square. Rows without gradient keep theirs.
template <typename W, bool WHOLE>
struct Moments : Rule<W, WHOLE> {
  using A = typename Rule<W, WHOLE>::A;
  Moments(const Table& table, const Settings& settings)
      : Rule<W, WHOLE>(table, settings), beta1(A(settings.beta1)), beta2(A(settings.beta2)),
        rest1(A(1 - settings.beta1)), rest2(A(1 - settings.beta2)),
        correct1(A(1 - __builtin_pow(settings.beta1, double(table.step)))),
        correct2(A(1 - __builtin_pow(settings.beta2, double(table.step)))) {}

  ALWAYS void prefetch_state(int64_t row) const {
    prefetch(this->state(0, row), this->dim * sizeof(A));
    prefetch(this->state(1, row), this->dim * sizeof(A));
  }

  ALWAYS V<A> mean(const V<A>& g, uint32_t row, int64_t column) const {
    A* held = this->state(0, row) + column;
    const V<A> now = beta1 * load(held, this->columns(column)) + rest1 * g;
    put<A>(now, held, this->columns(column));
    return now / correct1;
  }

  ALWAYS V<A> direction(const V<A>& g, uint32_t row, int64_t column) const {
    const V<A> mean = this->mean(g, row, column);
    A* held = this->state(1, row) + column;
    const V<A> square = beta2 * load(held, this->columns(column)) + rest2 * (g * g);
    put<A>(square, held, this->columns(column));
    return mean / (root(square / correct2) + this->eps);
  }

  const A beta1, beta2, rest1, rest2, correct1, correct2;
};

template <typename W, bool WHOLE>
struct Adam : Moments<W, WHOLE> {
  using A = typename Rule<W, WHOLE>::A;
  using Moments<W, WHOLE>::Moments;

  ALWAYS void apply(W* weight, A* gradient, uint32_t row) const {
    this->prepare(weight, gradient);
    const uint32_t key = this->key_of(row);
    for (int64_t c = 0; c < this->dim; c += kLanes)
      this->step(weight, c, this->lr * this->direction(get16(gradient + c), row, c), key);
  }
};

// Adam with one second moment per row: the moving average of the squared gradient's mean over the row's columns.
template <typename W, bool WHOLE>
struct PartialRowwiseAdam : Moments<W, WHOLE> {
  using A = typename Rule<W, WHOLE>::A;
  using Moments<W, WHOLE>::Moments;

  ALWAYS void prefetch_state(int64_t row) const {
    prefetch(this->state(0, row), this->dim * sizeof(A));
    __builtin_prefetch(&this->state_of_row(1, row));
  }

  ALWAYS void apply(W* weight, A* gradient, uint32_t row) const {
    this->prepare(weight, gradient);
    const uint32_t key = this->key_of(row);
    A& square = this->state_of_row(1, row);
    square = this->beta2 * square + this->rest2 * (this->sum_of_squares(gradient) / A(this->dim));
    const A scale = root(square / this->correct2) + this->eps;
    for (int64_t c = 0; c < this->dim; c += kLanes)
      this->step(weight, c, this->lr * (this->mean(get16(gradient + c), row, c) / scale), key);
  }
};

// Adam's direction with decoupled decay, scaled per row to the norm of the row's weights.
template <typename W, bool WHOLE>
struct Lamb : Moments<W, WHOLE> {
  using A = typename Rule<W, WHOLE>::A;
  using Moments<W, WHOLE>::Moments;

  ALWAYS void apply(W* weight, A* gradient, uint32_t row) const {
    this->clip_by_norm(gradient);
    const uint32_t key = this->key_of(row);
    V<A> weights(0), directions(0);
    for (int64_t c = 0; c < this->dim; c += kLanes) {
      const int64_t n = this->columns(c);
      const V<A> w = load(weight + c, n);
      const V<A> direction = this->direction(get16(gradient + c), row, c) + this->decay * w;
      put16<A>(direction, gradient + c);
      weights = weights + w * w;
      directions = directions + load(gradient + c, n) * load(gradient + c, n);
    }
    const A length = root(total<A>(weights)), wanted = root(total<A>(directions));
    const A trust = length > 0 && wanted > 0 ? length / wanted : A(1);
    for (int64_t c = 0; c < this->dim; c += kLanes) {
      const V<A> w = load(weight + c, this->columns(c));
      store(w - this->lr * trust * get16(gradient + c), weight + c, this->columns(c), key, c);
    }
  }
};

}  // namespace
