// The sets of a cache's index, and the announced uses of rows that are not in the cache (csrc/cache_index.cpp).
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

constexpr int64_t kWays = 32, kWindow = 32;  // batches that may be announced
constexpr int64_t kNoWay = -1;

// Of functions that only fetch cache lines: GCC sees no effect in one, and drops calls that it does not inline.
#define FETCHES inline __attribute__((always_inline))

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

// Whether uses count when a row is evicted, chosen by set dueling: in one of kLeaders sets they always count, in another
// one never (there it is LRU), and in the others as in the one of both that has missed less of late.
class Duel {
 public:
  explicit Duel(bool is_held) : is_held_(is_held) {}

  bool uses_count(uint64_t set) const {
    if (!is_held_) return true;
    const uint64_t leader = set % kLeaders;
    return leader == 0 || (leader != 1 && !is_lru_);
  }

  // Adds the missing rows of a batch in the two kinds of leading sets.
  void add(const int64_t missing[2]) {
    for (int64_t kind = 0; kind < 2; ++kind) missing_[kind] += missing[kind] - missing_[kind] / kBatches;
    is_lru_ = missing_[1] < missing_[0];
  }

  static constexpr uint64_t kLeaders = 32;

 private:
  static constexpr double kBatches = 64.0;  // that count
  const bool is_held_;
  bool is_lru_ = false;
  double missing_[2] = {};  // in sets where uses count, and where they do not
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
