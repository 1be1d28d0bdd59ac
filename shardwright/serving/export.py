"""Export a trained model to a folder for serving; the folder is complete or absent.

It holds the dense model as a torch.export program, all tables in one file that a predictor maps into memory, and the
transforms from values to rows and numbers. Weights come from a checkpoint; rows are read and rounded in chunks, so that
tables may be larger than memory.

Shape legend: R rows, C columns.
"""

import copy
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.checkpoint import arrays, step_directories
from shardwright.checkpoint.manifest import MODEL_PREFIX, StoredArray
from shardwright.checkpoint.reading import Checkpoint
from shardwright.checkpoint.writing import quantize_rows
from shardwright.config import load
from shardwright.data.features.transforms import Transforms
from shardwright.data.loading.loader import Loader, to_batch
from shardwright.data.sources.source import Source
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged, Vectors
from shardwright.kernels.finite import check_finite
from shardwright.layers.embedding import EmbeddingTables
from shardwright.layers.in_batch_softmax import InBatchSoftmax
from shardwright.layers.loss import BinaryLoss
from shardwright.layers.table_weights import TableWeights
from shardwright.layers.task_losses import TaskLosses
from shardwright.measure.describe import sparse_of
from shardwright.models.two_tower import TwoTower
from shardwright.rectangle import Rectangle, dtype_name, full_rectangle
from shardwright.runtime.materialize import materialize
from shardwright.runtime.run import recipe
from shardwright.serving import item_vectors, manifest, program
from shardwright.serving.manifest import (
    IDS_SUFFIX,
    LOGIT,
    MANIFEST_FILE,
    PROBABILITY,
    PROGRAM_FILE,
    SCALES_SUFFIX,
    TABLES_FILE,
    TRANSFORMS_DIRECTORY,
    VECTORS,
    ExportManifest,
    logical_rows,
    removed_name,
)
from shardwright.spec import files

TABLE_DTYPES = ("", "float16", "int8")
CHUNK_BYTES = 64 << 20  # of a table, read and rounded at a time


def export_run(run: Path, output: Path, stored: str = "") -> ExportManifest:
    """Export the best checkpoint of a run, the last if it kept no best, or a given one. `stored`: as in `export`."""
    checkpoint = step_directories.resolve_best(run)
    run_folder = next((path for path in (run, *checkpoint.parents) if (path / "config.toml").is_file()), None)
    if run_folder is None:
        raise UserError(f"{run}: no config.toml in or above it; name a run, or export in Python: sw.export(model, ...)")
    settings = load(str(run_folder / "config.toml"))
    if (run_folder / TRANSFORMS_DIRECTORY).is_dir():
        transforms = Transforms.read(run_folder / TRANSFORMS_DIRECTORY)
        model, example = recipe.make_model(settings, transforms), to_batch(transforms.encode_samples([{}, {}]))
        data = item_vectors.open_data(settings, transforms) if isinstance(model, TwoTower) else None
    else:
        data, transforms = recipe.make_source(settings), None
        model, example = recipe.make_model(settings, data), Loader(data, batch_size=2).peek()
    return export(model, checkpoint, output, example=example, transforms=transforms, stored=stored, data=data)


def export(
    model: Any,
    checkpoint: str | Path,
    output: str | Path,
    *,
    example: Batch,
    transforms: Transforms | None = None,
    stored: str = "",
    data: Source | None = None,
) -> ExportManifest:
    """Export a model with the weights of a checkpoint.

    `example`: a batch of the model's source. `transforms`: for a model of a click log, so that requests have the
    log's values. `stored`: dtype of the tables, float16 or int8 with a scale per row; empty: as trained. `data`: of a
    two-tower model, the source of the items whose vectors are written too; none are if it has no end.
    """
    if stored not in TABLE_DTYPES:
        raise UserError(f'tables="{stored}"; allowed: float16, int8, or empty for the dtype of training')
    bags, output = sparse_of(model), Path(output)
    if bags is None:
        raise UserError(f"{type(model).__name__} has no child `sparse`; give a model with tables and a dense model")
    if bags.weighted or example.features.weights is not None:
        raise UserError("the tables pool by id weights, which requests cannot have; use tables with weighted=False")
    if output.exists():
        raise UserError(f"{output}: exists; export to another folder")
    if stored == "int8" and any(table.growth is not None for table in bags.tables):
        raise UserError("tables=int8 is not for tables that grow; use float16, or leave it out")
    draft = output.with_name(f".{output.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    with closing(Checkpoint(step_directories.resolve_checkpoint(Path(checkpoint)))) as source:
        course = source.numbers.get("course", {"line": "", "time": 0.0})  # old checkpoints have none
        names = _table_names(model, bags, source)
        try:
            draft.mkdir(parents=True)
            tables, errors = _write_tables(source, bags, names, draft / TABLES_FILE, stored)
            _write_dense(source, model, bags, example, draft / PROGRAM_FILE)
            file_names = [PROGRAM_FILE]
            if transforms is not None:
                (draft / TRANSFORMS_DIRECTORY).mkdir()
                transforms.write(draft / TRANSFORMS_DIRECTORY)
                file_names += [
                    f"{TRANSFORMS_DIRECTORY}/{path.name}" for path in sorted((draft / TRANSFORMS_DIRECTORY).iterdir())
                ]
            export_manifest = ExportManifest(
                manifest.VERSION,
                source.manifest.step,
                course["line"],
                course["time"],
                str(source.path),
                _scores_of(model),
                example.features.features,
                example.numbers.shape[1],
                dtype_name(example.numbers.dtype),
                bags.tables,
                bags.features,
                bags.weighted,
                stored,
                errors,
                names,
                tables,
                "" if transforms is None else transforms.digest,
                {name: manifest.file_digest(draft / name) for name in file_names},
                _initial_numbers(source),
                tuple(task.name for task in model.loss.tasks) if isinstance(model.loss, TaskLosses) else (),
            )
            if isinstance(model, TwoTower) and data is not None and data.size is not None:
                export_manifest = item_vectors.add(export_manifest, draft, model, data)
            files.write(export_manifest, draft / MANIFEST_FILE)
            for path in (*draft.rglob("*"), draft):
                step_directories.fsync_path(path)
            draft.rename(output)
        except OSError as error:
            raise UserError(f"{output}: cannot be written ({error.strerror})") from None
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return export_manifest


def _scores_of(model: Any) -> str:
    """What the outputs of a model are, of the kinds in serving/manifest.py."""
    if isinstance(model.loss, InBatchSoftmax):
        return VECTORS
    return PROBABILITY if isinstance(model.loss, BinaryLoss | TaskLosses) else LOGIT


def _initial_numbers(source: Checkpoint) -> dict[str, tuple[int, float]]:
    """By table that grows, the seed of its rows' initial values and the largest of these."""
    growth = source.numbers.get("job", {}).get("growth", {})
    return {name: (seed, bound) for own in growth.values() for name, (seed, bound) in own["initial"].items()}


def _table_names(model: nn.Module, bags: EmbeddingTables, source: Checkpoint) -> dict[str, str]:
    """Each table's weight name in the checkpoint; raises an error if missing or of another shape."""
    path = next(name for name, module in model.named_modules() if module is bags)
    modules = [(name, module) for name, module in bags.named_modules() if isinstance(module, TableWeights)]
    names = {module.table.name: f"{MODEL_PREFIX}{path}.{name}.weight" for name, module in modules}
    for table in bags.tables:
        spec, rows = source.tensor_specs.get(names[table.name]), logical_rows(table)
        if spec is None or spec[1] != (rows, table.dim):
            actual = "missing" if spec is None else f"{spec[1]}"
            raise UserError(
                f'{source.path}: "{names[table.name]}" is {actual}; the model has {(rows, table.dim)}: '
                "it was saved by another model"
            )
    return names


def _write_tables(
    source: Checkpoint, bags: EmbeddingTables, names: Mapping[str, str], path: Path, stored: str
) -> tuple[dict[str, StoredArray], dict[str, float]]:
    """Write the tables' file; returns where each array is stored, and each table's largest rounding error."""
    specs: dict[str, tuple[str, tuple[int, ...]]] = {}
    rows_of: dict[str, tuple[int, int] | Tensor] = {}
    for table in sorted(bags.tables, key=lambda table: table.dim):  # tables of one dim are adjacent in the file
        name, rows = names[table.name], table.rows
        rows_of[table.name] = (0, rows)
        if table.growth is not None:
            ids = rows_of[table.name] = source.row_ids(name, removed_name(name))
            rows = len(ids)
            specs[table.name + IDS_SUFFIX] = ("int64", (rows, 1))
        specs[table.name] = (stored or source.tensor_specs[name][0], (rows, table.dim))
        if stored == "int8":
            specs[table.name + SCALES_SUFFIX] = ("float32", (table.rows, 1))
    tensors, errors = arrays.allocate_file(path, specs), {}
    for table in bags.tables:
        name, rows = names[table.name], rows_of[table.name]
        if isinstance(rows, Tensor):
            tensors[table.name + IDS_SUFFIX].copy_(rows.unsqueeze(1))
        if not stored:
            source.fill([Rectangle(name, (logical_rows(table), table.dim), tensors[table.name], rows)])
            check_finite(f'{source.path}: table "{table.name}"', tensors[table.name])
            continue
        errors[table.name] = 0.0
        for span, exact_RC in _read_row_chunks(source, name, rows):
            check_finite(f'{source.path}: table "{table.name}" from row {span.start} on', exact_RC)
            tensors[table.name][span], scales, error = quantize_rows(exact_RC.float(), stored)
            if scales is not None:
                tensors[table.name + SCALES_SUFFIX][span] = scales
            errors[table.name] = max(errors[table.name], error)
    return arrays.describe_file(path, specs, tensors), errors


def _read_row_chunks(source: Checkpoint, name: str, rows: tuple[int, int] | Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Read a table, or its rows with these ids, in chunks; yields the positions and the values of each."""
    name_of_dtype, shape = source.tensor_specs[name]
    dtype, num_rows = getattr(torch, name_of_dtype), rows[1] if isinstance(rows, tuple) else len(rows)
    step = max(1, CHUNK_BYTES // (shape[1] * dtype.itemsize))
    for start in range(0, num_rows, step):
        span = slice(start, min(start + step, num_rows))
        values = torch.empty(span.stop - start, shape[1], dtype=dtype)
        source.fill([Rectangle(name, shape, values, (start, span.stop) if isinstance(rows, tuple) else rows[span])])
        yield span, values


def _write_dense(source: Checkpoint, model: Any, bags: EmbeddingTables, example: Batch, path: Path) -> None:
    """Write the dense model as a program, and check that the program works for other sizes."""
    dense = copy.deepcopy(model.dense)
    materialize(dense, torch.device("cpu"))
    dense.eval()
    for name, tensor in dense.state_dict().items():
        name = f"{MODEL_PREFIX}{program.WEIGHT_PREFIX}{name}"
        if name not in source.tensor_specs or source.tensor_specs[name][1] != tuple(tensor.shape):
            raise UserError(f'{source.path}: "{name}" is missing or has another shape; it was saved by another model')
        source.fill([full_rectangle(name, tensor)])
        check_finite(f'{source.path}: "{name.removeprefix(MODEL_PREFIX)}"', tensor)
    dense_program = program.DenseProgram(dense, bags, example.features.features)

    def inputs(sizes: Sequence[int]) -> tuple[Any, ...]:
        return program.inputs(*_synthetic_batch(bags, example, sizes, getattr(model, "aligned", {})))

    program.write(dense_program, inputs((3, 2)), path)
    program.check_dynamic_sizes(path, dense_program, inputs((5, 3)))
    program.check_dynamic_sizes(path, dense_program, inputs((1, 1)))
    program.check_dynamic_sizes(path, dense_program, inputs((70, 3)))


def _synthetic_batch(
    bags: EmbeddingTables, example: Batch, sizes: Sequence[int], aligned: Mapping[str, str]
) -> tuple[Batch, Vectors]:
    """A batch of `sizes` (samples, ids per sample), and its vectors.

    Dimensions must differ, so that torch.export does not unify any two: feature i has i more ids in the first sample,
    except that a feature in `aligned` has as many as another.
    """
    num_samples, num_ids = sizes
    names = example.features.features
    lengths = torch.full((len(names), num_samples), num_ids)
    lengths[:, 0] += torch.tensor([names.index(aligned.get(name, name)) for name in names])
    batch = Batch(Jagged(names, torch.zeros(int(lengths.sum()), dtype=torch.int64), lengths), None, {})
    width = example.numbers.shape[1]
    numbers = torch.linspace(-1, 1, num_samples * width, dtype=example.numbers.dtype).view(num_samples, width)
    vectors = bags.blank(batch.features, device="cpu")
    pooled = torch.linspace(-1, 1, vectors.pooled_BD.numel(), dtype=vectors.pooled_BD.dtype)
    rows = [torch.linspace(-1, 1, v.numel(), dtype=v.dtype).view(v.shape) for v in vectors.sequences.values()]
    return replace(batch, dense=numbers), bags.vectors(pooled.view(vectors.pooled_BD.shape), rows)
