// Pages and records of csrc/row_files.h.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "crc.h"

constexpr int64_t kPage = 4096, kBufferBytes = 1 << 20, kRowBytes = sizeof(int64_t);
constexpr uint32_t kNever = UINT32_MAX;

struct PageHeader {
  uint32_t checksum, records;  // the checksum is of all bytes after it
  uint64_t page;
};

struct LogSegment {
  int file = -1;
  uint64_t name = 0;  // of the file; numbers of segments are used again
  int64_t records = 0, live = 0;
  int64_t snapshots = 0;  // that need it
};

// A tensor of which a row's bytes are a part: the weight, or an optimizer state.
struct RowPart {
  char* memory;
  int64_t bytes;
};

struct Wanted {
  uint32_t record;
  int64_t row, line;
};

struct FreeAligned {
  void operator()(char* memory) const { std::free(memory); }
};
using Pages = std::unique_ptr<char[], FreeAligned>;
inline Pages pages_of(int64_t bytes) { return Pages(static_cast<char*>(std::aligned_alloc(kPage, bytes))); }

inline PageHeader header_of(const char* page) {
  PageHeader header;
  std::memcpy(&header, page, sizeof(header));
  return header;
}

// Writes the header of a page and its checksum.
inline void seal_page(char* page, int64_t bytes, uint32_t records, uint64_t number) {
  const PageHeader header{0, records, number};
  std::memcpy(page, &header, sizeof(header));
  const uint32_t sum = crc32c(page + sizeof(sum), bytes - sizeof(sum));
  std::memcpy(page, &sum, sizeof(sum));
}

// Whether a page is as `seal_page` left it.
inline bool is_intact(const char* page, int64_t bytes, uint64_t number) {
  const PageHeader header = header_of(page);
  return header.checksum == crc32c(page + sizeof(uint32_t), bytes - sizeof(uint32_t)) && header.page == number;
}
