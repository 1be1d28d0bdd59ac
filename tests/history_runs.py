"""Runs of history models on a small MovieLens directory, and a check of their exports."""

from pathlib import Path

import numpy as np
import pytest
import torch
from histories import write_movielens

import shardwright as sw
from shardwright import config
from shardwright.checkpoint.step_directories import resolve_checkpoint
from shardwright.data.loading.loader import to_batch
from shardwright.runtime.run.recipe import make_model, make_source
from shardwright.runtime.run.train import train
from shardwright.serving.export import export_run
from shardwright.serving.predictor import Predictor

RUN = ("run.directory=runs", "run.name=a", "train.batch_size=64", "train.epochs=2", "data.history=7", "model.dim=4")


def train_on_movielens(folder: Path, patch: pytest.MonkeyPatch, recipe: str, *overrides: str) -> config.Settings:
    patch.chdir(folder)
    settings = config.load(recipe, [f"data.path={write_movielens(folder / 'ml')}", *RUN, *overrides])
    train(settings)
    return settings


def check_export(settings: config.Settings, folder: Path) -> None:
    """Scores of the export equal the trained model's to the bit, for batches of several sizes."""
    source = make_source(settings)
    export_run(folder / "runs" / "a", folder / "out")
    predictor, model = Predictor(folder / "out"), make_model(settings, source)
    plan = sw.plan_for(model, to_batch(source.take(np.arange(8))))
    job = sw.build(model, plan, optimizer=lambda parameters: torch.optim.Adam(parameters, 0.001))
    job.load(resolve_checkpoint(folder / "runs" / "a"))
    held_out = source.evaluation()
    for start, size in ((0, 1), (1, 70), (71, 3)):
        batch = to_batch(held_out.take(np.arange(start, start + size)))
        (output,) = job.evaluate([batch])
        assert torch.equal(predictor.scores(batch), output.logits.sigmoid())
