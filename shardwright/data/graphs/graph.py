"""Graphs of labelled nodes, read from files.

An .npz file has the arrays adj_indptr, adj_indices, labels, and feat_indptr and feat_indices if nodes have words
(compressed sparse rows; other arrays are ignored). A folder has edges.csv: two nodes a line; labels.csv: a node and its
class, or the classes of all nodes in order; and words.csv, if nodes have words: a node and a word. A comma, tab or
space separates columns; names may end in .txt, .tsv, .gz or .zst; lines that begin with # are skipped.

Worker processes import this file; it must not import torch.

Shape legend: N nodes, E edges, K pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv

from shardwright.errors import UserError

UNLABELLED = -1
ARRAYS = ("adj_indptr", "adj_indices", "labels")
SEPARATORS = (",", "\t", " ")


@dataclass(frozen=True, eq=False)
class Lists:
    """A list of numbers for each node, one after the other."""

    starts: np.ndarray  # (N + 1,)
    values: np.ndarray

    def sizes(self, nodes: np.ndarray) -> np.ndarray:
        return self.starts[nodes + 1] - self.starts[nodes]

    def join(self, nodes: np.ndarray) -> np.ndarray:
        """The lists of these nodes, one after the other."""
        sizes = self.sizes(nodes)
        ends = sizes.cumsum()
        first = np.repeat(self.starts[nodes] - ends + sizes, sizes)
        return self.values[first + np.arange(ends[-1] if len(ends) else 0)]

    @classmethod
    def from_pairs(cls, nodes_K: np.ndarray, values_K: np.ndarray, num_nodes: int) -> "Lists":
        """Lists in ascending order, without repetitions."""
        pairs = np.unique(np.stack([nodes_K, values_K], 1), axis=0)
        counts = np.bincount(pairs[:, 0], minlength=num_nodes)
        return cls(np.concatenate([[0], counts.cumsum()]), pairs[:, 1])


@dataclass(frozen=True, eq=False)
class Graph:
    """Neighbours in both directions, without the node itself; words may be empty."""

    neighbors: Lists
    words: Lists
    labels: np.ndarray  # (N,) a class from 0, or UNLABELLED

    @property
    def num_nodes(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        return int(self.labels.max()) + 1

    @property
    def num_words(self) -> int:
        return int(self.words.values.max()) + 1 if len(self.words.values) else 0


def read_graph(path: str) -> Graph:
    """Read a graph from an .npz file or a folder of text files."""
    source = Path(path)
    if not source.exists():
        raise UserError(
            f"{path}: no such file or folder; wanted an .npz file, or a folder with edges.csv and labels.csv"
        )
    edges_E2, words_K2, labels = _read_folder(source) if source.is_dir() else _read_npz(source)
    edges_E2 = edges_E2[edges_E2[:, 0] != edges_E2[:, 1]]
    num_nodes = len(labels)
    for name, nodes in (("edge", edges_E2), ("word", words_K2[:, 0])):
        if nodes.size and not 0 <= nodes.min() <= nodes.max() < num_nodes:
            wrong = nodes.min() if nodes.min() < 0 else nodes.max()
            raise UserError(f"{path}: an {name} of node {wrong}; there are labels for {num_nodes:,} nodes, from 0")
    both_E2 = np.concatenate([edges_E2, edges_E2[:, ::-1]])
    if labels.max(initial=UNLABELLED) < 1:
        raise UserError(f"{path}: nodes have less than two classes")
    return Graph(
        Lists.from_pairs(both_E2[:, 0], both_E2[:, 1], num_nodes),
        Lists.from_pairs(words_K2[:, 0], words_K2[:, 1], num_nodes),
        labels,
    )


def _read_npz(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(edges, pairs of node and word, labels)."""
    try:
        arrays = np.load(path, allow_pickle=False)
        found = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not an .npz file of plain arrays: {error}") from error
    if missing := [name for name in ARRAYS if name not in found]:
        raise UserError(f"{path}: no array {missing[0]}; it has {', '.join(sorted(found))}")

    def pairs(name: str) -> np.ndarray:
        starts, values = found[f"{name}_indptr"], found[f"{name}_indices"]
        return np.stack([np.repeat(np.arange(len(starts) - 1), np.diff(starts)), values], 1).astype(np.int64)

    words = pairs("feat") if "feat_indptr" in found else np.empty((0, 2), np.int64)
    return pairs("adj"), words, found["labels"].astype(np.int64)


def _read_folder(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(edges, pairs of node and word, labels)."""
    edges, words = _read_columns(folder, "edges"), _read_columns(folder, "words", optional=True)
    labels = _read_columns(folder, "labels", (1, 2))
    if labels.shape[1] == 1:
        return edges, words, labels[:, 0]
    num_nodes = 1 + max(int(part.max(initial=-1)) for part in (edges, words[:, 0], labels[:, 0]))
    by_node = np.full(num_nodes, UNLABELLED)
    by_node[labels[:, 0]] = labels[:, 1]
    return edges, words, by_node


def _read_columns(folder: Path, name: str, widths: Sequence[int] = (2,), *, optional: bool = False) -> np.ndarray:
    """The whole numbers of a text file, (lines, columns)."""
    files = sorted(path for path in folder.iterdir() if path.name.split(".")[0] == name)
    if not files and optional:
        return np.empty((0, 2), np.int64)
    if len(files) != 1:
        found = ", ".join(path.name for path in sorted(folder.iterdir())) or "nothing"
        raise UserError(f"{folder}: {len(files)} files named {name}.*, wanted one; the folder has {found}")
    with pa.input_stream(str(files[0]), compression="detect") as stream:
        lines = stream.read().lstrip().split(b"\n", 1)
        while lines[0].startswith(b"#") and len(lines) > 1:
            lines = lines[1].split(b"\n", 1)
    separator = next((each for each in SEPARATORS if each.encode() in lines[0].strip()), ",")
    options = csv.ReadOptions(autogenerate_column_names=True)
    try:
        table = csv.read_csv(pa.BufferReader(b"\n".join(lines)), options, csv.ParseOptions(delimiter=separator))
        columns = [column.to_numpy().astype(np.int64, casting="same_kind") for column in table.columns]
    except (pa.ArrowInvalid, TypeError) as error:
        raise UserError(f"{files[0]}: not lines of whole numbers: {error}") from error
    if len(columns) not in widths:
        wanted = " or ".join(map(str, widths))
        raise UserError(f"{files[0]}: {len(columns)} columns a line; wanted {wanted}")
    return np.stack(columns, 1)
