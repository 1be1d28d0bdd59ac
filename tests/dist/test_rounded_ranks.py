"""Reduced precision over ranks: 16-bit tables as in one process, equal dense optimizer state on all ranks, clipping."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_dense_plans import PLANS, local_batch, make_job
from test_steps import ROWS, STEPS, batch, make_model, shard_plan, single_plan, table_plans, tables, take
from torch import Tensor, nn

from shardwright.comm.mesh import Mesh
from shardwright.dense.clip_grad_norm import clip_grad_norm
from shardwright.jagged import Batch, Vectors
from shardwright.layers.embedding import EmbeddingBags
from shardwright.measure.describe import describe
from shardwright.models.dlrm import DLRM
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_for, plan_single_process
from shardwright.spec.optimizer import AdaGrad, Adam, RowWiseAdaGrad, SparseOptimizer
from shardwright.spec.plan import Dense, Plan, Rect
from shardwright.spec.workload import Feature

ALLOW_KEYS = {"float16": "tables.fp16", "bfloat16": "tables.bf16"}


class Sum(nn.Module):
    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        return vectors.pooled_BD.sum(1)


class MeanOfClicks(nn.Module):
    """Loss whose gradients are 1/16 or 0 for a batch of 16, so that their sums are exact in any order."""

    def forward(self, logits: Tensor, batch: Batch) -> Tensor:
        return (logits * batch.labels["click"]).mean()


class LinearModel(nn.Module):
    def __init__(self, optimizer: SparseOptimizer) -> None:
        super().__init__()
        features = [Feature("a", "t0"), Feature("b", "t1"), Feature("c", "t2"), Feature("d", "t2")]
        self.sparse = EmbeddingBags(tables("float32"), features, optimizer)
        self.dense, self.loss = Sum(), MeanOfClicks()

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(batch, self.sparse(batch))


def train_unsplit_tables(world: int, dtype: str, optimizer: SparseOptimizer) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits and state of this rank; table 0 is on the first rank, table 1 on all, table 2 on the last, all unsplit."""
    torch.manual_seed(3)
    model = LinearModel(optimizer)
    batches = [replace(batch(step, 16, torch.float32), weights=None) for step in range(STEPS)]
    plan = plan_single_process(model, describe(model, batches[0]), [ALLOW_KEYS[dtype]])
    holders = ((0,), tuple(range(world)), (world - 1,))
    sharded = [
        replace(plan, order="id", rects=(Rect(plan.table, (0, rows), (0, 8), ranks),), travel="vectors")
        for plan, rows, ranks in zip(table_plans(1), ROWS, holders, strict=True)
    ]
    if world > 1:
        plan = replace(shard_plan(plan, world, "read", "float32", sharded), allow=(ALLOW_KEYS[dtype],))
    job = build(model, plan)
    lo, hi = 16 * job.mesh.rank // world, 16 * (job.mesh.rank + 1) // world
    logits = [out.logits for out in job.run(take(whole, lo, hi) for whole in batches)]
    state = {name: value for name, value in job.state().tensors.items() if not value.is_meta}
    job.mesh.close()
    return logits, state


@pytest.mark.parametrize("dtype", ALLOW_KEYS)
@pytest.mark.parametrize("optimizer", (AdaGrad(0.1), RowWiseAdaGrad(0.1), Adam(0.05)), ids=lambda opt: opt.kind)
def test_16_bit_tables_have_the_same_bits_as_in_one_process(ranks, dtype, optimizer):
    [(expected, state)] = ranks.run(1, train_unsplit_tables, 1, dtype, optimizer)
    answers = ranks.run(2, train_unsplit_tables, 2, dtype, optimizer)
    for step, logits in enumerate(expected):
        assert torch.equal(torch.cat([answer[0][step] for answer in answers]), logits)
    tensors = answers[0][1]
    assert tensors["model.sparse.embedding_bags.t0.weight"].dtype == getattr(torch, dtype)
    assert all(torch.equal(tensors[name], state[name]) for name in state if not name.startswith("random"))


def plan_with_allow(model: nn.Module, world: int, *allow: str) -> Plan:
    example = batch(0, dtype=torch.float32)
    plan = plan_single_process(model, describe(model, example), allow)
    return replace(shard_plan(plan, world, "read", "float32"), allow=allow)


def final_dense_state(world: int, root: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's final dense weights and moments: of a full run, and of a run resumed from a checkpoint halfway."""
    states = []
    for first in (0, STEPS // 2):
        torch.manual_seed(3)
        model = make_model(RowWiseAdaGrad(0.1), "float32")
        plan = plan_with_allow(model, world, "tables.bf16", "optimizer.bf16")
        job = build(model, plan, optimizer=lambda p: torch.optim.AdamW(p, 0.01), clip=0.5)
        lo, hi = 24 * job.mesh.rank // world, 24 * (job.mesh.rank + 1) // world
        if first:
            job.load(root / f"step-{first:08}")
        for step in range(first, STEPS):
            list(job.run([take(batch(step, dtype=torch.float32), lo, hi)]))
            if job.step == STEPS // 2:
                job.save(root)
        moments = {
            f"{number}.{name}": value
            for number, values in job.optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }
        states.append({name: value.clone() for name, value in model.dense.state_dict().items()} | moments)
        job.mesh.close()
    return states[0], states[1]


def test_dense_moments_have_equal_bits_on_all_ranks_and_after_a_resume(ranks, tmp_path):
    (first, resumed), (second, _) = ranks.run(2, final_dense_state, 2, tmp_path)
    assert {value.dtype for name, value in first.items() if name.endswith("exp_avg")} == {torch.bfloat16}
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert torch.equal(value, resumed[name]), name


def train_clipped(world: int, max_norm: float) -> dict[str, Tensor]:
    model = make_model(RowWiseAdaGrad(0.1))
    plan = shard_plan(single_plan(model), world, "read", "float64") if world > 1 else single_plan(model)
    job = build(model, plan, optimizer=lambda p: torch.optim.SGD(p, 0.1), clip=max_norm)
    lo, hi = 24 * job.mesh.rank // world, 24 * (job.mesh.rank + 1) // world
    list(job.run(take(batch(step), lo, hi) for step in range(STEPS)))
    state = {name: value.clone() for name, value in model.dense.state_dict().items()}
    job.mesh.close()
    return state


def test_gradients_of_replicas_are_clipped_as_in_one_process(ranks):
    [expected] = ranks.run(1, train_clipped, 1, 0.1)
    [unclipped] = ranks.run(1, train_clipped, 1, 1e9)
    for state in ranks.run(2, train_clipped, 2, 0.1):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)
    assert any(float((expected[name] - unclipped[name]).abs().max()) > 1e-3 for name in expected)


def clip_shards(sizes: tuple[int, int], max_norm: float) -> tuple[float, Tensor, Tensor]:
    """Clip a sharded and a replicated gradient; returns their norm, and this rank's shard and replica of them."""
    mesh = Mesh((("shard", 2),), groups=[("dense", ())])
    generator = torch.Generator().manual_seed(7)
    full, values = (torch.randn(size, generator=generator) for size in (sum(sizes), 5))
    shard, replica = nn.Parameter(full.split(sizes)[mesh.rank]), nn.Parameter(values)
    shard.grad, replica.grad = shard.detach().clone(), replica.detach().clone()
    norm = clip_grad_norm([([shard], [mesh.group(lane="dense")]), ([replica], [])], max_norm)
    mesh.close()
    return norm, shard.grad, replica.grad


@pytest.mark.parametrize("sizes", ((3, 4), (7, 0)))
@pytest.mark.parametrize("max_norm", (0.5, 100.0))
def test_shards_are_clipped_by_the_global_norm(ranks, sizes, max_norm):
    generator = torch.Generator().manual_seed(7)
    full, values = (torch.randn(size, generator=generator) for size in (sum(sizes), 5))
    expected = float((full.double() ** 2).sum() + (values.double() ** 2).sum()) ** 0.5
    answers = ranks.run(2, clip_shards, sizes, max_norm)
    factor = min(1.0, max_norm / (expected + 1e-6))
    for norm, _, replica in answers:
        assert norm == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(replica, values * factor)
    torch.testing.assert_close(torch.cat([shard for _, shard, _ in answers]), full * factor)


def plan_with_allowed_rounding() -> tuple[set[str], str, tuple[str, ...]]:
    """Precisions of the plan for tables whose rows are longer than one memory access."""
    features = [Feature("a", "t0", "mean"), Feature("b", "t1"), Feature("c", "t2"), Feature("d", "t2")]
    wide = [replace(table, dim=64) for table in tables("float32")]
    model = DLRM(EmbeddingBags(wide, features, RowWiseAdaGrad(0.1)), 5, bottom=[16, 64], top=[16])
    plan = plan_for(model, batch(0, dtype=torch.float32), allow=["tables.fp16", "optimizer.bf16"])
    return {table.placement.weight_dtype for table in plan.tables}, plan.dense.state, plan.allow


def test_the_planner_rounds_what_a_script_allows(ranks):
    for dtypes, state, allow in ranks.run(2, plan_with_allowed_rounding):
        assert dtypes == {"float16"} and state == "bfloat16"
        assert allow == ("tables.fp16", "optimizer.bf16")


def train_dense_strategy(name: str, world: int, clip: float) -> dict[str, Tensor]:
    """Final state of a job in float64 with this dense strategy, on rank 0."""
    with ExitStack() as stack:
        job = make_job(stack, PLANS[name], world, clip=clip)
        list(job.run(local_batch(batch(step), job) for step in range(STEPS)))
        return {name: value.clone() for name, value in job.state().tensors.items() if job.mesh.rank == 0}


@pytest.mark.parametrize("name", ("fsdp-products-offload", "hsdp"))
def test_gradients_of_shards_are_clipped_as_in_one_process(ranks, name):
    tensors, *_ = ranks.run(4, train_dense_strategy, name, 4, 0.1)
    model = make_model(RowWiseAdaGrad(0.1))
    job = build(model, single_plan(model), optimizer=lambda p: torch.optim.Adam(p, 0.01), clip=0.1)
    list(job.run(batch(step) for step in range(STEPS)))
    for tensor, value in job.state().tensors.items():
        if not tensor.startswith("random"):
            torch.testing.assert_close(tensors[tensor], value, rtol=0, atol=1e-10, msg=tensor)


def train_with_bf16_moments(dense: Dense) -> dict[str, Tensor]:
    """Final state of a job in float32 over two ranks with bf16 moments, on rank 0."""
    model = make_model(RowWiseAdaGrad(0.1), "float32")
    plan = plan_with_allow(model, 2, "optimizer.bf16")
    plan = replace(plan, lanes=(*plan.lanes, "gather", "scatter"), dense=replace(dense, state="bfloat16"))
    job = build(model, plan, optimizer=lambda p: torch.optim.AdamW(p, 0.01))
    lo, hi = 12 * job.mesh.rank, 12 * (job.mesh.rank + 1)
    list(job.run(take(batch(step, dtype=torch.float32), lo, hi) for step in range(STEPS)))
    tensors = {name: value.clone() for name, value in job.state().tensors.items() if job.mesh.rank == 0}
    job.mesh.close()
    return tensors


def test_moments_of_shards_are_rounded_like_moments_of_replicas(ranks):
    replicated, _ = ranks.run(2, train_with_bf16_moments, Dense(replicate=("data@rank",)))
    for dense in (Dense(shard=("data@rank",)), Dense(shard=("data@rank",), offload=("dense.top",))):
        sharded, _ = ranks.run(2, train_with_bf16_moments, dense)
        assert any(value.dtype == torch.bfloat16 for value in sharded.values())
        for name, value in replicated.items():
            assert name.startswith("random") or torch.equal(sharded[name], value), name
