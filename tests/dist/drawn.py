"""Tables, features, plans and batches drawn by hypothesis, so that what fails shrinks, and the steps of one such case:
in rank processes with the tables cut, and in one process with the tables whole.
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
from shardwright.embeddings.row_order import RowOrder, make_row_order
from shardwright.embeddings.layout import Layout, TableShard, Span, build_layout
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
HALVES = SGD(0.125)  # its steps on numbers of few bits are exact
OPTIMIZERS = (
    HALVES,
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
Cut = list[tuple[Span, Span, tuple[int, ...]]]  # rows, columns, ranks


@dataclass(frozen=True)
class Case:
    world: int
    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    plans: tuple[TablePlan, ...]
    optimizer: SparseOptimizer
    sizes: tuple[tuple[int, ...], ...]  # samples of each rank, step after step in turn
    weighted: bool = False
    seed: int = 0
    lengths: tuple[int, ...] = (0, 1, 2, 3)  # of bags
    few_bits: bool = False  # in weights, id weights and gradients: their sums are exact, in any order
    at_home: bool = False  # each row is read by one rank alone
    meet: bool = False  # parts of vectors, inside hosts of two ranks
    check: bool = False  # whether ranks compare what they are about to do
    unused: bool = False  # at random steps the gradients of random features are zero: on some ranks, or on all

    @property
    def layout(self) -> Layout:
        whole_rows = num_row_sums(self.optimizer) > 0
        plans = {plan.table: plan for plan in self.plans}
        host = 2 if self.meet else 0
        return build_layout(self.tables, self.features, plans, self.world, needs_full_rows=whole_rows, ranks_per_host=host)

    @property
    def orders(self) -> list[RowOrder]:
        hottest = [torch.randperm(one.rows, generator=_draws(1))[:9] for one in self.tables]
        return [make_row_order(*one) for one in zip((p.order for p in self.plans), self.rows, hottest, strict=True)]

    @property
    def rows(self) -> list[int]:
        return [table.rows for table in self.tables]

    @property
    def table_of(self) -> list[int]:
        """The number of each feature's table."""
        names = [table.name for table in self.tables]
        return [names.index(feature.table) for feature in self.features]

    def bags(self) -> EmbeddingBags:
        torch.manual_seed(self.seed)
        bags = EmbeddingBags(self.tables, self.features, self.optimizer)
        if self.few_bits:
            for table in self.tables:
                weight = bags.weight(table.name).data
                weight.copy_(torch.randint(-64, 65, weight.shape, generator=_draws(self.seed)) / 64)
        return bags

    def begins(self, step: int) -> list[int]:
        """Where each rank's samples begin in the global batch, and their number."""
        return list(accumulate(self.sizes[step % len(self.sizes)], initial=0))

    def batch(self, step: int) -> Jagged:
        """The global batch: ids as popular as their logarithm has room."""
        draws, sizes = _draws(self.seed * 1000 + step), self.sizes[step % len(self.sizes)]
        ranks_B = torch.arange(self.world).repeat_interleave(torch.tensor(sizes))
        lengths, values = [], []
        for table in self.table_of:
            first_B, every = (ranks_B, self.world) if self.at_home else (torch.zeros_like(ranks_B), 1)
            there_B = (self.rows[table] - first_B + every - 1) // every
            some = torch.tensor(self.lengths)[torch.randint(len(self.lengths), (sum(sizes),), generator=draws)]
            lengths.append(some * (there_B > 0))
            there_N, first_N = there_B.repeat_interleave(lengths[-1]), first_B.repeat_interleave(lengths[-1])
            drawn_N = (there_N + 1.0) ** torch.rand(len(there_N), generator=draws, dtype=torch.float64) - 1
            values.append(torch.minimum(drawn_N.long(), there_N - 1) * every + first_N)
        ids_N = torch.cat(values)
        weights = torch.randint(1, 9, (len(ids_N),), generator=draws) / 8.0
        if not self.few_bits:
            weights = weights + torch.rand(len(ids_N), generator=draws)
        names = tuple(feature.name for feature in self.features)
        return Jagged(names, ids_N, torch.stack(lengths), weights.double() if self.weighted else None)

    def gradients(self, step: int, like: Vectors) -> Vectors:
        draws = _draws(self.seed * 1000 + step + 500)

        def drawn(x: Tensor) -> Tensor:
            found = torch.randn(x.shape, generator=draws, dtype=x.dtype)
            return (found * 2).round().clamp(-8, 8) / 8 if self.few_bits else found

        sequences = {name: drawn(rows) for name, rows in like.sequences.items()}
        found = Vectors(like.features, like.dims, drawn(like.pooled_BD), sequences)
        if self.unused:
            lengths, begins = self.batch(step).lengths, self.begins(step)
            for at, feature in enumerate(self.features):
                first, last = sorted(torch.randint(self.world + 1, (2,), generator=draws).tolist())
                start, end = (0, begins[-1]) if torch.rand(1, generator=draws) < 0.5 else (begins[first], begins[last])
                if feature.pooling == "none":
                    start, end = int(lengths[at, :start].sum()), int(lengths[at, :end].sum())
                found[feature.name][start:end] = 0
        return found


def examples(few: int) -> pytest.MarkDecorator:
    """The same ones every time: few, and in a night many. Where one fails it takes minutes to shrink."""
    many = pytest.param(20 * few, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
    return pytest.mark.parametrize("examples", [pytest.param(few, marks=pytest.mark.timeout(600)), many])


def _draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Held:
    """A piece of a table at the end: its weight, and its optimizer's state by name."""

    piece: TableShard
    tensors: dict[str, np.ndarray]


@dataclass(frozen=True)
class Whole:
    """One process: every step's global batch, vectors and gradients, and at the end each table's weight and state."""

    batches: list[Jagged]
    vectors: list[Vectors]
    gradients: list[Vectors]
    tensors: list[dict[str, Tensor]]
    steps: dict[str, int]


def train(case: Case, steps: int = STEPS) -> tuple[list[list[np.ndarray]], list[Held], dict[str, int]]:
    """A rank's vectors of every step; at the end its tables and their step counts."""
    mesh = Mesh((("rank", case.world),), lanes=("ids", "wire"), timeout_seconds=20, check=case.check)
    bags = case.bags()
    lanes = Lanes(mesh.group(lane="ids"), mesh.group(lane="wire"))
    sharded = ShardedTables(bags, case.layout, case.orders, lanes, torch.device("cpu"))
    bags.give_up(sharded)
    vectors = []
    for step in range(steps):
        ids = case.batch(step)
        begin, end = case.begins(step)[mesh.rank : mesh.rank + 2]
        mine = narrow(ids, begin, end)
        routed = sharded.route(mine, mine.batch_size)
        with torch.no_grad():
            found = bags.lookup(routed)
        vectors.append([one.numpy().copy() for one in found.tensors()])
        gradients = part(case.gradients(step, bags.blank(ids, "cpu")), ids, begin, end)
        arrived = sharded.exchange_gradients(routed, gradients).wait()
        bags.update(routed, sharded.broadcast_in_host(routed, arrived).wait())
    mesh.close()
    return vectors, list(_held(sharded)), bags.steps


def _held(sharded: ShardedTables) -> Iterator[Held]:
    for one in sharded.local_shards:
        for piece, weight, state in zip(one.table_group.shards, one.weights, one.optimizer_states, strict=True):
            yield Held(piece, {name: x.detach().numpy() for name, x in {"weight": weight, **state}.items()})


def alone(case: Case, steps: int = STEPS) -> Whole:
    bags = case.bags()
    batches, vectors, gradients = [], [], []
    for step in range(steps):
        batches.append(case.batch(step))
        with torch.no_grad():
            found = bags.lookup(batches[-1])
        sequences = {name: rows.clone() for name, rows in found.sequences.items()}
        vectors.append(Vectors(found.features, found.dims, found.pooled_BD.clone(), sequences))
        gradients.append(case.gradients(step, found))
        bags.update(batches[-1], gradients[-1])
    tensors = [{"weight": bags.weight(one.name).detach(), **bags.state(one.name)} for one in case.tables]
    return Whole(batches, vectors, gradients, tensors, bags.steps)


def part(vectors: Vectors, ids: Jagged, start: int, stop: int) -> Vectors:
    """Of some samples."""
    sequences = {}
    for name, rows in vectors.sequences.items():
        lengths = ids.lengths[ids.features.index(name)]
        first = int(lengths[:start].sum())
        sequences[name] = rows[first : first + int(lengths[start:stop].sum())]
    return Vectors(vectors.features, vectors.dims, vectors.pooled_BD[start:stop], sequences)


def of_piece(piece: TableShard, orders: Sequence[RowOrder], whole: Any) -> Any:
    """What a piece has of a table's weight or state."""
    rows = whole[orders[piece.table].ids(torch.arange(*piece.rows))]
    if len(rows.shape) == 1:
        return rows
    return rows[:, torch.cat([torch.arange(*cols) for cols in piece.cols])]


@st.composite
def spans(draw: Draw, extent: int, most: int) -> list[Span]:
    """Two or more where there is room for them, at most so many, of any lengths."""
    most = min(most, extent)
    cuts = draw(st.sets(st.integers(1, extent - 1), min_size=1, max_size=most - 1)) if most > 1 else ()
    return list(pairwise([0, *sorted(cuts), extent]))


def _one(ranks: Sequence[int]) -> st.SearchStrategy:
    return st.sampled_from(ranks).map(lambda rank: (rank,))


def _some(ranks: Sequence[int]) -> st.SearchStrategy:
    return st.sets(st.sampled_from(ranks), min_size=1).map(lambda found: tuple(sorted(found)))


def _hosts(ranks: Sequence[int]) -> list[Sequence[int]]:
    return [ranks[at : at + 2] for at in range(0, len(ranks), 2)]


def table(draw: Draw, rows: int, dim: int, ranks: Sequence[int]) -> Cut:
    return [((0, rows), (0, dim), draw(_one(ranks)))]


def row(draw: Draw, rows: int, dim: int, ranks: Sequence[int]) -> Cut:
    return [(span, (0, dim), draw(_one(ranks))) for span in draw(spans(rows, len(ranks)))]


def column(draw: Draw, rows: int, dim: int, ranks: Sequence[int]) -> Cut:
    return [((0, rows), span, draw(_one(ranks))) for span in draw(spans(dim, len(ranks)))]


def replicas(draw: Draw, rows: int, dim: int, ranks: Sequence[int]) -> Cut:
    return [((0, rows), (0, dim), draw(st.one_of(st.just(tuple(ranks)), _some(ranks))))]


def table_row(draw: Draw, rows: int, dim: int, ranks: Sequence[int]) -> Cut:
    host = draw(st.sampled_from(_hosts(ranks)))
    return [(span, (0, dim), (rank,)) for span, rank in zip(draw(spans(rows, len(host))), host, strict=False)]


def table_column(draw: Draw, rows: int, dim: int, ranks: Sequence[int]) -> Cut:
    host = draw(st.sampled_from(_hosts(ranks)))
    return [((0, rows), span, (rank,)) for span, rank in zip(draw(spans(dim, len(host))), host, strict=False)]


def column_row(draw: Draw, rows: int, dim: int, ranks: Sequence[int]) -> Cut:
    """Columns over hosts, rows over the ranks of each."""
    hosts = _hosts(ranks)
    columns = draw(spans(dim, len(hosts)))
    return [
        (span, cols, (rank,))
        for cols, host in zip(columns, hosts, strict=False)
        for span, rank in zip(draw(spans(rows, len(host))), host, strict=False)
    ]


def groups(draw: Draw, rows: int, dim: int, ranks: Sequence[int]) -> Cut:
    """In two dimensions: cut inside groups of ranks, a copy in each group."""
    size = draw(st.sampled_from([one for one in (2, 1, 3, 4) if len(ranks) % one == 0]))
    if draw(st.booleans()):
        return [((0, rows), span, tuple(ranks[at::size])) for at, span in enumerate(draw(spans(dim, size)))]
    return [(span, (0, dim), tuple(ranks[at::size])) for at, span in enumerate(draw(spans(rows, size)))]


def rectangles(draw: Draw, rows: int, dim: int, ranks: Sequence[int]) -> Cut:
    """Rows that differ from columns to columns, or the other way round, each on any ranks."""
    if draw(st.booleans()):
        return [(one, cols, draw(_some(ranks))) for cols in draw(spans(dim, 3)) for one in draw(spans(rows, 3))]
    return [(one, cols, draw(_some(ranks))) for one in draw(spans(rows, 3)) for cols in draw(spans(dim, 3))]


SCHEMES = (table, row, column, replicas, table_row, table_column, column_row, groups, rectangles)


@st.composite
def plans(draw: Draw, table: Table, world: int, schemes: Sequence[Callable[..., Cut]] = SCHEMES) -> TablePlan:
    cut = draw(st.sampled_from(schemes))(draw, table.rows, table.dim, range(world))
    order = draw(st.sampled_from(("id", "hash:3", "hash:123457", "load")))
    rects = tuple(Rect(table.name, *one) for one in cut)
    travel = draw(st.sampled_from(("vectors", "vectors", "rows")))
    return TablePlan(table.name, order, rects, Placement((Share("dram"),)), travel)


def at_one_rank(world: int, most: int = 5) -> st.SearchStrategy:
    """The samples of each rank in a few steps: none at all but one."""
    drawn = st.tuples(st.integers(0, world - 1), st.integers(1, most))
    step = drawn.map(lambda one: tuple(one[1] if rank == one[0] else 0 for rank in range(world)))
    return st.lists(step, min_size=1, max_size=3).map(tuple)


def uneven(world: int, most: int = 5) -> st.SearchStrategy:
    """None at some ranks, or anywhere."""
    step = st.tuples(*[st.sampled_from((1, 0, *range(2, most + 1)))] * world)
    return st.one_of(st.lists(step, min_size=1, max_size=3).map(tuple), at_one_rank(world, most))


@st.composite
def cases(
    draw: Draw,
    schemes: Sequence[Callable[..., Cut]] = SCHEMES,
    dtype: str = "float64",
    shapes: Sequence[tuple[int, int]] = (),
    samples: Callable[[int], st.SearchStrategy] = uneven,
    worlds: Sequence[int] = (2, 3, 4),
    **more: st.SearchStrategy,
) -> Case:
    """`shapes` of the tables, if they are not drawn; `more` fields."""
    world = draw(st.sampled_from(worlds))
    rows, dims = st.sampled_from((3, 17, 60, 400, 1)), st.sampled_from((2, 4, 6, 16, 1))
    shapes = shapes or draw(st.lists(st.tuples(rows, dims), min_size=1, max_size=3))
    tables = tuple(Table(f"t{at}", *shape, dtype) for at, shape in enumerate(shapes))
    features = []
    for one in tables:
        poolings = draw(st.lists(st.sampled_from(("mean", "sum", "mean", "sum", "none")), min_size=1, max_size=2))
        features += [Feature(f"{one.name}_{at}", one.name, pooling) for at, pooling in enumerate(poolings)]
    return Case(
        world=world,
        tables=tables,
        features=tuple(draw(st.permutations(features))),
        plans=tuple(draw(plans(one, world, schemes)) for one in tables),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        sizes=draw(samples(world)),
        weighted=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
        **{name: draw(one) for name, one in more.items()},
    )
