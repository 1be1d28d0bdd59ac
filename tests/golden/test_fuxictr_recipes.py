"""Snapshots of the recipes that experiments of FuxiCTR become, one for each model; `make bless` accepts changes."""

import json
from pathlib import Path

from fuxictr_files import write_configuration, write_data
from test_fuxictr import MODELS

from shardwright import config

GOLDEN = Path(__file__).with_name("fuxictr.json")


def test_every_model_has_the_recipe_of_the_golden_file(tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    write_data()
    recipes = {
        name: config.load(write_configuration({name: keys}, dataset)).model_dump(exclude_unset=True, mode="json")
        for name, (keys, dataset) in MODELS.items()
    }
    if request.config.getoption("--bless"):
        GOLDEN.write_text(json.dumps(recipes, indent=1, sort_keys=True) + "\n")
    assert recipes == json.loads(GOLDEN.read_text()), "fuxictr.json: a recipe changed; if it should, run `make bless`"
