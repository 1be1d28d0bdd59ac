"""Graphs: files, sampled neighborhoods, GraphSAGE against a plain formula, and a run."""

import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from graphs import NUM_CLASSES, NUM_NODES, write_npz

from shardwright import config
from shardwright.data.graphs import graph_files
from shardwright.data.graphs.graph_files import read_graph
from shardwright.data.graphs.neighborhoods import Neighborhoods, open_graph
from shardwright.data.loading.loader import to_batch
from shardwright.data.sources.source import NumpyBatch
from shardwright.data.sources.synthetic import ClickStream
from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged
from shardwright.layers.draws import LayerDraws, StepDraws
from shardwright.layers.dropout import Dropout
from shardwright.layers.loss import ClassLoss
from shardwright.models import graphsage as graphsage_module
from shardwright.models.graphsage import graphsage
from shardwright.report.run_page import render
from shardwright.runtime.outputs import Output, Scores
from shardwright.runtime.run import full_graph
from shardwright.runtime.run import train as training
from shardwright.runtime.run.metrics import WindowMetrics
from shardwright.spec.calls import Call
from shardwright.spec.optimizer import SGD
from shardwright.spec.plan import Stage


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
    assert one.neighbors.concatenate(np.array([7])).tolist() == expected


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
    with pytest.raises(UserError, match=r"data.inputs=\['word'\]; wanted"):
        open_graph(graph, inputs=["word"])
    for changed, message in (
        ({"labels": np.full(NUM_NODES, -100)}, "the label of node 0 is -100; wanted a class from 0, or -1"),
        ({"labels": np.zeros(NUM_NODES)}, r"labels are float64 \(240,\); wanted a whole number for each node"),
        ({"labels": np.zeros(NUM_NODES, np.int64)}, "fewer than two classes"),
        ({"adj_indices": np.zeros(3, np.int64)}, "are not compressed sparse rows"),
        ({"feat_indices": None}, "no array feat_indices"),
        ({"x": np.zeros((3, 3))}, r"numeric features are \(3, 3\); wanted a row for each of 240 nodes"),
        ({"x": np.full((NUM_NODES, 2), np.nan)}, "numeric feature 0 of node 0 is nan"),
    ):
        arrays = {name: array for name, array in (dict(np.load(graph)) | changed).items() if array is not None}
        np.savez(tmp_path / "changed.npz", **arrays)
        with pytest.raises(UserError, match=message):
            read_graph(str(tmp_path / "changed.npz"))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "graph.npz").read_bytes()[:500])
    with pytest.raises(UserError, match="cut.npz: not an .npz file of plain arrays"):
        read_graph(str(tmp_path / "cut.npz"))
    with pytest.raises(UserError, match="model.kind=graphsage needs a source of neighborhoods"):
        graphsage(ClickStream(), SGD(lr=0.1), dim=8, hidden=6)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="wanted two shares of the labeled nodes below 1, or two numbers"):
        open_graph(graph, split={"train": 0.5, "validation": 30})


@pytest.mark.parametrize(("train", "validation"), [(20, 30), (0.6, 0.2), (20, 0)])
def test_every_labeled_node_is_in_one_part(graph, train, validation):
    source = open_graph(graph, split={"train": train, "validation": validation}, draws=3)
    parts = [part.nodes for part in (source, source.evaluation(), source.test())]
    assert sorted(np.concatenate(parts).tolist()) == list(range(NUM_NODES))
    if train == 20:
        assert np.bincount(source.graph.labels[parts[0]]).tolist() == [20] * NUM_CLASSES
        assert len(parts[1]) == NUM_CLASSES * validation
    else:
        assert [len(part) for part in parts] == [144, 48, 48]
    assert source.size == 3 * len(parts[0])


def test_samples_are_neighborhoods_and_do_not_depend_on_their_batch(graph):
    source = open_graph(
        graph, fanouts=[3, 2], inputs=["words", "node"], split={"train": 0.9, "validation": 0.0}, draws=2
    )
    indices = np.arange(source.size)
    batch = source.take(indices)
    assert len(batch.features) == 2 * source.num_positions == 2 * 10
    sizes = batch.lengths.sum(1)
    nodes_PB = batch.values[sizes[:10].sum() :].reshape(10, len(indices))
    words = batch.values[: sizes[:10].sum()]
    assert np.array_equal(words, source.graph.words.concatenate(nodes_PB.ravel()))
    assert np.array_equal(batch.labels["class"], source.graph.labels[nodes_PB[0]])
    parents = [0, 0, 0, 1, 1, 2, 2, 3, 3]
    for position, parent in enumerate(parents, start=1):
        for near, far in zip(nodes_PB[parent], nodes_PB[position], strict=True):
            neighbors = source.graph.neighbors.concatenate(np.array([near]))
            assert far in neighbors if len(neighbors) else far == near
    assert not np.array_equal(nodes_PB[:, : len(indices) // 2], nodes_PB[:, len(indices) // 2 :])  # two draws
    chosen = indices[[5, 3, 200]]
    again = pickle.loads(pickle.dumps(source)).take(chosen)
    assert np.array_equal(again.values[again.lengths[:10].sum() :].reshape(10, 3), nodes_PB[:, chosen])
    assert source.take(indices[:0]).lengths.shape == (20, 0)


def test_nodes_without_a_label_are_neighbors_only(graph, tmp_path):
    arrays = dict(np.load(graph))
    arrays["labels"] = np.where(np.arange(NUM_NODES) % 2 == 1, -1, arrays["labels"])
    np.savez(tmp_path / "half.npz", **arrays)
    source = open_graph(str(tmp_path / "half.npz"), inputs=["node"], split={"train": 0.8, "validation": 0.0})
    nodes_PB = source.take(np.arange(source.size)).values.reshape(source.num_positions, -1)
    assert (nodes_PB[0] % 2 == 0).all() and (nodes_PB[1] % 2 == 1).any()
    assert len(source.nodes) == 96


def test_a_graph_that_changes_during_a_run_is_named(graph, tmp_path):
    source = open_graph(graph)
    write_npz(tmp_path / "graph.npz", seed=1)
    with pytest.raises(UserError, match="graph.npz has changed since the run began"):
        graph_files.open_graph_once.cache_clear()
        source.test().take(np.arange(3))


def test_dropout_draws_by_rank_and_repeats_in_a_second_pass():
    dropout, x = Dropout(0.5), torch.ones(4, 6)
    masks = []
    for part in (0, 1):
        draws = StepDraws(part)
        dropout.draws = LayerDraws(draws, "layer")
        with draws.keyed(Call(Stage("forward", "main"), step=3)):
            masks += [dropout(x), dropout(x)]
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])
    assert {*masks[0].unique().tolist()} == {0.0, 2.0}
    assert torch.equal(dropout.eval()(x), x)


def test_accuracy_counts_samples_by_weight(graph):
    loss, logits = ClassLoss(), torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    weights = torch.tensor([1.0, 3.0, 4.0])
    ids = Jagged(("node",), torch.arange(3), torch.ones(1, 3, dtype=torch.int64))
    batch = Batch(ids, None, {"class": torch.tensor([0, 0, 0])}, weights)
    losses = torch.nn.functional.cross_entropy(logits, batch.labels["class"], reduction="none")
    torch.testing.assert_close(loss(logits, batch), (losses * weights).sum() / 8)
    window = WindowMetrics(None, classes=loss)
    window.update(Output(1, batch, Scores(loss(logits, batch), logits)))
    assert window.compute()["accuracy"] == pytest.approx(5 / 8)
    with pytest.raises(UserError, match='label "class": sample 1 is -2; classes are from 0'):
        loss.check(Batch(ids, None, {"class": torch.tensor([0, -2, 0])}))


def test_every_neighbor_is_drawn_equally_often(graph):
    source = open_graph(graph, fanouts=[1], inputs=["node"], draws=400)
    nodes = source.take(np.arange(source.size)).values.reshape(2, -1)
    node = nodes[0, 0]
    neighbors, counts = np.unique(nodes[1][nodes[0] == node], return_counts=True)
    assert np.array_equal(neighbors, source.graph.neighbors.concatenate(np.array([node])))
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


def _dense_matrices(source: Neighborhoods) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix (N, N) of means over neighbors and that of means over words, (N, words)."""
    graph = source.graph
    means, words = (torch.zeros(NUM_NODES, num, dtype=torch.float64) for num in (NUM_NODES, graph.num_words))
    for node in range(NUM_NODES):
        near = graph.neighbors.concatenate(np.array([node]))
        means[node, near if len(near) else [node]] = 1 / max(1, len(near))
        words[node, graph.words.concatenate(np.array([node]))] = 1 / len(graph.words.concatenate(np.array([node])))
    return means, words


@pytest.mark.parametrize("dim", [0, 8])
@pytest.mark.parametrize("fanouts", [[3], [3, 2], [2, 2, 2]])
def test_scores_over_all_neighbors_equal_products_with_dense_matrices(graph, dim, fanouts, monkeypatch):
    monkeypatch.setattr(graphsage_module, "NEIGHBORS_AT_ONCE", 100)
    monkeypatch.setattr(full_graph, "SAMPLES_AT_ONCE", 3)
    source = open_graph(graph, fanouts=fanouts, word_dropout=0.5)
    model: Any = graphsage(source, SGD(lr=0.1), dim=dim, hidden=6, dropout=0.5).eval()
    model.sparse.hold({"words": "float64"})
    model.dense.double()
    means, words = _dense_matrices(source)
    x = words @ model.sparse.weight("words")
    for layer in model.dense.layers:
        weight = getattr(layer, "weight", None)
        if weight is None:  # in the tables
            x = x[:, : len(layer.bias)] + means @ x[:, len(layer.bias) :] + layer.bias
        else:
            own, other = weight.chunk(2, 1)
            x = x @ own.T + means @ x @ other.T + layer.bias
        x = x if layer is model.dense.layers[-1] else x.relu()
    torch.testing.assert_close(full_graph.score_nodes(model, source), x, rtol=1e-10, atol=1e-12)


def test_where_all_neighbors_are_drawn_equally_often_both_scores_agree(tmp_path):
    """A cycle: two draws of a position whose two neighbors are drawn once each have the mean over both."""
    nodes = np.arange(12)
    both = np.stack([(nodes - 1) % 12, (nodes + 1) % 12], 1)
    np.savez(tmp_path / "cycle.npz", labels=nodes % 2, adj_indptr=2 * np.arange(13), adj_indices=both.ravel())
    source = open_graph(str(tmp_path / "cycle.npz"), fanouts=[2, 2], split={"train": 0.5, "validation": 0.0})
    model: Any = graphsage(source, SGD(lr=0.1), hidden=6).eval()
    near = nodes[None]
    levels = [near]
    for _ in range(2):
        near = np.stack([(near - 1) % 12, (near + 1) % 12], 1).reshape(-1, 12)
        levels.append(near)
    batch = to_batch(source.batch_of(np.concatenate(levels), nodes))
    torch.testing.assert_close(model(batch), full_graph.score_nodes(model, source))


def test_tables_with_the_weights_of_the_first_layer_equal_its_formula(graph):
    source = open_graph(graph, fanouts=[3, 2], inputs=["words", "node"])
    model: Any = graphsage(source, SGD(lr=0.1), hidden=6)
    batch = to_batch(source.take(np.arange(16)))
    vectors = model.sparse(batch)
    x = [vectors[f"words{position}"] + vectors[f"node{position}"] for position in range(source.num_positions)]
    first, second = model.dense.layers
    inner = [
        (x[node][:, :6] + sum(x[child][:, 6:] for child in children) / len(children) + first.bias).relu()
        for node, children in ((0, (1, 2, 3)), (1, (4, 5)), (2, (6, 7)), (3, (8, 9)))
    ]
    torch.testing.assert_close(model(batch), second(torch.cat([inner[0], sum(inner[1:]) / 3], 1)))


def test_numeric_features_are_inputs_with_and_without_tables(graph, tmp_path):
    """Numeric features that count words by one are the same model as tables of these words."""
    words = open_graph(graph, fanouts=[3, 2])
    numbers = _dense_matrices(words)[1].numpy()
    np.savez(tmp_path / "numbers.npz", **dict(np.load(graph)), features=numbers)
    by_words = open_graph(str(tmp_path / "numbers.npz"), fanouts=[3, 2], inputs=["words"])
    by_numbers = open_graph(str(tmp_path / "numbers.npz"), fanouts=[3, 2], inputs=["features"])
    assert open_graph(str(tmp_path / "numbers.npz")).inputs == ("words", "features")
    one: Any = graphsage(by_words, SGD(lr=0.1), hidden=6)
    other: Any = graphsage(by_numbers, None, hidden=6)
    with torch.no_grad():
        other.dense.numbers.weight.copy_(one.sparse.weight("words").T)
        other.dense.layers.load_state_dict(one.dense.layers.state_dict())
    batches = [to_batch(source.take(np.arange(20))) for source in (by_words, by_numbers)]
    assert batches[1].features.features == () and batches[1].batch_size == 20
    torch.testing.assert_close(other(batches[1]), one(batches[0]))
    torch.testing.assert_close(full_graph.score_nodes(other, by_numbers), full_graph.score_nodes(one, by_words))
    with pytest.raises(UserError, match=r"model.dim=8, but the source has no ids"):
        graphsage(by_numbers, None, hidden=6, dim=8)
    with pytest.raises(UserError, match=r"section \[tables\] is missing; the model has tables of words"):
        graphsage(by_words, None, hidden=6)


def test_dropped_words_are_a_share_of_each_position_and_of_training_only(graph):
    source, whole = (open_graph(graph, draws=20, word_dropout=share) for share in (0.3, 0.0))
    indices = np.arange(source.size)
    some, every = source.take(indices), whole.take(indices)
    assert np.array_equal(every.labels["class"], some.labels["class"]) and (some.lengths <= every.lengths).all()
    kept = some.lengths.sum(1) / every.lengths.sum(1)
    assert abs(kept - 0.7).max() < 0.03 and abs(kept.mean() - 0.7) < 0.005
    ends, starts = some.lengths.ravel().cumsum(), every.lengths.ravel().cumsum()
    bags = zip(np.split(some.values, ends[:-1]), np.split(every.values, starts[:-1]), strict=True)
    assert all(set(few) <= set(many) for few, many in list(bags)[:2000])
    part = source.take(indices[40:60])
    assert np.array_equal(part.lengths, some.lengths[:, 40:60])
    assert np.array_equal(source.test().take(indices[:9]).values, whole.test().take(indices[:9]).values)
    with pytest.raises(UserError, match=r"data.word_dropout=1.0; wanted a share of the words"):
        open_graph(graph, word_dropout=1.0)


def test_parts_of_the_largest_component(tmp_path):
    """Two paths, of 30 and 40 nodes: the parts have nodes of the second only."""
    edges = [(a, a + 1) for a in range(69) if a != 29]
    starts = np.searchsorted([a for a, _ in edges], np.arange(71))
    np.savez(
        tmp_path / "paths.npz",
        labels=np.arange(70) % 2,
        adj_indptr=starts,
        adj_indices=[b for _, b in edges],
    )
    source = open_graph(str(tmp_path / "paths.npz"), split={"train": 5, "validation": 5, "largest_component": True})
    parts = [part.nodes for part in (source, source.evaluation(), source.test())]
    assert [len(part) for part in parts] == [10, 10, 20]
    assert sorted(np.concatenate(parts)) == list(range(30, 70))
    with pytest.raises(UserError, match="data.split"):
        open_graph(str(tmp_path / "paths.npz"), split={"component": True})


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
    assert "Accuracy, all neighbors" in page and "normalized entropy" not in page
    assert test["accuracy_all_neighbors"] > 0.85


def _by_feature(batch: NumpyBatch, samples: int) -> list[np.ndarray]:
    """The ids of the first samples, by feature."""
    ends = batch.lengths.sum(1).cumsum()
    starts = ends - batch.lengths.sum(1)
    return [batch.values[a : a + own[:samples].sum()] for a, own in zip(starts, batch.lengths, strict=True)]


def test_a_part_of_a_batch_has_the_same_neighborhoods(graph):
    source = open_graph(graph, draws=2)
    whole, parts = source.take(np.arange(40)), [source.take(np.arange(20)), source.take(np.arange(20, 40))]
    assert np.array_equal(whole.labels["class"], np.concatenate([part.labels["class"] for part in parts]))
    assert np.array_equal(whole.lengths, np.concatenate([part.lengths for part in parts], 1))
    for first, second in zip(_by_feature(whole, 20), _by_feature(parts[0], 20), strict=True):
        assert np.array_equal(first, second)
