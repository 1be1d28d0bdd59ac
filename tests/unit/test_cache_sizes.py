"""Simulated caches against plain simulators, and the command `cache-sim`."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.embeddings.cache_simulation import TableAccesses, num_lines, policies, simulate
from shardwright.errors import UserError
from shardwright.report.cache_commands import cache_sim
from shardwright.spec.row_cache import WAYS

ROWS = 90
BY_NAME = {policy.name: policy for policy in policies(half_life=3, ahead=2)}
accesses = st.lists(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=WAYS, unique=True), min_size=2, max_size=30)


def table_of(batches: list[list[int]]) -> TableAccesses:
    return TableAccesses("table", ROWS, 64, tuple(torch.tensor(batch) for batch in batches))


def counted(batches: list[list[int]]) -> TableAccesses:
    """The same after as many batches without accesses, so that all of these count."""
    empty = (torch.empty(0, dtype=torch.int64),) * len(batches)
    return TableAccesses("table", ROWS, 64, empty + table_of(batches).batches)


def fewest_missing(batches: list[list[int]]) -> int:
    """Rows that a cache of WAYS lines misses if it evicts, of those that the batch does not use, the row whose next use
    is farthest away."""
    lines, missing = set[int](), 0

    def next_use(row: int, number: int) -> int:
        later = (other for other in range(number + 1, len(batches)) if row in batches[other])
        return next(later, len(batches))

    for number, batch in enumerate(batches):
        for row in set(batch) - lines:
            if len(lines) == WAYS:
                lines.remove(max(lines - set(batch), key=lambda other: next_use(other, number)))
            lines.add(row)
            missing += 1
    return missing


@given(batches=accesses)
def test_the_optimum_misses_as_few_rows_as_a_plain_cache_that_knows_the_future(batches):
    """A cache of one set has lines for any row."""
    hits = simulate(counted(batches), WAYS, BY_NAME["Belady's optimum"])
    assert hits.missing == fewest_missing(batches)


@given(batches=accesses)
def test_no_policy_misses_fewer_rows_than_the_optimum(batches):
    table = counted(batches)
    hits = {name: simulate(table, WAYS, policy) for name, policy in BY_NAME.items()}
    assert all(each.rows == sum(map(len, batches)) for each in hits.values())
    assert min(each.missing for each in hits.values()) == hits["Belady's optimum"].missing
    assert all(each.new == len({row for batch in batches for row in batch}) for each in hits.values())
    assert all(each.missing >= each.new for each in hits.values())


def test_knowing_the_next_batches_keeps_their_rows():
    """A loop over one row more than there are lines: LRU always evicts the row that comes next."""
    loop = [[number % (WAYS + 1)] for number in range(8 * (WAYS + 1))]
    lru = simulate(table_of(loop), WAYS, BY_NAME["LRU"])
    known = simulate(table_of(loop), WAYS, policies(half_life=1, ahead=30)[3])
    assert lru.rate == 0 and known.rate > 0.9


@given(batches=accesses, uses=st.integers(1, 5))
def test_hits_of_lookups_count_each_use(batches, uses):
    """If all rows are used equally often, lookups hit as often as rows; else a row counts by its uses."""
    table = counted(batches)
    even = replace(table, uses=tuple(torch.full_like(rows, uses) for rows in table.batches))
    hits = simulate(even, WAYS, BY_NAME["LRU"])
    assert (hits.lookups, hits.missing_lookups) == (uses * hits.rows, uses * hits.missing)
    popular, rare = torch.tensor([5, 1]), torch.tensor([2])
    hits = simulate(replace(table_of([[0], [0, 1]]), uses=(rare, popular)), WAYS, BY_NAME["LFU"])
    assert (hits.lookups, hits.missing_lookups, hits.rate) == (6, 1, 0.5)


def test_sizes_are_whole_sets():
    assert [num_lines(table_of([[0]]), share) for share in (0.01, 0.5, 1.0)] == [32, 64, 96]


def test_the_command_prints_hit_rates_and_writes_a_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["cache-sim", "synthetic-dlrm", "--sizes", "20,40", "--batches", "8", "train.batch_size=64"]
    result = CliRunner().invoke(app, [*arguments, "--cluster", "laptop"])
    assert result.exit_code == 0, result.output
    assert "Hit rates" in result.output and "Reads and writes of a batch" in result.output
    page = (tmp_path / "cache.html").read_text()
    assert "8 batches, of which the last 4 are counted" in page and "cache_hits" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"sizes": "0,5"}, "wanted percentages"),
        ({"sizes": "five"}, "wanted percentages"),
        ({"sizes": "0.01"}, "hold the rows of a batch"),
    ),
)
def test_mistakes_are_named(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        cache_sim("synthetic-dlrm", batches=4, **arguments)
