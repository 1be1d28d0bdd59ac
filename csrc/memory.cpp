// The memory itself: huge pages for tables, and how fast rows can be read and rewritten at all (the roofline).

#include <sys/mman.h>

#include <cstring>

#include "threads.h"

namespace {

constexpr int64_t kHuge = 2 << 20, kAhead = 16;

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

// Words of one row, folded together so that no read can be left out.
uint64_t fold(const char* row, int64_t bytes) {
  uint64_t found[8] = {}, words[8];
  int64_t at = 0;
  for (; at + 64 <= bytes; at += 64) {
    std::memcpy(words, row + at, 64);
    for (int word = 0; word < 8; ++word) found[word] ^= words[word];
  }
  for (; at + 4 <= bytes; at += 4) {
    uint32_t word;
    std::memcpy(&word, row + at, 4);
    found[0] ^= word;
  }
  return found[0] ^ found[1] ^ found[2] ^ found[3] ^ found[4] ^ found[5] ^ found[6] ^ found[7];
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

// Asks for pages of 2 MiB, whose addresses are found without misses, and where memory is in use already (`collapse`)
// has it moved into such pages. Where the system does not have them nothing changes: returns 0.
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

// Reads these rows in this order and does nothing else. Returns a number that depends on all of them.
SHARDWRIGHT_API uint64_t shardwright_read_rows(const char* table, int64_t row_bytes, const int64_t* rows, int64_t n) {
  uint64_t found = 0;
#pragma omp parallel for reduction(^ : found) schedule(static)
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n)
      for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(table + rows[i + kAhead] * row_bytes + at);
    found ^= fold(table + rows[i] * row_bytes, row_bytes);
  }
  return found;
}

// Reads and rewrites these rows, which are distinct (the sign of every number of 4 bytes is turned).
SHARDWRIGHT_API void shardwright_rewrite_rows(char* table, int64_t row_bytes, const int64_t* rows, int64_t n) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n)
      for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(table + rows[i + kAhead] * row_bytes + at, 1);
    rewrite(table + rows[i] * row_bytes, row_bytes);
  }
}
