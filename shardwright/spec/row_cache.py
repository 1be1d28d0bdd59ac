"""Sizes of caches of table rows in front of slower memory: facts of csrc/cache_index.h and csrc/row_files.h."""

from math import prod

from shardwright.spec.optimizer import SparseOptimizer, num_squares, state_shapes
from shardwright.spec.workload import DTYPE_BYTES, Growth, Table

GPU, HOST, DISK, SERVERS = "hbm", "dram", "ssd", "servers"  # memory tiers
STORES = (DISK, SERVERS)  # that have all rows of a table, also those that are in a cache
FLOAT32_LINES = "cache.fp32"  # in a plan's `allow`: weights of 16 bits are float32 while they are on lines
WAYS = 32  # lines of a set
LINE_BYTES = 42  # of the index in memory, for each line
PAGE_BYTES = 4096  # of a read from disk
RECORD_HEADER_BYTES = 8  # before each written row
COUNT_BYTES = 8
OWNER_BYTES = 2 * COUNT_BYTES  # of a row with bounded staleness, at its owner: its updates and their uses
READS_IN_FLIGHT = 128  # of pages, through io_uring
IO_THREADS = 16  # that read pages where the system has no io_uring
ROW_INDEX_BYTES = 4  # in memory, for each row of a table with rows on disk
SAVED_ROW_BYTES = (
    9  # and while checkpoints are written: the index of the snapshot, the row's number, a mark of its change
)
# Bytes at most, per byte of rows: a file with more rows out of date than not is rewritten; a server keeps a copy while
# a checkpoint is written.
STORE_SPACE = 2.0
STEPS_IN_FLIGHT = 2  # whose rows are on lines at a time: of this step and of the next
ID_MAP_BYTES = 168  # at most, of the map of ids in memory while it grows, for each row of a table that grows
KNOWN_BATCHES = 2  # after the one that is placed: caches know their rows and evict them last
MAX_UNPUSHED_BATCHES = 1024  # after about so many batches, unpushed updates of a copied row are pushed
HALF_LIFE_BATCHES = 100  # after which a use counts half, where rows are evicted by uses and not by LRU
# The same of copies, whose ranks share slow links and have small batches: as many samples (docs/caches.md).
COPIES_HALF_LIFE_BATCHES = 1600


def copy_bytes(table: Table, optimizer: SparseOptimizer | None) -> int:
    """Bytes of a copy of a row with bounded staleness: the row and its state, the sum of unpushed gradients and of
    their squares, its line in the index, and five numbers."""
    state = sum(map(prod, state_shapes(optimizer, 1, table.dim).values())) if optimizer else 0
    squares = num_squares(optimizer, table.dim) if optimizer else 0
    return (2 * table.dim + state + squares) * DTYPE_BYTES[table.dtype] + LINE_BYTES + 5 * COUNT_BYTES


def id_map_bytes(growth: Growth | None) -> int:
    """Bytes of memory for the id of each row of a table; 0 if it does not grow."""
    if growth is None:
        return 0
    return ID_MAP_BYTES * (2 if growth.admit_after > 1 else 1)  # as many ids without a row may be counted
