"""Whole steps with the dense part laid out in every way over ranks and hosts, against the same job in one process."""

import os
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_hosts import TwoHosts
from test_steps import SIZE, STEPS, batch, cut_plan, model, part, plan_one
from torch import nn

from shardwright.dense.sharded import ShardedModel
from shardwright.dense.flat_parameter import FlatParameter, shard_of
from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.measure.describe import block_names
from shardwright.planner.step.stages import LANES
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.plan import Dense, Plan, Recompute

ROUND = (("host", 2), ("local", 2))
BLOCKS = ("dense.bottom", "dense.interaction", "dense.top")
DDP = Dense(replicate=("host", "local"))
FSDP = Dense(shard=("host", "local"))
HSDP = Dense(replicate=("host",), shard=("local",))
FULL = tuple(Recompute(name) for name in BLOCKS)
PRODUCTS = tuple(Recompute(name, "products") for name in BLOCKS)
PLANS = {
    "ddp-full": replace(DDP, recompute=FULL),
    "ddp-away": replace(DDP, offload=BLOCKS),
    "fsdp": FSDP,
    "fsdp-products-away": replace(FSDP, recompute=PRODUCTS, offload=("dense.top",)),
    "hsdp": replace(HSDP, ahead=2),
    "hsdp-full-away": replace(HSDP, recompute=FULL, offload=BLOCKS, ahead=0),
}
SEVERAL = [("hsdp", False, 2), ("hsdp-full-away", True, 2)]  # batches make a step


def planned(mine, dense: Dense, world: int) -> Plan:
    """Tables as `cut_plan` has them, by the numbers of the ranks."""
    made = cut_plan(plan_one(mine), world, "read", "float64")
    axes = ROUND if world == 4 else (("host", 1), ("local", world))
    return replace(made, axes=axes, lanes=(*LANES, "gather", "scatter"), dense=replace(dense, dtype="float64"))


def job(stack: ExitStack, dense: Dense, world: int, **words) -> Job:
    """A job over four ranks on two hosts, or two on one."""
    if world == 4:
        few = stack.enter_context(pytest.MonkeyPatch.context())
        few.setenv("LOCAL_WORLD_SIZE", "2")
        few.setenv("LOCAL_RANK", str(int(os.environ["RANK"]) % 2))
    mine = model(RowWiseAdaGrad(0.1))
    words.setdefault("optimizer", lambda p: torch.optim.Adam(p, 0.01))
    made = build(mine, planned(mine, dense, world), **words)
    stack.callback(made.mesh.close)
    return made


def share(whole: Batch, made: Job) -> Batch:
    ends = [SIZE * at // made.mesh.size for at in range(made.mesh.size + 1)]
    return part(whole, *[*pairwise(ends)][made.mesh.rank])


def trained(dense: Dense, world: int, overlap: bool, accumulate: int, folder: Path):
    with ExitStack() as stack:
        made = job(stack, dense, world, overlap=overlap, accumulate=accumulate)
        outputs = list(made.run(share(batch(step), made) for step in range(STEPS)))
        evaluated = [one.logits for one in made.evaluate([share(batch(100), made)])]
        made.save(folder)
        tensors = made.state().tensors
        return [one.logits for one in outputs], evaluated, tensors if made.mesh.rank == 0 else {}


@cache
def single(accumulate: int):
    mine = model(RowWiseAdaGrad(0.1))
    made = build(mine, plan_one(mine), optimizer=lambda p: torch.optim.Adam(p, 0.01), accumulate=accumulate)
    logits = [one.logits for one in made.run(batch(step) for step in range(STEPS))]
    return logits, [one.logits for one in made.evaluate([batch(100)])], dict(made.state().tensors)


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.shape == wanted.shape and float((found - wanted).abs().max()) <= 1e-10


@pytest.mark.parametrize(("name", "overlap", "accumulate"), [(name, True, 1) for name in PLANS] + SEVERAL)
def test_every_layout_trains_as_one_process(ranks, tmp_path, name, overlap, accumulate):
    logits, evaluated, state = single(accumulate)
    answers = ranks.run(4, trained, PLANS[name], 4, overlap, accumulate, tmp_path)
    for step, wanted in enumerate(logits):
        assert close(torch.cat([each[0][step] for each in answers]), wanted), step
    assert close(torch.cat([each[1][0] for each in answers]), evaluated[0])
    found = {name: value for name, value in answers[0][2].items() if not name.startswith("random")}
    assert set(found) == {name for name in state if not name.startswith("random")}
    for name, value in found.items():
        assert close(value.double(), state[name].double()), name


def test_the_blocks_are_those_of_the_model():
    assert block_names(model(RowWiseAdaGrad(0.1))) == BLOCKS


def continued(dense: Dense, world: int, folder: Path) -> list[torch.Tensor]:
    with ExitStack() as stack:
        made = job(stack, dense, world)
        made.load(folder)
        return [one.logits for one in made.run(share(batch(STEPS + step), made) for step in range(3))]


@pytest.mark.parametrize(("first", "then", "world"), [("fsdp", "hsdp", 4), ("hsdp-full-away", "fsdp", 2)])
def test_a_checkpoint_goes_on_under_another_layout_and_in_one_process(ranks, tmp_path, first, then, world):
    ranks.run(4, trained, PLANS[first], 4, True, 1, tmp_path)
    path = max(tmp_path.iterdir())
    mine = model(RowWiseAdaGrad(0.1))
    made = build(mine, plan_one(mine), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    made.load(path)
    wanted = [one.logits for one in made.run(batch(STEPS + step) for step in range(3))]
    answers = ranks.run(world, continued, PLANS[then], world, path)
    for step, each in enumerate(wanted):
        assert close(torch.cat([answer[step] for answer in answers]), each), step


def own_loop(dense: Dense) -> list[torch.Tensor]:
    with ExitStack() as stack:
        made = job(stack, dense, 4)
        found = []
        for one in made.loader(share(batch(step), made) for step in range(STEPS)):
            made.optimizer.zero_grad()
            logits = made.model(one)
            made.model.loss(logits, one).backward()
            made.optimizer.step()
            found.append(logits.detach())
        return found


@pytest.mark.parametrize("name", ["fsdp", "hsdp-full-away"])
def test_a_loop_of_ones_own_over_blocks_that_are_cut(ranks, name):
    answers = ranks.run(4, own_loop, PLANS[name])
    for step, wanted in enumerate(single(1)[0]):
        assert close(torch.cat([each[step] for each in answers]), wanted), step


def test_a_loop_of_ones_own_in_one_process_whose_weights_lie_away():
    mine = model(RowWiseAdaGrad(0.1))
    plan = plan_one(mine)
    made = build(mine, replace(plan, dense=replace(plan.dense, offload=BLOCKS)), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    wanted = single(1)[0]
    for step, one in enumerate(made.loader(batch(step) for step in range(STEPS))):
        made.optimizer.zero_grad()
        logits = made.model(one)
        made.model.loss(logits, one).backward()
        made.optimizer.step()
        assert close(logits.detach(), wanted[step]), step


def test_behind_a_backward_pass_that_failed_such_a_loop_ends(monkeypatch):
    mine = model(RowWiseAdaGrad(0.1))
    plan = plan_one(mine)
    made = build(mine, replace(plan, dense=replace(plan.dense, offload=BLOCKS)), optimizer=lambda p: torch.optim.Adam(p))
    batches = made.loader(batch(step) for step in range(STEPS))
    one = next(batches)
    with monkeypatch.context() as few:
        few.setattr(FlatParameter, "copy_grad", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.model.loss(made.model(one), one).backward()
    with pytest.raises(UserError, match="a backward pass of this job has failed"):
        next(batches)


class Odd(nn.Module):
    def forward(self, *_: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace()


def test_a_block_that_gives_something_else_than_tensors_is_told_by_name():
    mine = model(RowWiseAdaGrad(0.1))
    plan = plan_one(mine)
    mine.dense.top = nn.Sequential(mine.dense.top, Odd())
    made = build(mine, replace(plan, dense=replace(plan.dense, offload=BLOCKS)), optimizer=lambda p: torch.optim.Adam(p))
    with pytest.raises(UserError, match=r'block "dense\.top", whose weights .* gave a SimpleNamespace'):
        list(made.run([batch(0)]))


def loaded_by_the_first() -> list[torch.Tensor]:
    """The first rank alone has the weights to begin with."""
    with ExitStack() as stack:
        few = stack.enter_context(pytest.MonkeyPatch.context())
        few.setenv("LOCAL_WORLD_SIZE", "2")
        rank = int(os.environ["RANK"])
        few.setenv("LOCAL_RANK", str(rank % 2))
        mine = model(RowWiseAdaGrad(0.1))
        for parameter in mine.dense.parameters() if rank else ():
            nn.init.ones_(parameter)
        made = build(mine, planned(mine, HSDP, 4), optimizer=lambda p: torch.optim.Adam(p, 0.01))
        stack.callback(made.mesh.close)
        return [one.logits for one in made.run(share(batch(step), made) for step in range(STEPS))]


def test_weights_of_the_first_rank_are_those_of_all(ranks):
    answers = ranks.run(4, loaded_by_the_first)
    for step, wanted in enumerate(single(1)[0]):
        assert close(torch.cat([each[step] for each in answers]), wanted), step


def sums_over_replicas() -> int:
    with ExitStack() as stack:
        made = job(stack, HSDP, 4, accumulate=3)
        few = stack.enter_context(pytest.MonkeyPatch.context())
        counted: list[torch.Tensor] = []
        over = ShardedModel._all_reduce
        few.setattr(ShardedModel, "_all_reduce", lambda self, total, *more: counted.append(total) or over(self, total, *more))
        list(made.run(share(batch(step), made) for step in range(6)))
        return len(counted)


def test_several_batches_of_a_step_are_summed_over_hosts_once(ranks):
    """Two steps of two blocks that have weights."""
    assert ranks.run(4, sums_over_replicas) == [2 * 2] * 4


def looked_at() -> bool:
    """A forward pass that nobody goes back through, then a state."""
    with ExitStack() as stack:
        made = job(stack, FSDP, 2)
        for one in made.loader([share(batch(0), made)]):
            made.model.loss(made.model(one), one)
        made.state()
        return all(shard_of(one) is not None for one in made.model.dense.parameters())


def test_a_block_that_nothing_went_back_through_is_in_parts_again(ranks):
    assert ranks.run(2, looked_at) == [True, True]


def refused(kind: str) -> str:
    with ExitStack() as stack:
        try:
            job(stack, FSDP, 2, optimizer=lambda p: getattr(torch.optim, kind)([one for one in p if one.dim() == 2]))
        except UserError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("kind", ["Adafactor", "Muon"])
def test_optimizers_that_look_at_whole_parameters_are_refused(ranks, kind):
    assert all(told.startswith(f"{kind} needs full parameters") for told in ranks.run(2, refused, kind))


def waited() -> list[set[str]]:
    with ExitStack() as stack:
        made = job(stack, FSDP, 4)
        list(made.run(share(batch(step), made) for step in range(3)))
        steps = [event for event in made.tracer.timeline().events if event.kind == "wait"]
        return [{event.name for event in steps if event.step == step} for step in range(3)]


def test_a_timeline_says_what_weights_were_waited_for(ranks):
    for steps in ranks.run(4, waited):
        assert all({"gather", "scatter", "reduce"} <= names for names in steps)


def held() -> list[tuple[str, bool, int]]:
    with ExitStack() as stack:
        made = job(stack, PLANS["hsdp"], 4)
        list(made.run(share(batch(step), made) for step in range(2)))
        return [(name, shard_of(one) is not None, one.numel()) for name, one in made.model.dense.named_parameters()]


def test_ranks_keep_only_their_rows(ranks):
    answers = ranks.run(4, held)
    whole = {name: one.numel() for name, one in model(RowWiseAdaGrad(0.1)).dense.named_parameters()}
    for each in answers:
        assert all(cut for _, cut, _ in each) and {name for name, *_ in each} == set(whole)
        assert sum(num for *_, num in each) <= sum(whole.values()) / 2 + 32
    assert answers[0] == answers[2] and answers[1] == answers[3]
