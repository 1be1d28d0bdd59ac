"""README.md and docs agree with the code: scripts run, links resolve, keys are those of recipes."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import BaseModel

import shardwright
from shardwright import config
from shardwright.lab.emulated_cluster import Lab
from shardwright.lab.shape import Host, Shape
from shardwright.models.click_inputs import ClickInputs
from shardwright.models.keys import default_text, type_text
from shardwright.runtime.run.recipe import SOURCES
from shardwright.spec import files
from shardwright.spec.expert_placement import ExpertPlacement
from shardwright.spec.optimizer import SparseOptimizer
from shardwright.spec.workload import Block, Workload

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    (language, body)
    for page in PAGES
    for language, body in re.findall(r"^```(\w+)\n# (\S+\n.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
]
FILES = {body.partition("\n")[0]: body.partition("\n")[2] for _, body in BLOCKS}
IN_README = ("my_model.py", "train.py", "plain_loop.py", "lightning_loop.py")  # test_readme.py runs these
IN_THE_LAB = ("two_ways.py",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    for name, body in FILES.items():
        (folder / name).write_text(body)
    return folder


def run(folder: Path, *command: str) -> None:
    environment = os.environ | {"PYTHONPATH": "."}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "name", [name for name in FILES if name.endswith(".py") and name not in IN_README + IN_THE_LAB]
)
def test_script_runs(folder, name):
    run(folder, sys.executable, name)


def test_the_example_recipes_train(folder):
    run(folder, sys.executable, "-m", "shardwright.cli", "train", "my.toml")
    run(folder, sys.executable, "mine.py")
    run(folder, sys.executable, "-m", "shardwright.cli", "train", "mine.toml")
    run(folder, sys.executable, "-m", "shardwright.cli", "data", "inspect", "mine.csv", "schema=mine-schema.toml")
    if not (folder / "clicks").exists():
        run(folder, sys.executable, "feed.py")
    run(folder, sys.executable, "-m", "shardwright.cli", "train", "online.toml")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_names_of_the_code_exist(page):
    """For `comm/mesh.py: Mesh` in a page, the file exists and defines this class, function or constant."""
    for path, name in re.findall(r"`((?:shardwright/)?[a-z_]+/[\w/]+\.(?:py|cpp|h))(?:: (\w+))?`", page.read_text()):
        file = next((root / path for root in (ROOT / "shardwright", ROOT) if (root / path).exists()), None)
        assert file is not None, f"{page.name}: no {path}"
        assert not name or re.search(rf"^((class|def) )?{name}\b", file.read_text(), re.MULTILINE), f"{path}: no {name}"


def test_the_list_of_pages_has_every_page():
    listed = re.findall(r"\]\(([\w/-]+\.md)\)", (ROOT / "docs/README.md").read_text())
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert pages <= set(listed)


def test_the_api_page_lists_every_public_name():
    listed = re.findall(r"^::: shardwright\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(shardwright.__all__)


def test_the_table_of_callback_methods_has_all_of_them():
    listed = re.findall(r"^\| `(\w+)\((.*)\)` \|", (ROOT / "docs/runs.md").read_text(), re.MULTILINE)
    methods = {name: method for name, method in vars(shardwright.Callback).items() if not name.startswith("_")}
    assert dict(listed) == {name: ", ".join([*signature(method).parameters][1:]) for name, method in methods.items()}


def test_the_table_of_keys_has_all_keys_of_recipes():
    section = (ROOT / "docs/runs.md").read_text().partition("## Keys")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE))
    assert listed == set(keys(config.Settings))


def test_the_page_of_the_workload_file_has_its_fields():
    page = (ROOT / "docs/workload.md").read_text()
    for cls in dataclasses_in(Workload):
        section = page.partition(f"## {cls.__name__}\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", section, re.MULTILINE)
        expected = [(field.name, json_default(field)) for field in fields(cls)]
        assert rows == expected, cls.__name__


def dataclasses_in(cls: Any) -> Iterator[Any]:
    """A dataclass and the dataclasses of its fields, except optimizers, which have their own page."""
    yield cls
    for name, hint in get_type_hints(cls).items():
        if name != "optimizer":
            yield from (inner for inner in get_args(hint) if is_dataclass(inner))
    if cls is Workload:
        yield from (inner for inner in dataclasses_in(Block) if inner is not Block)


def json_default(field: Any) -> str:
    return "required" if field.default is MISSING else json.dumps(field.default).strip('"')


def test_the_hand_written_workload_of_the_page_can_be_planned(folder):
    run(
        folder, sys.executable, "-m", "shardwright", "plan", "embeddings.json", "--cluster", "two-cores", "-o", "p.json"
    )
    files.read(Workload, folder / "embeddings.json").verify()


def test_the_recorded_routing_of_the_page_can_be_planned(folder):
    run(folder, sys.executable, "record_routing.py")
    keys = ("experts.channels=1024", "experts.hidden=2048")
    run(
        folder,
        sys.executable,
        "-m",
        "shardwright",
        "plan",
        "routing.jsonl",
        "--cluster",
        "johnny",
        *keys,
        "-o",
        "mine.json",
    )
    files.read(ExpertPlacement, folder / "mine.placement.json").verify()
    assert len(json.loads((folder / "mine.sglang.json").read_text())["physical_to_logical_map"]) == 2


def test_the_page_of_recipe_keys_agrees_with_the_signatures():
    """docs/recipe-keys.md lists the keys of each kind of data and table optimizer, with types and defaults.

    Its keys of models are generated: tests/golden/test_model_keys.py.
    """
    page = (ROOT / "docs/recipe-keys.md").read_text()
    for section, rows in generated_keys().items():
        text = page.partition(f"## [{section}]")[2].partition("\n## ")[0]
        table = [tuple(line.strip("| ").split(" | ")) for line in text.splitlines() if line.startswith("| `")]
        assert [cells[:4] for cells in table] == rows, section
        assert all(len(cells) == 5 and cells[4] for cells in table), section


def generated_keys() -> dict[str, list[tuple[str, ...]]]:
    """For each section of a recipe: (key, kinds with this key, type, default), from the signatures of the kinds."""
    optimizers = {optimizer(lr=0.1).kind: optimizer for optimizer in get_args(get_args(SparseOptimizer)[0])}
    built_in: dict[str, Mapping[str, Any]] = {"data": SOURCES, "tables": optimizers}
    return {section: list(rows_of(kinds)) for section, kinds in built_in.items()}


def rows_of(kinds: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    kinds_by_key: dict[tuple[str, str, str], list[str]] = {}
    for kind, make in kinds.items():
        for name, parameter in signature(make).parameters.items():
            fixed = make.keywords.get(name) if isinstance(make, partial) else None
            if name in ("source", "optimizer", "kind") or parameter.annotation is ClickInputs or fixed is not None:
                continue
            default = default_text(parameter.default, parameter.empty)
            kinds_by_key.setdefault((name, type_text(parameter.annotation), default), []).append(kind)
    for (name, type_, default), users in kinds_by_key.items():
        yield f"`{name}`", "all" if len(users) == len(kinds) else ", ".join(users), type_, default


def keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    names = []
    for name, field in model.model_fields.items():
        section = next(
            (kind for kind in (field.annotation, *getattr(field.annotation, "__args__", ())) if is_section(kind)), None
        )
        names += keys(section, f"{name}.") if section else [prefix + name]
    return names


def is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="a lab that stays up needs root and iproute2")
def test_the_first_experiment_of_the_lab_page(folder):
    lines = []
    with Lab(Shape((Host(ranks=2, uplink="100mbit"),) * 2), f"docs{os.getpid() % 100_000}") as lab:
        outcome = lab.run([sys.executable, str(folder / "two_ways.py")], lambda rank, line: lines.append(line))
    assert outcome.rank is None and len(lines) == 2, lines
