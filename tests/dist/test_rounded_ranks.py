"""What a plan rounds, over ranks: tables in 16 bits as in one process, the dense optimizer's state alike on all, a clip."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_dense_plans import PLANS, job, share
from test_steps import ROWS, STEPS, batch, by_hand, cut_plan, model, part, plan_one, tables
from torch import Tensor, nn

from shardwright.comm.mesh import Mesh
from shardwright.dense.clip_grad_norm import clip_grad_norm
from shardwright.jagged import Batch, Vectors
from shardwright.layers.embedding import EmbeddingBags
from shardwright.measure.describe import describe
from shardwright.models.dlrm import DLRM
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_for, plan_single_process
from shardwright.spec.optimizer import Adam, AdaGrad, RowWiseAdaGrad, SparseOptimizer
from shardwright.spec.plan import Dense, Plan, Rect
from shardwright.spec.workload import Feature

SHORT = {"float16": "tables.fp16", "bfloat16": "tables.bf16"}


class Sum(nn.Module):
    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        return vectors.pooled_BD.sum(1)


class Signed(nn.Module):
    """Its gradients are 1/16 or none for a batch of 16, so that no order of adding them up rounds any."""

    def forward(self, logits: Tensor, batch: Batch) -> Tensor:
        return (logits * batch.labels["click"]).mean()


class Straight(nn.Module):
    def __init__(self, optimizer: SparseOptimizer) -> None:
        super().__init__()
        features = [Feature("a", "t0"), Feature("b", "t1"), Feature("c", "t2"), Feature("d", "t2")]
        self.sparse = EmbeddingBags(tables("float32"), features, optimizer)
        self.dense, self.loss = Sum(), Signed()

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(batch, self.sparse(batch))


def straight(world: int, dtype: str, optimizer: SparseOptimizer) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits of this rank and the state, of tables that lie whole: one at the first rank, one at both, one at the last."""
    torch.manual_seed(3)
    mine = Straight(optimizer)
    whole = [replace(batch(step, 16, torch.float32), weights=None) for step in range(STEPS)]
    plan = plan_single_process(mine, describe(mine, whole[0]), [SHORT[dtype]])
    last = world - 1
    rects = ((0,), tuple(range(world)), (last,))
    cuts = [
        replace(cut, order="id", rects=(Rect(cut.table, (0, rows), (0, 8), at),), travel="vectors")
        for cut, rows, at in zip(by_hand(1), ROWS, rects, strict=True)
    ]
    if world > 1:
        plan = replace(cut_plan(plan, world, "read", "float32", cuts), allow=(SHORT[dtype],))
    job = build(mine, plan)
    lo, hi = 16 * job.mesh.rank // world, 16 * (job.mesh.rank + 1) // world
    logits = [one.logits for one in job.run(part(one, lo, hi) for one in whole)]
    state = {name: value for name, value in job.state().tensors.items() if not value.is_meta}
    job.mesh.close()
    return logits, state


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("optimizer", (AdaGrad(0.1), RowWiseAdaGrad(0.1), Adam(0.05)), ids=lambda one: one.kind)
def test_tables_in_16_bits_are_those_of_one_process_to_the_bit(ranks, dtype, optimizer):
    [(wanted, state)] = ranks.run(1, straight, 1, dtype, optimizer)
    both = ranks.run(2, straight, 2, dtype, optimizer)
    for step, logits in enumerate(wanted):
        assert torch.equal(torch.cat([one[0][step] for one in both]), logits)
    found = both[0][1]
    assert found["model.sparse.embedding_bags.t0.weight"].dtype == getattr(torch, dtype)
    assert all(torch.equal(found[name], state[name]) for name in state if not name.startswith("random"))


def planned(mine: nn.Module, world: int, *allow: str) -> Plan:
    first = batch(0, dtype=torch.float32)
    plan = plan_single_process(mine, describe(mine, first), allow)
    return replace(cut_plan(plan, world, "read", "float32"), allow=allow)


def kept(world: int, root: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's dense weights and moments at the end; and again where it went on from a checkpoint in the middle."""
    found = []
    for first in (0, STEPS // 2):
        torch.manual_seed(3)
        mine = model(RowWiseAdaGrad(0.1), "float32")
        plan = planned(mine, world, "tables.bf16", "optimizer.bf16")
        job = build(mine, plan, optimizer=lambda p: torch.optim.AdamW(p, 0.01), clip=0.5)
        lo, hi = 24 * job.mesh.rank // world, 24 * (job.mesh.rank + 1) // world
        if first:
            job.load(root / f"step-{first:08}")
        for step in range(first, STEPS):
            list(job.run([part(batch(step, dtype=torch.float32), lo, hi)]))
            if job.step == STEPS // 2:
                job.save(root)
        moments = {
            f"{at}.{name}": value
            for at, values in job.optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }
        found.append({name: value.clone() for name, value in mine.dense.state_dict().items()} | moments)
        job.mesh.close()
    return found[0], found[1]


def test_the_optimizers_moments_stay_alike_on_all_ranks_and_go_on_to_the_bit(ranks, tmp_path):
    answers = ranks.run(2, kept, 2, tmp_path)
    (first, again), (other, _) = answers
    assert {value.dtype for name, value in first.items() if name.endswith("exp_avg")} == {torch.bfloat16}
    for name, value in first.items():
        assert torch.equal(value, other[name]), name
        assert torch.equal(value, again[name]), name


def clipped(world: int, most: float) -> dict[str, Tensor]:
    mine = model(RowWiseAdaGrad(0.1))
    plan = cut_plan(plan_one(mine), world, "read", "float64") if world > 1 else plan_one(mine)
    job = build(mine, plan, optimizer=lambda p: torch.optim.SGD(p, 0.1), clip=most)
    lo, hi = 24 * job.mesh.rank // world, 24 * (job.mesh.rank + 1) // world
    list(job.run(part(batch(step), lo, hi) for step in range(STEPS)))
    found = {name: value.clone() for name, value in mine.dense.state_dict().items()}
    job.mesh.close()
    return found


def test_replicas_are_clipped_as_one_process_is(ranks):
    [wanted] = ranks.run(1, clipped, 1, 0.1)
    [free] = ranks.run(1, clipped, 1, 1e9)
    for found in ranks.run(2, clipped, 2, 0.1):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)
    assert any(float((wanted[name] - free[name]).abs().max()) > 1e-3 for name in wanted)


def pieces(sizes: tuple[int, int], most: float) -> tuple[float, Tensor, Tensor]:
    """Half of a vector here, the other there, and one that both have."""
    mesh = Mesh((("shard", 2),), lanes=("dense",), along=[()])
    draw = torch.Generator().manual_seed(7)
    whole, alike = (torch.randn(size, generator=draw) for size in (sum(sizes), 5))
    mine, both = nn.Parameter(whole.split(sizes)[mesh.rank]), nn.Parameter(alike)
    mine.grad, both.grad = mine.detach().clone(), both.detach().clone()
    length = clip_grad_norm([mine], most, [mesh.group(lane="dense")], [both])
    mesh.close()
    return length, mine.grad, both.grad


@pytest.mark.parametrize("sizes", ((3, 4), (7, 0)))
@pytest.mark.parametrize("most", (0.5, 100.0))
def test_pieces_are_clipped_by_the_length_of_all(ranks, sizes, most):
    draw = torch.Generator().manual_seed(7)
    whole, alike = (torch.randn(size, generator=draw) for size in (sum(sizes), 5))
    wanted = float((whole.double() ** 2).sum() + (alike.double() ** 2).sum()) ** 0.5
    answers = ranks.run(2, pieces, sizes, most)
    factor = min(1.0, most / wanted)
    for length, _, both in answers:
        assert length == pytest.approx(wanted, rel=1e-12)
        torch.testing.assert_close(both, alike * factor)
    torch.testing.assert_close(torch.cat([mine for _, mine, _ in answers]), whole * factor)


def allowed() -> tuple[set[str], str, tuple[str, ...]]:
    """Of tables with rows that are longer than what memory hands out at once."""
    features = [Feature("a", "t0", "mean"), Feature("b", "t1"), Feature("c", "t2"), Feature("d", "t2")]
    wide = [replace(table, dim=64) for table in tables("float32")]
    mine = DLRM(EmbeddingBags(wide, features, RowWiseAdaGrad(0.1)), 5, bottom=[16, 64], top=[16])
    plan = plan_for(mine, batch(0, dtype=torch.float32), allow=["tables.fp16", "optimizer.bf16"])
    return {table.placement.weight_dtype for table in plan.tables}, plan.dense.state, plan.allow


def test_the_planner_rounds_what_a_script_allows(ranks):
    for dtypes, state, allow in ranks.run(2, allowed):
        assert dtypes == {"float16"} and state == "bfloat16"
        assert allow == ("tables.fp16", "optimizer.bf16")


def laid_out(name: str, world: int, clip: float) -> dict[str, Tensor]:
    """What a job in float64 comes to, its dense part in shards or replicas."""
    with ExitStack() as stack:
        made = job(stack, PLANS[name], world, clip=clip)
        list(made.run(share(batch(step), made) for step in range(STEPS)))
        return {name: value.clone() for name, value in made.state().tensors.items() if made.mesh.rank == 0}


@pytest.mark.parametrize("name", ("fsdp-products-away", "hsdp"))
def test_shards_are_clipped_as_one_process_is(ranks, name):
    found, *_ = ranks.run(4, laid_out, name, 4, 0.1)
    mine = model(RowWiseAdaGrad(0.1))
    alone = build(mine, plan_one(mine), optimizer=lambda p: torch.optim.Adam(p, 0.01), clip=0.1)
    list(alone.run(batch(step) for step in range(STEPS)))
    for tensor, value in alone.state().tensors.items():
        if not tensor.startswith("random"):
            torch.testing.assert_close(found[tensor], value, rtol=0, atol=1e-10, msg=tensor)


def moments(dense: Dense) -> dict[str, Tensor]:
    """What a job in float32 over two ranks comes to, moments in bf16."""
    mine = model(RowWiseAdaGrad(0.1), "float32")
    plan = planned(mine, 2, "optimizer.bf16")
    plan = replace(plan, lanes=(*plan.lanes, "gather", "scatter"), dense=replace(dense, state="bfloat16"))
    made = build(mine, plan, optimizer=lambda p: torch.optim.AdamW(p, 0.01))
    lo, hi = 12 * made.mesh.rank, 12 * (made.mesh.rank + 1)
    list(made.run(part(batch(step, dtype=torch.float32), lo, hi) for step in range(STEPS)))
    found = {name: value.clone() for name, value in made.state().tensors.items() if made.mesh.rank == 0}
    made.mesh.close()
    return found


def test_moments_of_shards_are_rounded_as_those_of_whole_parameters(ranks):
    whole, _ = ranks.run(2, moments, Dense(replicate=("rank",)))
    for dense in (Dense(shard=("rank",)), Dense(shard=("rank",), offload=("dense.top",))):
        cut, _ = ranks.run(2, moments, dense)
        assert any(value.dtype == torch.bfloat16 for value in cut.values())
        for name, value in whole.items():
            assert name.startswith("random") or torch.equal(cut[name], value), name
