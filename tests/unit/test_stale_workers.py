"""The simulation of benchmarks/het_quality.py equals the product's rules, training in one process, and plain loops."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import stale_workers
from benchmarks.het_quality import Case, Clicks, Samples, make_workers, training_samples
from benchmarks.stale_workers import AsynchronousRows, BoundedRows, HetRows, find_reads
from shardwright.embeddings.copies import row_copies
from shardwright.embeddings.copies.row_clocks import RowClocks
from shardwright.embeddings.copies.row_copies import Lease, RowCopies, row_values
from shardwright.embeddings.copies.updates import RowUpdates
from shardwright.spec.optimizer import SGD

ROWS, DIM, RATE = 24, 2, 0.5
SERVERS = -1  # owner of rows that no worker owns
CASE = Case("het_wide_deep", steps=12, rows=50, hidden=8, num_workers=4, local_batch=16, dtype=torch.float64)


class ProductWorkers:
    """The classes of the product, in lockstep. Rows that a worker owns are read and updated without a copy."""

    def __init__(self, weight_ED, num_workers, bounds, owner_E):
        pull, push = bounds
        self.optimizer, self.owner_E = SGD(RATE), owner_E
        self.clocks = RowClocks(weight_ED, {}, Lease(pull, num_workers - 1))
        self.copies = [RowCopies(32, DIM, self.optimizer, push, torch.float64) for _ in range(num_workers)]

    def train(self, rows_by_worker, uses_by_worker, grads):
        """Returns what each worker reads. `grads`: of its rows."""
        is_own = [self.owner_E[rows] == worker for worker, rows in enumerate(rows_by_worker)]
        in_use = [
            copies.find_lines(rows[~own], uses[~own])
            for copies, rows, uses, own in zip(self.copies, rows_by_worker, uses_by_worker, is_own, strict=True)
        ]
        values = []
        for copies, batch, rows, own in zip(self.copies, in_use, rows_by_worker, is_own, strict=True):
            expired = batch.rows_R[batch.is_expired_R]
            is_new, leases, versions = self.clocks.renew(expired, copies.versions(batch))
            sent = row_values(self.clocks.weight_ED, {}, expired[is_new])
            copies.fill(batch, leases, is_new, sent, versions[is_new], self.optimizer)
            read = self.clocks.weight_ED[rows]
            read[~own] = copies.read(batch)
            values.append(read)
        updates = []
        parts = self.copies, in_use, rows_by_worker, uses_by_worker, is_own, grads
        for copies, batch, rows, uses, own, grad in zip(*parts, strict=True):
            updates.append(copies.updates_to_push(batch, grad[~own], self.optimizer))
            updates.append(RowUpdates(rows[own], torch.ones_like(rows[own]), uses[own], grad[own], grad[own][:, :0]))
            copies.update(batch, grad[~own], self.optimizer, 1)
        self.clocks.apply(self.optimizer, updates, 1)
        return values

    def due_pairs(self, num_batches):
        """By batch, pairs whose updates are pushed; all rows must have been used."""
        pairs = [[] for _ in range(num_batches)]
        for worker, copies in enumerate(self.copies):
            for batch in range(num_batches):
                lines = slice(32 * batch // num_batches, 32 * (batch + 1) // num_batches)
                rows = copies._row_of_L[lines]
                pairs[batch].append(rows[rows >= 0] + worker * ROWS)
        return [torch.cat(parts) for parts in pairs]


@st.composite
def cases(draw):
    num_workers = draw(st.integers(2, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    popularity = torch.arange(1.0, ROWS + 1) ** -draw(st.sampled_from((0.0, 1.0, 2.0)))

    def rows():
        size = int(torch.randint(1, 11, (), generator=generator))
        return torch.multinomial(popularity, size, generator=generator).sort().values

    steps = [[rows() for _ in range(num_workers)] for _ in range(draw(st.integers(1, 60)))]
    bounds = draw(st.sampled_from((0, 1, 5, 20, 100))), draw(st.sampled_from((0, 1, 3, 100)))
    owner_E = torch.arange(ROWS) % num_workers if draw(st.booleans()) else torch.full((ROWS,), SERVERS)
    return num_workers, steps, bounds, owner_E, generator


def distinct_reads(rows_by_worker, uses_by_worker=None):
    workers = [torch.full_like(rows, worker) for worker, rows in enumerate(rows_by_worker)]
    row_U, worker_U = torch.cat(rows_by_worker), torch.cat(workers)
    uses_U = torch.ones_like(row_U) if uses_by_worker is None else torch.cat(uses_by_worker)
    index_N = torch.arange(len(row_U)).repeat_interleave(uses_U)
    return stale_workers.Reads(row_U + worker_U * ROWS, row_U, worker_U, index_N)


@settings(max_examples=60)
@given(cases())
def test_bounded_rows_equal_the_product(case):
    num_workers, steps, bounds, owner_E, generator = case
    first = torch.randn(ROWS, DIM, dtype=torch.float64, generator=generator)
    product = ProductWorkers(first.clone(), num_workers, bounds, owner_E)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_copies, "MAX_UNPUSHED_BATCHES", 16)
        simulated = BoundedRows(first.clone(), RATE, num_workers, bounds, owner_E, [torch.empty(0, dtype=torch.int64)])
        for step, rows_by_worker in enumerate([[torch.arange(ROWS)] * num_workers, *steps]):
            sizes = [len(rows) for rows in rows_by_worker]
            grads = torch.randn(sum(sizes), DIM, dtype=torch.float64, generator=generator).split(sizes)
            uses = [torch.randint(1, 5, rows.shape, generator=generator) for rows in rows_by_worker]
            values = product.train(rows_by_worker, uses, grads)
            if step == 0:
                simulated.due_pairs = product.due_pairs(16)
            reads = distinct_reads(rows_by_worker, uses)
            torch.testing.assert_close(simulated.read(reads), torch.cat(values), rtol=1e-12, atol=1e-12)
            simulated.update(reads, torch.cat(grads))
            torch.testing.assert_close(simulated.weight_ED, product.clocks.weight_ED, rtol=1e-12, atol=1e-12)
            assert torch.equal(simulated.version_E, product.clocks.version_E)
            assert torch.equal(simulated.uses_E, product.clocks.uses_E)
    assert simulated.largest_missed <= simulated.bound
    product.clocks.apply(product.optimizer, [copies.drop() for copies in product.copies], 1)
    torch.testing.assert_close(simulated.flushed(), product.clocks.weight_ED, rtol=1e-12, atol=1e-12)


def train(mode, case=CASE, seed=3):
    """Rows and dense weights after training, and the number of updates by row."""
    rows, dense = make_workers(mode, case)
    for samples in training_samples(case, Clicks(case.rows, case.dtype)):
        reads = find_reads(samples.rows_BF, case.num_workers, case.num_rows)
        rows.update(reads, dense.train(rows.read(reads), reads, samples))
    return rows, [parameter.detach() for parameter in dense.model.parameters()]


@pytest.mark.parametrize("model", ("het_wide_deep", "het_deepfm", "het_dcn"))
def test_bounds_of_zero_train_like_one_process(model):
    case = replace(CASE, model=model, rate=(0.5, 0.1))
    (rows, dense), (expected, expected_dense) = train("bounded 0", case), train("synchronous", case)
    assert rows.largest_missed == rows.bound == 0
    torch.testing.assert_close(rows.flushed(), expected.flushed(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dense, expected_dense, rtol=1e-10, atol=1e-10)


def test_synchronous_training_is_torch_training_of_the_union_batch():
    (rows, dense), (start, shared) = train("synchronous"), make_workers("synchronous", CASE)
    weight = start.weight_ED.clone().requires_grad_()
    groups = [{"params": [weight], "lr": CASE.rate[0]}, {"params": shared.model.parameters(), "lr": CASE.rate[1]}]
    optimizer = torch.optim.SGD(groups)
    for samples in training_samples(CASE, Clicks(CASE.rows, CASE.dtype)):
        optimizer.zero_grad()
        logits = shared.model(weight[samples.rows_BF], samples.numbers_BN)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, samples.clicks_B).backward()
        optimizer.step()
    torch.testing.assert_close(rows.flushed(), weight.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dense, [*shared.model.parameters()], rtol=1e-10, atol=1e-10, check_stride=False)


def test_no_update_is_lost():
    """Each distinct row of a worker has a gradient of -1: a row counts its updates."""
    clicks = Clicks(20, torch.float64)
    case = replace(CASE, rows=20)
    weight = torch.zeros(case.num_rows, 1, dtype=torch.float64)
    for rows in (
        BoundedRows(weight.clone(), 1.0, case.num_workers, (5, 3)),
        HetRows(weight.clone(), 1.0, case.num_workers, 3),
        AsynchronousRows(weight.clone(), 1.0, case.num_workers),
    ):
        largest = 0.0
        for samples in training_samples(case, clicks):
            reads = find_reads(samples.rows_BF, case.num_workers, case.num_rows)
            missed = rows.made_E[reads.row_U] - rows.read(reads)[:, 0]
            assert missed.min() >= 0
            largest = max(largest, float(missed.max()))
            rows.update(reads, -torch.ones(len(reads.row_U), 1, dtype=torch.float64))
        assert largest == rows.largest_missed > 0
        assert torch.equal(rows.flushed()[:, 0], rows.made_E.double())


def test_workers_in_turns_equal_a_loop_over_turns():
    case = replace(CASE, num_workers=3, local_batch=8, rate=(0.5, 0.1))
    rows, dense = train("asynchronous", case)
    start, shared = make_workers("synchronous", case)
    model, size = shared.model, case.local_batch
    state = [start.weight_ED.clone(), *(parameter.detach().clone() for parameter in model.parameters())]
    views = [[part.clone() for part in state] for _ in range(case.num_workers)]
    for samples in training_samples(case, Clicks(case.rows, case.dtype)):
        for worker in range(case.num_workers):
            own = Samples(*(part[worker * size : (worker + 1) * size] for part in samples))
            weight, *parameters = (part.clone().requires_grad_() for part in views[worker])
            names = [name for name, _ in model.named_parameters()]
            arguments = weight[own.rows_BF], own.numbers_BN
            logits = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), arguments)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, own.clicks_B) / case.num_workers
            grads = torch.autograd.grad(loss, [weight, *parameters])
            rates = [case.rate[0], *[case.rate[1]] * len(parameters)]
            state = [part - rate * grad for part, rate, grad in zip(state, rates, grads, strict=True)]
            views[worker] = state
    torch.testing.assert_close(rows.flushed(), state[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dense, state[1:], rtol=1e-10, atol=1e-10)


class HetWorker:
    """A cache of HET's paper, row by row."""

    def __init__(self, server, limit):
        self.server, self.limit, self.entries = server, limit, {}

    def is_valid(self, row):
        entry = self.entries.get(row)
        return entry is not None and (
            entry["clock"] <= entry["start"] + self.limit and self.server[row]["clock"] <= entry["clock"] + self.limit
        )

    def evict(self, row):
        entry = self.entries.pop(row, None)
        if entry is not None:
            self.server[row]["value"] -= RATE * entry["sum"]
            self.server[row]["clock"] = max(self.server[row]["clock"], entry["clock"])

    def fetch(self, row):
        value, clock = self.server[row]["value"], self.server[row]["clock"]
        self.entries[row] = {"value": value.clone(), "sum": torch.zeros_like(value), "start": clock, "clock": clock}

    def write(self, row, grad):
        entry = self.entries[row]
        entry["value"] -= RATE * grad
        entry["sum"] += grad
        entry["clock"] += 1


@settings(max_examples=30)
@given(cases(), st.sampled_from((0, 1, 3, 10)))
def test_het_rows_equal_the_algorithms_of_the_paper(case, limit):
    num_workers, steps, _, _, generator = case
    first = torch.randn(ROWS, DIM, dtype=torch.float64, generator=generator)
    server = [{"value": value.clone(), "clock": 0} for value in first]
    workers = [HetWorker(server, limit) for _ in range(num_workers)]
    simulated = HetRows(first.clone(), RATE, num_workers, limit)
    for rows_by_worker in steps:
        lists = [rows.tolist() for rows in rows_by_worker]
        invalid = [(w, row) for w, rows in zip(workers, lists, strict=True) for row in rows if not w.is_valid(row)]
        for worker, row in invalid:
            worker.evict(row)
        for worker, row in invalid:
            worker.fetch(row)
        pairs = [(worker, row) for worker, rows in zip(workers, lists, strict=True) for row in rows]
        values = torch.stack([worker.entries[row]["value"] for worker, row in pairs])
        reads = distinct_reads(rows_by_worker)
        torch.testing.assert_close(simulated.read(reads), values, rtol=1e-12, atol=1e-12)
        grads = torch.randn(len(pairs), DIM, dtype=torch.float64, generator=generator)
        for (worker, row), grad in zip(pairs, grads, strict=True):
            worker.write(row, grad)
        simulated.update(reads, grads)
    expected = torch.stack([row["value"] for row in server])
    torch.testing.assert_close(simulated.weight_ED, expected, rtol=1e-12, atol=1e-12)
