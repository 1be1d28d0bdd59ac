"""Exports, publications and scores equal the trainer's to the bit, or within the rounding error."""

import hashlib
import io
import json
import pickle  # noqa: S403  to write a pickle that must be refused
import zipfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clicks import FEATURES, batch, dlrm, ids, tables
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwright.checkpoint import step_directories
from shardwright.errors import UserError
from shardwright.jagged import Batch, select
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.loss import BinaryLoss
from shardwright.models.dlrm import DLRM
from shardwright.runtime import changed_rows
from shardwright.runtime.build import build
from shardwright.runtime.changed_rows import ChangedRows
from shardwright.runtime.job import Job
from shardwright.runtime.planning import plan_for
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.saving import Saver
from shardwright.serving.export import export
from shardwright.serving.manifest import MANIFEST_FILE, PROGRAM_FILE, TABLES_FILE
from shardwright.serving.predictor import Predictor
from shardwright.serving.request_ids import parse_id_samples
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.workload import Feature, Table

MANY_INCREMENTS = 10**6
STORED = ("", "float16", "int8")


def build_job(model: nn.Module | None = None) -> Job:
    model = model or dlrm()
    return build(model, plan_for(model, batch()), optimizer=lambda p: torch.optim.Adam(p, 0.01))


def make_publisher(job: Job, root: Path, **options) -> Saver:
    root.mkdir(exist_ok=True)
    return Saver(
        RankGroup(job.mesh),
        root,
        increments=MANY_INCREMENTS,
        is_publication=True,
        **{"keep": 100, "changes": job.changes, **options},
    )


def publish(job: Job, saver: Saver) -> None:
    job.publish_with(saver, {})
    saver.wait()


def train(job: Job, *seeds: int, size: int = 16) -> None:
    for _ in job.run([batch(size, seed=seed) for seed in seeds]):
        pass


def save_and_export(job: Job, folder: Path, stored: str = "") -> Path:
    """Save a checkpoint of the job and export it."""
    path = job.save(folder / "saved")
    export(dlrm(), path, folder / f"out{stored}", example=batch(), stored=stored)
    return folder / f"out{stored}"


def weight(job: Job, table: str) -> torch.Tensor:
    return job.model.sparse.weight(table).detach()


def max_difference(predictor: Predictor, job: Job) -> float:
    """The largest difference of a weight from the trainer's."""
    return max(float((predictor.tables.full_table(t.name) - weight(job, t.name)).abs().max()) for t in tables())


def probabilities(job: Job, batch: Batch) -> torch.Tensor:
    return next(iter(job.evaluate([batch]))).logits.sigmoid()


@pytest.mark.parametrize("stored", STORED)
def test_an_export_scores_as_the_trainer_does(tmp_path, stored):
    job = build_job()
    train(job, 0, 1, 2)
    predictor = Predictor(save_and_export(job, tmp_path, stored))
    assert predictor.step == 3
    errors = predictor.served.errors
    if not stored:
        assert max_difference(predictor, job) == 0 and torch.equal(
            predictor.scores(batch(seed=9)), probabilities(job, batch(seed=9))
        )
        return
    for table in tables():
        error = float((predictor.tables.full_table(table.name) - weight(job, table.name)).abs().max())
        assert 0 < error <= errors[table.name] * (1 + 1e-6)
    for name, tensor in job.model.state_dict().items():
        if not name.startswith("dense."):
            continue
        assert torch.equal(predictor._weights[f"model.{name}"], tensor)
    rounded_model = dlrm()
    rounded_model.load_state_dict(job.model.state_dict())
    for table in tables():
        rounded_model.sparse.weight(table.name).data.copy_(predictor.tables.full_table(table.name))
    with torch.no_grad():
        expected = rounded_model(batch(seed=9)).sigmoid()
    torch.testing.assert_close(predictor.scores(batch(seed=9)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rounding", ("", "float16", "int8"))
@pytest.mark.parametrize("stored", STORED)
def test_a_following_predictor_has_the_tables_of_the_trainer(tmp_path, stored, rounding):
    """Incremental checkpoints in between do not take changed rows away from publications."""
    job = build_job()
    train(job, 0)
    path = save_and_export(job, tmp_path, stored)
    digest_before = hashlib.sha256((path / TABLES_FILE).read_bytes()).hexdigest()
    saver = Saver(RankGroup(job.mesh), tmp_path / "checkpoint", keep=100, increments=3, changes=job.changes)
    publisher = make_publisher(job, tmp_path / "published", increment_dtype=rounding)
    with closing(Predictor(path, follow=tmp_path / "published")) as predictor:
        assert predictor.step == 1 and predictor.state()["publications"] == 0
        for step in range(2, 14):
            train(job, step, size=3)
            if step % 2 == 0:
                publish(job, publisher)
                predictor.update()
                assert predictor.step == step
                max_weight = max(float(weight(job, t.name).abs().max()) for t in tables())
                rounding_error = {"": 0.0, "float16": 2**-11, "int8": 1 / 254}
                allowed = max_weight * (rounding_error[stored] + rounding_error[rounding]) * (1 + 1e-3)
                assert max_difference(predictor, job) <= allowed
                if not stored and not rounding:
                    assert torch.equal(predictor.scores(batch(seed=99)), probabilities(job, batch(seed=99)))
            if step % 3 == 0:
                job.save_with(saver, {})
                saver.wait()
        assert predictor.state()["status"] == "ok" and predictor.state()["publications"] == 6
    publications = step_directories.list_checkpoints(tmp_path / "published")
    manifests = [step_directories.read_manifest(path) for path in publications]
    assert [manifest.base for manifest in manifests] == ["", *(f"step-{step:08d}" for step in range(2, 12, 2))]
    names = {name for manifest in manifests for name in manifest.tensors}
    assert all("optimizer" not in name and not name.startswith("tables.") for name in names)
    changed_tensors = [entry for name, entry in manifests[1].tensors.items() if "sparse" in name]
    num_rows = sum(piece.values.shape[0] for entry in changed_tensors for piece in entry.pieces)
    assert 0 < num_rows < sum(table.rows for table in tables()), "only changed rows"
    assert hashlib.sha256((path / TABLES_FILE).read_bytes()).hexdigest() == digest_before, "the export is unchanged"
    restored_job = build_job()
    restored_job.load(step_directories.list_checkpoints(tmp_path / "checkpoint")[-1])
    assert restored_job.step == 12


def test_a_newer_export_of_the_run_applies_only_later_publications(tmp_path):
    job = build_job()
    saver = Saver(RankGroup(job.mesh), tmp_path / "checkpoint", changes=job.changes)
    publisher = make_publisher(job, tmp_path / "published")
    for step in range(1, 6):
        train(job, step)
        publish(job, publisher)
        if step == 3:
            job.save_with(saver, {})
            saver.wait()
    export(dlrm(), tmp_path / "checkpoint", tmp_path / "out", example=batch())
    with closing(Predictor(tmp_path / "out", follow=tmp_path / "published")) as predictor:
        assert (predictor.step, predictor.followed.num_applied) == (5, 2) and max_difference(predictor, job) == 0


def test_missing_publications_are_an_error_until_the_next_full_one(tmp_path):
    job = build_job()
    train(job, 0)
    path = save_and_export(job, tmp_path)
    publisher = make_publisher(job, tmp_path / "published", keep=2)
    for step in range(1, 6):
        train(job, step)
        publish(job, publisher)
    assert len(step_directories.list_checkpoints(tmp_path / "published")) == 2
    with pytest.raises(UserError, match="publications between step 1 and step 5 are gone; start from a newer"):
        Predictor(path, follow=tmp_path / "published")
    new_publisher = make_publisher(job, tmp_path / "published", keep=2)
    train(job, 6)
    publish(job, new_publisher)
    with closing(Predictor(path, follow=tmp_path / "published")) as predictor:
        assert predictor.step == 7 and max_difference(predictor, job) == 0


def test_a_predictor_follows_a_run_that_restarts_from_an_older_step(tmp_path):
    """A restart from before the last publication begins a new lineage with a full publication."""
    job = build_job()
    train(job, 0)
    path, saved = save_and_export(job, tmp_path), step_directories.resolve_checkpoint(tmp_path / "saved")
    publisher = make_publisher(job, tmp_path / "published")
    with closing(Predictor(path, follow=tmp_path / "published")) as predictor:
        for step in (1, 2, 3):
            train(job, step)
            publish(job, publisher)
        predictor.update()
        assert predictor.step == 4
        restarted = build_job()
        restarted.load(saved)
        for publication in step_directories.list_checkpoints(tmp_path / "published"):
            step_directories.drop(publication)
        train(restarted, 17)
        publish(restarted, make_publisher(restarted, tmp_path / "published"))
        predictor.update()
        assert predictor.step == 2 and max_difference(predictor, restarted) == 0


def test_checkpoints_and_publications_of_another_model_are_refused(tmp_path):
    job = build_job()
    train(job, 0)
    path = save_and_export(job, tmp_path)
    with pytest.raises(UserError, match=r'"model.sparse.embedding_bags.site.weight" is missing'):
        export(dlrm(), other_checkpoint(tmp_path / "other"), tmp_path / "none", example=batch())
    assert not (tmp_path / "none").exists() and not list(tmp_path.glob(".none*"))
    other = build_job(OtherModel())
    publish(other, make_publisher(other, tmp_path / "published"))
    with pytest.raises(UserError, match="another model is published; export it"):
        Predictor(path, follow=tmp_path / "published")


def test_older_publications_do_not_undo_a_newer_export(tmp_path):
    """The restarted run has written a checkpoint, and has published nothing yet."""
    job = build_job()
    publisher = make_publisher(job, tmp_path / "published", keep=2)
    for step in (1, 2, 3):
        train(job, step)
        publish(job, publisher)
    restarted = build_job()
    restarted.load(job.save(tmp_path / "old"))
    train(restarted, 4, 5)
    saver = Saver(RankGroup(restarted.mesh), tmp_path / "checkpoint", changes=restarted.changes)
    restarted.save_with(saver, {})
    saver.wait()
    export(dlrm(), tmp_path / "checkpoint", tmp_path / "out", example=batch())
    with closing(Predictor(tmp_path / "out", follow=tmp_path / "published")) as predictor:
        assert (predictor.step, predictor.followed.num_applied) == (5, 0) and max_difference(predictor, restarted) == 0
        train(restarted, 6)
        publish(restarted, make_publisher(restarted, tmp_path / "published"))
        predictor.update()
        assert predictor.step == 6 and max_difference(predictor, restarted) == 0


def test_a_load_begins_a_new_lineage(tmp_path):
    """After a load, predictors at a step of the old lineage need a full publication."""
    job = build_job()
    first_checkpoint = job.save(tmp_path / "first")
    train(job, 0, 1, 2, 3)
    saver = Saver(RankGroup(job.mesh), tmp_path / "checkpoint", changes=job.changes)
    job.save_with(saver, {})
    saver.wait()
    publisher = make_publisher(job, tmp_path / "published")
    publish(job, publisher)
    export(dlrm(), tmp_path / "checkpoint", tmp_path / "out", example=batch())
    job.load(first_checkpoint)
    for step in (10, 11, 12, 13, 14, 15):
        train(job, step, size=2)
        if job.step in (3, 6):
            publish(job, publisher)
    step_directories.drop(step_directories.checkpoint_path(tmp_path / "published", 4))
    with closing(Predictor(tmp_path / "out", follow=tmp_path / "published")) as predictor:
        assert predictor.step == 6 and max_difference(predictor, job) == 0
    with pytest.raises(UserError, match=r"changes=job.changes"):
        Saver(RankGroup(job.mesh), tmp_path, increments=1)


def test_a_publication_with_other_shapes_changes_nothing_and_following_continues(tmp_path):
    job = build_job()
    train(job, 0)
    path = save_and_export(job, tmp_path)
    with closing(Predictor(path, follow=tmp_path)) as predictor:
        tables_before = {table.name: predictor.tables.full_table(table.name).clone() for table in tables()}
        smaller = EmbeddingBags([replace(t, rows=t.rows - 5) for t in tables()], FEATURES, RowWiseAdaGrad(lr=0.1))
        other = build_job(DLRM(smaller, 4, bottom=(16, 8), top=(16,)))
        publish(other, make_publisher(other, tmp_path))
        with pytest.raises(
            UserError, match=r'"model.sparse.embedding_bags.site.weight" has shape \(35, 8\); wanted \(40, 8\)'
        ):
            predictor.update()
        assert all(torch.equal(predictor.tables.full_table(name), table) for name, table in tables_before.items())
        step_directories.drop(step_directories.list_checkpoints(tmp_path)[-1])
        train(job, 1)
        publish(job, make_publisher(job, tmp_path))
        predictor.update()
        assert predictor.step == 2 and predictor._thread is not None and predictor._thread.is_alive()


class UnpooledModel(nn.Module):
    """A model with an unpooled feature, whose dense model sums each sample's rows."""

    def __init__(self):
        super().__init__()
        self.sparse = EmbeddingBags([Table("seen", 30, 4)], [Feature("seen", "seen", "none")], RowWiseAdaGrad(0.1))
        self.dense = SumPooling()
        self.loss = BinaryLoss()

    def forward(self, batch):
        return self.dense(batch, self.sparse(batch))


class SumPooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, batch, vectors):
        lengths = batch.features.lengths[batch.features.features.index("seen")]
        seen_ND, size = vectors["seen"], lengths.shape[0]
        samples = torch.arange(size, device=seen_ND.device).repeat_interleave(lengths, output_size=seen_ND.shape[0])
        return seen_ND.new_zeros(size, 4).index_add(0, samples, seen_ND) @ self.weight


@pytest.mark.parametrize("stored", STORED)
def test_exports_of_unpooled_features_score_as_the_model(tmp_path, stored):
    job = build_job(UnpooledModel())
    train(job, 0, 1)
    empty = batch(2)
    empty = replace(
        empty, features=replace(empty.features, values=torch.empty(0).long(), lengths=torch.zeros(3, 2).long())
    )
    export(UnpooledModel(), job.save(tmp_path / "saved"), tmp_path / "out", example=empty, stored=stored)
    predictor = Predictor(tmp_path / "out")
    for size in (1, 2, 16):
        with torch.no_grad():
            expected = job.model(batch(size, seed=9)).sigmoid()
        atol = 0.02 if stored == "int8" else 1e-3 if stored else 0
        torch.testing.assert_close(predictor.scores(batch(size, seed=9)), expected, rtol=0, atol=atol)
    original = batch(4, seed=3)
    order = ("shown", "site", "seen")
    permuted = replace(original, features=select(original.features, order))
    assert torch.equal(predictor.scores(permuted), predictor.scores(original)), "any order of features"


class AddIdCount(SumPooling):
    """Its program contains the traced number of ids as a constant, without an error from torch.export."""

    def forward(self, batch, vectors):
        return super().forward(batch, vectors) + float(len(vectors["seen"]))


def test_a_program_valid_for_one_number_of_ids_is_refused(tmp_path):
    model = UnpooledModel()
    model.dense = AddIdCount()
    path = build_job(UnpooledModel()).save(tmp_path / "saved")
    with pytest.raises(UserError, match="is valid only for the numbers of samples and ids that it was traced with"):
        export(model, path, tmp_path / "out", example=batch())
    assert not (tmp_path / "out").exists()


def test_models_whose_scores_would_change_in_serving_are_refused(tmp_path):
    job = build_job(OtherModel())
    path = job.save(tmp_path / "saved")
    branches = OtherModel()
    branches.dense = BranchOnBatchSize()
    with pytest.raises(UserError, match=r"the number of samples became a constant; write x.shape\[0\] for len\(x\)"):
        export(branches, path, tmp_path / "out", example=batch())
    branches.dense = AddNumIds()
    export(branches, path, tmp_path / "odd", example=batch())
    assert Predictor(tmp_path / "odd").served.step == 0, "sizes as values, without a branch, can be exported"
    weighted = replace(batch(), features=ids(weighted=True))
    with pytest.raises(UserError, match="pool by id weights, which requests cannot have"):
        export(OtherModel(), path, tmp_path / "out", example=weighted)
    with pytest.raises(UserError, match="mistyped: no such folder; name a run"):
        Predictor(save_and_export(build_job(), tmp_path), follow=tmp_path / "mistyped")
    with pytest.raises(UserError, match="no run is followed; "):
        Predictor(tmp_path / "out").update()


def test_verify_finds_damaged_tables(tmp_path):
    path = save_and_export(build_job(), tmp_path)
    Predictor(path, verify=True)
    data = bytearray((path / TABLES_FILE).read_bytes())
    data[-7] ^= 4
    (path / TABLES_FILE).write_bytes(data)
    with pytest.raises(UserError, match="tables.safetensors: its digest differs"):
        Predictor(path, verify=True)


class OtherModel(nn.Module):
    def __init__(self, table: str = "other"):
        super().__init__()
        self.sparse = EmbeddingBags(
            [Table(table, 100, 4)], [Feature(table, table, "sum", ids=FEATURES[0].name)], RowWiseAdaGrad(0.1)
        )
        self.dense = AddBias()
        self.loss = BinaryLoss()

    def forward(self, batch):
        return self.dense(batch, self.sparse(batch))


class AddBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, batch, vectors):
        return vectors.pooled_BD.sum(1) + self.bias


class BranchOnBatchSize(AddBias):
    """Branches on the number of samples."""

    def forward(self, batch, vectors):
        return vectors.pooled_BD.sum(1) + (1.0 if vectors.pooled_BD.shape[0] == 3 else 0.0)


class AddNumIds(AddBias):
    """Adds the number of ids, without a branch."""

    def forward(self, batch, vectors):
        return vectors.pooled_BD.sum(1) + batch.features.values.shape[0]


class ReadsLabels(OtherModel):
    """Its dense model reads labels, which requests do not have."""

    def __init__(self):
        super().__init__()
        self.dense = AddLabels()


class AddLabels(AddBias):
    def forward(self, batch, vectors):
        return vectors.pooled_BD.sum(1) + batch.labels["click"]


def other_checkpoint(path: Path) -> Path:
    return build_job(OtherModel()).save(path)


def test_export_errors_name_the_cause(tmp_path):
    job = build_job()
    path = job.save(tmp_path / "saved")
    with pytest.raises(UserError, match='tables="fp8"; allowed: float16, int8'):
        export(dlrm(), path, tmp_path / "out", example=batch(), stored="fp8")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out: exists; export to another folder"):
        export(dlrm(), path, tmp_path / "out", example=batch())
    with pytest.raises(UserError, match="Linear has no child `sparse`"):
        export(nn.Linear(2, 2), path, tmp_path / "new", example=batch())
    reads_labels = build_job(ReadsLabels())
    with pytest.raises(UserError, match="dense model AddLabels cannot be exported by torch.export: 'click'"):
        export(ReadsLabels(), reads_labels.save(tmp_path / "curious"), tmp_path / "new", example=batch())
    assert not list(tmp_path.glob("*new*"))


class PrintOnUnpickle:
    def __reduce__(self):
        return print, ("unpickled",)


def test_damaged_programs_and_pickles_are_refused(tmp_path, capsys):
    path = save_and_export(build_job(), tmp_path)
    with pytest.raises(UserError, match="no exported model; create it with"):
        Predictor(tmp_path)
    program = (path / PROGRAM_FILE).read_bytes()
    (path / PROGRAM_FILE).write_bytes(program[:-9] + b"x" + program[-8:])
    with pytest.raises(UserError, match=r"dense.pt2: differs from what was written"):
        Predictor(path)
    pickled = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(program)) as archive, zipfile.ZipFile(pickled, "w") as target:
        for name in archive.namelist():
            target.writestr(name, pickle.dumps(PrintOnUnpickle()) if name.endswith(".pt") else archive.read(name))
    (path / PROGRAM_FILE).write_bytes(pickled.getvalue())
    served = json.loads((path / MANIFEST_FILE).read_text())
    served["digests"][PROGRAM_FILE] = hashlib.sha256(pickled.getvalue()).hexdigest()
    (path / MANIFEST_FILE).write_text(json.dumps(served))
    with pytest.raises(UserError, match="has pickled parts, which are not read"):
        Predictor(path)
    assert "unpickled" not in capsys.readouterr().out
    (path / MANIFEST_FILE).write_text(json.dumps({**served, "version": 9}))
    with pytest.raises(UserError, match="version 9; this Shardwright reads version 1: export again"):
        Predictor(path)


@pytest.mark.parametrize("stored", STORED)
def test_samples_are_dicts_of_ids_by_feature_name(tmp_path, stored):
    job = build_job()
    predictor = Predictor(save_and_export(job, tmp_path, stored))
    features = batch().features
    samples = [
        {"ids": {name: bag[i] for name, bag in bags(batch()).items()}, "numbers": batch().dense[i].tolist()}
        for i in range(features.batch_size)
    ]
    step, scores = predictor.answer(samples)
    assert step == 0 and scores == predictor.scores(batch()).tolist()
    rows = next(t.rows for t in tables() if t.name == FEATURES[0].table)
    with pytest.raises(UserError, match=f"id {rows} is outside its {rows} rows"):
        predictor.answer([{"ids": {features.features[0]: rows}}])


def bags(batch: Batch) -> dict[str, list[list[int]]]:
    from shardwright.jagged import to_lists

    return to_lists(batch.features)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"id": {}}, 'sample 0: unknown key "id"; did you mean "ids"'),
        ({"ids": [1]}, '"ids" is [1]; wanted ids by feature'),
        ({"ids": {"sit": 1}}, 'unknown feature "sit"; did you mean "site"'),
        ({"ids": {"site": -1}}, 'feature "site" has -1; wanted ids, whole numbers from 0'),
        ({"ids": {"site": 2**63}}, "wanted ids, whole numbers from 0"),
        ({"ids": {"site": True}}, 'feature "site" has True'),
        ({"ids": {"site": "3"}}, "feature \"site\" has '3'"),
        ({"numbers": [1]}, '"numbers" is [1]; wanted a list of 2'),
        ({"numbers": [1, float("nan")]}, '"numbers" has nan; wanted finite numbers'),
        ({"numbers": [1, "2"]}, "\"numbers\" has '2'; wanted finite numbers"),
    ],
)
def test_errors_in_samples_name_the_wrong_value(sample, message):
    with pytest.raises(UserError) as error:
        parse_id_samples(("site", "tags"), 2, [sample])
    assert message in str(error.value)


@settings(max_examples=40)
@given(
    st.lists(
        st.one_of(st.sampled_from(["first", "second"]), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
        max_size=12,
    )
)
def test_each_saver_gets_all_rows_changed_since_its_last_write(events):
    """An event is a list of updated rows, or the name of a saver that writes the rows changed for it."""
    job = build_job()
    changed_rows.track_changes(job.model)
    changes = ChangedRows()
    savers = {
        name: Saver(RankGroup(job.mesh), Path(name), increments=1, changes=changes) for name in ("first", "second")
    }
    expected = {name: set() for name in savers}
    for saver in savers.values():
        with changes.select_rows_for(saver, job.model):
            pass
    for event in events:
        row_mask = next(iter(changed_rows.changed_row_masks(job.model)))
        if isinstance(event, list):
            row_mask[event] = True
            for rows in expected.values():
                rows.update(event)
            continue
        with changes.select_rows_for(savers[event], job.model):
            assert (
                set(next(iter(changed_rows.changed_row_masks(job.model))).nonzero().flatten().tolist())
                == expected[event]
            )
        expected[event] = set()
