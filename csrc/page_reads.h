// Pages of files in any order, many reads in flight: through io_uring where the kernel permits it, otherwise by threads.
#pragma once

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "io_threads.h"
#include "row_log.h"

#if __has_include(<linux/io_uring.h>) && defined(__NR_io_uring_setup)
#include <linux/io_uring.h>
#ifdef IORING_FEAT_RW_CUR_POS  // of the first kernel with IORING_OP_READ
#define SHARDWRIGHT_IO_URING
#endif
#endif

struct PagePlace {
  int file;
  int64_t offset, bytes;
};
using PlacePage = std::function<PagePlace(int64_t)>;  // of a page, by its number in a call
// Uses the bytes of a page; `read`: how many there are, or the negative error number. Returns false to end the call.
using UsePage = std::function<bool(int64_t, const char*, int64_t)>;

#ifdef SHARDWRIGHT_IO_URING

// The kernel's queues of reads and of their results, in memory that it shares with this process. One system call starts
// many reads and waits for many: a thread of its own for each read costs two changes of thread instead.
class PageRing {
 public:
  explicit PageRing(int64_t depth) {
    io_uring_params params{};
    if (!depth || !setup(depth, params) || !map(params) || enter(0, 0)) {
      end();
      return;
    }
    page_in_.resize(params.sq_entries);
    places_.resize(params.sq_entries);
  }
  ~PageRing() { end(); }
  PageRing(const PageRing&) = delete;
  PageRing& operator=(const PageRing&) = delete;

  bool works() const { return file_ >= 0; }

  // As PageReader::read.
  bool read(int64_t n, int64_t largest, const PlacePage& place, const UsePage& use) {
    const std::lock_guard<std::mutex> one_caller(callers_);
    if (!works()) return use(0, nullptr, -EIO);  // another caller's read has ended the ring
    if (largest > page_bytes_) memory_ = pages_of(page_in_.size() * (page_bytes_ = largest));
    std::vector<unsigned> slots(page_in_.size());
    for (unsigned slot = 0; slot < slots.size(); ++slot) slots[slot] = slot;
    const unsigned together = std::max<size_t>(1, slots.size() / 4);  // results that a call waits for
    bool good = true;
    unsigned in_flight = 0;
    for (int64_t next = 0; in_flight || (good && next < n);) {
      unsigned started = 0;
      for (; good && next < n && !slots.empty(); ++next, ++started) {
        start(slots.back(), started, places_[slots.back()] = place(next));
        page_in_[slots.back()] = next;
        slots.pop_back();
      }
      in_flight += started;
      if (const int error = enter(started, std::min(in_flight, together))) {
        end();
        (void)memory_.release();  // reads that the kernel still has may write to it
        return use(next - 1, nullptr, -error);
      }
      unsigned head = *results_head_;
      for (const unsigned tail = __atomic_load_n(results_tail_, __ATOMIC_ACQUIRE); head != tail; ++head, --in_flight) {
        const io_uring_cqe& result = results_[head & results_mask_];
        const unsigned slot = unsigned(result.user_data);
        good = good && use(page_in_[slot], memory_.get() + slot * page_bytes_, complete(slot, result.res));
        slots.push_back(slot);
      }
      __atomic_store_n(results_head_, head, __ATOMIC_RELEASE);
    }
    return good;
  }

 private:
  bool setup(int64_t depth, io_uring_params& params) {
#ifdef IORING_SETUP_COOP_TASKRUN  // results need not interrupt this thread: it asks for them
    params.flags = IORING_SETUP_COOP_TASKRUN;
    file_ = int(syscall(__NR_io_uring_setup, depth, &params));
    if (file_ >= 0) return has_features(params);
    params = {};
#endif
    file_ = int(syscall(__NR_io_uring_setup, depth, &params));
    return file_ >= 0 && has_features(params);
  }

  static bool has_features(const io_uring_params& params) {
    constexpr unsigned kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_RW_CUR_POS;
    return (params.features & kNeeded) == kNeeded;
  }

  // The number of bytes of a page that were read; of one that the kernel has not read as a whole, or not now, as pread
  // reads it.
  int64_t complete(unsigned slot, int64_t read) {
    const PagePlace place = places_[slot];
    if (read == place.bytes) return read;
    read = pread(place.file, memory_.get() + slot * page_bytes_, place.bytes, place.offset);
    return read < 0 ? -errno : read;
  }

  bool map(const io_uring_params& params) {
    const io_sqring_offsets& reads = params.sq_off;
    const io_cqring_offsets& results = params.cq_off;
    ring_bytes_ = std::max(reads.array + params.sq_entries * sizeof(unsigned),
                           results.cqes + params.cq_entries * sizeof(io_uring_cqe));
    entry_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    ring_ = map_part(ring_bytes_, IORING_OFF_SQ_RING);
    entries_ = static_cast<io_uring_sqe*>(map_part(entry_bytes_, IORING_OFF_SQES));
    if (!ring_ || !entries_) return false;
    const auto at = [this](unsigned offset) { return reinterpret_cast<unsigned*>(static_cast<char*>(ring_) + offset); };
    reads_tail_ = at(reads.tail), reads_mask_ = *at(reads.ring_mask), order_ = at(reads.array);
    results_head_ = at(results.head), results_tail_ = at(results.tail), results_mask_ = *at(results.ring_mask);
    results_ = reinterpret_cast<io_uring_cqe*>(at(results.cqes));
    return true;
  }

  void* map_part(size_t bytes, off_t offset) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file_, offset);
    return memory == MAP_FAILED ? nullptr : memory;
  }

  void end() {
    if (ring_) munmap(ring_, ring_bytes_);
    if (entries_) munmap(entries_, entry_bytes_);
    if (file_ >= 0) close(file_);
    ring_ = nullptr, entries_ = nullptr, file_ = -1;
  }

  // Adds the read of a page to those that the next call starts; `before`: how many there are.
  void start(unsigned slot, unsigned before, PagePlace place) {
    io_uring_sqe& entry = entries_[slot];
    std::memset(&entry, 0, sizeof(entry));
    entry.opcode = IORING_OP_READ, entry.fd = place.file, entry.off = place.offset, entry.user_data = slot;
    entry.addr = reinterpret_cast<uint64_t>(memory_.get() + slot * page_bytes_), entry.len = unsigned(place.bytes);
    order_[(*reads_tail_ + before) & reads_mask_] = slot;
  }

  // Starts reads and waits until so many results are there. The kernel takes all entries: they are valid and fewer than
  // the queues have room for. Returns an error number, or 0.
  int enter(unsigned started, unsigned wanted) {
    __atomic_store_n(reads_tail_, *reads_tail_ + started, __ATOMIC_RELEASE);
    while (true) {
      const long taken = syscall(__NR_io_uring_enter, file_, started, wanted, IORING_ENTER_GETEVENTS, nullptr, 0);
      if (taken >= 0) started -= unsigned(taken);
      if (taken >= 0 && !started) return 0;
      if (taken < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) return errno;
    }
  }

  int64_t page_bytes_ = 0;  // of memory for a read: of the largest page so far
  int file_ = -1;
  void* ring_ = nullptr;
  size_t ring_bytes_ = 0, entry_bytes_ = 0;
  io_uring_sqe* entries_ = nullptr;
  unsigned *reads_tail_ = nullptr, *order_ = nullptr, *results_head_ = nullptr, *results_tail_ = nullptr;
  unsigned reads_mask_ = 0, results_mask_ = 0;
  io_uring_cqe* results_ = nullptr;
  Pages memory_;                   // a page for each read in flight
  std::vector<int64_t> page_in_;   // which page that is
  std::vector<PagePlace> places_;  // and where
  std::mutex callers_;
};

#endif

class PageReader {
 public:
  // `in_flight`: reads through io_uring; 0: none. `num_threads`: if that is not possible.
  PageReader(int64_t in_flight, int64_t num_threads)
      :
#ifdef SHARDWRIGHT_IO_URING
        ring_(in_flight),
#endif
        threads_(by_ring() ? 0 : num_threads) {
    (void)in_flight;
  }

  bool by_ring() const {
#ifdef SHARDWRIGHT_IO_URING
    return ring_.works();
#else
    return false;
#endif
  }

  // Reads pages 0 to n - 1, of at most `largest` bytes, each at its place, and uses each once it is there, in any order
  // and from several threads. Returns false if a use did; the rest is not read then. One call at a time; others wait.
  bool read(int64_t n, int64_t largest, const PlacePage& place, const UsePage& use) {
    if (!n) return true;
#ifdef SHARDWRIGHT_IO_URING
    if (by_ring()) return ring_.read(n, largest, place, use);
#endif
    std::atomic<bool> good{true};
    threads_.run(n, [&](int64_t i) {
      thread_local Pages memory;
      thread_local int64_t size = 0;
      if (size < largest) memory = pages_of(size = largest);
      if (!good) return;
      const PagePlace at = place(i);
      const int64_t read = pread(at.file, memory.get(), at.bytes, at.offset);
      if (!use(i, memory.get(), read < 0 ? -errno : read)) good = false;
    });
    return good;
  }

 private:
#ifdef SHARDWRIGHT_IO_URING
  PageRing ring_;
#endif
  IoThreads threads_;
};

// Shared by several logs.
class PageReaders {
 public:
  PageReaders(int64_t in_flight, int64_t threads) : rows_(in_flight, threads), in_flight_(in_flight), threads_(threads) {}

  PageReader& of_rows() { return rows_; }

  // Another one, so that training does not wait for readers of snapshots.
  PageReader& of_snapshots() {
    std::call_once(made_, [this] { snapshots_ = std::make_unique<PageReader>(in_flight_, threads_); });
    return *snapshots_;
  }

 private:
  PageReader rows_;
  const int64_t in_flight_, threads_;
  std::once_flag made_;
  std::unique_ptr<PageReader> snapshots_;
};
