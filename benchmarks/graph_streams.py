"""Streams of sampled neighborhoods for benchmarks.het_graphs, on generated graphs shaped as those that HET trains.

Each worker trains nodes of its own partition of the graph. The parent draws all batches once and writes them to a
folder; workers read theirs.

Shape legend: N nodes of a graph, E edges (each in both directions), P positions of a sample, B samples, W values of a
node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.het import DIM, LOCAL_BATCH, NUM_BATCHES, RANKS, define_problem

FANOUTS = (2, 2)
SEED = 1
DIGITS = "0123456789"


@dataclass(frozen=True, slots=True)
class Field:
    """Values of each node besides its own number, one table; `own`: share of them from a range of its community."""

    rows: int
    values: int
    own: float


@dataclass(frozen=True, slots=True)
class GraphShape:
    """`degree`: mean number of neighbors; `train`: share of the nodes that are trained; `scale`: default of
    benchmarks.het_graphs."""

    nodes: int
    degree: float
    communities: int
    homophily: float
    classes: int
    train: float
    hidden: int
    scale: float
    fields: Mapping[str, Field]


# Numbers of nodes, rows, values and classes are those of HET's datasets; the shares of edges and values inside
# communities are guesses: 0.76 and 0.81 of the edges join nodes of a class in Reddit and ogbn-products.
SHAPES = {
    "reddit": GraphShape(232_960, 492, 41, 0.76, 41, 0.66, 8, 0.125, {}),
    "amazon": GraphShape(2_450_000, 50, 47, 0.81, 47, 0.08, 16, 0.1, {"words": Field(340_000, 16, 0.5)}),
    "ogbn-mag": GraphShape(
        736_390,
        15,
        100,
        0.7,
        349,
        0.85,
        12,
        0.25,
        {"fields": Field(60_000, 10, 0.7), "authors": Field(1_134_000, 10, 0.9)},
    ),
}


@dataclass(frozen=True)
class GraphStream:
    """What a side of benchmarks.het_sides trains.

    `copies_share`: of the rows of each table, on each worker. `repeats`: tables have so many times as many rows, of
    which each has the same part of the lookups; for predictions.
    """

    name: str
    scale: float
    copies_share: float
    folder: str
    num_batches: int = NUM_BATCHES
    repeats: int = 1

    @property
    def shape(self) -> GraphShape:
        return SHAPES[self.name]

    @property
    def rows(self) -> dict[str, int]:
        """Rows by table."""
        full = {"node": self.shape.nodes} | {name: field.rows for name, field in self.shape.fields.items()}
        return {name: round(rows * self.scale) * self.repeats for name, rows in full.items()}

    @property
    def copies(self) -> dict[str, int]:
        return {name: round(rows * self.copies_share) for name, rows in self.rows.items()}

    @property
    def memory_share(self) -> float:
        """Of the rows that workers own: each has as many in memory as it would have copies."""
        return min(RANKS * self.copies_share, 0.95)

    @property
    def values(self) -> dict[str, int]:
        """Values of a node by table."""
        return {"node": 1} | {name: field.values for name, field in self.shape.fields.items()}

    def make_model(self) -> Any:
        """The model on the meta device."""
        import torch

        from shardwright.layers.embedding import EmbeddingBags
        from shardwright.models.graphsage import GraphSAGE, Widths
        from shardwright.spec.optimizer import SGD
        from shardwright.spec.workload import Feature, Table

        torch.manual_seed(1)
        tables = [Table(name, rows, DIM) for name, rows in self.rows.items()]
        features = [Feature(feature, feature.rstrip(DIGITS), "mean") for feature in self.features]
        with torch.device("meta"):
            sparse = EmbeddingBags(tables, features, SGD(0.01))
            return GraphSAGE(sparse, FANOUTS, Widths(0, self.shape.hidden, self.shape.classes))

    @property
    def features(self) -> list[str]:
        num_positions = 1 + FANOUTS[0] + FANOUTS[0] * FANOUTS[1]
        return [f"{name}{position}" for name in self.rows for position in range(num_positions)]

    def make_batches(self, rank: int) -> list[Any]:
        """The batches of a worker."""
        arrays = self._load(str(rank))
        return [
            self._batch([values], labels) for values, labels in zip(arrays["values"], arrays["labels"], strict=True)
        ]

    def make_example(self) -> Any:
        """A global batch."""
        arrays = [self._load(str(rank)) for rank in range(RANKS)]
        return self._batch([own["values"][0] for own in arrays], np.concatenate([own["labels"][0] for own in arrays]))

    def _batch(self, values: Sequence[np.ndarray], labels_B: np.ndarray) -> Any:
        """A batch of the samples of several workers."""
        import torch

        from shardwright.jagged import Batch, Jagged

        sizes = np.array([self.values[feature.rstrip(DIGITS)] for feature in self.features])
        ends = (sizes * (len(labels_B) // len(values))).cumsum()[:-1]
        by_feature = zip(*(np.split(own, ends) for own in values), strict=True)
        ids = np.concatenate([part for parts in by_feature for part in parts]).astype(np.int64)
        lengths = torch.from_numpy(sizes)[:, None].expand(-1, len(labels_B)).contiguous()
        return Batch(
            Jagged(tuple(self.features), torch.from_numpy(ids), lengths), None, {"class": torch.from_numpy(labels_B)}
        )

    def make_problem(self, cluster: Any) -> Any:
        """What the planner knows: the workload with the statistics of the first worker's stream, on a cluster."""
        from shardwright.data.features.statistics import ValueCounts

        shares, statistics = self._load("shares"), []
        for feature in self.features:
            name = feature.rstrip(DIGITS)
            counts = np.repeat(np.sort(shares[f"own {name}"])[::-1], self.repeats) * (1e12 / self.repeats)
            counts = counts[counts >= 1].astype(np.int64)
            total, num = int(counts.sum()), self.values[name]
            values = ValueCounts(np.arange(len(counts), dtype=np.uint64), counts, len(counts), 0, total, total // num)
            statistics.append(values.feature_statistics(feature, LOCAL_BATCH))
        return define_problem(self.make_model(), self.make_example(), statistics, cluster)

    def hottest(self) -> dict[str, np.ndarray]:
        """Rows by table, most frequent first."""
        shares = self._load("shares")
        return {name: np.argsort(-shares[name], kind="stable") for name in self.rows}

    def _load(self, name: str) -> Mapping[str, np.ndarray]:
        return np.load(Path(self.folder, f"{self.name}-{name}.npz"))

    def draw(self) -> dict[str, Any]:
        """Generate the graph and write the batches of all workers; returns a description."""
        return _Drawing(self).write()


class _Drawing:
    """The graph, its partitions and the values of its nodes."""

    def __init__(self, stream: GraphStream) -> None:
        from shardwright.data.graphs.communities import CommunityGraph
        from shardwright.data.graphs.neighborhoods import Neighborhoods, NodeSplit, partition_samples

        shape, self.stream = stream.shape, stream
        origin = CommunityGraph(stream.rows["node"], shape.degree, shape.communities, shape.homophily, SEED)
        source = Neighborhoods(origin, FANOUTS, ("node",), NodeSplit(shape.train, 0.05), seed=SEED)
        self.source = partition_samples(source, RANKS)
        self.graph = origin.read()
        rng = np.random.default_rng(SEED)
        self.fields = {name: self._draw_values(rng, stream.rows[name], field) for name, field in shape.fields.items()}
        self.classes_N = self.graph.labels % shape.classes

    def _draw_values(self, rng: np.random.Generator, rows: int, field: Field) -> np.ndarray:
        """Values (N, W): of the node's community, or of all rows; the k-th most frequent has a share of about 1 / k."""
        num = self.graph.num_nodes, field.values
        width = rows // self.stream.shape.communities
        own = np.minimum(width ** rng.random(num), width - 1).astype(np.int64) + width * self.graph.labels[:, None]
        order = rng.permutation(rows)
        anywhere = order[np.minimum(rows ** rng.random(num), rows - 1).astype(np.int64)]
        return np.where(rng.random(num) < field.own, own, anywhere)

    def write(self) -> dict[str, Any]:
        from shardwright.data.graphs.partition import edge_cut

        folder, name = Path(self.stream.folder), self.stream.name
        distinct = [self._write_batches(rank, folder / f"{name}-{rank}.npz") for rank in range(RANKS)]
        np.savez(folder / f"{name}-shares.npz", **self._shares())
        cut = edge_cut(self.graph.neighbors, self.source.partition_N)
        description = {"scale": self.stream.scale, "rows": self.stream.rows, "copies": self.stream.copies}
        description |= {
            "full_shape": {key: value for key, value in asdict(self.stream.shape).items() if key != "scale"}
        }
        description |= {"edges": len(self.graph.neighbors.values) // 2, "cut_percent": round(100 * cut, 1)}
        parameters = sum(parameter.numel() for parameter in self.stream.make_model().dense.parameters())
        return description | {"dense_parameters": parameters, "distinct_rows": round(float(np.mean(distinct)))}

    def _write_batches(self, rank: int, path: Path) -> float:
        """Write the batches of a worker; returns their mean number of distinct rows."""
        from shardwright.data.sources.source import make_order

        order = make_order(self.source, LOCAL_BATCH * RANKS, SEED, True, (rank, RANKS))
        values, labels, distinct, position = [], [], [], (0, 0)
        for _ in range(self.stream.num_batches):
            indices = order.indices(*position)
            position = order.next_position(*position)
            if len(indices) < LOCAL_BATCH:  # the last of an epoch
                indices, position = order.indices(*position), order.next_position(*position)
            nodes_PB = self._positions(indices)
            ids = {"node": nodes_PB.ravel()} | {name: own[nodes_PB].ravel() for name, own in self.fields.items()}
            distinct.append(sum(len(np.unique(own)) for own in ids.values()))
            values.append(np.concatenate([*ids.values()]).astype(np.int32))
            labels.append(self.classes_N[nodes_PB[0]])
        np.savez(path, values=np.stack(values), labels=np.stack(labels))
        return float(np.mean(distinct))

    def _positions(self, indices: np.ndarray) -> np.ndarray:
        batch = self.source.take(indices)
        return batch.values.reshape(-1, len(indices))

    def _shares(self) -> dict[str, Any]:
        """The expected share of each row in the lookups of its table: by all workers, and by the first, "own"."""
        nodes = self.source.nodes
        both = {"": self._shares_of(nodes), "own ": self._shares_of(nodes[: len(nodes) // RANKS])}
        return {f"{prefix}{name}": shares for prefix, by_table in both.items() for name, shares in by_table.items()}

    def _shares_of(self, nodes: np.ndarray) -> dict[str, Any]:
        """Of workers that train these nodes."""
        neighbors, num_nodes = self.graph.neighbors, self.graph.num_nodes
        degree_N = np.diff(neighbors.starts)
        level_N = np.bincount(nodes, minlength=num_nodes) / len(nodes)
        total_N, weight = level_N, 1
        for fanout in FANOUTS:
            sent_E = np.repeat(level_N / np.maximum(degree_N, 1), degree_N)
            level_N = np.bincount(neighbors.values, sent_E, num_nodes) + np.where(degree_N == 0, level_N, 0)
            weight *= fanout
            total_N = total_N + weight * level_N
        total_N /= total_N.sum()
        by_table = {"node": total_N}
        for name, own_NW in self.fields.items():
            weights = np.repeat(total_N, own_NW.shape[1]) / own_NW.shape[1]
            by_table[name] = np.bincount(own_NW.ravel(), weights, self.stream.rows[name])
        return by_table
