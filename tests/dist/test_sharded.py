"""Tables cut in every way over one to four ranks against the same tables whole, in one process."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.comm.mesh import Mesh
from shardwright.embeddings.exchange import Lanes, Sharded
from shardwright.embeddings.order import order_of
from shardwright.embeddings.shard import lay_out
from shardwright.jagged import Jagged, Vectors, narrow
from shardwright.kernels.reference import num_sums
from shardwright.layers.embedding import EmbeddingBags
from shardwright.spec.optimizer import LAMB, SGD, AdaGrad, Adam, PartialRowWiseAdam, RowWiseAdaGrad
from shardwright.spec.plan import Placement, Rect, Share, TablePlan
from shardwright.spec.workload import Feature, Table

OPTIMIZERS = (
    SGD(0.1),
    SGD(0.1, momentum=0.9, weight_decay=0.01),
    AdaGrad(0.1),
    RowWiseAdaGrad(0.1),
    RowWiseAdaGrad(0.1, clip=0.5, weight_decay=0.01),
    Adam(0.01),
    PartialRowWiseAdam(0.01, weight_decay=0.1, decoupled=True),
    LAMB(0.01, weight_decay=0.1),
    Adam(0.01, clip=0.5),
)
SCHEMES = ("table", "row", "column", "replica", "table-row", "table-column", "column-row", "two", "any")


@dataclass(frozen=True)
class Case:
    """Drawn from one number."""

    seed: int
    world: int
    dtype: str = "float64"
    scheme: str = ""  # of all tables; "": each its own
    weighted: bool = False
    meet: bool = False  # whether parts meet in hosts of two ranks
    empty: int = -1  # the only rank with samples; -1: all have some

    @property
    def draw(self) -> random.Random:
        return random.Random(self.seed)

    def bags(self) -> EmbeddingBags:
        draw = self.draw
        tables, features = [], []
        for at in range(draw.randint(1, 4)):
            rows = draw.choice((1, 3, 17, 60, 400))
            tables.append(Table(f"t{at}", rows, draw.choice((1, 2, 4, 6, 16)), self.dtype))
            for reader in range(draw.randint(1, 2)):
                pooling = draw.choice(("sum", "mean", "sum", "none"))
                features.append(Feature(f"f{at}_{reader}", f"t{at}", pooling))
        draw.shuffle(features)
        torch.manual_seed(self.seed)
        return EmbeddingBags(tables, features, draw.choice(OPTIMIZERS))

    def plans(self, bags: EmbeddingBags) -> dict[str, TablePlan]:
        draw = random.Random(self.seed + 1)
        found = {}
        for table in bags.tables:
            rects = [Rect(table.name, *one) for one in pieces(self.scheme or draw.choice(SCHEMES), table, self.world, draw)]
            order = draw.choice(("id", "hash:3", f"hash:{self.seed}", "load"))
            found[table.name] = TablePlan(table.name, order, tuple(rects), Placement((Share("dram"),)))
        return found

    def batch(self, step: int, bags: EmbeddingBags) -> tuple[Jagged, list[int]]:
        """The global batch, and where each rank's samples begin."""
        draw = torch.Generator().manual_seed(self.seed * 1000 + step)
        sizes = torch.randint(0, 5, (self.world,), generator=draw).tolist()
        if self.empty >= 0:
            sizes = [4 if rank == self.empty % self.world else 0 for rank in range(self.world)]
        lengths = torch.randint(0, 4, (len(bags.features), sum(sizes)), generator=draw)
        rows = {table.name: table.rows for table in bags.tables}
        counts = lengths.sum(1).tolist()
        values = [
            (rows[feature.table] * torch.rand(count, generator=draw) ** 2).long()
            for feature, count in zip(bags.features, counts, strict=True)
        ]
        weights = torch.rand(sum(counts), generator=draw, dtype=torch.float64) if self.weighted else None
        begins = [sum(sizes[:rank]) for rank in range(self.world + 1)]
        return Jagged(tuple(one.name for one in bags.features), torch.cat(values), lengths, weights), begins


def cut(extent: int, parts: int) -> list[tuple[int, int]]:
    """Nearly equal and none empty: as many as there is room for."""
    parts = min(parts, extent)
    ends = [extent * at // parts for at in range(parts + 1)]
    return list(zip(ends, ends[1:], strict=False))


def pieces(scheme: str, table: Table, world: int, draw: random.Random):
    """(rows, columns, ranks); hosts are pairs of ranks."""
    rows, cols, ranks = (0, table.rows), (0, table.dim), list(range(world))
    host = [rank for rank in draw.choice((ranks[:2], ranks[2:] or ranks[:2]))]
    match scheme:
        case "table":
            return [(rows, cols, (draw.choice(ranks),))]
        case "row":
            return [(one, cols, (rank,)) for one, rank in zip(cut(table.rows, world), ranks, strict=False)]
        case "column":
            return [(rows, one, (draw.choice(ranks),)) for one in cut(table.dim, world)]
        case "replica":
            return [(rows, cols, tuple(ranks))]
        case "table-row":
            return [(one, cols, (rank,)) for one, rank in zip(cut(table.rows, len(host)), host, strict=False)]
        case "table-column":
            return [(rows, one, (rank,)) for one, rank in zip(cut(table.dim, len(host)), host, strict=False)]
        case "column-row":
            hosts = [ranks[at : at + 2] for at in range(0, world, 2)]
            return [
                (rows_, cols_, (rank,))
                for cols_, host in zip(cut(table.dim, len(hosts)), hosts, strict=False)
                for rows_, rank in zip(cut(table.rows, len(host)), host, strict=False)
            ]
        case "two":  # cut inside groups of two ranks, a replica in every group
            groups = list(zip(*(ranks[at : at + 2] for at in range(0, world - world % 2, 2)), strict=True)) or [(0,)]
            by = draw.choice(("rows", "cols"))
            parts = cut(table.rows if by == "rows" else table.dim, len(groups))
            return [(one, cols, g) if by == "rows" else (rows, one, g) for one, g in zip(parts, groups, strict=False)]
    found = []  # any: rows that differ from column piece to column piece, on any ranks, some on several
    for cols_ in cut(table.dim, draw.randint(1, 3)):
        for rows_ in cut(table.rows, draw.randint(1, 3)):
            found.append((rows_, cols_, tuple(sorted(draw.sample(ranks, draw.randint(1, min(2, world)))))))
    return found


def part(vectors: Vectors, ids: Jagged, start: int, stop: int) -> Vectors:
    """Of some samples."""
    ends = ids.lengths.cumsum(1)
    sequences = {}
    for name, rows in vectors.sequences.items():
        at = ids.features.index(name)
        first, last = (int(ends[at, one - 1]) if one else 0 for one in (start, stop))
        sequences[name] = rows[first:last]
    return Vectors(vectors.features, vectors.dims, vectors.pooled_BD[start:stop], sequences)


def run(case: Case, by_row: bool, steps: int = 20) -> float:
    """The largest difference from the plain tables, over what a bound in float64 or float32 allows."""
    world = case.world
    mesh = Mesh((("rank", world),), lanes=("ids", "wire"), timeout_seconds=60)
    bags, plain = case.bags(), case.bags()
    rank, plans = mesh.rank, case.plans(bags)
    layout = lay_out(
        bags.tables,
        bags.features,
        plans,
        world,
        by_row=[table.name for table in bags.tables[:: 1 if by_row else 100] if by_row],
        whole_rows=num_sums(bags.optimizer) > 0,
        host=2 if case.meet and world == 4 else 0,
    )
    hottest = {table.name: torch.randperm(table.rows, generator=torch.Generator().manual_seed(1))[:9] for table in bags.tables}
    orders = [order_of(plans[table.name].order, table.rows, hottest[table.name]) for table in bags.tables]
    lanes = Lanes(mesh.group(lane="ids"), mesh.group(lane="wire"))
    sharded = Sharded(bags, layout, orders, lanes, torch.device("cpu"))
    bags.give_up(sharded)
    worst = 0.0
    tolerance = 1e-10 if case.dtype == "float64" else 3e-5
    for step in range(steps):
        ids, begins = case.batch(step, bags)
        mine = narrow(ids, begins[rank], begins[rank + 1])
        routed = sharded.asked(mine, mine.batch_size)
        with torch.no_grad():
            found = bags.lookup(routed)
            wanted = plain.lookup(ids)
        worst = max(worst, *(far(*pair) for pair in zip(found.tensors(), part(wanted, ids, begins[rank], begins[rank + 1]).tensors(), strict=True)))
        draw = torch.Generator().manual_seed(step)
        gradient = [torch.randn(one.shape, generator=draw, dtype=one.dtype) for one in wanted.tensors()]
        of_all = plain.vectors(gradient[0], gradient[1:])
        of_mine = part(of_all, ids, begins[rank], begins[rank + 1])
        arrived = sharded.gradients(routed, of_mine).wait()
        bags.update(routed, sharded.spread(routed, arrived).wait())
        plain.update(ids, of_all)
        assert bags.steps == plain.steps
    for holding in sharded.holdings:
        for piece, table, weight, state in zip(holding.bank.pieces, holding.tables, holding.weights, holding.state, strict=True):
            rows = orders[piece.table].ids(torch.arange(*piece.rows))
            for mine, whole in ((weight, plain.weight(table.name)), *((state[name], plain.state(table.name)[name]) for name in state)):
                whole = whole[rows]
                if whole.dim() == 2:
                    whole = torch.cat([whole[:, a:b] for a, b in piece.cols], 1)
                worst = max(worst, far(mine, whole))
    mesh.close()
    return worst / tolerance


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1)) if found.numel() else 0.0


@pytest.mark.parametrize("by_row", (False, True), ids=("pooled", "rows"))
def test_id_weights_travel_with_their_ids(ranks, by_row):
    for seed in range(8):
        assert max(ranks.run(3, run, Case(seed, 3, weighted=True), by_row, 4)) < 1


def test_one_rank_has_all_samples(ranks):
    for seed in range(6):
        assert max(ranks.run(4, run, Case(seed, 4, empty=seed), seed % 2 == 0, 4)) < 1


@pytest.mark.parametrize("by_row", (False, True), ids=("pooled", "rows"))
@pytest.mark.parametrize("world", (1, 2, 3, 4))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_equals_one_process(ranks, scheme, world, by_row):
    for seed in range(2):
        assert max(ranks.run(world, run, Case(seed, world, scheme=scheme), by_row, 4)) < 1


def test_float32_differs_by_rounding_alone(ranks):
    differences = [max(ranks.run(3, run, Case(seed, 3, dtype="float32"), seed % 2 == 0, 4)) for seed in range(6)]
    assert 0 < max(differences) < 1, differences


@pytest.mark.parametrize("scheme", ("row", "table-row", "column-row", "two", "any", ""))
def test_parts_that_meet_inside_hosts_equal_one_process(ranks, scheme):
    for seed in range(4):
        case = Case(seed, 4, scheme=scheme, meet=True, empty=seed if seed > 2 else -1)
        assert max(ranks.run(4, run, case, seed == 1, 4)) < 1


def test_what_meets_crosses_once(ranks):
    """Rows over all of 2 hosts x 2 ranks: each rank gets one sum from the other host instead of two parts."""
    direct, met = (layout_of_rows(host) for host in (0, 2))
    for client in range(4):
        assert sum(one.width for rank, _, one in direct.answering(client) if rank // 2 != client // 2) == 2 * 16
        assert sum(one.width for rank, _, one in met.answering(client) if rank // 2 != client // 2) == 16
        assert [rank for rank, _, _ in met.answering(client)] == [client % 2, 2 + client % 2]


def layout_of_rows(host: int):
    table = Table("t", 40, 16)
    rects = tuple(Rect("t", rows, (0, 16), (rank,)) for rank, rows in enumerate(cut(40, 4)))
    plan = TablePlan("t", "id", rects, Placement((Share("dram"),)))
    return lay_out([table], [Feature("f", "t")], {"t": plan}, 4, host=host)
