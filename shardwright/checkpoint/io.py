"""Writing and reading checkpoints so that kill -9 at any moment leaves each one complete or absent.

A checkpoint is written into a directory with a temporary name, every file forced to disk, then renamed: the rename is
the commit. Reading verifies every file's digest. Nothing is unpickled: tensors are safetensors, the rest is JSON.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwright.checkpoint.manifest import VERSION, Entry, Manifest, Piece
from shardwright.errors import UserError
from shardwright.spec import files

MANIFEST = "manifest.json"
TENSORS = "rank0.safetensors"


def write(root: Path, step: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Commit a checkpoint under `root` and drop all but the last `keep`."""
    final = place(root, step)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in (*root.glob(".draft-step-*"), *root.glob(".dropped-step-*")):
            shutil.rmtree(leftover)
        draft = root / f".draft-{final.name}"
        draft.mkdir()
        save_file(_unshared(tensors), draft / TENSORS)
        files.write(_manifest(step, tensors, numbers, draft), draft / MANIFEST)
        for path in (*draft.iterdir(), draft):
            _force_to_disk(path)
        if final.exists():
            shutil.rmtree(final.rename(root / f".dropped-{final.name}"))
        draft.rename(final)
        _force_to_disk(root)
        for old in steps(root)[:-keep]:
            shutil.rmtree(old.rename(root / f".dropped-{old.name}"))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{final}: the checkpoint cannot be written ({error}); earlier ones are whole") from error
    return final


def _manifest(step: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], draft: Path) -> Manifest:
    entries = {
        name: Entry(
            _dtype(tensor),
            tuple(tensor.shape),
            (Piece(TENSORS, name, (0, tensor.shape[0] if tensor.dim() else 1)),),
        )
        for name, tensor in tensors.items()
    }
    digests = {TENSORS: _digest(draft / TENSORS)}
    return Manifest(VERSION, step, entries, digests, json.loads(json.dumps(numbers)))


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tied weights appear under each of their names; safetensors wants a copy for every name but the first."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()._cdata
        result[name] = tensor.detach().clone() if storage in seen else tensor.detach().contiguous()
        seen.add(storage)
    return result


def place(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies under `root`."""
    return root / f"step-{step:08d}"


def steps(root: Path) -> list[Path]:
    """The complete checkpoints under `root`, oldest first."""
    found = {path: re.fullmatch(r"step-(\d+)", path.name) for path in root.glob("step-*")}
    complete = {path: int(match[1]) for path, match in found.items() if match and (path / MANIFEST).is_file()}
    return sorted(complete, key=complete.__getitem__)


def read(path: Path) -> tuple[dict[str, Tensor], Manifest]:
    """The tensors and the manifest of one checkpoint, every file verified."""
    manifest = files.read(Manifest, path / MANIFEST)
    if manifest.version != VERSION:
        raise UserError(f"{path}: checkpoint version {manifest.version}; this Shardwright reads version {VERSION}")
    contents: dict[str, dict[str, Tensor]] = {}
    for name, digest in manifest.files.items():
        try:
            found = _digest(path / name)
            contents[name] = load_file(path / name) if found == digest else {}
        except FileNotFoundError:
            raise UserError(f"{path / name}: missing; the checkpoint is damaged, use an earlier one") from None
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path / name}: cannot be read ({error}); use an earlier checkpoint") from None
        if found != digest:
            raise UserError(
                f"{path / name}: its digest differs from the manifest's; the checkpoint is damaged, use an earlier one"
            )
    return {name: _assembled(path, name, entry, contents) for name, entry in manifest.tensors.items()}, manifest


def _assembled(path: Path, name: str, entry: Entry, contents: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
    """A logical tensor from the one piece that this version writes, as the manifest describes it."""
    pieces = [contents.get(piece.file, {}).get(piece.key) for piece in entry.pieces]
    tensor = pieces[0] if len(pieces) == 1 else None
    if tensor is None or (_dtype(tensor), tuple(tensor.shape)) != (entry.dtype, entry.shape):
        raise UserError(f'{path}: "{name}" is not in its file as the manifest has it; use an earlier checkpoint')
    return tensor


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _force_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
