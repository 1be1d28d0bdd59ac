"""The figures in tables of README.md and docs equal those of committed results files, cell by cell."""

import json

import pytest
from figures import Grid, check, figures, grids, pages

from benchmarks.dependencies import ROOT

PAGE = """
<!-- figures: {file}
one(side=row) | ms | 100 * share
-->
| side | ms | share |
|---|---|---|
| ours | {ms} | {share} % |
"""


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_tables_agree_with_their_results_files(page):
    assert not [error for grid in grids(page.read_text()) for error in check(grid)[1]]


def test_enough_figures_are_checked():
    """A lower number of figures would mean that tables of the pages are not recognized."""
    assert sum(check(grid)[0] for page in pages() for grid in grids(page.read_text())) > 700


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "speed.json"
    lines = [{"side": "ours", "ms": [1234.56, 1000, 1500.4], "share": 0.125}, {"side": "theirs", "ms": [2, 2, 2]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def only_grid(text: str) -> Grid:
    (grid,) = grids(text)
    return grid


@pytest.mark.parametrize("ms, share", [("1,235 (1,000 to 1,500)", "12.5"), ("1234.6 (1000 to 1500.4)", "12")])
def test_values_are_rounded_to_the_digits_shown(file, ms, share):
    count, errors = check(only_grid(PAGE.format(file=file, ms=ms, share=share)))
    assert count == 4 and not errors


@pytest.mark.parametrize(
    "ms, share",
    [
        ("1,234 (1,000 to 1,500)", "12.5"),
        ("1,235 (1,000 to 1,501)", "12.5"),
        ("1,235", "12.5"),
        ("1,500 (1,000 to 1,235)", "12.5"),
        ("1,235 (1,000 to 1,500), once 999", "12.5"),
        ("1,235 (1,000 to 1,500)", "12.6"),
        ("1,235 (1,000 to 1,500)", ""),
    ],
)
def test_a_different_figure_is_an_error(file, ms, share):
    assert len(check(only_grid(PAGE.format(file=file, ms=ms, share=share)))[1]) == 1


def test_a_row_that_matches_no_record_or_two_is_an_error(file):
    text = PAGE.format(file=file, ms="1,235 (1,000 to 1,500)", share="12.5")
    assert "0 records" in check(only_grid(text.replace("| ours |", "| nobody |")))[1][0]
    assert "2 records" in check(only_grid(text.replace("one(side=row)", "one()")))[1][0]


def test_a_figure_without_a_value_is_an_error(file):
    text = PAGE.format(file=file, ms="2 (2 to 2)", share="1").replace("| ours |", "| theirs |")
    assert len(check(only_grid(text.replace("100 * share", "share")))[1]) == 1
    assert not check(only_grid(text.replace("100 * share", "share").replace("1 %", "")))[1]


def test_a_table_with_figures_but_no_marker_is_an_error():
    assert check(only_grid("\n| a | b |\n|---|---|\n| x | 3 ms |\n"))[1]
    assert not check(only_grid("<!-- settings -->\n| a | b |\n|---|---|\n| x | 3 |\n"))[1]
    assert not [*grids("\n| a | b |\n|---|---|\n| 1 x | `3` and words |\n")]
    assert not [*grids("```\n| a | b |\n|---|---|\n| x | 3 ms |\n```\n")]


def test_digits_in_names_are_no_figures():
    assert figures("dcn_v2, fp16, 2.5x, -0.2 to 1.8, `7`, 1,234") == ["2.5", "-0.2", "1.8", "1,234"]
