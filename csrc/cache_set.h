// The sets of a cache's index, and the announced uses of rows that are not in the cache (csrc/cache_index.h).
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "inline.h"

constexpr int64_t kWays = 32, kWindow = 32;  // batches that may be announced
constexpr int64_t kNoWay = -1;

// The batch of one of several indices: the position of its first row in the arrays of all, and of its first written line;
// whether it was announced.
struct IndexBatch {
  void* index;
  int64_t n, first, first_written, announced;
};

struct Counts {
  int64_t missing, written, evicted, conflicts;
  int64_t emptied;  // lines among those written, the last ones, that were emptied before any row was placed
};

// What is known of a row on a line; two share a cache line.
struct LineState {
  int64_t key;
  uint32_t uses, last;  // number of batches that used it, and the last of them
  uint32_t next;        // announced batches that use it: bit `number % kWindow`
  float score;
  // Batches that got the line, and those that released it: equal numbers, modulo 2^16, if no batch in flight uses it.
  // Each is written by one thread, so neither needs an atomic addition.
  uint16_t placed, released;
  uint8_t written;  // since it was copied in
};

struct alignas(64) Set {
  uint8_t tags[kWays];  // of the keys; compared first
  uint32_t full;        // ways with a row
  uint32_t guests;      // ways with a row of another set
  uint32_t away;        // number of rows of this set that are in another one
  alignas(64) LineState states[kWays];
};

inline uint64_t hash_of(int64_t key) {  // the finalizer of MurmurHash3
  uint64_t h = key;
  h = (h ^ (h >> 33)) * 0xff51afd7ed558ccdULL;
  h = (h ^ (h >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return h ^ (h >> 33);
}

// Ways with this tag.
inline uint32_t ways_with(const Set& set, uint8_t tag) {
#ifdef __SSE2__
  const __m128i wanted = _mm_set1_epi8(char(tag));
  const auto* tags = reinterpret_cast<const __m128i*>(set.tags);
  const uint32_t low = _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_load_si128(tags), wanted));
  const uint32_t high = _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_load_si128(tags + 1), wanted));
  return (low | high << 16) & set.full;
#else
  uint32_t found = 0;
  for (int64_t way = 0; way < kWays; ++way) found |= uint32_t(set.tags[way] == tag) << way;
  return found & set.full;
#endif
}

inline int64_t way_of(const Set& set, uint64_t hash, int64_t key) {
  for (uint32_t ways = ways_with(set, uint8_t(hash)); ways; ways &= ways - 1) {
    const int64_t way = __builtin_ctz(ways);
    if (set.states[way].key == key) return way;
  }
  return kNoWay;
}

inline bool is_pinned(const Set& set, int64_t way) {
  return set.states[way].placed != __atomic_load_n(&set.states[way].released, __ATOMIC_ACQUIRE);
}

// Which line is evicted: the one of the highest rank.
typedef unsigned __int128 Rank;

// By the batches until the next use, then the lower score, then fewer uses, then the age. Never 0.
inline Rank rank_of(uint32_t distance, float score, uint32_t uses, uint32_t age) {
  uint32_t bits;
  score += 0.0f;  // -0 as 0
  std::memcpy(&bits, &score, sizeof(bits));
  const uint32_t ascending = bits >> 31 ? ~bits : bits | 1u << 31;
  return Rank(uint64_t(distance + 1) << 32 | uint32_t(~ascending)) << 64 | (uint64_t(uint32_t(~uses)) << 32 | age);
}

// Set dueling between two ways to evict, by uses and LRU. Of every kPeriod sets, one always evicts by uses and one always
// by LRU; the others do what has missed less in these of late. Caches of few sets always evict by uses: their few leader
// sets would differ by the rows they happen to have.
class Duel {
 public:
  static constexpr uint64_t kPeriod = 32, kMinSets = 2 * kPeriod;
  enum Leader { kByUses, kByLru, kNone };

  Duel(bool is_wanted, uint64_t num_sets)
      : num_led_(is_wanted && num_sets >= kMinSets ? num_sets / kPeriod * kPeriod : 0) {}

  // As many sets lead one way as the other: sets after the last whole period lead none.
  Leader leader(uint64_t set) const {
    const uint64_t position = set % kPeriod;
    return set >= num_led_ || position > kByLru ? kNone : Leader(position);
  }

  bool counts_uses(uint64_t set) const {
    const Leader kind = leader(set);
    return kind == kNone ? !is_lru_ : kind == kByUses;
  }

  // Adds the misses of a batch in the leader sets.
  void add(const int64_t misses[2]) {
    for (int64_t kind = 0; kind < 2; ++kind) misses_[kind] += misses[kind] - misses_[kind] / kDecayBatches;
    is_lru_ = misses_[kByLru] < misses_[kByUses];
  }

 private:
  static constexpr double kDecayBatches = 64.0;
  const uint64_t num_led_;
  bool is_lru_ = false;
  double misses_[2] = {};
};

// Announced uses of rows that are not in the cache, by key: open addressing, emptied as batches are placed.
class Window {
 public:
  void add(int64_t key, uint32_t bit) {
    if (2 * (size_ + 1) > slots_.size()) grow();
    Slot& slot = find(key);
    size_ += slot.uses == 0 && !slot.taken;
    slot = {key, slot.uses | bit, true};
  }

  void clear() { slots_.clear(), size_ = 0; }

  ALWAYS void prefetch(uint64_t hash) const {
    if (size_) __builtin_prefetch(&slots_[hash & (slots_.size() - 1)], 1);
  }

  // The announced uses of a key without those of `bit`.
  uint32_t take(int64_t key, uint32_t bit) {
    if (!size_) return 0;
    Slot& slot = find(key);
    return slot.taken ? slot.uses &= ~bit : 0;
  }

 private:
  struct Slot {
    int64_t key;
    uint32_t uses;
    bool taken;
  };

  Slot& find(int64_t key) {
    uint64_t at = hash_of(key) & (slots_.size() - 1);
    while (slots_[at].taken && slots_[at].key != key) at = (at + 1) & (slots_.size() - 1);
    return slots_[at];
  }

  // Keys whose announced batches are all placed are dropped.
  void grow() {
    std::vector<Slot> old = std::move(slots_);
    int64_t used = 0;
    for (const Slot& slot : old) used += slot.uses != 0;
    uint64_t size = 1024;
    while (size < uint64_t(4 * (used + 1))) size *= 2;
    slots_.assign(size, Slot{});
    size_ = used;
    for (const Slot& slot : old)
      if (slot.uses) find(slot.key) = slot;
  }

  std::vector<Slot> slots_;
  uint64_t size_ = 0;
};
