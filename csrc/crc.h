// CRC-32C, by the processor's instruction where it has one.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

inline uint32_t crc32c_by_table(uint32_t crc, const char* bytes, int64_t n) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> made{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t value = byte;
      for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0x82f63b78u : 0);
      made[byte] = value;
    }
    return made;
  }();
  for (int64_t i = 0; i < n; ++i) crc = crc >> 8 ^ table[uint8_t(crc) ^ uint8_t(bytes[i])];
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) inline uint32_t crc32c_by_instruction(uint32_t crc, const char* bytes, int64_t n) {
  uint64_t value = crc;
  for (; n >= 8; n -= 8, bytes += 8) {
    uint64_t word;
    std::memcpy(&word, bytes, 8);
    value = __builtin_ia32_crc32di(value, word);
  }
  for (; n; --n, ++bytes) value = __builtin_ia32_crc32qi(uint32_t(value), uint8_t(*bytes));
  return uint32_t(value);
}
#endif

inline uint32_t crc32c(const char* bytes, int64_t n) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return ~crc32c_by_instruction(~0u, bytes, n);
#endif
  return ~crc32c_by_table(~0u, bytes, n);
}
