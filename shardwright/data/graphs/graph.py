"""Graphs of labeled nodes, as their files give them and as training reads them.

Worker processes import this file; it must not import torch.

Shape legend: N nodes, E edges, K pairs, F numeric features.
"""

from dataclasses import dataclass, field

import numpy as np

from shardwright.errors import UserError

UNLABELED = -1
PARTS = ("train", "validation", "test")


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
    numbers: np.ndarray | None = None  # (N, F) float32
    parts: dict[str, np.ndarray] | None = None  # the nodes of each of PARTS, where files give them

    @property
    def num_nodes(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        return int(self.labels.max()) + 1

    @property
    def num_words(self) -> int:
        return int(self.words.values.max()) + 1 if len(self.words.values) else 0

    @property
    def num_numbers(self) -> int:
        return 0 if self.numbers is None else self.numbers.shape[1]


def no_pairs() -> np.ndarray:
    return np.empty((0, 2), np.int64)


@dataclass(frozen=True, eq=False)
class Contents:
    """What the files of a graph contain, not yet checked."""

    edges_E2: np.ndarray
    labels: np.ndarray
    words_K2: np.ndarray = field(default_factory=no_pairs)  # a node and a word
    numbers: np.ndarray | None = None
    parts: dict[str, np.ndarray] | None = None


def build_graph(path: str, contents: Contents) -> Graph:
    """Check the contents of `path` and make a graph of them."""
    _check(path, contents)
    labels, edges_E2, words_K2 = contents.labels, contents.edges_E2, contents.words_K2
    edges_E2 = edges_E2[edges_E2[:, 0] != edges_E2[:, 1]]
    if not edges_E2.size:
        raise UserError(f"{path}: no edges between different nodes")
    both_E2 = np.concatenate([edges_E2, edges_E2[:, ::-1]])
    return Graph(
        Lists.from_pairs(both_E2[:, 0], both_E2[:, 1], len(labels)),
        Lists.from_pairs(words_K2[:, 0], words_K2[:, 1], len(labels)),
        labels,
        None if contents.numbers is None else np.ascontiguousarray(contents.numbers, np.float32),
        contents.parts,
    )


def largest_component(neighbors: Lists) -> np.ndarray:
    """(N,) whether each node is in the largest connected component."""
    num_nodes = len(neighbors.starts) - 1
    owners = np.repeat(np.arange(num_nodes), np.diff(neighbors.starts))
    component, before = np.arange(num_nodes), None
    while before is None or not np.array_equal(component, before):
        before = component.copy()
        np.minimum.at(component, owners, before[neighbors.values])
        component = component[component]  # of the node that names the component so far
    return component == np.bincount(component).argmax()


def _check(path: str, contents: Contents) -> None:
    """Raise an error that names the first wrong number."""
    labels, words_K2 = contents.labels, contents.words_K2
    named = [("an edge", contents.edges_E2), ("a word", words_K2[:, 0])]
    named += [(f"the {name} part has a node: that", nodes) for name, nodes in (contents.parts or {}).items()]
    for name, nodes in named:
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
    if contents.numbers is not None:
        _check_numbers(path, contents.numbers, len(labels))
    for name, nodes in (contents.parts or {}).items():
        if (wrong := nodes[labels[nodes] == UNLABELED]).size:
            raise UserError(f"{path}: node {wrong[0]} of the {name} part has no label")


def _check_numbers(path: str, numbers: np.ndarray, num_nodes: int) -> None:
    if numbers.ndim != 2 or len(numbers) != num_nodes or not numbers.shape[1]:
        raise UserError(f"{path}: numeric features are {numbers.shape}; wanted a row for each of {num_nodes:,} nodes")
    if not (np.issubdtype(numbers.dtype, np.floating) or np.issubdtype(numbers.dtype, np.integer)):
        raise UserError(f"{path}: numeric features are {numbers.dtype}; wanted numbers")
    if not np.isfinite(numbers).all():
        node, column = np.argwhere(~np.isfinite(numbers))[0]
        raise UserError(f"{path}: numeric feature {column} of node {node} is {numbers[node, column]}; clean or drop it")
