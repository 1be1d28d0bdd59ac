"""Every import of this repository's packages in benchmarks, tests and docs resolves, also inside functions.

Modules are parsed, not imported, so that imports in functions that rarely run are checked, too.
"""

import ast
import re
from pathlib import Path

import pytest

from benchmarks.dependencies import MODULE_OPTION, ROOT, path_of, unresolved

FILES = sorted(path for folder in ("benchmarks", "tests", "shardwright") for path in (ROOT / folder).rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("folder", ["benchmarks", "tests", "shardwright"])
def test_imports_of_files_resolve(folder):
    broken_imports = {
        str(path.relative_to(ROOT)): broken
        for path in FILES
        if path.is_relative_to(ROOT / folder) and path != Path(__file__) and (broken := [*unresolved(_tree(path))])
    }
    assert not broken_imports


def test_imports_of_pages_resolve():
    broken_imports = {}
    for page in PAGES:
        text = page.read_text()
        for block in re.findall(r"^```py(?:thon)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            broken_imports[page.name] = [*unresolved(ast.parse(block))]
        broken_imports[page.name + ", -m"] = [
            module for module in MODULE_OPTION.findall(text) if path_of(module) is None
        ]
    assert not {page: broken for page, broken in broken_imports.items() if broken}


@pytest.mark.parametrize(
    "code, error",
    [
        ("from shardwright.planner.plan import gone", "line 1: shardwright.planner.plan has no gone"),
        ("def f():\n    from shardwright.gone import x", "line 2: no module shardwright.gone"),
        ("from shardwright.planner import search\nsearch.gone()", "line 2: shardwright/planner/search.py has no gone"),
        ("import shardwright as sw\nsw.Gone", "line 2: shardwright/__init__.py has no Gone"),
        ("run([python, '-c', f'from benchmarks.gone import main; main({x})'])", "line 1: no module benchmarks.gone"),
        ("run([python, '-m', 'shardwright.gone', 'train'])", "line 1: no module shardwright.gone"),
        ("import subprocess\nsubprocess.run('python -m benchmarks.gone --all')", "line 2: no module benchmarks.gone"),
    ],
)
def test_a_broken_import_is_reported(code, error):
    assert [*unresolved(ast.parse(code))] == [error]


def test_valid_imports_are_not_reported():
    code = (
        "from shardwright.planner import search\nimport shardwright as "
        "sw\nsearch.define_problem\nsw.Table\nimport gone_too"
    )
    assert not [*unresolved(ast.parse(code))]


def _tree(path: Path) -> ast.AST:
    return ast.parse(path.read_text(), str(path))
