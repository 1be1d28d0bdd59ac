// Reads of pages as stores of rows do them, to be measured.

#include "page_reads.h"

#include "crc.h"
#include "threads.h"

// Reads pages of a file and computes their checksums. Returns 0 or an error number.
SHARDWRIGHT_API int64_t shardwright_read_pages(int64_t file, const int64_t* pages, int64_t n, int64_t in_flight,
                                               int64_t threads) {
  PageReader reader(in_flight, threads);
  std::atomic<int64_t> error{0}, checksums{0};
  reader.read(
      n, kPage, [&](int64_t i) { return PagePlace{int(file), pages[i] * kPage, kPage}; },
      [&](int64_t, const char* bytes, int64_t read) {
        if (read < kPage) error = read < 0 ? -read : EIO;
        if (!error) checksums += crc32c(bytes, kPage);
        return !error;
      });
  return error;
}
