"""Several batches as one step, over ranks: against one process that sees them as one batch."""

from itertools import accumulate

import pytest
import torch
from test_steps import ROWS, batch, cut_plan, model, part, plan_one, same
from test_train_ranks import losses, train
from torch import nn

from shardwright.comm.mesh import Mesh
from shardwright.dense.replicated import ReplicatedModel
from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.loss import BinaryLoss
from shardwright.planner.step.stages import LANES
from shardwright.runtime.build import build
from shardwright.spec.optimizer import LAMB, Adam, RowWiseAdaGrad
from shardwright.spec.workload import Feature, Table

STEPS = 5
CUTS = ((9, 11, 4), (20, 4, 0), (1, 1, 22), (8, 8, 8))  # of a step's samples into batches


def cut(whole: Batch, sizes) -> list[Batch]:
    ends = [0, *accumulate(sizes)]
    return [part(whole, start, stop) for start, stop in zip(ends, ends[1:], strict=False)]


def wholes() -> list[Batch]:
    """Of weights far from 1 at some steps, all 0 in some batches."""
    found = [batch(step) for step in range(STEPS)]
    for one in found:
        if one.weights is not None:
            one.weights.mul_(1e-20)
            one.weights[:9] = 0
    return found


def shares(world: int, rank: int) -> list[Batch]:
    """A rank's share of each batch; three batches to a step, the last step of two."""
    found = []
    for step, whole in enumerate(wholes()):
        for one in cut(whole, CUTS[step % len(CUTS)] if step < STEPS - 1 else (20, 4)):
            ends = [one.batch_size * at // world for at in range(world + 1)]
            found.append(part(one, ends[rank], ends[rank + 1]))
    return found


def trained(world: int, optimizer, overlap: bool, behind: str, make=model):
    """(step after each batch, its logits) on this rank, and the whole state at the first."""
    mine = make(optimizer)
    plan = cut_plan(plan_one(mine), world, behind, "float64")
    job = build(mine, plan, optimizer=lambda p: torch.optim.Adam(p, 0.01), overlap=overlap, accumulate=3)
    outputs = [(one.step, one.logits) for one in job.run(shares(world, job.mesh.rank))]
    state = job.state()
    job.mesh.close()
    return outputs, {name: value for name, value in state.tensors.items() if not value.is_meta}


class Tower(nn.Module):
    """Feature "b" is not pooled: its rows travel, and are looked at one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(3 * 8 + 8 + 5, 1)

    def forward(self, batch, vectors):
        at = batch.features.features.index("b")
        sample = torch.repeat_interleave(torch.arange(batch.batch_size, device=batch.numbers.device), batch.features.lengths[at].long(), output_size=len(vectors["b"]))
        seen = vectors["b"].new_zeros(batch.batch_size, 8).index_add(0, sample, vectors["b"].tanh())
        return self.top(torch.cat([vectors.pooled_BD, seen, batch.numbers], 1)).squeeze(1)


class Sequences(nn.Module):
    def __init__(self, optimizer) -> None:
        super().__init__()
        torch.manual_seed(3)
        features = [Feature("a", "t0", "mean"), Feature("b", "t1", "none"), Feature("c", "t2"), Feature("d", "t2")]
        self.sparse = EmbeddingBags([Table(f"t{at}", rows, 8, "float64") for at, rows in enumerate(ROWS)], features, optimizer)
        self.dense, self.loss = Tower().double(), BinaryLoss()

    def forward(self, batch):
        return self.dense(batch, self.sparse(batch))


@pytest.mark.parametrize(
    "make, optimizer",
    ((model, RowWiseAdaGrad(0.1)), (model, Adam(0.01)), (model, LAMB(0.01)), (Sequences, RowWiseAdaGrad(0.1))),
    ids=("rowwise_adagrad", "adam", "lamb", "sequences"),
)
@pytest.mark.parametrize("world", (1, 2, 3))
def test_batches_of_a_step_over_ranks_equal_one_batch(ranks, world, make, optimizer):
    mine = make(optimizer)
    job = build(mine, plan_one(mine), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    logits = [one.logits for one in job.run(wholes())]
    wanted = job.state().tensors
    found = {}
    for overlap, behind in ((False, "read"), (True, "read"), (True, "gradients")):
        answers = ranks.run(world, trained, world, optimizer, overlap, behind, make)
        assert [step for step, _ in answers[0][0]] == [*((at + 1) // 3 for at in range(3 * STEPS - 3)), STEPS - 1, STEPS]
        outputs = zip(*([out for _, out in answer[0]] for answer in answers), strict=True)
        joined = [torch.cat(one) for one in outputs]
        for step in range(STEPS):
            own = torch.cat(joined[3 * step : 3 * step + 3])
            torch.testing.assert_close(own, logits[step], rtol=0, atol=1e-10)
        same(answers[0][1], wanted)
        found[overlap, behind] = answers
    serial, *others = found.values()
    for answers in others:  # not a bit of difference between the executors
        for one, other in zip(serial, answers, strict=True):
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one[0], other[0], strict=True))
            assert all(torch.equal(one[1][name], other[1][name]) for name in one[1] if not name.startswith("random"))


def used_before(world: int) -> list:
    """Two backward passes, of which the first alone uses a layer, and on one rank alone."""
    mesh = Mesh((("rank", world),), lanes=("dense",))
    layers = [nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    replicated = ReplicatedModel(parameters, mesh.group(lane="dense"))
    x = torch.ones(2, 3)
    (layers[1](layers[0](x)) if mesh.rank else layers[0](x)).sum().backward()
    replicated.begin_backward(overlap=True)
    layers[0](x).sum().backward()
    replicated.end_backward().wait()
    mesh.close()
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]


def test_gradients_of_earlier_batches_travel_with_the_last(ranks):
    first, second = ranks.run(2, used_before, 2)
    assert first[4:] == second[4:] == [None, None]
    assert all(map(torch.equal, first[:4], second[:4]))
    assert first[3].tolist() == [2.0, 2.0, 2.0]


def test_a_run_over_ranks_equals_one_process(tmp_path):
    keys = ("train.steps=6", "train.log_every=2", "train.checkpoint_every=2", "train.accumulate=3")
    for words in (("run.name=one", *keys), ("run.name=two", "ranks=2", *keys)):
        done = train(tmp_path, *words)
        assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path, "one")) == 3
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), abs=1e-5)


def other_counts(world: int) -> str:
    mine = model(RowWiseAdaGrad(0.1))
    plan = cut_plan(plan_one(mine), world, "read", "float64")
    mesh = Mesh(plan.axes, lanes=LANES)
    with pytest.raises(UserError) as told:
        build(mine, plan, mesh, optimizer=lambda p: torch.optim.SGD(p, 0.1), accumulate=1 + mesh.rank)
    mesh.close()
    return str(told.value)


def test_ranks_that_accumulate_differently_are_refused(ranks):
    assert all("the ranks have accumulate=[1, 2]" in told for told in ranks.run(2, other_counts, 2))
