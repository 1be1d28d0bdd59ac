// The hash table of csrc/id_map.cpp: open addressing, with entries that are known of ids.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cache_set.h"

constexpr int32_t kNoLine = -1;

struct KnownId {
  int64_t key;
  int32_t line;         // of an admitted id, else kNoLine
  int32_t spare;        // of a candidate, in the last call that had it
  uint32_t uses, last;  // halved with age; the last training batch that used it
  uint32_t call;        // the last call of `place` that had it
  uint32_t taken;       // whether the slot has an entry
};

// Whether nothing is known of the id: its row was evicted, or only batches that do not train had it.
inline bool is_empty(const KnownId& entry) { return entry.line == kNoLine && !entry.uses; }

class IdSlots {
 public:
  KnownId& operator[](uint64_t slot) { return slots_[slot]; }
  const KnownId& operator[](uint64_t slot) const { return slots_[slot]; }
  std::vector<KnownId>::iterator begin() { return slots_.begin(); }
  std::vector<KnownId>::iterator end() { return slots_.end(); }
  std::vector<KnownId>::const_iterator begin() const { return slots_.begin(); }
  std::vector<KnownId>::const_iterator end() const { return slots_.end(); }

  uint64_t num_slots() const { return slots_.size(); }
  int64_t num_entries() const { return size_; }

  ALWAYS void prefetch(int64_t key) const { __builtin_prefetch(&slots_[home_of(key)], 1); }

  // The slot of a key, or the empty one where it would be.
  uint64_t find(int64_t key) const {
    uint64_t slot = home_of(key);
    while (slots_[slot].taken && slots_[slot].key != key) slot = next(slot);
    return slot;
  }

  uint64_t find_or_add(int64_t key, uint32_t batch) {
    const uint64_t slot = find(key);
    if (!slots_[slot].taken) {
      slots_[slot] = {key, kNoLine, kNoLine, 0, batch, 0, 1};
      ++size_;
    }
    return slot;
  }

  // Makes room for n more entries, and drops empty ones if that moves all; then for `least` entries at least, besides
  // these n. Returns whether it did.
  bool reserve(int64_t n, int64_t least) {
    if (size_ + n <= kMostTaken * slots_.size()) return false;
    int64_t known = 0;
    for (const KnownId& entry : slots_) known += entry.taken && !is_empty(entry);
    known = std::max(known, least);
    uint64_t wanted = slots_.size();
    while (known + n > kMostKnown * wanted) wanted *= 2;
    std::vector<KnownId> before(wanted);
    before.swap(slots_);
    size_ = 0;
    for (const KnownId& entry : before) {
      if (!entry.taken || is_empty(entry)) continue;
      slots_[find(entry.key)] = entry;
      ++size_;
    }
    return true;
  }

  // Empties a slot, and moves entries after it back to where they would be without it.
  void erase(uint64_t slot) {
    const uint64_t mask = slots_.size() - 1;
    --size_;
    for (uint64_t other = next(slot); slots_[other].taken; other = next(other)) {
      const uint64_t home = home_of(slots_[other].key);
      if (((other - home) & mask) < ((other - slot) & mask)) continue;
      slots_[slot] = slots_[other];
      slot = other;
    }
    slots_[slot].taken = 0;
  }

  uint64_t next(uint64_t slot) const { return (slot + 1) & (slots_.size() - 1); }

 private:
  static constexpr double kMostTaken = 0.7, kMostKnown = 0.6;  // of the slots: entries, and those that are not empty

  uint64_t home_of(int64_t key) const { return hash_of(key) & (slots_.size() - 1); }

  std::vector<KnownId> slots_ = std::vector<KnownId>(1 << 10);
  int64_t size_ = 0;
};
