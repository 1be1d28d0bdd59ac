"""Checkpoints outside a job: describe one, reshard it, or export its state dict for other libraries."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from math import prod
from pathlib import Path

import torch

from shardwright.checkpoint import arrays, step_directories
from shardwright.checkpoint.manifest import MODEL_PREFIX, Manifest, TensorEntry
from shardwright.checkpoint.reading import Checkpoint
from shardwright.checkpoint.writing import CheckpointWriter
from shardwright.errors import UserError
from shardwright.rectangle import Rectangle, full_rectangle
from shardwright.spec.workload import MAX_GROWING_ROWS


def describe_checkpoint(path: Path, manifest: Manifest) -> Iterator[str]:
    """Lines that describe a checkpoint."""
    yield f"{path}"
    ranks = f"{manifest.ranks} rank{'s' * (manifest.ranks > 1)}"
    size = f"{manifest.bytes_ / 1e6:,.1f} MB"
    yield f"step {manifest.step:,}, {len(manifest.tensors)} tensors, {size}, written by {ranks}"
    yield f"training waited {manifest.pause_seconds * 1e3:,.1f} ms; writing took {manifest.seconds:,.2f} s"
    if manifest.base:
        num_increments = sum(not entry.full for entry in manifest.tensors.values())
        yield f"increment of {manifest.base}: {num_increments} tensors have only the rows that changed since"
    for name, entry in manifest.tensors.items():
        if entry.error:
            yield f'"{name}" is rounded: the largest error of a value is {entry.error:.3g}'


def tensor_table(manifest: Manifest) -> list[tuple[str, str, str, str]]:
    """Name, dtype and shape, stored megabytes and stored shards of each tensor, largest first."""
    rows = []
    for name, entry in manifest.tensors.items():
        bytes_ = sum(prod(piece.values.shape) * _itemsize(piece.values.dtype) for piece in entry.pieces)
        rows.append((bytes_, (name, f"{entry.dtype} {list(entry.shape)}", f"{bytes_ / 1e6:,.2f}", _describe(entry))))
    return [row for _, row in sorted(rows, key=lambda item: -item[0])]


def reshard(path: Path, root: Path, num_files: int) -> Path:
    """Write the state as a full checkpoint of `num_files` files, each with an even range of every tensor."""
    if num_files < 1:
        raise UserError(f"--files {num_files}; allowed: 1 or more")
    with closing(Checkpoint(path)) as source:
        _refuse_growing(source, "reshard")
        step, rank_states = source.manifest.step, source.numbers.get("ranks", [])
        if root.resolve() == path.resolve().parent or step_directories.checkpoint_path(root, step).exists():
            raise UserError(
                f"{step_directories.checkpoint_path(root, step)}: already exists, and increments may be based on it; "
                "name another folder"
            )
        writers = [CheckpointWriter(root, rank=rank, num_ranks=num_files, keep=2**31) for rank in range(num_files)]
        _check(writers[0].prepare(step))
        for rank in reversed(range(num_files)):  # rank 0 last: its thread waits for the others
            rects = [rect for name in source.tensor_specs for rect in _shard(source, name, rank, num_files)]
            source.fill(rects)
            numbers = {key: value for key, value in source.numbers.items() if key != "ranks"}
            writers[rank].begin(step, rects, {**numbers, "ranks": rank_states} if rank == 0 else {})
            if rank:
                _check(writers[rank].wait())
        _check(writers[0].wait())
    return step_directories.checkpoint_path(root, step)


def export_state_dict(path: Path, output: Path, prefix: str = "") -> tuple[int, int]:
    """Write the model's state dict, names without `prefix`, to a file; returns its tensors and bytes."""
    if output.suffix != ".safetensors":
        raise UserError(f"{output}: unknown file format; name a .safetensors file")
    with closing(Checkpoint(path)) as source:
        _refuse_growing(source, "export")
        full_prefix = MODEL_PREFIX + prefix
        names = {name.removeprefix(full_prefix): name for name in source.tensor_specs if name.startswith(full_prefix)}
        if not names:
            modules = sorted(
                {
                    name.removeprefix(MODEL_PREFIX).split(".")[0]
                    for name in source.tensor_specs
                    if name.startswith(MODEL_PREFIX)
                }
            )
            raise UserError(
                f'no tensor name of the model begins with "{prefix}"; allowed: {", ".join(f"{m}." for m in modules)}'
            )
        draft = output.with_name(f".{output.name}.draft")
        try:
            tensors = arrays.allocate_file(draft, {key: source.tensor_specs[name] for key, name in names.items()})
            source.fill([full_rectangle(names[key], tensor) for key, tensor in tensors.items()])
            step_directories.fsync_path(draft)
            draft.replace(output)
        except OSError as error:
            raise UserError(f"{output}: cannot be written ({error.strerror})") from None
        finally:
            draft.unlink(missing_ok=True)
    return len(tensors), sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _refuse_growing(source: Checkpoint, command: str) -> None:
    for name, (_, shape) in source.tensor_specs.items():
        if shape[:1] == (MAX_GROWING_ROWS,):
            raise UserError(
                f"{source.path}: {name} is of a table that grows, which `checkpoint {command}` does not support; a job "
                "on any number of ranks loads it, and `shardwright export` exports its run"
            )


def _shard(source: Checkpoint, name: str, rank: int, num_ranks: int) -> Iterator[Rectangle]:
    """A rank's even range of a tensor's rows, without values; an unsplittable tensor goes to rank 0."""
    dtype, shape = source.tensor_specs[name]
    if len(shape) in (1, 2) and shape[0] >= num_ranks:
        rows = (shape[0] * rank // num_ranks, shape[0] * (rank + 1) // num_ranks)
        values = torch.empty(rows[1] - rows[0], *shape[1:], dtype=getattr(torch, dtype))
        yield Rectangle(name, shape, values, rows)
    elif rank == 0:
        yield full_rectangle(name, torch.empty(shape, dtype=getattr(torch, dtype)))


def _describe(entry: TensorEntry) -> str:
    """Describe how a tensor is stored, such as "row shards: 4"."""
    if not entry.full:
        return f"{sum(piece.values.shape[0] for piece in entry.pieces):,} changed rows"
    if len(entry.pieces) == 1 and entry.pieces[0].rows and not entry.pieces[0].cols:
        return "not split"
    has_columns = Counter(len(piece.cols) > 0 for piece in entry.pieces)
    words = [f"row shards: {has_columns[False]}"] * bool(has_columns[False])
    words += [f"column shards: {has_columns[True]}"] * bool(has_columns[True])
    is_reordered = any(piece.rows is None for piece in entry.pieces)
    return ", ".join(words) + ", rows not in id order" * is_reordered


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def _check(failure: str) -> None:
    if failure:
        raise UserError(failure)
