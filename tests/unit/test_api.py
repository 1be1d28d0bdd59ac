"""The public API: every name loads, and is told to type checkers as it is."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shardwright


@pytest.mark.parametrize("name", shardwright.__all__)
def test_name_loads(name):
    assert getattr(shardwright, name).__name__ == name


def test_type_checkers_are_told_the_same():
    tree = ast.parse(Path(shardwright.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    told = {
        (node.module, alias.name) for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    lazy = {(f"shardwright.{home}", name) for home, names in shardwright._HOMES.items() for name in names}
    assert told == lazy and sorted(name for _, name in told) == sorted(shardwright.__all__)


def test_completion_finds_the_public_api():
    probe = "import sys, shardwright as sw; print(*dir(sw)); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and {*shardwright.__all__} <= {*done.stdout.split()}
    assert shardwright.__version__.count(".") >= 1


def test_unknown_name_is_an_attribute_error():
    misspelt = "Tables"
    with pytest.raises(AttributeError, match="has no attribute 'Tables'"):
        getattr(shardwright, misspelt)


def test_help_and_worker_code_do_not_load_torch():
    probe = "import sys, shardwright.cli, shardwright.data.sources.synthetic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
