"""A generated graph with communities and a power law of degrees, so that a first run needs no data.

A degree-corrected stochastic block model (Karrer and Newman, 2011): an end of an edge is drawn by the weights of nodes,
whose tail has the exponent EXPONENT; with probability `homophily` the other end is drawn from the same class, else from
all nodes. A word is with probability TOPICAL one of its class, else any.

Worker processes import this file; it must not import torch.

Shape legend: N nodes, E edges, C classes, K words.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from shardwright.data.graphs.graph import Contents, Graph, build_graph
from shardwright.data.graphs.neighborhoods import Neighborhoods, NodeSplit, check_neighborhoods
from shardwright.errors import UserError
from shardwright.spec import files

EXPONENT = 2.5  # of the power law of degrees
WORDS_OF_CLASS, WORDS_OF_NODE, TOPICAL = 40, 10, 0.25


@dataclass(frozen=True)
class CommunityGraph:
    """`degree`: mean number of neighbors, before repeated edges are merged."""

    nodes: int
    degree: float
    classes: int
    homophily: float
    seed: int

    def __post_init__(self) -> None:
        if self.nodes < 2 or not 2 <= self.classes <= self.nodes or not 0 < self.degree < self.nodes:
            raise UserError(
                f"data.nodes={self.nodes}, data.classes={self.classes}, data.degree={self.degree:g}; wanted from 2 "
                "classes to as many as nodes, and a degree above 0 and below the number of nodes"
            )
        if not 0 <= self.homophily <= 1:
            raise UserError(f"data.homophily={self.homophily:g}; wanted a share from 0 to 1")

    def read(self) -> Graph:
        return _draw(self)


@lru_cache(maxsize=2)
def _draw(graph: CommunityGraph) -> Graph:
    rng = np.random.default_rng(graph.seed)
    labels_N = np.sort(rng.permutation(graph.nodes) % graph.classes)  # nodes of a class are consecutive here
    weights_N = rng.permutation(np.arange(1.0, graph.nodes + 1)) ** (-1 / (EXPONENT - 1))
    ends_N = weights_N.cumsum()
    starts_C = np.searchsorted(labels_N, np.arange(graph.classes + 1))
    bounds_C = np.concatenate([[0.0], ends_N])[starts_C]
    num_edges = round(graph.nodes * graph.degree / 2)
    near_E = _search(ends_N, rng.random(num_edges) * ends_N[-1])
    is_same_E, share_E = rng.random(num_edges) < graph.homophily, rng.random(num_edges)
    low_E = np.where(is_same_E, bounds_C[labels_N[near_E]], 0.0)
    high_E = np.where(is_same_E, bounds_C[labels_N[near_E] + 1], ends_N[-1])
    far_E = _search(ends_N, low_E + share_E * (high_E - low_E))
    owners_K = np.repeat(np.arange(graph.nodes), WORDS_OF_NODE)
    topical_K = labels_N[owners_K] * WORDS_OF_CLASS + rng.integers(0, WORDS_OF_CLASS, len(owners_K))
    any_K = rng.integers(0, graph.classes * WORDS_OF_CLASS, len(owners_K))
    words_K = np.where(rng.random(len(owners_K)) < TOPICAL, topical_K, any_K)
    names_N = rng.permutation(graph.nodes)  # so that a node's number says nothing about its class
    labels = np.empty_like(labels_N)
    labels[names_N] = labels_N
    edges_E2 = np.stack([names_N[near_E], names_N[far_E]], 1)
    contents = Contents(edges_E2, labels, np.stack([names_N[owners_K], words_K], 1))
    return build_graph("the generated graph", contents)


def _search(ends_N: np.ndarray, points_E: np.ndarray) -> np.ndarray:
    return np.minimum(np.searchsorted(ends_N, points_E, side="right"), len(ends_N) - 1)


def open_synthetic_graph(
    *,
    nodes: int = 20_000,
    degree: float = 10.0,
    classes: int = 8,
    homophily: float = 0.7,
    seed: int = 0,
    fanouts: list[int] | None = None,
    split: Mapping[str, Any] | None = None,
    draws: int = 100,
) -> Neighborhoods:
    """The training part of a generated graph; the inputs are words."""
    origin = CommunityGraph(nodes, degree, classes, homophily, seed)
    parts = files.from_plain(NodeSplit, dict(split or {}), "data.split")
    source = Neighborhoods(origin, tuple(fanouts or (10, 5)), split=parts, draws=draws, seed=seed)
    check_neighborhoods(source, "the generated graph")
    return source
