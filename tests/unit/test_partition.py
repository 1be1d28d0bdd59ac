"""Partitions of graphs, and batches with equal shares of each."""

import json
import math
import pickle
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np
import pytest
from graphs import NUM_NODES, write_npz
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loader import IdSource, epochs, ids

from shardwright import config
from shardwright.data.graphs.communities import CommunityGraph, open_synthetic_graph
from shardwright.data.graphs.graph import Lists
from shardwright.data.graphs.neighborhoods import open_graph, partition_samples
from shardwright.data.graphs.partition import SLACK, edge_cut, even_out, partition_nodes
from shardwright.data.loading.loader import Loader
from shardwright.errors import UserError
from shardwright.runtime.run import train as training


@pytest.mark.parametrize(("classes", "partitions"), [(8, 8), (8, 3), (41, 8)])
def test_partitions_are_balanced_and_cut_few_edges(classes, partitions):
    graph = CommunityGraph(20_000, 10, classes, 0.7, 0).read()
    partition_N = partition_nodes(graph.neighbors, partitions, 0)
    counts = np.bincount(partition_N, minlength=partitions)
    assert counts.max() <= (1 + SLACK) * 20_000 / partitions and counts.min() > 0.75 * 20_000 / partitions
    by_class = edge_cut(graph.neighbors, graph.labels * partitions // classes)
    at_random = edge_cut(graph.neighbors, np.random.default_rng(0).integers(0, partitions, 20_000))
    assert edge_cut(graph.neighbors, partition_N) < by_class + 0.1 * (at_random - by_class)
    assert np.array_equal(partition_N, partition_nodes(graph.neighbors, partitions, 0))
    assert not np.array_equal(partition_N, partition_nodes(graph.neighbors, partitions, 1))


def test_the_cut_of_graphs_with_a_known_best():
    """Cliques of 50 nodes joined in a ring; then two nodes."""
    cliques = [(50 * c + a, 50 * c + b) for c in range(8) for a in range(50) for b in range(a)]
    edges_E2 = np.array([*cliques, *((50 * c, 50 * ((c + 1) % 8) + 1) for c in range(8))])
    both_E2 = np.concatenate([edges_E2, edges_E2[:, ::-1]])
    neighbors = Lists.from_pairs(both_E2[:, 0], both_E2[:, 1], 400)
    assert edge_cut(neighbors, partition_nodes(neighbors, 4, 0)) <= 8 / len(edges_E2)
    pair = Lists.from_pairs(np.array([0, 1]), np.array([1, 0]), 2)
    assert edge_cut(pair, np.array([0, 1])) == 1 and edge_cut(pair, np.array([0, 0])) == 0
    assert sorted(partition_nodes(pair, 2, 0)) == [0, 1] and partition_nodes(pair, 1, 0).tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["star", "pairs", "one edge"])
def test_graphs_without_communities_are_balanced(kind):
    num = 50_000
    others = {"star": np.zeros(num, np.int64), "pairs": np.arange(num) ^ 1, "one edge": np.arange(num)}[kind]
    near = np.arange(num)
    near, others = (near, others) if kind != "one edge" else (np.array([0, 1]), np.array([1, 0]))
    neighbors = Lists.from_pairs(np.concatenate([near, others]), np.concatenate([others, near]), num)
    counts = np.bincount(partition_nodes(neighbors, 6, 0), minlength=6)
    assert counts.max() <= (1 + SLACK) * num / 6 and counts.sum() == num


@given(st.lists(st.integers(0, 6), min_size=7, max_size=60))
def test_shares_become_even_with_as_few_moves_as_possible(numbers):
    partition_N = np.array(numbers)
    even_N = even_out(partition_N, 7)
    counts, after = (np.bincount(own, minlength=7) for own in (partition_N, even_N))
    assert after.max() - after.min() <= 1
    assert (even_N != partition_N).sum() == np.maximum(counts - after, 0).sum()


@dataclass(frozen=True)
class PartitionedIds(IdSource):
    partitions: int = 3


@settings(max_examples=80)
@given(st.integers(1, 90), st.integers(1, 24), st.integers(1, 7), st.integers(1, 5), st.booleans())
def test_an_epoch_has_each_sample_once_and_each_range_one_slice(size, batch_size, partitions, num_ranks, shuffle):
    load = partial(Loader, PartitionedIds(size, partitions), batch_size=batch_size, seed=3, shuffle=shuffle)
    loader, shards = load(), [load(shard=(rank, num_ranks)) for rank in range(num_ranks)]
    orders = []
    for _ in range(2):
        epoch = ids(loader)
        assert sorted(sum(epoch, [])) == list(range(size)) and len(epoch) == math.ceil(size / batch_size)
        own = [
            sum((batch[len(batch) * p // partitions : len(batch) * (p + 1) // partitions] for batch in epoch), [])
            for p in range(partitions)
        ]
        assert sum(map(sorted, own), []) == list(range(size))  # slices p are range p
        assert shuffle or sum(own, []) == list(range(size))
        for batch, *slices in zip(epoch, *map(ids, shards), strict=True):
            assert sum(slices, []) == batch
        orders.append(epoch)
    assert not shuffle or size < 30 or orders[0] != orders[1]
    again = load()
    state = {"epoch": 1, "batch": len(orders[1]) - 1}
    again.load_state_dict(load().state_dict() | state)
    assert ids(islice(epochs(again), 1)) == orders[1][-1:]


@pytest.fixture
def graph(tmp_path) -> str:
    return str(write_npz(tmp_path / "graph.npz"))


def test_slices_of_batches_have_nodes_of_their_partitions():
    options = {"nodes": 2000, "degree": 12, "homophily": 0.9, "split": {"train": 0.8, "validation": 0.1}, "draws": 5}
    plain = open_synthetic_graph(**options, seed=2)
    source = partition_samples(plain, 4)
    assert sorted(source.nodes) == sorted(plain.nodes) and source.size == plain.size == 8000
    position_N = {node: position for position, node in enumerate(source.nodes)}
    is_own, seen, same = [], [], []
    loader = Loader(source, batch_size=40, seed=1)
    order = loader._order
    for number in range(order.num_batches or 0):
        indices = order.indices(0, number)
        nodes = source.nodes[indices // source.draws]
        assert np.array_equal(source.graph.labels[nodes], source.take(indices).labels["class"])
        assert [position_N[node] * 4 // 1600 for node in nodes] == np.repeat(np.arange(4), 10).tolist()
        is_own.append((source.partition_N[nodes] == np.repeat(np.arange(4), 10)).mean())
        seen.append(indices)
        same.append(source.partition_N[source.draw_positions(nodes, indices)[1:]] == source.partition_N[nodes])
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(8000))
    assert np.mean(is_own) > 0.95 and np.mean(np.concatenate(same, 1)) > 0.7  # neighbors of training nodes
    for one, other in ((source.evaluation(), plain.evaluation()), (source.test(), plain.test())):
        assert one == other and np.array_equal(one.nodes, other.nodes)
    copy = pickle.loads(pickle.dumps(source))
    assert copy == source and np.array_equal(copy.take(seen[3]).values, source.take(seen[3]).values)
    assert repr(source) != repr(plain)


def test_workers_give_the_same_batches_and_the_order_is_another(graph):
    plain = open_graph(graph, draws=3)
    source, order = partition_samples(plain, 2), {"batch_size": 12, "seed": 2}
    for rank in (0, 1):
        expected = ids(islice(Loader(source, shard=(rank, 2), **order), 4))
        with Loader(source, shard=(rank, 2), workers=1, **order) as loader:
            assert ids(islice(loader, 4)) == expected
    with pytest.raises(UserError, match="loader: source is"):
        Loader(source, **order).load_state_dict(Loader(plain, **order).state_dict())


def test_wrong_numbers_of_partitions_are_named(graph):
    source = open_graph(graph)
    for partitions in (0, NUM_NODES):
        with pytest.raises(UserError, match=rf"data.partitions={partitions}; wanted from 1 to the 60 training nodes"):
            partition_samples(source, partitions)
    with pytest.raises(UserError, match="data.partitions=2, but data.kind=synthetic is no graph; drop it"):
        training.train(config.load("synthetic-dlrm", ("data.partitions=2",)))
    assert partition_samples(source, 1) == source == replace(source, partitions=1)


def test_a_resumed_run_equals_one_without_a_stop(graph, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("data.fanouts=[3, 2]", "model.hidden=8", "train.batch_size=12", "train.log_every=2", "data.partitions=3")
    small += (f"data={graph}", "train.eval_every=0", "train.checkpoint_every=4")
    lines = {}
    for name, *steps in (("one", 12), ("two", 6, 12)):
        for number, end in enumerate(steps):
            overrides = (
                *small,
                f"run.name={name}",
                f"train.steps={end}",
                f"run.resume={'true' if number else 'false'}",
            )
            run = training.train(config.load("graphsage", overrides)).path
        lines[name] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [{line["step"]: line["loss"] for line in own if line["kind"] == "train"} for own in lines.values()]
    assert losses[0] == losses[1] and len(losses[0]) == 6
