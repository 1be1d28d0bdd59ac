"""Random tables, features, plans and batches from hypothesis (failures shrink), and training of such a case:
`train_sharded` in rank processes with sharded tables, `train_reference` in one process with unsharded tables.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from shardwright.comm.mesh import Mesh
from shardwright.embeddings.exchange import Lanes, ShardedTables
from shardwright.embeddings.layout import Layout, Span, TableShard, build_layout
from shardwright.embeddings.row_order import RowOrder, make_row_order
from shardwright.jagged import Jagged, Vectors, narrow
from shardwright.kernels.reference import num_row_sums
from shardwright.layers.embedding import EmbeddingBags
from shardwright.spec.optimizer import (
    LAMB,
    SGD,
    AdaGrad,
    Adam,
    PartialRowWiseAdam,
    RowWiseAdaGrad,
    SparseOptimizer,
)
from shardwright.spec.plan import Placement, Rect, Share, TablePlan
from shardwright.spec.workload import Feature, Table

STEPS = 20
EXACT_SGD = SGD(0.125)  # its steps on numbers with few bits are exact
OPTIMIZERS = (
    EXACT_SGD,
    SGD(0.1, momentum=0.9, weight_decay=0.01),
    AdaGrad(0.1),
    RowWiseAdaGrad(0.1),
    RowWiseAdaGrad(0.1, clip=0.5, weight_decay=0.01),
    Adam(0.01),
    PartialRowWiseAdam(0.01, weight_decay=0.1, decoupled=True),
    LAMB(0.01, weight_decay=0.1),
    Adam(0.01, clip=0.5),
)

Draw = Callable[[st.SearchStrategy], Any]
Rects = list[tuple[Span, Span, tuple[int, ...]]]  # rows, columns, ranks


@dataclass(frozen=True)
class Case:
    world: int
    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    plans: tuple[TablePlan, ...]
    optimizer: SparseOptimizer
    batch_sizes: tuple[tuple[int, ...], ...]  # local batch size of each rank; steps cycle through these tuples
    weighted: bool = False
    seed: int = 0
    lengths: tuple[int, ...] = (0, 1, 2, 3)  # of bags
    few_bits: bool = False  # weights, id weights and gradients have few bits, so that sums are exact in any order
    one_reader: bool = False  # each row is looked up by one rank only
    host_reduce: bool = False  # partial sums of vectors are added inside hosts of two ranks
    check: bool = False  # ranks compare every collective before they run it
    unused: bool = False  # at random steps the gradients of random features are zero: on some ranks, or on all

    @property
    def layout(self) -> Layout:
        full_rows = num_row_sums(self.optimizer) > 0
        plans = {plan.table: plan for plan in self.plans}
        host_size = 2 if self.host_reduce else 0
        return build_layout(
            self.tables, self.features, plans, self.world, needs_full_rows=full_rows, ranks_per_host=host_size
        )

    @property
    def orders(self) -> list[RowOrder]:
        hottest = [torch.randperm(table.rows, generator=_generator(1))[:9] for table in self.tables]
        return [make_row_order(*args) for args in zip((p.order for p in self.plans), self.rows, hottest, strict=True)]

    @property
    def rows(self) -> list[int]:
        return [table.rows for table in self.tables]

    @property
    def table_of(self) -> list[int]:
        """Number of each feature's table."""
        names = [table.name for table in self.tables]
        return [names.index(feature.table) for feature in self.features]

    def bags(self) -> EmbeddingBags:
        torch.manual_seed(self.seed)
        bags = EmbeddingBags(self.tables, self.features, self.optimizer)
        if self.few_bits:
            for table in self.tables:
                weight = bags.weight(table.name).data
                weight.copy_(torch.randint(-64, 65, weight.shape, generator=_generator(self.seed)) / 64)
        return bags

    def sample_offsets(self, step: int) -> list[int]:
        """Index of each rank's first sample in the global batch, then the number of all samples."""
        return list(accumulate(self.batch_sizes[step % len(self.batch_sizes)], initial=0))

    def batch(self, step: int) -> Jagged:
        """The global batch; the logarithm of an id is uniformly distributed, so that small ids repeat."""
        generator, sizes = _generator(self.seed * 1000 + step), self.batch_sizes[step % len(self.batch_sizes)]
        ranks_B = torch.arange(self.world).repeat_interleave(torch.tensor(sizes))
        lengths, values = [], []
        for table in self.table_of:
            first_B, stride = (ranks_B, self.world) if self.one_reader else (torch.zeros_like(ranks_B), 1)
            readable_B = (self.rows[table] - first_B + stride - 1) // stride
            bag_sizes = torch.tensor(self.lengths)[torch.randint(len(self.lengths), (sum(sizes),), generator=generator)]
            lengths.append(bag_sizes * (readable_B > 0))
            readable_N, first_N = readable_B.repeat_interleave(lengths[-1]), first_B.repeat_interleave(lengths[-1])
            picks_N = (readable_N + 1.0) ** torch.rand(len(readable_N), generator=generator, dtype=torch.float64) - 1
            values.append(torch.minimum(picks_N.long(), readable_N - 1) * stride + first_N)
        ids_N = torch.cat(values)
        weights = torch.randint(1, 9, (len(ids_N),), generator=generator) / 8.0
        if not self.few_bits:
            weights = weights + torch.rand(len(ids_N), generator=generator)
        names = tuple(feature.name for feature in self.features)
        return Jagged(names, ids_N, torch.stack(lengths), weights.double() if self.weighted else None)

    def gradients(self, step: int, like: Vectors) -> Vectors:
        generator = _generator(self.seed * 1000 + step + 500)

        def draw_like(x: Tensor) -> Tensor:
            values = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            return (values * 2).round().clamp(-8, 8) / 8 if self.few_bits else values

        sequences = {name: draw_like(rows) for name, rows in like.sequences.items()}
        gradients = Vectors(like.features, like.dims, draw_like(like.pooled_BD), sequences)
        if self.unused:
            lengths, starts = self.batch(step).lengths, self.sample_offsets(step)
            for number, feature in enumerate(self.features):
                first, last = sorted(torch.randint(self.world + 1, (2,), generator=generator).tolist())
                start, end = (
                    (0, starts[-1]) if torch.rand(1, generator=generator) < 0.5 else (starts[first], starts[last])
                )
                if feature.pooling == "none":
                    start, end = int(lengths[number, :start].sum()), int(lengths[number, :end].sum())
                gradients[feature.name][start:end] = 0
        return gradients


def examples(few: int) -> pytest.MarkDecorator:
    """Number of examples, equal in every run: `few`, and 20 times as many if marked slow. Shrinking takes minutes."""
    many = pytest.param(20 * few, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
    return pytest.mark.parametrize("examples", [pytest.param(few, marks=pytest.mark.timeout(600)), many])


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class HeldShard:
    """A table shard after training: its weight, and its optimizer state by name."""

    shard: TableShard
    tensors: dict[str, np.ndarray]


@dataclass(frozen=True)
class Reference:
    """A run in one process: global batch, vectors and gradients of each step; each table's final weight and state."""

    batches: list[Jagged]
    vectors: list[Vectors]
    gradients: list[Vectors]
    tensors: list[dict[str, Tensor]]
    steps: dict[str, int]


def train_sharded(case: Case, steps: int = STEPS) -> tuple[list[list[np.ndarray]], list[HeldShard], dict[str, int]]:
    """Run in a rank process; returns its vectors of every step, and its final table shards and their step counts."""
    mesh = Mesh((("rank", case.world),), lanes=("ids", "wire"), timeout_seconds=20, check=case.check)
    bags = case.bags()
    lanes = Lanes(mesh.group(lane="ids"), mesh.group(lane="wire"))
    sharded = ShardedTables(bags, case.layout, case.orders, lanes, torch.device("cpu"))
    bags.give_up(sharded)
    vectors = []
    for step in range(steps):
        ids = case.batch(step)
        begin, end = case.sample_offsets(step)[mesh.rank : mesh.rank + 2]
        local = narrow(ids, begin, end)
        routed = sharded.route(local)
        with torch.no_grad():  # as `pool`, but the update needs the rows where the lookup has placed them
            looked_up = sharded.exchange_vectors(
                sharded.reduce_in_host(sharded.lookup(routed, training=True)).wait()
            ).wait()
        vectors.append([tensor.numpy().copy() for tensor in looked_up.tensors()])
        gradients = slice_vectors(case.gradients(step, bags.blank(ids, "cpu")), ids, begin, end)
        received = sharded.exchange_gradients(routed, gradients).wait()
        bags.update(routed, sharded.broadcast_in_host(routed, received).wait())
    mesh.close()
    return vectors, list(_held_shards(sharded)), bags.steps


def _held_shards(sharded: ShardedTables) -> Iterator[HeldShard]:
    for local in sharded.local_shards:
        for shard, weight, state in zip(local.table_group.shards, local.weights, local.optimizer_states, strict=True):
            yield HeldShard(shard, {name: x.detach().numpy() for name, x in {"weight": weight, **state}.items()})


def train_reference(case: Case, steps: int = STEPS) -> Reference:
    bags = case.bags()
    batches, vectors, gradients = [], [], []
    for step in range(steps):
        batches.append(case.batch(step))
        with torch.no_grad():
            computed = bags.lookup(batches[-1])
        sequences = {name: rows.clone() for name, rows in computed.sequences.items()}
        vectors.append(Vectors(computed.features, computed.dims, computed.pooled_BD.clone(), sequences))
        gradients.append(case.gradients(step, computed))
        bags.update(batches[-1], gradients[-1])
    tensors = [{"weight": bags.weight(table.name).detach(), **bags.state(table.name)} for table in case.tables]
    return Reference(batches, vectors, gradients, tensors, bags.steps)


def slice_vectors(vectors: Vectors, ids: Jagged, start: int, stop: int) -> Vectors:
    """The vectors of samples `start` to `stop`; `ids` has the lengths of features without pooling."""
    sequences = {}
    for name, rows in vectors.sequences.items():
        lengths = ids.lengths[ids.features.index(name)]
        first_id = int(lengths[:start].sum())
        sequences[name] = rows[first_id : first_id + int(lengths[start:stop].sum())]
    return Vectors(vectors.features, vectors.dims, vectors.pooled_BD[start:stop], sequences)


def select_shard(shard: TableShard, orders: Sequence[RowOrder], tensor: Any) -> Any:
    """The part of a table's weight or state tensor that a shard holds."""
    rows = tensor[orders[shard.table].ids(torch.arange(*shard.rows))]
    if len(rows.shape) == 1:
        return rows
    return rows[:, torch.cat([torch.arange(*cols) for cols in shard.cols])]


@st.composite
def spans(draw: Draw, extent: int, max_spans: int) -> list[Span]:
    """Splits of `extent` into at most `max_spans` spans of any lengths, at least two where possible."""
    max_spans = min(max_spans, extent)
    cuts = draw(st.sets(st.integers(1, extent - 1), min_size=1, max_size=max_spans - 1)) if max_spans > 1 else ()
    return list(pairwise([0, *sorted(cuts), extent]))


def _single_rank(ranks: Sequence[int]) -> st.SearchStrategy:
    return st.sampled_from(ranks).map(lambda rank: (rank,))


def _subset(ranks: Sequence[int]) -> st.SearchStrategy:
    return st.sets(st.sampled_from(ranks), min_size=1).map(lambda subset: tuple(sorted(subset)))


def _hosts(ranks: Sequence[int]) -> list[Sequence[int]]:
    return [ranks[first : first + 2] for first in range(0, len(ranks), 2)]


def table(draw: Draw, rows: int, dim: int, ranks: Sequence[int]) -> Rects:
    return [((0, rows), (0, dim), draw(_single_rank(ranks)))]


def row(draw: Draw, rows: int, dim: int, ranks: Sequence[int]) -> Rects:
    return [(span, (0, dim), draw(_single_rank(ranks))) for span in draw(spans(rows, len(ranks)))]


def column(draw: Draw, rows: int, dim: int, ranks: Sequence[int]) -> Rects:
    return [((0, rows), span, draw(_single_rank(ranks))) for span in draw(spans(dim, len(ranks)))]


def replicas(draw: Draw, rows: int, dim: int, ranks: Sequence[int]) -> Rects:
    return [((0, rows), (0, dim), draw(st.one_of(st.just(tuple(ranks)), _subset(ranks))))]


def table_row(draw: Draw, rows: int, dim: int, ranks: Sequence[int]) -> Rects:
    host = draw(st.sampled_from(_hosts(ranks)))
    return [(span, (0, dim), (rank,)) for span, rank in zip(draw(spans(rows, len(host))), host, strict=False)]


def table_column(draw: Draw, rows: int, dim: int, ranks: Sequence[int]) -> Rects:
    host = draw(st.sampled_from(_hosts(ranks)))
    return [((0, rows), span, (rank,)) for span, rank in zip(draw(spans(dim, len(host))), host, strict=False)]


def column_row(draw: Draw, rows: int, dim: int, ranks: Sequence[int]) -> Rects:
    """Columns over hosts, rows over the ranks of each host."""
    hosts = _hosts(ranks)
    columns = draw(spans(dim, len(hosts)))
    return [
        (span, cols, (rank,))
        for cols, host in zip(columns, hosts, strict=False)
        for span, rank in zip(draw(spans(rows, len(host))), host, strict=False)
    ]


def groups(draw: Draw, rows: int, dim: int, ranks: Sequence[int]) -> Rects:
    """2-D parallelism: sharded inside groups of ranks, replicated in each group."""
    size = draw(st.sampled_from([divisor for divisor in (2, 1, 3, 4) if len(ranks) % divisor == 0]))
    if draw(st.booleans()):
        return [((0, rows), span, tuple(ranks[first::size])) for first, span in enumerate(draw(spans(dim, size)))]
    return [(span, (0, dim), tuple(ranks[first::size])) for first, span in enumerate(draw(spans(rows, size)))]


def rectangles(draw: Draw, rows: int, dim: int, ranks: Sequence[int]) -> Rects:
    """Column spans with different row spans, or row spans with different column spans, each on any ranks."""
    if draw(st.booleans()):
        return [(span, cols, draw(_subset(ranks))) for cols in draw(spans(dim, 3)) for span in draw(spans(rows, 3))]
    return [(span, cols, draw(_subset(ranks))) for span in draw(spans(rows, 3)) for cols in draw(spans(dim, 3))]


SCHEMES = (table, row, column, replicas, table_row, table_column, column_row, groups, rectangles)


@st.composite
def plans(draw: Draw, table: Table, world: int, schemes: Sequence[Callable[..., Rects]] = SCHEMES) -> TablePlan:
    spans_and_ranks = draw(st.sampled_from(schemes))(draw, table.rows, table.dim, range(world))
    order = draw(st.sampled_from(("id", "hash:3", "hash:123457", "load")))
    rects = tuple(Rect(table.name, *args) for args in spans_and_ranks)
    exchange = draw(st.sampled_from(("vectors", "vectors", "rows")))
    return TablePlan(table.name, order, rects, Placement((Share("dram"),)), exchange)


def sizes_at_one_rank(world: int, max_samples: int = 5) -> st.SearchStrategy:
    """Local batch sizes of a few steps in which only one rank has samples."""
    rank_and_size = st.tuples(st.integers(0, world - 1), st.integers(1, max_samples))
    step = rank_and_size.map(lambda pair: tuple(pair[1] if rank == pair[0] else 0 for rank in range(world)))
    return st.lists(step, min_size=1, max_size=3).map(tuple)


def uneven_sizes(world: int, max_samples: int = 5) -> st.SearchStrategy:
    """Local batch sizes of a few steps: some ranks, or all, may have no samples."""
    step = st.tuples(*[st.sampled_from((1, 0, *range(2, max_samples + 1)))] * world)
    return st.one_of(st.lists(step, min_size=1, max_size=3).map(tuple), sizes_at_one_rank(world, max_samples))


@st.composite
def cases(
    draw: Draw,
    schemes: Sequence[Callable[..., Rects]] = SCHEMES,
    dtype: str = "float64",
    shapes: Sequence[tuple[int, int]] = (),
    sizes: Callable[[int], st.SearchStrategy] = uneven_sizes,
    worlds: Sequence[int] = (2, 3, 4),
    **fields: st.SearchStrategy,
) -> Case:
    """`shapes`: (rows, dim) of the tables, drawn if empty; `fields`: strategies of further fields of Case."""
    world = draw(st.sampled_from(worlds))
    rows, dims = st.sampled_from((3, 17, 60, 400, 1)), st.sampled_from((2, 4, 6, 16, 1))
    shapes = shapes or draw(st.lists(st.tuples(rows, dims), min_size=1, max_size=3))
    tables = tuple(Table(f"t{number}", *shape, dtype) for number, shape in enumerate(shapes))
    features = []
    for table in tables:
        poolings = draw(st.lists(st.sampled_from(("mean", "sum", "mean", "sum", "none")), min_size=1, max_size=2))
        features += [Feature(f"{table.name}_{i}", table.name, pooling) for i, pooling in enumerate(poolings)]
    return Case(
        world=world,
        tables=tables,
        features=tuple(draw(st.permutations(features))),
        plans=tuple(draw(plans(table, world, schemes)) for table in tables),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        batch_sizes=draw(sizes(world)),
        weighted=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
        **{name: draw(field) for name, field in fields.items()},
    )
