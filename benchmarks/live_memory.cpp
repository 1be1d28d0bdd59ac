// Bytes that the process has allocated, now and at peak, counted in the C library's allocation functions.
//
// Loaded before the C library (LD_PRELOAD). Blocks below SMALLEST are not counted: relevant tensors are larger.

#include <malloc.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace {

constexpr std::size_t SMALLEST = 4096;
std::atomic<std::int64_t> live{0}, most{0};


void* taken(void* block) {
  const std::size_t bytes = block ? malloc_usable_size(block) : 0;
  if (bytes >= SMALLEST) {
    const std::int64_t now = live.fetch_add(static_cast<std::int64_t>(bytes)) + static_cast<std::int64_t>(bytes);
    std::int64_t before = most.load();
    while (now > before && !most.compare_exchange_weak(before, now)) {
    }
  }
  return block;
}

void given(void* block) {
  const std::size_t bytes = block ? malloc_usable_size(block) : 0;
  if (bytes >= SMALLEST) live.fetch_sub(static_cast<std::int64_t>(bytes));
}

}  // namespace

extern "C" {

std::int64_t live_bytes() { return live.load(); }

std::int64_t most_bytes() { return most.load(); }

void forget_most() { most.store(live.load()); }

void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void __libc_free(void*);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t bytes) { return taken(__libc_malloc(bytes)); }

void* calloc(std::size_t num, std::size_t bytes) { return taken(__libc_calloc(num, bytes)); }

void* realloc(void* block, std::size_t bytes) {
  given(block);
  void* found = __libc_realloc(block, bytes);
  return taken(found ? found : (bytes ? block : nullptr)), found;
}

void free(void* block) {
  given(block);
  __libc_free(block);
}

int posix_memalign(void** found, std::size_t alignment, std::size_t bytes) {
  *found = taken(__libc_memalign(alignment, bytes));
  return *found || !bytes ? 0 : ENOMEM;
}

void* aligned_alloc(std::size_t alignment, std::size_t bytes) { return taken(__libc_memalign(alignment, bytes)); }

void* memalign(std::size_t alignment, std::size_t bytes) { return taken(__libc_memalign(alignment, bytes)); }
}
