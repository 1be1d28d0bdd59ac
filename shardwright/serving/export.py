"""A trained model as a folder to serve from: its dense part as a program, its tables as one file that is mapped into
memory, and how values became rows. Complete or absent.

The weights come from a checkpoint, whoever wrote it: rows are read and rounded some at a time, so that tables larger
than memory are exported as well.
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
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged, Vectors
from shardwright.kernels.finite import check_finite
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.loss import BinaryLoss
from shardwright.layers.table_weights import TableWeights
from shardwright.measure.describe import sparse_of
from shardwright.rectangle import Rectangle, dtype_name, full_rectangle
from shardwright.runtime.materialize import materialize
from shardwright.runtime.run import recipe
from shardwright.serving import manifest, program
from shardwright.serving.manifest import (
    LOGIT,
    MANIFEST_FILE,
    PROBABILITY,
    PROGRAM_FILE,
    SCALES_SUFFIX,
    TABLES_FILE,
    TRANSFORMS_DIRECTORY,
    ExportManifest,
)
from shardwright.spec import files

TABLE_DTYPES = ("", "float16", "int8")
CHUNK_BYTES = 64 << 20


def export_run(run: Path, output: Path, stored: str = "") -> ExportManifest:
    """The last checkpoint of a run, or the one of its checkpoints that is named."""
    at = step_directories.resolve_checkpoint(run)
    home = next((one for one in (run, *at.parents) if (one / "config.toml").is_file()), None)
    if home is None:
        raise UserError(f"{run}: no config.toml there or above; name a run, or export in Python: sw.export(model, ...)")
    settings = load(str(home / "config.toml"))
    if (home / TRANSFORMS_DIRECTORY).is_dir():
        transforms = Transforms.read(home / TRANSFORMS_DIRECTORY)
        model, example = recipe.make_model(settings, transforms), to_batch(transforms.encode_samples([{}, {}]))
    else:
        source, transforms = recipe.make_source(settings), None
        model, example = recipe.make_model(settings, source), Loader(source, batch_size=2).peek()
    return export(model, at, output, example=example, transforms=transforms, stored=stored)


def export(
    model: Any,
    checkpoint: str | Path,
    output: str | Path,
    *,
    example: Batch,
    transforms: Transforms | None = None,
    stored: str = "",
) -> ExportManifest:
    """A model, with the weights of a checkpoint. `example`: a batch of its source; `stored`: the dtype of tables,
    float16 or int8 with a scale for each row; empty: as they were trained."""
    if stored not in TABLE_DTYPES:
        raise UserError(f'tables="{stored}"; allowed: float16, int8, or nothing for tables as they were trained')
    bags, output = sparse_of(model), Path(output)
    if bags is None:
        raise UserError(f"{type(model).__name__} has no child `sparse`: an exported model is tables and a dense part")
    if bags.weighted or example.features.weights is not None:
        raise UserError("these tables pool by id weights, which nobody can ask with: weighted=False pools without")
    if output.exists():
        raise UserError(f"{output}: exists; export to another folder, and serve from that")
    draft = output.with_name(f".{output.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    with closing(Checkpoint(step_directories.resolve_checkpoint(Path(checkpoint)))) as found:
        course = found.numbers.get("course", {"line": "", "time": 0.0})  # none: written before there were any
        names = _names(model, bags, found)
        try:
            draft.mkdir(parents=True)
            tables, errors = _write_tables(found, bags, names, draft / TABLES_FILE, stored)
            _write_dense(found, model, bags, example, draft / PROGRAM_FILE)
            written = [PROGRAM_FILE]
            if transforms is not None:
                (draft / TRANSFORMS_DIRECTORY).mkdir()
                transforms.write(draft / TRANSFORMS_DIRECTORY)
                written += [
                    f"{TRANSFORMS_DIRECTORY}/{path.name}" for path in sorted((draft / TRANSFORMS_DIRECTORY).iterdir())
                ]
            made = ExportManifest(
                manifest.VERSION,
                found.manifest.step,
                course["line"],
                course["time"],
                str(found.path),
                PROBABILITY if isinstance(model.loss, BinaryLoss) else LOGIT,
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
                {name: manifest.file_digest(draft / name) for name in written},
            )
            files.write(made, draft / MANIFEST_FILE)
            for path in (*draft.rglob("*"), draft):
                step_directories.fsync_path(path)
            draft.rename(output)
        except OSError as error:
            raise UserError(f"{output}: cannot be written ({error.strerror})") from None
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return made


def _names(model: nn.Module, bags: EmbeddingBags, found: Checkpoint) -> dict[str, str]:
    """What each table's weight is called in a checkpoint."""
    path = next(name for name, module in model.named_modules() if module is bags)
    modules = [(name, one) for name, one in bags.named_modules() if isinstance(one, TableWeights)]
    names = {one.table.name: f"{MODEL_PREFIX}{path}.{name}.weight" for name, one in modules}
    for table in bags.tables:
        kind = found.tensor_specs.get(names[table.name])
        if kind is None or kind[1] != (table.rows, table.dim):
            had = "not there" if kind is None else f"{kind[1]}"
            raise UserError(
                f'{found.path}: "{names[table.name]}" is {had}; the model has {(table.rows, table.dim)}: '
                "it was saved by another model"
            )
    return names


def _write_tables(
    found: Checkpoint, bags: EmbeddingBags, names: Mapping[str, str], path: Path, stored: str
) -> tuple[dict[str, StoredArray], dict[str, float]]:
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for table in sorted(bags.tables, key=lambda table: table.dim):  # those as wide lie one behind the other
        kinds[table.name] = (stored or found.tensor_specs[names[table.name]][0], (table.rows, table.dim))
        if stored == "int8":
            kinds[table.name + SCALES_SUFFIX] = ("float32", (table.rows, 1))
    made, errors = arrays.allocate_file(path, kinds), {}
    for table in bags.tables:
        name = names[table.name]
        if not stored:
            found.fill([full_rectangle(name, made[table.name])])
            check_finite(f'{found.path}: table "{table.name}"', made[table.name])
            continue
        errors[table.name] = 0.0
        for rows, exact_RC in _by_rows(found, name, table.rows):
            check_finite(f'{found.path}: table "{table.name}" from row {rows[0]} on', exact_RC)
            made[table.name][slice(*rows)], scales, error = quantize_rows(exact_RC.float(), stored)
            if scales is not None:
                made[table.name + SCALES_SUFFIX][slice(*rows)] = scales
            errors[table.name] = max(errors[table.name], error)
    return arrays.describe_file(path, kinds, made), errors


def _by_rows(found: Checkpoint, name: str, rows: int) -> Iterator[tuple[tuple[int, int], Tensor]]:
    dtype, (_, dim) = found.tensor_specs[name]
    kind = getattr(torch, dtype)
    step = max(1, CHUNK_BYTES // (dim * kind.itemsize))
    for start in range(0, rows, step):
        run = (start, min(start + step, rows))
        values = torch.empty(run[1] - start, dim, dtype=kind)
        found.fill([Rectangle(name, (rows, dim), values, run)])
        yield run, values


def _write_dense(found: Checkpoint, model: Any, bags: EmbeddingBags, example: Batch, path: Path) -> None:
    dense = copy.deepcopy(model.dense)
    materialize(dense, torch.device("cpu"))
    dense.eval()
    for name, tensor in dense.state_dict().items():
        name = f"{MODEL_PREFIX}{program.WEIGHT_PREFIX}{name}"
        if name not in found.tensor_specs or found.tensor_specs[name][1] != tuple(tensor.shape):
            raise UserError(f'{found.path}: "{name}" is not in it as the model has it; it was saved by another model')
        found.fill([full_rectangle(name, tensor)])
        check_finite(f'{found.path}: "{name.removeprefix(MODEL_PREFIX)}"', tensor)
    made = program.DenseProgram(dense, bags, example.features.features)

    def given(sizes: Sequence[int]) -> tuple[Any, ...]:
        return program.inputs(*_made_up(bags, example, sizes))

    program.write(made, given((3, 2)), path)
    program.check_dynamic_sizes(path, made, given((5, 3)))
    program.check_dynamic_sizes(path, made, given((1, 1)))


def _made_up(bags: EmbeddingBags, like: Batch, sizes: Sequence[int]) -> tuple[Batch, Vectors]:
    """So many samples of so many ids; the first sample has one more of each next feature, to tell numbers apart."""
    num, ids = sizes
    names = like.features.features
    lengths = torch.full((len(names), num), ids)
    lengths[:, 0] += torch.arange(len(names))
    batch = Batch(Jagged(names, torch.zeros(int(lengths.sum()), dtype=torch.int64), lengths), None, {})
    width = like.numbers.shape[1]
    numbers = torch.linspace(-1, 1, num * width, dtype=like.numbers.dtype).view(num, width)
    vectors = bags.blank(bags.read(batch.features), device="cpu")
    pooled = torch.linspace(-1, 1, vectors.pooled_BD.numel(), dtype=vectors.pooled_BD.dtype)
    rows = [torch.linspace(-1, 1, v.numel(), dtype=v.dtype).view(v.shape) for v in vectors.sequences.values()]
    return replace(batch, dense=numbers), bags.vectors(pooled.view(vectors.pooled_BD.shape), rows)
