"""DHEN with its dense part laid out in every way over two hosts of two ranks, against the same job in one process."""

import os
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
from test_dense_plans import DDP, FSDP, HSDP, ROUND
from test_steps import SIZE, STEPS, batch, cut_plan, part, plan_one, tables

from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.ensemble import EnsembleSpec
from shardwright.layers.mixing import INTERACTIONS
from shardwright.measure.describe import block_names
from shardwright.models.dhen import DHEN
from shardwright.planner.step.stages import LANES
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.plan import Dense, Plan, Recompute
from shardwright.spec.workload import Feature

LINEAR, CROSS, ATTENTION = (INTERACTIONS[name] for name in ("linear", "dcn_v2", "attention"))
DOTS = partial(INTERACTIONS["dlrm"], hidden=[12])
FORMS = (
    EnsembleSpec((DOTS, ATTENTION), 5, "concat", raw=True),
    EnsembleSpec((DOTS, LINEAR, CROSS), 4, "softmax_sum", raw=True),
    EnsembleSpec((INTERACTIONS["convolution"], INTERACTIONS["fm"]), 4, "sum"),
)
NAMES = ("dense.bottom", *(f"dense.blocks.{at}" for at in range(len(FORMS))), "dense.head")
FULL = tuple(Recompute(name) for name in NAMES)
PRODUCTS = tuple(Recompute(name, "products") for name in NAMES)
LAYOUTS = {
    "ddp": DDP,
    "ddp-products": replace(DDP, recompute=PRODUCTS),
    "fsdp": FSDP,
    "fsdp-full-away": replace(FSDP, recompute=FULL, offload=NAMES),
    "hsdp": HSDP,
    "hsdp-full": replace(HSDP, recompute=FULL),
    "hsdp-products-away": replace(HSDP, recompute=PRODUCTS, offload=NAMES[1:3]),
}
NEAR = {"float64": 1e-10, "float32": 1e-4}


def model(dtype: str, device: str = "cpu") -> DHEN:
    torch.manual_seed(5)
    with torch.device(device):
        return whole(dtype)


def whole(dtype: str) -> DHEN:
    features = [Feature("a", "t0", "mean"), Feature("b", "t1"), Feature("c", "t2"), Feature("d", "t2")]
    sparse = EmbeddingBags(tables(dtype), features, RowWiseAdaGrad(0.1))
    return DHEN(sparse, 5, bottom=[16, 8], top=[16], layers=FORMS).to(getattr(torch, dtype))


def planned(mine: DHEN, dtype: str) -> Plan:
    return plan_one(mine, batch(0, dtype=getattr(torch, dtype)))


def optimizer(dtype: str):
    """Adam makes much of gradients that are all but nothing, which are rounding in float32."""
    return {
        "float64": lambda p: torch.optim.Adam(p, 0.01),
        "float32": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    }[dtype]


def over_hosts(stack: ExitStack, mine: DHEN, dense: Dense, dtype: str) -> Job:
    few = stack.enter_context(pytest.MonkeyPatch.context())
    few.setenv("LOCAL_WORLD_SIZE", "2")
    few.setenv("LOCAL_RANK", str(int(os.environ["RANK"]) % 2))
    plan = cut_plan(planned(mine, dtype), 4, "read", dtype)
    lanes = (*LANES, "gather", "scatter")
    plan = replace(plan, axes=ROUND, lanes=lanes, dense=replace(dense, dtype=dtype))
    job = build(mine, plan, optimizer=optimizer(dtype))
    stack.callback(job.mesh.close)
    return job


def trained(dense: Dense, dtype: str, device: str = "cpu"):
    with ExitStack() as stack:
        job = over_hosts(stack, model(dtype, device), dense, dtype)
        start, stop = [*pairwise(SIZE * at // 4 for at in range(5))][job.mesh.rank]
        own = (part(batch(step, dtype=getattr(torch, dtype)), start, stop) for step in range(STEPS))
        logits = [one.logits for one in job.run(own)]
        tensors = job.state().tensors
        return logits, tensors if job.mesh.rank == 0 else {}


@cache
def alone(dtype: str, device: str = "cpu"):
    mine = model(dtype, device)
    job = build(mine, planned(mine, dtype), optimizer=optimizer(dtype))
    logits = [one.logits for one in job.run(batch(step, dtype=getattr(torch, dtype)) for step in range(STEPS))]
    return logits, dict(job.state().tensors)


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_dhen_as_one_process(ranks, name, dtype):
    check(ranks, name, dtype, "cpu")


@pytest.mark.parametrize("name", ["fsdp", "hsdp-products-away"])
def test_blocks_that_are_cut_as_they_are_made_begin_as_one_process_does(ranks, name):
    check(ranks, name, "float64", "meta")


def check(ranks, name: str, dtype: str, device: str) -> None:
    logits, state = alone(dtype, device)
    answers = ranks.run(4, trained, LAYOUTS[name], dtype, device)
    for step, wanted in enumerate(logits):
        found = torch.cat([each[0][step] for each in answers])
        torch.testing.assert_close(found, wanted, rtol=0, atol=NEAR[dtype], msg=lambda m, n=step: f"step {n}: {m}")
    for key in (key for key in state if not key.startswith("random")):
        found = answers[0][1][key].double()
        torch.testing.assert_close(found, state[key].double(), rtol=0, atol=NEAR[dtype], msg=lambda m, n=key: f"{n}: {m}")


def making(dense: Dense) -> tuple[int, int, int]:
    """Bytes of parameters that this rank has at most while a model is made, at its end, and of its largest block."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        mine, seen, reset = model("float64", "meta"), list[int](), torch.nn.Linear.reset_parameters

        def held() -> int:
            storages = (one.untyped_storage() for one in mine.dense.parameters() if not one.is_meta)
            return sum({one.data_ptr(): one.nbytes() for one in storages}.values())

        def noted(module: torch.nn.Linear) -> None:
            seen.append(held())
            reset(module)

        patch.setattr(torch.nn.Linear, "reset_parameters", noted)
        blocks = (mine.get_submodule(name).parameters() for name in NAMES)
        largest = max(8 * sum(one.numel() for one in block) for block in blocks)
        over_hosts(stack, mine, dense, "float64")
        return max(seen), held(), largest


def test_no_rank_has_all_weights_at_the_start(ranks):
    for most, last, largest in ranks.run(4, making, FSDP):
        assert last < 0.3 * 8 * sum(one.numel() for one in model("float64").dense.parameters())
        assert most <= last + largest


def test_the_blocks_are_those_of_the_model():
    assert block_names(model("float64")) == NAMES
