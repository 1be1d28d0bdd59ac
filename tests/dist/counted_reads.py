"""Runs that count which updates a read misses, with drawn streams, windows, cache sizes, delays and faults.

Each rank adds the uses of a row to its own column of that row. So a read shows which updates of each rank it has.

Shape legend: B samples, E rows of the table, W ranks, S steps.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from server_faults import ChangedMessages, failing_link, read_progress, wait_for_progress, write_number
from table_servers import ServerProcess
from test_bounded_ranks import bounded_plan
from test_served_ranks import served_plan
from torch import Tensor, nn

from shardwright.comm.mesh import Group
from shardwright.comm.transport.servers import TableServers
from shardwright.jagged import Batch, Jagged
from shardwright.layers.embedding import EmbeddingBags
from shardwright.measure.describe import describe
from shardwright.planner.step.stages import OVERLAPPED, step_stages, with_copies
from shardwright.runtime.build import build
from shardwright.runtime.dense_layout import mesh_for
from shardwright.runtime.planning import plan_single_process
from shardwright.spec.optimizer import SGD
from shardwright.spec.plan import Bounded, Plan
from shardwright.spec.workload import Feature, Table

SAMPLES = 8  # of each rank's batch
RANKS, SERVERS = "ranks", "servers"  # that own the rows
SLACK = 2  # steps within which a fault happens after it is due
CUT_SECONDS, DELAY_SECONDS, WAIT_SECONDS = 0.3, 0.01, 120.0
MESSAGE_SHARE = 0.04  # of messages with each fault
EPSILON = 1e-6


@dataclass(frozen=True)
class Fault:
    """After `step` and some `seconds`, kill a server and start it again, or cut the link to it."""

    step: int
    seconds: float
    kind: str  # "killed" or "cut"
    server: int


@dataclass(frozen=True)
class Case:
    """`window`: batches that are read and announced earlier than usual; None: stages run one after another.
    `repeats`: a batch may have an id several times. `delayed`: the share of messages between ranks, and of batches,
    that are late. `messages`: faults of messages between ranks and servers."""

    owners: str
    world: int
    sync: Bounded
    num_rows: int = 60
    num_steps: int = 12
    exponent: float = 1.0
    repeats: bool = False
    seed: int = 0
    window: int | None = None
    ids_after: str = "read"
    delayed: float = 0.0
    messages: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = field(default=())

    def batches(self) -> list[list[Tensor]]:
        """The rows of each step, by rank."""
        generator = torch.Generator().manual_seed(self.seed)
        popularity = torch.arange(1.0, self.num_rows + 1) ** -self.exponent

        def draw() -> Tensor:
            return torch.multinomial(popularity, SAMPLES, self.repeats, generator=generator)

        return [[draw() for _ in range(self.world)] for _ in range(self.num_steps)]

    def plan(self, single: Plan, num_servers: int) -> Plan:
        if self.owners == SERVERS:
            plan = served_plan(single, self.world, self.sync, ("t",), num_servers)
        else:
            plan = bounded_plan(single, self.world, self.sync)
        leads = {name: lead + (self.window or 0) for name, lead in OVERLAPPED.items()}
        stages = step_stages(leads=leads, ids_after=self.ids_after)
        return replace(plan, stages=with_copies(stages, of_servers=self.owners == SERVERS))


@st.composite
def cases(draw: Callable[..., Any], owners: str) -> Case:
    num_steps = draw(st.integers(SLACK + 2, 25))
    faults, messages = (), ()
    if owners == SERVERS:
        fault = st.builds(
            Fault,
            st.integers(0, num_steps - SLACK - 1),
            st.floats(0.0, 0.05),
            st.sampled_from(("cut", "killed")),
            st.integers(0, 1),
        )
        faults = tuple(sorted(draw(st.lists(fault, max_size=2)), key=lambda each: each.step))
        messages = tuple(draw(st.sets(st.sampled_from(("doubled", "delayed", "lost")))))
    least_push = 1 if owners == RANKS else 0  # ranks without staleness have no copies
    sync = Bounded(
        draw(st.sampled_from((0, 1, 5, 20, 100))),
        draw(st.sampled_from((least_push, 1, 3, 100))),
        draw(st.sampled_from((32, 64, 256))),
    )
    return Case(
        owners,
        draw(st.sampled_from((2, 3, 4))),
        sync,
        draw(st.sampled_from((60, 200))),
        num_steps,
        draw(st.sampled_from((0.0, 1.0, 2.0))),
        draw(st.booleans()),
        draw(st.integers(0, 2**31)),
        draw(st.sampled_from((None, 0, 1, 3))),
        draw(st.sampled_from(("read", "vectors", "gradients"))),
        draw(st.sampled_from((0.0, 0.1, 0.5))),
        messages,
        faults,
    )


# Cases that hypothesis need not find: with every fault.
EVERY_FAULT = {
    RANKS: Case(RANKS, 3, Bounded(5, 3, 32), 200, 25, repeats=True, window=3, delayed=0.5),
    SERVERS: Case(
        SERVERS,
        3,
        Bounded(5, 3, 32),
        200,
        16,
        repeats=True,
        window=1,
        delayed=0.5,
        messages=("doubled", "delayed", "lost"),
        faults=(Fault(4, 0.02, "killed", 0), Fault(10, 0.01, "cut", 1)),
    ),
}
FAULTS = {RANKS: ("late",), SERVERS: ("late", "doubled", "delayed", "lost", "cut", "killed")}


class Delays:
    """Sleeps in a share of calls."""

    def __init__(self, share: float, chance: random.Random) -> None:
        self._share, self._chance, self.num = share, chance, 0

    def sleep(self) -> None:
        if self._chance.random() < self._share:
            self.num += 1
            time.sleep(DELAY_SECONDS * self._chance.random())

    @contextmanager
    def of_messages(self) -> Iterator[None]:
        """Inside, messages to other ranks are late."""
        send = Group.send

        def send_late(group: Group, member: int, x: Tensor) -> Any:
            self.sleep()
            return send(group, member, x)

        Group.send = send_late
        try:
            yield
        finally:
            Group.send = send


class NegativeMean(nn.Module):
    def forward(self, logits, batch):
        return -logits.mean()


class Reader(nn.Module):
    """The gradient of a row is its uses, in the column of the rank; keeps what it reads."""

    def __init__(self, rank: int, delays: Delays) -> None:
        super().__init__()
        self.rank, self.delays, self.reads = rank, delays, []
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, batch, vectors):
        if self.training:
            self.delays.sleep()
            self.reads.append((batch.features.values.clone(), vectors.pooled_BD.detach().clone()))
        return vectors.pooled_BD[:, self.rank] + 0 * self.scale


class ReadingModel(nn.Module):
    def __init__(self, case: Case, dense: Reader) -> None:
        super().__init__()
        table = Table("t", case.num_rows, case.world, "float64")
        self.sparse = EmbeddingBags([table], [Feature("f", "t")], SGD(float(SAMPLES * case.world)))
        with torch.no_grad():
            self.sparse.weight("t").zero_()
        self.dense, self.loss = dense, NegativeMean()

    def forward(self, batch):
        return self.dense(batch, self.sparse(batch))


def click_batch(rows: Tensor) -> Batch:
    num = len(rows)
    label = torch.zeros(num, dtype=torch.float64)
    return Batch(Jagged(("f",), rows, torch.ones(1, num, dtype=torch.int64)), None, {"click": label})


def count_reads(case: Case, addresses: Sequence[str], folder: str) -> tuple[list[Any], Tensor | None, int]:
    """Run on a rank: the reads of this rank, the table at the end on rank 0, and how many delays there were."""
    rank, batches = int(os.environ["RANK"]), case.batches()
    delays = Delays(case.delayed, random.Random(f"{case.seed} {rank}"))
    model = ReadingModel(case, Reader(rank, delays))
    single = plan_single_process(model, describe(model, click_batch(batches[0][0])), ())
    plan = case.plan(single, len(addresses))
    mesh = mesh_for(plan, servers=TableServers(tuple(addresses)) if addresses else None)

    def local_batches() -> Iterator[Batch]:
        for by_rank in batches:
            delays.sleep()
            yield click_batch(by_rank[rank])

    with delays.of_messages():
        job = build(model, plan, mesh, optimizer=lambda p: torch.optim.SGD(p, 0.0), overlap=case.window is not None)
        for _ in job.run(local_batches()):
            if rank == 0:
                write_number(Path(folder, "progress"), job.step)
                due = sum(fault.step + SLACK <= job.step for fault in case.faults)
                wait_for_progress(Path(folder, "faults"), due, WAIT_SECONDS)
        weight = next(value for name, value in job.state().tensors.items() if name.endswith("t.weight"))
    mesh.close()
    return model.dense.reads, None if weight.is_meta else weight, delays.num


def run_case(ranks: Any, case: Case, processes: Sequence[ServerProcess], folder: Path) -> tuple[list[Any], Counter]:
    """The answers of `count_reads`, and how often each fault has fired."""
    fired, chance = Counter(), random.Random(case.seed)
    shares = dict.fromkeys(case.messages, MESSAGE_SHARE)
    progress, num_done = folder / "progress", folder / "faults"
    write_number(progress, -1)
    write_number(num_done, 0)
    with ExitStack() as stack:

        def make_filter(to_server: bool) -> ChangedMessages:
            return ChangedMessages(chance, fired, shares)

        links = [stack.enter_context(failing_link(each.address, make_filter)) for each in processes]

        def disturb() -> None:
            for number, fault in enumerate(case.faults):
                wait_for_progress(progress, fault.step, WAIT_SECONDS)
                time.sleep(fault.seconds)
                if fault.kind == "cut":
                    links[fault.server].cut(CUT_SECONDS)
                else:
                    processes[fault.server].kill()
                    processes[fault.server].start()
                assert read_progress(progress) < case.num_steps, "in the run"
                fired[fault.kind] += 1
                write_number(num_done, number + 1)

        with ThreadPoolExecutor(1) as executor:
            future = executor.submit(disturb)
            answers = ranks.run(case.world, count_reads, case, [link.address for link in links], str(folder))
            future.result(WAIT_SECONDS)
    for number in {fault.server for fault in case.faults if fault.kind == "killed"}:
        processes[number].start_anew()
    assert fired["cut"] + fired["killed"] == len(case.faults)
    fired["late"] += sum(delays for *_, delays in answers)
    return answers, fired


def assert_within_bound(case: Case, answers: Sequence[Any]) -> None:
    """Each read has the first updates of each rank, all of the reader's own, and misses at most pull + (N - 1) x push
    of the others'; no update is lost or applied twice."""
    uses_SEW, updates_SEW = (torch.zeros(case.num_steps + 1, case.num_rows, case.world) for _ in range(2))
    for step, by_rank in enumerate(case.batches()):
        for rank, rows_B in enumerate(by_rank):
            uses_E = torch.bincount(rows_B, minlength=case.num_rows)
            uses_SEW[step + 1 :, :, rank] += uses_E
            updates_SEW[step + 1 :, :, rank] += uses_E > 0
            read_rows_B, read_BW = answers[rank][0][step]
            assert torch.equal(read_rows_B, rows_B)
    for step, by_rank in enumerate(case.batches()):
        for rank, rows_B in enumerate(by_rank):
            read_BW = answers[rank][0][step][1]
            produced_SBW = uses_SEW[: step + 1, rows_B]
            last_seen_BW = (produced_SBW <= read_BW + EPSILON).sum(0) - 1
            assert last_seen_BW.min() >= 0
            seen_BW = produced_SBW.gather(0, last_seen_BW[None])[0]
            assert (seen_BW - read_BW).abs().max() < EPSILON, "a part of an update, or one before an earlier one"
            seen_updates_BW = updates_SEW[: step + 1, rows_B].gather(0, last_seen_BW[None])[0]
            missed_BW = updates_SEW[step, rows_B] - seen_updates_BW
            assert missed_BW[:, rank].max() == 0, "of the reader's own"
            assert missed_BW.sum(1).max() <= case.sync.pull + (case.world - 1) * case.sync.push
    torch.testing.assert_close(answers[0][1].float(), uses_SEW[-1], rtol=0, atol=1e-5)
