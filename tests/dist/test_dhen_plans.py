"""DHEN with every parallelism strategy of its dense model over two hosts of two ranks, compared with one process."""

import os
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
from test_dense_plans import AXES, DDP, FSDP, HSDP
from test_steps import SIZE, STEPS, batch, shard_plan, single_plan, tables, take

from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.ensemble import EnsembleSpec
from shardwright.layers.mixing import INTERACTIONS
from shardwright.measure.describe import block_names
from shardwright.models.dhen import DHEN
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.spec.lanes import LANES
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
    "fsdp-full-offload": replace(FSDP, recompute=FULL, offload=NAMES),
    "hsdp": HSDP,
    "hsdp-full": replace(HSDP, recompute=FULL),
    "hsdp-products-offload": replace(HSDP, recompute=PRODUCTS, offload=NAMES[1:3]),
}
TOLERANCES = {"float64": 1e-10, "float32": 1e-4}


def make_model(dtype: str, device: str = "cpu") -> DHEN:
    torch.manual_seed(5)
    with torch.device(device):
        return make_dhen(dtype)


def make_dhen(dtype: str) -> DHEN:
    features = [Feature("a", "t0", "mean"), Feature("b", "t1"), Feature("c", "t2"), Feature("d", "t2")]
    sparse = EmbeddingBags(tables(dtype), features, RowWiseAdaGrad(0.1))
    return DHEN(sparse, 5, bottom=[16, 8], top=[16], layers=FORMS).to(getattr(torch, dtype))


def plan_single(model: DHEN, dtype: str) -> Plan:
    return single_plan(model, batch(0, dtype=getattr(torch, dtype)))


def optimizer(dtype: str):
    """SGD in float32: Adam amplifies gradients near 0, which are mostly rounding errors there."""
    return {
        "float64": lambda p: torch.optim.Adam(p, 0.01),
        "float32": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    }[dtype]


def build_over_hosts(stack: ExitStack, model: DHEN, dense: Dense, dtype: str) -> Job:
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setenv("LOCAL_WORLD_SIZE", "2")
    patch.setenv("LOCAL_RANK", str(int(os.environ["RANK"]) % 2))
    plan = shard_plan(plan_single(model, dtype), 4, "read", dtype)
    lanes = (*LANES, "gather", "scatter")
    plan = replace(plan, axes=AXES, lanes=lanes, dense=replace(dense, dtype=dtype))
    job = build(model, plan, optimizer=optimizer(dtype))
    stack.callback(job.mesh.close)
    return job


def train_on_rank(dense: Dense, dtype: str, device: str = "cpu"):
    with ExitStack() as stack:
        job = build_over_hosts(stack, make_model(dtype, device), dense, dtype)
        start, stop = [*pairwise(SIZE * at // 4 for at in range(5))][job.mesh.rank]
        local = (take(batch(step, dtype=getattr(torch, dtype)), start, stop) for step in range(STEPS))
        logits = [out.logits for out in job.run(local)]
        tensors = job.state().tensors
        return logits, tensors if job.mesh.rank == 0 else {}


@cache
def train_reference(dtype: str, device: str = "cpu"):
    model = make_model(dtype, device)
    job = build(model, plan_single(model, dtype), optimizer=optimizer(dtype))
    logits = [out.logits for out in job.run(batch(step, dtype=getattr(torch, dtype)) for step in range(STEPS))]
    return logits, dict(job.state().tensors)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_dense_strategy_trains_dhen_as_one_process(ranks, name, dtype):
    check(ranks, name, dtype, "cpu")


@pytest.mark.parametrize("name", ["fsdp", "hsdp-products-offload"])
def test_blocks_sharded_during_initialization_start_with_the_values_of_one_process(ranks, name):
    check(ranks, name, "float64", "meta")


def check(ranks, name: str, dtype: str, device: str) -> None:
    logits, state = train_reference(dtype, device)
    answers = ranks.run(4, train_on_rank, LAYOUTS[name], dtype, device)
    compare = partial(torch.testing.assert_close, rtol=0, atol=TOLERANCES[dtype])
    for step, expected in enumerate(logits):
        value = torch.cat([answer[0][step] for answer in answers])
        compare(value, expected, msg=lambda m, n=step: f"step {n}: {m}")
    for key in (key for key in state if not key.startswith("random")):
        compare(answers[0][1][key].double(), state[key].double(), msg=lambda m, n=key: f"{n}: {m}")


def initialization_bytes(dense: Dense) -> tuple[int, int, int]:
    """Bytes of this rank's parameters: maximum during initialization, at its end, and of the largest block."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        model, sizes, reset = make_model("float64", "meta"), list[int](), torch.nn.Linear.reset_parameters

        def count_bytes() -> int:
            storages = (parameter.untyped_storage() for parameter in model.dense.parameters() if not parameter.is_meta)
            return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

        def count_and_reset(module: torch.nn.Linear) -> None:
            sizes.append(count_bytes())
            reset(module)

        patch.setattr(torch.nn.Linear, "reset_parameters", count_and_reset)
        blocks = (model.get_submodule(name).parameters() for name in NAMES)
        largest_block = max(8 * sum(parameter.numel() for parameter in block) for block in blocks)
        build_over_hosts(stack, model, dense, "float64")
        return max(sizes), count_bytes(), largest_block


def test_no_rank_has_all_weights_during_initialization(ranks):
    for most, last, largest_block in ranks.run(4, initialization_bytes, FSDP):
        assert last < 0.3 * 8 * sum(parameter.numel() for parameter in make_model("float64").dense.parameters())
        assert most <= last + largest_block


def test_block_names_of_the_model():
    assert block_names(make_model("float64")) == NAMES
