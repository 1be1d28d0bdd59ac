"""build() with three models: same result as a plain loop, states are checked, impossible plans are refused."""

import gc
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from clicks import FEATURES, batch, dlrm, tables
from test_models import tokens
from torch import nn

from shardwright.comm.mesh import Mesh
from shardwright.errors import UserError
from shardwright.jagged import Batch, Vectors
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.loss import BinaryLoss
from shardwright.layers.mlp import MLP
from shardwright.models.dlrm import DLRM
from shardwright.models.gpt import GPT
from shardwright.planner.step.stages import NO_BODIES, ONE_RANK_GPU, step_stages
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.runtime.planning import plan_for
from shardwright.runtime.state import State
from shardwright.spec.axes import Axis
from shardwright.spec.calls import Call
from shardwright.spec.optimizer import AdaGrad
from shardwright.spec.plan import Recompute, Share, Stage, Wire
from shardwright.step.slots import EndOfData, Slots, StepValues


class RecurrentModel(nn.Module):
    """A user's model: concatenation and a recurrent layer; only the tables are Shardwright's."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = EmbeddingBags(tables(dtype="float64"), FEATURES, AdaGrad(lr=0.1))
        self.dense = RecurrentDense()
        self.loss = BinaryLoss()

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.dense(batch, self.sparse(batch))


class RecurrentDense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(24, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, batch: Batch, vectors: Vectors) -> torch.Tensor:
        return self.out(self.cell(vectors.pooled_BD, batch.dense)).squeeze(1)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def clicks64(seed: int) -> Batch:
    return batch(seed=seed, dtype=torch.float64)


MODELS = {
    "dlrm": (lambda: dlrm(AdaGrad(lr=0.1), "float64"), clicks64),
    "own": (lambda: RecurrentModel().double(), clicks64),
    "gpt": (
        lambda: GPT(vocabulary=20, context=8, channels=16, num_blocks=2, num_heads=2).double(),
        lambda seed: tokens(),
    ),
}


class PlainLoop:
    """The same model in plain torch: every table is a parameter of a torch optimizer, autograd covers everything."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        sparse = getattr(model, "sparse", None)
        self.weights = (
            {t.name: nn.Parameter(sparse.weight(t.name).detach().clone()) for t in sparse.tables} if sparse else {}
        )
        sparse_ids = {id(p) for p in sparse.parameters()} if sparse else set()
        self.optimizers = [adam([p for p in model.parameters() if id(p) not in sparse_ids])]
        if self.weights:
            self.optimizers.append(torch.optim.Adagrad(self.weights.values(), lr=0.1))

    def step(self, batch: Batch) -> float:
        logits = self.model.dense(batch, self._vectors(batch)) if self.weights else self.model(batch)
        loss = self.model.loss(logits, batch)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return float(loss.detach())

    def _vectors(self, batch: Batch) -> Vectors:
        bags = batch.features.values.split(batch.features.lengths.flatten().tolist())
        size, pooled = batch.batch_size, []
        for row, feature in enumerate(FEATURES):
            rows = [self.weights[feature.table][bag] for bag in bags[row * size : (row + 1) * size]]
            sums = torch.stack([bag.sum(0) for bag in rows])
            counts = torch.tensor([max(1, len(bag)) for bag in rows])[:, None]
            pooled.append(sums / counts if feature.pooling == "mean" else sums)
        return Vectors(tuple(f.name for f in FEATURES), (8, 8, 8), torch.cat(pooled, 1), {})


@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_equal_a_plain_loop(name):
    make, data = MODELS[name]
    torch.manual_seed(3)
    model = make()
    torch.manual_seed(3)
    plain = PlainLoop(make())
    batches = [data(seed) for seed in range(20)]
    job = build(model, plan_for(model, batches[0]), optimizer=adam)
    losses = [float(output.loss) for output in job.run(batches)]
    torch.testing.assert_close(losses, [plain.step(batch_) for batch_ in batches], rtol=0, atol=1e-10)
    for name_, parameter in plain.model.named_parameters():
        if not name_.startswith("sparse."):
            torch.testing.assert_close(model.get_parameter(name_), parameter, rtol=0, atol=1e-10)
    for table, weight in plain.weights.items():
        torch.testing.assert_close(model.sparse.weight(table), weight, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_a_user_training_loop_gives_the_same_losses_bit_for_bit(name):
    make, data = MODELS[name]
    batches = [data(seed) for seed in range(4)]
    jobs: list[Job] = []
    for _ in range(2):
        torch.manual_seed(3)
        model = make()
        jobs.append(build(model, plan_for(model, batches[0]), optimizer=adam))
    losses = [float(output.loss) for output in jobs[0].run(batches)]
    for batch_, expected in zip(jobs[1].loader(batches), losses, strict=True):
        loss = jobs[1].model.loss(jobs[1].model(batch_), batch_)
        jobs[1].optimizer.zero_grad()
        loss.backward()
        jobs[1].optimizer.step()
        assert float(loss.detach()) == expected


@pytest.mark.parametrize("name", MODELS)
def test_state_continues_bit_for_bit(name):
    make, data = MODELS[name]
    batches = [data(seed) for seed in range(8)]
    model = make()
    job = build(model, plan_for(model, batches[0]), optimizer=adam)
    list(job.run(batches[:4]))
    state = job.state()
    state = State({key: value.clone() for key, value in state.tensors.items()}, state.numbers)
    expected = [float(output.loss) for output in job.run(batches[4:])]
    second_model = make()
    resumed = build(second_model, plan_for(second_model, batches[0]), optimizer=adam)
    resumed.load_state(state)
    assert [float(output.loss) for output in resumed.run(batches[4:])] == expected
    assert resumed.step == 8


def test_evaluation_changes_nothing():
    job = _job()
    before = {name: value.clone() for name, value in job.state().tensors.items()}
    outputs = list(job.evaluate([batch(seed=1), batch(seed=2)]))
    assert len(outputs) == 2 and not outputs[0].logits.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in job.state().tensors.items())


def test_a_model_built_on_the_meta_device_gets_the_same_weights():
    torch.manual_seed(5)
    with torch.device("meta"):
        model = DLRM(EmbeddingBags(tables(), FEATURES, AdaGrad(lr=0.1, initial=0.25)), 4, bottom=(8,), top=(4,))
    assert model.dense.bottom.steps[0].weight.is_meta
    job = build(model, plan_for(model, batch()), optimizer=adam)
    assert all(bool((state == 0.25).all()) for state in model.sparse.state("site").values())
    assert all(torch.isfinite(output.loss) for output in job.run([batch()]))
    torch.manual_seed(5)
    assert torch.equal(EmbeddingBags(tables(), FEATURES).weight("site"), _fresh_site())


def _fresh_site() -> torch.Tensor:
    torch.manual_seed(5)
    with torch.device("meta"):
        model = dlrm()
    build(model, plan_for(model, batch()), optimizer=adam)
    return model.sparse.weight("site")


def test_real_weights_are_unchanged_where_another_module_is_on_meta():
    model = dlrm()
    with torch.device("meta"):
        model.dense.top = MLP(8 + 6, (16, 1), activate_last=False)
    model.dense.register_buffer("buffer", torch.tensor([4.0, 2.0]))
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}
    build(model, plan_for(model, batch()), optimizer=adam)
    assert all(torch.equal(model.get_parameter(name), value) for name, value in before.items())
    assert model.dense.buffer.tolist() == [4.0, 2.0]
    assert not any(p.is_meta for p in model.parameters())


def test_a_module_partly_on_meta_is_refused():
    model = dlrm()
    model.dense.bottom.steps[0].bias = nn.Parameter(torch.empty(16, device="meta"))
    with pytest.raises(UserError, match=r'"dense.bottom.steps.0" \(Linear\) is partly on the meta device'):
        build(model, plan_for(dlrm(), batch()), optimizer=adam)


def test_a_table_weight_used_elsewhere_is_refused():
    model = dlrm()
    model.dense.readout = nn.Linear(8, 40)
    model.dense.readout.weight = model.sparse.weight("site")
    with pytest.raises(UserError, match='"dense.readout.weight" is also the weight of table "site"'):
        build(model, plan_for(model, batch()), optimizer=adam)


@pytest.mark.parametrize("name, message", [("sparse", "was frozen"), ("dense", "was frozen")])
def test_freezing_a_parameter_after_build_is_refused(name, message):
    job = _job()
    job.model.get_submodule(name).requires_grad_(False)
    with pytest.raises(UserError, match=f'parameter "{name}.* {message} after build'):
        job.run([batch()])


def test_evaluation_restores_the_training_mode_of_every_module():
    job = _job()
    job.model.dense.top.eval()
    list(job.run([batch()]))
    outputs = job.evaluate([batch(seed=1), batch(seed=2)])
    next(outputs)
    modes = {name: module.training for name, module in job.model.named_modules()}
    assert not any(value for name, value in modes.items() if name.startswith("dense.top"))
    assert all(value for name, value in modes.items() if not name.startswith("dense.top"))


def test_a_refused_state_changes_nothing():
    job, other = _job(), _job()
    list(job.run([batch()]))
    state = job.state()
    for change, message in (
        ({"optimizer": state.numbers["optimizer"] | {"kind": "SGD"}}, "optimizer's kind is SGD, this job has Adam"),
        ({"optimizer": None}, "it has no state of a dense optimizer, this job has one"),
        (
            {"optimizer": state.numbers["optimizer"] | {"groups": [{"lr": 1.0}]}},
            'setting "amsgrad" of the dense optimizer\'s group 0 is only in this job',
        ),
    ):
        before = {name: value.clone() for name, value in other.state().tensors.items()}
        numbers = state.numbers | change
        if not numbers["optimizer"]:
            tensors = {name: value for name, value in state.tensors.items() if not name.startswith("optimizer.")}
        else:
            tensors = state.tensors
        with pytest.raises(UserError, match=message):
            other.load_state(State(tensors, numbers))
        assert all(torch.equal(value, before[name]) for name, value in other.state().tensors.items())


def test_a_state_restores_the_random_generators_of_python_numpy_and_torch():
    job = _job()
    state = job.state()
    expected = random.random(), np.random.random(), float(torch.rand(()))
    job.load_state(state)
    assert (random.random(), np.random.random(), float(torch.rand(()))) == expected


def test_tied_weights_stay_tied_after_the_meta_device():
    with torch.device("meta"):
        model = GPT(vocabulary=20, context=8, channels=16, num_blocks=1, num_heads=2)
    job = build(model, plan_for(model, tokens()), optimizer=adam)
    list(job.run([tokens(), tokens()]))
    assert model.head.linear.weight is model.embed.token.weight


def test_a_run_freezes_older_objects_out_of_garbage_collection():
    job = _job()
    run = job.run([batch(seed=1), batch(seed=2)])
    next(run)
    assert gc.get_freeze_count() > 10_000
    assert len(list(run)) == 1 and gc.get_freeze_count() == 0
    gc.freeze()
    list(job.run([batch(seed=3)]))
    assert gc.get_freeze_count() > 10_000, "objects that the user froze stay frozen"
    gc.unfreeze()


def test_stage_times_are_traced():
    job = _job()
    list(job.run([batch(seed=seed) for seed in range(3)]))
    timeline = job.tracer.timeline()
    timeline.verify()
    assert [event.name for event in timeline.events if event.step == 1] == [stage.name for stage in job.plan.stages]
    vectors, forward = (
        next(e for e in timeline.events if e.step == 2 and e.name == name) for name in ("vectors", "forward")
    )
    assert vectors.id in forward.after and vectors.end <= forward.start


def test_prefetching_does_not_change_the_losses():
    model = dlrm()
    prefetching = replace(plan_for(model, batch()), stages=step_stages(leads=ONE_RANK_GPU, bodies=NO_BODIES))
    assert {stage.name: stage.lead for stage in prefetching.stages if stage.lead} == {"read": 2, "to_device": 1}
    seeds_read = []

    def batches(num):
        for seed in range(num):
            seeds_read.append(seed)
            yield batch(seed=seed)

    run = build(model, prefetching, optimizer=adam).run(batches(6))
    losses = [next(run).loss.item()]
    assert seeds_read == [0, 1, 2]
    losses += [output.loss.item() for output in run]
    torch.manual_seed(0)
    assert losses == [output.loss.item() for output in _job().run(batches(6))]


def _job() -> Job:
    model = dlrm()
    return build(model, plan_for(model, batch()), optimizer=adam)


@pytest.mark.parametrize("stage", ["request", "ids", "lookup", "vectors", "forward", "backward", "update", "step"])
def test_a_stage_without_one_of_its_slots_is_refused_by_name(stage):
    model = dlrm()
    plan = plan_for(model, batch())
    original = next(stage_ for stage_ in plan.stages if stage_.name == stage)
    for kind in ("reads", "writes"):
        for slot in getattr(original, kind):
            changed_stage = replace(original, **{kind: tuple(s for s in getattr(original, kind) if s != slot)})
            stages = tuple(changed_stage if stage_.name == stage else stage_ for stage_ in plan.stages)
            with pytest.raises(UserError, match=f'stage "{stage}".*"{slot}"'):
                build(model, replace(plan, stages=stages), optimizer=adam)


def test_lookup_ahead_of_the_update_is_refused():
    model = dlrm()
    plan = plan_for(model, batch())
    early_stages = {"read", "to_device", "request", "lengths", "ids", "lookup"}
    stages = tuple(replace(stage, lead=1) if stage.name in early_stages else stage for stage in plan.stages)
    with pytest.raises(UserError, match='stage "lookup".*"state.tables"'):
        build(model, replace(plan, stages=stages), optimizer=adam)


def test_a_stage_may_not_touch_slots_it_does_not_declare():
    slots = Slots(Call(Stage("mine", "main", ("a",), ("b",)), 0), StepValues({0: {"a": 1, "c": 2}}))
    assert slots["a"] == 1
    with pytest.raises(UserError, match='stage "mine" reads slot "c"'):
        slots["c"]
    with pytest.raises(UserError, match='stage "mine" writes slot "a"'):
        slots["a"] = 2


def test_unsupported_plans_are_refused_by_name():
    model = dlrm()
    plan = plan_for(model, batch())
    site, item = plan.tables
    tiers = replace(site.placement, tiers=(Share("hbm", 10), Share("dram", 10), Share("ssd")))
    for change, message in (
        ({"version": 2}, "this plan of version 2 was written by an earlier Shardwright"),
        ({"axes": (Axis("data", "local", 2),)}, "1 processes were started for a mesh of 2 ranks"),
        ({"axes": (Axis("tensor", "local", 2),)}, "the plan's axes: tensor parallelism"),
        ({"tables": (replace(site, placement=tiers), item)}, "tiers of table site"),
        ({"tables": (item,)}, r"the plan has tables \['item'\]"),
        ({"dense": replace(plan.dense, recompute=(Recompute("top"),))}, "dense"),
        ({"wire": Wire("float16", "float16", "float16"), "allow": ("wire.fp16",)}, "wire"),
        (
            {
                "tables": (replace(site, placement=replace(site.placement, weight_dtype="float16")), item),
                "allow": ("tables.bf16",),
            },
            "weight_dtype of table site",
        ),
        (
            {"tables": (replace(site, placement=replace(site.placement, tiers=(Share("ssd"),))), item)},
            "tiers of table site",
        ),
    ):
        with pytest.raises(UserError, match=message):
            build(model, replace(plan, **change), optimizer=adam)
    with pytest.raises(UserError, match="mesh of 4 ranks"):
        Mesh((("data", 4),))


def test_rows_of_one_process_may_be_split_and_reordered():
    def train(**change) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = dlrm()
        plan = plan_for(model, batch())
        site, item = plan.tables
        plan = replace(plan, tables=(replace(site, **change), item))
        job = build(model, plan, optimizer=adam, hottest={"site": torch.tensor([5, 3])})
        return [output.logits for output in job.run(batch(seed=seed) for seed in range(3))]

    rect = plan_for(dlrm(), batch()).tables[0].rects[0]
    halves = tuple(replace(rect, rows=rows) for rows in ((0, 20), (20, 40)))
    expected = train()
    for change in ({"rects": halves}, {"order": "hash:1"}, {"rects": halves, "order": "load"}):
        for logits, reference in zip(train(**change), expected, strict=True):
            torch.testing.assert_close(logits, reference, rtol=1e-5, atol=1e-6)


def test_tables_need_an_optimizer_or_must_be_frozen():
    model = dlrm()
    model.sparse.optimizer = None
    plan = plan_for(model, batch())
    with pytest.raises(UserError, match="DLRM.sparse has no optimizer: pass EmbeddingBags"):
        build(model, plan, optimizer=adam)
    before = model.sparse.requires_grad_(False).weight("site").clone()
    list(build(model, plan_for(model, batch()), optimizer=adam).run([batch()]))
    assert torch.equal(model.sparse.weight("site"), before)


def test_dense_parameters_need_an_optimizer():
    model = dlrm()
    with pytest.raises(UserError, match="dense parameters and no optimizer; pass build"):
        build(model, plan_for(model, batch()))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("model.dense.top.steps.0.bias"), '"model.dense.top.steps.0.bias" is missing'),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), '"model.extra" is not in this model'),
        (
            lambda t: t.update({"tables.sparse.site.sum": torch.zeros(3)}),
            r'"tables.sparse.site.sum" is float32 \(3,\), the model has float32 \(40,\)',
        ),
        (lambda t: t.pop("optimizer.dense.top.steps.0.bias.exp_avg"), "exp_avg"),
        (
            lambda t: t.update({"optimizer.gone.exp_avg": torch.zeros(1)}),
            '"optimizer.gone.exp_avg" is not in this model',
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name(change, message):
    job = _job()
    list(job.run([batch()]))
    state = job.state()
    tensors = {name: value.clone() for name, value in state.tensors.items()}
    change(tensors)
    with pytest.raises(UserError, match=message):
        _job().load_state(State(tensors, state.numbers))


def test_the_end_of_data_ends_the_run_not_the_process():
    job = _job()
    assert list(job.run([])) == []
    with pytest.raises(EndOfData):
        job._step.read_batch(Slots(Call(job.plan.stages[0], 0), StepValues()))


def test_bf16_products_need_to_be_allowed():
    """Only matrix products are rounded, not weights, losses or logits; without `allow` the plan is refused."""
    losses_by_dtype = []
    for allow in ((), ("dense.bf16",)):
        torch.manual_seed(3)
        model = dlrm(AdaGrad(lr=0.1))
        plan = plan_for(model, batch(), allow=allow)
        dtype = "bfloat16" if allow else "float32"  # also where bfloat16 is slow on this device
        job = build(model, replace(plan, dense=replace(plan.dense, dtype=dtype)), optimizer=adam)
        outputs = list(job.run(batch(seed=seed) for seed in range(8)))
        assert {output.logits.dtype for output in outputs} == {torch.float32}
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        losses_by_dtype.append(torch.stack([output.loss for output in outputs]))
        evaluated = next(iter(job.evaluate([batch(seed=50)])))
        assert evaluated.logits.dtype == torch.float32
    assert not torch.equal(*losses_by_dtype)
    torch.testing.assert_close(*losses_by_dtype, rtol=0.03, atol=0)
    plan = replace(plan, dense=replace(plan.dense, dtype="bfloat16"))
    with pytest.raises(UserError, match='dense: dtype is bfloat16, .* allow "dense.bf16"'):
        build(dlrm(AdaGrad(lr=0.1)), replace(plan, allow=()), optimizer=adam)
