// Which rows are in a cache, and on which line: a set-associative index of 32 ways.
//
// A row's key selects its set. `place` finds the lines of a batch's distinct rows, evicts others where rows are
// missing, and pins the lines until `release`, since the batch still reads and updates them. Evicted lines that were
// written must be copied to the slower memory before the missing rows are copied in.
//
// The line to evict: the one with the farthest next use among the batches that were announced; of those without, the
// one with the lowest score, if rows are placed with scores of the caller; of those, with the fewest uses, halved for
// every `half_life` batches since the last use (0: all are equal; negative: never halved); of those, the one whose last
// use is longest ago. So half_life 0 is LRU, a negative one LFU, and others are LFU with ageing. With `adapts`, sets
// choose between that and LRU (Duel).
//
// If all lines of its set are pinned, a row is placed in another set, and leaves the cache once it is released.

#pragma once

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "cache_set.h"
#include "threads.h"

SHARDWRIGHT_API int64_t shardwright_huge_pages(char* memory, int64_t bytes, int64_t collapse);

namespace {

// Keys ahead whose set, and whose state, is fetched; of missing keys, all states of the set.
constexpr int64_t kAhead = 24, kClose = 10, kVictims = 3;

// A part of a batch: the rows of a range of sets.
struct Part {
  std::vector<int64_t> rows;  // positions in the batch
  std::vector<uint64_t> hashes;
  std::vector<int64_t> missing, old_keys;  // a missing row, and the one that was written on its line; or kNoWay
  std::vector<int64_t> written_lines, written_keys, conflicts;
  int64_t evicted = 0, leader_misses[2] = {};
};

class Index {
 public:
  Index(int64_t num_sets, int64_t half_life, bool adapts)
      : num_sets_(num_sets), half_life_(half_life), duel_(adapts, num_sets), sets_(scratch<Set>(num_sets)) {
    shardwright_huge_pages(reinterpret_cast<char*>(sets_.get()), num_sets * sizeof(Set), 0);
    std::memset(static_cast<void*>(sets_.get()), 0, num_sets * sizeof(Set));
  }

  // Announces the rows of the batch after those announced so far. Returns its number, or -1 if too many batches are
  // announced.
  int64_t announce(const int64_t* keys, int64_t n) {
    const uint32_t number = announced_ + 1;
    if (number - due_ >= kWindow) return kNoWay;
    announced_ = number;
    const uint32_t bit = 1u << number % kWindow;
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) fetch_set(hash_of(keys[i + kAhead]));
      if (i + kClose < n) fetch_state(hash_of(keys[i + kClose]));
      window_.add(keys[i], bit);
      Line line = find(hash_of(keys[i]), keys[i]);
      if (line.set) line.set->states[line.way].next |= bit;
    }
    return number;
  }

  // Forgets the announced batches that were not placed.
  void forget() {
    if (announced_ == due_) return;
    due_ = announced_;
    window_.clear();
    for (uint64_t s = 0; s < num_sets_; ++s)
      for (LineState& state : sets_[s].states) state.next = 0;
  }

  // Places the distinct rows of a batch; `lines` are theirs; `announced`: it is the first announced batch that has not
  // been placed yet. Positions of missing rows go to `missing`, and to
  // `old_keys`, if it is not null, the rows that were written on their lines, or kNoWay; lines that were written and are
  // now another row's, and their former rows, to `written_lines` and `written_keys`, all of size n + num_away(). Returns
  // false if the batches in flight need more lines than there are; the index is then of no use.
  bool place(const int64_t* keys, const float* scores, int64_t n, bool announced, int64_t* lines, int64_t* missing,
             int64_t* old_keys, int64_t* written_lines, int64_t* written_keys, Counts* counts) {
    ++batch_;
    bit_ = announced && due_ != announced_ ? 1u << ++due_ % kWindow : 0;
    *counts = {};
    Part moved;
    drop_away(moved);
    const int64_t threads = threads_for(n);
    std::vector<Part> parts(threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t p = 0; p < threads; ++p) {
      const uint64_t begin = num_sets_ * p / threads, end = num_sets_ * (p + 1) / threads;
      Part& part = parts[p];
      part.rows.reserve(n / threads), part.hashes.reserve(n / threads);
      for (int64_t i = 0; i < n; ++i) {
        const uint64_t hash = hash_of(keys[i]), set = number_of(hash);
        if (set < begin || set >= end) continue;
        part.rows.push_back(i);
        part.hashes.push_back(hash);
      }
      place_part(part, keys, scores, lines);
    }
    for (Part& part : parts)
      for (const int64_t i : part.conflicts)
        if (!place_away(part, keys[i], scores ? scores[i] : 0.0f, i, lines)) return false;
    counts->emptied = moved.written_lines.size();
    parts.push_back(std::move(moved));
    int64_t leader_misses[2] = {};
    for (const Part& part : parts) {
      for (int64_t kind = 0; kind < 2; ++kind) leader_misses[kind] += part.leader_misses[kind];
      std::copy(part.missing.begin(), part.missing.end(), missing + counts->missing);
      if (old_keys) std::copy(part.old_keys.begin(), part.old_keys.end(), old_keys + counts->missing);
      std::copy(part.written_lines.begin(), part.written_lines.end(), written_lines + counts->written);
      std::copy(part.written_keys.begin(), part.written_keys.end(), written_keys + counts->written);
      counts->missing += part.missing.size();
      counts->written += part.written_lines.size();
      counts->evicted += part.evicted;
      counts->conflicts += part.conflicts.size();
    }
    duel_.add(leader_misses);
    return true;
  }

  // Ends a batch's use of these lines. May run beside `place`.
  void release(const int64_t* lines, int64_t n, bool written) {
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) __builtin_prefetch(&sets_[lines[i + kAhead] / kWays].states[lines[i + kAhead] % kWays], 1);
      Set& set = sets_[lines[i] / kWays];
      const int64_t way = lines[i] % kWays;
      if (written) __atomic_store_n(&set.states[way].written, 1, __ATOMIC_RELAXED);
      uint16_t& released = set.states[way].released;
      __atomic_store_n(&released, uint16_t(released + 1), __ATOMIC_RELEASE);
    }
  }

  // The lines of rows, -1 for rows that are not in the cache; changes nothing.
  void find_lines(const int64_t* keys, int64_t n, int64_t* lines) const {
#pragma omp parallel for num_threads(threads_for(n)) schedule(static)
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) __builtin_prefetch(&set_of(hash_of(keys[i + kAhead])));
      if (i + kClose < n) fetch_state(hash_of(keys[i + kClose]));
      const Line line = find(hash_of(keys[i]), keys[i]);
      lines[i] = line.set ? number_of(line) : kNoWay;
    }
  }

  // Lines with a row, `written`: that were written, and their rows; with `clear` they count as not written from now on.
  // Without `lines` only their number is returned.
  int64_t list(int64_t* lines, int64_t* keys, bool written, bool clear) {
    int64_t found = 0;
    for (uint64_t s = 0; s < num_sets_; ++s)
      for (int64_t way = 0; way < kWays; ++way) {
        Set& set = sets_[s];
        if (!(set.full >> way & 1) || (written && !set.states[way].written)) continue;
        if (lines) lines[found] = s * kWays + way, keys[found] = set.states[way].key;
        if (clear) set.states[way].written = 0;
        ++found;
      }
    return found;
  }

  int64_t num_away() const { return away_.size(); }

 private:
  struct Line {
    Set* set;
    int64_t way;
  };

  uint64_t number_of(uint64_t hash) const { return uint64_t((unsigned __int128)hash * num_sets_ >> 64); }
  int64_t number_of(const Line& line) const { return (line.set - sets_.get()) * kWays + line.way; }
  Set& set_of(uint64_t hash) const { return sets_[number_of(hash)]; }

  Line find(uint64_t hash, int64_t key) const {
    Set& set = set_of(hash);
    const int64_t way = way_of(set, hash, key);
    if (way != kNoWay) return {&set, way};
    if (set.away) {
      const auto found = away_.find(key);
      if (found != away_.end()) return {&sets_[found->second / kWays], found->second % kWays};
    }
    return {nullptr, 0};
  }

  // Rows that are in the cache first, so that they are not evicted for the others.
  void place_part(Part& part, const int64_t* keys, const float* scores, int64_t* lines) {
    const int64_t n = part.rows.size();
    std::vector<int64_t> missing;
    for (int64_t i = 0; i < n; ++i) {
      fetch_ahead(part.hashes, i);
      const int64_t at = part.rows[i], key = keys[at];
      const Line line = find(part.hashes[i], key);
      if (!line.set) {
        missing.push_back(i);
        continue;
      }
      if (bit_) window_.take(key, bit_);
      use(line, scores ? scores[at] : 0.0f, line.set->states[line.way].next & ~bit_);
      lines[at] = number_of(line);
    }
    for (int64_t j = 0; j < int64_t(missing.size()); ++j) {
      if (j + kVictims < int64_t(missing.size())) fetch_states(set_of(part.hashes[missing[j + kVictims]]));
      if (j + kClose < int64_t(missing.size())) window_.prefetch(part.hashes[missing[j + kClose]]);
      const int64_t i = missing[j], at = part.rows[i];
      Line line{&set_of(part.hashes[i]), 0};
      if (const auto kind = duel_.leader(number_of(part.hashes[i])); kind != Duel::kNone) ++part.leader_misses[kind];
      line.way = victim(*line.set);
      if (line.way == kNoWay) {
        part.conflicts.push_back(at);
        continue;
      }
      fill(part, line, part.hashes[i], keys[at], scores ? scores[at] : 0.0f, at);
      lines[at] = number_of(line);
    }
  }

  ALWAYS void fetch_ahead(const std::vector<uint64_t>& hashes, int64_t i) const {
    const int64_t n = hashes.size();
    if (i + kAhead < n) fetch_set(hashes[i + kAhead]);
    if (i + kClose < n) fetch_state(hashes[i + kClose]);
  }

  ALWAYS void fetch_set(uint64_t hash) const {
    __builtin_prefetch(&set_of(hash));
    window_.prefetch(hash);
  }

  ALWAYS void fetch_state(uint64_t hash) const {
    const Set& set = set_of(hash);
    const uint32_t ways = ways_with(set, uint8_t(hash));
    if (ways) __builtin_prefetch(&set.states[__builtin_ctz(ways)], 1);
  }

  ALWAYS static void fetch_states(const Set& set) {
    for (int64_t way = 0; way < kWays; way += 64 / sizeof(LineState)) __builtin_prefetch(&set.states[way], 1);
  }

  // The way to evict, or an empty one; kNoWay if all are pinned.
  int64_t victim(const Set& set) const {
    if (~set.full) return __builtin_ctz(~set.full);
    const bool counts_uses = duel_.counts_uses(&set - sets_.get());
    int64_t best = kNoWay;
    Rank highest = 0;
    for (int64_t way = 0; way < kWays; ++way) {
      if (set.guests >> way & 1 || is_pinned(set, way)) continue;
      const LineState& state = set.states[way];
      const uint32_t age = batch_ - state.last;
      const uint32_t uses = counts_uses ? aged(state.uses, age) : 0;
      const Rank rank = rank_of(distance_of(state.next), state.score, uses, age);
      best = rank > highest ? way : best;
      highest = rank > highest ? rank : highest;
    }
    return best;
  }

  // Batches until the next announced use; kWindow without one.
  uint32_t distance_of(uint32_t next) const {
    if (!next) return kWindow;
    const uint32_t shift = due_ % kWindow, turned = shift ? next >> shift | next << (kWindow - shift) : next;
    return __builtin_ctz(turned);
  }

  uint32_t aged(uint32_t uses, uint32_t age) const {
    if (half_life_ < 0 || age < half_life_) return uses;
    if (uses < 2) return 0;
    const uint32_t halvings = half_life_ ? age / uint32_t(half_life_) : 32;
    return halvings < 32 ? uses >> halvings : 0;
  }

  void use(Line line, float score, uint32_t next) {
    LineState& state = line.set->states[line.way];
    const uint32_t uses = aged(state.uses, batch_ - state.last);
    if (half_life_) state.uses = uses + (uses != UINT32_MAX);
    state.last = batch_;
    state.next = next;
    state.score = score;
    ++state.placed;
  }

  // Puts a missing row, at this position of the batch, on a line that is empty or not pinned.
  void fill(Part& part, Line line, uint64_t hash, int64_t key, float score, int64_t at) {
    part.missing.push_back(at);
    part.old_keys.push_back(empty(part, line));
    line.set->tags[line.way] = uint8_t(hash);
    line.set->full |= 1u << line.way;
    LineState& state = line.set->states[line.way];
    state.key = key;
    state.uses = 0;
    state.last = batch_;
    use(line, score, window_.take(key, bit_));
  }

  // Returns the row of the line if it was written, else kNoWay.
  int64_t empty(Part& part, Line line) {
    Set& set = *line.set;
    if (!(set.full >> line.way & 1)) return kNoWay;
    const int64_t old = set.states[line.way].written ? set.states[line.way].key : kNoWay;
    if (set.states[line.way].written) part.written_lines.push_back(number_of(line)), part.written_keys.push_back(old);
    set.states[line.way].written = 0;
    set.full &= ~(1u << line.way);
    set.guests &= ~(1u << line.way);
    ++part.evicted;
    return old;
  }

  // Puts a row whose set has only pinned lines in another one.
  bool place_away(Part& part, int64_t key, float score, int64_t at, int64_t* lines) {
    const uint64_t hash = hash_of(key), home = number_of(hash);
    for (uint64_t step = 1; step < num_sets_; ++step) {
      Line line{&sets_[(home + step) % num_sets_], 0};
      line.way = victim(*line.set);
      if (line.way == kNoWay) continue;
      fill(part, line, hash, key, score, at);
      line.set->guests |= 1u << line.way;
      ++sets_[home].away;
      away_[key] = number_of(line);
      lines[at] = number_of(line);
      return true;
    }
    return false;
  }

  // Empties the lines of released rows that are not in their own set.
  void drop_away(Part& part) {
    for (auto row = away_.begin(); row != away_.end();) {
      const Line line{&sets_[row->second / kWays], row->second % kWays};
      if (is_pinned(*line.set, line.way)) {
        ++row;
        continue;
      }
      empty(part, line);
      --set_of(hash_of(row->first)).away;
      row = away_.erase(row);
    }
  }

  const uint64_t num_sets_;
  const int64_t half_life_;
  Duel duel_;
  Scratch<Set> sets_;
  std::unordered_map<int64_t, int64_t> away_;  // lines of rows that are not in their own set
  Window window_;
  uint32_t batch_ = 0;                // number of the last batch placed
  uint32_t announced_ = 0, due_ = 0;  // of the last announced batch, and of the last one of these that was placed
  uint32_t bit_ = 0;                  // of the batch that is placed, among announced uses
};

}  // namespace
