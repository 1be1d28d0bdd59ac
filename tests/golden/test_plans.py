"""Recipe -> workload and plan, to the byte. A change here is seen, and accepted by `make bless`."""

from contextlib import closing
from pathlib import Path

import pytest

from shardwright import config
from shardwright.data.loader import Loader
from shardwright.measure.describe import describe
from shardwright.runtime import assemble
from shardwright.runtime.build import plan_for
from shardwright.spec import files

SNAPSHOTS = Path(__file__).parent / "plans"
SYNTHETIC = [name for name in config.recipes() if name.startswith("synthetic-")]  # the others need a log


@pytest.mark.parametrize("recipe", SYNTHETIC)
def test_plan_of_a_recipe(recipe, tmp_path, request):
    settings = config.load(recipe)
    source = assemble.make_source(settings)
    model = assemble.make_model(settings, source)
    with closing(Loader(source, batch_size=settings.train.batch_size, seed=settings.seed)) as loader:
        batch = next(iter(loader))
    nouns = {"workload": describe(model, batch), "plan": plan_for(model, batch)}
    for noun, value in nouns.items():
        name = f"{recipe}.{noun}.json"
        files.write(value, tmp_path / name)
        made = (tmp_path / name).read_text()
        if request.config.getoption("--bless"):
            SNAPSHOTS.mkdir(exist_ok=True)
            (SNAPSHOTS / name).write_text(made)
        assert made == (SNAPSHOTS / name).read_text(), f"{name} changed; if it should, run `make bless`"
