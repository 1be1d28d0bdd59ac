// GELU and SwiGLU, 16 numbers at a time; the last numbers are padded to 16.

#include "activations.h"
#include "vectors.h"

namespace {

constexpr float kTaylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};  // after 1 / 5040
constexpr float kFitted[] = {-0.0568451383f, 0.03794444486f, 0.04630544261f, -0.001770459682f, 0.09420488113f,
                             0.06947572666f, 0.09603656528f, 0.09943245378f,  0.09975085477f};  // see `normal`

// lower if a < lower, upper if a > upper; NaN stays.
ALWAYS V<float> clamp(const V<float>& a, float lower, float upper) {
  return each<float>([&](int p) {
    const auto part = a.part[p] < lower ? lower : a.part[p];
    return part > upper ? upper : part;
  });
}

// 2^n * e^r with x = n ln 2 + r, |r| <= ln 2 / 2, and the Taylor series of e^r, whose rest is below 6e-9.
ALWAYS V<float> exponential(const V<float>& x) {
  const V<float> bounded = clamp(x, -87.0f, 88.0f);
  const float round = 0x1.8p23f;  // added and subtracted, it rounds to a whole number
  const V<float> shifted = bounded * 0x1.715476p0f + round, n = shifted - round;
  const V<float> r = bounded - n * 0x1.62ep-1f - n * 0x1.0bfbe8p-15f;  // ln 2 in two parts, the first with few bits
  V<float> sum(1.0f / 5040);
  for (const float factor : kTaylor) sum = sum * r + factor;
  const V<int32_t> exponent = convert<int32_t>(n) + 127;
  return sum * as<float>(exponent << 23);
}

// Lane by lane, as a library call: its bits do not depend on the lane either.
template <typename Function>
ALWAYS V<double> lane_by_lane(const V<double>& x, Function function) {
  double lanes[kLanes];
  put16(x, lanes);
  for (double& lane : lanes) lane = function(lane);
  return get16(lanes);
}

ALWAYS V<double> exponential(const V<double>& x) {
  return lane_by_lane(x, [](double lane) { return __builtin_exp(lane); });
}

template <typename T>
ALWAYS V<T> sigmoid(const V<T>& x) {
  return T(1) / (exponential(T(0) - x) + T(1));
}

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
