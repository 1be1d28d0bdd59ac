"""README.md is correct: its scripts and commands run, its tree lists the folders."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
SCRIPTS = {body.splitlines()[0].removeprefix("# "): body for language, body in BLOCKS if language == "python"}
COMMANDS = [
    line.partition("#")[0].strip() for language, body in BLOCKS if language == "sh" for line in body.splitlines()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    for name, body in SCRIPTS.items():
        (folder / name).write_text(body)
    return folder


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "my_model.py"])
def test_script_trains(folder, name):
    result = subprocess.run([sys.executable, name], cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    losses = [float(line.split()[-1]) for line in lines if re.fullmatch(r"(\d+ )?\d\.\d{4}", line)]
    assert losses and losses[-1] < 0.57, f"no better than the base rate: {result.stdout}"


def test_the_examples_are_short():
    sizes = {name: sum(bool(line.strip()) for line in body.splitlines()) - 1 for name, body in SCRIPTS.items()}
    assert sizes["train.py"] <= 15 and sizes["plain_loop.py"] <= 30 and sizes["lightning_loop.py"] <= 30, sizes


def test_commands_run_in_order(folder):
    """All commands of `shardwright`, which is the script next to this Python."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    num_commands = 0
    for command in COMMANDS:
        args = shlex.split(command)
        if args[0] != "shardwright":
            continue
        result = subprocess.run(
            args, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, f"{command}: {result.stderr}"
        num_commands += 1
    assert num_commands == 6


def test_make_train_prints_metrics_and_a_report(folder):
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("not run by `make`: this Python is not the one in .venv")
    result = subprocess.run(
        [
            "make",
            "train",
            f"WITH=run.directory={folder / 'runs'} train.steps=500 train.eval_every=500 train.checkpoint_every=500",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    pattern = r"NE (0\.\d+) \(best reachable (0\.\d+)\)  AUC (0\.\d+) .* ([\d,]+) samples/s"
    metrics = re.search(pattern, result.stdout)
    assert metrics and float(metrics[2]) < float(metrics[1]) < 0.9 and float(metrics[3]) > 0.7, result.stdout
    page = re.search(r"report\s+(\S+report\.html)", result.stdout)
    assert page and (ROOT / page[1]).is_file()


def test_every_make_command_is_a_target():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in COMMANDS:
        for target in re.findall(r"make (\w+)", command):
            assert target in targets


def test_the_tree_lists_every_folder():
    tree = next(body for language, body in BLOCKS if language == "text" and body.startswith("shardwright/"))
    listed, top = set(), ""
    packages = tomllib.loads((ROOT / "tests/packages.toml").read_text())
    for line in tree.splitlines():
        name, nested = line.split()[0].rstrip("/"), line.startswith(" ")
        if nested and name in packages:
            assert line.split(maxsplit=1)[1] == packages[name]["about"]
        top = top if nested else name
        listed.add(f"{top}/{name}" if nested else name)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a checkout")
    folders = [path.split("/")[:-1] for path in tracked.stdout.splitlines()]
    present = {folder[0] for folder in folders if folder and not folder[0].startswith(".")}
    present |= {"/".join(folder[:2]) for folder in folders if folder[:1] == ["shardwright"] and len(folder) > 1}
    assert listed == present
