"""Writing and reading checkpoints so that kill -9 at any moment leaves each one complete or absent.

A checkpoint is written into a directory with a temporary name, every file forced to disk, then renamed: the rename is
the commit. Reading verifies every file's digest. Nothing is unpickled: tensors are safetensors, the rest is JSON.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from shardwright.checkpoint.manifest import VERSION, Entry, Manifest, Piece
from shardwright.errors import UserError
from shardwright.spec import files

MANIFEST = "manifest.json"
TENSORS = "rank0.safetensors"


def write(root: Path, step: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Commit a checkpoint under `root` and drop all but the last `keep`."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".*"):
        shutil.rmtree(leftover)
    final = root / f"step-{step:08d}"
    draft = root / f".draft-{final.name}"
    draft.mkdir()
    save_file(_unshared(tensors), draft / TENSORS)
    files.write(_manifest(step, tensors, numbers, draft), draft / MANIFEST)
    for path in (*draft.iterdir(), draft):
        _force_to_disk(path)
    draft.rename(final)
    _force_to_disk(root)
    for old in steps(root)[:-keep]:
        shutil.rmtree(old.rename(root / f".dropped-{old.name}"))
    return final


def _manifest(step: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], draft: Path) -> Manifest:
    entries = {
        name: Entry(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            (Piece(TENSORS, name, (0, tensor.shape[0] if tensor.dim() else 1)),),
        )
        for name, tensor in tensors.items()
    }
    digests = {TENSORS: _digest((draft / TENSORS).read_bytes())}
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


def steps(root: Path) -> list[Path]:
    """The complete checkpoints under `root`, oldest first."""
    return sorted(path for path in root.glob("step-*") if (path / MANIFEST).is_file())


def read(path: Path) -> tuple[dict[str, Tensor], Manifest]:
    """The tensors and the manifest of one checkpoint, every file verified."""
    manifest = files.read(Manifest, path / MANIFEST)
    if manifest.version != VERSION:
        raise UserError(f"{path}: checkpoint version {manifest.version}; this Shardwright reads version {VERSION}")
    contents: dict[str, dict[str, Tensor]] = {}
    for name, digest in manifest.files.items():
        try:
            data = (path / name).read_bytes()
        except FileNotFoundError:
            raise UserError(f"{path / name}: missing; the checkpoint is damaged, use an earlier one") from None
        if _digest(data) != digest:
            raise UserError(
                f"{path / name}: its digest differs from the manifest's; the checkpoint is damaged, use an earlier one"
            )
        try:
            contents[name] = load(data)
        except SafetensorError as error:
            raise UserError(f"{path / name}: not a safetensors file ({error})") from None
    tensors = {name: contents[entry.pieces[0].file][entry.pieces[0].key] for name, entry in manifest.tensors.items()}
    return tensors, manifest


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _force_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
