"""Ranks whose models differ before `build` train rank 0's values, or get an error that names the tensor."""

import pytest
import torch
from test_steps import batch, make_model, shard_plan, single_plan, take
from torch import nn

from shardwright.errors import UserError
from shardwright.kernels import matmul
from shardwright.runtime.build import build
from shardwright.spec.optimizer import Adam

WORLD = 2


def build_changed(change):
    """Build a job whose model `change` modifies on rank 1 before `build`."""
    torch.manual_seed(0)
    model = make_model(Adam(0.01))
    model.dense.register_buffer("offset", torch.zeros(3, dtype=torch.float64))
    model.dense.register_buffer("scratch", torch.tensor(False), persistent=False)
    frozen = model.dense.frozen = nn.Linear(2, 2, dtype=torch.float64).requires_grad_(False)
    with torch.no_grad():
        for value in (frozen.weight, frozen.bias):
            value.fill_(1.0)
    import os

    if os.environ["RANK"] == "1":
        change(model)
    plan = shard_plan(single_plan(model), WORLD, "read", "float64")
    hottest = {f"t{number}": torch.arange(5) for number in range(3)}
    return build(model, plan, optimizer=lambda p: torch.optim.SGD(p, 0.0), hottest=hottest)


@torch.no_grad()
def change_table(model) -> None:
    model.sparse.weight("t1")[3, 2] += 1e-12


def change_optimizer_state(model) -> None:
    saved = model.sparse.optimizer_state()
    saved = {name: value.clone() for name, value in saved.items()}
    saved["t2.step"] += 1
    model.sparse.load_optimizer_state(saved)


def freeze_table(model) -> None:
    model.sparse.weight("t0").requires_grad_(False)


def add_module(model) -> None:
    model.dense.extra = nn.Linear(1, 1, dtype=torch.float64).requires_grad_(False)


def widen(model) -> None:
    model.dense.frozen.weight.data = torch.zeros(2, 3, dtype=torch.float64)


def build_and_close(change) -> str:
    try:
        build_changed(change).mesh.close()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "change, name",
    (
        (change_table, 'table "t1"'),
        (change_optimizer_state, 'table "t2"'),
        (freeze_table, 'table "t0"'),
        (add_module, '"dense.extra.weight"'),
        (widen, '"dense.frozen.weight"'),
    ),
)
def test_an_error_names_the_tensor_that_differs(ranks, change, name):
    for error in ranks.run(WORLD, build_and_close, change):
        assert name in error and "rank 1" in error, error


@torch.no_grad()
def change_dense_values(model) -> None:
    model.dense.offset.add_(7)
    model.dense.scratch.fill_(True)
    for parameter in model.dense.parameters():
        parameter.add_(3)


def initial_dense_values():
    job = build_changed(change_dense_values)
    dense = job.model.dense
    values = {name: value.detach().clone() for name, value in (*dense.named_parameters(), *dense.named_buffers())}
    start, end = (0, 12) if job.mesh.rank == 0 else (12, 24)
    for _ in job.run([take(batch(0), start, end)]):
        pass
    job.mesh.close()
    return values


def test_dense_parameters_and_buffers_start_with_the_values_of_rank_0(ranks):
    first, second = ranks.run(WORLD, initial_dense_values)
    assert set(first) == set(second) and {"offset", "scratch", "frozen.weight"} < set(first)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert not first["scratch"] and float(first["offset"].sum()) == 0.0 and float(first["frozen.bias"][0]) == 1.0


def step_with_loaded_state(world: int):
    """State after one step of a job whose tables had optimizer state before `build`."""
    model = make_model(Adam(0.01))
    generator = torch.Generator().manual_seed(4)
    saved = {
        name: torch.rand(value.shape, generator=generator, dtype=value.dtype) if value.dim() else value + 3
        for name, value in model.sparse.optimizer_state().items()
    }
    model.sparse.load_optimizer_state(saved)
    plan = single_plan(model) if world == 1 else shard_plan(single_plan(model), world, "read", "float64")
    hottest = {f"t{number}": torch.arange(5) for number in range(3)}
    job = build(model, plan, optimizer=lambda p: torch.optim.SGD(p, 0.0), hottest=hottest)
    size = batch(0).batch_size
    for _ in job.run([take(batch(0), size * job.mesh.rank // world, size * (job.mesh.rank + 1) // world)]):
        pass
    tensors = {name: value for name, value in job.state().tensors.items() if not value.is_meta}
    job.mesh.close()
    return tensors


def test_optimizer_state_loaded_before_build_is_kept(ranks):
    single, sharded = (ranks.run(world, step_with_loaded_state, world)[0] for world in (1, WORLD))
    for name, value in single.items():
        if name.startswith(("tables.", "model.sparse")):
            torch.testing.assert_close(sharded[name], value, rtol=0, atol=1e-10, msg=name)


def agree_on_library(choices: list[str]) -> str:
    import os

    matmul.use_library(choices[int(os.environ["RANK"])])
    job = build_changed(lambda _: None)
    job.mesh.close()
    agreed = matmul.library_in_use()
    matmul.use_library(matmul.preferred_library())
    return agreed


@pytest.mark.parametrize(
    "choices, agreed", ((["onednn", "onednn"], "onednn"), (["blas", "onednn"], "blas"), (["onednn", "blas"], "blas"))
)
def test_ranks_on_different_processors_agree_on_a_matmul_library(ranks, choices, agreed):
    assert ranks.run(WORLD, agree_on_library, choices) == [agreed] * WORLD
