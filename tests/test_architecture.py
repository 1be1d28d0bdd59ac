"""The architecture gates (gates.py, tested by test_gates.py) pass on this repository.

Line budgets (packages.toml) and command-line options may change only in a commit that gives the reason. Also tested:
import-linter's contracts fail on imports that they forbid.
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
    ("cache-sim", ("--batches", "--cluster", "--output", "--sizes", "--write", "-o")),
    ("check-scheme", ()),
    ("data", ()),
    ("data inspect", ()),
    ("data schema", ()),
    ("data tokenize", ()),
    ("evaluate", ("--by",)),
    ("export", ("--tables",)),
    ("lab", ()),
    ("lab down", ("--all", "--name")),
    ("lab run", ("--name", "--seconds", "--shape")),
    ("lab status", ()),
    ("lab up", ("--cpu", "--front", "--hosts", "--local", "--name", "--ranks", "--uplink")),
    ("measure", ("--layers", "--output", "-o")),
    ("plan", ("--batch", "--cluster", "--compare", "--explain", "--export", "--output", "-o")),
    ("predict", ()),
    ("reader", ()),
    ("reader keys", ()),
    ("reader serve", ("--bind", "--keys")),
    ("recipe", ()),
    ("report", ("--output",)),
    ("serve", ("--follow", "--host", "--port", "--verify")),
    ("serve-tables", ("--bind", "--journal", "--keys", "--new-keys", "--parent")),
    ("train", ("--dry-run",)),
)

GATES = {
    **gates.GATES,
    "line budget": partial(gates.line_budget, budgets={name: package["lines"] for name, package in PACKAGES.items()}),
}
Options = Iterable[tuple[str, Iterable[str]]]


@pytest.mark.parametrize("name", GATES)
def test_gate(name: str) -> None:
    if violations := GATES[name](ROOT):
        pytest.fail("\n".join([f'{len(violations)} against the gate "{name}":', *violations]), pytrace=False)


def test_git_ignores_no_test() -> None:
    """A pattern for build outputs once excluded a whole folder of tests from every clone."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    paths = [str(path) for path in (ROOT / "tests").rglob("*.py")]
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", *paths], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ignored.stdout == ""


def test_command_line_options_are_frozen() -> None:
    from shardwright.cli import app

    options = tuple(command_options(app))
    if changes := option_changes(FROZEN_OPTIONS, options):
        pytest.fail("\n".join([*changes, f"now: FROZEN_OPTIONS = {options}"]), pytrace=False)


def command_options(app: typer.Typer) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(command, its sorted option names); a nested command by its path, the application by the package's name."""

    def walk(path: str, command: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
        options = [option for option in command.params if option.param_type_name == "option"]
        names = sorted(name for option in options for name in (*option.opts, *option.secondary_opts))
        yield path or gates.PACKAGE, tuple(names)
        for name, child in sorted(getattr(command, "commands", {}).items()):
            yield from walk(f"{path} {name}".strip(), child)

    return walk("", get_command(app))


def option_changes(frozen: Options, current: Options) -> list[str]:
    before, now = (
        {f"{command} {name}".strip() for command, names in side for name in ("", *names)} for side in (frozen, current)
    )
    added = "make it a dotted override key=value, or add it to FROZEN_OPTIONS in a commit that gives the reason"
    removed = "scripts use it: restore it, or remove it from FROZEN_OPTIONS in a commit that gives the reason"
    return [f'shardwright/cli.py:1: "{name}" was added; {added}' for name in sorted(now - before)] + [
        f'shardwright/cli.py:1: "{name}" was removed; {removed}' for name in sorted(before - now)
    ]


def test_added_and_removed_options_are_reported() -> None:
    app = typer.Typer(add_completion=False)

    @app.command()
    def plan(recipe: str, cluster: str = "", verbose: bool = False) -> None: ...

    @app.command()
    def lab() -> None: ...

    options = tuple(command_options(app))
    assert options == (("shardwright", ()), ("lab", ()), ("plan", ("--cluster", "--no-verbose", "--verbose")))
    assert option_changes(options, options) == []
    changes = option_changes((("shardwright", ()), ("plan", ("--cluster", "--out", "--verbose"))), options)
    assert [change.split("; ")[0] for change in changes] == [
        'shardwright/cli.py:1: "lab" was added',
        'shardwright/cli.py:1: "plan --no-verbose" was added',
        'shardwright/cli.py:1: "plan --out" was removed',
    ]
    assert all("FROZEN_OPTIONS" in change for change in changes)


def test_import_linter_contract_has_the_layers_of_the_gate() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    texts = next(contract["layers"] for contract in contracts if contract.get("exhaustive"))
    layers = [{part.strip(" ()") for part in layer.split("|")} for layer in texts]
    assert layers == [set(layer) for layer in gates.LAYERS]


PLANTED_IMPORTS = (
    ("models/planted.py", "shardwright.runtime"),
    ("comm/planted.py", "shardwright.kernels"),
    ("layers/planted.py", "shardwright.planner"),
    ("spec/planted.py", "torch"),
    ("planner/planted.py", "torch"),
)


def test_import_linter_reports_planted_imports(tmp_path: Path) -> None:
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
    """Check the package under `root`. -S ignores .pth files: an editable install would otherwise hide the copy."""
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
