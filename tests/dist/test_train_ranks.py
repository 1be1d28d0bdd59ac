"""Runs over ranks: started from the command line, resumed on fewer ranks; errors on the rank that caused them."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from test_steps import ROWS, batch, make_model, shard_plan, single_plan, take

from shardwright.comm.mesh import Mesh
from shardwright.dense.replicated import ReplicatedModel, split_into_buckets
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged
from shardwright.runtime.build import build
from shardwright.runtime.outputs import Output, Scores
from shardwright.runtime.planning import plan_for
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.run.metrics import WindowMetrics
from shardwright.spec.lanes import LANES
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.wire import MAX_RECEIVED_BUCKETS

RUN = (
    "train.batch_size=256",
    "train.log_every=5",
    "train.eval_every=0",
    "train.eval_samples=1000",
    "train.checkpoint_every=10",
)


def train(folder, *args: str, recipe: tuple[str, ...] = ("synthetic-dlrm", *RUN)) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "shardwright.cli", "train", *recipe, *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def losses(folder, name: str, kind: str = "train") -> list[float]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if line["kind"] == kind]


def test_runs_over_ranks_and_resumed_on_fewer_ranks_equal_one_process(tmp_path):
    for args in (
        ("run.name=one", "train.steps=20"),
        ("run.name=two", "ranks=2", "train.steps=10"),
        ("run.name=two", "train.steps=20", "run.resume=true"),
        ("run.name=cut", "train.steps=20", "ranks=2", "plan.dense=FSDP + full"),
    ):
        result = train(tmp_path, *args)
        assert result.returncode == 0, result.stderr
        page = (tmp_path / "runs" / args[0].removeprefix("run.name=") / "report.html").read_text()
        assert ">exposed</th>" in page and ("The plan predicted" in page) == ("ranks=2" in args)
    for name in ("two", "cut"):
        assert losses(tmp_path, name) == pytest.approx(losses(tmp_path, "one"), abs=1e-5)
    refused = train(tmp_path, "run.name=two", "ranks=2")
    assert refused.returncode == 2 and "this run exists" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_gpt_over_ranks_equals_one_process(tmp_path):
    """Losses of training and evaluation, with targets masked unevenly, and the generated text."""
    (tmp_path / "texts").mkdir()
    for n in range(60):
        (tmp_path / f"texts/{n:02d}.txt").write_text(f"{n} times {n} is {n * n}. " * (1 + n % 7))
    size = ("data.length=32", "model.channels=16", "model.num_blocks=2", "model.num_heads=2", "model.hidden=32")
    recipe = ("gpt", "data=texts", "data.mask_boundaries=true", *size, "train.batch_size=6", "train.steps=6")
    recipe += ("train.log_every=2", "train.eval_every=0", "train.eval_samples=20", "train.checkpoint_every=0")
    for args in (("run.name=one",), ("run.name=two", "ranks=2"), ("run.name=cut", "ranks=2", "plan.dense=FSDP")):
        result = train(tmp_path, *args, recipe=recipe)
        assert result.returncode == 0, result.stderr
        assert "tokens/s" in result.stdout and "perplexity" in result.stdout
    texts = [json.loads((tmp_path / f"runs/{name}/generated.json").read_text()) for name in ("one", "two", "cut")]
    assert texts[0] == texts[1] == texts[2] and texts[0]["continuations"]
    for name in ("two", "cut"):
        assert json.loads((tmp_path / f"runs/{name}/model_flops.json").read_text())["num_ranks"] == 2
        for kind in ("train", "eval"):
            assert losses(tmp_path, name, kind) == pytest.approx(losses(tmp_path, "one", kind), abs=1e-5), (name, kind)


def model_and_plan(world: int):
    model = make_model(RowWiseAdaGrad(0.1))
    return model, shard_plan(single_plan(model), world, "read", "float64")


def float32_batch(step: int):
    return batch(step, dtype=torch.float32)


def train_with_planner(world: int) -> list:
    """Logits of training with a plan that the planner makes on every rank."""
    model = make_model(RowWiseAdaGrad(0.1), "float32")
    job = build(model, plan_for(model, float32_batch(0)), optimizer=lambda p: torch.optim.SGD(p, 0.05))
    ends = [24 * at // world for at in range(world + 1)]
    rank = job.mesh.rank
    outputs = list(job.run(take(float32_batch(step), ends[rank], ends[rank + 1]) for step in range(5)))
    job.mesh.close()
    return [out.logits for out in outputs]


def test_a_script_trains_with_the_plan_of_the_planner(ranks):
    model = make_model(RowWiseAdaGrad(0.1), "float32")
    job = build(model, single_plan(model, float32_batch(0)), optimizer=lambda p: torch.optim.SGD(p, 0.05))
    answers = ranks.run(2, train_with_planner, 2)
    for step, out in enumerate(job.run(float32_batch(step) for step in range(5))):
        logits = torch.cat([answer[step] for answer in answers])
        torch.testing.assert_close(logits, out.logits, rtol=0, atol=1e-4)


def train_with_invalid_id(world: int) -> str:
    model, plan = model_and_plan(world)
    job = build(model, plan, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    whole = batch(0)
    values = whole.features.values.clone()
    values[int(whole.features.lengths[0].sum())] = ROWS[1]  # the first id of feature b, of table t1
    invalid = replace(whole, features=Jagged(whole.features.features, values, whole.features.lengths))
    with pytest.raises(UserError) as error:
        next(job.run([take(invalid, 0, 24)]))
    job.mesh.close()
    return str(error.value)


def test_an_error_names_table_and_feature_of_an_id_out_of_range(ranks):
    for message in ranks.run(2, train_with_invalid_id, 2):
        assert message.startswith('table "t1", feature "b": id 7 is outside its 7 rows')


def build_with_different_seeds(world: int) -> str:
    model, plan = model_and_plan(world)
    mesh = Mesh(plan.mesh_axes, lanes=LANES)
    torch.manual_seed(mesh.rank)
    with pytest.raises(UserError) as error:
        build(model, plan, mesh, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    mesh.close()
    return str(error.value)


def build_with_different_plans(world: int) -> str:
    model, plan = model_and_plan(world)
    mesh = Mesh(plan.mesh_axes, lanes=LANES)
    plan = replace(plan, why=(("rank", str(mesh.rank)),))
    with pytest.raises(UserError) as error:
        build(model, plan, mesh, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    mesh.close()
    return str(error.value)


def test_ranks_with_different_plans_are_refused(ranks):
    assert all("the ranks have different plans" in error for error in ranks.run(2, build_with_different_plans, 2))


def train_with_frozen_tables(world: int) -> list:
    """Whether the tables are unchanged, and the number of outputs."""
    model, plan = model_and_plan(world)
    model.sparse.requires_grad_(False)
    job = build(model, plan, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    rank = job.mesh.rank
    before = job.state().tensors
    copies = {name: value.clone() for name, value in before.items() if not value.is_meta}
    outputs = list(job.run(take(batch(step), 12 * rank, 12 * rank + 12) for step in range(3)))
    after = job.state().tensors
    with pytest.raises(UserError, match="in job.run or in a loop"):
        model(take(batch(0), 0, 12))
    job.mesh.close()
    is_equal = [torch.equal(after[name], value) for name, value in copies.items() if "sparse" in name]
    return [all(is_equal), len(outputs)]


def test_frozen_tables_stay_unchanged(ranks):
    assert ranks.run(2, train_with_frozen_tables, 2) == [[True, 3], [True, 3]]


class WithAux(torch.nn.Module):
    """A model with an auxiliary output that the loss does not use."""

    def __init__(self, dense: torch.nn.Module) -> None:
        super().__init__()
        self.main, self.aux = dense, torch.nn.Linear(5, 1).double()

    def forward(self, batch, vectors):
        return torch.stack([self.main(batch, vectors), self.aux(batch.numbers).squeeze(1)])


class FirstOnly(torch.nn.Module):
    def __init__(self, loss: torch.nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, logits, batch):
        return self.loss(logits[0], batch)


def make_model_with_aux():
    model = make_model(RowWiseAdaGrad(0.1))
    model.dense, model.loss = WithAux(model.dense), FirstOnly(model.loss)
    return model


def train_lopsided(world: int) -> list:
    """All samples with weight on rank 0; rank 1 has samples of weight 0 at some steps, and samples at others."""
    model = make_model_with_aux()
    job = build(
        model, shard_plan(single_plan(model), world, "read", "float64"), optimizer=lambda p: torch.optim.AdamW(p, 0.01)
    )
    rank = job.mesh.rank
    ends = ((0, 20), (20, 24))[rank]
    batches = map(lopsided_batch, range(6))
    outputs = list(job.run(take(whole, *(min(end, whole.batch_size) for end in ends)) for whole in batches))
    job.mesh.close()
    return [[out.logits for out in outputs], model.dense.aux.weight.detach().clone()]


def lopsided_batch(step: int):
    whole = batch(step, size=24 if step % 2 else 20)
    if step % 3 == 0:
        assert whole.weights is not None
        whole.weights[20:] = 0
    return whole


def test_a_rank_without_samples_or_weight_changes_nothing(ranks):
    model = make_model_with_aux()
    job = build(model, single_plan(model), optimizer=lambda p: torch.optim.AdamW(p, 0.01))
    answers = ranks.run(2, train_lopsided, 2)
    for step, out in enumerate(job.run(lopsided_batch(step) for step in range(6))):
        logits = torch.cat([answer[0][step] for answer in answers], 1)
        torch.testing.assert_close(logits, out.logits, rtol=0, atol=1e-10)
    assert all(torch.equal(answer[1], model.dense.aux.weight) for answer in answers)


def window_metrics(world: int) -> dict:
    """Metrics of a window in which only the last rank has samples."""
    mesh = Mesh((("rank", world),), lanes=("main",))
    group, window = RankGroup(mesh), WindowMetrics("click")
    size = 6 if mesh.rank == world - 1 else 0
    no_ids = Jagged((), torch.empty(0, dtype=torch.int64), torch.empty(0, size, dtype=torch.int64))
    labels = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0])[:size]
    local = Batch(no_ids, None, {"click": labels})
    window.update(Output(1, local, Scores(torch.tensor(0.5 if size else 0.0), torch.arange(6.0)[:size])))
    metrics = group.all_gather_window(window).compute()
    assert group.broadcast_text(f"rank {mesh.rank}") == "rank 0"
    mesh.close()
    return metrics


def test_metrics_cover_all_ranks_including_empty_ones(ranks):
    (single,) = ranks.run(1, window_metrics, 1)
    assert single["loss"] == 0.5 and "auc" in single
    assert ranks.run(3, window_metrics, 3) == [single] * 3


def test_ranks_with_different_seeds_are_refused(ranks):
    errors = ranks.run(2, build_with_different_seeds, 2)
    assert all("the ranks have different seeds [0, 1]" in error for error in errors)


def gradients_of_partly_used_layers(world: int, rounded: bool) -> list:
    """Initial values, and gradients where all ranks use layer 0, only rank 0 layer 1, and none layer 2."""
    mesh = Mesh((("rank", world),), lanes=("dense",))
    torch.manual_seed(mesh.rank)
    layers = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    replicated = ReplicatedModel(parameters, mesh.group(lane="dense"), bf16_reduce=rounded)
    start = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for _ in range(2):
        replicated.begin_backward(overlap=True)
        x = torch.ones(2, 3)
        y = layers[0](x) if mesh.rank else layers[1](layers[0](x))
        y.sum().backward()
        replicated.end_backward()
        replicated.finish_reductions()
    mesh.close()
    return [start, *(None if parameter.grad is None else parameter.grad.clone() for parameter in parameters)]


@pytest.mark.parametrize("rounded", (False, True))
def test_only_parameters_that_no_rank_uses_have_no_gradient(ranks, rounded):
    first, second = ranks.run(2, gradients_of_partly_used_layers, 2, rounded)
    assert all(gradient is None for gradient in first[5:] + second[5:])
    for a, b in zip(first[:5], second[:5], strict=True):
        assert a is not None and torch.equal(a, b)
    assert float(first[4].sum()) != 0  # of the layer that only the first rank used


def gradients_of_a_rank_that_is_ahead(world: int, num: int) -> tuple[list, list]:
    """Gradients, and after each layer's backward pass the number of buckets that are being received."""
    mesh = Mesh((("rank", world),), lanes=("dense",))
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(num)])  # a bucket each
    replicated = ReplicatedModel([*model.parameters()], mesh.group(lane="dense"))
    numbers: list[int] = []

    def count_received(*_: object) -> None:
        numbers.append(sum(bucket.phases[-1].in_flight for bucket in replicated._buckets))

    for layer in model:
        layer.weight.register_post_accumulate_grad_hook(count_received)
    replicated.begin_backward(overlap=True)
    loss = model(torch.ones(1, 512)).sum()
    if mesh.rank:
        time.sleep(0.5)
    loss.backward()
    replicated.end_backward()
    replicated.finish_reductions()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    mesh.close()
    return gradients, numbers


def test_a_rank_that_is_ahead_receives_few_buckets_at_once(ranks):
    """Without the limit it would receive all of them while the other rank sleeps."""
    num = 3 * MAX_RECEIVED_BUCKETS
    (gradients, numbers), (others, _) = ranks.run(2, gradients_of_a_rank_that_is_ahead, 2, num)
    assert max(numbers) == MAX_RECEIVED_BUCKETS and len(numbers) == num
    assert all(map(torch.equal, gradients, others))


def test_buckets_are_in_backward_order_with_one_dtype_each():
    sizes = ((100,), (200_000,), (100_000,), (50,))
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    parameters.append(torch.nn.Parameter(torch.zeros(5, dtype=torch.float64)))
    sizes = [[parameter.numel() for parameter in bucket] for bucket in split_into_buckets(parameters)]
    assert sizes == [[5], [50, 100_000], [200_000, 100]]


def train_with_bf16_wire(world: int):
    model, plan = model_and_plan(world)
    plan = replace(plan, wire=replace(plan.wire, vectors="bfloat16", gradients="bfloat16", dense="bfloat16"))
    job = build(model, plan, optimizer=lambda p: torch.optim.SGD(p, 0.05))
    ends = [24 * at // world for at in range(world + 1)]
    rank = job.mesh.rank
    outputs = list(job.run(take(batch(step), ends[rank], ends[rank + 1]) for step in range(10)))
    job.mesh.close()
    return [out.logits for out in outputs]


def test_messages_in_bf16_change_logits_only_slightly(ranks):
    model = make_model(RowWiseAdaGrad(0.1))
    job = build(model, single_plan(model), optimizer=lambda p: torch.optim.SGD(p, 0.05))
    expected = [out.logits for out in job.run(batch(step) for step in range(10))]
    answers = ranks.run(2, train_with_bf16_wire, 2)
    logits = [torch.cat([answer[step] for answer in answers]) for step in range(10)]
    differences = [float((a - b).abs().max()) for a, b in zip(logits, expected, strict=True)]
    assert 1e-9 < max(differences) < 0.05, differences
