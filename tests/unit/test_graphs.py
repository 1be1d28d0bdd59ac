"""Graphs: files, sampled neighbourhoods, GraphSAGE against a plain formula, and a run."""

import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from graphs import NUM_CLASSES, NUM_NODES, write_npz

from shardwright import config
from shardwright.data.graphs.graph import read_graph
from shardwright.data.graphs.neighborhoods import open_graph
from shardwright.data.loading.loader import to_batch
from shardwright.errors import UserError
from shardwright.models.graphsage import graphsage
from shardwright.report.run_page import render
from shardwright.runtime.run import train as training
from shardwright.spec.optimizer import SGD


@pytest.fixture
def graph(tmp_path) -> str:
    return str(write_npz(tmp_path / "graph.npz"))


def test_a_folder_of_text_files_is_the_same_graph(graph, tmp_path):
    arrays, folder = np.load(graph), tmp_path / "folder"
    folder.mkdir()
    sources = np.repeat(np.arange(NUM_NODES), np.diff(arrays["adj_indptr"]))
    edges = np.stack([arrays["adj_indices"], sources], 1)  # the other direction
    (folder / "edges.txt").write_text("# two nodes\n# of an edge\n" + "".join(f"{a} {b}\n" for a, b in edges))
    nodes = np.repeat(np.arange(NUM_NODES), np.diff(arrays["feat_indptr"]))
    words = zip(nodes, arrays["feat_indices"], strict=True)
    (folder / "words.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in words))
    (folder / "labels.csv").write_text("".join(f"{a},{b}\n" for a, b in enumerate(arrays["labels"])))
    one, other = read_graph(graph), read_graph(str(folder))
    for first, second in ((one.neighbors, other.neighbors), (one.words, other.words)):
        assert np.array_equal(first.starts, second.starts) and np.array_equal(first.values, second.values)
    (folder / "labels.csv").write_text("".join(f"{b}\n" for b in arrays["labels"]))
    assert np.array_equal(read_graph(str(folder)).labels, one.labels)
    # Neighbours in both directions, without the node itself.
    pairs = {(a, b) for a, b in edges.tolist() if a != b}
    expected = sorted(b for a, b in pairs | {(b, a) for a, b in pairs} if a == 7)
    assert one.neighbors.join(np.array([7])).tolist() == expected


def test_mistakes_in_files_are_named(graph, tmp_path):
    with pytest.raises(UserError, match=r"no such file or folder; wanted an .npz file, or a folder"):
        read_graph(str(tmp_path / "none"))
    np.savez(tmp_path / "other.npz", labels=np.zeros(3))
    with pytest.raises(UserError, match="other.npz: no array adj_indptr; it has labels"):
        read_graph(str(tmp_path / "other.npz"))
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(UserError, match=r"folder: 0 files named edges.\*, wanted one; the folder has nothing"):
        read_graph(str(folder))
    (folder / "edges.csv").write_text("0,9\n")
    (folder / "labels.csv").write_text("0\n1\n1\n")
    with pytest.raises(UserError, match="an edge of node 9; there are labels for 3 nodes, from 0"):
        read_graph(str(folder))
    (folder / "edges.csv").write_text("0,a\n")
    with pytest.raises(UserError, match="edges.csv: not lines of whole numbers"):
        read_graph(str(folder))
    (folder / "edges.csv").write_text("0,1,2\n")
    with pytest.raises(UserError, match="edges.csv: 3 columns a line; wanted 2"):
        read_graph(str(folder))
    with pytest.raises(UserError, match=r'data.inputs: "word"; wanted words or node'):
        open_graph(graph, inputs=["word"])
    with pytest.raises(UserError, match="wanted two shares of the labelled nodes below 1, or two numbers"):
        open_graph(graph, train=0.5, validation=30)


@pytest.mark.parametrize(("train", "validation"), [(20, 30), (0.6, 0.2), (20, 0)])
def test_every_labelled_node_is_in_one_part(graph, train, validation):
    source = open_graph(graph, train=train, validation=validation, draws=3)
    parts = [part._nodes for part in (source, source.evaluation(), source.test())]
    assert sorted(np.concatenate(parts).tolist()) == list(range(NUM_NODES))
    if train == 20:
        assert np.bincount(source.graph.labels[parts[0]]).tolist() == [20] * NUM_CLASSES
        assert len(parts[1]) == NUM_CLASSES * validation
    else:
        assert [len(part) for part in parts] == [144, 48, 48]
    assert source.size == 3 * len(parts[0])


def test_samples_are_neighbourhoods_and_do_not_depend_on_their_batch(graph):
    source = open_graph(graph, fanouts=[3, 2], inputs=["words", "node"], train=0.9, validation=0.0, draws=2)
    indices = np.arange(source.size)
    batch = source.take(indices)
    assert len(batch.features) == 2 * source.num_positions == 2 * 10
    sizes = batch.lengths.sum(1)
    nodes_PB = batch.values[sizes[:10].sum() :].reshape(10, len(indices))
    words = batch.values[: sizes[:10].sum()]
    assert np.array_equal(words, source.graph.words.join(nodes_PB.ravel()))
    assert np.array_equal(batch.labels["class"], source.graph.labels[nodes_PB[0]])
    parents = [0, 0, 0, 1, 1, 2, 2, 3, 3]
    for position, parent in enumerate(parents, start=1):
        for near, far in zip(nodes_PB[parent], nodes_PB[position], strict=True):
            neighbors = source.graph.neighbors.join(np.array([near]))
            assert far in neighbors if len(neighbors) else far == near
    assert not np.array_equal(nodes_PB[:, : len(indices) // 2], nodes_PB[:, len(indices) // 2 :])  # two draws
    chosen = indices[[5, 3, 200]]
    again = pickle.loads(pickle.dumps(source)).take(chosen)
    assert np.array_equal(again.values[again.lengths[:10].sum() :].reshape(10, 3), nodes_PB[:, chosen])
    assert source.take(indices[:0]).lengths.shape == (20, 0)


def test_every_neighbour_is_drawn_equally_often(graph):
    source = open_graph(graph, fanouts=[1], inputs=["node"], draws=400)
    nodes = source.take(np.arange(source.size)).values.reshape(2, -1)
    node = nodes[0, 0]
    neighbors, counts = np.unique(nodes[1][nodes[0] == node], return_counts=True)
    assert np.array_equal(neighbors, source.graph.neighbors.join(np.array([node])))
    assert counts.min() > 0.5 * counts.mean()


@pytest.mark.parametrize("inputs", [["words"], ["words", "node"]])
def test_graphsage_equals_its_formula(graph, inputs):
    source = open_graph(graph, fanouts=[3, 2], inputs=inputs)
    model: Any = graphsage(source, SGD(lr=0.1), dim=8, hidden=6)
    batch = to_batch(source.take(np.arange(16)))
    vectors = model.sparse(batch)
    x = [torch.cat([vectors[f"{name}{position}"] for name in inputs], 1) for position in range(source.num_positions)]
    first, second = model.dense.layers
    inner = [
        first(torch.cat([x[node], sum(x[child] for child in children) / len(children)], 1)).relu()
        for node, children in ((0, (1, 2, 3)), (1, (4, 5)), (2, (6, 7)), (3, (8, 9)))
    ]
    expected = second(torch.cat([inner[0], sum(inner[1:]) / 3], 1))
    torch.testing.assert_close(model(batch), expected)
    losses = -expected.log_softmax(1)[torch.arange(16), batch.labels["class"]]
    torch.testing.assert_close(model.loss(model(batch), batch), losses.mean())


SMALL = (
    *("data.fanouts=[4, 3]", "model.dim=16", "model.hidden=16", "train.steps=60", "train.eval_every=30"),
    *("train.batch_size=32", "train.log_every=20"),
)


def test_the_recipe_learns_communities_and_shows_its_accuracy(graph, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = training.train(config.load("graphsage", (*SMALL, f"data={graph}", "run.name=mine"))).path
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (test,) = [line for line in lines if line["kind"] == "test"]
    assert test["accuracy"] > 0.85  # words alone: about 0.8
    assert [line["kind"] for line in lines if "accuracy" in line].count("eval") == 2
    page = render(run).read_text()
    assert "Accuracy" in page and "normalized entropy" not in page


def test_ranks_draw_the_same_neighbourhoods_as_one_process(graph):
    source = open_graph(graph, draws=2)
    whole, parts = source.take(np.arange(40)), [source.take(np.arange(20)), source.take(np.arange(20, 40))]
    joined = np.concatenate([part.labels["class"] for part in parts])
    assert np.array_equal(whole.labels["class"], joined)
    assert np.array_equal(whole.lengths, np.concatenate([part.lengths for part in parts], 1))
