"""Sampled neighborhoods of labeled nodes as a source: a sample is a node and, at each distance, drawn neighbors.

With fanouts (10, 5) a sample has 61 positions: the node, 10 of its neighbors, and 5 neighbors of each. Neighbors are
drawn with replacement; in place of a neighbor, a node without any is used itself. Every position has id features:
"words3" are the words of the node at position 3, "node3" its number. The numeric features are those of all positions,
one after another. A draw is a hash of (seed, part, sample, position), so a sample is the same in any batch and on any
rank, and the ids of later batches are known as early as the loader reads them.

Worker processes import this file; it must not import torch.

Shape legend: B samples, P positions, F features (inputs by position), N nodes of the graph, K words.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Literal, Protocol

import numpy as np

from shardwright.data.graphs.graph import PARTS, UNLABELED, Graph, largest_component
from shardwright.data.graphs.graph_files import GraphFiles, graph_digest
from shardwright.data.graphs.partition import even_out, partition_nodes
from shardwright.data.sources.source import GAMMA, NumpyBatch, draw_bits, splitmix64, stream_keys
from shardwright.errors import UserError
from shardwright.spec import files

Part = Literal["train", "validation", "test"]
INPUTS = ("words", "node", "features")
NEIGHBORS = 0x6E656967  # a word of the keys of draws, which differ from those of the order of samples
WORDS = 0x776F7264  # a word of the keys of dropped words


class Origin(Protocol):
    """Interface of where a graph comes from: an immutable, picklable value whose repr identifies the graph."""

    def read(self) -> Graph: ...


@dataclass(frozen=True)
class NodeSplit:
    """The parts of the labeled nodes.

    `train`, `validation`: below 1, shares of the labeled nodes; else numbers of nodes of each class. The test part has
    the others. `largest_component`: only nodes of the largest connected component are in a part.
    """

    train: float = 20
    validation: float = 30
    largest_component: bool = False

    def __post_init__(self) -> None:
        train, validation = self.train, self.validation
        if min(train, validation) < 0 or not train or (validation and (train >= 1) != (validation >= 1)):
            raise UserError(
                f"data.split.train={train:g}, data.split.validation={validation:g}; wanted two shares of the labeled "
                "nodes below 1, or two numbers of nodes of each class"
            )

    def nodes(self, graph: Graph, part: Part, seed: int) -> np.ndarray:
        """The nodes of a part, in random order."""
        is_split = graph.labels != UNLABELED
        if self.largest_component:
            is_split = is_split & largest_component(graph.neighbors)
        order = np.random.default_rng(seed).permutation(np.flatnonzero(is_split))
        labels = graph.labels[order]
        rank = np.zeros(len(order), np.int64)  # of a node among those of its class
        for number in range(graph.num_classes):
            own = np.flatnonzero(labels == number)
            rank[own] = np.arange(len(own))
        ends = (self.train, self.train + self.validation)
        if self.train >= 1:
            is_trained, is_seen = (rank < end for end in ends)
        else:
            is_trained, is_seen = (np.arange(len(order)) < round(end * len(order)) for end in ends)
        return order[{"train": is_trained, "validation": is_seen & ~is_trained, "test": ~is_seen}[part]]


@dataclass(frozen=True)
class Neighborhoods:
    """Neighborhoods of the nodes of one part of a graph.

    `split`: None: the parts that the graph's files give. `draws`: neighborhoods of each training node. `word_dropout`:
    share of the words of each position that training drops. `partitions`: of the graph; each has an equal share of
    every batch of training, in ascending order, so that ranks train nodes of partitions of their own. Training nodes
    are sorted by partition, and samples by node.
    """

    origin: Origin
    fanouts: tuple[int, ...] = (10, 5)
    inputs: tuple[str, ...] = ("words",)
    split: NodeSplit | None = NodeSplit()  # noqa: RUF009 - it is frozen
    draws: int = 100
    word_dropout: float = 0.0
    seed: int = 0
    part: Part = "train"
    partitions: int = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Workers read the graph themselves."""
        fields = (self.origin, self.fanouts, self.inputs, self.split, self.draws, self.word_dropout)
        return Neighborhoods, (*fields, self.seed, self.part, self.partitions)

    @property
    def size(self) -> int:
        return len(self.nodes) * (self.draws if self.part == "train" else 1)

    @property
    def num_positions(self) -> int:
        return sum(prod(self.fanouts[:distance]) for distance in range(len(self.fanouts) + 1))

    @property
    def num_classes(self) -> int:
        return self.graph.num_classes

    @property
    def num_numbers(self) -> int:
        """Numeric features of a position."""
        return self.graph.num_numbers if "features" in self.inputs else 0

    @property
    def tables(self) -> dict[str, int]:
        """The rows of the table of each input of ids."""
        rows = {"words": self.graph.num_words, "node": self.graph.num_nodes}
        return {name: rows[name] for name in self.inputs if name in rows}

    @property
    def graph(self) -> Graph:
        return self.origin.read()

    def evaluation(self) -> "Neighborhoods":
        """The validation part."""
        return replace(self, part="validation", partitions=1)

    def test(self) -> "Neighborhoods":
        """The test part."""
        return replace(self, part="test", partitions=1)

    @cached_property
    def nodes(self) -> np.ndarray:
        """The nodes of this part."""
        graph = self.graph
        if self.split is None:
            assert graph.parts is not None
            nodes = graph.parts[self.part]
        else:
            nodes = self.split.nodes(graph, self.part, self.seed)
        if self.partitions == 1:
            return nodes
        return nodes[np.argsort(even_out(self.partition_N[nodes], self.partitions), kind="stable")]

    @property
    def partition_N(self) -> np.ndarray:
        """The partition of each node of the graph."""
        return _partition_once(self.origin, self.partitions, self.seed)

    def take(self, indices: np.ndarray) -> NumpyBatch:
        if self.partitions > 1:  # samples are sorted by node
            indices = indices % self.draws * len(self.nodes) + indices // self.draws
        nodes_B = self.nodes[indices % len(self.nodes)] if len(indices) else indices
        return self.batch_of(self.draw_positions(nodes_B, indices), indices)

    def batch_of(self, nodes_PB: np.ndarray, indices: np.ndarray) -> NumpyBatch:
        """The features of nodes at the positions of samples; `indices` are those that dropped words are drawn for."""
        flat, features, lengths, values = nodes_PB.ravel(), list[str](), list[np.ndarray](), list[np.ndarray]()
        for name in self.tables:
            features += [f"{name}{position}" for position in range(len(nodes_PB))]
            sizes, ids = (np.ones_like(flat), flat) if name == "node" else self._words(flat, indices)
            lengths.append(sizes)
            values.append(ids)
        empty = [np.empty(0, np.int64)]
        lengths_FB = np.concatenate(lengths or empty).reshape(len(features), len(indices)).astype(np.int64)
        labels, numbers = {"class": self.graph.labels[nodes_PB[0]]}, self.graph.numbers
        dense = None
        if self.num_numbers and numbers is not None:
            dense = numbers[nodes_PB.T].reshape(len(indices), self.num_positions * self.num_numbers)
        return NumpyBatch(tuple(features), np.concatenate(values or empty).astype(np.int64), lengths_FB, dense, labels)

    def _words(self, nodes: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of words of the nodes at all positions, and the words; without dropped ones in training."""
        sizes, words_K = self.graph.words.sizes(nodes), self.graph.words.concatenate(nodes)
        if self.part != "train" or not self.word_dropout:
            return sizes, words_K
        bits = draw_bits(stream_keys(self.seed, WORDS, num=self.num_positions), indices).ravel()
        owner_K = np.repeat(np.arange(len(nodes)), sizes)
        bits_K = splitmix64(bits[owner_K] + words_K.astype(np.uint64) * GAMMA)
        is_kept_K = (bits_K >> np.uint64(11)) >= int(self.word_dropout * 2**53)
        return np.bincount(owner_K[is_kept_K], minlength=len(nodes)), words_K[is_kept_K]

    def draw_positions(self, nodes_B: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """The nodes (P, B) at all positions of the samples `indices` of these nodes."""
        keys = stream_keys(self.seed, NEIGHBORS, PARTS.index(self.part), num=self.num_positions)
        levels = [nodes_B[None]]
        for fanout in self.fanouts:
            parents = np.repeat(levels[-1], fanout, axis=0)
            first = sum(map(len, levels))
            sizes = self.graph.neighbors.sizes(parents)
            chosen = draw_bits(keys[first : first + len(parents)], indices) % np.maximum(sizes, 1).astype(np.uint64)
            at = self.graph.neighbors.starts[parents] + chosen.astype(np.int64)
            last = max(len(self.graph.neighbors.values) - 1, 0)
            levels.append(np.where(sizes > 0, self.graph.neighbors.values[np.minimum(at, last)], parents))
        return np.concatenate(levels)


@lru_cache(maxsize=2)
def _partition_once(origin: Origin, partitions: int, seed: int) -> np.ndarray:
    return partition_nodes(origin.read().neighbors, partitions, seed)


def partition_samples(source: Neighborhoods, partitions: int) -> Neighborhoods:
    """The same training part, with an equal share of every batch from each of so many partitions of the graph."""
    if not 1 <= partitions <= len(source.nodes):
        raise UserError(f"data.partitions={partitions}; wanted from 1 to the {len(source.nodes):,} training nodes")
    return replace(source, partitions=partitions)


def open_graph(
    path: str,
    *,
    seed: int = 0,
    fanouts: list[int] | None = None,
    inputs: list[str] | None = None,
    split: Mapping[str, Any] | None = None,
    draws: int = 100,
    word_dropout: float = 0.0,
) -> Neighborhoods:
    """The training part of a graph in files."""
    origin = GraphFiles(path, graph_digest(path))
    graph = origin.read()
    chosen = inputs or default_inputs(graph)
    if isinstance(chosen, str) or any(name not in INPUTS for name in chosen) or len(set(chosen)) < len(chosen):
        raise UserError(f'data.inputs={chosen!r}; wanted "words", "node" and "features", or some of them')
    if "words" in chosen and not graph.num_words:
        raise UserError(f'{path}: its nodes have no words; set data.inputs=["node"]')
    if "features" in chosen and not graph.num_numbers:
        raise UserError(f'{path}: its nodes have no numeric features; set data.inputs=["node"]')
    given = None if split is None and graph.parts else files.from_plain(NodeSplit, dict(split or {}), "data.split")
    source = Neighborhoods(origin, tuple(fanouts or (10, 5)), tuple(chosen), given, draws, word_dropout, seed)
    check_neighborhoods(source, path)
    return source


def default_inputs(graph: Graph) -> list[str]:
    """Words and numeric features, or without either the nodes' numbers."""
    named = (("words", graph.num_words), ("features", graph.num_numbers))
    return [name for name, num in named if num] or ["node"]


def check_neighborhoods(source: Neighborhoods, name: str) -> None:
    """Raise an error if a setting is impossible, or nothing is left to train or test."""
    if any(type(number) is not int or number < 1 for number in (*source.fanouts, source.draws)):
        raise UserError(f"data.fanouts={[*source.fanouts]}, data.draws={source.draws}; wanted whole numbers from 1")
    if not 0 <= source.word_dropout < 1:
        raise UserError(f"data.word_dropout={source.word_dropout}; wanted a share of the words from 0 to below 1")
    if not source.size or not source.test().size:
        raise UserError(f"{name}: data.split={source.split} leaves no nodes to train or to test")
