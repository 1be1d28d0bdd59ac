"""Runs over ranks: started by the command, resumed on fewer; mistakes told on the rank that made them."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from test_steps import ROWS, batch, cut_plan, model, part, plan_one

from shardwright.comm.mesh import Mesh
from shardwright.dense.replicated import ReplicatedModel, split_into_buckets
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged
from shardwright.planner.step.stages import LANES
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_for
from shardwright.runtime.run.metrics import WindowMetrics
from shardwright.runtime.bindings import Output
from shardwright.runtime.rank_group import RankGroup
from shardwright.spec.optimizer import RowWiseAdaGrad

RUN = (
    "train.batch_size=256",
    "train.log_every=5",
    "train.eval_every=0",
    "train.eval_samples=1000",
    "train.checkpoint_every=10",
)


def train(folder, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "shardwright.cli", "train", "synthetic-dlrm", *RUN, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def losses(folder, name: str) -> list[float]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if line["kind"] == "train"]


def test_ranks_start_resume_on_fewer_and_equal_one_process(tmp_path):
    for words in (
        ("run.name=one", "train.steps=20"),
        ("run.name=two", "ranks=2", "train.steps=10"),
        ("run.name=two", "train.steps=20", "run.resume=true"),
        ("run.name=cut", "train.steps=20", "ranks=2", "plan.dense=FSDP + full"),
    ):
        done = train(tmp_path, *words)
        assert done.returncode == 0, done.stderr
        page = (tmp_path / "runs" / words[0].removeprefix("run.name=") / "report.html").read_text()
        assert ">exposed</th>" in page and ("The plan predicted" in page) == ("ranks=2" in words)
    for name in ("two", "cut"):
        assert losses(tmp_path, name) == pytest.approx(losses(tmp_path, "one"), abs=1e-5)
    refused = train(tmp_path, "run.name=two", "ranks=2")
    assert refused.returncode == 2 and "this run exists" in refused.stderr
    assert "Traceback" not in refused.stderr


def several(world: int):
    mine = model(RowWiseAdaGrad(0.1))
    return mine, cut_plan(plan_one(mine), world, "read", "float64")


def single(step: int):
    return batch(step, dtype=torch.float32)


def planned_here(world: int) -> list:
    """The planner's own plan, made on every rank."""
    mine = model(RowWiseAdaGrad(0.1), "float32")
    job = build(mine, plan_for(mine, single(0)), optimizer=lambda p: torch.optim.SGD(p, 0.05))
    ends = [24 * at // world for at in range(world + 1)]
    rank = job.mesh.rank
    outputs = list(job.run(part(single(step), ends[rank], ends[rank + 1]) for step in range(5)))
    job.mesh.close()
    return [one.logits for one in outputs]


def test_the_plan_of_a_script_is_the_planners(ranks):
    mine = model(RowWiseAdaGrad(0.1), "float32")
    job = build(mine, plan_one(mine, single(0)), optimizer=lambda p: torch.optim.SGD(p, 0.05))
    found = ranks.run(2, planned_here, 2)
    for step, one in enumerate(job.run(single(step) for step in range(5))):
        logits = torch.cat([answer[step] for answer in found])
        torch.testing.assert_close(logits, one.logits, rtol=0, atol=1e-4)


def wrong_id(world: int) -> str:
    mine, plan = several(world)
    job = build(mine, plan, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    whole = batch(0)
    values = whole.features.values.clone()
    values[int(whole.features.lengths[0].sum())] = ROWS[1]  # the first id of feature b, of table t1
    bad = replace(whole, features=Jagged(whole.features.features, values, whole.features.lengths))
    with pytest.raises(UserError) as told:
        next(job.run([part(bad, 0, 24)]))
    job.mesh.close()
    return str(told.value)


def test_an_id_outside_is_told_by_name_where_it_was_read(ranks):
    for told in ranks.run(2, wrong_id, 2):
        assert told.startswith('table "t1", feature "b": id 7 is outside its 7 rows')


def other_seeds(world: int) -> str:
    mine, plan = several(world)
    mesh = Mesh(plan.axes, lanes=LANES)
    torch.manual_seed(mesh.rank)
    with pytest.raises(UserError) as told:
        build(mine, plan, mesh, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    mesh.close()
    return str(told.value)


def other_plans(world: int) -> str:
    mine, plan = several(world)
    mesh = Mesh(plan.axes, lanes=LANES)
    plan = replace(plan, why=(("rank", str(mesh.rank)),))
    with pytest.raises(UserError) as told:
        build(mine, plan, mesh, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    mesh.close()
    return str(told.value)


def test_ranks_with_different_plans_are_refused(ranks):
    assert all("the ranks have different plans" in told for told in ranks.run(2, other_plans, 2))


def frozen(world: int) -> list:
    mine, plan = several(world)
    mine.sparse.requires_grad_(False)
    job = build(mine, plan, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    rank = job.mesh.rank
    before = job.state().tensors
    kept = {name: value.clone() for name, value in before.items() if not value.is_meta}
    outputs = list(job.run(part(batch(step), 12 * rank, 12 * rank + 12) for step in range(3)))
    after = job.state().tensors
    with pytest.raises(UserError, match="in job.run or in a loop"):
        mine(part(batch(0), 0, 12))
    job.mesh.close()
    same = [torch.equal(after[name], value) for name, value in kept.items() if "sparse" in name]
    return [all(same), len(outputs)]


def test_frozen_tables_stay_as_they_are(ranks):
    assert ranks.run(2, frozen, 2) == [[True, 3], [True, 3]]


class WithAux(torch.nn.Module):
    """An output that the loss leaves out."""

    def __init__(self, dense: torch.nn.Module) -> None:
        super().__init__()
        self.main, self.aux = dense, torch.nn.Linear(5, 1).double()

    def forward(self, batch, vectors):
        return torch.stack([self.main(batch, vectors), self.aux(batch.numbers).squeeze(1)])


class FirstOnly(torch.nn.Module):
    def __init__(self, loss: torch.nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, logits, batch):
        return self.loss(logits[0], batch)


def with_aux():
    mine = model(RowWiseAdaGrad(0.1))
    mine.dense, mine.loss = WithAux(mine.dense), FirstOnly(mine.loss)
    return mine


def lopsided(world: int) -> list:
    """All samples on one rank, at some steps samples of weight 0 on the other."""
    mine = with_aux()
    job = build(
        mine, cut_plan(plan_one(mine), world, "read", "float64"), optimizer=lambda p: torch.optim.AdamW(p, 0.01)
    )
    rank = job.mesh.rank
    ends = ((0, 20), (20, 24))[rank]
    outputs = list(job.run(part(one, *(min(end, one.batch_size) for end in ends)) for one in map(uneven, range(6))))
    job.mesh.close()
    return [[one.logits for one in outputs], mine.dense.aux.weight.detach().clone()]


def uneven(step: int):
    found = batch(step, size=24 if step % 2 else 20)
    if step % 3 == 0:
        assert found.weights is not None
        found.weights[20:] = 0
    return found


def test_a_share_that_counts_nothing_changes_nothing(ranks):
    mine = with_aux()
    job = build(mine, plan_one(mine), optimizer=lambda p: torch.optim.AdamW(p, 0.01))
    found = ranks.run(2, lopsided, 2)
    for step, one in enumerate(job.run(uneven(step) for step in range(6))):
        logits = torch.cat([answer[0][step] for answer in found], 1)
        torch.testing.assert_close(logits, one.logits, rtol=0, atol=1e-10)
    assert all(torch.equal(answer[1], mine.dense.aux.weight) for answer in found)


def windows(world: int) -> dict:
    """Of outputs that only the last rank has samples of."""
    mesh = Mesh((("rank", world),), lanes=("main",))
    team, window = RankGroup(mesh), WindowMetrics("click")
    size = 6 if mesh.rank == world - 1 else 0
    none = Jagged((), torch.empty(0, dtype=torch.int64), torch.empty(0, size, dtype=torch.int64))
    labels = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0])[:size]
    one = Batch(none, None, {"click": labels})
    window.update(Output(1, torch.tensor(0.5 if size else 0.0), torch.arange(6.0)[:size], one))
    found = team.all_gather_window(window).compute()
    assert team.broadcast_text(f"rank {mesh.rank}") == "rank 0"
    mesh.close()
    return found


def test_metrics_are_of_all_ranks_also_of_empty_ones(ranks):
    (alone,) = ranks.run(1, windows, 1)
    assert alone["loss"] == 0.5 and "auc" in alone
    assert ranks.run(3, windows, 3) == [alone] * 3


def test_ranks_with_different_seeds_are_refused(ranks):
    assert all("the ranks have different seeds [0, 1]" in told for told in ranks.run(2, other_seeds, 2))


def part_used(world: int, rounded: bool) -> list:
    """A parameter that no rank uses has no gradient; one that a rank uses has it everywhere."""
    mesh = Mesh((("rank", world),), lanes=("dense",))
    torch.manual_seed(mesh.rank)
    layers = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    replicated = ReplicatedModel(parameters, mesh.group(lane="dense"), bf16_reduce=rounded)
    start = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for _ in range(2):
        replicated.begin_backward(overlap=True)
        x = torch.ones(2, 3)
        y = layers[0](x) if mesh.rank else layers[1](layers[0](x))
        y.sum().backward()
        replicated.end_backward().wait()
    mesh.close()
    return [start, *(None if parameter.grad is None else parameter.grad.clone() for parameter in parameters)]


@pytest.mark.parametrize("rounded", (False, True))
def test_gradients_are_absent_only_where_no_rank_has_one(ranks, rounded):
    first, second = ranks.run(2, part_used, 2, rounded)
    assert all(one is None for one in first[5:] + second[5:])
    for one, other in zip(first[:5], second[:5], strict=True):
        assert one is not None and torch.equal(one, other)
    assert float(first[4].sum()) != 0  # of the layer that only the first rank used


def test_buckets_follow_the_backward_pass_and_hold_one_dtype():
    sizes = ((100,), (200_000,), (100_000,), (50,))
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    parameters.append(torch.nn.Parameter(torch.zeros(5, dtype=torch.float64)))
    found = [[parameter.numel() for parameter in bucket] for bucket in split_into_buckets(parameters)]
    assert found == [[5], [50, 100_000], [200_000, 100]]


def rounded_wire(world: int):
    mine, plan = several(world)
    plan = replace(plan, wire=replace(plan.wire, vectors="bfloat16", gradients="bfloat16", dense="bfloat16"))
    job = build(mine, plan, optimizer=lambda p: torch.optim.SGD(p, 0.05))
    ends = [24 * at // world for at in range(world + 1)]
    rank = job.mesh.rank
    outputs = list(job.run(part(batch(step), ends[rank], ends[rank + 1]) for step in range(10)))
    job.mesh.close()
    return [one.logits for one in outputs]


def test_a_rounded_wire_stays_near_and_is_not_exact(ranks):
    mine = model(RowWiseAdaGrad(0.1))
    job = build(mine, plan_one(mine), optimizer=lambda p: torch.optim.SGD(p, 0.05))
    wanted = [one.logits for one in job.run(batch(step) for step in range(10))]
    found = ranks.run(2, rounded_wire, 2)
    differences = [
        float((torch.cat([answer[step] for answer in found]) - wanted[step]).abs().max()) for step in range(10)
    ]
    assert 1e-9 < max(differences) < 0.05, differences
