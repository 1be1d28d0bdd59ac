// The exponential function and the sigmoid of vectors.
//
// Included by files that are compiled once per instruction set, see vectors.h.
#pragma once

#include "vectors.h"

namespace {

constexpr float kTaylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};  // after 1 / 5040

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

}  // namespace
