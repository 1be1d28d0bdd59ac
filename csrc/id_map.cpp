// Which ids have a row in a table that grows, and on which line: a hash table from ids of 64 bits to lines.
//
// An id gets a line of its own with its `admit_after`-th occurrence. Before, it is a candidate: only its uses are
// counted, and each batch that has it gets a spare line with the id's initial values, until `release`. Without expiry
// there are at most as many candidates as rows, or 1,024: of more, all but three quarters of so many are forgotten. Rows
// that no training batch has used for `expire_after` batches end, candidates too, and an id that comes back starts anew.
// When all lines are taken, expired rows end first, then those with the fewest uses, halved for every `half_life`
// batches since the last one, then the one used longest ago; never one that a batch in flight uses.
//
// What an id gets depends only on the batches that were placed, in their order: not on when rows are released, nor on
// where entries lie in the hash table.

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "id_slots.h"
#include "threads.h"

namespace {

constexpr int64_t kLookAhead = 16, kEvictedShare = 32, kSweepsPerLife = 2;
constexpr int64_t kMinCandidates = 1 << 10, kForgottenShare = 4, kMinRemoved = 1 << 16;

struct Options {
  int64_t rows, spares;  // lines of admitted ids, then one that collects what is not kept, then spare lines
  int64_t admit_after, expire_after, half_life;
  int64_t in_flight;  // batches that may be in flight, the one that is placed included
};

class IdMap {
 public:
  IdMap(const Options& options, int64_t* key_of_line) : options_(options), key_of_line_(key_of_line) {
    for (int64_t i = options.spares; i-- > 0;) spares_.push_back(int32_t(options.rows + 1 + i));
  }

  // Places a batch's ids, which may repeat. `lines`: to look up; `update_lines`: to update, the line `rows` for ids
  // that are not trained. `fresh`: lines that must get the initial values of ids `fresh_keys`; `spares`: lines to
  // release. Returns 1; 0 if all lines are of batches in flight; -1 if there are too few spare lines.
  int64_t place(const int64_t* keys, int64_t n, bool training, int64_t* lines, int64_t* update_lines, int64_t* fresh,
                int64_t* fresh_keys, int64_t* spares, int64_t* counts) {
    if (training) {
      ++batch_;
      sweep_some();
      forget_candidates();
    }
    reserve(n);
    ++call_;
    std::vector<uint64_t> at(n), distinct;
    for (int64_t i = 0; i < n; ++i) {
      if (i + kLookAhead < n) slots_.prefetch(keys[i + kLookAhead]);
      const uint64_t slot = at[i] = slots_.find_or_add(keys[i], batch_);
      KnownId& entry = slots_[slot];
      if (entry.call != call_) {
        entry.call = call_;
        distinct.push_back(slot);
        if (training) begin_use(entry);
      }
      if (training) entry.uses += entry.uses != UINT32_MAX;
    }
    int64_t num_fresh = 0, num_spares = 0;
    std::vector<uint64_t> admitted;
    const auto undo = [&] {  // lines of this call have no values yet
      for (const uint64_t slot : admitted) free_.push_back(slots_[slot].line), slots_[slot].line = kNoLine;
      admitted_ -= admitted.size(), candidates_ += admitted.size();
      release(spares, num_spares);
    };
    if (training)
      for (const uint64_t slot : distinct) candidates_ += is_candidate(slots_[slot]);
    for (const uint64_t slot : distinct) {
      KnownId& entry = slots_[slot];
      if (has_row(entry)) continue;
      int32_t line = kNoLine;
      if (training && entry.uses >= options_.admit_after) {
        line = take_line();
        if (line == kNoLine) return undo(), 0;
        entry.line = line;
        admitted.push_back(slot);
        ++admitted_, --candidates_;
      } else {
        if (spares_.empty()) return undo(), -1;
        line = entry.spare = spares_.back();
        spares_.pop_back();
        spares[num_spares++] = line;
      }
      key_of_line_[line] = entry.key;
      fresh[num_fresh] = line, fresh_keys[num_fresh++] = entry.key;
    }
    for (int64_t i = 0; i < n; ++i) {
      const KnownId& entry = slots_[at[i]];
      lines[i] = has_row(entry) ? entry.line : entry.spare;
      update_lines[i] = has_row(entry) ? entry.line : options_.rows;
    }
    counts[0] = num_fresh, counts[1] = num_spares;
    if (!training) forget_unknown(keys, n);
    return 1;
  }

  void release(const int64_t* spares, int64_t n) {
    for (int64_t i = n; i-- > 0;) spares_.push_back(int32_t(spares[i]));
  }

  // The lines of admitted ids, -1 for others.
  void find_lines(const int64_t* keys, int64_t n, int64_t* lines) const {
    for (int64_t i = 0; i < n; ++i) {
      if (i + kLookAhead < n) slots_.prefetch(keys[i + kLookAhead]);
      const uint64_t slot = slots_.find(keys[i]);
      lines[i] = slots_[slot].taken && has_row(slots_[slot]) ? slots_[slot].line : kNoLine;
    }
  }

  // Admitted ids, or candidates, that have not expired, by id; without `keys` only their number is returned.
  int64_t list(bool admitted, int64_t* keys, int64_t* lines, int64_t* uses, int64_t* last) const {
    std::vector<const KnownId*> found;
    for (const KnownId& entry : slots_)
      if (entry.taken && !is_expired(entry) && (entry.line != kNoLine) == admitted && (admitted || entry.uses))
        found.push_back(&entry);
    if (!keys) return found.size();
    std::sort(found.begin(), found.end(), [](const KnownId* a, const KnownId* b) { return a->key < b->key; });
    for (size_t i = 0; i < found.size(); ++i)
      keys[i] = found[i]->key, lines[i] = found[i]->line, uses[i] = found[i]->uses, last[i] = found[i]->last;
    return found.size();
  }

  // Adds ids that `list` returned; in an empty map, lines of admitted ids count from 0. Returns whether there is room.
  bool load(bool admitted, const int64_t* keys, const int64_t* uses, const int64_t* last, int64_t n) {
    reserve(n);
    for (int64_t i = 0; i < n; ++i) {
      KnownId& entry = slots_[slots_.find_or_add(keys[i], batch_)];
      candidates_ -= is_candidate(entry);
      entry.uses = uint32_t(uses[i]), entry.last = uint32_t(last[i]);
      candidates_ += !admitted && is_candidate(entry);
      if (!admitted || entry.line != kNoLine) continue;
      if (admitted_ == options_.rows) return false;
      entry.line = take_line();
      key_of_line_[entry.line] = keys[i];
      ++admitted_;
    }
    return true;
  }

  // Ends the rows of these ids.
  void remove(const int64_t* keys, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t slot = slots_.find(keys[i]);
      if (!slots_[slot].taken) continue;
      int64_t count = 0;
      end_row(slots_[slot], &count);
      slots_.erase(slot);
    }
  }

  // Ids whose rows ended since the last call, each once; without `keys` only their number is returned. They are recorded
  // from the first call on; of more than the map has rows, none (`has_lost_removed`).
  int64_t take_removed(int64_t* keys) {
    records_removed_ = true;
    for (KnownId& entry : slots_)
      if (entry.taken && is_expired(entry)) end_row(entry, &expired_);
    bound_removed();
    const int64_t n = removed_.size();
    if (!keys) return n;
    std::copy(removed_.begin(), removed_.end(), keys);
    removed_.clear();
    return n;
  }

  // Whether ids whose rows ended were forgotten since the last call.
  bool has_lost_removed() { return std::exchange(has_lost_removed_, false); }

  void set_batch(int64_t batch) { batch_ = uint32_t(batch); }

  void numbers(int64_t* out) const {
    out[0] = admitted_, out[1] = slots_.num_entries(), out[2] = batch_, out[3] = expired_, out[4] = evicted_;
  }

 private:
  // Makes room for n more entries; once half of the rows are taken, for all rows, so that it seldom grows again.
  void reserve(int64_t n) {
    if (slots_.reserve(n, 2 * admitted_ > options_.rows ? options_.rows : 0)) hand_ = 0;
  }

  // Erases the entries of ids that no training batch has had.
  void forget_unknown(const int64_t* keys, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t slot = slots_.find(keys[i]);
      if (slots_[slot].taken && is_empty(slots_[slot])) slots_.erase(slot);
    }
  }

  bool is_expired(const KnownId& entry) const {
    return options_.expire_after && int64_t(batch_) - entry.last > options_.expire_after;
  }

  bool has_row(const KnownId& entry) const { return entry.line != kNoLine && !is_expired(entry); }

  static bool is_candidate(const KnownId& entry) { return entry.line == kNoLine && entry.uses; }

  uint32_t aged(const KnownId& entry) const {
    const uint64_t halvings = (batch_ - entry.last) / options_.half_life;
    return halvings < 32 ? entry.uses >> halvings : 0;
  }

  void begin_use(KnownId& entry) {
    if (is_expired(entry)) end_row(entry, &expired_);
    candidates_ -= is_candidate(entry);  // `place` counts it again
    entry.uses = aged(entry);
    entry.last = batch_;
  }

  // Forgets an id; its entry stays, empty.
  void end_row(KnownId& entry, int64_t* count) {
    candidates_ -= is_candidate(entry);
    entry.uses = 0;
    if (entry.line == kNoLine) return;
    if (records_removed_) {
      removed_.push_back(entry.key);
      if (int64_t(removed_.size()) > 2 * std::max(options_.rows, kMinRemoved)) bound_removed();
    }
    free_.push_back(entry.line);
    entry.line = kNoLine;
    --admitted_;
    ++*count;
  }

  void bound_removed() {
    std::sort(removed_.begin(), removed_.end());
    removed_.erase(std::unique(removed_.begin(), removed_.end()), removed_.end());
    if (int64_t(removed_.size()) <= std::max(options_.rows, kMinRemoved)) return;
    removed_.clear();
    has_lost_removed_ = true;
  }

  int32_t take_line() {
    if (free_.empty() && used_ == options_.rows) make_room();
    if (!free_.empty()) {
      const int32_t line = free_.back();
      free_.pop_back();
      return line;
    }
    return used_ < options_.rows ? int32_t(used_++) : kNoLine;
  }

  // Ends expired rows; if there are none, a share of the others. Entries stay where they are.
  void make_room() {
    std::vector<Scored> others;
    others.reserve(admitted_);
    for (uint64_t slot = 0; slot < slots_.num_slots(); ++slot) {
      KnownId& entry = slots_[slot];
      if (!entry.taken || entry.line == kNoLine) continue;
      if (is_expired(entry))
        end_row(entry, &expired_);
      else if (int64_t(batch_) - entry.last >= options_.in_flight)
        others.push_back(scored(slot));
    }
    if (!free_.empty() || others.empty()) return;
    end_worst(others, std::min<int64_t>(others.size(), options_.rows / kEvictedShare + 1));
  }

  // Candidates are not in flight: they have no rows.
  void forget_candidates() {
    const int64_t most = std::max(options_.rows, kMinCandidates);
    if (options_.expire_after || candidates_ <= most) return;
    std::vector<Scored> all;
    all.reserve(candidates_);
    for (uint64_t slot = 0; slot < slots_.num_slots(); ++slot)
      if (slots_[slot].taken && is_candidate(slots_[slot])) all.push_back(scored(slot));
    end_worst(all, int64_t(all.size()) - most / kForgottenShare * (kForgottenShare - 1));
  }

  struct Scored {
    uint64_t score;  // uses, then the last batch
    int64_t key;
    uint64_t slot;
  };

  Scored scored(uint64_t slot) const {
    const KnownId& entry = slots_[slot];
    return {uint64_t(aged(entry)) << 32 | entry.last, entry.key, slot};
  }

  void end_worst(std::vector<Scored>& entries, int64_t num) {
    const auto is_worse = [](const Scored& a, const Scored& b) {
      return a.score != b.score ? a.score < b.score : a.key < b.key;
    };
    std::nth_element(entries.begin(), entries.begin() + num - 1, entries.end(), is_worse);
    for (int64_t i = 0; i < num; ++i) end_row(slots_[entries[i].slot], &evicted_);
  }

  // Drops expired and empty entries of a part of the slots, so that all are visited twice in the life of a row.
  void sweep_some() {
    if (!options_.expire_after) return;
    uint64_t left = kSweepsPerLife * slots_.num_slots() / options_.expire_after + 1;
    for (left = std::min(left, slots_.num_slots()); left; --left) {
      KnownId& entry = slots_[hand_];
      if (entry.taken && is_expired(entry)) {
        end_row(entry, &expired_);
        slots_.erase(hand_);  // the next entry may move here
      } else {
        hand_ = slots_.next(hand_);
      }
    }
  }

  const Options options_;
  int64_t* const key_of_line_;
  IdSlots slots_;
  std::vector<int32_t> free_, spares_;
  std::vector<int64_t> removed_;
  int64_t admitted_ = 0, candidates_ = 0, used_ = 0, expired_ = 0, evicted_ = 0;
  uint64_t hand_ = 0;
  uint32_t batch_ = 0, call_ = 0;
  bool records_removed_ = false, has_lost_removed_ = false;
};

}  // namespace

SHARDWRIGHT_API void* shardwright_id_map_new(const int64_t* options, int64_t* key_of_line) {
  return new IdMap({options[0], options[1], options[2], options[3], options[4], options[5]}, key_of_line);
}

SHARDWRIGHT_API void shardwright_id_map_free(void* map) { delete static_cast<IdMap*>(map); }

SHARDWRIGHT_API int64_t shardwright_id_map_place(void* map, const int64_t* keys, int64_t n, int64_t training,
                                                 int64_t* lines, int64_t* update_lines, int64_t* fresh,
                                                 int64_t* fresh_keys, int64_t* spares, int64_t* counts) {
  return static_cast<IdMap*>(map)->place(keys, n, training, lines, update_lines, fresh, fresh_keys, spares, counts);
}

SHARDWRIGHT_API void shardwright_id_map_release(void* map, const int64_t* spares, int64_t n) {
  static_cast<IdMap*>(map)->release(spares, n);
}

SHARDWRIGHT_API void shardwright_id_map_find(void* map, const int64_t* keys, int64_t n, int64_t* lines) {
  static_cast<IdMap*>(map)->find_lines(keys, n, lines);
}

SHARDWRIGHT_API int64_t shardwright_id_map_list(void* map, int64_t admitted, int64_t* keys, int64_t* lines,
                                                int64_t* uses, int64_t* last) {
  return static_cast<IdMap*>(map)->list(admitted, keys, lines, uses, last);
}

SHARDWRIGHT_API int64_t shardwright_id_map_load(void* map, int64_t admitted, const int64_t* keys, const int64_t* uses,
                                                const int64_t* last, int64_t n) {
  return static_cast<IdMap*>(map)->load(admitted, keys, uses, last, n);
}

SHARDWRIGHT_API void shardwright_id_map_remove(void* map, const int64_t* keys, int64_t n) {
  static_cast<IdMap*>(map)->remove(keys, n);
}

SHARDWRIGHT_API int64_t shardwright_id_map_take_removed(void* map, int64_t* keys) {
  return static_cast<IdMap*>(map)->take_removed(keys);
}

SHARDWRIGHT_API int64_t shardwright_id_map_has_lost_removed(void* map) {
  return static_cast<IdMap*>(map)->has_lost_removed();
}

SHARDWRIGHT_API void shardwright_id_map_set_batch(void* map, int64_t batch) {
  static_cast<IdMap*>(map)->set_batch(batch);
}

SHARDWRIGHT_API void shardwright_id_map_numbers(void* map, int64_t* out) { static_cast<IdMap*>(map)->numbers(out); }
