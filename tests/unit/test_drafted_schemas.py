"""`shardwright data schema` drafts what a log's columns are; labels that are texts, and dates, are read."""

import random
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cli import shardwright  # noqa: F401
from test_text_parser import read_whole

from shardwright.data.logs.draft import draft_schema
from shardwright.data.logs.parquet import ParquetLog
from shardwright.data.logs.schema import Schema, read_schema
from shardwright.errors import UserError

HEADER = ("row", "seen_at", "user_id", "age", "price", "city", "tags", "source", "bought")


def make_rows(num: int = 400) -> list[tuple]:
    draw = random.Random(0)
    start = datetime(2026, 3, 1, tzinfo=UTC)
    return [
        (
            f"r{number}",
            (start + timedelta(minutes=7 * number)).strftime("%Y-%m-%d %H:%M:%S"),
            draw.randrange(150),
            draw.randrange(18, 80),
            f"{draw.random() * 90:.2f}",
            draw.choice(("Oslo", "Rome", "")),
            "|".join(draw.sample("abcdefg", draw.randrange(1, 4))),
            "web",
            draw.choice(("no", "yes", "no")),
        )
        for number in range(num)
    ]


def write_csv(path: Path, rows: list[tuple], delimiter: str = ",") -> Path:
    path.write_text("\n".join(delimiter.join(map(str, row)) for row in (HEADER, *rows)) + "\n")
    return path


def drafted(path: Path, folder: Path) -> Schema:
    (folder / "drafted.toml").write_text(draft_schema(path))
    return read_schema(str(folder / "drafted.toml"))


EXPECTED = Schema(
    label="bought",
    positive="yes",
    time="seen_at",
    numbers=("age", "price"),
    categories=("user_id", "city"),
    lists=("tags",),
)


def test_columns_are_drafted_by_their_values(tmp_path):
    path = write_csv(tmp_path / "log.csv", make_rows())
    assert drafted(path, tmp_path) == EXPECTED
    text = draft_schema(path)
    assert "# not read: row (a value of its own in nearly every row)" in text
    assert "# not read: source (a single value, or none)" in text


def test_delimiters_and_parquet_are_drafted_too(tmp_path):
    rows = make_rows()
    table = pa.table({name: [row[at] for row in rows] for at, name in enumerate(HEADER)})
    as_lists = pa.array([row[6].split("|") for row in rows])
    times = pa.array([datetime.fromisoformat(row[1]) for row in rows], pa.timestamp("ms"))
    table = table.set_column(6, "tags", as_lists).set_column(1, "seen_at", times)
    pq.write_table(table, tmp_path / "log.parquet")
    assert drafted(tmp_path / "log.parquet", tmp_path) == EXPECTED
    semicolons = drafted(write_csv(tmp_path / "log.csv", rows, ";"), tmp_path)
    assert semicolons.delimiter == ";" and semicolons.categories == EXPECTED.categories


def test_a_drafted_log_trains(shardwright, tmp_path):  # noqa: F811
    path = write_csv(tmp_path / "log.csv", make_rows())
    code, text, err = shardwright("data", "schema", str(path))
    assert code == 0, err
    Path("log.toml").write_text(text)
    code, out, err = shardwright("train", "log-logistic", f"data={path}", "data.schema=log.toml", "train.batch_size=64")
    assert code == 0 and "AUC" in out, err


MISTAKES = {
    "an empty file": ("", "0 lines; wanted a header and at least two rows"),
    "no header": ("1,2\n3,4\n5,6\n", "no header"),
    "one column": ("a b\n1 2\n3 4\n", "one column"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_what_cannot_be_drafted_is_one_line(tmp_path, case):
    text, message = MISTAKES[case]
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        draft_schema(tmp_path / "a.csv")


def test_a_log_without_a_label_says_so(tmp_path):
    (tmp_path / "a.csv").write_text("user,stars\n" + "".join(f"u{n % 30},{n % 5 + 1}\n" for n in range(200)))
    assert 'label = ""  # no column has two values: name the label; for ratings add positive = 4.0' in draft_schema(
        tmp_path / "a.csv"
    )


def test_labels_that_are_texts(tmp_path):
    (tmp_path / "a.csv").write_text("l,c\nyes,a\nno,b\n,c\nmaybe,d\nyes,e\n")
    schema = Schema(label="l", positive="yes", categories=("c",))
    part = read_whole(tmp_path / "a.csv", schema)
    assert part.columns["l"] == [1, 0, 0, 1]
    assert [fault.line for fault in part.faults] == [4] and "nothing is not a label" in part.faults[0].reason
    table = pa.table({"l": ["yes", "no", None, "maybe", "yes"], "c": list("abcde")})
    pq.write_table(table, tmp_path / "a.parquet")
    log = ParquetLog(tmp_path / "a.parquet")
    columns, faults = log.to_part(next(log.read_batches(["l", "c"], 10)), schema, 0)
    assert columns["l"].tolist() == [1, 0, 0, 1] and [fault.line for fault in faults] == [3]


ZONES = st.sampled_from([None, UTC, timezone(timedelta(hours=5, minutes=30)), timezone(timedelta(hours=-8))])


@given(st.datetimes(datetime(1800, 1, 1), datetime(2400, 1, 1)), ZONES, st.sampled_from([" ", "T"]))
def test_dates_are_seconds_from_1970(tmp_path_factory, moment, zone, mark):
    moment = moment.replace(tzinfo=zone)
    folder = tmp_path_factory.mktemp("dates")
    text = moment.isoformat(mark).replace("+00:00", "Z")
    (folder / "a.csv").write_text(f"l,c,t\n1,a,{text}\n0,b,{moment.date()}\n")
    schema = Schema(label="l", categories=("c",), time="t")
    midnight = datetime(moment.year, moment.month, moment.day, tzinfo=UTC)
    expected = [moment.replace(tzinfo=zone or UTC).timestamp(), midnight.timestamp()]
    np.testing.assert_allclose(read_whole(folder / "a.csv", schema).columns["t"], expected, rtol=0, atol=1e-5)
    table = pa.table({"l": [1, 0], "c": ["a", "b"], "t": [text, text]})
    pq.write_table(table, folder / "a.parquet")
    log = ParquetLog(folder / "a.parquet")
    columns, _ = log.to_part(next(log.read_batches(["l", "c", "t"], 10)), schema, 0)
    np.testing.assert_allclose(columns["t"], [expected[0]] * 2, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "text", ["2026-13-01", "2026-00-01", "2026-01-32", "2026-01-01 24:00", "2026-1-1", "2026-01-01x", "soon"]
)
def test_other_texts_are_no_times(tmp_path, text):
    (tmp_path / "a.csv").write_text(f"l,c,t\n1,a,{text}\n")
    (fault,) = read_whole(tmp_path / "a.csv", Schema(label="l", categories=("c",), time="t")).faults
    assert fault.reason.endswith("is not a time; wanted a number, or as 2026-11-30 21:05:00")
