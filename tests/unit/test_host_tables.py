"""Tables in host memory with a cache in GPU memory train to the bit like tables in GPU memory, in one process.

Without a GPU the cache is on the CPU too: copies then are plain torch, and the kernel runs in Triton's interpreter.
"""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tables_on_disk import OPTIMIZERS, ROWS, batch_of, dlrm

from shardwright.comm.mesh import Mesh
from shardwright.errors import UserError
from shardwright.kernels.row_swaps import RowSwaps, SwappedTable
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.embedding_dict import EmbeddingBagsDict
from shardwright.layers.loss import BinaryLoss
from shardwright.runtime import build as building
from shardwright.runtime.build import build
from shardwright.runtime.placements import keep_in_host_memory
from shardwright.runtime.planning import plan_for
from shardwright.spec.calls import without_leads
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.workload import Feature, Table

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter's
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LINES = 128
ADAGRAD = RowWiseAdaGrad(lr=0.1)


@pytest.fixture(autouse=True)
def cache_on_this_device(monkeypatch):
    monkeypatch.setattr(building, "CACHING_DEVICES", (DEVICE.type,))


def job_of(optimizer, *, host: bool, lines=LINES, names=tuple(ROWS), overlap=True, accumulate=1, allow=()):
    model = dlrm(optimizer)
    plan = plan_for(model, batch_of(0), allow=allow)
    if host:
        plan = keep_in_host_memory(plan, dict.fromkeys(names, lines))
    plan = plan if overlap else replace(plan, stages=without_leads(plan.stages))
    return build(
        model, plan, Mesh(device=DEVICE), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), accumulate=accumulate
    )


def run(job, batches):
    return [output.loss.clone() for output in job.run(batches)]


def assert_equal(plain, host, batches):
    losses = [run(job, batches) for job in (plain, host)]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    assert states_equal_on_cpu(plain, host)


def states_equal_on_cpu(first, second) -> bool:
    states = [{name: x.cpu() for name, x in job.state().tensors.items()} for job in (first, second)]
    return states[0].keys() == states[1].keys() and all(torch.equal(states[0][n], states[1][n]) for n in states[0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("overlap", (False, True))
def test_training_equals_tables_on_the_device(optimizer, overlap):
    batches = [batch_of(seed) for seed in range(20)]
    host = job_of(optimizer, host=True, overlap=overlap)
    assert_equal(job_of(optimizer, host=False), host, batches)
    counts = host.cache_counts()
    assert all(own.evicted and own.written_back and own.missing < own.rows for own in counts.values())


@pytest.mark.parametrize("allow", ("tables.fp16", "tables.bf16"))
def test_values_of_16_bits_are_rounded_by_row(allow):
    batches = [batch_of(seed) for seed in range(20)]
    jobs = [job_of(ADAGRAD, host=host, allow=(allow,)) for host in (False, True)]
    assert_equal(*jobs, batches)


@pytest.mark.parametrize("names", (("site",), ("item",)))
def test_other_tables_are_on_the_device(names):
    batches = [batch_of(seed) for seed in range(20)]
    assert_equal(job_of(ADAGRAD, host=False), job_of(ADAGRAD, host=True, names=names), batches)


def test_accumulated_steps():
    batches = [batch_of(seed) for seed in range(24)]
    jobs = [job_of(ADAGRAD, host=host, accumulate=3, lines=192) for host in (False, True)]
    assert_equal(*jobs, batches)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.sampled_from((96, 128, 160, 320)))
def test_drawn_batches_and_numbers_of_lines(seeds, lines):
    batches = [batch_of(seed) for seed in seeds]
    assert_equal(job_of(ADAGRAD, host=False), job_of(ADAGRAD, host=True, lines=lines), batches)


def test_rows_are_read_and_replaced_while_a_batch_is_in_flight(tmp_path):
    batches = [batch_of(seed) for seed in range(20)]
    plain, host, other = (job_of(ADAGRAD, host=is_host) for is_host in (False, True, True))
    run(other, batches[:7])
    state = other.state()
    for job in (plain, host):
        for number, _ in enumerate(job.run(batches)):
            if number == 5:
                assert torch.equal(
                    job.model.sparse.weight("site").detach().cpu(),
                    job.state().tensors["model.sparse.embedding_bags.site.weight"].cpu(),
                )
                job.load_state(state)
    assert states_equal_on_cpu(plain, host)
    host.save(tmp_path)
    again = job_of(ADAGRAD, host=True, lines=256)
    again.load(tmp_path / f"step-{host.step:08}")
    assert states_equal_on_cpu(host, again)
    assert_equal(plain, again, batches[:3])


def test_evaluation_changes_nothing():
    plain, host = (job_of(ADAGRAD, host=is_host) for is_host in (False, True))
    for job in (plain, host):
        run(job, [batch_of(1)])
    scores = [[output.logits.clone() for output in job.evaluate([batch_of(2), batch_of(3)])] for job in (plain, host)]
    assert all(torch.equal(a, b) for a, b in zip(*scores, strict=True))
    assert_equal(plain, host, [batch_of(4)])
    with torch.no_grad():
        looked_up = [job.model.sparse(batch_of(5).features.to(DEVICE)).pooled_BD for job in (plain, host)]
    assert torch.equal(*looked_up)


def test_publications_have_the_changed_rows(tmp_path):
    jobs = [job_of(ADAGRAD, host=is_host) for is_host in (False, True)]
    sizes = []
    for job, name in zip(jobs, ("plain", "host"), strict=True):
        job.publish(tmp_path / name)
        run(job, [batch_of(1)])
        folder = job.publish(tmp_path / name)
        sizes.append({path.name: path.stat().st_size for path in folder.iterdir() if path.suffix == ".bin"})
    assert sizes[0] == sizes[1]


def test_a_model_on_the_meta_device_is_initialized_in_host_memory():
    with torch.device("meta"):
        model = dlrm(ADAGRAD)
    torch.manual_seed(0)
    plan = keep_in_host_memory(plan_for(model, batch_of(0)), dict.fromkeys(ROWS, LINES))
    job = build(model, plan, Mesh(device=DEVICE), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    weights = [job.model.sparse.weight(name).data for name in ROWS]
    torch.manual_seed(0)
    expected = [dlrm(ADAGRAD).sparse.weight(name).data for name in ROWS]
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_errors_name_the_table(monkeypatch):
    job = job_of(ADAGRAD, host=True, lines=32)
    with pytest.raises(UserError, match='table "site": the rows of the batches in flight do not fit in the 32 lines'):
        run(job, [batch_of(seed, batch_size=64) for seed in range(3)])
    with pytest.raises(UserError, match="train only in job.run"):
        job_of(ADAGRAD, host=True).model.sparse(batch_of(1).features)
    outside = batch_of(1)
    outside.features.values[-1] = ROWS["item"]
    with pytest.raises(UserError, match='table "item", feature "shown": id 200 is outside'):
        job = job_of(ADAGRAD, host=True, names=("item",))
        run(job, [outside])
    run(job, [batch_of(1)])
    monkeypatch.setattr(building, "CACHING_DEVICES", ())
    with pytest.raises(UserError, match='table "site" is planned with rows in GPU memory, and this job is on the'):
        job_of(ADAGRAD, host=True)
    with pytest.raises(UserError, match='no table "sites" in the plan'):
        keep_in_host_memory(plan_for(dlrm(ADAGRAD), batch_of(0)), {"sites": 100})


@pytest.mark.parametrize("dtype, dim", ((torch.float32, 5), (torch.float32, 300), (torch.bfloat16, 7)))
def test_the_kernel_moves_the_same_rows_as_torch(dtype, dim):
    pytest.importorskip("triton", reason="needs triton: pip install shardwright[gpu]")
    kernels = import_module("shardwright.kernels.row_swaps_triton")

    def tables() -> list[SwappedTable]:
        torch.manual_seed(0)
        found = []
        for rows, lines in ((40, 32), (90, 64)):
            parts_E = [torch.randn(rows, dim).to(dtype), torch.randn(rows)]
            parts_L = [part.new_empty(lines, *part.shape[1:], device=DEVICE).normal_() for part in parts_E]
            found.append(SwappedTable(parts_E, parts_L, torch.full((lines,), -1, device=DEVICE)))
        return found

    numbers = torch.tensor([0] * 20 + [1] * 31)
    lines = torch.cat([torch.randperm(32)[:20], torch.randperm(64)[:31]])
    new_rows = torch.cat([torch.randperm(20), torch.randperm(45)[:31]])
    old_rows = torch.cat([20 + torch.randperm(20), 45 + torch.randperm(45)[:31]])
    new_rows[::5] = -1
    old_rows[::3] = -1
    moves = torch.stack([numbers, lines, new_rows, old_rows], 1)
    pairs = tables(), tables()
    RowSwaps(pairs[0]).launch(kernels, moves)
    RowSwaps(pairs[1]).run_in_torch(moves)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    for launched, expected in zip(*pairs, strict=True):
        assert torch.equal(launched.row_of_L, expected.row_of_L)
        for name in ("parts_E", "parts_L"):
            parts = zip(getattr(launched, name), getattr(expected, name), strict=True)
            assert all(torch.equal(a, b) for a, b in parts)


def test_loading_a_state_dict_keeps_what_it_does_not_have():
    """Rows and optimizer states that are on lines; also if it replaces the tensors."""
    batches = [batch_of(seed) for seed in range(12)]
    for assign in (False, True):
        plain, host = (job_of(ADAGRAD, host=is_host) for is_host in (False, True))
        saved = {name: x.clone() for name, x in plain.model.state_dict().items() if "site" in name}
        for job in (plain, host):
            for number, _ in enumerate(job.run(batches)):
                if number == 5:
                    job.model.load_state_dict(saved, strict=False, assign=assign and job is host)
        assert states_equal_on_cpu(plain, host)


def test_runs_that_end_early_leave_no_lines_in_use():
    plain, host = (job_of(ADAGRAD, host=is_host, lines=96) for is_host in (False, True))
    for job in (plain, host):
        for seed in range(40):
            for _ in job.run([batch_of(seed), batch_of(seed + 1), batch_of(seed + 2)]):
                break
    assert states_equal_on_cpu(plain, host)


def test_members_of_a_dict_have_the_trained_rows():
    def dict_job(*, host: bool):
        torch.manual_seed(0)
        members = {
            name: EmbeddingBags([Table(name, 300, 8)], [Feature("bag", name, ids="site")], ADAGRAD)
            for name in ("first", "second")
        }
        bags = EmbeddingBagsDict(members)
        model = TwoMembers(bags)
        plan = plan_for(model, batch_of(0))
        if host:
            plan = keep_in_host_memory(plan, {table.table: LINES for table in plan.tables})
        return build(model, plan, Mesh(device=DEVICE), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))

    jobs = [dict_job(host=is_host) for is_host in (False, True)]
    for job in jobs:
        run(job, [batch_of(seed) for seed in range(6)])
    weights = [job.model.sparse["first"].weight("first").detach().cpu() for job in jobs]
    assert torch.equal(*weights)
    doubled = 2 * weights[0]
    for job in jobs:
        job.model.sparse["first"].load_state_dict({"embedding_bags.first.weight": doubled})
        run(job, [batch_of(seed) for seed in range(6)])
    assert states_equal_on_cpu(*jobs)


class TwoMembers(torch.nn.Module):
    def __init__(self, sparse: EmbeddingBagsDict) -> None:
        super().__init__()
        self.sparse, self.dense, self.loss = sparse, TwoMembersTop(), BinaryLoss("click")

    def forward(self, batch):
        return self.dense(batch, self.sparse(batch))


class TwoMembersTop(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top = torch.nn.Linear(16, 1)

    def forward(self, batch, vectors):
        return self.top(torch.cat([vectors[name].pooled_BD for name in ("first", "second")], 1)).squeeze(1)


def test_a_model_on_the_meta_device_with_some_tables_in_host_memory():
    with torch.device("meta"):
        model = dlrm(ADAGRAD)
    plan = keep_in_host_memory(plan_for(model, batch_of(0)), {"item": LINES})
    job = build(model, plan, Mesh(device=DEVICE), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    run(job, [batch_of(seed) for seed in range(3)])
    with pytest.raises(UserError, match="an earlier build keeps rows of these tables in GPU memory"):
        build(model, plan, Mesh(device=DEVICE), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
