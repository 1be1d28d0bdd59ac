"""The pages say what is: their scripts run, their links lead somewhere, their keys are the recipe's keys."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from shardwright import config
from shardwright.lab.cluster import Lab
from shardwright.lab.shape import Host, Shape

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    (language, body)
    for page in PAGES
    for language, body in re.findall(r"^```(\w+)\n# (\S+\n.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
]
FILES = {body.partition("\n")[0]: body.partition("\n")[2] for _, body in BLOCKS}
ELSEWHERE = ("my_model.py", "train.py", "plain_loop.py", "lightning_loop.py")  # test_readme.py runs these
IN_THE_LAB = ("two_ways.py",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    for name, body in FILES.items():
        (folder / name).write_text(body)
    return folder


def run(folder: Path, *words: str) -> None:
    environment = os.environ | {"PYTHONPATH": "."}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name", [name for name in FILES if name.endswith(".py") and name not in ELSEWHERE + IN_THE_LAB]
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
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_the_table_of_keys_is_the_recipes_keys():
    section = (ROOT / "docs/runs.md").read_text().partition("## Keys")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE))
    assert listed == set(keys(config.Settings))


def keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        section = next(
            (kind for kind in (field.annotation, *getattr(field.annotation, "__args__", ())) if is_section(kind)), None
        )
        found += keys(section, f"{name}.") if section else [prefix + name]
    return found


def is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="a lab that stays up needs root and iproute2")
def test_the_labs_first_experiment(folder):
    said = []
    with Lab(Shape((Host(ranks=2, uplink="100mbit"),) * 2), f"docs{os.getpid() % 100_000}") as lab:
        ended = lab.run([sys.executable, str(folder / "two_ways.py")], lambda rank, line: said.append(line))
    assert ended.rank is None and len(said) == 2, said
