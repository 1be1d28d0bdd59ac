"""Resuming a job bit for bit: the state this needs, and the states that a job refuses to load."""

import json
import tomllib
from pathlib import Path

import pytest
import torch
from clicks import FEATURES, batch, dlrm, tables
from torch import nn

from shardwright import config
from shardwright.checkpoint.reading import Checkpoint
from shardwright.errors import UserError
from shardwright.kernels import matmul
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.loss import BinaryLoss
from shardwright.models.dlrm import DLRM
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.runtime.planning import plan_for
from shardwright.runtime.run import train as loop
from shardwright.runtime.state import State
from shardwright.serving.export import export
from shardwright.spec.optimizer import LAMB, SGD, Adam, RowWiseAdaGrad, SparseOptimizer

SMALL = ("data.workers=0", "train.batch_size=64", "train.log_every=5", "train.eval_every=0", "train.eval_samples=0")
SIZE = 32


def bf16_job(seed: int, optimizer: SparseOptimizer | None = None) -> Job:
    """A job with tables and moments of the dense optimizer in bf16."""
    torch.manual_seed(seed)
    model = dlrm(optimizer or Adam(0.05))
    plan = plan_for(model, batch(SIZE), allow=["tables.bf16", "optimizer.bf16"])
    assert {table.placement.weight_dtype for table in plan.tables} == {"bfloat16"} and plan.dense.state == "bfloat16"
    return build(model, plan, optimizer=lambda p: torch.optim.Adam(p, 0.01))


def run_steps(job: Job, *seeds: int) -> None:
    for _ in job.run(batch(SIZE, seed=seed) for seed in seeds):
        pass


def tensors(job: Job) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in job.state().tensors.items()}
    return {name: value for name, value in state.items() if not name.startswith("random")}


def test_stochastic_rounding_continues_with_another_torch_seed(tmp_path):
    job = bf16_job(1)
    run_steps(job, 0)
    path = job.save(tmp_path)
    run_steps(job, 1, 2, 3)
    resumed = bf16_job(2)
    resumed.load(path)
    run_steps(resumed, 1, 2, 3)
    for name, value in tensors(job).items():
        assert torch.equal(tensors(resumed)[name], value), name


def test_a_state_without_rounding_keys_loads(tmp_path):
    """Earlier versions wrote states without these keys."""
    job, other = bf16_job(1), bf16_job(1)
    state = job.state()
    without_keys = {name: value for name, value in state.tensors.items() if not name.endswith("rounding_key")}
    assert len(without_keys) == len(state.tensors) - len(job.model.sparse.tables)
    numbers = {name: value for name, value in state.numbers.items() if name not in ("tables", "products")}
    del numbers["optimizer"]["rounding_key"]
    run_steps(other, 7)
    other.load_state(State(without_keys, numbers))
    for each in (job, other):
        run_steps(each, 1)
    assert all(torch.equal(tensors(other)[name], value) for name, value in tensors(job).items())
    bags = EmbeddingBags(tables(), FEATURES, Adam(0.1))
    no_keys = {name: value for name, value in bags.optimizer_state().items() if not name.endswith("rounding_key")}
    bags.load_optimizer_state(no_keys)


def job_with_groups(num: int) -> Job:
    torch.manual_seed(0)
    model = dlrm(RowWiseAdaGrad(0.1))

    def optimizer(parameters):
        groups = [{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:]}]
        return torch.optim.Adam(groups if num == 2 else parameters, 0.01)

    return build(model, plan_for(model, batch(SIZE)), optimizer=optimizer)


@pytest.mark.parametrize("num_saved, num_here", ((2, 1), (1, 2)))
def test_another_number_of_parameter_groups_is_refused(num_saved, num_here):
    state = job_with_groups(num_saved).state()
    with pytest.raises(UserError, match=f"has {num_saved} parameter groups?, this job's has {num_here}"):
        job_with_groups(num_here).load_state(state)


def test_state_of_another_table_optimizer_is_refused():
    """Adam and LAMB have states with the same names and shapes."""
    with pytest.raises(UserError, match='tables of "sparse" were trained with adam, this job has lamb'):
        bf16_job(1, LAMB(0.05)).load_state(bf16_job(1, Adam(0.05)).state())


class TwoBags(nn.Module):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, EmbeddingBags(tables(), FEATURES, SGD(0.1)))
        self.loss = BinaryLoss()

    def forward(self, batch):
        bags = [child for child in self.children() if isinstance(child, EmbeddingBags)]
        return torch.stack([child(batch).pooled_BD.sum(1) for child in bags]).sum(0)


def test_several_embedding_bags_are_refused_by_name():
    model = TwoBags(("user", "item"))
    with pytest.raises(UserError, match='TwoBags has several EmbeddingBags ."user", "item".*make them members of'):
        build(model, plan_for(TwoBags(("user",)), batch(SIZE)))


def test_tables_with_equal_names_in_two_modules_have_different_random_numbers():
    keys, values = [], []
    for path in ("user", "item", "sparse"):
        torch.manual_seed(4)
        with torch.device("meta"):
            bags = EmbeddingBags(tables(), FEATURES, SGD(0.1))
        if path != "sparse":
            bags.set_path(path)
        bags.to_empty(device="cpu").reset_parameters()
        keys.append(bags.holder(tables()[0].name).rounding_key)
        values.append(bags.weight(tables()[0].name).detach())
    torch.manual_seed(4)
    default = EmbeddingBags(tables(), FEATURES, SGD(0.1))
    assert len(set(keys)) == 3 and keys[2] == default.holder(tables()[0].name).rounding_key
    assert not torch.equal(values[0], values[1]) and torch.equal(values[2], default.weight(tables()[0].name))


@torch.no_grad()
def make_non_finite(model: DLRM, which: str) -> str:
    """Set a value of a table ("table") or of the named parameter to inf or nan; returns its name in a state."""
    if which == "table":
        name = tables()[1].name
        model.sparse.weight(name)[2, 1] = float("inf")
        return f"sparse.embedding_bags.{name}.weight"
    parameter = dict(model.named_parameters())[which]
    parameter.view(-1)[-1] = float("nan")
    return which


@pytest.mark.parametrize("kind", ("table", "dense"))
def test_a_model_that_is_not_finite_is_not_published_or_exported(tmp_path, kind):
    job = job_with_groups(1)
    run_steps(job, 0)
    dense_name = next(name for name, _ in job.model.named_parameters() if name.startswith("dense"))
    name = make_non_finite(job.model, "table" if kind == "table" else dense_name)
    with pytest.raises(UserError, match=f'step 1: "{name}" is not finite in row'):
        job.publish(tmp_path / "published")
    assert not list(tmp_path.glob("published/*"))
    job.save(tmp_path / "saved")
    with pytest.raises(UserError, match="not finite"):
        export(dlrm(RowWiseAdaGrad(0.1)), tmp_path / "saved", tmp_path / "served", example=batch(SIZE))
    assert not (tmp_path / "served").exists()


def train(directory: Path, *overrides: str) -> loop.RunResult:
    return loop.train(config.load("synthetic-dlrm", [f"run.directory={directory}", *SMALL, *overrides]))


def test_a_diverged_run_stops_at_its_step_and_names_the_tensor(tmp_path, monkeypatch):
    """The step is between two metrics lines."""
    scale = Job.scale_rates

    def scale_and_spoil(job: Job, factor: float) -> None:
        scale(job, factor)
        if job.step == 6:
            job.model.sparse.weight("page").data.fill_(float("nan"))

    monkeypatch.setattr(Job, "scale_rates", scale_and_spoil)
    with pytest.raises(UserError, match='step 7: the loss is nan; "sparse.embedding_bags.page.weight" is not finite'):
        train(tmp_path, "train.steps=10", "run.name=a")


def test_a_state_that_is_not_finite_is_never_the_best(tmp_path, monkeypatch):
    evaluate = Job.evaluate

    def evaluate_and_spoil(job: Job, loader):
        yield from evaluate(job, loader)
        job.model.sparse.weight("page").data[-1] = float("inf")

    monkeypatch.setattr(Job, "evaluate", evaluate_and_spoil)
    overrides = ("train.eval_every=5", "train.eval_samples=64", "train.patience=2", "train.steps=10", "run.name=a")
    with pytest.raises(UserError, match='step 5: "sparse.embedding_bags.page.weight" is not finite in row'):
        train(tmp_path, *overrides)
    assert not list((tmp_path / "a/best").glob("*"))


@pytest.fixture
def restore_library():
    previous = matmul.library_in_use()
    yield
    matmul.use_library(previous or matmul.preferred_library())


def train_losses(path: Path) -> list[float]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize("chosen, other", (("blas", "onednn"), ("onednn", "blas")))
def test_a_resumed_run_uses_the_same_matmul_library(tmp_path, monkeypatch, restore_library, chosen, other):
    overrides = ("train.checkpoint_every=5", "run.name=a")
    uninterrupted = train(tmp_path / "whole", "train.steps=15", f"train.products={chosen}", *overrides).path
    train(tmp_path, "train.steps=10", f"train.products={chosen}", *overrides)
    monkeypatch.setattr(matmul, "preferred_library", lambda: other)  # as on another kind of processor
    matmul.use_library(other)
    path = train(tmp_path, "train.steps=15", "run.resume=true", *overrides).path
    assert matmul.library_in_use() == chosen
    assert tomllib.loads((path / "config.toml").read_text())["train"]["products"] == chosen
    assert json.loads((path / "environment.json").read_text())["products"] == chosen
    assert Checkpoint(path / "checkpoint" / "step-00000015").numbers["job"]["products"] == chosen
    assert train_losses(path) == train_losses(uninterrupted)
    with pytest.raises(UserError, match=f"this run has train.products='{chosen}', the new settings have '{other}'"):
        train(tmp_path, "train.steps=20", "run.resume=true", f"train.products={other}", *overrides)


def test_loading_a_checkpoint_restores_its_matmul_library(tmp_path, restore_library):
    job = job_with_groups(1)
    matmul.use_library("blas")
    run_steps(job, 0)
    path = job.save(tmp_path)
    resumed = job_with_groups(1)
    matmul.use_library("onednn")
    resumed.start_from(path)
    assert matmul.library_in_use() == "onednn"
    resumed.load(path)
    assert matmul.library_in_use() == "blas"
