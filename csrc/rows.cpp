// Parses delimited text to columns in one pass: splits, parses and hashes while a row is in the cache.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "fields.h"

namespace {

inline uint64_t zero_bytes(uint64_t word) { return (word - kOnes) & ~word & kHighs; }

// Position of the first of two bytes (each repeated eight times) at or after `text`, or `end`. Padded.
inline const char* find(const char* text, const char* end, uint64_t ones, uint64_t others) {
  for (; text < end; text += 8) {
    const uint64_t word = word_at(text), hit = zero_bytes(word ^ ones) | zero_bytes(word ^ others);
    if (hit) {
      text += __builtin_ctzll(hit) >> 3;
      break;
    }
  }
  return text < end ? text : end;
}

}  // namespace

enum Kind : int32_t { kSkip, kNumber, kCategory, kHexadecimal, kList, kLabel, kWeight, kTime };
enum Reason : int32_t { kColumns = 1, kOpenQuote, kAfterQuote, kNoNumber, kNotHexadecimal, kNoLabel, kNoWeight, kNoTime, kNoRoom };

// Output of a column: float, double (time) or uint64 per row; of a list all codes, and the end of each row in `ends`.
struct Column {
  Kind kind;
  int32_t tail;
  void* values;
  int32_t* ends;
  int64_t room;  // capacity of a list column, in codes
};

struct Fault {
  int64_t line;
  int64_t begin, end;  // the field in the block
  Reason reason;
  int32_t column;  // for kColumns the number of columns
};

struct Table {
  Column* columns;
  Fault* faults;
  char* scratch;  // for quoted fields without their doubled quotes; as long as the block
  int64_t capacity, fault_capacity;  // maximum rows and faults
  int64_t num_rows;                  // in: rows present already; out: plus rows added
  int64_t num_faults, line;
  double positive;  // a label of at least this value is 1; NaN: labels are 0 or 1
  uint64_t positive_code;  // code of the text of a label that is 1, others are 0; 0: labels are numbers
  int32_t num_columns;
  int32_t quoted;
  int32_t full;  // whether rows were left because the buffers are full
  char delimiter, separator;
};

namespace {

inline Reason store_list(const char* text, const char* end, char separator, Column& column, int64_t row) {
  auto* codes = static_cast<uint64_t*>(column.values);
  int64_t used = row ? column.ends[row - 1] : 0;
  if ((end - text) / 2 + 1 > column.room - used) return kNoRoom;
  while (text < end) {
    const void* found = std::memchr(text, separator, static_cast<size_t>(end - text));
    const char* const stop = found ? static_cast<const char*>(found) : end;
    if (stop > text) codes[used++] = code_of(text, stop - text, 0, true);
    text = stop + 1;
  }
  column.ends[row] = static_cast<int32_t>(used);
  return Reason(0);
}

inline Reason store(const char* text, const char* end, const Table& table, Column& column, int64_t row) {
  const int64_t length = end - text;
  double number = std::numeric_limits<double>::quiet_NaN();
  switch (column.kind) {
    case kSkip:
      return Reason(0);
    case kHexadecimal:
      if (length && !is_hex(text, length)) return kNotHexadecimal;
      [[fallthrough]];
    case kCategory:
      static_cast<uint64_t*>(column.values)[row] = code_of(text, length, column.tail, true);
      return Reason(0);
    case kList:
      return store_list(text, end, table.separator, column, row);
    case kNumber:
      if (length && !number_of(text, length, &number)) return kNoNumber;
      break;
    case kLabel:
      if (!length) return kNoLabel;
      if (table.positive_code)
        number = code_of(text, length, 0, true) == table.positive_code;
      else if (!number_of(text, length, &number))
        return kNoLabel;
      if (!std::isnan(table.positive)) number = number >= table.positive;
      if (number != 0 && number != 1) return kNoLabel;
      break;
    case kWeight:
      if (!length || !number_of(text, length, &number) || number < 0) return kNoWeight;
      break;
    case kTime:
      if (!length || !(number_of(text, length, &number) || seconds_of(text, length, &number))) return kNoTime;
      static_cast<double*>(column.values)[row] = number;
      return Reason(0);
  }
  static_cast<float*>(column.values)[row] = static_cast<float>(number);
  return Reason(0);
}

// Parses a quoted field from after its opening quote; sets `content` and `content_end`. Returns the position after the
// closing quote, or null. Content with doubled quotes is copied to `scratch`.
const char* unquote(const char* text, const char* end, char* scratch, const char** content, const char** content_end,
                    int64_t* lines) {
  const char* const begin = text;
  char* out = nullptr;
  for (; text < end; ++text) {
    if (*text == '"') {
      if (text + 1 == end || text[1] != '"') break;
      if (!out) out = std::copy(begin, text, scratch);
      ++text;
    }
    *lines += *text == '\n';
    if (out) *out++ = *text;
  }
  *content = out ? scratch : begin;
  *content_end = out ? out : text;
  return text < end ? text + 1 : nullptr;
}

}  // namespace

// Parses data[0 .. size), padded, whose first row is on line `table->line`; returns the bytes consumed. Text after the
// last line break (unless `last`), and rows that do not fit the buffers, are left for the next call. Malformed rows are
// skipped and recorded as faults. If `last`, an unclosed quote ends the block.
SHARDWRIGHT_API int64_t shardwright_parse_rows(const char* data, int64_t size, int32_t last, Table* table) {
  const char *const end = data + size, *text = data;
  const uint64_t delimiters = kOnes * static_cast<uint8_t>(table->delimiter), breaks = kOnes * '\n';
  table->num_faults = table->full = 0;
  while (text < end && table->num_rows < table->capacity && table->num_faults < table->fault_capacity) {
    if (*text == '\n' || (*text == '\r' && text + 1 < end && text[1] == '\n')) {
      text += 1 + (*text == '\r');
      ++table->line;
      continue;
    }
    const char* const begin = text;
    int64_t line = table->line;
    Fault fault = {line, 0, 0, Reason(0), 0};
    int32_t column = 0;
    bool complete = false;
    while (true) {
      const char *start = text, *stop;
      if (table->quoted && text < end && *text == '"') {
        const char* const field = text;
        text = unquote(text + 1, end, table->scratch, &start, &stop, &line);
        if (!text) {
          if (!last) return begin - data;
          table->faults[table->num_faults++] = {table->line, field - data, end - data, kOpenQuote, column};
          return size;
        }
        const char* const after = text;
        text = find(text, end, delimiters, breaks);
        if (text != after && !(text == after + 1 && *after == '\r') && !fault.reason)
          fault = {table->line, field - data, text - data, kAfterQuote, column};
      } else {
        text = stop = find(text, end, delimiters, breaks);
        if (stop > start && stop[-1] == '\r' && (stop == end || *stop == '\n')) --stop;
      }
      if (column < table->num_columns && !fault.reason) {
        const Reason reason = store(start, stop, *table, table->columns[column], table->num_rows);
        if (reason == kNoRoom) {
          table->full = 1;
          return begin - data;
        }
        if (reason) fault = {table->line, start - data, stop - data, reason, column};
      }
      ++column;
      complete = text < end && *text == '\n';
      if (text == end || complete) break;
      ++text;
    }
    if (!complete && !last) return begin - data;
    text += complete;
    if (column != table->num_columns) fault = {table->line, 0, 0, kColumns, column};
    table->line = line + 1;
    if (fault.reason)
      table->faults[table->num_faults++] = fault;
    else
      ++table->num_rows;
  }
  table->full = table->num_rows == table->capacity;
  return text - data;
}
