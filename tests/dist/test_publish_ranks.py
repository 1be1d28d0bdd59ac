"""What several ranks publish, whatever each holds of a table, is what one predictor then answers with."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from test_checkpoint_ranks import HELD, OPTIMIZERS, made, steps
from test_steps import batch, model, part

from shardwright.checkpoint import step_directories
from shardwright.runtime.saving import Saver
from shardwright.runtime.rank_group import RankGroup
from shardwright.serving.export import export
from shardwright.serving.predictor import Predictor

LAST = 10


def published(world: int, root: Path, rounded: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """A checkpoint at step 3 and then publications every second step; held logits and the state at the end."""
    job = made(world, "rowwise_adagrad", other=True)
    changes = job.changes
    saver = Saver(RankGroup(job.mesh), root / "checkpoint", changes=changes)
    told = Saver(
        RankGroup(job.mesh), root / "published", keep=99, increments=99, increment_dtype=rounded, changes=changes, is_publication=True
    )
    for step in range(LAST):
        steps(job, step, step + 1)
        if step == 2:
            job.save_with(saver, {})
        if step % 2:
            job.publish_with(told, {})
    saver.wait()
    told.wait()
    lo, hi = 24 * job.mesh.rank // world, 24 * (job.mesh.rank + 1) // world
    held = [one.logits for one in job.evaluate([part(batch(HELD), lo, hi)])]
    state = {name: value for name, value in job.state().tensors.items() if not value.is_meta}
    job.mesh.close()
    return held, state


@pytest.mark.parametrize("rounded", ("", "int8"))
@pytest.mark.parametrize("stored", ("", "int8"))
@pytest.mark.parametrize("world", (2, 3))
def test_a_predictor_follows_ranks(ranks, tmp_path, world, stored, rounded):
    answers = ranks.run(world, published, world, tmp_path, rounded)
    held, state = torch.cat([held[0] for held, _ in answers]), answers[0][1]
    mine = model(OPTIMIZERS["rowwise_adagrad"], "float64")
    export(mine, tmp_path / "checkpoint", tmp_path / "out", example=batch(0), stored=stored)
    with closing(Predictor(tmp_path / "out", follow=tmp_path / "published")) as found:
        assert found.served.step == 3 and (found.step, found.followed.num_applied) == (LAST, 4)
        for table, name in found.served.names.items():
            weight = found.tables.full_table(table)
            bound = (bool(stored) + bool(rounded)) * state[name].abs().max() / 254 * 1.01
            assert float((weight - state[name]).abs().max()) <= bound
        if not stored and not rounded:
            torch.testing.assert_close(found.scores(batch(HELD)), held.sigmoid(), rtol=1e-12, atol=1e-12)
    manifests = [step_directories.read_manifest(path) for path in step_directories.list_checkpoints(tmp_path / "published")]
    assert {one.ranks for one in manifests} == {world}
