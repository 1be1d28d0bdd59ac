"""A predictor follows the publications of several ranks that hold different shards of the tables."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from test_checkpoint_ranks import EVALUATION_STEP, OPTIMIZERS, make_job, train_steps
from test_steps import batch, make_model, take

from shardwright.checkpoint import step_directories
from shardwright.runtime.rank_group import RankGroup
from shardwright.runtime.saving import Saver
from shardwright.serving.export import export
from shardwright.serving.predictor import Predictor

LAST = 10


def train_and_publish(world: int, root: Path, rounded: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """A checkpoint at step 3, a publication every second step; returns logits of an evaluation and the final state."""
    job = make_job(world, "rowwise_adagrad", other=True)
    changes = job.changes
    saver = Saver(RankGroup(job.mesh), root / "checkpoint", changes=changes)
    publisher = Saver(
        RankGroup(job.mesh),
        root / "published",
        keep=99,
        increments=99,
        increment_dtype=rounded,
        changes=changes,
        is_publication=True,
    )
    for step in range(LAST):
        train_steps(job, step, step + 1)
        if step == 2:
            job.save_with(saver, {})
        if step % 2:
            job.publish_with(publisher, {})
    saver.wait()
    publisher.wait()
    lo, hi = 24 * job.mesh.rank // world, 24 * (job.mesh.rank + 1) // world
    evaluated = [out.logits for out in job.evaluate([take(batch(EVALUATION_STEP), lo, hi)])]
    state = {name: value for name, value in job.state().tensors.items() if not value.is_meta}
    job.mesh.close()
    return evaluated, state


@pytest.mark.parametrize("rounded", ("", "int8"))
@pytest.mark.parametrize("stored", ("", "int8"))
@pytest.mark.parametrize("world", (2, 3))
def test_a_predictor_follows_publications_of_ranks(ranks, tmp_path, world, stored, rounded):
    answers = ranks.run(world, train_and_publish, world, tmp_path, rounded)
    evaluated, state = torch.cat([evaluated[0] for evaluated, _ in answers]), answers[0][1]
    model = make_model(OPTIMIZERS["rowwise_adagrad"], "float64")
    export(model, tmp_path / "checkpoint", tmp_path / "out", example=batch(0), stored=stored)
    with closing(Predictor(tmp_path / "out", follow=tmp_path / "published")) as predictor:
        assert predictor.served.step == 3 and (predictor.step, predictor.followed.num_applied) == (LAST, 4)
        for table, name in predictor.served.names.items():
            weight = predictor.tables.full_table(table)
            bound = (bool(stored) + bool(rounded)) * state[name].abs().max() / 254 * 1.01
            assert float((weight - state[name]).abs().max()) <= bound
        if not stored and not rounded:
            scores = predictor.scores(batch(EVALUATION_STEP))
            torch.testing.assert_close(scores, evaluated.sigmoid(), rtol=1e-12, atol=1e-12)
    publications = step_directories.list_checkpoints(tmp_path / "published")
    assert {step_directories.read_manifest(path).ranks for path in publications} == {world}
