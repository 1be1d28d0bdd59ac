"""Measure the device of each rank, all at once: products, random rows, copies, codecs.

Shape legend: S segments of ids, B bags of a segment, N ids, U distinct rows.
"""

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from itertools import product as product_of
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from shardwright.comm.codec import Bf16, Codec, Fp16, Int8
from shardwright.kernels import embedding
from shardwright.kernels.arguments import POOLINGS, Ids, TableState, vector_shapes
from shardwright.kernels.cache_index import BatchRows, CacheIndex, place_rows, release_many
from shardwright.kernels.dedup import bucketize_ids, gather_segments, unique_rows
from shardwright.kernels.native import lengths_to_offsets, use_huge_pages
from shardwright.library import native_library
from shardwright.measure.timing import Clock
from shardwright.spec import linear_fit
from shardwright.spec.cluster import ATTENTION_PASSES, IDS_PER_BAG, Price, Sample, Tier
from shardwright.spec.optimizer import RowWiseAdaGrad

LARGE_BATCH = 1 << 15  # samples: narrow layers of large batches run at half the rate of others
MATMUL_SHAPES = (
    *((n, n, n) for n in (64, 256, 1024)),
    *((512, 16, 512), (512, 512, 16), (16, 512, 512), (64, 512, 512), (512, 64, 512), (512, 512, 64)),
    *((1024, 64, 64), (4096, 512, 32), (4096, 32, 512), (2048, 256, 256), (1024, 256, 64), (256, 512, 64)),
    *((128, 64, 512), (4096, 512, 256)),
    (1 << 18, 18, 12),  # a feature interaction's shape
    *((LARGE_BATCH, k, n) for k, n in ((8, 64), (64, 16), (64, 64), (192, 64), (64, 192), (128, 128))),
)
WEIGHT_GRADIENT_SHAPES = (  # m, k, n
    *((64, 4096, 512), (256, 4096, 512), (512, 2048, 64), (512, 1024, 256), (64, 1024, 64)),
    *((m, LARGE_BATCH, n) for m, n in ((16, 16), (64, 8), (64, 64), (192, 64), (128, 128))),
)
ROW_CASES = (*((16_384, width) for width in (32, 128, 512, 2048)), (2_048, 128))  # (rows of a call, bytes of a row)
CACHED_ROW_CASES = (*((65_536, width) for width in (32, 128, 512)), (4_096, 128))
SINGLE_ID_CASES = (*((32_768, width) for width in (32, 128, 512, 2048)), (4_096, 128))
CACHED_BYTES = 1 << 18  # of rows that fit in caches, for repeated lookups of the same rows
TABLE_BYTES = 256 << 20  # larger than caches
REUSE_DISTANCE_BYTES = 128 << 20  # of cache lines accessed before the same ids are used again
COPY_BYTES = 64 << 20
CODEC_BYTES = (1 << 16, 4 << 20)
COLUMN_COPY_CASES = (*((65_536, width) for width in (64, 256, 1024)), (2_048, 256))  # (vectors, bytes of a vector)
CALL_COUNTS = (64, 1024)  # torch calls on tiny tensors
MESSAGE_BYTES = (1 << 15, 1 << 20)  # of ids
FEATURES_PER_MESSAGE = 16
SINGLE_ID_TABLES = 16  # with a feature each; the vectors of a sample lie side by side
TIMED_CODECS: tuple[tuple[str, Codec], ...] = (("fp16", Fp16()), ("bf16", Bf16()), ("int8", Int8()))


def has_fast_bf16_matmul(device: torch.device | None = None) -> bool:
    """Whether the device multiplies bfloat16 natively; else torch is many times slower than in float32.

    `device`: None: the GPU if there is one.
    """
    if torch.cuda.is_available() if device is None else device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def device_name(device: torch.device) -> str:
    """The GPU's or the processor's model name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "cpu"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "cpu"


def matmul_call(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """A product of (m, k) by (k, n) matrices."""
    left, right = torch.ones(m, k, dtype=dtype, device=device), torch.ones(k, n, dtype=dtype, device=device)
    return lambda: torch.mm(left, right)


def _weight_grad(m: int, k: int, n: int, dtype: torch.dtype) -> Callable[[], object]:
    """The product of a layer's weight gradient: it sums over samples, the rows of both operands."""
    left, right = torch.ones(k, m, dtype=dtype), torch.ones(k, n, dtype=dtype)
    return lambda: torch.mm(left.t(), right)


def measure_prices(clock: Clock, device: torch.device) -> list[Price]:
    """Prices of matrix products, random rows, columns, ids and codecs."""
    by_price: dict[tuple[str, str], list[Sample]] = {}
    for op, dtype, sizes, call in _timed_calls(device):
        by_price.setdefault((op, dtype), []).append(clock.sample(sizes, call))
    return [fit_price(op, dtype, samples) for (op, dtype), samples in by_price.items()]


def _timed_calls(device: torch.device) -> Iterator[tuple[str, str, tuple[int, ...], Callable[[], object]]]:
    """(op, dtype, sizes, call) of every price to measure."""
    for dtype in (torch.float32, *((torch.bfloat16,) if has_fast_bf16_matmul() else ())):
        name = str(dtype).removeprefix("torch.")
        yield from (("matmul", name, size, matmul_call(*size, dtype, device)) for size in MATMUL_SHAPES)
        if device.type == "cpu":
            yield from (("matmul.across", name, size, _weight_grad(*size, dtype)) for size in WEIGHT_GRADIENT_SHAPES)
    if device.type == "cpu":
        yield from (("calls", "", (num,), _small_ops_call(num)) for num in CALL_COUNTS)
    yield from _timed_row_calls(device)
    for num, width in COLUMN_COPY_CASES:
        yield "columns", "float32", (num, width), _column_copy_call(num, width, device)
    for bytes_ in MESSAGE_BYTES:
        yield "ids", "", (bytes_,), _message_call(bytes_, device)
        yield "ids.cut", "", (bytes_,), _bucketize_call(bytes_, device)
        yield "distinct", "", (bytes_,), _dedup_call(bytes_, device)
        if device.type == "cpu" and native_library() is not None:
            yield "place", "", (bytes_,), _place_call(bytes_)
    for (name, codec), bytes_ in product_of(TIMED_CODECS, CODEC_BYTES):
        x = torch.randn(bytes_ // 256, 64, device=device)
        yield "codec", name, (bytes_,), partial(_round_trip, codec, x)


def _timed_row_calls(device: torch.device) -> Iterator[tuple[str, str, tuple[int, ...], Callable[[], object]]]:
    memory = allocate_table_memory(device)
    for op, (num, width) in product_of(("gather", "rewrite", "lookup", "update"), ROW_CASES):
        yield op, "float32", (num, width), random_row_calls(op, memory, num, width)
    for op, (num, width) in product_of(("lookup", "update"), CACHED_ROW_CASES):
        yield f"{op}.near", "float32", (num, width), random_row_calls(op, memory[: CACHED_BYTES // 4], num, width)
    for op, (num, width) in product_of(("lookup.single", "update.single"), SINGLE_ID_CASES):
        yield op, "float32", (num, width), random_row_calls(op, memory, num, width)


def _small_ops_call(num: int) -> Callable[[], object]:
    """The calls of a stage without samples: small tensors concatenated, split and counted."""
    tensors = [torch.ones(4)] * 4

    def call() -> None:
        for _ in range(num // 4):
            concatenated = torch.cat(tensors)
            head, tail = concatenated.split([6, 10])
            head.copy_(tail[:6])
            sum(len(tensor) for tensor in tensors)

    return call


def _column_copy_call(num: int, row_bytes: int, device: torch.device) -> Callable[[], object]:
    """Copies each feature's columns of a tensor of vectors to another position."""
    width, features = row_bytes // 4, 16
    source = torch.randn(num // features, features * width, device=device)
    target = torch.empty_like(source)

    def copy_columns() -> None:
        for i in range(features):
            to = features - 1 - i
            target[:, to * width : (to + 1) * width].copy_(source[:, i * width : (i + 1) * width])

    return copy_columns


def _message_call(bytes_: int, device: torch.device) -> Callable[[], object]:
    """Checks ids of bags, narrows them to int32, packs them into messages by segment, and unpacks them."""
    ids = torch.randint(0, 1 << 20, (bytes_ // 8,), device=device)
    size = len(ids) // FEATURES_PER_MESSAGE
    lengths_SB = torch.full((FEATURES_PER_MESSAGE, size // 4), 4, device=device)
    sizes = lengths_SB.sum(1)
    starts = sizes.cumsum(0) - sizes

    def pack_and_unpack() -> Tensor:
        for feature_ids in ids.split(size):
            torch.aminmax(feature_ids)
        narrow = torch.cat([ids.int()])
        targets = [
            list(range(first, first + FEATURES_PER_MESSAGE // 4))
            for first in range(0, FEATURES_PER_MESSAGE, FEATURES_PER_MESSAGE // 4)
        ]
        lengths = [lengths_SB[rows].flatten().int() for rows in targets]
        words = torch.cat([*lengths, *(gather_segments(narrow, starts[rows], sizes[rows]) for rows in targets)])
        received_SB = words[: lengths_SB.numel()].view(FEATURES_PER_MESSAGE, -1).long()
        lengths_to_offsets(received_SB)
        return gather_segments(words[lengths_SB.numel() :], starts, received_SB.sum(1))

    return pack_and_unpack


def _bucketize_call(bytes_: int, device: torch.device) -> Callable[[], object]:
    """Splits ids of bags by row range, as row-wise sharding does."""
    rows, num_ranges = 1 << 20, 4
    ids = torch.randint(0, rows, (bytes_ // 8,), device=device)
    offsets = torch.arange(0, len(ids) + 1, 4, device=device)
    bags = Ids(ids, offsets, None, range(FEATURES_PER_MESSAGE), [POOLINGS.index("sum")] * FEATURES_PER_MESSAGE)
    boundaries = [[rows * i // num_ranges for i in range(num_ranges + 1)]] * FEATURES_PER_MESSAGE
    return lambda: bucketize_ids(bags, boundaries)


def _dedup_call(bytes_: int, device: torch.device) -> Callable[[], object]:
    """Checks ids of bags and deduplicates them for each table."""
    rows = 1 << 16
    ids = torch.randint(0, rows, (bytes_ // 8,), device=device)
    offsets = torch.arange(0, len(ids) + 1, 4, device=device)
    bags = Ids(ids, offsets, None, range(FEATURES_PER_MESSAGE), [POOLINGS.index("sum")] * FEATURES_PER_MESSAGE)

    def deduplicate() -> object:
        torch.aminmax(ids)
        return unique_rows(bags, [rows] * FEATURES_PER_MESSAGE)

    return deduplicate


def _place_call(bytes_: int) -> Callable[[], object]:
    """Deduplicates ids of bags for each table, announces them to caches that have all rows, and finds their lines."""
    rows = 1 << 13
    ids = torch.randint(0, rows, (bytes_ // 8,))
    bags = Ids(
        ids,
        torch.arange(0, len(ids) + 1, 4),
        None,
        range(FEATURES_PER_MESSAGE),
        [POOLINGS.index("sum")] * FEATURES_PER_MESSAGE,
    )
    indices = [CacheIndex(2 * rows) for _ in range(FEATURES_PER_MESSAGE)]

    def place() -> Tensor:
        distinct = BatchRows(*unique_rows(bags, [rows] * FEATURES_PER_MESSAGE))
        for index, own_rows in zip(indices, distinct.by_table(), strict=True):
            index.announce(own_rows)
        placed = place_rows(indices, distinct, announced=True)
        release_many(indices, placed.lines_U, distinct.counts, [True] * len(indices))
        return placed.lines_N

    return place


def _round_trip(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), x.dtype)


def allocate_table_memory(device: torch.device) -> Tensor:
    """Memory larger than caches, on the same pages as tables."""
    memory = torch.empty(TABLE_BYTES // 4, device=device)
    use_huge_pages(memory)
    return memory.fill_(0.01)


def random_row_calls(op: str, memory: Tensor, num: int, row_bytes: int) -> Callable[[], object]:
    """Calls on `num` rows that are not in a cache: each call uses the next of many sets of random ids."""
    table = memory[: len(memory) // (row_bytes // 4) * (row_bytes // 4)].view(-1, row_bytes // 4)
    rng = torch.Generator().manual_seed(0)
    bytes_per_row = max(row_bytes, 64)  # at least one cache line
    calls = max(2, REUSE_DISTANCE_BYTES // bytes_per_row // num)
    ids = torch.randint(0, len(table), (calls, num), generator=rng).to(table.device)
    call = ROW_CALLS[op](table, ids)
    indices = cycle(range(len(ids)))
    return lambda: call(next(indices))


def measure_memory(clock: Clock, device: torch.device, num_ranks: int) -> Tier:
    """The device's own memory; ranks that share host memory get an equal part each."""
    if device.type == "cuda":
        bytes_, name = torch.cuda.get_device_properties(device).total_memory, "hbm"
    else:
        bytes_, name = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks, "dram"
    block = torch.ones(COPY_BYTES // 4, device=device)
    read_seconds = clock.sample((COPY_BYTES,), block.sum).seconds
    write_seconds = clock.sample((COPY_BYTES,), lambda: block.fill_(1.0)).seconds
    return Tier(name, bytes_, COPY_BYTES / read_seconds, COPY_BYTES / write_seconds)


def measure_host_copies(clock: Clock, device: torch.device) -> Iterator[Price]:
    """Copies between pinned host memory and the device, each way."""
    for op in ("host_to_device", "device_to_host"):
        samples = []
        for bytes_ in (1 << 12, 1 << 20, COPY_BYTES):
            on_device = torch.ones(bytes_, dtype=torch.uint8, device=device)
            on_host = torch.ones(bytes_, dtype=torch.uint8, pin_memory=True)
            target, source = (on_device, on_host) if op == "host_to_device" else (on_host, on_device)
            samples.append(clock.sample((bytes_,), partial(target.copy_, source, non_blocking=True)))
        yield fit_price(op, "", samples)


def fit_price(op: str, dtype: str, samples: Sequence[Sample]) -> Price:
    """Fit a price per call, flop, row and byte to the samples; coefficients are not negative."""
    terms = {1: ("call", "byte"), 2: ("call", "row", "byte"), 3: ("call", "flop", "byte")}[len(samples[0].sizes)]
    terms = ("call", "flop") if op == "attention" else terms
    regressors = np.array([_regressors(op, dtype, sample.sizes) for sample in samples])
    columns = [("call", "flop", "row", "byte").index(term) for term in terms]
    seconds = np.array([sample.seconds for sample in samples])
    coefficients = np.zeros(4)
    coefficients[columns] = linear_fit.fit_non_negative(regressors[:, columns], seconds)
    call, flop, row, byte = coefficients.tolist()
    return Price(
        op=op,
        dtype=dtype,
        call_seconds=call,
        seconds_per_flop=flop,
        seconds_per_row=row,
        seconds_per_byte=byte,
        error=round(linear_fit.mean_relative_error(regressors, seconds, coefficients), 4),
        samples=tuple(samples),
    )


def _regressors(op: str, dtype: str, sizes: Sequence[int]) -> tuple[float, float, float, float]:
    """Calls, flops, rows and bytes of one call."""
    if len(sizes) == 3:
        m, k, n = sizes
        if op == "attention":
            return 1.0, ATTENTION_PASSES * 2.0 * m * k * n, 0.0, 0.0
        return 1.0, 2.0 * m * k * n, 0.0, float(getattr(torch, dtype).itemsize * (m * k + k * n + m * n))
    if len(sizes) == 2:
        return 1.0, 0.0, float(sizes[0]), float(sizes[0] * sizes[1])
    return 1.0, 0.0, 0.0, float(sizes[0])


def _gather(table: Tensor, ids: Tensor) -> Callable[[int], object]:
    """Reads random rows."""
    native = native_library()
    if native is None or table.device.type != "cpu":
        return lambda i: table.index_select(0, ids[i])
    width = table.shape[1] * 4
    return lambda i: native.shardwright_read_rows(table.data_ptr(), width, ids[i].data_ptr(), ids.shape[1])


def _rewrite(table: Tensor, ids: Tensor) -> Callable[[int], object]:
    """Negates distinct random rows in place."""
    native = native_library()
    distinct = [draw.unique() for draw in ids]
    if native is None or table.device.type != "cpu":
        return lambda i: table.index_copy_(0, distinct[i], -table.index_select(0, distinct[i]))
    width = table.shape[1] * 4

    def rewrite(i: int) -> None:
        native.shardwright_rewrite_rows(table.data_ptr(), width, distinct[i].data_ptr(), distinct[i].numel())

    return rewrite


def _make_bags(values: Tensor, ids_per_bag: int, num_tables: int) -> Ids:
    """Bags of one feature per table."""
    offsets = torch.arange(0, len(values) + 1, ids_per_bag, device=values.device)
    return Ids(values, offsets, None, range(num_tables), [POOLINGS.index("sum")] * num_tables)


def _split_rows(table: Tensor, ids: Tensor, ids_per_bag: int) -> tuple[list[Tensor], list[Ids]]:
    """Tables with the rows of `table`, several for bags of one id, and the bags of each call."""
    num_tables = SINGLE_ID_TABLES if ids_per_bag == 1 else 1
    num_rows = len(table) // num_tables
    tables = [*table[: num_tables * num_rows].split(num_rows)]
    return tables, [_make_bags(values % num_rows, ids_per_bag, num_tables) for values in ids]


def _lookup(table: Tensor, ids: Tensor, ids_per_bag: int = IDS_PER_BAG) -> Callable[[int], object]:
    """Looks up bags of random ids, as the engine does."""
    buffers, (tables, bags) = embedding.BufferPool(), _split_rows(table, ids, ids_per_bag)
    return lambda i: embedding.lookup_into(buffers, tables, bags[i])


def _update(table: Tensor, ids: Tensor, ids_per_bag: int = IDS_PER_BAG) -> Callable[[int], object]:
    """Updates random rows from gradients, as the engine does."""
    tables, bags = _split_rows(table, ids, ids_per_bag)
    states = [TableState(own, [torch.ones(len(own), device=table.device)], 1, 0) for own in tables]
    gradients = [torch.full(shape, 1e-3, device=table.device) for shape in vector_shapes(tables, bags[0])]
    return lambda i: embedding.update(states, bags[i], gradients, RowWiseAdaGrad(lr=1e-3))


ROW_CALLS = MappingProxyType(
    {
        "gather": _gather,
        "rewrite": _rewrite,
        "lookup": _lookup,
        "update": _update,
        "lookup.single": partial(_lookup, ids_per_bag=1),
        "update.single": partial(_update, ids_per_bag=1),
    }
)
