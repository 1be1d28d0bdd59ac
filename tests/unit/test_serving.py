"""What is exported, published and answered equals the trainer: to the bit, or within what rounding is told to make."""

import hashlib
import io
import json
import pickle  # noqa: S403  what must not be read back
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
from shardwright.runtime import state
from shardwright.runtime.build import build
from shardwright.runtime.job import Job
from shardwright.runtime.planning import plan_for
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.saving import ChangedRows, Saver
from shardwright.serving.export import export
from shardwright.serving.manifest import MANIFEST_FILE, PROGRAM_FILE, TABLES_FILE
from shardwright.serving.predictor import Predictor
from shardwright.serving.request_ids import parse_id_samples
from shardwright.spec.optimizer import RowWiseAdaGrad
from shardwright.spec.workload import Feature, Table

MANY = 10**6
STORED = ("", "float16", "int8")


def job(model: nn.Module | None = None) -> Job:
    model = model or dlrm()
    return build(model, plan_for(model, batch()), optimizer=lambda p: torch.optim.Adam(p, 0.01))


def publisher(mine: Job, root: Path, **given) -> Saver:
    root.mkdir(exist_ok=True)
    return Saver(
        RankGroup(mine.mesh),
        root,
        increments=MANY,
        is_publication=True,
        **{"keep": 100, "changes": mine.changes, **given},
    )


def publish(mine: Job, saver: Saver) -> None:
    mine.publish_with(saver, {})
    saver.wait()


def trained(mine: Job, *seeds: int, size: int = 16) -> None:
    for _ in mine.run([batch(size, seed=seed) for seed in seeds]):
        pass


def out_of(mine: Job, where: Path, stored: str = "") -> Path:
    """Exported from a checkpoint of now."""
    path = mine.save(where / "saved")
    export(dlrm(), path, where / f"out{stored}", example=batch(), stored=stored)
    return where / f"out{stored}"


def weight(mine: Job, table: str) -> torch.Tensor:
    return mine.model.sparse.weight(table).detach()


def differs(found: Predictor, mine: Job) -> float:
    """The largest difference of a weight from the trainer's."""
    return max(float((found.tables.full_table(t.name) - weight(mine, t.name)).abs().max()) for t in tables())


def probabilities(mine: Job, of: Batch) -> torch.Tensor:
    return next(iter(mine.evaluate([of]))).logits.sigmoid()


@pytest.mark.parametrize("stored", STORED)
def test_an_export_answers_as_the_trainer_does(tmp_path, stored):
    mine = job()
    trained(mine, 0, 1, 2)
    found = Predictor(out_of(mine, tmp_path, stored))
    assert found.step == 3
    errors = found.served.errors
    if not stored:
        assert differs(found, mine) == 0 and torch.equal(
            found.scores(batch(seed=9)), probabilities(mine, batch(seed=9))
        )
        return
    for table in tables():
        error = float((found.tables.full_table(table.name) - weight(mine, table.name)).abs().max())
        assert 0 < error <= errors[table.name] * (1 + 1e-6)
    for name, tensor in mine.model.state_dict().items():
        if not name.startswith("dense."):
            continue
        assert torch.equal(found._weights[f"model.{name}"], tensor)
    rounded = dlrm()
    rounded.load_state_dict(mine.model.state_dict())
    for table in tables():
        rounded.sparse.weight(table.name).data.copy_(found.tables.full_table(table.name))
    with torch.no_grad():
        wanted = rounded(batch(seed=9)).sigmoid()
    torch.testing.assert_close(found.scores(batch(seed=9)), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rounding", ("", "float16", "int8"))
@pytest.mark.parametrize("stored", STORED)
def test_who_follows_has_the_tables_of_the_trainer(tmp_path, stored, rounding):
    """Checkpoints with increments of their own are written in between: neither takes the other's rows."""
    mine = job()
    trained(mine, 0)
    path = out_of(mine, tmp_path, stored)
    before = hashlib.sha256((path / TABLES_FILE).read_bytes()).hexdigest()
    saver = Saver(RankGroup(mine.mesh), tmp_path / "checkpoint", keep=100, increments=3, changes=mine.changes)
    told = publisher(mine, tmp_path / "published", increment_dtype=rounding)
    with closing(Predictor(path, follow=tmp_path / "published")) as found:
        assert found.step == 1 and found.state()["publications"] == 0
        for step in range(2, 14):
            trained(mine, step, size=3)
            if step % 2 == 0:
                publish(mine, told)
                found.update()
                assert found.step == step
                largest = max(float(weight(mine, t.name).abs().max()) for t in tables())
                least = {"": 0.0, "float16": 2**-11, "int8": 1 / 254}
                allowed = largest * (least[stored] + least[rounding]) * (1 + 1e-3)
                assert differs(found, mine) <= allowed
                if not stored and not rounding:
                    assert torch.equal(found.scores(batch(seed=99)), probabilities(mine, batch(seed=99)))
            if step % 3 == 0:
                mine.save_with(saver, {})
                saver.wait()
        assert found.state()["status"] == "ok" and found.state()["publications"] == 6
    manifests = [
        step_directories.read_manifest(one) for one in step_directories.list_checkpoints(tmp_path / "published")
    ]
    assert [one.base for one in manifests] == ["", *(f"step-{step:08d}" for step in range(2, 12, 2))]
    assert all("optimizer" not in name and not name.startswith("tables.") for one in manifests for name in one.tensors)
    changed = [entry for name, entry in manifests[1].tensors.items() if "sparse" in name]
    rows = sum(piece.values.shape[0] for entry in changed for piece in entry.pieces)
    assert 0 < rows < sum(table.rows for table in tables()), "only what has changed"
    assert hashlib.sha256((path / TABLES_FILE).read_bytes()).hexdigest() == before, "what is exported stays as it is"
    again = job()
    again.load(step_directories.list_checkpoints(tmp_path / "checkpoint")[-1])
    assert again.step == 12


def test_an_export_of_the_same_run_takes_only_what_came_since(tmp_path):
    mine = job()
    saver = Saver(RankGroup(mine.mesh), tmp_path / "checkpoint", changes=mine.changes)
    told = publisher(mine, tmp_path / "published")
    for step in range(1, 6):
        trained(mine, step)
        publish(mine, told)
        if step == 3:
            mine.save_with(saver, {})
            saver.wait()
    export(dlrm(), tmp_path / "checkpoint", tmp_path / "out", example=batch())
    with closing(Predictor(tmp_path / "out", follow=tmp_path / "published")) as found:
        assert (found.step, found.followed.num_applied) == (5, 2) and differs(found, mine) == 0


def test_publications_that_are_gone_are_told_and_a_whole_one_mends_it(tmp_path):
    mine = job()
    trained(mine, 0)
    path = out_of(mine, tmp_path)
    told = publisher(mine, tmp_path / "published", keep=2)
    for step in range(1, 6):
        trained(mine, step)
        publish(mine, told)
    assert len(step_directories.list_checkpoints(tmp_path / "published")) == 2
    with pytest.raises(UserError, match="publications between step 1 and step 5 are gone; start from a newer"):
        Predictor(path, follow=tmp_path / "published")
    new = publisher(mine, tmp_path / "published", keep=2)
    trained(mine, 6)
    publish(mine, new)
    with closing(Predictor(path, follow=tmp_path / "published")) as found:
        assert found.step == 7 and differs(found, mine) == 0


def test_a_run_that_went_back_is_followed_back(tmp_path):
    """Its ranks were started again from a checkpoint before the last publication: a line of its own, whole at first."""
    mine = job()
    trained(mine, 0)
    path, saved = out_of(mine, tmp_path), step_directories.resolve_checkpoint(tmp_path / "saved")
    told = publisher(mine, tmp_path / "published")
    with closing(Predictor(path, follow=tmp_path / "published")) as found:
        for step in (1, 2, 3):
            trained(mine, step)
            publish(mine, told)
        found.update()
        assert found.step == 4
        again = job()
        again.load(saved)
        for one in step_directories.list_checkpoints(tmp_path / "published"):
            step_directories.drop(one)
        trained(again, 17)
        publish(again, publisher(again, tmp_path / "published"))
        found.update()
        assert found.step == 2 and differs(found, again) == 0


def test_of_another_model_nothing_is_taken(tmp_path):
    mine = job()
    trained(mine, 0)
    path = out_of(mine, tmp_path)
    with pytest.raises(UserError, match=r'"model.sparse.embedding_bags.site.weight" is missing'):
        export(dlrm(), other_checkpoint(tmp_path / "other"), tmp_path / "none", example=batch())
    assert not (tmp_path / "none").exists() and not list(tmp_path.glob(".none*"))
    other = job(Small())
    publish(other, publisher(other, tmp_path / "published"))
    with pytest.raises(UserError, match="another model is published; export it"):
        Predictor(path, follow=tmp_path / "published")


def test_a_fresh_export_is_not_taken_back_by_what_was_published_before(tmp_path):
    """A run that was started again has a checkpoint, and has published nothing yet."""
    mine = job()
    told = publisher(mine, tmp_path / "published", keep=2)
    for step in (1, 2, 3):
        trained(mine, step)
        publish(mine, told)
    again = job()
    again.load(mine.save(tmp_path / "old"))
    trained(again, 4, 5)
    saver = Saver(RankGroup(again.mesh), tmp_path / "checkpoint", changes=again.changes)
    again.save_with(saver, {})
    saver.wait()
    export(dlrm(), tmp_path / "checkpoint", tmp_path / "out", example=batch())
    with closing(Predictor(tmp_path / "out", follow=tmp_path / "published")) as found:
        assert (found.step, found.followed.num_applied) == (5, 0) and differs(found, again) == 0
        trained(again, 6)
        publish(again, publisher(again, tmp_path / "published"))
        found.update()
        assert found.step == 6 and differs(found, again) == 0


def test_a_load_begins_a_course_of_its_own(tmp_path):
    """Who stands where the job does no longer go on from is given all."""
    mine = job()
    first = mine.save(tmp_path / "first")
    trained(mine, 0, 1, 2, 3)
    saver = Saver(RankGroup(mine.mesh), tmp_path / "checkpoint", changes=mine.changes)
    mine.save_with(saver, {})
    saver.wait()
    told = publisher(mine, tmp_path / "published")
    publish(mine, told)
    export(dlrm(), tmp_path / "checkpoint", tmp_path / "out", example=batch())
    mine.load(first)
    for step in (10, 11, 12, 13, 14, 15):
        trained(mine, step, size=2)
        if mine.step in (3, 6):
            publish(mine, told)
    step_directories.drop(step_directories.checkpoint_path(tmp_path / "published", 4))
    with closing(Predictor(tmp_path / "out", follow=tmp_path / "published")) as found:
        assert found.step == 6 and differs(found, mine) == 0
    with pytest.raises(UserError, match=r"changes=job.changes"):
        Saver(RankGroup(mine.mesh), tmp_path, increments=1)


def test_shapes_of_another_run_change_nothing_and_the_follower_goes_on(tmp_path):
    mine = job()
    trained(mine, 0)
    path = out_of(mine, tmp_path)
    with closing(Predictor(path, follow=tmp_path)) as found:
        before = {table.name: found.tables.full_table(table.name).clone() for table in tables()}
        smaller = EmbeddingBags([replace(t, rows=t.rows - 5) for t in tables()], FEATURES, RowWiseAdaGrad(lr=0.1))
        other = job(DLRM(smaller, 4, bottom=(16, 8), top=(16,)))
        publish(other, publisher(other, tmp_path))
        with pytest.raises(
            UserError, match=r'"model.sparse.embedding_bags.site.weight" has shape \(35, 8\); wanted \(40, 8\)'
        ):
            found.update()
        assert all(torch.equal(found.tables.full_table(name), table) for name, table in before.items())
        step_directories.drop(step_directories.list_checkpoints(tmp_path)[-1])
        trained(mine, 1)
        publish(mine, publisher(mine, tmp_path))
        found.update()
        assert found.step == 2 and found._thread is not None and found._thread.is_alive()


class Sequences(nn.Module):
    """Pooled by the dense part itself, from as many rows as a sample has."""

    def __init__(self):
        super().__init__()
        self.sparse = EmbeddingBags([Table("seen", 30, 4)], [Feature("seen", "seen", "none")], RowWiseAdaGrad(0.1))
        self.dense = Pooled()
        self.loss = BinaryLoss()

    def forward(self, batch):
        return self.dense(batch, self.sparse(batch))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, batch, vectors):
        lengths = batch.features.lengths[batch.features.features.index("seen")]
        seen_ND, num = vectors["seen"], lengths.shape[0]
        of = torch.arange(num, device=seen_ND.device).repeat_interleave(lengths, output_size=seen_ND.shape[0])
        return seen_ND.new_zeros(num, 4).index_add(0, of, seen_ND) @ self.weight


@pytest.mark.parametrize("stored", STORED)
def test_unpooled_features(tmp_path, stored):
    mine = job(Sequences())
    trained(mine, 0, 1)
    none = batch(2)
    none = replace(
        none, features=replace(none.features, values=torch.empty(0).long(), lengths=torch.zeros(3, 2).long())
    )
    export(Sequences(), mine.save(tmp_path / "saved"), tmp_path / "out", example=none, stored=stored)
    found = Predictor(tmp_path / "out")
    for size in (1, 2, 16):
        with torch.no_grad():
            wanted = mine.model(batch(size, seed=9)).sigmoid()
        atol = 0.02 if stored == "int8" else 1e-3 if stored else 0
        torch.testing.assert_close(found.scores(batch(size, seed=9)), wanted, rtol=0, atol=atol)
    turned = batch(4, seed=3)
    order = ("shown", "site", "seen")
    other = replace(turned, features=select(turned.features, order))
    assert torch.equal(found.scores(other), found.scores(turned)), "whatever the order of features"


class Counted(Pooled):
    """A number of ids that becomes a constant unseen."""

    def forward(self, batch, vectors):
        return super().forward(batch, vectors) + float(len(vectors["seen"]))


def test_a_program_for_one_number_of_ids_is_refused(tmp_path):
    model = Sequences()
    model.dense = Counted()
    path = job(Sequences()).save(tmp_path / "saved")
    with pytest.raises(UserError, match="is valid only for the numbers of samples and ids that it was traced with"):
        export(model, path, tmp_path / "out", example=batch())
    assert not (tmp_path / "out").exists()


def test_what_would_be_served_otherwise_is_refused(tmp_path):
    small = job(Small())
    path = small.save(tmp_path / "saved")
    branches = Small()
    branches.dense = Even()
    with pytest.raises(UserError, match=r"the number of samples became a constant; write x.shape\[0\] for len\(x\)"):
        export(branches, path, tmp_path / "out", example=batch())
    branches.dense = Odd()
    export(branches, path, tmp_path / "odd", example=batch())
    assert Predictor(tmp_path / "odd").served.step == 0, "what depends on a number without a branch is a program"
    weighted = replace(batch(), features=ids(weighted=True))
    with pytest.raises(UserError, match="pool by id weights, which requests cannot have"):
        export(Small(), path, tmp_path / "out", example=weighted)
    with pytest.raises(UserError, match="mistyped: no such folder; name a run"):
        Predictor(out_of(job(), tmp_path), follow=tmp_path / "mistyped")
    with pytest.raises(UserError, match="no run is followed; "):
        Predictor(tmp_path / "out").update()


def test_damaged_tables_are_found_where_that_is_asked_for(tmp_path):
    path = out_of(job(), tmp_path)
    Predictor(path, verify=True)
    data = bytearray((path / TABLES_FILE).read_bytes())
    data[-7] ^= 4
    (path / TABLES_FILE).write_bytes(data)
    with pytest.raises(UserError, match="tables.safetensors: its digest differs"):
        Predictor(path, verify=True)


class Small(nn.Module):
    def __init__(self, table: str = "other"):
        super().__init__()
        self.sparse = EmbeddingBags(
            [Table(table, 100, 4)], [Feature(table, table, "sum", ids=FEATURES[0].name)], RowWiseAdaGrad(0.1)
        )
        self.dense = Sum()
        self.loss = BinaryLoss()

    def forward(self, batch):
        return self.dense(batch, self.sparse(batch))


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, batch, vectors):
        return vectors.pooled_BD.sum(1) + self.bias


class Even(Sum):
    """Another number for three samples."""

    def forward(self, batch, vectors):
        return vectors.pooled_BD.sum(1) + (1.0 if vectors.pooled_BD.shape[0] == 3 else 0.0)


class Odd(Sum):
    """Another number for many ids."""

    def forward(self, batch, vectors):
        return vectors.pooled_BD.sum(1) + batch.features.values.shape[0]


class Curious(Small):
    """Its dense part reads what nobody has when it is asked."""

    def __init__(self):
        super().__init__()
        self.dense = Labels()


class Labels(Sum):
    def forward(self, batch, vectors):
        return vectors.pooled_BD.sum(1) + batch.labels["click"]


def other_checkpoint(where: Path) -> Path:
    return job(Small()).save(where)


def test_what_cannot_be_exported_is_told(tmp_path):
    mine = job()
    path = mine.save(tmp_path / "saved")
    with pytest.raises(UserError, match='tables="fp8"; allowed: float16, int8'):
        export(dlrm(), path, tmp_path / "out", example=batch(), stored="fp8")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out: exists; export to another folder"):
        export(dlrm(), path, tmp_path / "out", example=batch())
    with pytest.raises(UserError, match="Linear has no child `sparse`"):
        export(nn.Linear(2, 2), path, tmp_path / "new", example=batch())
    curious = job(Curious())
    with pytest.raises(UserError, match="dense model Labels cannot be exported by torch.export: 'click'"):
        export(Curious(), curious.save(tmp_path / "curious"), tmp_path / "new", example=batch())
    assert not list(tmp_path.glob("*new*"))


class Trap:
    def __reduce__(self):
        return print, ("unpickled",)


def test_damage_and_pickles_are_refused(tmp_path, capsys):
    path = out_of(job(), tmp_path)
    with pytest.raises(UserError, match="no exported model; make one with"):
        Predictor(tmp_path)
    whole = (path / PROGRAM_FILE).read_bytes()
    (path / PROGRAM_FILE).write_bytes(whole[:-9] + b"x" + whole[-8:])
    with pytest.raises(UserError, match=r"dense.pt2: differs from what was written"):
        Predictor(path)
    told = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as archive, zipfile.ZipFile(told, "w") as other:
        for name in archive.namelist():
            other.writestr(name, pickle.dumps(Trap()) if name.endswith(".pt") else archive.read(name))
    (path / PROGRAM_FILE).write_bytes(told.getvalue())
    served = json.loads((path / MANIFEST_FILE).read_text())
    served["digests"][PROGRAM_FILE] = hashlib.sha256(told.getvalue()).hexdigest()
    (path / MANIFEST_FILE).write_text(json.dumps(served))
    with pytest.raises(UserError, match="has pickled parts, which are not read"):
        Predictor(path)
    assert "unpickled" not in capsys.readouterr().out
    (path / MANIFEST_FILE).write_text(json.dumps({**served, "version": 9}))
    with pytest.raises(UserError, match="version 9; this Shardwright reads version 1: export again"):
        Predictor(path)


@pytest.mark.parametrize("stored", STORED)
def test_ids_are_asked_about_by_name(tmp_path, stored):
    mine = job()
    found = Predictor(out_of(mine, tmp_path, stored))
    features = batch().features
    asked = [
        {"ids": {name: bag[number] for name, bag in lists(batch()).items()}, "numbers": batch().dense[number].tolist()}
        for number in range(features.batch_size)
    ]
    step, scores = found.answer(asked)
    assert step == 0 and scores == found.scores(batch()).tolist()
    rows = next(t.rows for t in tables() if t.name == FEATURES[0].table)
    with pytest.raises(UserError, match=f"id {rows} is outside its {rows} rows"):
        found.answer([{"ids": {features.features[0]: rows}}])


def lists(of: Batch) -> dict[str, list[list[int]]]:
    from shardwright.jagged import to_lists

    return to_lists(of.features)


@pytest.mark.parametrize(
    ("sample", "told"),
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
def test_what_is_wrong_with_what_is_asked_is_told(sample, told):
    with pytest.raises(UserError) as error:
        parse_id_samples(("site", "tags"), 2, [sample])
    assert told in str(error.value)


@settings(max_examples=40)
@given(
    st.lists(
        st.one_of(st.sampled_from(["first", "second"]), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
        max_size=12,
    )
)
def test_each_saver_is_told_of_every_change_since_its_own_last_time(events):
    """An update is a list of rows; a name is a saver who asks. Nobody is told of a row that did not change."""
    mine = job()
    state.track_changes(mine.model)
    marks = next(iter(state.changed_row_masks(mine.model)))
    changes = ChangedRows()
    savers = {
        name: Saver(RankGroup(mine.mesh), Path(name), increments=1, changes=changes) for name in ("first", "second")
    }
    wanted = {name: set() for name in savers}
    for saver in savers.values():
        with changes.select_rows_for(saver, mine.model):
            pass
    for event in events:
        marks = next(iter(state.changed_row_masks(mine.model)))
        if isinstance(event, list):
            marks[event] = True
            for rows in wanted.values():
                rows.update(event)
            continue
        with changes.select_rows_for(savers[event], mine.model):
            assert set(next(iter(state.changed_row_masks(mine.model))).nonzero().flatten().tolist()) == wanted[event]
        wanted[event] = set()
