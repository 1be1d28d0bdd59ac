"""Sampled neighborhoods of labeled nodes as a source: a sample is a node and, at each distance, drawn neighbors.

With fanouts (10, 5) a sample has 61 positions: the node, 10 of its neighbors, and 5 neighbors of each. Neighbors are
drawn with replacement; in place of a neighbor, a node without any is used itself. Every position has id features:
"words3" are the words of the node at position 3, "node3" its number. A draw is a hash of (seed, part, sample,
position), so a sample is the same in any batch and on any rank, and the ids of later batches are known as early as the
loader reads them.

Worker processes import this file; it must not import torch.

Shape legend: B samples, P positions, F features (inputs by position), N nodes.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import numpy as np

from shardwright.data.graphs.graph import UNLABELED, Graph, graph_digest, open_graph_once
from shardwright.data.sources.source import NumpyBatch, draw_bits, stream_keys
from shardwright.errors import UserError

Part = Literal["train", "validation", "test"]
INPUTS = ("words", "node")
NEIGHBORS = 0x6E656967  # a word of the keys of draws, which differ from those of the order of samples


@dataclass(frozen=True)
class Neighborhoods:
    """Neighborhoods of the nodes of one part of a graph.

    `train`, `validation`: below 1, shares of the labeled nodes; else numbers of nodes of each class. The test part has
    the other labeled nodes. `draws`: neighborhoods of each training node.
    """

    path: str = field(repr=False)  # the digest identifies the graph, wherever it is
    digest: str
    fanouts: tuple[int, ...] = (10, 5)
    inputs: tuple[str, ...] = ("words",)
    train: float = 20
    validation: float = 30
    draws: int = 100
    seed: int = 0
    part: Part = "train"

    def __reduce__(self) -> tuple[Any, ...]:
        """Workers read the graph themselves."""
        fields = (self.path, self.digest, self.fanouts, self.inputs, self.train, self.validation, self.draws)
        return Neighborhoods, (*fields, self.seed, self.part)

    @property
    def size(self) -> int:
        return len(self._nodes) * (self.draws if self.part == "train" else 1)

    @property
    def num_positions(self) -> int:
        return sum(prod(self.fanouts[:distance]) for distance in range(len(self.fanouts) + 1))

    @property
    def num_classes(self) -> int:
        return self.graph.num_classes

    @property
    def tables(self) -> dict[str, int]:
        """The rows of the table of each input."""
        rows = {"words": self.graph.num_words, "node": self.graph.num_nodes}
        return {name: rows[name] for name in self.inputs}

    @property
    def graph(self) -> Graph:
        return open_graph_once(self.path, self.digest)

    def evaluation(self) -> "Neighborhoods":
        """The validation part."""
        return replace(self, part="validation")

    def test(self) -> "Neighborhoods":
        """The test part."""
        return replace(self, part="test")

    def take(self, indices: np.ndarray) -> NumpyBatch:
        nodes_B = self._nodes[indices % len(self._nodes)] if len(indices) else indices
        nodes_PB = self.draw_positions(nodes_B, indices)
        flat, features, lengths, values = nodes_PB.ravel(), list[str](), list[np.ndarray](), list[np.ndarray]()
        for name in self.inputs:
            features += [f"{name}{position}" for position in range(len(nodes_PB))]
            is_node = name == "node"
            lengths.append(np.ones_like(flat) if is_node else self.graph.words.sizes(flat))
            values.append(flat if is_node else self.graph.words.concatenate(flat))
        lengths_FB = np.concatenate(lengths).reshape(len(features), len(indices)).astype(np.int64)
        labels = {"class": self.graph.labels[nodes_B]}
        return NumpyBatch(tuple(features), np.concatenate(values).astype(np.int64), lengths_FB, None, labels)

    def draw_positions(self, nodes_B: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """The nodes (P, B) at all positions of the samples `indices` of these nodes."""
        part = ("train", "validation", "test").index(self.part)
        keys = stream_keys(self.seed, NEIGHBORS, part, num=self.num_positions)
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

    @cached_property
    def _nodes(self) -> np.ndarray:
        """The nodes of this part."""
        labeled = np.flatnonzero(self.graph.labels != UNLABELED)
        order = np.random.default_rng(self.seed).permutation(labeled)
        labels = self.graph.labels[order]
        rank = np.zeros(len(order), np.int64)  # of a node among those of its class
        for number in range(self.num_classes):
            own = np.flatnonzero(labels == number)
            rank[own] = np.arange(len(own))
        ends = (self.train, self.train + self.validation)
        if self.train >= 1:
            is_trained, is_seen = (rank < end for end in ends)
        else:
            is_trained, is_seen = (np.arange(len(order)) < round(end * len(order)) for end in ends)
        return order[{"train": is_trained, "validation": is_seen & ~is_trained, "test": ~is_seen}[self.part]]


def open_graph(
    path: str,
    *,
    seed: int = 0,
    fanouts: list[int] | None = None,
    inputs: list[str] | None = None,
    train: float = 20,
    validation: float = 30,
    draws: int = 100,
) -> Neighborhoods:
    """The training part of a graph; inputs are the nodes' words, or without words their numbers."""
    digest = graph_digest(path)
    graph = open_graph_once(path, digest)
    chosen = inputs or (["words"] if graph.num_words else ["node"])
    numbers = fanouts or [10, 5]
    if isinstance(chosen, str) or any(name not in INPUTS for name in chosen) or len(set(chosen)) < len(chosen):
        raise UserError(f'data.inputs={chosen!r}; wanted ["words"], ["node"] or both')
    if "words" in chosen and not graph.num_words:
        raise UserError(f'{path}: its nodes have no words; set data.inputs=["node"]')
    if any(type(number) is not int or number < 1 for number in (*numbers, draws)):
        raise UserError(f"data.fanouts={numbers}, data.draws={draws}; wanted whole numbers from 1")
    if min(train, validation) < 0 or not train or (validation and (train >= 1) != (validation >= 1)):
        raise UserError(
            f"data.train={train:g}, data.validation={validation:g}; wanted two shares of the labeled nodes below 1, "
            "or two numbers of nodes of each class"
        )
    source = Neighborhoods(path, digest, tuple(numbers), tuple(chosen), train, validation, draws, seed)
    if not source.size or not source.test().size:
        raise UserError(
            f"{path}: data.train={train:g} and data.validation={validation:g} leave no nodes to train or to test"
        )
    return source
