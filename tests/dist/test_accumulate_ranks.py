"""Gradient accumulation over ranks, compared with one process that trains the micro-batches as one batch."""

from itertools import accumulate

import pytest
import torch
from test_steps import ROWS, assert_same, batch, make_model, shard_plan, single_plan, take
from test_train_ranks import losses, train
from torch import nn

from shardwright.comm.mesh import Mesh
from shardwright.dense.replicated import ReplicatedModel
from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.loss import BinaryLoss
from shardwright.runtime.build import build
from shardwright.spec.lanes import LANES
from shardwright.spec.optimizer import LAMB, Adam, RowWiseAdaGrad
from shardwright.spec.workload import Feature, Table

STEPS = 5
MICRO_SIZES = ((9, 11, 4), (20, 4, 0), (1, 1, 22), (8, 8, 8))  # sizes of a step's micro-batches


def split(whole: Batch, sizes) -> list[Batch]:
    bounds = [0, *accumulate(sizes)]
    return [take(whole, start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


def global_batches() -> list[Batch]:
    """One per step; at some steps with weights far from 1, which are all 0 in some micro-batches."""
    batches = [batch(step) for step in range(STEPS)]
    for whole in batches:
        if whole.weights is not None:
            whole.weights.mul_(1e-20)
            whole.weights[:9] = 0
    return batches


def local_micro_batches(world: int, rank: int) -> list[Batch]:
    """A rank's share of each micro-batch; three of them per step, two in the last step."""
    micro_batches = []
    for step, whole in enumerate(global_batches()):
        for micro in split(whole, MICRO_SIZES[step % len(MICRO_SIZES)] if step < STEPS - 1 else (20, 4)):
            bounds = [micro.batch_size * number // world for number in range(world + 1)]
            micro_batches.append(take(micro, bounds[rank], bounds[rank + 1]))
    return micro_batches


def train_on_rank(world: int, optimizer, overlap: bool, ids_after: str, make=make_model):
    """(step after each micro-batch, its logits) on this rank, and its state tensors (all tables on rank 0)."""
    model = make(optimizer)
    plan = shard_plan(single_plan(model), world, ids_after, "float64")
    job = build(model, plan, optimizer=lambda p: torch.optim.Adam(p, 0.01), overlap=overlap, accumulate=3)
    outputs = [(out.step, out.logits) for out in job.run(local_micro_batches(world, job.mesh.rank))]
    state = job.state()
    job.mesh.close()
    return outputs, {name: value for name, value in state.tensors.items() if not value.is_meta}


class Tower(nn.Module):
    """Feature "b" is unpooled: its rows are exchanged and used one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(3 * 8 + 8 + 5, 1)

    def forward(self, batch, vectors):
        lengths, rows = batch.features.lengths[batch.features.features.index("b")].long(), vectors["b"]
        samples = torch.arange(batch.batch_size, device=batch.numbers.device)
        sample = torch.repeat_interleave(samples, lengths, output_size=len(rows))
        sums = rows.new_zeros(batch.batch_size, 8).index_add(0, sample, rows.tanh())
        return self.top(torch.cat([vectors.pooled_BD, sums, batch.numbers], 1)).squeeze(1)


class Sequences(nn.Module):
    def __init__(self, optimizer) -> None:
        super().__init__()
        torch.manual_seed(3)
        features = [Feature("a", "t0", "mean"), Feature("b", "t1", "none"), Feature("c", "t2"), Feature("d", "t2")]
        tables = [Table(f"t{number}", rows, 8, "float64") for number, rows in enumerate(ROWS)]
        self.sparse = EmbeddingBags(tables, features, optimizer)
        self.dense, self.loss = Tower().double(), BinaryLoss()

    def forward(self, batch):
        return self.dense(batch, self.sparse(batch))


@pytest.mark.parametrize(
    "make, optimizer",
    (
        (make_model, RowWiseAdaGrad(0.1)),
        (make_model, Adam(0.01)),
        (make_model, LAMB(0.01)),
        (Sequences, RowWiseAdaGrad(0.1)),
    ),
    ids=("rowwise_adagrad", "adam", "lamb", "sequences"),
)
@pytest.mark.parametrize("world", (1, 2, 3))
def test_micro_batches_over_ranks_equal_one_batch(ranks, world, make, optimizer):
    model = make(optimizer)
    job = build(model, single_plan(model), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    logits = [out.logits for out in job.run(global_batches())]
    expected = job.state().tensors
    runs = []
    for overlap, ids_after in ((False, "read"), (True, "read"), (True, "gradients")):
        answers = ranks.run(world, train_on_rank, world, optimizer, overlap, ids_after, make)
        steps = [(number + 1) // 3 for number in range(3 * STEPS - 3)]
        assert [step for step, _ in answers[0][0]] == [*steps, STEPS - 1, STEPS]
        outputs = zip(*([output for _, output in answer[0]] for answer in answers), strict=True)
        micro_batches = [torch.cat(by_rank) for by_rank in outputs]
        for step in range(STEPS):
            of_step = torch.cat(micro_batches[3 * step : 3 * step + 3])
            torch.testing.assert_close(of_step, logits[step], rtol=0, atol=1e-10)
        assert_same(answers[0][1], expected)
        runs.append(answers)
    serial, *overlapped_runs = runs
    for answers in overlapped_runs:  # the executors give the same bits
        for (outputs, state), other in zip(serial, answers, strict=True):
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(outputs, other[0], strict=True))
            assert all(torch.equal(state[name], other[1][name]) for name in state if not name.startswith("random"))


def run_two_backward_passes(world: int) -> list:
    """One layer is used only by the first pass, and only on rank 1; returns the gradients."""
    mesh = Mesh((("rank", world),), lanes=("dense",))
    layers = [nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    replicated = ReplicatedModel(parameters, mesh.group(lane="dense"))
    x = torch.ones(2, 3)
    (layers[1](layers[0](x)) if mesh.rank else layers[0](x)).sum().backward()
    replicated.begin_backward(overlap=True)
    layers[0](x).sum().backward()
    replicated.end_backward()
    replicated.finish_reductions()
    mesh.close()
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]


def test_gradients_of_earlier_micro_batches_are_reduced_with_the_last(ranks):
    first, second = ranks.run(2, run_two_backward_passes, 2)
    assert first[4:] == second[4:] == [None, None]
    assert all(map(torch.equal, first[:4], second[:4]))
    assert first[3].tolist() == [2.0, 2.0, 2.0]


def test_a_run_over_ranks_equals_one_process(tmp_path):
    keys = ("train.steps=6", "train.log_every=2", "train.checkpoint_every=2", "train.accumulate=3")
    for args in (("run.name=one", *keys), ("run.name=two", "ranks=2", *keys)):
        result = train(tmp_path, *args)
        assert result.returncode == 0, result.stderr
    assert len(losses(tmp_path, "one")) == 3
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), abs=1e-5)


def build_with_different_accumulation(world: int) -> str:
    model = make_model(RowWiseAdaGrad(0.1))
    plan = shard_plan(single_plan(model), world, "read", "float64")
    mesh = Mesh(plan.mesh_axes, lanes=LANES)
    with pytest.raises(UserError) as error:
        build(model, plan, mesh, optimizer=lambda p: torch.optim.SGD(p, 0.1), accumulate=1 + mesh.rank)
    mesh.close()
    return str(error.value)


def test_ranks_that_accumulate_differently_are_an_error(ranks):
    messages = ranks.run(2, build_with_different_accumulation, 2)
    assert all("the ranks have accumulate=[1, 2]" in message for message in messages)
