"""Ranks that share one fake GPU (tests/fake_gpu.py): messages are staged, and steps equal those of one process.

Nothing here has run on a GPU; tests/gpu has the same on one.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from fake_gpu import fake_gpu
from test_dense_plans import FSDP, HSDP, plan_dense
from test_steps import ROWS, SIZE, assert_same, batch, make_model, shard_plan, single_plan, take

from shardwright.comm import collective, point_to_point
from shardwright.comm.backend import GLOO
from shardwright.comm.flat_collectives import all_gather_flat, reduce_scatter_flat
from shardwright.comm.mesh import Mesh
from shardwright.comm.point_to_point import TensorSpec
from shardwright.comm.staging import Staging
from shardwright.runtime.build import build
from shardwright.runtime.dense_layout import mesh_for
from shardwright.spec.optimizer import Adam, RowWiseAdaGrad

STEPS = 4
FORMS = (
    ("tables", RowWiseAdaGrad(0.1), False),
    ("tables", Adam(0.01), True),
    ("fsdp", RowWiseAdaGrad(0.1), True),
    ("hsdp", RowWiseAdaGrad(0.1), True),
)


def run_collectives(world: int, staged: bool, memory: bool) -> list[torch.Tensor]:
    """The results of each collective on a rank, of tensors on the CPU; `staged`: through copies of them."""
    stage: Callable[..., Staging] = lambda *_, **__: Staging(torch.device("cpu"))  # noqa: E731
    with mock.patch("shardwright.comm.mesh.staging_for", stage) if staged else mock.patch("builtins.id", id):
        mesh = Mesh((("host", 2), ("local", world // 2)), timeout_seconds=30, memory=memory)
    group, rank = mesh.group(), mesh.rank
    assert group.staging.applies_to(torch.ones(1)) is staged
    draw = torch.Generator().manual_seed(rank)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    sizes = [2 + other for other in range(world)]
    results: list[Any] = [
        collective.all_reduce(random(1000), group).wait(),
        collective.all_reduce(random(300_000), group).wait(),
        collective.all_reduce_bf16(random(300_000), group).wait(),
        collective.broadcast(random(7), 1, group).wait(),
        collective.all_gather(random(2 + rank, 3), sizes, group).wait(),
        collective.reduce_scatter(random(sum(sizes), 2), sizes, group).wait(),
        collective.all_to_all(random(sum(sizes), 2), sizes, [2 + rank] * world, group).wait(),
        collective.many_to_one(random(2 + rank), sizes, 0, group).wait(),
        all_gather_flat(random(sum(sizes)), sizes, group).wait(),
        reduce_scatter_flat(random(sum(sizes)), sizes, group).wait(),
    ]
    following, preceding = (rank + 1) % world, (rank - 1) % world
    received = point_to_point.receive([TensorSpec((5,), torch.float32)], preceding, group)
    point_to_point.send([random(5)], following, group).wait()
    results += received.wait()
    mesh.close()
    return results


@pytest.mark.parametrize("world, memory", ((2, True), (2, False), (4, False)))
def test_staged_collectives_are_equal_to_the_bit(ranks, world, memory):
    direct, staged = (ranks.run(world, run_collectives, world, is_staged, memory) for is_staged in (False, True))
    for expected, actual in zip(direct, staged, strict=True):
        assert len(expected) == len(actual) == 11
        assert all(map(torch.equal, expected, actual))


def train_on_gpu(
    form: str, optimizer, overlap: bool, is_fake: bool
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Logits and state of a rank on a GPU that it shares."""
    with fake_gpu() if is_fake else nullcontext():
        model = make_model(optimizer)
        if form == "tables":
            plan = shard_plan(single_plan(model), 2, "read", "float64")
        else:
            plan = plan_dense(model, {"fsdp": FSDP, "hsdp": HSDP}[form], 2)
        mesh = mesh_for(plan, device="cuda")
        assert mesh.backend == GLOO and mesh.group().staging.applies_to(torch.ones(1, device="cuda"))
        hottest = {f"t{number}": torch.arange(rows - 1, rows // 2, -1) for number, rows in enumerate(ROWS)}
        job = build(model, plan, mesh, optimizer=lambda p: torch.optim.Adam(p, 0.01), overlap=overlap, hottest=hottest)
        half = SIZE // 2
        batches = [take(batch(step), half * mesh.rank, half * (mesh.rank + 1)) for step in range(STEPS)]
        logits = [out.logits.cpu() for out in job.run(batches)]
        evaluation = [take(batch(100), half * mesh.rank, half * (mesh.rank + 1))]
        logits += [out.logits.cpu() for out in job.evaluate(evaluation)]
        state = {name: value.cpu() for name, value in job.state().tensors.items() if not value.is_meta}
        job.mesh.close()
    return logits, state


def check_ranks(ranks, form: str, optimizer, overlap: bool, *, is_fake: bool) -> None:
    """Steps and state of two ranks must equal those of one process on the CPU."""
    model = make_model(optimizer)
    job = build(model, single_plan(model), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    expected = [out.logits for out in job.run(batch(step) for step in range(STEPS))]
    expected += [out.logits for out in job.evaluate([batch(100)])]
    answers = ranks.run(2, train_on_gpu, form, optimizer, overlap, is_fake)
    for step, logits in enumerate(expected):
        actual = torch.cat([answer[0][step] for answer in answers])
        torch.testing.assert_close(actual, logits, rtol=0, atol=1e-10)
    assert_same(answers[0][1], job.state().tensors)


@pytest.mark.parametrize("form, optimizer, overlap", FORMS)
def test_two_ranks_on_one_gpu_equal_one_process(ranks, form, optimizer, overlap):
    check_ranks(ranks, form, optimizer, overlap, is_fake=True)
