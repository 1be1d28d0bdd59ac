"""The gates on the real tree, first of all tests: what is written down holds only while a test holds it.

The rules are in gates.py, their tests in test_gates.py. Here stand the two facts that only a commit with a
reason may change, line budgets and frozen options, and the proof that import-linter's contracts bite.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gates
import pytest
import typer
from typer.main import get_command

ROOT = Path(__file__).parents[1]
PACKAGES = tomllib.loads((ROOT / "tests/packages.toml").read_text())
FROZEN_OPTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("shardwright", ("--version",)),
    ("checkpoint", ()),
    ("checkpoint export", ("--prefix",)),
    ("checkpoint inspect", ()),
    ("checkpoint reshard", ("--files",)),
    ("checkpoint verify", ()),
    ("check-scheme", ()),
    ("data", ()),
    ("data inspect", ()),
    ("export", ("--tables",)),
    ("lab", ()),
    ("lab down", ("--all", "--name")),
    ("lab run", ("--name", "--seconds", "--shape")),
    ("lab status", ()),
    ("lab up", ("--cpu", "--front", "--hosts", "--local", "--name", "--ranks", "--uplink")),
    ("measure", ("--output", "-o")),
    ("plan", ("--batch", "--cluster", "--compare", "--explain", "--export", "--output", "-o")),
    ("reader", ()),
    ("reader keys", ()),
    ("reader serve", ("--bind", "--keys")),
    ("recipe", ()),
    ("report", ("--output",)),
    ("serve", ("--follow", "--host", "--port", "--verify")),
    ("train", ("--dry-run",)),
)

RATCHETS = {"bare names": 29, "shape legends": 4}  # to go down to zero
GATES = {
    **gates.GATES,
    "line budget": partial(gates.line_budget, budgets={name: package["lines"] for name, package in PACKAGES.items()}),
}
Options = Iterable[tuple[str, Iterable[str]]]


@pytest.mark.parametrize("name", GATES)
def test_gate(name: str) -> None:
    """No violation; of a ratchet as many as are written down, so that whoever removes some lowers the number."""
    violations, expected = GATES[name](ROOT), RATCHETS.get(name, 0)
    if len(violations) != expected:
        count = f'{len(violations)} against the gate "{name}", {expected} expected:'
        pytest.fail("\n".join([count, *violations]), pytrace=False)


def test_git_ignores_no_test() -> None:
    """A pattern meant for build outputs once kept a whole folder of tests out of every clone."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    paths = [str(path) for path in (ROOT / "tests").rglob("*.py")]
    found = subprocess.run(
        ["git", "check-ignore", "--no-index", *paths], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.stdout == ""


def test_command_line_options_are_frozen() -> None:
    from shardwright.cli import app

    found = tuple(command_options(app))
    if changes := option_changes(FROZEN_OPTIONS, found):
        pytest.fail("\n".join([*changes, f"now: FROZEN_OPTIONS = {found}"]), pytrace=False)


def command_options(app: typer.Typer) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(command, its option names in order); a nested command by its path, the application by its name."""

    def walk(path: str, command: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
        options = [option for option in command.params if option.param_type_name == "option"]
        names = sorted(name for option in options for name in (*option.opts, *option.secondary_opts))
        yield path or gates.PACKAGE, tuple(names)
        for name, child in sorted(getattr(command, "commands", {}).items()):
            yield from walk(f"{path} {name}".strip(), child)

    return walk("", get_command(app))


def option_changes(frozen: Options, found: Options) -> list[str]:
    before, now = (
        {f"{command} {name}".strip() for command, names in side for name in ("", *names)} for side in (frozen, found)
    )
    appeared = "make it a dotted override key=value, or add it to FROZEN_OPTIONS in a commit that says why"
    vanished = "scripts use it: bring it back, or take it out of FROZEN_OPTIONS in a commit that says why"
    return [f'shardwright/cli.py:1: "{name}" appeared; {appeared}' for name in sorted(now - before)] + [
        f'shardwright/cli.py:1: "{name}" disappeared; {vanished}' for name in sorted(before - now)
    ]


def test_option_changes_are_named() -> None:
    app = typer.Typer(add_completion=False)

    @app.command()
    def plan(recipe: str, cluster: str = "", verbose: bool = False) -> None: ...

    @app.command()
    def lab() -> None: ...

    found = tuple(command_options(app))
    assert found == (("shardwright", ()), ("lab", ()), ("plan", ("--cluster", "--no-verbose", "--verbose")))
    assert option_changes(found, found) == []
    changes = option_changes((("shardwright", ()), ("plan", ("--cluster", "--out", "--verbose"))), found)
    assert [change.split("; ")[0] for change in changes] == [
        'shardwright/cli.py:1: "lab" appeared',
        'shardwright/cli.py:1: "plan --no-verbose" appeared',
        'shardwright/cli.py:1: "plan --out" disappeared',
    ]
    assert all("FROZEN_OPTIONS" in change for change in changes)


def test_contract_and_gate_have_the_same_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    written = next(contract["layers"] for contract in contracts if contract.get("exhaustive"))
    layers = [{part.strip(" ()") for part in layer.split("|")} for layer in written]
    assert layers == [set(layer) for layer in gates.LAYERS]


PLANTED_IMPORTS = (
    ("models/planted.py", "shardwright.runtime"),
    ("comm/planted.py", "shardwright.kernels"),
    ("layers/planted.py", "shardwright.planner"),
    ("spec/planted.py", "torch"),
    ("planner/planted.py", "torch"),
)


def test_import_linter_catches_planted_imports(tmp_path: Path) -> None:
    shutil.copytree(ROOT / gates.PACKAGE, tmp_path / gates.PACKAGE)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / gates.PACKAGE / "planner").mkdir(exist_ok=True)
    (tmp_path / gates.PACKAGE / "planner/__init__.py").touch()
    (tmp_path / gates.PACKAGE / "stray.py").touch()
    for path, target in PLANTED_IMPORTS:
        (tmp_path / gates.PACKAGE / path).write_text(f"import {target}\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    for path, target in PLANTED_IMPORTS:
        importer = path.removesuffix(".py").replace("/", ".")
        assert f"{gates.PACKAGE}.{importer} -> {target} (l.1)" in result.stdout, result.stdout
    assert f"{gates.PACKAGE}.stray" in result.stdout, result.stdout


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """On the package under `root`: -S keeps .pth files out, else an editable install wins over the copy."""
    program = "from importlinter.cli import lint_imports_command as run; run()"
    paths = os.pathsep.join([str(root), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    return subprocess.run(
        [sys.executable, "-S", "-c", program, "--no-cache", "--no-logo"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
