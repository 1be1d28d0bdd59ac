"""Figures of the pages equal those of committed results files, cell by cell."""

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
def test_tables_say_what_their_results_files_say(page):
    assert not [wrong for grid in grids(page.read_text()) for wrong in check(grid)[1]]


def test_most_tables_are_held():
    """The pages' tables are found: a lower number of figures would mean that some are not."""
    assert sum(check(grid)[0] for page in pages() for grid in grids(page.read_text())) > 700


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "speed.json"
    lines = [{"side": "ours", "ms": [1234.56, 1000, 1500.4], "share": 0.125}, {"side": "theirs", "ms": [2, 2, 2]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def only(text: str) -> Grid:
    (found,) = grids(text)
    return found


@pytest.mark.parametrize("ms, share", [("1,235 (1,000 to 1,500)", "12.5"), ("1234.6 (1000 to 1500.4)", "12")])
def test_rounded_as_shown(file, ms, share):
    count, wrong = check(only(PAGE.format(file=file, ms=ms, share=share)))
    assert count == 4 and not wrong


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
def test_another_figure_is_found(file, ms, share):
    assert len(check(only(PAGE.format(file=file, ms=ms, share=share)))[1]) == 1


def test_a_row_that_no_record_or_two_have_is_found(file):
    text = PAGE.format(file=file, ms="1,235 (1,000 to 1,500)", share="12.5")
    assert "0 records" in check(only(text.replace("| ours |", "| nobody |")))[1][0]
    assert "2 records" in check(only(text.replace("one(side=row)", "one()")))[1][0]


def test_a_figure_without_a_value_is_found(file):
    text = PAGE.format(file=file, ms="2 (2 to 2)", share="1").replace("| ours |", "| theirs |")
    assert len(check(only(text.replace("100 * share", "share")))[1]) == 1
    assert not check(only(text.replace("100 * share", "share").replace("1 %", "")))[1]


def test_a_table_with_figures_and_no_marker_is_found():
    assert check(only("\n| a | b |\n|---|---|\n| x | 3 ms |\n"))[1]
    assert not check(only("<!-- settings -->\n| a | b |\n|---|---|\n| x | 3 |\n"))[1]
    assert not [*grids("\n| a | b |\n|---|---|\n| 1 x | `3` and words |\n")]
    assert not [*grids("```\n| a | b |\n|---|---|\n| x | 3 ms |\n```\n")]


def test_names_are_no_figures():
    assert figures("dcn_v2, fp16, 2.5x, -0.2 to 1.8, `7`, 1,234") == ["2.5", "-0.2", "1.8", "1,234"]
