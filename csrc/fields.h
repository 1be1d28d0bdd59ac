// Converts a field of text to a number, to seconds from 1970, or to the 64-bit code of a value.
//
// "Padded" text: the eight bytes after its end may be read, and are ignored.
#pragma once

#include <cfloat>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>

#define SHARDWRIGHT_API extern "C" __attribute__((visibility("default")))

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15ULL;
constexpr uint64_t kOnes = 0x0101010101010101ULL, kHighs = 0x8080808080808080ULL;

// Output function of splitmix64; data/sources/source.py has the same function.
inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

inline uint64_t word_at(const char* text) {
  uint64_t word;
  std::memcpy(&word, text, 8);
  return word;
}

// A word of the first `length` < 8 bytes and zeros.
inline uint64_t part_at(const char* text, int64_t length, bool padded) {
  if (padded) return length ? word_at(text) & (~0ULL >> (64 - 8 * length)) : 0;
  uint64_t word = 0;
  std::memcpy(&word, text, static_cast<size_t>(length));
  return word;
}

// Code of a value, from eight bytes at a time, little endian, the last word padded with zeros. Only a missing (empty)
// value has code 0. `tail` > 0: use only the last `tail` bytes.
inline uint64_t code_of(const char* text, int64_t length, int64_t tail, bool padded) {
  if (!length) return 0;
  if (tail && length > tail) text += length - tail, length = tail;
  uint64_t code = static_cast<uint64_t>(length);
  for (; length >= 8; text += 8, length -= 8) code = mix((code ^ word_at(text)) + kGamma);
  if (length) code = mix((code ^ part_at(text, length, padded)) + kGamma);
  return code ? code : 1;
}

// Sets the high bit of each byte that is in low .. high; all bytes must be below 128.
inline uint64_t between(uint64_t word, uint64_t low, uint64_t high) {
  return (word + kOnes * (0x80 - low)) & ~(word + kOnes * (0x7F - high)) & kHighs;
}

inline bool is_hex(const char* text, int64_t length) {
  if (length != 8) return false;
  const uint64_t word = word_at(text);
  if (word & kHighs) return false;
  return (between(word, '0', '9') | between(word | kOnes * 0x20, 'a', 'f')) == kHighs;
}

// Parses a number. Most numbers of click logs are short integers, which need no general parser. Padded.
inline bool number_of(const char* text, int64_t length, double* number) {
  const bool negative = *text == '-';
  const int64_t digits = length - negative;
  if (digits > 0 && digits <= 8) {
    // Shift the digits to the high end, with zeros before; then combine pairs, fours and all eight digits in parallel.
    const int shift = static_cast<int>(64 - 8 * digits);
    const uint64_t word = shift ? (word_at(text + negative) << shift) | (kOnes * '0' >> (64 - shift)) : word_at(text + negative);
    if (!(word & kHighs) && between(word, '0', '9') == kHighs) {
      uint64_t value = word - kOnes * '0';
      value = value * 10 + (value >> 8);
      value = ((value & 0x000000FF000000FFULL) * 0x000F424000000064ULL +
               ((value >> 16) & 0x000000FF000000FFULL) * 0x0000271000000001ULL) >> 32;
      *number = negative ? -static_cast<double>(value) : static_cast<double>(value);
      return true;
    }
  }
  if (length > 1 && *text == '+' && text[1] != '-') ++text, --length;
  const auto [end, error] = std::from_chars(text, text + length, *number);
  return error == std::errc() && end == text + length && std::fabs(*number) <= FLT_MAX;
}

// Reads `count` digits at `*text`, and moves it past them.
inline bool digits_of(const char** text, const char* end, int count, int* number) {
  if (end - *text < count) return false;
  for (*number = 0; count; --count, ++*text) {
    if (**text < '0' || **text > '9') return false;
    *number = *number * 10 + (**text - '0');
  }
  return true;
}

// Days from 1970-01-01 of a day of the Gregorian calendar; years are counted from March, so that leap days come last.
inline int64_t days_of(int year, int month, int day) {
  const int64_t march_year = year - (month < 3), month_number = (month + 9) % 12;
  return march_year * 365 + march_year / 4 - march_year / 100 + march_year / 400 + (month_number * 153 + 2) / 5 + day - 719469;
}

// Seconds from 1970 of "2026-11-30", "2026-11-30 21:05", with seconds, a fraction of them, and "Z" or an offset such as
// "+02:00" at the end; "T" may be in place of the space. Without an offset: UTC.
inline bool seconds_of(const char* text, int64_t length, double* seconds) {
  const char* const end = text + length;
  const auto take = [&](char first, char second) { return text < end && (*text == first || *text == second) && ++text; };
  int year, month, day, hour = 0, minute = 0, whole = 0, offset_hour = 0, offset_minute = 0;
  double fraction = 0, sign = 1;
  if (!digits_of(&text, end, 4, &year) || !take('-', '/') || !digits_of(&text, end, 2, &month) || !take('-', '/') ||
      !digits_of(&text, end, 2, &day) || month < 1 || month > 12 || day < 1 || day > 31)
    return false;
  if (text < end) {
    if (!take('T', ' ') || !digits_of(&text, end, 2, &hour) || !take(':', ':') || !digits_of(&text, end, 2, &minute)) return false;
    if (take(':', ':') && !digits_of(&text, end, 2, &whole)) return false;
    if (take('.', ','))
      for (double unit = 0.1; text < end && *text >= '0' && *text <= '9'; ++text, unit /= 10) fraction += unit * (*text - '0');
    if (text < end && *text != 'Z') {
      sign = *text == '-' ? -1 : 1;
      if (!take('+', '-') || !digits_of(&text, end, 2, &offset_hour)) return false;
      take(':', ':');
      if (!digits_of(&text, end, 2, &offset_minute)) return false;
    } else {
      take('Z', 'Z');
    }
  }
  if (text != end || hour > 23 || minute > 59 || whole > 60) return false;
  const int64_t minutes = (days_of(year, month, day) * 24 + hour) * 60 + minute;
  *seconds = static_cast<double>(minutes) * 60 + whole + fraction - sign * (offset_hour * 60 + offset_minute) * 60;
  return true;
}
