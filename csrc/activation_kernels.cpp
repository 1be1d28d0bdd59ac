// GELU and SwiGLU, 16 numbers at a time; the last numbers are padded to 16.

#include "activations.h"
#include "exponential.h"

namespace {

constexpr float kFitted[] = {-0.0568451383f, 0.03794444486f, 0.04630544261f, -0.001770459682f, 0.09420488113f,
                             0.06947572666f, 0.09603656528f, 0.09943245378f,  0.09975085477f};  // see `normal`

// The normal distribution's function: e^(-a^2/2) t P(t) below 0 and one minus that above, with a = |x|,
// t = 1 / (1 + a / 4), and P fitted by least squares at Chebyshev points: its largest relative error is 1.5e-8.
ALWAYS V<float> normal(const V<float>& x) {
  const V<float> a = each<float>([&](int p) { return x.part[p] < 0.0f ? -x.part[p] : x.part[p]; });
  const V<float> t = 1.0f / (a * 0.25f + 1.0f);
  V<float> sum(0.01546523128f);
  for (const float factor : kFitted) sum = sum * t + factor;
  const V<float> tail = exponential(a * a * -0.5f) * t * sum;
  return each<float>([&](int p) { return x.part[p] < 0.0f ? tail.part[p] : 1.0f - tail.part[p]; });
}

ALWAYS V<double> normal(const V<double>& x) {
  return lane_by_lane(x, [](double lane) { return 0.5 * __builtin_erfc(lane * -0.70710678118654752440); });
}

template <typename Run>
ALWAYS void blocks(int64_t n, Run run) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) run(i, int64_t(kLanes));
  if (i < n) run(i, n - i);
}

template <typename T>
void gelu(const T* x, int64_t n, T* out) {
  blocks(n, [&](int64_t i, int64_t num) {
    const V<T> value = get(x + i, num);
    put(value * normal(value), out + i, num);
  });
}

template <typename T>
void gelu_gradient(const T* gradient, const T* x, int64_t n, T* out) {
  const T scale = T(0.39894228040143267794);  // 1 / sqrt(2 pi)
  blocks(n, [&](int64_t i, int64_t num) {
    const V<T> value = get(x + i, num);
    const V<T> slope = normal(value) + value * exponential(value * value * T(-0.5)) * scale;
    put(get(gradient + i, num) * slope, out + i, num);
  });
}

template <typename T>
void swiglu(const T* gate, const T* up, int64_t n, T* out) {
  blocks(n, [&](int64_t i, int64_t num) {
    const V<T> value = get(gate + i, num);
    put(value * sigmoid(value) * get(up + i, num), out + i, num);
  });
}

template <typename T>
void swiglu_gradient(const T* gradient, const T* gate, const T* up, int64_t n, T* of_gate, T* of_up) {
  blocks(n, [&](int64_t i, int64_t num) {
    const V<T> value = get(gate + i, num), share = sigmoid(value), outer = get(gradient + i, num);
    put(outer * get(up + i, num) * share * (value * (T(1) - share) + T(1)), of_gate + i, num);
    put(outer * value * share, of_up + i, num);
  });
}

template <typename T>
constexpr ActivationKernelsOf<T> kernels() {
  return {gelu<T>, gelu_gradient<T>, swiglu<T>, swiglu_gradient<T>};
}

}  // namespace

const ActivationKernels SHARDWRIGHT_AT_LEVEL(kActivationKernels_) = {kernels<float>(), kernels<double>()};
