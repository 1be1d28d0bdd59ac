"""Sizes of caches of table rows in front of slower memory: facts of csrc/cache_index.cpp and csrc/row_log.cpp."""

DISK = "ssd"  # a memory tier
FLOAT32_LINES = "cache.fp32"  # in a plan's `allow`: weights of 16 bits are float32 while they are on lines
WAYS = 32  # lines of a set
LINE_BYTES = 42  # of the index in memory, for each line
PAGE_BYTES = 4096  # of a read from disk
RECORD_HEADER_BYTES = 8  # before each written row
IO_THREADS = 16  # that read pages
ROW_INDEX_BYTES = 4  # in memory, for each row of a table with rows on disk
DISK_SPACE = 2.0  # bytes of files at most, per byte of rows: a file with more rows out of date than not is rewritten
STEPS_IN_FLIGHT = 2  # whose rows are on lines at a time: of this step and of the next
ID_MAP_BYTES = 104  # at most, of the map of ids in memory, for each row of a table that grows
HALF_LIFE_BATCHES = 100  # after which a use counts half in the score by which rows are evicted
