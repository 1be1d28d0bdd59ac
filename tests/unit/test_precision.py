"""What a plan rounds in one process: tables in 16 bits, the dense optimizer's state; and a clip of dense gradients."""

import copy
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from clicks import FEATURES, batch, dlrm, tables

from shardwright import config
from shardwright.checkpoint.reading import Checkpoint
from shardwright.checkpoint.step_directories import checkpoint_path
from shardwright.dense.adam_bf16 import AdamBf16
from shardwright.dense.clip_grad_norm import clip_grad_norm
from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.layers.embedding import EmbeddingBags
from shardwright.models.dlrm import DLRM
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.runtime.planning import plan_for
from shardwright.runtime.run import train
from shardwright.spec.optimizer import LAMB, AdaGrad, RowWiseAdaGrad
from shardwright.spec.optimizer import Adam as TableAdam

SHORT = {"float16": "tables.fp16", "bfloat16": "tables.bf16"}


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def made(model: torch.nn.Module, *allow: str, **how) -> Job:
    return build(model, plan_for(model, batch(), allow=allow), optimizer=adam, **how)


def bits(job: Job) -> dict[str, torch.Tensor]:
    return {name: value for name, value in job.state().tensors.items() if not name.startswith("random")}


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(
    "optimizer", (RowWiseAdaGrad(0.1), AdaGrad(0.1), TableAdam(0.05), LAMB(0.05)), ids=lambda o: o.kind
)
@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_planned_tables_are_those_of_a_model_that_declares_them(optimizer, dtype, device):
    jobs = []
    for declared in (False, True):
        torch.manual_seed(5)
        with torch.device(device):
            model = dlrm(optimizer)
        if declared:
            model.sparse.hold(dict.fromkeys(("site", "item"), dtype))
        jobs.append(made(model, *(() if declared else (SHORT[dtype],))))
    outputs = [[one.logits for one in job.run(batch(seed=seed) for seed in range(12))] for job in jobs]
    assert all(map(torch.equal, *outputs))
    planned, declared = map(bits, jobs)
    assert planned.keys() == declared.keys()
    assert all(torch.equal(planned[name], declared[name]) for name in planned)
    assert jobs[0].model.sparse.weight("site").dtype == getattr(torch, dtype)
    assert jobs[0].model.sparse.tables == tables(dtype=dtype)


def test_a_declared_table_begins_as_the_planned_one():
    """Made on the meta device both draw their first values in 16 bits; made before, a planned one is rounded."""
    found = []
    for declared in ("float32", "float16"):
        torch.manual_seed(5)
        with torch.device("meta"):
            bags = EmbeddingBags(tables(dtype=declared), FEATURES, RowWiseAdaGrad(0.1))
            model = DLRM(bags, 4, bottom=(16, 8), top=(16,))
        found.append(bits(made(model, "tables.fp16")))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    torch.manual_seed(5)
    model = dlrm()
    wanted = model.sparse.weight("site").detach().half()
    made(model, "tables.fp16")
    assert torch.equal(model.sparse.weight("site"), wanted)


def test_tables_of_other_precisions_stay():
    model = dlrm(RowWiseAdaGrad(0.1), "float64")
    with pytest.raises(UserError, match="weight_dtype of table site"):
        plan = plan_for(model, batch(dtype=torch.float64))
        site = plan.tables[0]
        half = replace(site, placement=replace(site.placement, weight_dtype="float16"))
        build(model, replace(plan, tables=(half, *plan.tables[1:]), allow=("tables.fp16",)), optimizer=adam)
    plan = plan_for(model, batch(dtype=torch.float64), allow=("tables.fp16", "optimizer.bf16"))
    assert {table.placement.weight_dtype for table in plan.tables} == {"float64"}
    assert plan.dense.state == "float64"


def test_the_optimizers_state_is_kept_in_bf16_and_goes_on_to_the_bit(tmp_path):
    batches = [batch(seed=seed) for seed in range(12)]

    def job() -> Job:
        torch.manual_seed(5)
        return made(dlrm(), "optimizer.bf16")

    whole, first, second = job(), job(), job()
    assert isinstance(whole.optimizer, AdamBf16) and whole.plan.dense.state == "bfloat16"
    list(whole.run(batches))
    list(first.run(batches[:5]))
    path = first.save(tmp_path)
    assert second.load(path) == []
    list(second.run(batches[5:]))
    found, wanted = bits(second), bits(whole)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    moments = {
        name for name, value in wanted.items() if name.startswith("optimizer.") and value.dtype == torch.bfloat16
    }
    assert len(moments) == 2 * len(list(whole.model.dense.parameters()))


def test_a_state_of_torchs_own_is_taken_over_and_told(tmp_path):
    torch.manual_seed(5)
    exact, batches = made(dlrm()), [batch(seed=seed) for seed in range(6)]
    list(exact.run(batches))
    path = exact.save(tmp_path)
    torch.manual_seed(5)
    rounded = made(dlrm(), "optimizer.bf16")
    told = rounded.load(path)
    assert told and all(name.endswith((".exp_avg", ".exp_avg_sq")) for name in told)
    for name in told:
        assert torch.equal(bits(rounded)[name], bits(exact)[name].bfloat16())
    torch.manual_seed(5)
    back = made(dlrm())
    list(rounded.run(batches))
    back.load(rounded.save(tmp_path / "back"))
    assert bits(back)[told[0]].dtype == torch.float32


def test_an_optimizer_that_has_no_rounded_form_is_refused_by_name():
    with pytest.raises(UserError, match='not SGD: use one of them, or drop "optimizer.bf16" from allow'):
        model = dlrm()
        build(model, plan_for(model, batch(), allow=["optimizer.bf16"]), optimizer=lambda p: torch.optim.SGD(p))


@pytest.mark.parametrize("accumulate", (1, 2))
def test_clipped_steps_are_those_of_the_formula(accumulate):
    most, batches = 0.05, [batch(seed=seed, dtype=torch.float64) for seed in range(8)]
    torch.manual_seed(5)
    model = dlrm(RowWiseAdaGrad(0.1), "float64")
    plain = copy.deepcopy(model)
    job = build(model, plan_for(model, batches[0]), optimizer=adam, clip=most, accumulate=accumulate)
    list(job.run(batches))
    theirs = build(plain, plan_for(plain, batches[0]), optimizer=adam, accumulate=accumulate)
    lengths = []

    def shorten(optimizer, *_) -> None:
        given = [one.grad for one in plain.dense.parameters()]
        length = sum(float((one**2).sum()) for one in given) ** 0.5
        lengths.append(length)
        for one in given:
            one.mul_(min(1.0, most / length))

    theirs.optimizer.register_step_pre_hook(shorten)
    list(theirs.run(batches))
    assert len(lengths) == 8 // accumulate and max(lengths) > most
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_a_clip_counts_all_gradients_in_float64_and_leaves_short_ones():
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 1000, 2)]
    parameters[0].grad, parameters[1].grad = torch.full((3,), 1e-3), torch.full((1000,), 1e-25)
    before = [parameters[0].grad.clone(), parameters[1].grad.clone()]
    length = clip_grad_norm(parameters, 1.0)
    assert length == pytest.approx(1e-3 * 3**0.5, rel=1e-6)
    assert torch.equal(parameters[0].grad, before[0]) and torch.equal(parameters[1].grad, before[1])
    assert clip_grad_norm(parameters[1:], 1.0) == pytest.approx(
        1e-25 * 1000**0.5, rel=1e-6
    )  # its square is 0 in float32
    assert clip_grad_norm(parameters, 1e-4) == pytest.approx(length)
    torch.testing.assert_close(parameters[0].grad, torch.full((3,), 1e-4 / 3**0.5))
    assert clip_grad_norm([], 1.0) == 0.0
    with pytest.raises(UserError, match="clip=-1"):
        model = dlrm()
        build(model, plan_for(model, batch()), optimizer=adam, clip=-1)


def test_in_a_loop_of_ones_own_the_same_steps_are_taken():
    jobs, batches = [], [batch(seed=seed) for seed in range(4)]
    for _ in range(2):
        torch.manual_seed(5)
        jobs.append(made(dlrm(), "optimizer.bf16", "tables.fp16", clip=0.05))
    list(jobs[0].run(batches))
    for one in jobs[1].loader(batches):
        assert isinstance(one, Batch)
        loss = jobs[1].model.loss(jobs[1].model(one), one)
        jobs[1].optimizer.zero_grad()
        loss.backward()
        jobs[1].optimizer.step()
    found, wanted = bits(jobs[1]), bits(jobs[0])
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_recipes_clip_and_entries_reach_the_job(tmp_path):
    """One step of SGD with rate 1 moves all dense weights together by the clip, and by nothing with rate 0."""
    found = []
    for rate in (0.0, 1.0):
        asked = [f"run.directory={tmp_path}", f"run.name=rate{rate}", "train.steps=1", "train.eval_samples=0"]
        asked += ["train.batch_size=256", "data.workers=0", "dense.kind=SGD", f"dense.lr={rate}", "dense.clip=1e-3"]
        finished = train.train(config.load("synthetic-dlrm", [*asked, 'allow=["tables.bf16"]']))
        with closing(Checkpoint(checkpoint_path(finished.path / "checkpoint", 1))) as saved:
            dense = sorted(name for name in saved.tensor_specs if name.startswith("model.dense."))
            found.append(torch.cat([saved.read_tensor(name).double().flatten() for name in dense]))
            tables_ = {kind[0] for name, kind in saved.tensor_specs.items() if name.startswith("model.sparse.")}
            assert tables_ == {"bfloat16"}
    assert float((found[1] - found[0]).norm()) == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(UserError, match="dense.clip"):
        config.load("synthetic-dlrm", ["dense.clip=-1.0"])
