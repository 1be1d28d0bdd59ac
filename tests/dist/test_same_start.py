"""Ranks with different models before `build`: they train rank 0's values, or get an error that names the tensor."""

import pytest
import torch
from test_steps import batch, cut_plan, model, part, plan_one
from torch import nn

from shardwright.errors import UserError
from shardwright.kernels import matmul
from shardwright.runtime.build import build
from shardwright.spec.optimizer import Adam

WORLD = 2


def made(change, later=None):
    """A job whose model is changed on rank 1 before `build`; returns the error."""
    torch.manual_seed(0)
    mine = model(Adam(0.01))
    mine.dense.register_buffer("offset", torch.zeros(3, dtype=torch.float64))
    mine.dense.register_buffer("scratch", torch.tensor(False), persistent=False)
    frozen = mine.dense.frozen = nn.Linear(2, 2, dtype=torch.float64).requires_grad_(False)
    with torch.no_grad():
        for value in (frozen.weight, frozen.bias):
            value.fill_(1.0)
    import os

    if os.environ["RANK"] == "1":
        change(mine)
    plan = cut_plan(plan_one(mine), WORLD, "read", "float64")
    hottest = {f"t{at}": torch.arange(5) for at in range(3)}
    return build(mine, plan, optimizer=lambda p: torch.optim.SGD(p, 0.0), hottest=hottest)


@torch.no_grad()
def another_table(mine) -> None:
    mine.sparse.weight("t1")[3, 2] += 1e-12


def another_state(mine) -> None:
    saved = mine.sparse.optimizer_state()
    saved = {name: value.clone() for name, value in saved.items()}
    saved["t2.step"] += 1
    mine.sparse.load_optimizer_state(saved)


def trains_a_table(mine) -> None:
    mine.sparse.weight("t0").requires_grad_(False)


def more_of_a_module(mine) -> None:
    mine.dense.extra = nn.Linear(1, 1, dtype=torch.float64).requires_grad_(False)


def wider(mine) -> None:
    mine.dense.frozen.weight.data = torch.zeros(2, 3, dtype=torch.float64)


def refused(change) -> str:
    try:
        made(change).mesh.close()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "change, name",
    (
        (another_table, 'table "t1"'),
        (another_state, 'table "t2"'),
        (trains_a_table, 'table "t0"'),
        (more_of_a_module, '"dense.extra.weight"'),
        (wider, '"dense.frozen.weight"'),
    ),
)
def test_models_that_differ_are_refused_by_name(ranks, change, name):
    for told in ranks.run(WORLD, refused, change):
        assert name in told and "rank 1" in told, told


@torch.no_grad()
def other_dense_values(mine) -> None:
    mine.dense.offset.add_(7)
    mine.dense.scratch.fill_(True)
    for parameter in mine.dense.parameters():
        parameter.add_(3)


def beginning():
    job = made(other_dense_values)
    dense = job.model.dense
    found = {name: value.detach().clone() for name, value in (*dense.named_parameters(), *dense.named_buffers())}
    start, end = (0, 12) if job.mesh.rank == 0 else (12, 24)
    for _ in job.run([part(batch(0), start, end)]):
        pass
    job.mesh.close()
    return found


def test_dense_parameters_and_buffers_begin_with_rank_0s_values(ranks):
    first, second = ranks.run(WORLD, beginning)
    assert set(first) == set(second) and {"offset", "scratch", "frozen.weight"} < set(first)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert not first["scratch"] and float(first["offset"].sum()) == 0.0 and float(first["frozen.bias"][0]) == 1.0


def loaded_before(world: int):
    """A step of a job whose tables had optimizer state before `build`."""
    mine = model(Adam(0.01))
    draws = torch.Generator().manual_seed(4)
    saved = {
        name: torch.rand(value.shape, generator=draws, dtype=value.dtype) if value.dim() else value + 3
        for name, value in mine.sparse.optimizer_state().items()
    }
    mine.sparse.load_optimizer_state(saved)
    plan = plan_one(mine) if world == 1 else cut_plan(plan_one(mine), world, "read", "float64")
    hottest = {f"t{at}": torch.arange(5) for at in range(3)}
    job = build(mine, plan, optimizer=lambda p: torch.optim.SGD(p, 0.0), hottest=hottest)
    size = batch(0).batch_size
    for _ in job.run([part(batch(0), size * job.mesh.rank // world, size * (job.mesh.rank + 1) // world)]):
        pass
    tensors = {name: value for name, value in job.state().tensors.items() if not value.is_meta}
    job.mesh.close()
    return tensors


def test_optimizer_state_loaded_before_build_is_kept(ranks):
    whole, found = ranks.run(1, loaded_before, 1)[0], ranks.run(WORLD, loaded_before, WORLD)[0]
    for name, value in whole.items():
        if name.startswith(("tables.", "model.sparse")):
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=name)


def library(choices: list[str]) -> str:
    import os

    matmul.use_library(choices[int(os.environ["RANK"])])
    job = made(lambda _: None)
    job.mesh.close()
    found = matmul.library_in_use()
    matmul.use_library(matmul.preferred_library())
    return found


@pytest.mark.parametrize(
    "choices, agreed", ((["onednn", "onednn"], "onednn"), (["blas", "onednn"], "blas"), (["onednn", "blas"], "blas"))
)
def test_ranks_on_processors_of_other_kinds_agree_on_a_library(ranks, choices, agreed):
    assert ranks.run(WORLD, library, choices) == [agreed] * WORLD
