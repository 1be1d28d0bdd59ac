// Maps codes of values to table rows, and counts codes.

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "fields.h"

namespace {

// Hash table with open addressing and a power-of-two number of slots; code 0 (missing) is never stored.
class Counter {
 public:
  explicit Counter(int64_t most) : most_(most), codes_(1024), counts_(1024) {}

  void add(const uint64_t* codes, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      if (!codes[i]) continue;
      note_distinct(codes[i]);
      const size_t slot = find(codes[i]);
      if (codes_[slot]) {
        ++counts_[slot];
        continue;
      }
      codes_[slot] = codes[i];
      counts_[slot] = error_ + 1;
      if (++size_ > most_) prune();
      if (2 * size_ > static_cast<int64_t>(codes_.size())) resize(2 * codes_.size());
    }
  }

  int64_t size() const { return size_; }
  int64_t error() const { return error_; }

  void dump(uint64_t* codes, int64_t* counts) const {
    for (size_t slot = 0; slot < codes_.size(); ++slot)
      if (codes_[slot]) *codes++ = codes_[slot], *counts++ = counts_[slot];
  }

  // HyperLogLog with 2^14 registers (standard error 0.8 %); linear counting while few registers are filled.
  double distinct() const {
    double sum = 0;
    int64_t empty = 0;
    for (const uint8_t rank : registers_) sum += std::ldexp(1.0, -rank), empty += !rank;
    const double m = kRegisters, estimate = 0.7213 / (1 + 1.079 / m) * m * m / sum;
    return estimate <= 2.5 * m && empty ? m * std::log(m / empty) : estimate;
  }

 private:
  static constexpr int64_t kRegisters = 1 << 14;

  size_t find(uint64_t code) const {
    size_t slot = code & (codes_.size() - 1);
    while (codes_[slot] && codes_[slot] != code) slot = (slot + 1) & (codes_.size() - 1);
    return slot;
  }

  void note_distinct(uint64_t code) {
    const uint64_t rest = mix(code + kGamma);
    const uint8_t rank = static_cast<uint8_t>(__builtin_clzll((rest << 14) | (1ULL << 13)) + 1);
    uint8_t& held = registers_[rest >> 50];
    if (rank > held) held = rank;
  }

  // Lossy counting: drop the rarest codes until a quarter is free. Dropped codes have at most `error_` occurrences, and
  // a new code starts from `error_` + 1, so a count is never too small and at most `error_` too large.
  void prune() {
    while (size_ > most_ - most_ / 4) {
      int64_t least = std::numeric_limits<int64_t>::max();
      for (size_t slot = 0; slot < codes_.size(); ++slot)
        if (codes_[slot] && counts_[slot] < least) least = counts_[slot];
      error_ = least;
      size_ = 0;
      for (size_t slot = 0; slot < codes_.size(); ++slot) {
        if (codes_[slot] && counts_[slot] <= least) codes_[slot] = 0;
        size_ += codes_[slot] != 0;
      }
    }
    resize(codes_.size());
  }

  void resize(size_t slots) {
    std::vector<uint64_t> codes(slots);
    std::vector<int64_t> counts(slots);
    codes.swap(codes_);
    counts.swap(counts_);
    for (size_t old = 0; old < codes.size(); ++old) {
      if (!codes[old]) continue;
      const size_t slot = find(codes[old]);
      codes_[slot] = codes[old];
      counts_[slot] = counts[old];
    }
  }

  int64_t most_, size_ = 0, error_ = 0;
  std::vector<uint64_t> codes_;
  std::vector<int64_t> counts_;
  std::vector<uint8_t> registers_ = std::vector<uint8_t>(kRegisters);
};

}  // namespace

// Codes of the texts data[offsets[i] .. offsets[i + 1]), in Arrow's layout; `tail` > 0: of their last `tail` bytes.
SHARDWRIGHT_API void shardwright_codes(const int32_t* offsets, const char* data, int64_t n, int64_t tail,
                                       uint64_t* codes) {
  for (int64_t i = 0; i < n; ++i) codes[i] = code_of(data + offsets[i], offsets[i + 1] - offsets[i], tail, false);
}

// Hashes codes to rows: missing values have row 0, all others a row in 1 .. rows - 1.
SHARDWRIGHT_API void shardwright_hashed_rows(const uint64_t* codes, int64_t n, uint64_t salt, int64_t rows,
                                             int32_t* out) {
  for (int64_t i = 0; i < n; ++i)
    out[i] = codes[i] ? static_cast<int32_t>(1 + mix(codes[i] ^ salt) % static_cast<uint64_t>(rows - 1)) : 0;
}

// Row 0 is for missing values, row 1 for values outside the vocabulary, row 2 + i for its entry i. `slots` (2^k, at
// most half full) is an open-addressing index of entry + 1, or 0 if a slot is free.
SHARDWRIGHT_API void shardwright_vocabulary_rows(const uint64_t* codes, int64_t n, const uint64_t* vocabulary,
                                                 const int32_t* slots, uint64_t mask, int32_t* out) {
  for (int64_t i = 0; i < n; ++i) {
    uint64_t slot = codes[i] & mask;
    while (slots[slot] && vocabulary[slots[slot] - 1] != codes[i]) slot = (slot + 1) & mask;
    out[i] = codes[i] ? 1 + slots[slot] : 0;
  }
}

SHARDWRIGHT_API void shardwright_vocabulary_slots(const uint64_t* vocabulary, int64_t n, uint64_t mask,
                                                  int32_t* slots) {
  for (int64_t i = 0; i < n; ++i) {
    uint64_t slot = vocabulary[i] & mask;
    while (slots[slot]) slot = (slot + 1) & mask;
    slots[slot] = static_cast<int32_t>(i + 1);
  }
}

SHARDWRIGHT_API void* shardwright_counter_new(int64_t most) { return new Counter(most); }
SHARDWRIGHT_API void shardwright_counter_free(void* counter) { delete static_cast<Counter*>(counter); }
SHARDWRIGHT_API void shardwright_counter_add(void* counter, const uint64_t* codes, int64_t n) {
  static_cast<Counter*>(counter)->add(codes, n);
}
SHARDWRIGHT_API int64_t shardwright_counter_size(const void* counter) {
  return static_cast<const Counter*>(counter)->size();
}
SHARDWRIGHT_API int64_t shardwright_counter_error(const void* counter) {
  return static_cast<const Counter*>(counter)->error();
}
SHARDWRIGHT_API double shardwright_counter_distinct(const void* counter) {
  return static_cast<const Counter*>(counter)->distinct();
}
SHARDWRIGHT_API void shardwright_counter_dump(const void* counter, uint64_t* codes, int64_t* counts) {
  static_cast<const Counter*>(counter)->dump(codes, counts);
}
