// std::unordered_map as an index of rows, for benchmarks/cache_index.py.
#include <cstdint>
#include <unordered_map>

using Map = std::unordered_map<int64_t, int64_t>;

extern "C" void* map_new(int64_t size) {
  Map* map = new Map;
  map->reserve(size);
  return map;
}

extern "C" void map_free(void* map) { delete static_cast<Map*>(map); }

// The line of each key; a new key gets the next line.
extern "C" void map_place(void* of, const int64_t* keys, int64_t n, int64_t* lines) {
  Map& map = *static_cast<Map*>(of);
  for (int64_t i = 0; i < n; ++i) lines[i] = map.try_emplace(keys[i], int64_t(map.size())).first->second;
}

extern "C" void map_find(const void* of, const int64_t* keys, int64_t n, int64_t* lines) {
  const Map& map = *static_cast<const Map*>(of);
  for (int64_t i = 0; i < n; ++i) {
    const auto found = map.find(keys[i]);
    lines[i] = found == map.end() ? -1 : found->second;
  }
}
