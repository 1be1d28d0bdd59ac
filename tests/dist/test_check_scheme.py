"""`shardwright check-scheme`: a scheme from another module, trained over four ranks."""

import subprocess
import sys

import pytest

SCHEME = """
from shardwright.planner.tables.schemes import Scheme
from shardwright.planner.tables.sharding import rows_on_ranks

def shardings(table_load, cluster):
    ranks = [rank for rank in range(cluster.num_ranks) if rank % cluster.levels[0].num < {num}]
    yield rows_on_ranks({sharding!r}, ranks, cluster)

FIRST = Scheme({name!r}, shardings, lambda sharding, load: "rows over the first ranks of each host")
"""


def check(folder, **values) -> subprocess.CompletedProcess:
    values = {"num": 1, "sharding": "first-ranks", "name": "first-ranks"} | values
    (folder / "my_schemes.py").write_text(SCHEME.format(**values))
    command = [sys.executable, "-m", "shardwright.cli", "check-scheme", "my_schemes"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("num", (1, 2))
def test_rows_over_the_first_ranks_of_each_host(tmp_path, num):
    run = check(tmp_path, num=num)
    assert run.returncode == 0, run.stderr
    results = [line for line in run.stdout.splitlines() if "of nn.EmbeddingBag after 4 steps" in line]
    assert [line.partition(":")[0] for line in results] == [
        "first-ranks, vectors exchanged",
        "first-ranks, rows exchanged",
    ]
    assert all(line.endswith("loaded in one process; exported") for line in results)


@pytest.mark.parametrize(
    "values, message",
    (
        ({"sharding": "row"}, 'table "a" cannot be sharded as pinned: first-ranks'),
        ({"name": "row"}, 'sharding scheme "row" is already defined; choose another name'),
        ({"num": 0}, "first-ranks: rows on ranks (); wanted distinct ranks 0 to 3"),
    ),
)
def test_a_mistake_is_an_error_of_one_line(tmp_path, values, message):
    run = check(tmp_path, **values)
    assert run.returncode == 2 and message in run.stderr
    assert run.stderr.count("\n") == 1 and "Traceback" not in run.stderr


def test_a_module_must_exist_and_define_schemes(tmp_path):
    (tmp_path / "empty.py").write_text("")
    for module, message in (("missing", "give a module in this directory"), ("empty", "empty: defines no Scheme")):
        command = [sys.executable, "-m", "shardwright.cli", "check-scheme", module]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert run.returncode == 2 and message in run.stderr and "Traceback" not in run.stderr
