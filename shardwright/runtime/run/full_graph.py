"""Accuracy over all neighbors of the nodes of a graph, not only over drawn ones.

Shape legend: B samples, P positions, E neighbors of all nodes.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.data.graphs.neighborhoods import Neighborhoods
from shardwright.data.loading.loader import to_batch
from shardwright.models.graphsage import GraphSAGE
from shardwright.runtime.job import Job

MAX_EDGES = 50_000_000  # in both directions; larger graphs are scored over drawn neighbors only
SAMPLES_AT_ONCE = 256


def scores(job: Job, source: Any) -> dict[str, float]:
    """Accuracy of the test part over all neighbors; empty for other sources and models, several ranks, large graphs."""
    if not isinstance(source, Neighborhoods) or source.part != "test" or not isinstance(job.model, GraphSAGE):
        return {}
    graph = source.graph
    if job.mesh.size > 1 or not len(source.nodes) or len(graph.neighbors.values) > MAX_EDGES:
        return {}
    was_training = job.model.training
    job.model.eval()
    try:
        logits = score_nodes(job.model, source)[torch.from_numpy(source.nodes)]
    finally:
        job.model.train(was_training)
    is_correct = logits.argmax(1) == torch.from_numpy(graph.labels[source.nodes])
    return {"accuracy_all_neighbors": float(is_correct.double().mean())}


@torch.no_grad()
def score_nodes(model: GraphSAGE, source: Neighborhoods) -> Tensor:
    """The logits (N, classes) of all nodes of the graph, from all neighbors of each."""
    source = source.test()  # without dropped words
    graph, num_positions = source.graph, source.num_positions
    parts, step = [], num_positions * SAMPLES_AT_ONCE
    for lo in range(0, graph.num_nodes, step):
        nodes = np.arange(lo, min(lo + step, graph.num_nodes))
        rows = -(-len(nodes) // num_positions)
        nodes_BP = np.pad(nodes, (0, rows * num_positions - len(nodes))).reshape(rows, num_positions)
        batch = to_batch(source.batch_of(nodes_BP.T, np.zeros(rows, np.int64)))
        vectors = model.sparse(batch) if hasattr(model, "sparse") else None
        parts.append(model.dense.read_inputs(batch, vectors).flatten(0, 1)[: len(nodes)])
    starts, neighbors_E = (torch.from_numpy(each) for each in (graph.neighbors.starts, graph.neighbors.values))
    return model.dense.score_all_neighbors(torch.cat(parts), starts, neighbors_E)
