"""Construct the data source, the model and the dense optimizer that a recipe names."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from shardwright.config import OpenSection, Settings, resolve_name
from shardwright.data.features.transforms import Transforms
from shardwright.data.graphs.communities import open_synthetic_graph
from shardwright.data.graphs.neighborhoods import Neighborhoods, open_graph, partition_samples
from shardwright.data.loading.loader import Loader
from shardwright.data.logs.click_log import open_log, open_movielens
from shardwright.data.sources.source import Source, Subset
from shardwright.data.sources.stream import open_stream
from shardwright.data.sources.synthetic import ClickStream, TaskStream
from shardwright.data.tokens.grammar import Grammar
from shardwright.data.tokens.sequences import TokenSequences, open_tokens
from shardwright.errors import UserError, did_you_mean
from shardwright.layers.loss import BinaryLoss
from shardwright.layers.task_losses import TaskLosses
from shardwright.measure.describe import check_contract, sparse_of
from shardwright.models.click_inputs import ClickInputs, ClickSource
from shardwright.models.names import MODELS
from shardwright.runtime.dense_layout import DenseOptimizer
from shardwright.runtime.run.early_stopping import check_monitor
from shardwright.runtime.run.held_out_files import attach_files, split_beside_files
from shardwright.spec.optimizer import sparse_optimizer


def make_source(settings: Settings) -> Source:
    """Construct the data source of section [data], with the files that are held out beside it."""
    source = _construct("data", split_beside_files(settings.data), SOURCES, {"seed": settings.seed})
    source = attach_files(settings.data, source)
    if (partitions := settings.data.partitions) == 1:
        return source
    if not isinstance(source, Neighborhoods):
        raise UserError(f"data.partitions={partitions}, but data.kind={settings.data.kind} is no graph; drop it")
    return partition_samples(source, partitions)


def evaluation_source(settings: Settings, source: Source, position: int) -> Subset | None:
    """Source of the held-out samples of one evaluation; None if `train.eval_samples` is 0.

    `position` is the number of samples trained on: a synthetic stream changes over time, so evaluation samples are
    drawn from there, with another seed.
    """
    size = settings.train.eval_samples
    if not size:
        return None
    if isinstance(source, ClickStream | TaskStream):
        return Subset(replace(source, seed=~source.seed), position, position + size)
    held_out = getattr(source, "evaluation", None)
    if held_out is None:
        raise UserError(
            f"data.kind={settings.data.kind} has no evaluation(); give it one that returns a source, "
            "or set train.eval_samples=0"
        )
    samples = held_out()
    if samples.size == 0:
        keys = {TokenSequences: "data.validation", Neighborhoods: "data.split.validation"}
        key = keys.get(type(source), "data.split.test")
        raise UserError(f"no samples are held out to evaluate on: raise {key}, or set train.eval_samples=0")
    return Subset(samples, 0, size if samples.size is None else min(size, samples.size))


def best_scores(held_out: Source, scores: Mapping[str, float], labels: Mapping[str, str]) -> dict[str, float]:
    """The best reachable scores on held-out samples of a generated source; empty for other sources.

    `labels`: of the model, by the prefix of their scores' names.
    """
    if not isinstance(held_out, Subset):
        return {}
    if isinstance(held_out.source, ClickStream) and "ne" in scores:
        return {"bound_ne": held_out.source.bound(held_out.lo, held_out.hi).ne}
    if isinstance(held_out.source, TaskStream):
        scored = {prefix: label for prefix, label in labels.items() if f"{prefix}ne" in scores}
        bounds = {prefix: held_out.source.bound(held_out.lo, held_out.hi, label) for prefix, label in scored.items()}
        return {f"{prefix}bound_ne": best.ne for prefix, best in bounds.items()}
    if isinstance(held_out.source, Grammar):
        return {"bound_loss": held_out.source.bound(held_out.lo, held_out.hi)}
    return {}


def test_source(source: Source) -> Source | None:
    """Source of the final evaluation of a run; None if the source has none."""
    make_test = getattr(source, "test", None)
    return None if make_test is None else make_test()


def make_loader(settings: Settings, source: Source, **options: Any) -> Loader:
    """A loader with the recipe's batch size, seed and shuffling."""
    size, shuffle = settings.train.batch_size, settings.data.shuffle
    return Loader(source, batch_size=size, seed=settings.seed, shuffle=shuffle, **options)


def epochs_to_steps(settings: Settings, source: Source) -> Settings:
    """Settings with `train.steps` computed from `train.epochs`, if epochs are given."""
    train = settings.train
    if source.size == 0:
        raise UserError("the training part has no samples: lower data.split.test and data.split.validation")
    if train.eval_epochs and source.size is None:
        raise UserError(f"train.eval_epochs={train.eval_epochs}: this source has no end; set train.eval_every instead")
    passes = 0 if source.size is None else (train.steps or math.inf) * train.samples_per_step / source.size
    if train.progressive and (train.epochs > 1 or not train.epochs and passes > 1):
        raise UserError("train.progressive=true scores samples that were never trained on: set train.epochs=1")
    if not train.epochs:
        return settings
    if source.size is None:
        raise UserError(f"train.epochs={train.epochs}: this source has no end; set train.steps instead")
    steps = -(-train.epochs * -(-source.size // train.batch_size) // train.accumulate)
    return settings.model_copy(update={"train": train.model_copy(update={"steps": steps})})


def make_model(settings: Settings, source: Source | Transforms) -> nn.Module:
    """Construct the model, on the meta device if it is a built-in one; `build` materializes it."""
    available: dict[str, Any] = {"source": source}
    if settings.tables is not None:
        optimizer = sparse_optimizer(settings.tables.kind, **settings.tables.arguments)
        available |= {"optimizer": optimizer, "inputs": ClickInputs(cast(ClickSource, source), optimizer)}
    with torch.device("meta" if settings.model.kind in MODELS else "cpu"):
        model = _construct("model", settings.model, MODELS, available)
    check_contract(model)
    if settings.tables is not None and sparse_of(model) is None:
        raise UserError(f"section [tables] is given, but model.kind={settings.model.kind} has no tables; drop it")
    check_monitor(settings.train.monitor, model.loss)
    features = [name for name, *_ in getattr(source, "features", ())]
    if (group := settings.train.group) and features and group not in features:
        raise UserError(f'train.group="{group}": the data have no such feature{did_you_mean(group, features)}')
    if smoothing := settings.train.label_smoothing:
        if not isinstance(model.loss, BinaryLoss | TaskLosses):
            raise UserError(
                f"train.label_smoothing needs BinaryLoss or TaskLosses, not {type(model.loss).__name__}; drop it"
            )
        model.loss.smoothing = smoothing
    return model


def make_dense_optimizer(settings: Settings) -> DenseOptimizer:
    """A function from parameters to the torch.optim optimizer of section [dense]."""
    kind = settings.dense.kind
    excluded = ("Optimizer", "LBFGS", "SparseAdam")  # abstract; many losses per step; needs sparse gradients
    optimizers = {name for name, value in vars(torch.optim).items() if inspect.isclass(value) and name not in excluded}
    if kind not in optimizers:
        raise UserError(f"dense.kind={kind}: torch.optim has no such optimizer{did_you_mean(kind, optimizers)}")
    make = getattr(torch.optim, kind)
    _check_arguments("dense", settings.dense.arguments, make, reserved=("params",))
    chosen = {"fused", "foreach", "capturable", "differentiable"} & settings.dense.arguments.keys()
    may_fuse = kind in FUSED_KINDS and not chosen

    def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        # the kernel takes no complex numbers, and walks a parameter and its gradient in the order of memory
        is_plain = all(parameter.is_floating_point() and parameter.is_contiguous() for parameter in parameters)
        own = partial(make, fused=True) if may_fuse and is_plain else make
        return _call_built_in("dense", own, settings.dense.arguments, parameters)

    return make_optimizer


# Optimizers whose fused kernel, on CPUs 2.6 times as fast as torch's default for Adam (benchmarks/dense_optimizer.py),
# gives the same bits wherever a parameter is cut into shards; that of SGD does not.
FUSED_KINDS = ("Adam", "AdamW", "Adagrad")
LOG_KINDS = ("criteo", "avazu", "log")
SOURCES = MappingProxyType(
    {
        "synthetic": ClickStream,
        "synthetic_tasks": TaskStream,
        "tokens": open_tokens,
        "stream": open_stream,
        "graph": open_graph,
        "synthetic_graph": open_synthetic_graph,
        **{kind: partial(open_log, kind) for kind in LOG_KINDS},
        "movielens": open_movielens,
    }
)


def _construct(
    section: str,
    settings: OpenSection,
    built_in: MappingProxyType[str, Any],
    available: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Call the function that `kind` names with the section's other keys and the available arguments it accepts."""
    kind = settings.kind
    make = resolve_name(f"{section}.kind", kind, built_in)
    accepted = {name: value for name, value in available.items() if name in inspect.signature(make).parameters}
    reserved = tuple(name for name in accepted if name not in ("seed",))
    _check_arguments(section, settings.arguments, make, reserved=reserved, other=tuple(type(settings).model_fields))
    bound = partial(make, **{name: value for name, value in accepted.items() if name not in settings.arguments})
    return _call_built_in(section, bound, settings.arguments) if kind in built_in else bound(**settings.arguments)


def _call_built_in(section: str, make: Callable[..., Any], arguments: Mapping[str, Any], *positional: Any) -> Any:
    """Call a built-in; an exception from it means a wrong value in the recipe, so it becomes a UserError."""
    try:
        return make(*positional, **arguments)
    except UserError:
        raise
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        values = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise UserError(f"section [{section}], {values}: {str(error).splitlines()[0]}") from error


def _check_arguments(
    section: str,
    arguments: dict[str, Any],
    make: Callable[..., Any],
    reserved: tuple[str, ...] = (),
    other: tuple[str, ...] = (),
) -> None:
    """Raise a UserError if a key is not a parameter of `make`, or a required one is missing.

    `reserved` parameters are passed by the caller and may not be keys; `other` keys of the section are suggested, too.
    """
    parameters = inspect.signature(make).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    names = {name for name in parameters if name not in reserved}
    for key in arguments:
        if key not in names:
            raise UserError(f'unknown key "{section}.{key}"{did_you_mean(key, names | set(other))}')
    for name, parameter in parameters.items():
        if name in names and parameter.default is parameter.empty and name not in arguments:
            missing = "section [tables]" if name in ("optimizer", "inputs") else f'key "{section}.{name}"'
            raise UserError(f"{missing} is missing; {section}.kind needs it")
