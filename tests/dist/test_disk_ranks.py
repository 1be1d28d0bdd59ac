"""Tables with rows on disk or on table servers train, over ranks, to the bit like tables in memory."""

from contextlib import ExitStack
from itertools import product

import pytest
import torch
from table_servers import ServerProcess
from test_steps import SIZE, batch, make_model, shard_plan, single_plan, take

from shardwright.comm.transport.servers import TableServers
from shardwright.runtime.build import build
from shardwright.runtime.dense_layout import mesh_for
from shardwright.runtime.placements import keep_on_disk, keep_on_servers
from shardwright.spec.optimizer import Adam, RowWiseAdaGrad
from shardwright.spec.plan import Placement, Plan, Rect, Share, TablePlan

STEPS = 12
LINES = {1: 160, 2: 96, 3: 64}  # by number of ranks; batches in flight need almost as many


MEMORY, DISK = (), ("disk",)  # where rows are; or addresses of table servers


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers, of one run after another; the first has a journal."""
    with ExitStack() as stack:
        processes = [ServerProcess(tmp_path_factory.mktemp("journal")), ServerProcess()]
        for process in processes:
            stack.callback(process.stop)
        yield tuple(process.address for process in processes)


def build_job(model, plan: Plan, lines: int, where: tuple[str, ...]):
    """A job whose table t2 has so many rows in memory, and the others there."""
    optimizer = lambda p: torch.optim.Adam(p, 0.01)  # noqa: E731
    if where in (MEMORY, DISK):
        return build(model, keep_on_disk(plan, {"t2": lines}) if where else plan, optimizer=optimizer)
    plan = keep_on_servers(plan, {"t2": lines}, len(where))
    return build(model, plan, mesh_for(plan, servers=TableServers(where)), optimizer=optimizer)


def by_rows(world: int, name: str, rows: int, order: str, travel) -> TablePlan:
    rects = tuple(Rect(name, (rows * r // world, rows * (r + 1) // world), (0, 8), (r,)) for r in range(world))
    return TablePlan(name, order, rects, Placement((Share("dram"),)), travel)


def by_columns(world: int, name: str, rows: int) -> TablePlan:
    rects = tuple(Rect(name, (0, rows), (8 * r // world, 8 * (r + 1) // world), (r,)) for r in range(world))
    return TablePlan(name, "hash:5", rects, Placement((Share("dram"),)))


def table_plans(world: int, scheme: str) -> list[TablePlan]:
    """One table on every rank, one by rows; the last, on disk, by rows or by columns."""
    whole, travel = Rect("t1", (0, 7), (0, 8), tuple(range(world))), "rows" if scheme == "row exchange" else "vectors"
    return [
        by_rows(world, "t0", 40, "id", "vectors"),
        TablePlan("t1", "id", (whole,), Placement((Share("dram"),))),
        by_columns(world, "t2", 300) if scheme == "columns" else by_rows(world, "t2", 300, "hash:5", travel),
    ]


def train(world: int, optimizer, dtype: str, scheme: str, folder, where: tuple[str, ...]):
    """Run on a rank: losses in training and evaluation, and the state, which is also saved and loaded."""
    model = make_model(optimizer, dtype)
    own = getattr(torch, dtype)
    plan = shard_plan(single_plan(model, batch(0, dtype=own)), world, "vectors", dtype, table_plans(world, scheme))
    lines = LINES[1 if scheme == "columns" else world]
    job = build_job(model, plan, lines, where)
    start, stop = SIZE * job.mesh.rank // world, SIZE * (job.mesh.rank + 1) // world
    batches = [take(batch(step, dtype=own), start, stop) for step in range(STEPS)]
    if where and job.mesh.rank:  # the same rows are on other lines than on rank 0
        for cached in (each for local in job.model.sparse.exchange.local_shards for each in local.caches.values()):
            rows = torch.arange(30)
            lines = cached.index.place(rows).lines_U
            cached.row_of_L[lines] = rows
            cached.store.read(rows, lines, cached.parts_L)
            cached.index.release(lines, written=False)
    losses = [out.loss for out in job.run(batches[: STEPS // 2])]
    job.save(folder)
    losses += [out.loss for out in job.evaluate(batches[:2])]
    losses += [out.loss for out in job.run(batches[STEPS // 2 :])]
    first = job.state().tensors
    job.load(folder / f"step-{STEPS // 2:08}")
    losses += [out.loss for out in job.run(batches[STEPS // 2 :])]
    second, counts = job.state().tensors, job.cache_counts()
    job.mesh.close()
    states = [{name: x for name, x in state.items() if not x.is_meta} for state in (first, second)]
    return losses, states, counts


def train_in_own_loop(world: int, where: tuple[str, ...]):
    """Losses of a user training loop, in which some batches have no backward pass, and the final tables."""
    model = make_model(Adam(0.01))
    plan = shard_plan(single_plan(model, batch(0)), world, "vectors", "float64", table_plans(world, "rows"))
    job = build_job(model, plan, LINES[world], where)
    start, stop = SIZE * job.mesh.rank // world, SIZE * (job.mesh.rank + 1) // world
    losses = []
    for step, local in enumerate(job.loader(take(batch(step), start, stop) for step in range(STEPS))):
        loss = job.model.loss(job.model(local), local)
        losses.append(loss.detach())
        with torch.no_grad():
            losses.append(job.model(take(batch(step + 50), start, stop)))
        if step % 4 != 2:
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()
    state, counts = job.state().tensors, job.cache_counts()
    job.mesh.close()
    return losses, {name: x for name, x in state.items() if not x.is_meta}, counts


@pytest.mark.parametrize(("world", "num_servers"), ((1, 0), (2, 0), (2, 2)))
def test_a_user_loop_equals_one_with_tables_in_memory(ranks, servers, world, num_servers):
    there = servers[:num_servers] or DISK
    memory, disk = (ranks.run(world, train_in_own_loop, world, where) for where in (MEMORY, there))
    for (losses, state, _), (losses_disk, state_disk, counts) in zip(memory, disk, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(losses, losses_disk, strict=True))
        assert state.keys() == state_disk.keys() and all(torch.equal(state[name], state_disk[name]) for name in state)
        assert counts["t2"].missing > 0


@pytest.mark.parametrize(
    ("world", "scheme", "num_servers"),
    (
        *product((1, 2, 3), ("rows", "row exchange"), (0,)),
        *((world, "columns", 0) for world in (2, 3)),
        *((1, "rows", 1), (2, "columns", 1), (3, "rows", 2), (2, "row exchange", 2)),
    ),
)
@pytest.mark.parametrize("optimizer", (RowWiseAdaGrad(0.1), Adam(0.01)), ids=lambda optimizer: optimizer.kind)
def test_training_equals_tables_in_memory(ranks, servers, tmp_path, world, scheme, num_servers, optimizer):
    dtype, there = "float32" if world == 2 else "float64", servers[:num_servers] or DISK
    memory, disk = (
        ranks.run(world, train, world, optimizer, dtype, scheme, tmp_path / str(bool(where)), where)
        for where in (MEMORY, there)
    )
    for (losses, states, no_counts), (losses_disk, states_disk, counts) in zip(memory, disk, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(losses, losses_disk, strict=True))
        for state, state_disk in zip(states, states_disk, strict=True):
            assert state.keys() == state_disk.keys()
            assert all(torch.equal(state[name], state_disk[name]) for name in state)
        assert not no_counts and [*counts] == ["t2"]
        assert counts["t2"].rows > counts["t2"].missing > 0
        assert counts["t2"].written_back > 0 or world > 1
