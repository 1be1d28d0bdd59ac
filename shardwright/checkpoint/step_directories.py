"""Directories of checkpoints: one per step, complete once it has its final name; increments and bases."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from shardwright.checkpoint.manifest import VERSION, Manifest
from shardwright.errors import UserError, check_regular_file
from shardwright.spec import files

MANIFEST = "manifest.json"
REPLACED_PREFIX = ".replaced-"  # of an existing checkpoint while a new one takes its name


def checkpoint_path(root: Path, step: int) -> Path:
    """The directory of the checkpoint of a step."""
    return root / f"step-{step:08d}"


def list_checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints under `root`, oldest first."""
    matches = {path: re.fullmatch(r"step-(\d+)", path.name) for path in root.glob("step-*")}
    steps = {path: int(match[1]) for path, match in matches.items() if match and (path / MANIFEST).is_file()}
    return sorted(steps, key=steps.__getitem__)


def resolve_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names: itself, or the last checkpoint of a folder or a run."""
    if (path / MANIFEST).exists():
        return path
    for root in (path, path / "checkpoint"):
        if checkpoints := list_checkpoints(root):
            return checkpoints[-1]
    raise UserError(f"{path}: no checkpoint; name one like runs/NAME/checkpoint/step-00000100, or a run that has some")


def resolve_best(path: Path) -> Path:
    """The checkpoint to score with that a path names: as `resolve_checkpoint`, but of a run that kept its best state
    the best."""
    best = [] if (path / MANIFEST).exists() else list_checkpoints(path / "best")
    return best[-1] if best else resolve_checkpoint(path)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint; raises an error if its version, digest or names are wrong."""
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
    """Raise an error unless all files are in the manifest's folder, and its base is in the same root."""
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
    """The manifests of a checkpoint and of all its bases, the full checkpoint first."""
    chain = [(path, read_manifest(path))]
    while chain[0][1].base:
        increment, manifest = chain[0]
        base = increment.parent / manifest.base
        if not (base / MANIFEST).exists():
            raise UserError(f"{increment} is an increment of {base}, which is missing; use an earlier checkpoint")
        chain.insert(0, (base, read_manifest(base)))
        if chain[0][1].digest != manifest.base_digest:
            raise UserError(f"{increment} is an increment of {base}, which was replaced; use an earlier checkpoint")
    return chain


def recover_root(root: Path) -> None:
    """Remove leftovers of a killed job, and restore a checkpoint that it was about to replace."""
    for leftover in (*root.glob(".draft-step-*"), *root.glob(".dropped-step-*")):
        shutil.rmtree(leftover)
    for replaced in root.glob(f"{REPLACED_PREFIX}step-*"):
        final = root / replaced.name.removeprefix(REPLACED_PREFIX)
        if final.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(final)


def commit(draft: Path, final: Path) -> None:
    """Rename a draft to its final name, after which the checkpoint is complete and on disk."""
    for path in (*draft.iterdir(), draft):
        fsync_path(path)
    replaced = final.rename(final.parent / f"{REPLACED_PREFIX}{final.name}") if final.exists() else None
    draft.rename(final)
    fsync_path(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced)


def keep_last(root: Path, num: int, newest: Path, *, drop_bases: bool = False) -> None:
    """Remove all but the last `num` checkpoints, `newest`, and, unless `drop_bases`, their bases."""
    checkpoints = list_checkpoints(root)
    needed = {*checkpoints[-num:], newest}
    for increment in () if drop_bases else tuple(needed):
        with suppress(UserError):  # the bases of a damaged checkpoint are unknown
            needed |= {path for path, _ in read_chain(increment)}
    for path in checkpoints:
        if path not in needed:
            drop(path)


def drop(path: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that it is never seen incomplete."""
    shutil.rmtree(path.rename(path.parent / f".dropped-{path.name}"))


def fsync_path(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
