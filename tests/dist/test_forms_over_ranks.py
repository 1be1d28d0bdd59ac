"""Batch norm, dropout and other forms of MLPs over ranks, compared with one process."""

from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from test_dense_plans import FULL
from test_multi_task_ranks import TASKS, batch
from test_steps import assert_same, shard_plan, single_plan, tables, take
from torch import nn

from shardwright.errors import UserError
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.mlp import MLPForm
from shardwright.layers.task_experts import ExtractionSpec
from shardwright.models.autoint import AutoInt
from shardwright.models.dcn import DCN
from shardwright.models.dlrm import DLRM
from shardwright.models.multi_task import MMoEDense, MultiTaskModel, PLEDense, SharedBottomDense
from shardwright.runtime.build import build
from shardwright.spec.axes import Axis
from shardwright.spec.lanes import LANES
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.plan import Dense
from shardwright.spec.workload import Feature

STEPS = 6
# Not Adam: the bias before a batch norm has no gradient but rounding, which Adam would scale up.
FORM = MLPForm("prelu", "batch", 0.3, output_bias=-1.0)
DDP = Dense(replicate=("data@rank",))
TOWERS = {"tower_hidden": [8], "form": FORM, "output_biases": [-1.0, None]}
MULTI_TASK = {
    "shared_bottom": partial(SharedBottomDense, bottom=[16, 8], **TOWERS),
    "mmoe": partial(MMoEDense, num_experts=3, expert_hidden=[16, 8], **TOWERS),
    "ple": partial(PLEDense, extraction=ExtractionSpec(1, 1, [8]), **TOWERS),
}


def make(kind: str) -> nn.Module:
    torch.manual_seed(3)
    features = [Feature("a", "t0", "mean"), Feature("b", "t1"), Feature("c", "t2"), Feature("d", "t2")]
    sparse = EmbeddingBags(tables(), features, RowWiseAdaGrad(0.1))
    if kind == "dlrm":
        model = DLRM(sparse, 5, bottom=[16, 8], top=[16], form=FORM)
    elif kind == "dcn":
        model = DCN(sparse, 5, num_cross=2, hidden=[16], v2=True, form=FORM)
    elif kind == "autoint":
        model = AutoInt(sparse, 5, num_layers=2, num_heads=2, head_dim=4, hidden=[16], form=FORM)
    else:
        model = MultiTaskModel(sparse, MULTI_TASK[kind](5 + sum(sparse.dims), 2), TASKS)
    return model.to(torch.float64)


def placed(step: int, start: int, stop: int):
    return replace(take(batch(step), start, stop), start=start)


def dense_plan(model, dense: Dense, world: int):
    plan = shard_plan(single_plan(model, batch(0)), world, "read", "float64")
    lanes = (*LANES, "gather", "scatter") if dense.shard else LANES
    axes = (Axis("data", "rank", world),)
    return replace(plan, axes=axes, lanes=lanes, dense=replace(dense, dtype="float64"))


def train_on_rank(kind: str, dense: Dense, sizes: tuple[int, ...]):
    world = len(sizes)
    model = make(kind)
    with ExitStack() as stack:
        job = build(model, dense_plan(model, dense, world), optimizer=lambda p: torch.optim.SGD(p, 0.1))
        stack.callback(job.mesh.close)
        start = sum(sizes[: job.mesh.rank])
        stop = start + sizes[job.mesh.rank]
        outputs = [out.logits for out in job.run(placed(step, start, stop) for step in range(STEPS))]
        evaluated = [out.logits for out in job.evaluate([placed(100, start, stop)])]
        state = job.state()
        return outputs + evaluated, {name: value for name, value in state.tensors.items() if not value.is_meta}


@cache
def train_alone(kind: str):
    model = make(kind)
    job = build(model, single_plan(model, batch(0)), optimizer=lambda p: torch.optim.SGD(p, 0.1))
    outputs = [out.logits for out in job.run(placed(step, 0, 24) for step in range(STEPS))]
    return outputs + [out.logits for out in job.evaluate([placed(100, 0, 24)])], job.state().tensors


FSDP = Dense(shard=("data@rank",))
CASES = {
    "dlrm-ddp": ("dlrm", DDP, (13, 11)),
    "dlrm-empty": ("dlrm", DDP, (10, 0, 14)),
    "dlrm-full": ("dlrm", replace(DDP, recompute=FULL), (6, 6, 6, 6)),
    "dlrm-fsdp-full": ("dlrm", replace(FSDP, recompute=FULL), (12, 12)),
    "dcn-fsdp": ("dcn", FSDP, (12, 12)),
    "autoint-fsdp": ("autoint", FSDP, (6, 6, 6, 6)),
    "shared-bottom-ddp": ("shared_bottom", DDP, (13, 11)),
    "mmoe-ddp": ("mmoe", DDP, (10, 0, 14)),
    "mmoe-fsdp": ("mmoe", FSDP, (12, 12)),
    "ple-fsdp": ("ple", FSDP, (6, 6, 6, 6)),
}


@pytest.mark.parametrize(("kind", "dense", "sizes"), CASES.values(), ids=CASES)
def test_batch_norm_and_dropout_over_ranks_equal_one_process(ranks, kind, dense, sizes):
    answers = ranks.run(len(sizes), train_on_rank, kind, dense, sizes)
    outputs, state = train_alone(kind)
    for step, expected in enumerate(outputs):
        logits = torch.cat([answer[0][step] for answer in answers])
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    assert any("running_mean" in name for name in state)
    assert_same(answers[0][1], state)


def build_with_torch_norm(world: int) -> str:
    model = make("dlrm")
    model.dense.bottom.steps[1] = nn.BatchNorm1d(16).double()
    plan = dense_plan(model, DDP, world)
    with pytest.raises(UserError) as error:
        build(model, plan, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    return str(error.value)


def test_torchs_own_batch_norm_is_refused_over_ranks(ranks):
    for message in ranks.run(2, build_with_torch_norm, 2):
        assert message.startswith('"dense.bottom.steps.1" is torch\'s BatchNorm1d, which normalizes over the samples')
