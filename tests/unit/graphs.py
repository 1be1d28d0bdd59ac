"""A synthetic graph with communities, in files."""

from pathlib import Path

import numpy as np

NUM_NODES, NUM_CLASSES, NUM_WORDS = 240, 3, 60


def write_npz(path: Path, *, seed: int = 0) -> Path:
    """Nodes have mostly neighbors of their class, and words of it: class c has words 20 c to 20 c + 19."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, NUM_CLASSES, NUM_NODES)
    edges = []
    for node in range(NUM_NODES - 1):  # the last node has no neighbors
        same = np.flatnonzero(labels[:-1] == labels[node])
        edges += [(node, int(other)) for other in rng.choice(same, 3)]
        edges.append((node, int(rng.integers(0, NUM_NODES - 1))))
    order = sorted(set(edges))
    counts = np.bincount([a for a, _ in order], minlength=NUM_NODES)
    words = [
        np.unique(np.where(rng.random(6) < 0.5, 20 * c + rng.integers(0, 20, 6), rng.integers(0, 60, 6)))
        for c in labels
    ]
    np.savez(
        path,
        adj_indptr=np.concatenate([[0], counts.cumsum()]),
        adj_indices=np.array([b for _, b in order]),
        feat_indptr=np.concatenate([[0], np.cumsum([len(own) for own in words])]),
        feat_indices=np.concatenate(words),
        labels=labels,
    )
    return path
