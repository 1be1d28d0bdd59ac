"""16-bit tables and dense optimizer moments in one process, and clipping of dense gradients."""

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
from shardwright.kernels.native import sum_of_squares
from shardwright.layers.embedding import EmbeddingBags
from shardwright.models.dlrm import DLRM
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.runtime.planning import plan_for
from shardwright.runtime.run import train
from shardwright.spec.optimizer import LAMB, AdaGrad, RowWiseAdaGrad
from shardwright.spec.optimizer import Adam as TableAdam

ALLOW = {"float16": "tables.fp16", "bfloat16": "tables.bf16"}


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def build_job(model: torch.nn.Module, *allow: str, **options) -> Job:
    return build(model, plan_for(model, batch(), allow=allow), optimizer=adam, **options)


def tensors(job: Job) -> dict[str, torch.Tensor]:
    return {name: value for name, value in job.state().tensors.items() if not name.startswith("random")}


@pytest.mark.parametrize("dtype", ALLOW)
@pytest.mark.parametrize(
    "optimizer", (RowWiseAdaGrad(0.1), AdaGrad(0.1), TableAdam(0.05), LAMB(0.05)), ids=lambda o: o.kind
)
@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_planned_16_bit_tables_train_as_declared_ones(optimizer, dtype, device):
    jobs = []
    for declared in (False, True):
        torch.manual_seed(5)
        with torch.device(device):
            model = dlrm(optimizer)
        if declared:
            model.sparse.hold(dict.fromkeys(("site", "item"), dtype))
        jobs.append(build_job(model, *(() if declared else (ALLOW[dtype],))))
    outputs = [[output.logits for output in job.run(batch(seed=seed) for seed in range(12))] for job in jobs]
    assert all(map(torch.equal, *outputs))
    planned, declared = map(tensors, jobs)
    assert planned.keys() == declared.keys()
    assert all(torch.equal(planned[name], declared[name]) for name in planned)
    assert jobs[0].model.sparse.weight("site").dtype == getattr(torch, dtype)
    assert jobs[0].model.sparse.tables == tables(dtype=dtype)


def test_planned_16_bit_tables_are_initialized_as_declared_ones():
    """On the meta device both draw 16-bit initial weights; existing weights are rounded."""
    states = []
    for declared in ("float32", "float16"):
        torch.manual_seed(5)
        with torch.device("meta"):
            bags = EmbeddingBags(tables(dtype=declared), FEATURES, RowWiseAdaGrad(0.1))
            model = DLRM(bags, 4, bottom=(16, 8), top=(16,))
        states.append(tensors(build_job(model, "tables.fp16")))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    torch.manual_seed(5)
    model = dlrm()
    expected = model.sparse.weight("site").detach().half()
    build_job(model, "tables.fp16")
    assert torch.equal(model.sparse.weight("site"), expected)


def test_float64_tables_are_not_rounded():
    model = dlrm(RowWiseAdaGrad(0.1), "float64")
    with pytest.raises(UserError, match="weight_dtype of table site"):
        plan = plan_for(model, batch(dtype=torch.float64))
        site = plan.tables[0]
        half = replace(site, placement=replace(site.placement, weight_dtype="float16"))
        build(model, replace(plan, tables=(half, *plan.tables[1:]), allow=("tables.fp16",)), optimizer=adam)
    plan = plan_for(model, batch(dtype=torch.float64), allow=("tables.fp16", "optimizer.bf16"))
    assert {table.placement.weight_dtype for table in plan.tables} == {"float64"}
    assert plan.dense.state == "float64"


def test_optimizer_moments_in_bf16_resume_to_the_bit(tmp_path):
    batches = [batch(seed=seed) for seed in range(12)]

    def make_job() -> Job:
        torch.manual_seed(5)
        return build_job(dlrm(), "optimizer.bf16")

    uninterrupted, interrupted, resumed = make_job(), make_job(), make_job()
    assert isinstance(uninterrupted.optimizer, AdamBf16) and uninterrupted.plan.dense.state == "bfloat16"
    list(uninterrupted.run(batches))
    list(interrupted.run(batches[:5]))
    path = interrupted.save(tmp_path)
    assert resumed.load(path) == []
    list(resumed.run(batches[5:]))
    actual, expected = tensors(resumed), tensors(uninterrupted)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    moments = {name for name in expected if name.startswith("optimizer.") and expected[name].dtype == torch.bfloat16}
    assert len(moments) == 2 * len(list(uninterrupted.model.dense.parameters()))


def test_moments_of_torchs_optimizer_are_rounded_on_load_and_reported(tmp_path):
    torch.manual_seed(5)
    exact, batches = build_job(dlrm()), [batch(seed=seed) for seed in range(6)]
    list(exact.run(batches))
    path = exact.save(tmp_path)
    torch.manual_seed(5)
    bf16 = build_job(dlrm(), "optimizer.bf16")
    converted = bf16.load(path)
    assert converted and all(name.endswith((".exp_avg", ".exp_avg_sq")) for name in converted)
    for name in converted:
        assert torch.equal(tensors(bf16)[name], tensors(exact)[name].bfloat16())
    torch.manual_seed(5)
    restored_job = build_job(dlrm())
    list(bf16.run(batches))
    restored_job.load(bf16.save(tmp_path / "back"))
    assert tensors(restored_job)[converted[0]].dtype == torch.float32


def test_optimizers_without_bf16_moments_are_refused():
    with pytest.raises(UserError, match='not SGD: use one of them, or drop "optimizer.bf16" from allow'):
        model = dlrm()
        build(model, plan_for(model, batch(), allow=["optimizer.bf16"]), optimizer=lambda p: torch.optim.SGD(p))


@pytest.mark.parametrize("accumulate", (1, 2))
def test_clipped_steps_equal_those_of_torchs_clip_grad_norm(accumulate):
    clip, batches = 0.05, [batch(seed=seed, dtype=torch.float64) for seed in range(8)]
    torch.manual_seed(5)
    model = dlrm(RowWiseAdaGrad(0.1), "float64")
    plain = copy.deepcopy(model)
    job = build(model, plan_for(model, batches[0]), optimizer=adam, clip=clip, accumulate=accumulate)
    list(job.run(batches))
    reference = build(plain, plan_for(plain, batches[0]), optimizer=adam, accumulate=accumulate)
    norms = []

    def clip_gradients(optimizer, *_) -> None:
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.dense.parameters(), clip)))

    reference.optimizer.register_step_pre_hook(clip_gradients)
    list(reference.run(batches))
    assert len(norms) == 8 // accumulate and max(norms) > clip
    for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_clip_sums_in_float64_and_leaves_small_gradients():
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 1000, 2)]
    parameters[0].grad, parameters[1].grad = torch.full((3,), 1e-3), torch.full((1000,), 1e-25)
    before = [parameters[0].grad.clone(), parameters[1].grad.clone()]
    norm = clip_grad_norm([(parameters, ())], 1.0)
    assert norm == pytest.approx(1e-3 * 3**0.5, rel=1e-6)
    assert torch.equal(parameters[0].grad, before[0]) and torch.equal(parameters[1].grad, before[1])
    small = clip_grad_norm([(parameters[1:], ())], 1.0)  # its square is 0 in float32
    assert small == pytest.approx(1e-25 * 1000**0.5, rel=1e-6)
    assert clip_grad_norm([(parameters, ())], 1e-4) == pytest.approx(norm)
    torch.testing.assert_close(parameters[0].grad, before[0] * (1e-4 / (norm + 1e-6)))
    assert clip_grad_norm([], 1.0) == 0.0
    with pytest.raises(UserError, match="clip=-1"):
        model = dlrm()
        build(model, plan_for(model, batch()), optimizer=adam, clip=-1)


@pytest.mark.parametrize("size", [0, 1, 15, 17, 1 << 14, 100_003])
def test_sums_of_squares_do_not_depend_on_threads(size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 1e-25
    exact = float((values.double() ** 2).sum())
    before = torch.get_num_threads()
    try:
        totals = set()
        for num in (1, 2, 3):
            torch.set_num_threads(num)
            totals.add(float(sum_of_squares(values)))
    finally:
        torch.set_num_threads(before)
    assert len(totals) == 1 and totals.pop() == pytest.approx(exact, rel=1e-13)
    assert float(sum_of_squares(values[::2])) == pytest.approx(float((values[::2].double() ** 2).sum()), rel=1e-13)
    assert float(sum_of_squares(values.double())) == pytest.approx(exact, rel=1e-13)


def test_a_user_training_loop_takes_the_same_steps():
    jobs, batches = [], [batch(seed=seed) for seed in range(4)]
    for _ in range(2):
        torch.manual_seed(5)
        jobs.append(build_job(dlrm(), "optimizer.bf16", "tables.fp16", clip=0.05))
    list(jobs[0].run(batches))
    for local in jobs[1].loader(batches):
        assert isinstance(local, Batch)
        loss = jobs[1].model.loss(jobs[1].model(local), local)
        jobs[1].optimizer.zero_grad()
        loss.backward()
        jobs[1].optimizer.step()
    actual, expected = tensors(jobs[1]), tensors(jobs[0])
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_recipes_set_the_clip_and_allowed_precisions(tmp_path):
    """One SGD step with learning rate 1 changes the dense weights by a vector whose norm is the clip."""
    weights = []
    for rate in (0.0, 1.0):
        overrides = [f"run.directory={tmp_path}", f"run.name=rate{rate}", "train.steps=1", "train.eval_samples=0"]
        overrides += ["train.batch_size=256", "data.workers=0", "dense.kind=SGD", f"dense.lr={rate}"]
        overrides += ["dense.clip=1e-3", 'allow=["tables.bf16"]']
        finished = train.train(config.load("synthetic-dlrm", overrides))
        with closing(Checkpoint(checkpoint_path(finished.path / "checkpoint", 1))) as saved:
            dense = sorted(name for name in saved.tensor_specs if name.startswith("model.dense."))
            weights.append(torch.cat([saved.read_tensor(name).double().flatten() for name in dense]))
            tables_ = {kind[0] for name, kind in saved.tensor_specs.items() if name.startswith("model.sparse.")}
            assert tables_ == {"bfloat16"}
    assert float((weights[1] - weights[0]).norm()) == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(UserError, match="dense.clip"):
        config.load("synthetic-dlrm", ["dense.clip=-1.0"])
