// Vectors of 16 numbers for any instruction set; loads, stores and rounding of weight dtypes.
//
// Included by files that are compiled once per instruction set (LEVEL). Everything is static, and no library templates
// are used: the linker would keep a single copy of them, perhaps with instructions that this machine does not support.
#pragma once

#include <cstdint>
#include <cstring>
#ifdef __F16C__
#include <immintrin.h>
#endif

#include "embedding.h"
#include "inline.h"

// Name of a symbol with the level as suffix.
#define SHARDWRIGHT_JOINED(a, b) a##b
#define SHARDWRIGHT_JOIN(a, b) SHARDWRIGHT_JOINED(a, b)
#define SHARDWRIGHT_AT_LEVEL(name) SHARDWRIGHT_JOIN(name, LEVEL)

namespace {

struct Float16 {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

#if defined(__AVX512F__)
constexpr int kRegister = 64;
#elif defined(__AVX2__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif

// Numbers of a vector per register. 2-byte numbers fill only half a register, since they are converted to 4 bytes.
template <typename T>
constexpr int kPart = kRegister / (sizeof(T) < 4 ? 4 : sizeof(T));

template <typename T>
struct Part {
  typedef T type __attribute__((vector_size(kPart<T> * sizeof(T))));
};

// 16 numbers in one or several registers. (A 64-byte vector type would be simpler, but without AVX-512 gcc moves it
// through the stack.)
template <typename T>
struct V {
  static constexpr int parts = 16 / kPart<T>;
  typename Part<T>::type part[parts];

  V() = default;
  ALWAYS V(T all) {
    for (int p = 0; p < parts; ++p) part[p] = typename Part<T>::type{} + all;
  }
};

template <typename T, typename Do>
ALWAYS V<T> each(Do value_of) {
  V<T> v;
#pragma GCC unroll 8
  for (int p = 0; p < V<T>::parts; ++p) v.part[p] = value_of(p);
  return v;
}

#define SHARDWRIGHT_OPERATOR(op)                                                                          \
  template <typename T>                                                                                   \
  ALWAYS V<T> operator op(const V<T>& a, const V<T>& b) {                                                 \
    return each<T>([&](int p) { return a.part[p] op b.part[p]; });                                        \
  }                                                                                                       \
  template <typename T>                                                                                   \
  ALWAYS V<T> operator op(const V<T>& a, T b) {                                                           \
    return each<T>([&](int p) { return a.part[p] op b; });                                                \
  }                                                                                                       \
  template <typename T>                                                                                   \
  ALWAYS V<T> operator op(T a, const V<T>& b) {                                                           \
    return each<T>([&](int p) { return a op b.part[p]; });                                                \
  }
SHARDWRIGHT_OPERATOR(+)
SHARDWRIGHT_OPERATOR(-)
SHARDWRIGHT_OPERATOR(*)
SHARDWRIGHT_OPERATOR(/)
SHARDWRIGHT_OPERATOR(&)
SHARDWRIGHT_OPERATOR(|)
SHARDWRIGHT_OPERATOR(^)
#undef SHARDWRIGHT_OPERATOR

template <typename T>
ALWAYS V<T> operator>>(const V<T>& a, int bits) {
  return each<T>([&](int p) { return a.part[p] >> bits; });
}
template <typename T>
ALWAYS V<T> operator<<(const V<T>& a, int bits) {
  return each<T>([&](int p) { return a.part[p] << bits; });
}

// Per lane: a < limit ? yes : no.
ALWAYS V<uint32_t> where_below(const V<uint32_t>& a, uint32_t limit, const V<uint32_t>& yes, const V<uint32_t>& no) {
  return each<uint32_t>([&](int p) { return a.part[p] < limit ? yes.part[p] : no.part[p]; });
}

template <typename To, typename From>
ALWAYS V<To> convert(const V<From>& a) {
  return each<To>([&](int p) { return __builtin_convertvector(a.part[p], typename Part<To>::type); });
}

template <typename W>
struct Wide {
  using type = float;  // the type of computations
};
template <>
struct Wide<double> {
  using type = double;
};

// Reinterprets the bits as another type of the same size.
template <typename To, typename From>
ALWAYS V<To> as(const V<From>& v) {
  return each<To>([&](int p) { return reinterpret_cast<typename Part<To>::type>(v.part[p]); });
}

template <typename T>
ALWAYS V<T> get16(const T* from) {
  return each<T>([&](int p) {
    typename Part<T>::type part;
    std::memcpy(&part, from + p * kPart<T>, sizeof part);
    return part;
  });
}

template <typename T>
ALWAYS void put16(const V<T>& v, T* to) {
#pragma GCC unroll 8
  for (int p = 0; p < V<T>::parts; ++p) std::memcpy(to + p * kPart<T>, &v.part[p], sizeof v.part[p]);
}

// Reads n <= 16 numbers; the other lanes are zero.
template <typename T>
ALWAYS V<T> get(const T* from, int64_t n) {
  if (n == kLanes) return get16(from);
  T lanes[kLanes] = {};
  std::memcpy(lanes, from, n * sizeof(T));
  return get16(lanes);
}

template <typename T>
ALWAYS void put(const V<T>& v, T* to, int64_t n) {
  if (n == kLanes) return put16(v, to);
  T lanes[kLanes];
  put16(v, lanes);
  std::memcpy(to, lanes, n * sizeof(T));
}

ALWAYS V<double> load(const double* from, int64_t n) { return get(from, n); }
ALWAYS V<float> load(const float* from, int64_t n) { return get(from, n); }

ALWAYS V<float> load(const Bfloat16* from, int64_t n) {
  return as<float>(convert<uint32_t>(get(reinterpret_cast<const uint16_t*>(from), n)) << 16);
}

ALWAYS V<float> load(const Float16* from, int64_t n) {
  const V<uint16_t> bits = get(reinterpret_cast<const uint16_t*>(from), n);
#ifdef __F16C__
  uint16_t halves[kLanes];
  put16(bits, halves);
  float lanes[kLanes];
  for (int half = 0; half < kLanes; half += 8)
    _mm256_storeu_ps(lanes + half, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + half))));
  return get16(lanes);
#else
  const V<uint32_t> h = convert<uint32_t>(bits);
  const V<uint32_t> rest = (h & 0x7fffu) << 13;
  const V<uint32_t> v = as<uint32_t>(as<float>(rest) * 0x1p112f);  // 5 exponent bits to 8, subnormals exactly
  const V<uint32_t> special = v | 0x7f800000u;
  return as<float>(where_below(rest, 0x7c00u << 13, v, special) | (h & 0x8000u) << 16);
#endif
}

// The random bits of stochastic rounding are a function of (key of the row, column) only, so CPU and GPU agree and the
// order does not matter. kernels/reference.py has the same functions.
ALWAYS uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

ALWAYS uint32_t row_key(const Table& table, uint64_t row) {
  return uint32_t(mix(mix(table.key + uint64_t(table.step) * 0x9E3779B97F4A7C15ULL) + row));
}

ALWAYS V<uint32_t> hashed(V<uint32_t> x) {
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  return x ^ x >> 16;
}

// 16 random bits per column: columns c and c + 8 of a vector use the low and the high half of the same hash.
ALWAYS V<uint32_t> random16(uint32_t key, int64_t column) {
  const uint32_t lanes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
  const uint32_t halves[kLanes] = {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
  const V<uint32_t> x = hashed((get16(lanes) + uint32_t(column / 2)) * 0x9E3779B9u ^ key);
  const V<uint32_t> low = get16(halves);
  return (x & 0xffffu & low) | ((x >> 16) & (low ^ ~0u));
}

ALWAYS void store(const V<double>& v, double* to, int64_t n, uint32_t, int64_t) { put(v, to, n); }
ALWAYS void store(const V<float>& v, float* to, int64_t n, uint32_t, int64_t) { put(v, to, n); }

// Stochastic rounding with 16 random bits: rounds up with the probability of the truncated bits. Infinities and NaNs
// are kept; too large finite values become the largest number, so that a too long step does not ruin a row.
ALWAYS V<uint16_t> to_bfloat16(const V<float>& v, const V<uint32_t>& random) {
  const V<uint32_t> x = as<uint32_t>(v), magnitude = x & 0x7fffffffu, carried = magnitude + random;
  const V<uint32_t> clamped = where_below(carried, 0x7f800000u, carried, V<uint32_t>(0x7f7fffffu));
  const V<uint32_t> rounded = (clamped | (x & 0x80000000u)) >> 16;
  const V<uint32_t> special = x >> 16 | where_below(magnitude, 0x7f800001u, V<uint32_t>(0), V<uint32_t>(0x40u));
  return convert<uint16_t>(where_below(magnitude, 0x7f800000u, rounded, special));
}

ALWAYS void store(const V<float>& v, Bfloat16* to, int64_t n, uint32_t key, int64_t column) {
  put(to_bfloat16(v, random16(key, column)), reinterpret_cast<uint16_t*>(to), n);
}

ALWAYS void store(const V<float>& v, Float16* to, int64_t n, uint32_t key, int64_t column) {
  const V<uint32_t> x = as<uint32_t>(v), magnitude = x & 0x7fffffffu;
  const V<uint32_t> random = random16(key, column) & 0x1fffu, carried = magnitude + random;
  const V<uint32_t> infinite(0x7c00u), nan(0x7e00u), largest(0x7bffu);
  const V<uint32_t> normal = where_below(carried, 0x47800000u, (carried - 0x38000000u) >> 13, largest);
  const V<uint32_t> small = where_below(magnitude, 0x38800000u, magnitude, V<uint32_t>(0));
  const V<float> steps =  // below 2^-14 the values are multiples of 2^-24
      as<float>(small) * 0x1p24f + convert<float>(as<int32_t>(random)) * 0x1p-13f;
  const V<uint32_t> subnormal = as<uint32_t>(convert<int32_t>(steps));
  V<uint32_t> bits = where_below(magnitude, 0x38800000u, subnormal, normal);
  bits = where_below(magnitude, 0x7f800000u, bits, where_below(magnitude, 0x7f800001u, infinite, nan));
  put(convert<uint16_t>(bits | (x >> 16 & 0x8000u)), reinterpret_cast<uint16_t*>(to), n);
}

ALWAYS float root(float x) { return __builtin_sqrtf(x); }
ALWAYS double root(double x) { return __builtin_sqrt(x); }

template <typename A>
ALWAYS V<A> root(const V<A>& v) {
  return each<A>([&](int p) {
    typename Part<A>::type roots = v.part[p];
    for (int lane = 0; lane < kPart<A>; ++lane) roots[lane] = root(roots[lane]);
    return roots;
  });
}

// Adds the upper half of the lanes to the lower half until a single lane is left.
template <typename T, int LANES>
struct Folded {
  typedef T Vector __attribute__((vector_size(LANES * sizeof(T))));
  typedef T Half __attribute__((vector_size(LANES / 2 * sizeof(T))));
  static ALWAYS T total(const Vector& v) {
    Half low, high;
    std::memcpy(&low, &v, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
    return Folded<T, LANES / 2>::total(low + high);
  }
};
template <typename T>
struct Folded<T, 2> {
  typedef T Vector __attribute__((vector_size(2 * sizeof(T))));
  static ALWAYS T total(const Vector& v) { return v[0] + v[1]; }
};

// Sum of the 16 lanes: adds the upper half to the lower half repeatedly.
template <typename A>
ALWAYS A total(V<A> v) {
#pragma GCC unroll 8
  for (int width = V<A>::parts / 2; width; width /= 2)
#pragma GCC unroll 8
    for (int p = 0; p < width; ++p) v.part[p] += v.part[p + width];
  return Folded<A, kPart<A>>::total(v.part[0]);
}

template <int LINES>
ALWAYS void prefetch_lines(const char* row) {
#pragma GCC unroll 8
  for (int line = 0; line < LINES; ++line) __builtin_prefetch(row + 64 * line);
}

// The usual sizes are unrolled, since a loop would cost as much as the work on a row.
ALWAYS void prefetch(const void* from, int64_t bytes) {
  const char* row = static_cast<const char*>(from);
  if (bytes == 256) return prefetch_lines<4>(row);
  if (bytes == 128) return prefetch_lines<2>(row);
  if (bytes == 512) return prefetch_lines<8>(row);
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
}

}  // namespace
