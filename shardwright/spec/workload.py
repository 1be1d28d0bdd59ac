"""The workload: tables, the features that read them, id statistics, blocks of the dense model. Sizes, never tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any, Literal, get_args

from shardwright.errors import did_you_mean
from shardwright.spec import files, optimizer
from shardwright.spec.checks import check_non_negative, check_positive, check_unique, raise_if_any
from shardwright.spec.optimizer import SparseOptimizer

Dtype = Literal["float64", "float32", "float16", "bfloat16"]
Pooling = Literal["sum", "mean", "none"]
MAX_GROWING_ROWS = (1 << 31) - 1  # rows in the shape of a tensor of a table that grows, whose rows have ids instead
LATER_FIELDS = ("experts", "cache_hits")  # of a workload, which had a digest without them
DTYPE_BYTES = MappingProxyType({"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2})


def state_dtype(dtype: Dtype) -> Dtype:
    """The dtype of full-precision optimizer state for weights of `dtype`."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True, slots=True)
class Growth:
    """How a table grows whose ids are any 64-bit numbers: an id gets a row of its own, up to the table's `rows`.

    An id gets a row when its count of uses, which falls with `half_life`, reaches `admit_after`; before, it has its
    initial values, which are not trained. A row that no batch has
    used for `expire_after` batches ends (0: none does); an id that comes back starts anew. When all rows are taken,
    those with the fewest uses end, which count half after every `half_life` batches.
    """

    admit_after: int = 1
    expire_after: int = 0
    half_life: int = 1000


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding table, initialized uniformly in (-init, init); init=None: 1/sqrt(rows). `growth`: None: its ids are
    0 to rows - 1."""

    name: str
    rows: int
    dim: int
    dtype: Dtype = "float32"
    init: float | None = None
    growth: Growth | None = None


def table_weight_dtype(table: Table, reduced_dtype: Dtype | None) -> Dtype:
    """The dtype of a table's weights if float32 weights are stored as `reduced_dtype`; None: not reduced."""
    return reduced_dtype if reduced_dtype is not None and table.dtype == "float32" else table.dtype


@dataclass(frozen=True, slots=True)
class Feature:
    """Ids looked up in a table. Several features may share a table, and several tables may read the same ids."""

    name: str
    table: str
    pooling: Pooling = "sum"
    ids: str | None = None  # name of the ids in the batch; None: the feature's name


@dataclass(frozen=True, slots=True)
class FeatureStatistics:
    """Statistics of a feature's ids."""

    feature: str
    ids_per_sample: float
    distinct_share: float  # distinct ids / ids, within one batch of the workload
    popularity: tuple[tuple[int, float], ...] = ()  # (k, share of all ids that read the k hottest rows)
    distinct: tuple[tuple[int, float], ...] = ()  # (batch size, distinct_share at that size), where counted


@dataclass(frozen=True, slots=True)
class CacheHits:
    """Hits of a cache of a table's rows, as recorded: (number of lines, share of a batch's distinct rows found)."""

    table: str
    hits: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Product:
    """`num` matrix products (m, k) x (k, n); `grows` names the size that is proportional to the batch size."""

    m: int
    k: int
    n: int
    num: int
    grows: Literal["m", "k", "n", "num"]

    @property
    def flops(self) -> int:
        return 2 * self.num * self.m * self.k * self.n


@dataclass(frozen=True, slots=True)
class Block:
    """A block of the dense model; flops and activations are for one batch of the workload."""

    name: str
    parameters: int
    parameter_bytes: int
    forward_flops: int
    backward_flops: int
    activation_bytes: int  # saved from forward for backward
    needs_vectors: bool = True  # embedding vectors; if false, it may run during their exchange
    forward_bytes: int = 0  # read and written by all operations but matrix products; 0: unknown
    backward_bytes: int = 0
    input_bytes: int = 0  # of its inputs: all that full activation checkpointing saves
    product_bytes: int = 0  # of the outputs of its matrix products: saved in addition by selective checkpointing
    peak_bytes: int = 0  # peak of temporary tensors, forward or backward, without parameter gradients
    forward_calls: int = 0  # number of operations (kernel launches)
    forward_products: tuple[Product, ...] = ()  # the part of the flops with known shapes
    backward_products: tuple[Product, ...] = ()


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts inside a block; `rows`: one for each token and expert that it is sent to, in one batch of
    the workload. `experts`: all its experts, with as many rows each. `num_chosen`: experts of a token."""

    module: str  # its path in the model
    block: str
    num_experts: int
    rows: int
    row_bytes: int  # of a row of inputs
    result_bytes: int  # of a row of outputs
    experts: Block
    shares: tuple[float, ...] = ()  # of the rows, by expert, as recorded; empty: unknown
    num_chosen: int = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything about a model that planning needs; `batch_size` is the global batch size."""

    version: Literal[1]
    batch_size: int
    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    statistics: tuple[FeatureStatistics, ...]
    optimizer: SparseOptimizer | None = None
    blocks: tuple[Block, ...] = ()
    experts: tuple[Mixture, ...] = ()
    cache_hits: tuple[CacheHits, ...] = ()

    @property
    def table_bytes(self) -> int:
        return sum(table.rows * table.dim * DTYPE_BYTES[table.dtype] for table in self.tables)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer state of all tables."""
        if self.optimizer is None:
            return 0
        return sum(
            prod(shape) * DTYPE_BYTES[state_dtype(table.dtype)]
            for table in self.tables
            for shape in optimizer.state_shapes(self.optimizer, table.rows, table.dim).values()
        )

    @property
    def dense_parameters(self) -> int:
        return sum(block.parameters for block in self.blocks)

    @property
    def dense_bytes(self) -> int:
        return sum(block.parameter_bytes for block in self.blocks)

    def digest(self) -> str:
        """A hash of all fields; those that were added later count only where they have a value."""
        plain: dict[str, Any] = {
            name: value for name, value in files.to_plain(self).items() if value or name not in LATER_FIELDS
        }
        plain["tables"] = [{k: v for k, v in table.items() if k != "growth" or v} for table in plain["tables"]]
        return files.digest_plain(plain)

    def verify(self) -> None:
        raise_if_any(message for check in CHECKS for message in check(self))


def _check_batch(workload: Workload) -> Iterator[str]:
    yield from check_positive("workload", batch_size=workload.batch_size)


def _check_tables(workload: Workload) -> Iterator[str]:
    return table_faults(workload.tables)


def _check_features(workload: Workload) -> Iterator[str]:
    return feature_faults(workload.features, workload.tables)


def table_faults(tables: Sequence[Table]) -> Iterator[str]:
    yield from check_unique("table", (table.name for table in tables))
    for table in tables:
        yield from check_positive(f'table "{table.name}"', rows=table.rows, dim=table.dim)
        yield from check_non_negative(f'table "{table.name}"', init=table.init or 0)
        if table.growth is not None:
            subject = f'table "{table.name}": growth'
            yield from check_positive(subject, admit_after=table.growth.admit_after, half_life=table.growth.half_life)
            yield from check_non_negative(subject, expire_after=table.growth.expire_after)
            if table.rows > MAX_GROWING_ROWS // 2:  # with as many spare lines
                yield f"{subject} up to {table.rows:,} rows; at most {MAX_GROWING_ROWS // 2:,} are allowed"
        if table.dtype not in DTYPE_BYTES:
            yield f'table "{table.name}" has dtype "{table.dtype}"; allowed: {", ".join(DTYPE_BYTES)}'


def feature_faults(features: Sequence[Feature], tables: Sequence[Table]) -> Iterator[str]:
    yield from check_unique("feature", (feature.name for feature in features))
    names = {table.name for table in tables}
    growing = {table.name for table in tables if table.growth is not None}
    for feature in features:
        if feature.table not in names:
            yield f'feature "{feature.name}" reads unknown table "{feature.table}"{did_you_mean(feature.table, names)}'
        if feature.pooling not in get_args(Pooling):
            suggestion = did_you_mean(feature.pooling, get_args(Pooling))
            yield f'feature "{feature.name}" has pooling "{feature.pooling}"{suggestion}'
        if feature.pooling == "none" and feature.table in growing:
            yield (
                f'feature "{feature.name}" is not pooled and reads table "{feature.table}", which grows: this version '
                "pools the features of tables that grow"
            )


def _check_statistics(workload: Workload) -> Iterator[str]:
    yield from check_unique("statistics of feature", (entry.feature for entry in workload.statistics))
    features = {feature.name for feature in workload.features}
    for entry in workload.statistics:
        if entry.feature not in features:
            suggestion = did_you_mean(entry.feature, features)
            yield f'statistics of feature "{entry.feature}": unknown feature{suggestion}'
        yield from statistics_faults(entry)


def statistics_faults(entry: FeatureStatistics) -> Iterator[str]:
    subject = f'statistics of feature "{entry.feature}"'
    yield from check_non_negative(subject, ids_per_sample=entry.ids_per_sample)
    if not 0 < entry.distinct_share <= 1:
        yield f"{subject}: distinct_share is {entry.distinct_share}; wanted more than 0, at most 1"
    for (k, share), (next_k, next_share) in pairwise(((0, 0.0), *entry.popularity)):
        if not (k < next_k and share <= next_share <= 1 + 1e-9):
            yield f"{subject}: popularity does not grow from {k}, {share} to {next_k}, {next_share}"
    for (num, _), (next_num, share) in pairwise(((0, 1.0), *entry.distinct)):
        if not (num < next_num and 0 < share <= 1):
            yield f"{subject}: distinct has {share} for {next_num} samples; wanted growing sizes and shares up to 1"


def _check_cache_hits(workload: Workload) -> Iterator[str]:
    yield from check_unique("cache hits of table", (entry.table for entry in workload.cache_hits))
    names = {table.name for table in workload.tables}
    for entry in workload.cache_hits:
        if entry.table not in names:
            yield f'cache hits of unknown table "{entry.table}"{did_you_mean(entry.table, names)}'
        for (num, share), (next_num, next_share) in pairwise(((0, 0.0), *entry.hits)):
            if not (num < next_num and share <= next_share <= 1):
                yield (
                    f'cache hits of table "{entry.table}" do not grow from {num} lines, {share} to {next_num}, '
                    f"{next_share}"
                )


def _check_optimizer(workload: Workload) -> Iterator[str]:
    if workload.optimizer is not None:
        yield from optimizer.optimizer_faults(workload.optimizer)


def _check_blocks(workload: Workload) -> Iterator[str]:
    yield from check_unique("block", (block.name for block in workload.blocks))
    for block in workload.blocks:
        yield from check_non_negative(
            f'block "{block.name}"',
            parameters=block.parameters,
            parameter_bytes=block.parameter_bytes,
            forward_flops=block.forward_flops,
            backward_flops=block.backward_flops,
            activation_bytes=block.activation_bytes,
            forward_bytes=block.forward_bytes,
            backward_bytes=block.backward_bytes,
            input_bytes=block.input_bytes,
            product_bytes=block.product_bytes,
            peak_bytes=block.peak_bytes,
            forward_calls=block.forward_calls,
        )


def _check_experts(workload: Workload) -> Iterator[str]:
    yield from check_unique("mixture", (mixture.module for mixture in workload.experts))
    names = {block.name for block in workload.blocks}
    for mixture in workload.experts:
        subject = f'mixture "{mixture.module}"'
        if mixture.block not in names:
            yield f'{subject} is in unknown block "{mixture.block}"{did_you_mean(mixture.block, names)}'
        yield from check_positive(subject, num_experts=mixture.num_experts, row_bytes=mixture.row_bytes)
        yield from check_non_negative(subject, rows=mixture.rows, result_bytes=mixture.result_bytes)
        if mixture.shares and len(mixture.shares) != mixture.num_experts:
            yield f"{subject} has {mixture.num_experts} experts, and shares of {len(mixture.shares)}"
        if mixture.shares and (min(mixture.shares) < 0 or abs(sum(mixture.shares) - 1) > 1e-6):
            yield f"{subject} has shares that sum to {sum(mixture.shares):g}; wanted shares of 0 or more, 1 in all"


CHECKS = (
    _check_batch,
    _check_tables,
    _check_features,
    _check_statistics,
    _check_cache_hits,
    _check_optimizer,
    _check_blocks,
    _check_experts,
)
