// Adam step on a tile of a parameter. Formulas follow kernels/reference.py line by line.
//
// Compiled once per instruction set, whose name is LEVEL; the caller (adam.cpp) runs the threads.

#include "adam.h"
#include "vectors.h"

namespace {

// 32 random bits per number: the lower half rounds its mean, the upper half its square.
ALWAYS V<uint32_t> random32(uint32_t key, int64_t column) {
  const uint32_t lanes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return hashed((get16(lanes) + uint32_t(column)) * 0x9E3779B9u ^ key);
}

ALWAYS void keep(const V<double>& v, double* to, int64_t n, const V<uint32_t>&) { put(v, to, n); }
ALWAYS void keep(const V<float>& v, float* to, int64_t n, const V<uint32_t>&) { put(v, to, n); }
ALWAYS void keep(const V<float>& v, Bfloat16* to, int64_t n, const V<uint32_t>& random) {
  put(to_bfloat16(v, random), reinterpret_cast<uint16_t*>(to), n);
}

template <typename A, typename M>
struct Adam {
  Adam(const Parameter& parameter, const AdamNumbers& numbers, int64_t begin)
      : weight(static_cast<A*>(parameter.weight)), gradient(static_cast<const A*>(parameter.gradient)),
        mean(static_cast<M*>(parameter.mean)), square(static_cast<M*>(parameter.square)), place(parameter.place),
        key(uint32_t(mix(mix(parameter.start) + uint64_t((place + begin) >> kTileBits)))), beta2(A(numbers.beta2)),
        rest1(A(numbers.rest1)), rest2(A(numbers.rest2)), rate(A(numbers.rate)), scale(A(numbers.scale)),
        eps(A(numbers.eps)), decay(A(numbers.decay)), shrink(A(numbers.shrink)), sign(A(numbers.sign)) {}

  ALWAYS void step(int64_t i, int64_t n) const {
    V<A> w = load(weight + i, n), g = sign * load(gradient + i, n);
    if (decay != 0) g = g + decay * w;
    w = shrink * w;
    const V<A> before = load(mean + i, n), m = before + rest1 * (g - before);
    const V<A> v = beta2 * load(square + i, n) + rest2 * g * g;
    put(w - rate * m / (root(v) * scale + eps), weight + i, n);
    const V<uint32_t> random = sizeof(M) == 2 ? random32(key, (place + i) & ((1 << kTileBits) - 1)) : V<uint32_t>(0);
    keep(m, mean + i, n, random & 0xffffu);
    keep(v, square + i, n, random >> 16);
  }

  A* const weight;
  const A* const gradient;
  M *const mean, *const square;
  const int64_t place;
  const uint32_t key;
  const A beta2, rest1, rest2, rate, scale, eps, decay, shrink, sign;
};

template <typename A, typename M>
void step(const Parameter& parameter, const AdamNumbers& numbers, int64_t begin, int64_t end) {
  const Adam<A, M> adam(parameter, numbers, begin);
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) adam.step(i, kLanes);
  if (i < end) adam.step(i, end - i);
}

}  // namespace

const AdamKernels SHARDWRIGHT_AT_LEVEL(kAdamKernels_) = {
    {step<double, double>, step<float, float>, step<float, Bfloat16>}};
