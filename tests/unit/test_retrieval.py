"""Recall@k and NDCG@k compared with a brute-force reference; runs and exports of the two-tower recipe."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rated_items import RatedItems, make_model
from safetensors.torch import load_file

from shardwright import config
from shardwright.data.loading.loader import Loader, to_batch
from shardwright.data.sources.source import Subset
from shardwright.errors import UserError
from shardwright.report import render
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_for
from shardwright.runtime.rank_group import ONE_RANK
from shardwright.runtime.run import retrieval
from shardwright.runtime.run.retrieval import RetrievalMeter, rank_positives, ranking_metrics
from shardwright.runtime.run.train import train
from shardwright.serving.export import export, export_run
from shardwright.serving.predictor import Predictor
from shardwright.spec.workload import Growth


def plain_metrics(vectors: dict, items: list[int], positives: dict, excluded: dict) -> dict[str, float]:
    """Metrics from a sorted list of candidates of each user; of equal scores, the item with the lower id is first."""
    recalls, gains = {10: [], 100: []}, {10: [], 100: []}
    for user, held_out in positives.items():
        candidates = [item for item in items if item not in excluded.get(user, ())]
        relevant = held_out - excluded.get(user, set())
        if not relevant:
            continue
        scores = {item: float(vectors["user"][user] @ vectors["item"][item]) for item in candidates}
        ranked = sorted(candidates, key=lambda item: (-scores[item], item))
        for k in (10, 100):
            hits = [place for place, item in enumerate(ranked[:k]) if item in relevant]
            recalls[k].append(len(hits) / len(relevant))
            best = sum(1 / np.log2(place + 2) for place in range(min(k, len(relevant))))
            gains[k].append(sum(1 / np.log2(place + 2) for place in hits) / best)
    return {f"recall@{k}": float(np.mean(recalls[k])) for k in recalls} | {
        f"ndcg@{k}": float(np.mean(gains[k])) for k in gains
    }


@pytest.mark.parametrize("scores_at_once", [1, 100, 1 << 24])
def test_places_and_metrics_equal_a_brute_force_sort(monkeypatch, scores_at_once):
    """Vectors of small whole numbers: many scores are equal, and exact."""
    monkeypatch.setattr(retrieval, "SCORES_AT_ONCE", scores_at_once)
    draw = np.random.default_rng(0)
    users, items = draw.integers(-1, 2, (9, 3)), draw.integers(-1, 2, (50, 3))
    pairs = draw.permutation(9 * 50)[:120]
    positives, excluded = (np.stack(np.divmod(np.sort(keys), 50)) for keys in (pairs[:60], pairs[60:]))
    places = rank_positives(*(torch.from_numpy(x).float() for x in (users, items)), positives, excluded, ONE_RANK)
    sets = [{user: {*p[1][p[0] == user].tolist()} for user in range(9)} for p in (positives, excluded)]
    expected = plain_metrics({"user": users, "item": items}, [*range(50)], *sets)
    assert ranking_metrics(positives[0], places) == pytest.approx(expected, abs=1e-12)
    assert len(np.unique(users @ items.T)) < 10


def make_job(source: RatedItems, **softmax):
    model = make_model(source=source, **softmax)
    return build(model, plan_for(model, example(source)), optimizer=lambda p: torch.optim.Adam(p, 0.01))


def example(source: RatedItems, size: int = 64):
    batch = to_batch(source.take(np.arange(size)))
    return replace(batch, dense=batch.dense.double())


def read_pairs(source: RatedItems) -> dict[int, dict[int, int]]:
    """By known user, the items of its positives, each with its first sample."""
    columns, pairs = source._columns(), {}
    weights = columns["weights"] if source.weighted else np.ones(source.size)
    rows = zip(columns["users"], columns["items"], columns["labels"] * weights, strict=True)
    for sample, (user, item, label) in enumerate(rows):
        if label > 0 and user > 1 and item > 1:
            pairs.setdefault(int(user), {}).setdefault(int(item), sample)
    return pairs


@pytest.mark.parametrize("weighted", [False, True])
def test_a_run_is_evaluated_on_all_items_without_positives_of_training(weighted, monkeypatch):
    monkeypatch.setattr(retrieval, "SAMPLES_AT_ONCE", 300)
    source = RatedItems(size=700, weighted=weighted)
    held_out = source.evaluation()
    job = make_job(source)
    with Loader(source, batch_size=64) as loader:
        for _ in job.run(loader):
            pass
    values = RetrievalMeter(job, source, 64).scores(held_out)

    def vector(part: RatedItems, sample: int, side: int) -> np.ndarray:
        batch = replace(to_batch(part.take(np.array([sample]))), weights=None)
        return next(iter(job.evaluate([batch]))).logits[0, side].numpy()

    firsts: dict[int, tuple[RatedItems, int]] = {}
    for part in (source, held_out):
        for sample, item in enumerate(part._columns()["items"].tolist()):
            firsts.setdefault(item, (part, sample))
    items = sorted(item for item in firsts if item > 1)
    positives, excluded = read_pairs(held_out), {user: {*own} for user, own in read_pairs(source).items()}
    vectors = {
        "item": {item: vector(*firsts[item], 1) for item in items},
        "user": {user: vector(held_out, min(own.values()), 0) for user, own in positives.items()},
    }
    expected = plain_metrics(vectors, items, {user: {*own} for user, own in positives.items()}, excluded)
    assert values == pytest.approx(expected, abs=1e-9)


def test_no_metrics_without_positives_items_or_an_end():
    source = RatedItems(size=200)
    job = make_job(source)
    meter = RetrievalMeter(job, source, 64)
    assert meter.scores(RatedItems(size=50, positives=0.0)) == {}
    assert meter.scores(source) == {}  # all are positives of training
    assert RetrievalMeter(job, OnlyUnknown(size=200), 64).scores(OnlyUnknown(size=50)) == {}
    endless = RatedItems(size=200)
    object.__setattr__(endless, "size", None)
    assert RetrievalMeter(job, endless, 64).scores(source) == {}


class OnlyUnknown(RatedItems):
    """No item has an id of its own."""

    def take(self, indices: np.ndarray):
        batch = super().take(indices)
        batch.values[len(indices) : 2 * len(indices)] = 1
        return batch


def test_questions_are_read_once(monkeypatch):
    source = RatedItems(size=200)
    meter, num_reads = RetrievalMeter(make_job(source), source, 64), []
    monkeypatch.setattr(retrieval, "read_questions", lambda *_: num_reads.append(1))
    held_out = source.evaluation()
    for part in (held_out, held_out, Subset(held_out, 0, 50)):
        meter.scores(part)
    assert len(num_reads) == 2


def write_movielens(folder: Path) -> None:
    """40 users in 4 kinds rate items of their kind as 5 and others as 1."""
    draw, lines = np.random.default_rng(0), ["userId,movieId,rating,timestamp"]
    folder.mkdir()
    for number in draw.permutation(40 * 60):
        user, item = divmod(int(number), 60)
        if draw.random() < 0.5:
            lines.append(f"{user},{item + 100},{5 if user % 4 == item % 4 else 1},{len(lines)}")
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n")
    movies = [f"{item + 100},Title,Kind{item % 2}" for item in range(60)]
    (folder / "movies.csv").write_text("\n".join(["movieId,title,genres", *movies]) + "\n")


SETTINGS = (
    'model.user=["userId"]',
    'model.item=["movieId", "genres"]',
    "train.batch_size=64",
    "train.epochs=20",
    "train.eval_every=100",
    "tables.lr=0.2",
)


FORM = ("model.mlp.norm=batch", "model.mlp.dropout=0.1", "model.mlp.activation=silu")


@pytest.fixture(scope="module", params=[(), FORM], ids=["plain", "form"])
def run(request, tmp_path_factory):
    """A run of the recipe on a small log, its folder, and its settings."""
    folder = tmp_path_factory.mktemp("towers")
    write_movielens(folder / "ml")
    overrides = [f"data={folder / 'ml'}", f"data.cache={folder / 'cache'}", f"run.directory={folder / 'runs'}"]
    settings = config.load("movielens-two-tower", [*overrides, *SETTINGS, *request.param])
    return train(settings), folder, settings


def test_the_recipe_learns_and_its_metrics_are_shown(run):
    result = run[0]
    lines = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert len(evaluations) > 2 and all(0 < line["loss"] < 10 for line in evaluations)
    random_recall = 10 / (60 * 0.57)  # about half of a user's items are excluded
    assert result.evaluation["recall@10"] > 2 * random_recall and result.evaluation["ndcg@10"] > 0.5
    page = render(result.path).read_text()
    assert "Recall@100" in page and "NDCG@10" in page and "Not measured in this run: normalized" not in page
    events = b"".join(path.read_bytes() for path in (result.path / "tensorboard").iterdir())
    assert b"eval/recall@10" in events and b"eval/ndcg@100" in events


def test_an_export_has_the_vectors_of_training_to_the_bit(run, tmp_path):
    result, folder, settings = run
    export_run(result.path, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "items.safetensors")
    with closing(Predictor(tmp_path / "out")) as predictor:
        source = retrieval_source(settings)
        model = build_trained(settings, source, result.path)
        batch = to_batch(source.take(np.arange(64)))
        expected = next(iter(model.evaluate([batch]))).logits
        assert torch.equal(predictor.scores(batch), expected) and expected.shape == (64, 2, 32)
        items = batch.features.values[64:128]
        places = torch.searchsorted(stored["ids"][:, 0].contiguous(), items)
        assert torch.equal(stored["ids"][places, 0], items)
        torch.testing.assert_close(stored["vectors"][places], expected[:, 1], rtol=0, atol=1e-6)
        (own,) = predictor.answer([{"movieId": "107", "genres": ["Kind1"]}])[1]
        row = int(predictor.read([{"movieId": "107"}]).features.values[1])
        torch.testing.assert_close(torch.tensor(own[1]), stored["vectors"][stored["ids"][:, 0] == row][0])
        assert len(stored["ids"]) == 60 == len(stored["ids"].unique())
    (tmp_path / "out" / "items.safetensors").write_bytes(b"other")
    with pytest.raises(UserError, match="items.safetensors: differs from what was written"):
        Predictor(tmp_path / "out")
    with (folder / "ml" / "ratings.csv").open("a") as file:
        file.write("77,777,5,99999\n" * 40)
    with pytest.raises(UserError, match="the data have changed since this run"):
        export_run(result.path, tmp_path / "changed")
    assert not (tmp_path / "changed").exists()


def retrieval_source(settings: config.Settings):
    from shardwright.runtime.run import recipe

    return recipe.make_source(settings)


def build_trained(settings: config.Settings, source, run: Path):
    from shardwright.checkpoint.step_directories import resolve_checkpoint
    from shardwright.runtime.run import recipe

    model = recipe.make_model(settings, source)
    plan = plan_for(model, to_batch(source.take(np.arange(64))))
    job = build(model, plan, optimizer=recipe.make_dense_optimizer(settings))
    job.load(resolve_checkpoint(run))
    return job


def test_an_export_without_data_has_no_items(tmp_path):
    source = RatedItems(size=200)
    model = make_model(source=source, dtype="float32")
    batch = to_batch(source.take(np.arange(16)))
    job = build(model, plan_for(model, batch), optimizer=lambda p: torch.optim.Adam(p, 0.01))
    path = job.save(tmp_path / "saved")
    export(make_model(dtype="float32"), path, tmp_path / "plain", example=batch)
    assert not (tmp_path / "plain" / "items.safetensors").exists()
    export(make_model(dtype="float32"), path, tmp_path / "items", example=batch, data=source)
    stored = load_file(tmp_path / "items" / "items.safetensors")
    assert stored["ids"][:, 0].tolist() == sorted({*stored["ids"][:, 0].tolist()}) and int(stored["ids"].min()) > 1
    with pytest.raises(UserError, match='the data have no item: every "item" is missing or rare'):
        export(make_model(dtype="float32"), path, tmp_path / "none", example=batch, data=OnlyUnknown(size=100))


def test_shares_of_ids_are_those_of_the_training_samples(run):
    source = retrieval_source(run[2])
    shares = source.id_shares("movieId")
    items = source.take(np.arange(source.size)).values[source.size : 2 * source.size]
    counts = np.bincount(items, minlength=len(shares))
    np.testing.assert_allclose(shares, np.maximum(counts, 1) / source.size)
    with pytest.raises(UserError, match='the table of "movieId" grows'):
        replace(source, encoding=replace(source.encoding, rows=100, growth=Growth())).id_shares("movieId")
