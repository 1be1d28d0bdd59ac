"""Defects of HET's released code (Hetu, a1cb1bc) that tables on servers must not have, and what must hold instead.

Where rows count: the gradient of each rank is -1 in the column of the rank, and the learning rate is 1, so that a row
has the number of updates of each rank that it has seen.
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from test_steps import assert_same, batch, make_model, single_plan
from test_table_servers import decoded

from shardwright.comm.pending import Pending
from shardwright.comm.transport.arrays import Message
from shardwright.comm.transport.servers import TableServers
from shardwright.embeddings.copies.bounded_group import RowNumbers
from shardwright.embeddings.copies.row_clocks import RowClocks
from shardwright.embeddings.copies.row_copies import NO_VERSION, RowCopies
from shardwright.embeddings.layout import build_layout
from shardwright.embeddings.outgoing import DistinctRows
from shardwright.embeddings.service import calls
from shardwright.embeddings.service.call_handler import CallHandler
from shardwright.embeddings.service.owned_rows import GroupRead
from shardwright.embeddings.service.served_tables import ServedTables
from shardwright.embeddings.service.server import TableServer
from shardwright.errors import UserError
from shardwright.kernels import reference
from shardwright.kernels.arguments import Ids
from shardwright.layers.embedding import EmbeddingBags
from shardwright.runtime.build import build
from shardwright.runtime.dense_layout import mesh_for
from shardwright.runtime.placements import keep_on_servers
from shardwright.spec.optimizer import LAMB, SGD, AdaGrad, Adam, PartialRowWiseAdam, RowWiseAdaGrad, state_shapes
from shardwright.spec.plan import Bounded, Placement, Rect, Share, TablePlan
from shardwright.spec.row_cache import HOST
from shardwright.spec.workload import Feature, Table

LINES = 32  # copies of a rank: the least
COUNTING = SGD(1.0)
NEVER = 10_000  # a bound that these runs do not reach
WAIT_SECONDS = 20
EXACT, LATE = Bounded(0, 0, LINES), Bounded(NEVER, NEVER, LINES)


class LocalServer:
    """A table server in this process; messages are encoded and decoded as for a socket."""

    def __init__(self) -> None:
        self.handler, self._replies, self._changed = CallHandler(), {}, threading.Condition()

    def call(self, client: bytes, message: Message) -> Pending[Message]:
        with self._changed:
            for receiver, reply in self.handler.handle(client, decoded(message.encode())):
                self._replies[receiver, reply.header["number"]] = decoded(reply.encode())
            self._changed.notify_all()
        return Pending(lambda: self._wait((client, message.header["number"])))

    def _wait(self, key) -> Message:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._replies, WAIT_SECONDS)
            reply = self._replies.pop(key)
        assert "error" not in reply.header, reply.header
        return reply


class LocalConnection:
    def __init__(self, local: LocalServer, server: int, rank: int) -> None:
        self._local, self._number = local, 0
        self._identity = {"run": "r", "rank": rank, "server": server, "connection": "step"}

    def call(self, message: Message) -> Pending[Message]:
        self._number += 1
        header = {**message.header, **self._identity, "number": self._number}
        return self._local.call(bytes([self._identity["rank"]]), Message(header, message.arrays))


class LocalConnector:
    def __init__(self, servers: list[LocalServer], rank: int) -> None:
        self._servers, self._rank = servers, rank

    def connect(self, server: int) -> LocalConnection:
        return LocalConnection(self._servers[server], server, self._rank)


def make_layout(rows: int, num_ranks: int, num_servers: int, sync: Bounded, dim: int, dtype: str):
    ends = [rows * server // num_servers for server in range(num_servers + 1)]
    rects = tuple(Rect("t", span, (0, dim), (num_ranks + i,)) for i, span in enumerate(pairwise(ends)))
    plan = TablePlan("t", "id", rects, Placement((Share(HOST),), sync=sync), travel="rows")
    tables, features = [Table("t", rows, dim, dtype)], [Feature("f", "t")]
    return tables, features, build_layout(tables, features, {"t": plan}, num_ranks, num_servers=num_servers)


class ServedRun:
    """Ranks in lockstep, and the servers that own table t."""

    def __init__(self, num_ranks, num_servers, sync, optimizer=COUNTING, rows=200, dim=None, dtype="float64"):
        tables, features, layout = make_layout(rows, num_ranks, num_servers, sync, dim or num_ranks, dtype)
        self.optimizer, self.bags = optimizer, EmbeddingBags(tables, features, optimizer)
        self.servers = [LocalServer() for _ in range(num_servers)]
        self.ranks = [ServedTables(self.bags, layout, LocalConnector(self.servers, rank)) for rank in range(num_ranks)]
        for rank in self.ranks:
            rank.open()
        self.batches = []  # of the last step, by rank
        self.last_versions = {}  # by server, before the last flush
        for number, server in enumerate(self.servers):
            self._keep_versions(number, server.handler._owned.clocks[0])

    def _keep_versions(self, number, clocks):
        def forget():
            self.last_versions[number] = clocks.version_E.clone()
            RowClocks.forget(clocks)

        clocks.forget = forget

    def step(self, rows_by_rank, gradient=None):
        """The rows that each rank has read; `gradient(rank, rows)`."""
        self.bags.steps["t"] += 1
        distinct = [distinct_rows(rows) for rows in rows_by_rank]
        planned = [rank.find_copies(rows, training=True) for rank, rows in zip(self.ranks, distinct, strict=True)]
        self.batches = [batch for (batch,) in planned]
        reads = self._read(planned)
        for number, (rank, batches) in enumerate(zip(self.ranks, planned, strict=True)):
            rank.keep_gradients(batches, [(gradient or self.count)(number, batches[0].rows_U)])
            rank.update(batches, self.optimizer, self.bags.steps)
        return reads

    def _read(self, planned):
        for rank, batches in zip(self.ranks, planned, strict=True):
            rank.fetch(batches).wait()
        return [rank.read(batches)[0] for rank, batches in zip(self.ranks, planned, strict=True)]

    def count(self, rank, rows):
        grad = torch.zeros(len(rows), len(self.ranks), dtype=torch.float64)
        grad[:, rank] = -1
        return grad

    def evaluate(self, rows):
        """The rows as each rank reads them without training, after a flush of all ranks."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            list(pool.map(ServedTables.flush, self.ranks))
        return self._read([rank.find_copies(distinct_rows(rows), training=False) for rank in self.ranks])

    @property
    def weight(self):
        """All rows, as the servers have them."""
        return torch.cat([server.handler._owned.clocks[0].weight_ED for server in self.servers])

    @property
    def versions(self):
        return torch.cat([server.handler._owned.clocks[0].version_E for server in self.servers])

    @property
    def flushed_versions(self):
        """Before the flush, with which versions begin at 0."""
        assert not self.versions.any()
        return torch.cat([self.last_versions[number] for number, _ in enumerate(self.servers)])

    def owners(self, rows):
        return self.ranks[0].groups[0].numbers.owners(rows)


def distinct_rows(rows) -> DistinctRows:
    rows_U = torch.as_tensor(rows).unique()
    positions = torch.arange(len(rows_U))
    ids = Ids(positions, torch.tensor([0, len(rows_U)]), None, [0], [0])
    return DistinctRows(ids, ((0, len(rows_U)),), rows_U)


def draw_batches(num_steps, num_ranks, num_rows=200, size=LINES // 2):
    generator = torch.Generator().manual_seed(0)
    return [[torch.randperm(num_rows, generator=generator)[:size] for _ in range(num_ranks)] for _ in range(num_steps)]


@pytest.mark.parametrize("sync", (EXACT, Bounded(2, 0, LINES), Bounded(0, 2, LINES), Bounded(2, 1, LINES)))
def test_a_row_pushed_and_read_in_one_step_is_updated_once(sync):
    """Defect a: the reply to HET's fused push and read had the pushed gradient, and the client added it again and
    counted it twice, so that copies overshot and the bound was looser than set."""
    run, rows, num_both = ServedRun(2, 2, sync), torch.tensor([3, 9, 150]), 0
    for step in range(12):
        for rank, read in enumerate(run.step([rows, rows])):
            other = read[:, 1 - rank]
            assert (read[:, rank] == step).all(), "own updates, each once"
            assert ((other <= step) & (other >= step - sync.pull - sync.push)).all()
        versions = [rank.groups[0].copies._version_L.max() for rank in run.ranks]
        assert max(versions) <= run.versions.max() and run.versions.max() <= 2 * (step + 1)
        num_both += sum(int(each.counts_R.min(0).values.min() > 0) for each in run.batches)
    assert num_both > 0, "rows were validated and pushed in one step"
    for read in run.evaluate(rows):
        assert (read == 12).all()
    versions = run.flushed_versions
    assert (versions[rows] == 24).all() and versions.sum() == 24 * len(rows)


@pytest.mark.parametrize("num_servers", (2, 3))
def test_evicted_rows_in_any_order_reach_their_own_servers(num_servers):
    """Defect b: HET merged evicted rows as if they were sorted, and split them by server with a binary search, so that
    gradients reached the wrong server or row."""
    run, num_unsorted, produced = ServedRun(2, num_servers, LATE), 0, torch.zeros(200, 2, dtype=torch.float64)
    for by_rank in draw_batches(30, 2):
        for rank, read in enumerate(run.step(by_rank)):
            assert torch.equal(read[:, rank], produced[by_rank[rank].unique(), rank])
        for rank, batch_ in enumerate(run.batches):
            produced[by_rank[rank], rank] += 1
            owners = run.owners(batch_.copies.overdue.rows_V)
            num_unsorted += int((owners.diff() < 0).any())
    assert num_unsorted > 20, "rows were evicted in another order than that of servers"
    run.evaluate([0])
    assert torch.equal(run.weight, produced) and torch.equal(run.flushed_versions, produced.sum(1).long())


@pytest.mark.parametrize("sync", (EXACT, Bounded(2, 1, LINES)))
def test_a_server_without_rows_of_a_batch_does_not_shift_the_others(sync):
    """Defect c: HET's loop over servers skipped one without rows before it advanced its offset, so that later servers
    got the rows of others."""
    run, produced = ServedRun(2, 3, sync, rows=90), torch.zeros(90, 2, dtype=torch.float64)
    by_server = [torch.tensor([1, 8]), torch.tensor([34, 35, 59]), torch.tensor([60, 77, 88, 89])]
    batches = [(0, 2), (2,), (1, 2), (), (0, 2), (0,), (1,), (0, 1, 2), (0, 2)]
    for step, chosen in enumerate(batches * 2):
        both = [
            torch.cat([torch.empty(0, dtype=torch.int64), *(by_server[i] for i in of_rank)])
            for of_rank in (chosen, batches[step % 4])
        ]
        for rank, read in enumerate(run.step(both)):
            assert torch.equal(read[:, rank], produced[both[rank], rank])
            assert (read[:, 1 - rank] <= produced[both[rank], 1 - rank]).all()
        for rank, rows in enumerate(both):
            produced[rows, rank] += 1
    every = torch.cat(by_server)
    for read in run.evaluate(every):
        assert torch.equal(read, produced[every])
    assert torch.equal(run.weight, produced)


@pytest.mark.parametrize("sync", (EXACT, LATE, Bounded(NEVER, 1, LINES)))
def test_a_row_that_was_evicted_and_is_read_again_has_all_own_updates(sync):
    """Defect d: HET put evicted rows with gradients in a list outside its lock and pushed them with the next update,
    so that a read before missed own updates."""
    run, first, second = ServedRun(2, 2, sync), torch.arange(80, 112), torch.arange(112, 144)
    num_evicted = 0
    for step in range(8):
        rows = first if step % 2 == 0 else second
        reads = run.step([rows, [0]])
        num_evicted += len(run.batches[0].copies.overdue.rows_V)
        assert (reads[0][:, 0] == step // 2).all()
        assert (reads[1] == torch.tensor([0, step])).all()
    assert num_evicted == (7 * LINES if sync.push else 0), "rows were evicted with updates"
    assert run.ranks[0].groups[0].copies.index.counts.evicted >= 7 * LINES
    run.evaluate([0])
    assert (run.weight[80:144, 0] == 4).all() and run.weight.sum() == 64 * 4 + 8


def test_ids_beyond_the_whole_numbers_of_float32_stay_apart():
    """Defect e: ids travelled as float32, in which those above 2^24 collide. Each server has more rows than that."""
    limit, num_rows = 1 << 24, 36_000_000
    offsets = torch.tensor([limit - 1, limit, limit + 1, limit + 2, limit + 3])
    rows = torch.cat([offsets, num_rows // 2 + offsets])
    run = ServedRun(1, 2, Bounded(NEVER, 1, LINES), rows=num_rows, dim=1, dtype="float32")
    values = torch.arange(1.0, 1 + len(rows)).unsqueeze(1)
    for step in range(3):
        (read,) = run.step([rows], lambda rank, rows: -values)
        assert torch.equal(read, step * values)
    (read,) = run.evaluate(rows)
    assert torch.equal(read, 3 * values)
    assert torch.equal(run.weight.nonzero()[:, 0], rows) and torch.equal(run.flushed_versions.nonzero()[:, 0], rows)


def test_row_numbers_beyond_2_to_31_and_2_to_53_stay_apart():
    """Defect e, where no memory holds the rows: their numbers, owners, copies, and messages to a server."""
    rows = torch.cat([(1 << bits) + torch.arange(-2, 3) for bits in (24, 31, 32, 53, 54)])
    _, _, layout = make_layout(1 << 55, 1, 3, EXACT, 1, "float64")
    (key,) = {group.bounded for groups in layout.served for group in groups}
    numbers = RowNumbers.number_rows(layout, layout.served, key)
    owners, local_rows = numbers.owners(rows), numbers.local_rows(rows)
    assert owners.unique().tolist() == [0, 1] and torch.equal(local_rows + owners * ((1 << 55) // 3), rows)
    (read,) = calls.parse_read(decoded(calls.read_call(0, [GroupRead(local_rows, local_rows)]).encode()))
    assert torch.equal(read.rows_A, local_rows) and torch.equal(read.versions_A, local_rows)
    copies, values = RowCopies(64, 1, SGD(1.0), NEVER, torch.float64), torch.arange(25.0).double().unsqueeze(1)
    found = copies.find_lines(rows, torch.ones_like(rows))
    assert (copies.versions(found) == NO_VERSION).all()
    ones = torch.ones(len(rows), dtype=torch.int64)
    copies.fill(found, NEVER * ones, ones.bool(), values, ones, SGD(1.0))
    copies.update(found, torch.zeros_like(values), SGD(1.0), 1)
    again = copies.find_lines(rows, torch.ones_like(rows))
    assert not again.is_expired_R.any() and torch.equal(copies.read(again), values)
    copies.update(again, -values, SGD(1.0), 2)
    pushed = copies.drop()
    order = pushed.rows_V.argsort()
    assert torch.equal(pushed.rows_V[order], rows) and torch.equal(pushed.sums_VD[order], -values)


def test_evaluation_on_every_rank_reads_the_updates_of_all_ranks():
    """Defect f: HET's validation read the server while updates were still in the caches of workers."""
    run, produced = ServedRun(3, 2, LATE), torch.zeros(200, 3, dtype=torch.float64)
    rows = torch.arange(0, 200, 10)
    for _ in range(2):
        for _ in range(5):
            run.step([rows, rows[::2], rows[::3]])
        before = produced.clone()
        for rank, stride in enumerate((1, 2, 3)):
            produced[rows[::stride], rank] += 5
        assert torch.equal(run.weight, before), "all updates are still in copies"
        for read in run.evaluate(rows):
            assert torch.equal(read, produced[rows])
        assert torch.equal(run.weight, produced)


@pytest.fixture
def servers(monkeypatch):
    """Two table servers in threads of this process."""
    stopped = threading.Event()
    monkeypatch.setattr(TableServer, "_log", lambda *_: stopped.is_set() and sys.exit())

    def serve(server):
        with suppress(SystemExit), closing(server):
            server.run(print)

    started = [TableServer() for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(serve, server) for server in started]
        yield started
        stopped.set()
    assert not any(future.exception() for future in futures)


def test_evaluation_state_and_checkpoints_have_every_update(servers, tmp_path):
    """Defect f: HET pushed nothing at the end of training or before a checkpoint, so that updates were lost."""

    def make_job(plan, mesh=None):
        return build(model, plan, mesh, optimizer=lambda p: torch.optim.SGD(p, 0.01))

    def num_updated():
        return sum(server._handler.served.updated for server in servers)

    def train(job, steps):
        """The number of updates that servers have got meanwhile."""
        before = num_updated()
        for _ in job.run(batch(step) for step in range(*steps)):
            pass
        return num_updated() - before

    results = []
    for num_servers in (0, 2):
        model = make_model(SGD(0.1))
        plan, mesh = single_plan(model), None
        if num_servers:
            plan = keep_on_servers(plan, dict.fromkeys(("t0", "t2"), Bounded(NEVER, NEVER, 320)), num_servers)
            mesh = mesh_for(plan, servers=TableServers(tuple(server.address for server in servers)))
        job = make_job(plan, mesh)
        pushed = [train(job, (0, 10))]
        logits = [out.logits for out in job.evaluate([batch(100)])]
        pushed.append(num_updated() - pushed[0])
        pushed.append(train(job, (10, 13)))
        path, state = job.save(str(tmp_path / str(num_servers))), job.state().tensors
        pushed.append(num_updated() - sum(pushed))
        if mesh is not None:
            mesh.close()
            assert pushed[0] < 20 < 200 < pushed[1] and pushed[2] < 20 < 80 < pushed[3], "updates were in copies"
        model = make_model(SGD(0.1))
        loaded = make_job(single_plan(model))
        loaded.load(path)
        results += [(logits, state), (logits, loaded.state().tensors)]
    for logits, tensors in results[1:]:
        torch.testing.assert_close(logits, results[0][0], rtol=0, atol=1e-10)
        assert_same(tensors, results[0][1])


OPTIMIZERS = (
    SGD(0.1),
    SGD(0.1, momentum=0.9),
    AdaGrad(0.1),
    RowWiseAdaGrad(0.1),
    Adam(0.1),
    PartialRowWiseAdam(0.1),
    LAMB(0.1),
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_of_tables_on_servers_is_applied(optimizer):
    """Defect g: HET's sparse optimizers never reached the server, whose cache knew SGD of a constant rate only. Here
    the rate changes with each step."""
    run, generator = ServedRun(3, 2, EXACT, optimizer, dim=4), torch.Generator().manual_seed(1)
    weight = torch.zeros(200, 4, dtype=torch.float64)
    state = {name: torch.zeros(shape).double() for name, shape in state_shapes(optimizer, 200, 4).items()}
    for step, by_rank in enumerate(draw_batches(12, 3, num_rows=60)):
        grads = [torch.randn(len(rows), 4, dtype=torch.float64, generator=generator) for rows in by_rank]
        run.optimizer = replace(optimizer, lr=0.1 / (step + 1))
        for rows, read in zip(by_rank, run.step(by_rank, lambda rank, _, g=grads: g[rank]), strict=True):
            torch.testing.assert_close(read, weight[rows.unique()], rtol=1e-12, atol=1e-12)
        summed = reference.sum_by_row(torch.cat([rows.unique() for rows in by_rank]), torch.cat(grads))
        reference.update(run.optimizer, weight, state, summed, step=step + 1)
    torch.testing.assert_close(run.weight, weight, rtol=1e-12, atol=1e-12)
    for name, part in state.items():
        parts = [server.handler._owned.clocks[0].state[name] for server in run.servers]
        torch.testing.assert_close(torch.cat(parts), part, rtol=1e-12, atol=1e-12)
    assert (weight[:60] != 0).all() and not weight[60:].any()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_settings_that_servers_do_not_apply_are_refused(optimizer, servers):
    """Defect g, where a setting could be ignored."""
    for setting in ("clip", "weight_decay"):
        model = make_model(replace(optimizer, **{setting: 0.1}))
        plan = keep_on_servers(single_plan(model), {"t0": Bounded(0, 0, 320)}, servers=2)
        mesh = mesh_for(plan, servers=TableServers(tuple(server.address for server in servers)))
        with pytest.raises(UserError, match=setting):
            build(model, plan, mesh, optimizer=lambda p: torch.optim.SGD(p, 0.01))
        mesh.close()
