"""Checkpoints outside a job: told in words, cut anew, and as the state dict that other libraries load."""

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


def describe_checkpoint(path: Path, manifest: Manifest) -> Iterator[str]:
    """A checkpoint in a few lines."""
    yield f"{path}"
    of = f"{manifest.ranks} rank{'s' * (manifest.ranks > 1)}"
    size = f"{manifest.bytes_ / 1e6:,.1f} MB"
    yield f"step {manifest.step:,}, {len(manifest.tensors)} tensors, {size}, written by {of}"
    yield f"steps waited {manifest.pause_seconds * 1e3:,.1f} ms for it; it took {manifest.seconds:,.2f} s beside them"
    if manifest.base:
        changed = sum(not entry.full for entry in manifest.tensors.values())
        yield f"goes on from {manifest.base}: of {changed} tensors only rows that changed since"
    for name, entry in manifest.tensors.items():
        if entry.error:
            yield f'"{name}" is rounded: a value differs by {entry.error:.3g} at most'


def tensor_table(manifest: Manifest) -> list[tuple[str, str, str, str]]:
    """Of each tensor name, dtype and shape, megabytes and how it lies, the largest first."""
    found = []
    for name, entry in manifest.tensors.items():
        bytes_ = sum(prod(piece.values.shape) * _size(piece.values.dtype) for piece in entry.pieces)
        found.append((bytes_, (name, f"{entry.dtype} {list(entry.shape)}", f"{bytes_ / 1e6:,.2f}", _lies(entry))))
    return [row for _, row in sorted(found, key=lambda item: -item[0])]


def reshard(path: Path, root: Path, num_files: int) -> Path:
    """The same state as a whole checkpoint of `num` files with as many rows of each tensor."""
    if num_files < 1:
        raise UserError(f"--files {num_files}; wanted 1 or more")
    with closing(Checkpoint(path)) as found:
        step, own = found.manifest.step, found.numbers.get("ranks", [])
        if root.resolve() == path.resolve().parent or step_directories.checkpoint_path(root, step).exists():
            raise UserError(
                f"{step_directories.checkpoint_path(root, step)}: is there, and others may go on from it; "
                "name another folder"
            )
        writers = [CheckpointWriter(root, rank=rank, num_ranks=num_files, keep=2**31) for rank in range(num_files)]
        _raise(writers[0].prepare(step))
        for rank in reversed(range(num_files)):  # the first waits for the others
            parts = [part for name in found.tensor_specs for part in _part(found, name, rank, num_files)]
            found.fill(parts)
            numbers = {key: value for key, value in found.numbers.items() if key != "ranks"}
            writers[rank].begin(step, parts, {**numbers, "ranks": own} if rank == 0 else {})
            if rank:
                _raise(writers[rank].wait())
        _raise(writers[0].wait())
    return step_directories.checkpoint_path(root, step)


def export_state_dict(path: Path, output: Path, prefix: str = "") -> tuple[int, int]:
    """The model's state dict in a file; how many tensors and bytes."""
    if output.suffix != ".safetensors":
        raise UserError(f"{output}: unknown form; name a .safetensors file")
    with closing(Checkpoint(path)) as found:
        begins = MODEL_PREFIX + prefix
        names = {name.removeprefix(begins): name for name in found.tensor_specs if name.startswith(begins)}
        if not names:
            known = sorted(
                {
                    name.removeprefix(MODEL_PREFIX).split(".")[0]
                    for name in found.tensor_specs
                    if name.startswith(MODEL_PREFIX)
                }
            )
            raise UserError(
                f'no name of the model begins with "{prefix}"; allowed: {", ".join(f"{one}." for one in known)}'
            )
        draft = output.with_name(f".{output.name}.draft")
        try:
            made = arrays.allocate_file(draft, {short: found.tensor_specs[name] for short, name in names.items()})
            found.fill([full_rectangle(names[short], tensor) for short, tensor in made.items()])
            step_directories.fsync_path(draft)
            draft.replace(output)
        except OSError as error:
            raise UserError(f"{output}: cannot be written ({error.strerror})") from None
        finally:
            draft.unlink(missing_ok=True)
    return len(made), sum(tensor.numel() * tensor.element_size() for tensor in made.values())


def _part(found: Checkpoint, name: str, rank: int, num: int) -> Iterator[Rectangle]:
    dtype, shape = found.tensor_specs[name]
    if len(shape) in (1, 2) and shape[0] >= num:
        rows = (shape[0] * rank // num, shape[0] * (rank + 1) // num)
        values = torch.empty(rows[1] - rows[0], *shape[1:], dtype=getattr(torch, dtype))
        yield Rectangle(name, shape, values, rows)
    elif rank == 0:
        yield full_rectangle(name, torch.empty(shape, dtype=getattr(torch, dtype)))


def _lies(entry: TensorEntry) -> str:
    """Its pieces in words."""
    if not entry.full:
        return f"{sum(piece.values.shape[0] for piece in entry.pieces):,} rows that changed"
    if len(entry.pieces) == 1 and entry.pieces[0].rows and not entry.pieces[0].cols:
        return "whole"
    by_columns = Counter(len(piece.cols) > 0 for piece in entry.pieces)
    words = [f"{by_columns[False]} of rows"] * bool(by_columns[False])
    words += [f"{by_columns[True]} of columns"] * bool(by_columns[True])
    numbered = any(piece.rows is None for piece in entry.pieces)
    return ", ".join(words) + ", rows in an order of their own" * numbered


def _size(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def _raise(told: str) -> None:
    if told:
        raise UserError(told)
