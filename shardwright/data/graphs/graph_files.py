"""Graphs in files: an .npz file, a folder of text files, a folder in OGB's form, or Planetoid's citation texts.

An .npz file has the arrays adj_indptr, adj_indices and labels; feat_indptr and feat_indices (or attr_...) if nodes have
words: compressed sparse rows; and a matrix named features, attr_matrix, feat or x if nodes have numeric features. A
folder has edges.csv: two nodes a line; labels.csv: a node and its class, or the classes of all nodes in order;
words.csv, if nodes have words: a node and a word; and features.csv or features.npy: the numeric features of all nodes
in order. A comma, tab or space separates columns; names may end in .txt, .tsv, .gz or .zst; leading lines that begin
with # are skipped.

Worker processes import this file; it must not import torch.

Shape legend: N nodes, E edges, K pairs, F numeric features.
"""

import hashlib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from shardwright.data.graphs import citations, ogb
from shardwright.data.graphs.graph import UNLABELED, Contents, Graph, build_graph, no_pairs
from shardwright.data.graphs.text_columns import files_named, read_columns, read_numbers
from shardwright.data.logs.convert import fingerprint
from shardwright.errors import UserError

WORD_ARRAYS = ("feat", "attr")
FOLDER_FILES = ("edges", "labels", "words", "features")
NUMBER_ARRAYS = ("features", "attr_matrix", "feat", "x")


@dataclass(frozen=True)
class GraphFiles:
    """A graph in files; the digest identifies it, wherever it is."""

    path: str = field(repr=False)
    digest: str

    def read(self) -> Graph:
        return open_graph_once(self.path, self.digest)


def graph_digest(path: str) -> str:
    """Identifies the contents of a graph's files."""
    source = Path(path)
    if not source.is_dir():
        paths = [source] if source.exists() else []
    elif citations.is_citation_folder(source):
        paths = citations.paths(source)
    elif ogb.is_ogb_folder(source):
        paths = ogb.paths(source)
    else:
        paths = [own for name in FOLDER_FILES for own in files_named(source, name)]
    return hashlib.sha256(repr([entry[1::2] for entry in fingerprint(paths)]).encode()).hexdigest()[:16]


@lru_cache(maxsize=2)
def open_graph_once(path: str, digest: str) -> Graph:
    """The graph of this digest; read once by a process."""
    graph = read_graph(path)
    if graph_digest(path) != digest:
        raise UserError(f"{path} has changed since the run began: restore it, or begin another run")
    return graph


def read_graph(path: str) -> Graph:
    """Read a graph from an .npz file or a folder."""
    source = Path(path)
    if not source.exists():
        raise UserError(
            f"{path}: no such file or folder; wanted an .npz file, or a folder with edges.csv and labels.csv"
        )
    if not source.is_dir():
        contents = _read_npz(source)
    elif citations.is_citation_folder(source):
        contents = citations.read(source)
    else:
        contents = ogb.read(source) if ogb.is_ogb_folder(source) else _read_folder(source)
    return build_graph(path, contents)


def _read_npz(path: Path) -> Contents:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not an .npz file of plain arrays: {error}") from error
    for name in ("adj_indptr", "adj_indices", "labels"):
        _require(path, arrays, name)
    words = next((name for name in WORD_ARRAYS if f"{name}_indptr" in arrays), None)
    numbers = next((arrays[name] for name in NUMBER_ARRAYS if name in arrays), None)
    labels = arrays["labels"]
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{path}: labels are {labels.dtype} {labels.shape}; wanted a whole number for each node")
    pairs = no_pairs() if words is None else _pairs(path, arrays, words)
    return Contents(_pairs(path, arrays, "adj"), labels.astype(np.int64), pairs, numbers)


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


def _read_folder(folder: Path) -> Contents:
    edges, words = read_columns(folder, "edges"), read_columns(folder, "words", optional=True)
    labels = read_columns(folder, "labels", (1, 2))
    numbers = read_numbers(folder, "features") if files_named(folder, "features") else None
    if labels.shape[1] == 1:
        return Contents(edges, labels[:, 0], words, numbers)
    nodes, counts = np.unique(labels[:, 0], return_counts=True)
    if nodes.size and nodes[0] < 0:
        raise UserError(f"{folder}: a label of node {nodes[0]}; nodes are numbered from 0")
    if (counts > 1).any():
        raise UserError(f"{folder}: node {nodes[counts > 1][0]} has several labels")
    highest = max(int(part.max(initial=-1)) for part in (edges, words[:, 0], nodes))
    by_node = np.full(max(highest + 1, 0 if numbers is None else len(numbers)), UNLABELED)
    by_node[labels[:, 0]] = labels[:, 1]
    return Contents(edges, by_node, words, numbers)
