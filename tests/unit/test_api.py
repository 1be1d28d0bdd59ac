"""The public API: every name loads lazily; type checkers see the same names."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shardwright


@pytest.mark.parametrize("name", shardwright.__all__)
def test_name_loads(name):
    assert getattr(shardwright, name).__name__ == name


def test_type_checkers_see_the_names_that_load():
    tree = ast.parse(Path(shardwright.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        (node.module, alias.name) for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    lazy = {(f"shardwright.{module}", name) for module, names in shardwright._NAMES_BY_MODULE.items() for name in names}
    assert typed == lazy and sorted(name for _, name in typed) == sorted(shardwright.__all__)


def test_dir_lists_the_public_api_without_importing_torch():
    probe = "import sys, shardwright as sw; print(*dir(sw)); sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and {*shardwright.__all__} <= {*result.stdout.split()}
    assert shardwright.__version__.count(".") >= 1


def test_unknown_name_is_an_attribute_error():
    misspelt = "Tables"
    with pytest.raises(AttributeError, match="has no attribute 'Tables'"):
        getattr(shardwright, misspelt)


def test_the_cli_and_the_code_of_loader_workers_do_not_import_torch():
    probe = "import sys, shardwright.cli, shardwright.data.sources.synthetic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
