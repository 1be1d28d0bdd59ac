"""Compare the tables of README.md and docs with the results files that they name.

A comment directly above a table names the results files of its figures:

    <!-- figures: benchmarks/results/NAME.json [...]
    one(side=row) | ms | 100 * share | [a, b]
    -->

After the first line follows either one line of expressions for all rows of the table, or one line per row, in order. A
line has one Python expression per column. The first expression selects the record of a row: `one(key=value, ...)`
returns the only record with these fields, `every(key=value, ...)` returns all; `row` is the text of the row's first
cell, `cells` the texts of all cells. In the other expressions the fields of that record are variables, and `it` is the
value of the first expression. The figures of a cell must equal the values of its expression, in number and order,
rounded to the digits shown; if an expression is empty or None, its cell must have no figures.

    <!-- settings -->

is put above a table whose digits are not measurements: defaults, formulas, sizes.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import results_file
from benchmarks.dependencies import ROOT

MARKER = re.compile(r"<!-- (figures|settings)(?:: ([^\n]*?))?\s*(?:\n(.*?))?-->", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")
Record = dict[str, Any]


@dataclass(frozen=True)
class Grid:
    """A table of a page, the line where it starts, and the marker above it."""

    line: int
    kind: str  # "figures", "settings", or "" without a marker
    files: tuple[str, ...]
    expressions: tuple[tuple[str, ...], ...]
    rows: tuple[tuple[str, ...], ...]


def grids(text: str) -> Iterator[Grid]:
    """The tables of a page that have a marker, or digits after their first column."""
    lines = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE).split("\n")
    start = 0
    while start < len(lines):
        end = start
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        if end - start > 2:
            comment = "\n".join(lines[_comment_start(lines, start) : start])
            marker = MARKER.fullmatch(comment)
            rows = tuple(_cells(line) for line in lines[start + 2 : end])
            if marker or any(figures(cell) for cells in rows for cell in cells[1:]):
                kind, files, body = marker.groups() if marker else ("", "", "")
                expressions = tuple(_parts(line) for line in (body or "").split("\n") if line.strip())
                yield Grid(start + 1, kind, tuple((files or "").split()), expressions, rows)
        start = max(end, start + 1)


def _comment_start(lines: list[str], table: int) -> int:
    """Index of the first line of the comment directly above a table; the table's own line if there is none."""
    if table == 0 or not lines[table - 1].endswith("-->"):
        return table
    return next(line for line in range(table - 1, -1, -1) if lines[line].startswith("<!--"))


def _cells(line: str) -> tuple[str, ...]:
    return _parts(line.replace("\\|", "").strip()[1:-1])


def _parts(line: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in line.split("|"))


def figures(cell: str) -> list[str]:
    """The numbers of a cell, as text; text in backticks is ignored as code."""
    return NUMBER.findall(re.sub(r"`[^`]*`", "", cell))


def check(grid: Grid) -> tuple[int, list[str]]:
    """The number of figures of a table, and a message for each cell that differs from its results file."""
    if grid.kind == "settings":
        return 0, []
    count = sum(len(figures(cell)) for cells in grid.rows for cell in cells[1:])
    if grid.kind != "figures":
        return count, [f"line {grid.line}: a table with figures names no results file: <!-- figures: FILE ... -->"]
    records = [record for name in grid.files for record in results_file.read(ROOT / name)]
    lines = grid.expressions * len(grid.rows) if len(grid.expressions) == 1 else grid.expressions
    if len(lines) != len(grid.rows):
        return count, [f"line {grid.line}: {len(lines)} lines of expressions for {len(grid.rows)} rows"]
    errors = []
    for cells, expressions in zip(grid.rows, lines, strict=True):
        try:
            errors += [f"line {grid.line}, {cells[0]}: {error}" for error in _check_row(cells, expressions, records)]
        except (LookupError, TypeError, ValueError, NameError, SyntaxError) as error:
            errors.append(f"line {grid.line}, {cells[0]}: {error!r}")
    return count, errors


def _check_row(cells: tuple[str, ...], expressions: tuple[str, ...], records: list[Record]) -> Iterator[str]:
    if len(expressions) != len(cells):
        yield f"{len(expressions)} expressions for {len(cells)} columns"
        return
    variables: dict[str, Any] = {key: None for record in records for key in record}
    variables |= {"__builtins__": {}, "row": cells[0], "cells": cells, **functions(records)}
    selected = eval(expressions[0], variables) if expressions[0] else {}
    variables |= {"it": selected} | (selected if isinstance(selected, dict) else {})
    for cell, expression in zip(cells[1:], expressions[1:], strict=True):
        values = list(_numbers(eval(expression, variables) if expression else None))
        texts = figures(cell)
        if len(texts) != len(values) or not all(map(_is_equal, texts, values)):
            yield f'"{cell}", but {expression or "no expression"} is {[round(value, 5) for value in values]}'


def functions(records: list[Record]) -> dict[str, Callable[..., Any]]:
    """The functions that expressions may call, by name."""

    def every(**fields: Any) -> list[Record]:
        return [record for record in records if fields.items() <= {k: _hashable(v) for k, v in record.items()}.items()]

    def one(**fields: Any) -> Record:
        matches = every(**fields)
        if len(matches) != 1:
            raise LookupError(f"{len(matches)} records have {fields}")
        return matches[0]

    builtin = (abs, all, any, float, int, len, list, max, min, range, round, sorted, str, sum, zip, ceil, mean, median)
    return {"one": one, "every": every} | {function.__name__: function for function in builtin}


def _hashable(value: Any) -> Any:
    return value if not isinstance(value, list | dict) else str(value)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list | tuple):
        for element in value:
            yield from _numbers(element)
    elif isinstance(value, str):
        yield from map(_parse, figures(value))
    elif value is not None:
        yield float(value)


def _is_equal(text: str, value: float) -> bool:
    """Whether the value, rounded to the digits of the text, equals the number in it."""
    digits = len(text.partition(".")[2])
    return abs(_parse(text) - value) <= 0.5 * 10**-digits + 1e-9 * abs(value)


def _parse(text: str) -> float:
    return float(text.replace(",", ""))


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
