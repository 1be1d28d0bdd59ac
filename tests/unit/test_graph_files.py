"""Graphs in OGB's form, as citation texts, with numeric features, and generated ones."""

import gzip
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from graphs import NUM_NODES, write_npz

from shardwright import config
from shardwright.data.graphs.communities import open_synthetic_graph
from shardwright.data.graphs.graph import Graph
from shardwright.data.graphs.graph_files import graph_digest, read_graph
from shardwright.data.graphs.neighborhoods import open_graph
from shardwright.errors import UserError
from shardwright.runtime.run import train as training

CONTENT = "p9\t0\t1\t1\tnets\np3\t1\t0\t0\tagents\np5\t0\t0\t1\tnets\np7\t1\t1\t0\tagents\n"
CITES = "p9\tp3\np5\tp9\nunknown\tp3\np7\tp7\np7\tp5\n"


def neighbors(graph: Graph) -> list[list[int]]:
    return [graph.neighbors.concatenate(np.array([node])).tolist() for node in range(graph.num_nodes)]


def write_ogb(folder: Path, *, parts: bool = True) -> np.ndarray:
    """The graph of write_npz as an OGB folder, with numeric features that it returns."""
    arrays = np.load(write_npz(folder.with_suffix(".npz")))
    raw, split = folder / "raw", folder / "split" / "time"
    raw.mkdir(parents=True)
    sources = np.repeat(np.arange(NUM_NODES), np.diff(arrays["adj_indptr"]))
    features = np.random.default_rng(1).normal(size=(NUM_NODES, 4)) + 2 * np.eye(4)[arrays["labels"]]

    def write(path: Path, rows: np.ndarray, form: str = "%d") -> None:
        with gzip.open(path, "wt") as file:
            np.savetxt(file, rows, form, delimiter=",")

    write(raw / "edge.csv.gz", np.stack([sources, arrays["adj_indices"]], 1))
    write(raw / "node-label.csv.gz", arrays["labels"][:, None])
    write(raw / "node-feat.csv.gz", features, "%.6f")
    write(raw / "num-node-list.csv.gz", np.array([[NUM_NODES]]))
    if parts:
        split.mkdir(parents=True)
        for name, lo, hi in (("train", 0, 120), ("valid", 120, 170), ("test", 170, NUM_NODES)):
            write(split / f"{name}.csv.gz", np.arange(lo, hi)[:, None])
    return features


def test_a_folder_in_ogbs_form_has_its_parts_and_numeric_features(tmp_path):
    features = write_ogb(tmp_path / "ogb")
    graph = read_graph(str(tmp_path / "ogb"))
    assert neighbors(graph) == neighbors(read_graph(str(tmp_path / "ogb.npz"))) and graph.numbers is not None
    np.testing.assert_allclose(graph.numbers, features, atol=1e-6)
    source = open_graph(str(tmp_path / "ogb"), fanouts=[3, 2])
    assert source.inputs == ("features",) and source.tables == {} and source.num_numbers == 4
    parts = [part.nodes.tolist() for part in (source, source.evaluation(), source.test())]
    assert parts == [[*range(120)], [*range(120, 170)], [*range(170, NUM_NODES)]]
    batch = pickle.loads(pickle.dumps(source)).take(np.arange(7))
    nodes_PB = source.draw_positions(source.nodes[:7], np.arange(7))
    assert batch.dense is not None and batch.dense.shape == (7, 10 * 4)
    np.testing.assert_array_equal(batch.dense.reshape(7, 10, 4), graph.numbers[nodes_PB.T])
    own = open_graph(str(tmp_path / "ogb"), split={"train": 0.5, "validation": 0.2})
    assert [part.size for part in (own.evaluation(), own.test())] == [48, 72]


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("raw/num-node-list.csv.gz", "9\n", "240 labels of 9 nodes, by num-node-list"),
        ("raw/num-node-list.csv.gz", "9\n231\n", "num-node-list has 2 graphs; wanted one graph"),
        ("raw/node-label.csv.gz", "1,0\n0,1\n", "node-label has 2 columns; wanted one, the class of each node"),
        ("raw/node-feat.csv.gz", "1,2\n3,a\n", "not lines of numbers"),
        ("raw/node-feat.csv.gz", "1,2\n3,4\n", r"numeric features are \(2, 2\); wanted a row for each of 240 nodes"),
        ("split/time/test.csv.gz", "7\n240\n", "the test part has a node: that of node 240; there are labels for 240"),
    ],
)
def test_mistakes_in_an_ogb_folder_are_named(tmp_path, path, text, message):
    write_ogb(tmp_path / "ogb")
    (tmp_path / "ogb" / path).write_bytes(gzip.compress(text.encode()))
    with pytest.raises(UserError, match=message):
        read_graph(str(tmp_path / "ogb"))


def test_only_a_graphs_own_files_count_as_its_contents(tmp_path):
    write_ogb(tmp_path / "ogb")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "small.content").write_text(CONTENT)
    (tmp_path / "texts" / "small.cites").write_text(CITES)
    for folder, changed in (("ogb", "split/time/test.csv.gz"), ("texts", "small.cites")):
        path = tmp_path / folder
        before = graph_digest(str(path))
        (path / "runs").mkdir()
        (path / "runs" / "metrics.jsonl").write_text("{}")
        assert graph_digest(str(path)) == before
        (path / changed).write_bytes((path / changed).read_bytes() + b"\n")
        assert graph_digest(str(path)) != before


def test_two_splits_of_an_ogb_folder_are_refused(tmp_path):
    write_ogb(tmp_path / "ogb")
    (tmp_path / "ogb" / "split" / "random").mkdir()
    with pytest.raises(UserError, match="wanted one folder with train, valid and test; it has random, time"):
        read_graph(str(tmp_path / "ogb"))


def test_a_model_without_tables_trains_on_numeric_features(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_ogb(tmp_path / "ogb")
    small = ("data.fanouts=[4, 3]", "model.hidden=16", "train.steps=60", "train.batch_size=32", "dense.lr=0.01")
    run = training.train(config.load("graphsage-features", (*small, "data=ogb", "run.name=mine"))).path
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (test,) = [line for line in lines if line["kind"] == "test"]
    assert test["accuracy"] > 0.85 and test["accuracy_all_neighbors"] > 0.85


def test_numeric_features_of_a_folder_are_text_or_an_array(tmp_path):
    write_npz(tmp_path / "graph.npz")
    arrays, numbers = np.load(tmp_path / "graph.npz"), np.random.default_rng(0).normal(size=(NUM_NODES, 3))
    folder = tmp_path / "folder"
    folder.mkdir()
    sources = np.repeat(np.arange(NUM_NODES), np.diff(arrays["adj_indptr"]))
    np.savetxt(folder / "edges.csv", np.stack([sources, arrays["adj_indices"]], 1), "%d", delimiter=",")
    np.savetxt(folder / "labels.csv", arrays["labels"], "%d")
    np.save(folder / "features.npy", numbers)
    by_array = read_graph(str(folder)).numbers
    (folder / "features.npy").unlink()
    np.savetxt(folder / "features.tsv", numbers, "%.9f", delimiter="\t")
    by_text = read_graph(str(folder)).numbers
    assert by_array is not None and by_text is not None and by_array.dtype == np.float32
    np.testing.assert_allclose(by_array, numbers, atol=1e-6)
    np.testing.assert_allclose(by_text, numbers, atol=1e-6)
    (folder / "features.tsv").unlink()
    np.save(folder / "features.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(UserError, match=r"features.npy: not a plain NumPy array"):
        read_graph(str(folder))


def test_citation_texts_have_names_for_numbers(tmp_path):
    (tmp_path / "small.content").write_text(CONTENT)
    (tmp_path / "small.cites").write_text(CITES)
    graph = read_graph(str(tmp_path))
    assert graph.labels.tolist() == [1, 0, 1, 0] and graph.numbers is None
    assert neighbors(graph) == [[1, 2], [0], [0, 3], [2]]
    assert [graph.words.concatenate(np.array([n])).tolist() for n in range(4)] == [[1, 2], [0], [2], [0, 1]]
    (tmp_path / "small.content").write_text(CONTENT.replace("p5\t0\t0", "p5\t0.5\t0"))
    weighted = read_graph(str(tmp_path))
    assert weighted.numbers is not None and weighted.numbers[2].tolist() == [0.5, 0, 1] and weighted.num_words == 0


@pytest.mark.parametrize(
    ("content", "cites", "message"),
    [
        (CONTENT + "p1\t0\tnets\n", CITES, r"lines of \[3, 5\] columns"),
        (CONTENT + "p9\t0\t0\t0\tnets\n", CITES, "5 lines of 4 papers; wanted one line of each"),
        (CONTENT.replace("\t1\t1\tnets", "\t1\tx\tnets"), CITES, "a feature is not a number"),
        (CONTENT, CITES + "p9\n", "citation 6 has 1 papers; wanted two"),
    ],
)
def test_mistakes_in_citation_texts_are_named(tmp_path, content, cites, message):
    (tmp_path / "small.content").write_text(content)
    (tmp_path / "small.cites").write_text(cites)
    with pytest.raises(UserError, match=message):
        read_graph(str(tmp_path))


def test_pickles_are_refused(tmp_path):
    (tmp_path / "ind.cora.x").write_bytes(pickle.dumps([1]))
    with pytest.raises(UserError, match="ind.cora.x is a pickle, which could run code when read; use the texts"):
        read_graph(str(tmp_path))


def test_a_generated_graph_has_its_degrees_and_communities():
    graph = open_synthetic_graph(nodes=20_000, degree=10, classes=5, homophily=0.7).graph
    degrees = np.diff(graph.neighbors.starts)
    assert 8 < degrees.mean() <= 10 and degrees.max() > 30 * degrees.mean()
    tail = np.sort(degrees)[-1000:]  # Hill's estimate of the exponent of the power law
    assert 2.1 < 1 + 1 / np.log(tail / tail[0]).mean() < 2.9
    owners = np.repeat(np.arange(graph.num_nodes), degrees)
    same = (graph.labels[owners] == graph.labels[graph.neighbors.values]).mean()
    assert abs(same - (0.7 + 0.3 / 5)) < 0.05
    assert np.bincount(graph.labels).tolist() == [4000] * 5 and graph.num_words == 200
    again = open_synthetic_graph(nodes=20_000, degree=10, classes=5, homophily=0.7, seed=1).graph
    assert not np.array_equal(graph.labels, again.labels)


def test_a_generated_source_is_the_same_in_a_worker():
    source = open_synthetic_graph(nodes=400, classes=3, fanouts=[2], split={"train": 5, "validation": 5})
    again = pickle.loads(pickle.dumps(source))
    assert repr(again) == repr(source) and np.array_equal(
        again.take(np.arange(9)).values, source.take(np.arange(9)).values
    )
    for settings in ({"classes": 1}, {"degree": 0}, {"homophily": 1.5}):
        with pytest.raises(UserError, match=f"data.{next(iter(settings))}"):
            open_synthetic_graph(nodes=100, **settings)


def test_the_recipe_of_a_generated_graph_learns_from_neighbors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("data.nodes=2000", "data.fanouts=[6, 3]", "train.steps=60", "train.batch_size=64", "data.split.train=40")
    result = training.train(config.load("synthetic-graph", (*small, "run.name=mine")))
    assert result.evaluation["accuracy_all_neighbors"] > result.evaluation["accuracy"] > 0.5  # by chance: 0.125
