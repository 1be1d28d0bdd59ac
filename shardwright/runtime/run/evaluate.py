"""Evaluate a finished run on held-out rows: all metrics, and those of each value of a column.

Shape legend: B samples.
"""

import json
import re
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.checkpoint.step_directories import read_manifest, resolve_best
from shardwright.config import Settings, load
from shardwright.config.servers import ServerSettings
from shardwright.data.features.transforms import Transforms
from shardwright.data.loading.loader import Loader
from shardwright.data.logs.value_names import name_values
from shardwright.data.sources.clicks import ClickLog
from shardwright.data.sources.held_out import HeldOutFiles
from shardwright.data.sources.source import Source, make_order
from shardwright.data.sources.synthetic import ClickStream, TaskStream
from shardwright.errors import UserError, did_you_mean
from shardwright.jagged import select
from shardwright.kernels.matmul import preferred_library, use_library
from shardwright.models.two_tower import TwoTower
from shardwright.runtime.accumulation import loss_weight
from shardwright.runtime.build import build
from shardwright.runtime.dense_layout import mesh_for
from shardwright.runtime.job import Job
from shardwright.runtime.outputs import Output
from shardwright.runtime.planning import plan_run
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.run import full_graph, metrics, recipe
from shardwright.runtime.run.device import run_device
from shardwright.runtime.run.held_out_files import open_files
from shardwright.runtime.run.retrieval import RetrievalMeter
from shardwright.runtime.run.setup import COLLECTIVE_TIMEOUT_SECONDS, hottest_ids, set_threads
from shardwright.runtime.run.token_meter import TokenMeter
from shardwright.spec import files

MAX_VALUES = 1000  # of a column, those with the most rows
SYNTHETIC_SAMPLES = 100_000  # of a generated stream, which has no end
FOLDER = "evaluations"  # in the run directory


@dataclass(frozen=True)
class RunEvaluation:
    """Metrics of a checkpoint on held-out rows; the contents of a file in the folder `evaluations` of a run."""

    checkpoint: str
    step: int
    data: str  # the file; empty: the run's held-out rows
    rows: int
    metrics: dict[str, float]
    by: dict[str, list[dict[str, Any]]]  # by column, for each value: value, rows, base_rate, and metrics


def find_run(path: Path) -> tuple[Path, Path]:
    """The run directory and the checkpoint that a run, or a folder or checkpoint of it, names."""
    checkpoint = resolve_best(path)
    for folder in (path, *checkpoint.parents):
        if (folder / "config.toml").is_file():
            return folder, checkpoint
    raise UserError(f"{path}: no config.toml in or above it; name a run, or one of its checkpoints")


def load_settings(run: Path, overrides: Sequence[str]) -> Settings:
    """The settings of a run, to evaluate it: without table servers, readers and restarts."""
    settings = load(str(run / "config.toml"), ("restarts=0", *overrides))
    train = settings.train.model_copy(update={"progressive": False, "accumulate": 1, "eval_samples": 0})
    data = settings.data.model_copy(update={"readers": (), "reader_keys": ""})
    return settings.model_copy(update={"train": train, "data": data, "servers": ServerSettings()})  # pyright: ignore


def evaluate(path: Path, overrides: Sequence[str] = (), data: str = "", by: str = "") -> tuple[RunEvaluation, Path]:
    """Evaluate the best, or else last, checkpoint of a run, or a checkpoint of it. All ranks call it.

    `data`: a file, in place of the run's held-out rows; `by`: a category column. Returns the result and the file that
    the first rank writes it to.
    """
    run, checkpoint = find_run(path)
    settings = load_settings(run, overrides)
    torch.manual_seed(settings.seed)  # all ranks begin with equal models
    use_library(settings.train.products if settings.train.products != "auto" else preferred_library())
    model_source, held_out = _open_sources(settings, run, checkpoint, data)
    columns = tuple(dict.fromkeys(filter(None, (settings.train.group, by))))
    _check_columns(held_out, columns)
    model = recipe.make_model(settings, model_source)
    with ExitStack() as stack:
        set_threads(settings, stack)
        _, plan, _ = plan_run(settings, held_out, model)
        device = run_device(settings.run.device, plan, model)
        mesh = stack.enter_context(closing(mesh_for(plan, COLLECTIVE_TIMEOUT_SECONDS, device=device)))
        hottest = hottest_ids(settings, held_out, model, plan)
        job = build(model, plan, mesh, optimizer=recipe.make_dense_optimizer(settings), hottest=hottest)
        job.load(checkpoint)
        ranks = RankGroup(mesh)
        window, values = _evaluate(settings, job, held_out, columns)
        gathered = ranks.all_gather_window(window)
        computed = gathered.compute()
        computed |= TokenMeter(job.model.loss, 0, None).derive(computed) | full_graph.scores(job, held_out)
        if isinstance(model, TwoTower):
            trained = recipe.make_source(settings) if isinstance(model_source, Transforms) else model_source
            computed |= RetrievalMeter(job, trained, settings.train.batch_size).scores(held_out)
        groups = {column: _group(ranks, window, own, held_out, column) for column, own in values.items()}
        num_rows = int(held_out.size or 0)
        result = RunEvaluation(str(checkpoint), job.step, data, num_rows, computed, groups)
        origin = "-" + re.sub(r"[^\w.+-]", "_", Path(data).name) if data else ""
        name = f"{checkpoint.name}{origin}{f'-by-{by}' if by else ''}.json"
        if ranks.is_first:
            (run / FOLDER).mkdir(exist_ok=True)
            files.write_text(json.dumps(asdict(result), indent=1), run / FOLDER / name)
        return result, run / FOLDER / name


def _open_sources(
    settings: Settings, run: Path, checkpoint: Path, data: str
) -> tuple[Source | Transforms, HeldOutFiles | Source]:
    """What the model is made for, and the rows to evaluate on."""
    if data:
        if not (run / "transforms").is_dir():
            raise UserError(f"data={data}: the run reads data.kind={settings.data.kind}, which has no files of rows")
        transforms = Transforms.read(run / "transforms")
        return transforms, open_files(settings.data, transforms, "data", data)
    source = recipe.make_source(settings)
    if (held_out := recipe.test_source(source)) is not None:
        return source, held_out
    if isinstance(source, ClickStream | TaskStream):
        train = settings.train.model_copy(update={"eval_samples": SYNTHETIC_SAMPLES})
        samples = read_manifest(checkpoint).step * settings.train.samples_per_step
        held_out = recipe.evaluation_source(settings.model_copy(update={"train": train}), source, samples)
    else:
        evaluation = getattr(source, "evaluation", None)
        held_out = None if evaluation is None else evaluation()
    if held_out is None or not held_out.size:
        raise UserError(f"{run}: no rows are held out; name a file, as data=FILE")
    return source, held_out


def _check_columns(held_out: Source, columns: Sequence[str]) -> None:
    if not isinstance(held_out, ClickLog | HeldOutFiles):
        return
    names = held_out.transforms.schema.categories
    for column in columns:
        if column not in names:
            raise UserError(f'by="{column}" is no category column{did_you_mean(column, names)}')


def _evaluate(
    settings: Settings, job: Job, held_out: Source, columns: Sequence[str]
) -> tuple[metrics.WindowMetrics, dict[str, Tensor]]:
    """This rank's outputs, and of each column the value of each of its samples."""
    labels, classes = metrics.labels_of(job.model.loss)
    if columns and not labels:
        raise UserError(f'by="{columns[-1]}" is for models of binary labels; leave it out')
    weigh = None if labels else partial(loss_weight, job.model.loss)
    unknown_ids = getattr(getattr(held_out, "transforms", held_out), "unknown_ids", ())
    window = metrics.WindowMetrics(labels, settings.train.group or None, unknown_ids, weigh, classes)
    shard, size = job.plan.position(job.mesh.rank, job.plan.sample_axes), settings.train.batch_size
    ids: dict[str, list[Tensor]] = {column: [] for column in columns}
    is_log = isinstance(held_out, ClickLog | HeldOutFiles)
    with closing(Loader(held_out, batch_size=size, shuffle=False, shard=shard)) as loader:
        for output in job.evaluate(loader):
            window.update(output)
            for column in () if is_log else columns:
                ids[column].append(_ids(output, column))
    if not is_log:
        return window, {column: torch.cat(own) for column, own in ids.items()}
    order = make_order(held_out, size, 0, False, shard)
    indices = np.concatenate([order.indices(0, batch) for batch in range(order.num_batches or 0)])
    return window, {name: torch.from_numpy(held_out.codes(name, indices).view(np.int64)) for name in columns}


def _ids(output: Output, feature: str) -> Tensor:
    if feature not in output.batch.features.features:
        raise UserError(f'by="{feature}" is no feature{did_you_mean(feature, output.batch.features.features)}')
    ids = select(output.batch.features, [feature])
    if not bool((ids.lengths == 1).all()):
        raise UserError(f'by="{feature}" has samples with none or several ids; use one with one id per sample')
    return ids.values


def _group(
    ranks: RankGroup, window: metrics.WindowMetrics, values_B: Tensor, held_out: Source, column: str
) -> list[dict[str, Any]]:
    """Metrics of each value of a column over all ranks, of those with the most rows."""
    own = {name: tensor for name, tensor in window.columns().items() if tensor is not None}
    columns = ranks.all_gather_window(window.from_columns({**own, "groups": values_B})).columns()
    values = columns.pop("groups")
    assert values is not None
    distinct, inverse, counts = np.unique(values.numpy(), return_inverse=True, return_counts=True)
    rows_of = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
    largest = np.argsort(-counts, kind="stable")[:MAX_VALUES].tolist()
    names = {int(distinct[index]): str(int(distinct[index])) for index in largest}
    if isinstance(held_out, ClickLog | HeldOutFiles):
        codes = {value: value % 2**64 for value in names}
        texts = name_values(held_out.origins, held_out.transforms.schema, column, set(codes.values()))
        names = {value: texts[code] for value, code in codes.items()}
    return [
        {"value": names[int(distinct[index])], **_metrics_of(window, columns, torch.from_numpy(rows_of[index]))}
        for index in largest
    ]


def _metrics_of(window: metrics.WindowMetrics, columns: dict[str, Tensor | None], rows: Tensor) -> dict[str, float]:
    chosen = {name: tensor[rows] for name, tensor in columns.items() if tensor is not None and name != "losses"}
    value_window = metrics.WindowMetrics(window.labels).from_columns({"losses": torch.tensor([[0.0, 1.0]]), **chosen})
    values = {name: value for name, value in value_window.compute().items() if name != "loss"}
    rates = {f"{prefix}base_rate": float(chosen[f"{prefix}labels"].double().nanmean()) for prefix in window.labels}
    return {"rows": len(rows), **rates, **values}
