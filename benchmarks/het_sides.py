"""The sides of benchmarks.het_servers and benchmarks.het_graphs: what the workers and the server's host run."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

from benchmarks.het import DIM, train_turns
from benchmarks.turns import TurnServer, make_broadcast

FIRST_PORT = 5800
TIMEOUT_SECONDS = 3600.0
BASE = "no cache"
DENSE = "dense"  # table and feature of dense parameters that are on the server


@dataclass(frozen=True, slots=True)
class Side:
    """Tables on a server. `bound`: of pull and push. `on_workers`: instead of copies, the workers own the rows."""

    bound: int = 0
    has_copies: bool = True
    removes_duplicates: bool = True
    has_dense: bool = False  # the server has the dense parameters too
    follows_het: bool = False
    on_workers: bool = False


class Task(Protocol):
    """Interface of what all sides train; its repr makes it again in the workers.

    `copies`: rows of each table, on each worker; `memory_share`: of the rows that workers own, in memory.
    """

    @property
    def name(self) -> str: ...

    @property
    def memory_share(self) -> float: ...

    @property
    def copies(self) -> dict[str, int]: ...

    def make_model(self) -> Any:
        """The model on the meta device."""
        ...

    def make_batches(self, rank: int) -> list[Any]: ...

    def make_example(self) -> Any:
        """A global batch."""
        ...

    def make_problem(self, cluster: Any) -> Any:
        """What the planner knows."""
        ...

    def hottest(self) -> dict[str, Any]:
        """Rows by table, most frequent first, as arrays."""
        ...


SERVED = {
    "all on the server": Side(has_copies=False, removes_duplicates=False, has_dense=True),
    "no duplicates removed": Side(has_copies=False, removes_duplicates=False),
    BASE: Side(has_copies=False),
    "no cache A/A": Side(has_copies=False),
    "HET's protocol 100": Side(100, follows_het=True),
    "exact, copies": Side(),
    "exact, rows on workers": Side(on_workers=True),
    "bounded 10": Side(10),
    "bounded 100": Side(100),
}
SIDES = (*SERVED, "sharded")


def serve(folder: str) -> None:
    """Body of the server's host, the last: a table server for each side, since each serves one run."""
    from threading import Thread

    from shardwright.embeddings.service import server
    from shardwright.lab.network import rank_address

    server.check_address = lambda *_: None  # the lab's network is on this machine
    for number, _ in enumerate(SERVED):
        table_server = server.TableServer(f"tcp://{rank_address(int(os.environ['RANK']))}:{FIRST_PORT + number}")
        Thread(target=table_server.run, args=(lambda line: None,), daemon=True).start()
    while not Path(folder, "ended").exists():
        time.sleep(0.5)


def keep_no_copies(served: Any) -> None:
    """Change tables on a server so that all distinct rows of a batch are read."""
    from shardwright.embeddings.copies.row_copies import NO_VERSION

    def forget() -> None:
        for group in served.groups:
            group.copies._version_L.fill_(NO_VERSION)
            group.copies._lease_end_L.fill_(-1)

    served.update = _followed_by(served.update, forget)


def _followed_by(update: Callable[..., None], then: Callable[[], None]) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        update(*arguments)
        then()

    return run


def uses_by_group(served: Any, distinct: Any) -> list[Any]:
    """By group of tables, how often a batch uses each of its distinct rows."""
    import torch

    by_table = distinct.uses_by_table()
    return [torch.cat([by_table[position] for position in positions]) for positions in served._positions]


def follow_het(served: Any) -> None:
    """Change tables on a server so that copies follow HET's released code, which validates every copy in every
    batch."""

    def forget_leases() -> None:
        for group in served.groups:
            group.copies._lease_end_L.fill_(-1)

    served.update = _followed_by(served.update, forget_leases)


def keep_duplicates(served: Any) -> None:
    """Change tables on a server, of which no copies are kept, so that a row is read and pushed for each id."""
    from dataclasses import replace

    import torch

    from shardwright.comm.pending import Pending
    from shardwright.embeddings.copies.row_copies import NO_VERSION
    from shardwright.embeddings.copies.updates import RowUpdates
    from shardwright.embeddings.service import calls
    from shardwright.embeddings.service.owned_rows import GroupRead

    find, push = served.find_copies, served._push
    uses: list[Any] = []

    def find_copies(distinct: Any, *, training: bool) -> Any:
        uses[:] = uses_by_group(served, distinct)
        return find(distinct, training=training)

    def fetch(batches: Any) -> Any:
        reads = []
        for group, batch, uses_U in zip(served.groups, batches, uses, strict=True):
            rows = group.numbers.local_rows(batch.rows_U).repeat_interleave(uses_U)
            reads.append(GroupRead(rows, torch.full_like(rows, NO_VERSION)))
        reply = served.connections[0].call(calls.read_call(served._round, reads))

        def receive() -> None:
            answers = calls.parse_answer(reply.wait())
            served._confirm()
            for group, batch, uses_U, (renewals, values) in zip(served.groups, batches, uses, answers, strict=True):
                first = uses_U.cumsum(0) - uses_U
                group.receive_renewals(batch, renewals[first])
                batch.values_FX = values[first]

        return Pending(receive)

    def push_each(by_group: Any, optimizer: Any, steps: Any, *, is_last: bool = False) -> None:
        repeated = []
        for (pushed,), uses_U in zip(by_group, uses, strict=True):
            sums_VD, ones_V = pushed.sums_VD / uses_U.unsqueeze(1), torch.ones_like(uses_U)
            each = replace(pushed, sums_VD=sums_VD, uses_V=ones_V)
            repeated.append([RowUpdates(*(column.repeat_interleave(uses_U, 0) for column in each.columns))])
        push(repeated, optimizer, steps, is_last=is_last)

    served.find_copies, served.fetch, served._push = find_copies, fetch, push_each


def make_dense_from_server(task: Task) -> Any:
    """The model on the meta device, with its dense parameters in rows of a table: each step reads all of them."""
    import torch
    from torch import nn

    from shardwright.layers.embedding import EmbeddingBags
    from shardwright.spec.workload import Feature, Table

    model = task.make_model()
    sparse, dense = model.sparse, model.dense
    shapes = {key: parameter.shape for key, parameter in dense.named_parameters()}
    sizes = [prod(shape) for shape in shapes.values()]
    rows = -(-sum(sizes) // DIM)

    class DenseRows(nn.Module):
        """The dense model, whose parameters come with the vectors."""

        def forward(self, batch: Any, vectors: Any) -> Any:
            values = vectors[DENSE].flatten().split([*sizes, rows * DIM - sum(sizes)])
            parameters = {key: part.view(shape) for (key, shape), part in zip(shapes.items(), values, strict=False)}
            return torch.func.functional_call(dense, parameters, (batch, vectors))

    tables = [*sparse.tables, Table(DENSE, rows, DIM)]
    features = [*sparse.features, Feature(DENSE, DENSE, pooling="none")]
    with torch.device("meta"):
        model.sparse, model.dense = EmbeddingBags(tables, features, sparse.optimizer), DenseRows()
    return model


def with_dense_rows(batch: Any, rows: int) -> Any:
    """The batch with a feature that reads all dense parameters."""
    from dataclasses import replace

    import torch

    from shardwright.jagged import Jagged

    ids, lengths = batch.features, torch.zeros(1, batch.features.batch_size, dtype=torch.int64)
    lengths[0, 0] = rows
    values = torch.cat([ids.values, torch.arange(rows)])
    features = Jagged((*ids.features, DENSE), values, torch.cat([ids.lengths, lengths]))
    return replace(batch, features=features)


def make_plan(task: Task, side: str, model: Any, exact: Any, cluster: Any) -> Any:
    """The plan of a side; `exact`: the planner's."""
    from shardwright import Bounded, keep_on_servers
    from shardwright.measure.describe import describe
    from shardwright.planner import plan as planner

    if side not in SERVED:
        return exact
    own, plan = SERVED[side], exact
    if own.has_dense:
        batch = with_dense_rows(task.make_example(), model.sparse.tables[-1].rows)
        plan = planner.make_plan(describe(model, batch), cluster).plan
    if own.on_workers:
        shard_rows = {t.table: max(rect.rows[1] - rect.rows[0] for rect in t.rects) for t in plan.tables}
        largest = max(shard_rows.values())  # a batch has most rows of a small table, which stays in memory
        memory = {name: int(rows * task.memory_share) for name, rows in shard_rows.items() if rows >= largest / 10}
        return keep_on_servers(plan, memory)
    rows = task.copies | {DENSE: max(task.copies.values())}
    return keep_on_servers(plan, {each.table: Bounded(own.bound, own.bound, rows[each.table]) for each in plan.tables})


def predict(task: Task, cluster: Any) -> dict[str, float]:
    """Milliseconds of a step of the sides whose tables have copies on the workers, by side; empty for one worker, of
    whose link to the server a measured cluster knows nothing."""
    from shardwright.planner.plan import make_plan as plan_tables
    from shardwright.planner.reprice import reprice_plan

    problem, milliseconds = task.make_problem(cluster), dict[str, float]()
    exact = plan_tables(problem.workload, cluster).plan
    for side, own in SERVED.items() if cluster.num_ranks > 1 else ():
        if own.has_copies and not own.on_workers and not own.follows_het:
            plan = make_plan(task, side, None, exact, cluster)
            milliseconds[side] = 1e3 * reprice_plan(problem, plan).seconds
    return milliseconds


def predict_no_cache(task: Task, cluster: Any) -> float:
    """Milliseconds of a step with a copy of one row of each table, so that nearly all rows are sent in each batch."""
    from shardwright import Bounded, keep_on_servers
    from shardwright.planner.plan import make_plan as plan_tables
    from shardwright.planner.reprice import reprice_plan

    problem = task.make_problem(cluster)
    exact = plan_tables(problem.workload, cluster).plan
    plan = keep_on_servers(exact, {table.table: Bounded(0, 0, 1) for table in exact.tables})
    return 1e3 * reprice_plan(problem, plan).seconds


def build_job(task: Task, side: str, exact: Any, cluster: Any) -> tuple[Any, Any]:
    """The job of a worker, and its mesh."""
    import torch

    from shardwright import TableServers
    from shardwright.comm.transport import keys
    from shardwright.lab.network import rank_address
    from shardwright.runtime.build import build
    from shardwright.runtime.dense_layout import mesh_for

    keys.check_address = lambda *_: None
    own = SERVED.get(side)
    model = make_dense_from_server(task) if own is not None and own.has_dense else task.make_model()
    plan, connections = make_plan(task, side, model, exact, cluster), None
    if own is not None:
        address = f"tcp://{rank_address(cluster.num_ranks)}:{FIRST_PORT + [*SERVED].index(side)}"
        connections = TableServers((address,), timeout_seconds=TIMEOUT_SECONDS)
    mesh = mesh_for(plan, TIMEOUT_SECONDS, connections)
    hottest = {name: torch.from_numpy(rows) for name, rows in task.hottest().items()}
    optimizer = lambda parameters: torch.optim.SGD(parameters, 0.01)  # noqa: E731
    job = build(model, plan, mesh, optimizer=optimizer, hottest=hottest)
    if own is not None and not own.on_workers:
        changes = [follow_het] * own.follows_het
        changes += [keep_no_copies] * (not own.has_copies) + [keep_duplicates] * (not own.removes_duplicates)
        for change in changes:
            change(model.sparse.exchange.served)
    return job, mesh


def worker(folder: str, task: Task, cluster_file: str, sides: Sequence[str]) -> None:
    """Body of every host."""
    workers = int(os.environ["WORLD_SIZE"]) - 1
    if os.environ["RANK"] == str(workers):
        serve(folder)
        return
    os.environ["WORLD_SIZE"] = os.environ["GROUP_WORLD_SIZE"] = str(workers)
    from itertools import cycle

    from shardwright.planner.plan import make_plan as plan_tables
    from shardwright.spec import presets

    cluster = presets.load_cluster(cluster_file)
    exact = plan_tables(task.make_problem(cluster).workload, cluster).plan
    built = {side: build_job(task, side, exact, cluster) for side in sides}
    mesh = built[sides[0]][1]
    group, rank = mesh.group(), mesh.rank
    batches = task.make_batches(rank)
    jobs, runs = {side: job for side, (job, _) in built.items()}, {}
    for side, job in jobs.items():
        own = SERVED.get(side)
        has_dense = own is not None and own.has_dense
        rows = job.model.sparse.tables[-1].rows if has_dense else 0
        runs[side] = job.run(cycle([with_dense_rows(batch, rows) for batch in batches] if has_dense else batches))
    train_turns(TurnServer(folder, "ours", rank, make_broadcast(group)), jobs, runs, group)
    if rank == 0:
        Path(folder, "ended").touch()
    for _, each in built.values():
        each.close()
