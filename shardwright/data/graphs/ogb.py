"""Graphs in the form of the Open Graph Benchmark's node property prediction.

A folder, or its folder raw, has edge.csv: two nodes a line; node-label.csv: the class of each node; and, where they
exist, node-feat.csv: numeric features of each node, and num-node-list.csv: the number of nodes. In split/NAME the files
train, valid and test name the nodes of the parts. All files may end in .gz.
"""

from pathlib import Path

import numpy as np

from shardwright.data.graphs.graph import Contents
from shardwright.data.graphs.text_columns import files_named, read_columns, read_numbers
from shardwright.errors import UserError

RAW_FILES = ("edge", "node-label", "node-feat", "num-node-list")
PART_FILES = (("train", "train"), ("validation", "valid"), ("test", "test"))


def is_ogb_folder(folder: Path) -> bool:
    return any(files_named(own, "edge") for own in (folder, folder / "raw") if own.is_dir())


def paths(folder: Path) -> list[Path]:
    """The files that are read."""
    splits = [own for own in (folder / "split").glob("*") if own.is_dir()]
    parts = [path for own in splits for _, name in PART_FILES for path in files_named(own, name)]
    return [*(path for name in RAW_FILES for path in files_named(_raw(folder), name)), *parts]


def _raw(folder: Path) -> Path:
    return folder if files_named(folder, "edge") else folder / "raw"


def read(folder: Path) -> Contents:
    raw = _raw(folder)
    labels = read_columns(raw, "node-label", range(1, 1 << 16))
    if labels.shape[1] != 1:
        raise UserError(f"{raw}: node-label has {labels.shape[1]} columns; wanted one, the class of each node")
    if files_named(raw, "num-node-list"):
        sizes = read_columns(raw, "num-node-list", (1,))
        if len(sizes) != 1:
            raise UserError(f"{raw}: num-node-list has {len(sizes)} graphs; wanted one graph of labeled nodes")
        if sizes[0, 0] != len(labels):
            raise UserError(f"{raw}: {len(labels):,} labels of {sizes[0, 0]:,} nodes, by num-node-list")
    numbers = read_numbers(raw, "node-feat") if files_named(raw, "node-feat") else None
    return Contents(read_columns(raw, "edge"), labels[:, 0], numbers=numbers, parts=_read_parts(folder))


def _read_parts(folder: Path) -> dict[str, np.ndarray] | None:
    """The nodes of each part; None without a folder split."""
    if not (folder / "split").is_dir():
        return None
    splits = sorted(own for own in (folder / "split").iterdir() if own.is_dir())
    if len(splits) != 1:
        names = ", ".join(own.name for own in splits) or "nothing"
        raise UserError(f"{folder}/split: wanted one folder with train, valid and test; it has {names}")
    return {part: read_columns(splits[0], name, (1,))[:, 0] for part, name in PART_FILES}
