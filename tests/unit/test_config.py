import json
from pathlib import Path

import pytest

from shardwright import config
from shardwright.errors import UserError


def test_recipes_have_the_values_of_the_golden_file():
    """The values are those of the recipes when each was a separate file."""
    expected = json.loads((Path(__file__).parents[1] / "golden/recipes.json").read_text())
    assert {name: config.recipe_values(name) for name in config.recipes()} == expected


@pytest.mark.parametrize("name", config.recipes())
def test_every_recipe_survives_a_round_trip_through_a_file(name, tmp_path):
    settings = config.load(name)
    assert settings.recipe == name
    (tmp_path / "config.toml").write_text(config.dump(settings))
    assert config.load(str(tmp_path / "config.toml")) == settings


def test_overrides_are_toml_values_or_plain_strings():
    settings = config.load(
        "synthetic-dlrm", ["model.bottom=[8, 16]", "run.name=mine", "tables.lr=1e-2", "run.resume=true"]
    )
    assert settings.model.arguments["bottom"] == [8, 16]
    assert (settings.run.name, settings.run.resume) == ("mine", True)
    assert settings.tables is not None and settings.tables.arguments == {"lr": 0.01}


@pytest.mark.parametrize(
    "text, message",
    [
        ("[data]\nkind='synthetic'\n", 'key "model" is missing'),
        ("[data]\nkind='synthetic'\n[model]\n", 'key "model.kind" is missing'),
        ("data=3\n[model]\nkind='dlrm'\n", 'key "data"'),
        (
            "[data]\nkind='synthetic'\n[model]\nkind='dlrm'\n[tables]\nkin='adam'\nkind=3",
            'key "tables.kind" is 3',
        ),
        ("seed=-1\n[data]\nkind='synthetic'\n[model]\nkind='dlrm'\n", 'key "seed" is -1'),
    ],
)
def test_a_broken_recipe_names_file_and_key(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        config.load(str(path))
    assert message in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_value_is_not_a_section():
    with pytest.raises(UserError, match='"seed" is a value, not a section'):
        config.load("synthetic-dlrm", ["seed.more=1"])


@pytest.mark.parametrize("overrides", [["train.scale_rates=sqrt"], ["train.base_batch=512"]])
def test_scale_rates_and_base_batch_must_be_set_together(overrides):
    with pytest.raises(UserError, match="train.scale_rates=.* with train.base_batch=.*; to scale rates, set"):
        config.load("synthetic-dlrm", overrides)
    assert config.load("synthetic-dlrm", ["train.scale_rates=sqrt", "train.base_batch=512"]).train.base_batch == 512
