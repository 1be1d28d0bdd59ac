"""A FuxiCTR model configuration as a recipe: `shardwright train fuxictr:FILE` (docs/fuxictr.md)."""

import re
from typing import Any

from shardwright.config.fuxictr.dataset import read_dataset
from shardwright.config.fuxictr.experiment import read_experiment
from shardwright.config.fuxictr.models import read_model
from shardwright.config.fuxictr.training import read_training

PREFIX = "fuxictr:"


def read_recipe(recipe: str) -> dict[str, Any]:
    """The values of a recipe, as those of a TOML file, from fuxictr:FILE or fuxictr:FILE#EXPERIMENT."""
    experiment = read_experiment(recipe.removeprefix(PREFIX))
    dataset = read_dataset(experiment.dataset, experiment.folder)
    model = read_model(experiment.model, dataset)
    training = read_training(experiment.model, dataset)
    experiment.model.check_all_used()
    return {
        "recipe": re.sub(r"[^\w.+-]", "-", experiment.name),
        "data": dataset.data | {"shuffle": training.pop("shuffle")},
        "model": model,
        **training,
    }
