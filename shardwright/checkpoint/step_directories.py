"""Where checkpoints lie: a directory each, complete once it has its name, and those that rest on others."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from shardwright.checkpoint.manifest import VERSION, Manifest
from shardwright.errors import UserError, check_regular_file
from shardwright.spec import files

MANIFEST = "manifest.json"
REPLACED_PREFIX = ".replaced-"  # before the name of a checkpoint in whose place another comes


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies under `root`."""
    return root / f"step-{step:08d}"


def list_checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints under `root`, oldest first."""
    found = {path: re.fullmatch(r"step-(\d+)", path.name) for path in root.glob("step-*")}
    complete = {path: int(match[1]) for path, match in found.items() if match and (path / MANIFEST).is_file()}
    return sorted(complete, key=complete.__getitem__)


def resolve_checkpoint(path: Path) -> Path:
    """The checkpoint that is meant: this one, or the last of a folder or a run."""
    if (path / MANIFEST).exists():
        return path
    for root in (path, path / "checkpoint"):
        if found := list_checkpoints(root):
            return found[-1]
    raise UserError(f"{path}: no checkpoint; name one like runs/NAME/checkpoint/step-00000100, or a run that has some")


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint, as it was written."""
    if not (path / MANIFEST).exists():
        raise UserError(f"{path / MANIFEST}: missing; a checkpoint is a directory like runs/NAME/checkpoint/step-*")
    check_regular_file(path / MANIFEST)
    version = re.match(rb'\{\s*"version": (\d+)', (path / MANIFEST).read_bytes())
    if version and int(version[1]) != VERSION:
        raise UserError(f"{path}: checkpoint version {int(version[1])}; this Shardwright reads version {VERSION}")
    manifest = files.read(Manifest, path / MANIFEST)
    if manifest.with_digest() != manifest:
        raise UserError(
            f"{path / MANIFEST}: differs from what was written; the checkpoint is damaged, use an earlier one"
        )
    _check_names(path, manifest)
    return manifest


def _check_names(path: Path, manifest: Manifest) -> None:
    """Raise an error if a file is outside the manifest's folder, or the base no checkpoint in the same directory."""
    if manifest.base and (not re.fullmatch(r"step-\d+", manifest.base) or manifest.base == path.name):
        raise UserError(
            f'{path / MANIFEST}: base is "{manifest.base}"; wanted the name of another checkpoint in {path.parent}, '
            "such as step-00000100"
        )
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            for stored in filter(None, (piece.values, piece.numbers, piece.scales)):
                if not re.fullmatch(r"\w+\.safetensors", stored.file):
                    raise UserError(
                        f'{path / MANIFEST}: names file "{stored.file}"; wanted a file in the same folder, such as '
                        "rank0.safetensors"
                    )


def read_chain(path: Path) -> list[tuple[Path, Manifest]]:
    """A checkpoint and those it goes on from, the whole one first."""
    found = [(path, read_manifest(path))]
    while found[0][1].base:
        of, manifest = found[0]
        before = of.parent / manifest.base
        if not (before / MANIFEST).exists():
            raise UserError(f"{of} goes on from {before}, which is missing; use an earlier checkpoint")
        found.insert(0, (before, read_manifest(before)))
        if found[0][1].digest != manifest.base_digest:
            raise UserError(f"{of} goes on from another {before} than the one there; use an earlier checkpoint")
    return found


def recover_root(root: Path) -> None:
    """Drop what a killed job left behind, and give back its name to what it was about to replace."""
    for leftover in (*root.glob(".draft-step-*"), *root.glob(".dropped-step-*")):
        shutil.rmtree(leftover)
    for replaced in root.glob(f"{REPLACED_PREFIX}step-*"):
        final = root / replaced.name.removeprefix(REPLACED_PREFIX)
        if final.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(final)


def commit(draft: Path, final: Path) -> None:
    """Give a draft its name: from now on the checkpoint is complete."""
    for path in (*draft.iterdir(), draft):
        fsync_path(path)
    before = final.rename(final.parent / f"{REPLACED_PREFIX}{final.name}") if final.exists() else None
    draft.rename(final)
    fsync_path(final.parent)
    if before is not None:
        shutil.rmtree(before)


def keep_last(root: Path, num: int, newest: Path, *, drop_bases: bool = False) -> None:
    """Drop all but the last checkpoints, the one just made, and, unless they stand alone, what they go on from."""
    found = list_checkpoints(root)
    needed = {*found[-num:], newest}
    for last in () if drop_bases else tuple(needed):
        with suppress(UserError):  # of one that is damaged nobody can tell
            needed |= {path for path, _ in read_chain(last)}
    for path in found:
        if path not in needed:
            drop(path)


def drop(path: Path) -> None:
    shutil.rmtree(path.rename(path.parent / f".dropped-{path.name}"))


def fsync_path(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
