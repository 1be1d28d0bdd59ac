"""Sampled neighbourhoods of labelled nodes as a source: sample i is a node and, at each distance, drawn neighbours.

With fanouts (10, 5) a sample has 61 positions: the node, 10 of its neighbours, and 5 neighbours of each. Neighbours are
drawn with replacement; a node without neighbours is its own. Every position has id features: "words3" are the words of
the node at position 3, "node3" its number. A draw is a hash of (seed, sample, position), so a sample is the same in any
batch and on any rank, and the ids of later batches are known as early as the loader reads them.

Worker processes import this file; it must not import torch.

Shape legend: B samples, P positions, F features (inputs by position), N nodes.
"""

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardwright.data.graphs.graph import UNLABELLED, Graph, read_graph
from shardwright.data.logs.convert import fingerprint
from shardwright.data.sources.source import NumpyBatch, draw_bits, stream_keys
from shardwright.errors import UserError

Part = Literal["train", "validation", "test"]
INPUTS = ("words", "node")


@dataclass(frozen=True)
class Neighborhoods:
    """`train`, `validation`: below 1, shares of the labelled nodes; else nodes of each class. The other labelled nodes
    are for the test. `draws`: neighbourhoods of each node in training."""

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

    @cached_property
    def graph(self) -> Graph:
        return read_graph(self.path)

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
            values.append(flat if is_node else self.graph.words.join(flat))
        lengths_FB = np.concatenate(lengths).reshape(len(features), len(indices)).astype(np.int64)
        labels = {"class": self.graph.labels[nodes_B]}
        return NumpyBatch(tuple(features), np.concatenate(values).astype(np.int64), lengths_FB, None, labels)

    def draw_positions(self, nodes_B: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """The nodes (P, B) at all positions of the samples `indices` of these nodes."""
        part = ("train", "validation", "test").index(self.part)
        keys = stream_keys(self.seed, part, num=self.num_positions)
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
        labelled = np.flatnonzero(self.graph.labels != UNLABELLED)
        order = np.random.default_rng(self.seed).permutation(labelled)
        labels = self.graph.labels[order]
        rank = np.empty(len(order), np.int64)  # of a node among those of its class
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
    """Open a graph for training on its labelled nodes; inputs are the nodes' words, or without words their numbers."""
    graph = read_graph(path)
    chosen = tuple(inputs or (["words"] if graph.num_words else ["node"]))
    numbers = tuple(fanouts or (10, 5))
    if unknown := [name for name in chosen if name not in INPUTS]:
        raise UserError(f'data.inputs: "{unknown[0]}"; wanted {" or ".join(INPUTS)}')
    if "words" in chosen and not graph.num_words:
        raise UserError(f'{path}: its nodes have no words; set data.inputs=["node"]')
    if min(numbers) < 1 or draws < 1:
        raise UserError(f"data.fanouts={list(numbers)}, data.draws={draws}; wanted 1 or more")
    if min(train, validation) < 0 or not train or (validation and (train >= 1) != (validation >= 1)):
        raise UserError(
            f"data.train={train:g}, data.validation={validation:g}; wanted two shares of the labelled nodes below 1, "
            "or two numbers of nodes of each class"
        )
    source = Neighborhoods(path, _digest(path), numbers, chosen, train, validation, draws, seed)
    if not source.size or not source.test().size:
        raise UserError(
            f"{path}: data.train={train:g} and data.validation={validation:g} leave no nodes to train or test"
        )
    return source


def _digest(path: str) -> str:
    """Identifies the graph's files."""
    source = Path(path)
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    contents = [[name, size, digest] for name, size, _, digest in fingerprint(files)]
    return hashlib.sha256(repr(contents).encode()).hexdigest()[:16]
