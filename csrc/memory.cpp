// Memory: huge pages for tables, and plain reads and rewrites of rows to measure the roofline.

#include <sys/mman.h>

#include <cstring>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "threads.h"

namespace {

constexpr int64_t kHuge = 2 << 20, kAhead = 16;

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

typedef uint32_t Words __attribute__((vector_size(16)));

// Reads rows of BYTES (0: of `bytes`) and sums their words, so that the compiler cannot remove a read.
template <int64_t BYTES>
uint32_t read_rows(const char* table, int64_t bytes, const int64_t* rows, int64_t n) {
  if (BYTES) bytes = BYTES;
  Words sums[4] = {};
  for (int64_t i = 0; i < n; ++i) {
    const char *row = table + rows[i] * bytes, *soon = table + rows[i + kAhead < n ? i + kAhead : i] * bytes;
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(soon + at);
    int64_t at = 0;
    for (; at + 64 <= bytes; at += 64)
      for (int part = 0; part < 4; ++part) {
        Words words;
        std::memcpy(&words, row + at + 16 * part, 16);
        sums[part] += words;
      }
    for (; at + 4 <= bytes; at += 4) {
      uint32_t word;
      std::memcpy(&word, row + at, 4);
      sums[0][0] += word;
    }
  }
  const Words sum = sums[0] + sums[1] + sums[2] + sums[3];
  return sum[0] + sum[1] + sum[2] + sum[3];
}

uint32_t read_rows_of(const char* table, int64_t bytes, const int64_t* rows, int64_t n) {
  switch (bytes) {
    case 64: return read_rows<64>(table, bytes, rows, n);
    case 128: return read_rows<128>(table, bytes, rows, n);
    case 256: return read_rows<256>(table, bytes, rows, n);
    case 512: return read_rows<512>(table, bytes, rows, n);
    default: return read_rows<0>(table, bytes, rows, n);
  }
}

void rewrite(char* row, int64_t bytes) {
  for (int64_t at = 0; at + 4 <= bytes; at += 4) {
    uint32_t word;
    std::memcpy(&word, row + at, 4);
    word ^= 0x80000000u;
    std::memcpy(row + at, &word, 4);
  }
}

}  // namespace

// Requests pages of 2 MiB, which avoid TLB misses; with `collapse` memory that is in use already is moved into them.
// Returns 0 and changes nothing if the system has no huge pages.
SHARDWRIGHT_API int64_t shardwright_huge_pages(char* memory, int64_t bytes, int64_t collapse) {
#ifdef MADV_HUGEPAGE
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = reinterpret_cast<uintptr_t>(memory + bytes) / kHuge * kHuge;
  if (begin >= end) return 0;
  if (madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE)) return 0;
  if (collapse) return !madvise(reinterpret_cast<void*>(begin), end - begin, MADV_COLLAPSE);
  return 1;
#else
  (void)memory, (void)bytes, (void)collapse;
  return 0;
#endif
}

// Makes the allocator keep freed memory for later allocations, so that a step does not fault in new pages for memory
// that the previous step freed. Returns 0 and changes nothing if the allocator has no such setting.
SHARDWRIGHT_API int64_t shardwright_keep_memory() {
#ifdef __GLIBC__
  const bool threshold = mallopt(M_MMAP_THRESHOLD, 1 << 30) || mallopt(M_MMAP_THRESHOLD, 1 << 25);
  return threshold && mallopt(M_TRIM_THRESHOLD, -1) && mallopt(M_TOP_PAD, 1 << 26);
#else
  return 0;
#endif
}

// Gives freed memory that the allocator has kept back to the system if it is more than what is in use: blocks of ever
// new sizes, as checkpoints and publications allocate, would otherwise make the process grow. Returns whether it did.
SHARDWRIGHT_API int64_t shardwright_trim_memory() {
#ifdef __GLIBC__
#if __GLIBC_PREREQ(2, 33)
  const auto now = mallinfo2();
  return now.fordblks > now.uordblks + now.hblkhd && malloc_trim(0);
#endif
#endif
  return 0;
}

// Reads `rows` in order and does nothing else. Returns a number that depends on all of them.
SHARDWRIGHT_API uint64_t shardwright_read_rows(const char* table, int64_t row_bytes, const int64_t* rows, int64_t n) {
  uint64_t found = 0;
  const int64_t parts = omp_get_max_threads();
#pragma omp parallel for reduction(+ : found) schedule(static, 1)
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = n * part / parts, end = n * (part + 1) / parts;
    found += read_rows_of(table, row_bytes, rows + begin, end - begin);
  }
  return found;
}

// Reads and rewrites `rows`, which must be distinct: flips the sign of every 4-byte number.
SHARDWRIGHT_API void shardwright_rewrite_rows(char* table, int64_t row_bytes, const int64_t* rows, int64_t n) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n)
      for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(table + rows[i + kAhead] * row_bytes + at, 1);
    rewrite(table + rows[i] * row_bytes, row_bytes);
  }
}

// A counter in memory that processes share. Everything that a process wrote before its store_release is visible to the
// process that reads the new value with load_acquire, also on processors that reorder loads and stores.
SHARDWRIGHT_API int64_t shardwright_load_acquire(const int64_t* counter) {
  return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}

SHARDWRIGHT_API void shardwright_store_release(int64_t* counter, int64_t value) {
  __atomic_store_n(counter, value, __ATOMIC_RELEASE);
}
