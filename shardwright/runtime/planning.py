"""What is known before a run begins: how many steps, a first batch that fits the model, who holds what."""

import itertools
import math
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.comm.mesh import world_size
from shardwright.config import Settings
from shardwright.data.loading.loader import Loader
from shardwright.data.sources.source import Source
from shardwright.errors import UserError
from shardwright.jagged import check_batch, ids_per_feature
from shardwright.layers.loss import BinaryLoss
from shardwright.measure.describe import describe, sparse_of
from shardwright.runtime.build import plan_single_process
from shardwright.runtime.launch import launcher
from shardwright.runtime.placing import plan_over_ranks
from shardwright.runtime.run import measure_loop, recipe
from shardwright.spec.plan import Plan
from shardwright.spec.timeline import Timeline
from shardwright.spec.workload import Workload

NUM_COUNTED_BATCHES = 8  # batches in which hot ids are counted


def epochs_to_steps(settings: Settings, source: Source) -> Settings:
    """Epochs told in steps."""
    train = settings.train
    if source.size == 0:
        raise UserError("the training part has no samples: lower data.split.test and data.split.validation")
    passes = 0 if source.size is None else (train.steps or math.inf) * train.samples_per_step / source.size
    if train.progressive and (train.epochs > 1 or not train.epochs and passes > 1):
        raise UserError("train.progressive=true scores samples that were never trained on: set train.epochs=1")
    if not train.epochs:
        return settings
    if source.size is None:
        raise UserError(f"train.epochs={train.epochs}: this source has no end; set train.steps instead")
    steps = -(-train.epochs * -(-source.size // train.batch_size) // train.accumulate)
    return settings.model_copy(update={"train": train.model_copy(update={"steps": steps})})


def describe_recipe(settings: Settings) -> Workload:
    """What a recipe trains, at its batch size, without training it."""
    source = recipe.make_source(settings)
    return _described(settings, source, recipe.make_model(settings, source))


def preview(settings: Settings) -> tuple[Settings, Plan]:
    """The resolved settings and the plan that a run would have. No rank is started, and nothing is written except the
    cache of a click log."""
    source = recipe.make_source(settings)
    settings = epochs_to_steps(settings, source)
    model = recipe.make_model(settings, source)
    recipe.make_dense_optimizer(settings)
    started = world_size() > 1 or settings.ranks == 1
    return settings, plan_run(settings, source, model, cluster_shape=None if started else (1, settings.ranks))[1]


def plan_run(
    settings: Settings, source: Source, model: nn.Module, *, cluster_shape: tuple[int, int] | None = None
) -> tuple[Workload, Plan, Timeline | None]:
    """Plan from the first batch, which reveals most errors of data and model. `size`: hosts and ranks per host, if the
    ranks are not started."""
    if cluster_shape is None:
        launcher.check_num_ranks(settings.ranks)
    recipe.evaluation_source(settings, source, 0)
    workload = _described(settings, source, model)
    predicted = None
    if cluster_shape or world_size() > 1:
        asked = settings.plan
        # The first rank's prediction is written (RunDirectory.describe); the others keep shared cores and memory busy.
        measure = partial(measure_loop.measure_this_rank, settings, source, model) if cluster_shape is None else None
        plan, predicted = plan_over_ranks(
            workload, asked.cluster, settings.allow, asked.pins, asked.dense, cluster_shape, measure
        )
    elif given := [key for key in ("pins", "cluster", "dense") if getattr(settings.plan, key)]:
        raise UserError(f"plan.{given[0]} is for several ranks; set ranks=2 or more, or drop it")
    else:
        plan = plan_single_process(model, workload, settings.allow)
    plan.verify(workload)
    return workload, plan, predicted


def hottest_ids(settings: Settings, source: Source, model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """The hottest ids of tables whose rows lie by load, as the first batches have them."""
    by_load = {table.table for table in plan.tables if table.order == "load"}
    sparse = sparse_of(model)
    if sparse is None or not by_load:
        return {}
    rows = {table.name: table.rows for table in sparse.tables if table.name in by_load}
    found = {name: torch.zeros(size, dtype=torch.int64) for name, size in rows.items()}
    most = min(
        NUM_COUNTED_BATCHES, settings.train.steps * settings.train.accumulate or NUM_COUNTED_BATCHES
    )  # others may never come
    with closing(recipe_loader(settings, source)) as loader:
        for batch in itertools.islice(loader, most):
            read = sparse.read(batch.features)
            sparse.check(read)
            for feature, ids in zip(sparse.features, read.values.split(ids_per_feature(read)), strict=True):
                if feature.table in found:
                    found[feature.table] += torch.bincount(ids, minlength=rows[feature.table])
    return {
        name: counted.argsort(descending=True, stable=True)[: int((counted > 0).sum())]
        for name, counted in found.items()
    }


def _described(settings: Settings, source: Source, model: nn.Module) -> Workload:
    batch = recipe_loader(settings, source).peek()
    check_batch(batch)
    sparse = sparse_of(model)
    if sparse is not None:
        sparse.check(sparse.read(batch.features))
    if isinstance(model.loss, BinaryLoss):
        model.loss.check(batch)
    return describe(model, batch, getattr(source, "statistics", None))


def recipe_loader(settings: Settings, source: Source, **how: Any) -> Loader:
    size, shuffle = settings.train.batch_size, settings.data.shuffle
    return Loader(source, batch_size=size, seed=settings.seed, shuffle=shuffle, **how)
