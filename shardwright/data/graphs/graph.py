"""Graphs of labeled nodes, read from files.

An .npz file has the arrays adj_indptr, adj_indices and labels, and feat_indptr and feat_indices (or attr_...) if nodes
have words: compressed sparse rows. A folder has edges.csv: two nodes a line; labels.csv: a node and its class, or the
classes of all nodes in order; and words.csv, if nodes have words: a node and a word. A comma, tab or space separates
columns; names may end in .txt, .tsv, .gz or .zst; leading lines that begin with # are skipped.

Worker processes import this file; it must not import torch.

Shape legend: N nodes, E edges, K pairs.
"""

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv

from shardwright.data.logs.convert import fingerprint
from shardwright.errors import UserError

UNLABELED = -1
WORD_ARRAYS = ("feat", "attr")
OTHER_INPUTS = ("attr_matrix", "features", "feat", "x")  # arrays of dense features, which are not read
SEPARATORS = (",", "\t", " ")


@dataclass(frozen=True, eq=False)
class Lists:
    """A list of numbers for each node, one after the other."""

    starts: np.ndarray  # (N + 1,)
    values: np.ndarray

    def sizes(self, nodes: np.ndarray) -> np.ndarray:
        return self.starts[nodes + 1] - self.starts[nodes]

    def concatenate(self, nodes: np.ndarray) -> np.ndarray:
        """The lists of these nodes, one after the other."""
        sizes = self.sizes(nodes)
        ends = sizes.cumsum()
        first = np.repeat(self.starts[nodes] - ends + sizes, sizes)
        return self.values[first + np.arange(ends[-1] if len(ends) else 0)]

    @classmethod
    def from_pairs(cls, nodes_K: np.ndarray, values_K: np.ndarray, num_nodes: int) -> "Lists":
        """Lists in ascending order, without repetitions."""
        width = int(values_K.max(initial=0)) + 1
        keys = np.unique(nodes_K * width + values_K)
        counts = np.bincount(keys // width, minlength=num_nodes)
        return cls(np.concatenate([[0], counts.cumsum()]), keys % width)


@dataclass(frozen=True, eq=False)
class Graph:
    """Neighbors in both directions, without the node itself; words may be empty."""

    neighbors: Lists
    words: Lists
    labels: np.ndarray  # (N,) a class from 0, or UNLABELED

    @property
    def num_nodes(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        return int(self.labels.max()) + 1

    @property
    def num_words(self) -> int:
        return int(self.words.values.max()) + 1 if len(self.words.values) else 0


def graph_digest(path: str) -> str:
    """Identifies the contents of a graph's files."""
    source = Path(path)
    if source.is_dir():
        paths = [own for name in ("edges", "labels", "words") for own in _files_named(source, name)]
    else:
        paths = [source] if source.exists() else []
    return hashlib.sha256(repr([entry[1::2] for entry in fingerprint(paths)]).encode()).hexdigest()[:16]


@lru_cache(maxsize=2)
def open_graph_once(path: str, digest: str) -> Graph:
    """The graph of this digest; read once by a process."""
    graph = read_graph(path)
    if graph_digest(path) != digest:
        raise UserError(f"{path} has changed since the run began: restore it, or begin another run")
    return graph


def read_graph(path: str) -> Graph:
    """Read a graph from an .npz file or a folder of text files."""
    source = Path(path)
    if not source.exists():
        raise UserError(
            f"{path}: no such file or folder; wanted an .npz file, or a folder with edges.csv and labels.csv"
        )
    edges_E2, words_K2, labels = _read_folder(source) if source.is_dir() else _read_npz(source)
    _check(path, edges_E2, words_K2, labels)
    edges_E2 = edges_E2[edges_E2[:, 0] != edges_E2[:, 1]]
    if not edges_E2.size:
        raise UserError(f"{path}: no edges between different nodes")
    both_E2 = np.concatenate([edges_E2, edges_E2[:, ::-1]])
    return Graph(
        Lists.from_pairs(both_E2[:, 0], both_E2[:, 1], len(labels)),
        Lists.from_pairs(words_K2[:, 0], words_K2[:, 1], len(labels)),
        labels,
    )


def _check(path: str, edges_E2: np.ndarray, words_K2: np.ndarray, labels: np.ndarray) -> None:
    """Raise an error that names the first wrong number."""
    for name, nodes in (("an edge", edges_E2), ("a word", words_K2[:, 0])):
        wrong = nodes[(nodes < 0) | (nodes >= len(labels))]
        if wrong.size:
            raise UserError(f"{path}: {name} of node {wrong[0]}; there are labels for {len(labels):,} nodes, from 0")
    if words_K2.size and words_K2[:, 1].min() < 0:
        raise UserError(f"{path}: a word is {words_K2[:, 1].min()}; words are numbered from 0")
    if (wrong := np.flatnonzero(labels < UNLABELED)).size:
        raise UserError(
            f"{path}: the label of node {wrong[0]} is {labels[wrong[0]]}; wanted a class from 0, or {UNLABELED} "
            "without a label"
        )
    if len(np.unique(labels[labels != UNLABELED])) < 2:
        raise UserError(f"{path}: the labels have fewer than two classes; there is nothing to predict")


def _read_npz(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(edges, pairs of node and word, labels)."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not an .npz file of plain arrays: {error}") from error
    for name in ("adj_indptr", "adj_indices", "labels"):
        _require(path, arrays, name)
    words = next((name for name in WORD_ARRAYS if f"{name}_indptr" in arrays), None)
    if words is None and (others := sorted(set(OTHER_INPUTS) & set(arrays))):
        raise UserError(
            f'{path}: features in array "{others[0]}" are not read; give the words of nodes as feat_indptr and '
            "feat_indices, or drop the array to train on the nodes' numbers"
        )
    labels = arrays["labels"]
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{path}: labels are {labels.dtype} {labels.shape}; wanted a whole number for each node")
    pairs = _pairs(path, arrays, words) if words else np.empty((0, 2), np.int64)
    return _pairs(path, arrays, "adj"), pairs, labels.astype(np.int64)


def _require(path: Path, arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name not in arrays:
        raise UserError(f"{path}: no array {name}; it has {', '.join(sorted(arrays)) or 'none'}")
    return arrays[name]


def _pairs(path: Path, arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """(K, 2) row and column of each entry of compressed sparse rows."""
    starts, values = (_require(path, arrays, f"{name}_{part}") for part in ("indptr", "indices"))
    if (
        starts.ndim != 1
        or values.ndim != 1
        or not len(starts)
        or starts[-1] != len(values)
        or (np.diff(starts) < 0).any()
    ):
        raise UserError(
            f"{path}: {name}_indptr {starts.shape} and {name}_indices {values.shape} are not compressed sparse rows"
        )
    return np.stack([np.repeat(np.arange(len(starts) - 1), np.diff(starts)), values], 1).astype(np.int64)


def _read_folder(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(edges, pairs of node and word, labels)."""
    edges, words = _read_columns(folder, "edges"), _read_columns(folder, "words", optional=True)
    labels = _read_columns(folder, "labels", (1, 2))
    if labels.shape[1] == 1:
        return edges, words, labels[:, 0]
    nodes, counts = np.unique(labels[:, 0], return_counts=True)
    if nodes.size and nodes[0] < 0:
        raise UserError(f"{folder}: a label of node {nodes[0]}; nodes are numbered from 0")
    if (counts > 1).any():
        raise UserError(f"{folder}: node {nodes[counts > 1][0]} has several labels")
    num_nodes = 1 + max(int(part.max(initial=-1)) for part in (edges, words[:, 0], nodes))
    by_node = np.full(num_nodes, UNLABELED)
    by_node[labels[:, 0]] = labels[:, 1]
    return edges, words, by_node


def _files_named(folder: Path, name: str) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name.split(".")[0] == name)


def _read_columns(folder: Path, name: str, widths: Sequence[int] = (2,), *, optional: bool = False) -> np.ndarray:
    """The whole numbers of a text file, (lines, columns)."""
    paths = _files_named(folder, name)
    if not paths and optional:
        return np.empty((0, 2), np.int64)
    if len(paths) != 1:
        contents = ", ".join(path.name for path in sorted(folder.iterdir())) or "nothing"
        raise UserError(f"{folder}: {len(paths)} files named {name}.*, wanted one; the folder has {contents}")
    with pa.input_stream(str(paths[0]), compression="detect") as stream:
        lines = stream.read().lstrip().split(b"\n", 1)
        while lines[0].startswith(b"#") and len(lines) > 1:
            lines = lines[1].split(b"\n", 1)
    separator = next((each for each in SEPARATORS if each.encode() in lines[0].strip()), ",")
    options = csv.ReadOptions(autogenerate_column_names=True)
    try:
        table = csv.read_csv(pa.BufferReader(b"\n".join(lines)), options, csv.ParseOptions(delimiter=separator))
        columns = [column.to_numpy().astype(np.int64, casting="same_kind") for column in table.columns]
    except (pa.ArrowInvalid, TypeError) as error:
        raise UserError(f"{paths[0]}: not lines of whole numbers (a header begins with #): {error}") from error
    if len(columns) not in widths:
        wanted = " or ".join(map(str, widths))
        raise UserError(f"{paths[0]}: {len(columns)} columns a line; wanted {wanted}")
    return np.stack(columns, 1)
