"""Compare the tables of the pages with the results files they name.

A comment directly above a table says where its figures are from:

    <!-- figures: benchmarks/results/NAME.json [...]
    one(side=row) | ms | 100 * share | [a, b]
    -->

Under the first line stands one line of expressions for all rows of the table, or one for each row in order. A line has
an expression per column, in Python. The first one selects the record of a row: `one(key=value, ...)` gives the only
record with these fields, `every(key=value, ...)` all; `row` is the text of the row's first cell, `cells` has all. In
the expressions behind it the fields of that record are names, and `it` is what the first one gave. A cell's figures
must equal their values, as many and in order, rounded as the cell shows them; where an expression is empty or None,
the cell must have no figures.

    <!-- settings -->

stands above a table whose digits are no measurements: defaults, formulas, sizes.
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
    """A table of a page, the line it begins at, and the marker above it."""

    line: int
    kind: str  # figures, settings, or "" where nothing says
    files: tuple[str, ...]
    expressions: tuple[tuple[str, ...], ...]
    rows: tuple[tuple[str, ...], ...]


def grids(text: str) -> Iterator[Grid]:
    """The tables of a page that have digits after their first column."""
    lines = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE).split("\n")
    at = 0
    while at < len(lines):
        end = at
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        if end - at > 2:
            comment = "\n".join(lines[_comment_above(lines, at) : at])
            above = MARKER.fullmatch(comment)
            rows = tuple(_cells(line) for line in lines[at + 2 : end])
            if above or any(figures(cell) for cells in rows for cell in cells[1:]):
                kind, files, body = above.groups() if above else ("", "", "")
                found = tuple(_parts(line) for line in (body or "").split("\n") if line.strip())
                yield Grid(at + 1, kind, tuple((files or "").split()), found, rows)
        at = max(end, at + 1)


def _comment_above(lines: list[str], at: int) -> int:
    """The first line of the comment that ends right above a table; the table's own line if there is none."""
    if at == 0 or not lines[at - 1].endswith("-->"):
        return at
    return next(line for line in range(at - 1, -1, -1) if lines[line].startswith("<!--"))


def _cells(line: str) -> tuple[str, ...]:
    return _parts(line.replace("\\|", "").strip()[1:-1])


def _parts(line: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in line.split("|"))


def figures(cell: str) -> list[str]:
    """The numbers of a cell as text; text in backticks is code and does not count."""
    return NUMBER.findall(re.sub(r"`[^`]*`", "", cell))


def check(grid: Grid) -> tuple[int, list[str]]:
    """The number of figures of a table, and a line for each cell that differs from its results file."""
    if grid.kind == "settings":
        return 0, []
    count = sum(len(figures(cell)) for cells in grid.rows for cell in cells[1:])
    if grid.kind != "figures":
        return count, [f"line {grid.line}: a table with figures names no results file: <!-- figures: FILE ... -->"]
    records = [record for name in grid.files for record in results_file.read(ROOT / name)]
    lines = grid.expressions * len(grid.rows) if len(grid.expressions) == 1 else grid.expressions
    if len(lines) != len(grid.rows):
        return count, [f"line {grid.line}: {len(lines)} lines of expressions for {len(grid.rows)} rows"]
    wrong = []
    for cells, expressions in zip(grid.rows, lines, strict=True):
        try:
            wrong += [f"line {grid.line}, {cells[0]}: {said}" for said in _row(cells, expressions, records)]
        except (LookupError, TypeError, ValueError, NameError, SyntaxError) as error:
            wrong.append(f"line {grid.line}, {cells[0]}: {error!r}")
    return count, wrong


def _row(cells: tuple[str, ...], expressions: tuple[str, ...], records: list[Record]) -> Iterator[str]:
    if len(expressions) != len(cells):
        yield f"{len(expressions)} expressions for {len(cells)} columns"
        return
    known: dict[str, Any] = {key: None for record in records for key in record}
    known |= {"__builtins__": {}, "row": cells[0], "cells": cells, **functions(records)}
    selected = eval(expressions[0], known) if expressions[0] else {}
    known |= {"it": selected} | (selected if isinstance(selected, dict) else {})
    for cell, expression in zip(cells[1:], expressions[1:], strict=True):
        values = list(_numbers(eval(expression, known) if expression else None))
        shown = figures(cell)
        if len(shown) != len(values) or not all(map(_equal, shown, values)):
            yield f'"{cell}" where {expression or "nothing"} gives {[round(value, 5) for value in values]}'


def functions(records: list[Record]) -> dict[str, Callable[..., Any]]:
    def every(**fields: Any) -> list[Record]:
        return [record for record in records if fields.items() <= {k: _hashable(v) for k, v in record.items()}.items()]

    def one(**fields: Any) -> Record:
        found = every(**fields)
        if len(found) != 1:
            raise LookupError(f"{len(found)} records have {fields}")
        return found[0]

    plain = (abs, all, any, float, int, len, list, max, min, range, round, sorted, str, sum, zip, ceil, mean, median)
    return {"one": one, "every": every} | {function.__name__: function for function in plain}


def _hashable(value: Any) -> Any:
    return value if not isinstance(value, list | dict) else str(value)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, str):
        yield from map(_parsed, figures(value))
    elif value is not None:
        yield float(value)


def _equal(shown: str, value: float) -> bool:
    """Whether the value, rounded to the digits shown, equals the number shown."""
    digits = len(shown.partition(".")[2])
    return abs(_parsed(shown) - value) <= 0.5 * 10**-digits + 1e-9 * abs(value)


def _parsed(shown: str) -> float:
    return float(shown.replace(",", ""))


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
