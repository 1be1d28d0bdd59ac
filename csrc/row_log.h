// Pages and records of csrc/row_log.cpp.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

constexpr int64_t kPage = 4096, kBufferBytes = 1 << 20, kRowBytes = sizeof(int64_t);
constexpr uint32_t kNever = UINT32_MAX;

struct PageHeader {
  uint32_t checksum, records;
  uint64_t page;
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
