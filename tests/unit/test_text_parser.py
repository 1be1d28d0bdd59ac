"""Delimited text to columns: compared with the csv module; faults name the lines of malformed rows."""

import csv
import gzip
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwright.data.logs import text
from shardwright.data.logs.schema import SCHEMAS, Schema
from shardwright.data.logs.text import TextFile, TextPart
from shardwright.errors import UserError
from shardwright.kernels.hashing import Vocabulary, hash_strings, hash_to_rows
from shardwright.kernels.text_rows import PADDING, ColumnSpec, Parser, TextFormat

GAMMA, WORD = 0x9E3779B97F4A7C15, 0xFFFFFFFFFFFFFFFF
CRITEO = SCHEMAS["criteo"]
GOOD = "\t".join(["1", *(str(i) for i in range(13)), *(f"{i:08x}" for i in range(26))])


def hash_value(value: bytes) -> int:
    """The hash of a value, in plain Python."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
        return x ^ (x >> 31)

    if not value:
        return 0
    state = len(value)
    for start in range(0, len(value), 8):
        state = mix((state ^ int.from_bytes(value[start : start + 8], "little")) + GAMMA & WORD)
    return state or 1


def read_whole(path: Path, schema: Schema, rows: int = 7) -> TextPart:
    """Read all parts of a file and concatenate them."""
    file = TextFile(path, schema)
    schema = schema.resolve(file.columns, str(path))
    columns: dict[str, list] = {name: [] for name in schema.used_columns}
    faults = []
    for part in file.read_parts(schema, rows):
        faults += part.faults
        for name, values in part.columns.items():
            if isinstance(values, tuple):
                columns[name] += [items.tolist() for items in np.split(values[0], values[1])[:-1]]
            else:
                columns[name] += values.tolist()
    return TextPart(columns, faults)


def write(path: Path, lines: list[str], *, end: str = "\n") -> Path:
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


@given(value=st.binary(max_size=40))
def test_hashes_equal_their_definition(value):
    offsets = np.array([0, len(value)], np.int32)
    assert hash_strings(offsets, np.frombuffer(value + b"x", np.uint8)).tolist() == [hash_value(value)]


@given(st.lists(st.binary(max_size=20), max_size=30), st.integers(2, 1000), st.integers(0, WORD))
def test_hashed_rows_are_in_range_and_row_0_is_for_missing_values(values, rows, salt):
    hashed_rows = hash_to_rows(np.array([hash_value(value) for value in values], np.uint64), salt, rows)
    assert all((row == 0) == (not value) and 0 <= row < rows for row, value in zip(hashed_rows, values, strict=True))


@given(st.lists(st.integers(1, WORD), unique=True, max_size=50), st.lists(st.integers(0, WORD), max_size=50))
def test_vocabulary_rows(entries, more):
    vocabulary = Vocabulary(np.array(entries, np.uint64))
    values = np.array([*entries, *more, 0], np.uint64)
    row_of = {entry: 2 + index for index, entry in enumerate(entries)} | {0: 0}
    assert vocabulary.rows_of(values).tolist() == [row_of.get(int(entry), 1) for entry in values]
    assert vocabulary.num_rows == 2 + len(entries)


FIELD = st.text(st.characters(codec="utf-8", exclude_characters="\r\x00"), max_size=12)


@settings(max_examples=100)
@given(st.lists(st.tuples(FIELD, FIELD, FIELD), min_size=1, max_size=20), st.booleans(), st.integers(1, 40))
@example([("a", 'say "hi"', "x,y\nz")], True, 3)
def test_quoted_csv_reads_as_the_csv_module_wrote_it(tmp_path_factory, rows, crlf, size):
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n" if crlf else "\n", quoting=csv.QUOTE_ALL).writerows(rows)
    path = tmp_path_factory.mktemp("csv") / "log.csv"
    path.write_bytes(out.getvalue().encode())
    schema = Schema(label="l", categories=("a", "b", "c"), columns=("a", "b", "c"))
    parser_schema = Schema(label="a", categories=("b", "c"), columns=("a", "b", "c"), positive=0.0)
    specs = [ColumnSpec(name, "category") for name in schema.columns]
    parser, data, begin, rest = Parser(specs, TextFormat(","), 1000), path.read_bytes(), 0, b""
    while begin < len(data) or rest:
        block = data[begin : begin + size]
        begin += len(block)
        text_ = rest + block
        consumed, faults = parser.parse(text_ + bytes(PADDING), is_last=not block)
        assert not faults
        rest = text_[consumed:]
        if not block:
            break
    columns = parser.take()
    for index, name in enumerate(schema.columns):
        assert columns[name].tolist() == [hash_value(row[index].encode()) for row in rows]
    assert parser_schema.used_columns == ("a", "b", "c")


@settings(max_examples=100)
@given(st.binary(max_size=300), st.integers(1, 64), st.booleans())
def test_every_line_of_any_bytes_is_a_row_or_a_fault(tmp_path_factory, data, block, quoted):
    """Fuzz: no crash, and the block size does not change the result."""
    columns = [
        ColumnSpec("l", "label"),
        ColumnSpec("n", "number"),
        ColumnSpec("c", "category"),
        ColumnSpec("s", "list"),
    ]

    def read(size: int) -> tuple:
        parser, begin, rest, faults = Parser(columns, TextFormat(",", quoted), 1000), 0, b"", []
        while True:
            block = data[begin : begin + size]
            begin += len(block)
            consumed, new_faults = parser.parse(rest + block + bytes(PADDING), is_last=not block)
            faults += new_faults
            rest = (rest + block)[consumed:]
            if not block:
                rows = parser.take()
                lists = rows["s"][0].tolist(), rows["s"][1].tolist()
                return faults, rows["l"].tolist(), str(rows["n"].tolist()), rows["c"].tolist(), lists

    whole_file = read(len(data) + 1)
    assert read(block) == whole_file
    if not quoted:
        lines = [line for line in data.split(b"\n") if line not in (b"", b"\r")]
        # A single \r at the end of the data is a row of one column, which is a fault.
        rest = data.rpartition(b"\n")[2]
        assert len(whole_file[0]) + len(whole_file[1]) == len(lines) + (rest == b"\r")


NUMBERS = ["0", "-1", "7", "12345678", "123456789", "-99999999", "3.5", "1e3", "+4", "-0.25", "00012", ""]


def test_numbers(tmp_path):
    path = write(tmp_path / "a.csv", [f"1,{number}" for number in NUMBERS])
    result = read_whole(path, Schema(label="l", numbers=("n",), columns=("l", "n")))
    expected = np.array([float(number or "nan") for number in NUMBERS], np.float32)
    np.testing.assert_array_equal(np.array(result.columns["n"], np.float32), expected)
    assert not result.faults


@given(st.integers(-(10**12), 10**12) | st.floats(-1e30, 1e30, allow_nan=False))
def test_any_number_is_read_to_the_nearest_float(number):
    parser = Parser([ColumnSpec("l", "label"), ColumnSpec("n", "number")], TextFormat(","), 4)
    parser.parse(f"1,{number}\n".encode() + bytes(PADDING), is_last=True)
    assert parser.take()["n"].tolist() == [float(np.float32(float(str(number))))]


CASES = {
    "39 columns": (GOOD.rpartition("\t")[0], "the row has 39 columns, wanted 40"),
    "41 columns": (GOOD + "\tx", "the row has 41 columns, wanted 40"),
    "a quoted tab": (GOOD.replace("00000003", '"0000\t003"'), "the row has 41 columns, wanted 40"),
    "a bad hash": (GOOD.replace("00000003", "0000000g"), "column \"C4\": '0000000g' is not eight hexadecimal digits"),
    "a short hash": (GOOD.replace("00000003", "3"), "column \"C4\": '3' is not eight hexadecimal digits"),
    "a word for a number": (GOOD.replace("\t12\t", "\tmany\t"), "column \"I13\": 'many' is not a number"),
    "a huge number": (GOOD.replace("\t12\t", "\t1e99\t"), "column \"I13\": '1e99' is not a number"),
    "nan for a number": (GOOD.replace("\t12\t", "\tnan\t"), "column \"I13\": 'nan' is not a number"),
    "a label of 2": ("2" + GOOD[1:], "column \"label\": '2' is not a label; wanted 0 or 1"),
    "no label": (GOOD[1:], 'column "label": nothing is not a label; wanted 0 or 1'),
    "bytes that are no text": (GOOD.replace("\t12\t", "\t\udcff\t"), "column \"I13\": '�' is not a number"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_malformed_row_is_skipped_and_reported_with_its_line(tmp_path, case):
    row, message = CASES[case]
    path = tmp_path / "log.tsv"
    path.write_bytes("\n".join([GOOD, GOOD, "", row, GOOD, ""]).encode(errors="surrogateescape"))
    result = read_whole(path, CRITEO, rows=2)
    assert result.faults == [(4, message)]
    assert len(result.columns["label"]) == 3
    assert result.columns["C4"] == [hash_value(b"00000003")] * 3


def test_line_ends_and_byte_order_marks_do_not_matter(tmp_path):
    expected = read_whole(write(tmp_path / "plain.tsv", [GOOD] * 5), CRITEO).columns
    variants = {
        "crlf.tsv": "\r\n".join([GOOD] * 5 + [""]).encode(),
        "bom.tsv": b"\xef\xbb\xbf" + "\n".join([GOOD] * 5 + [""]).encode(),
        "no-end.tsv": "\n".join([GOOD] * 5).encode(),
        "no-end-crlf.tsv": "\r\n".join([GOOD] * 5).encode() + b"\r",
    }
    for name, data in variants.items():
        (tmp_path / name).write_bytes(data)
        assert read_whole(tmp_path / name, CRITEO).columns == expected, name


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".lz4"])
def test_compressed_files_are_read_and_truncated_ones_are_errors(tmp_path, suffix):
    rows = [GOOD.replace("\t12\t", f"\t{n}\t") for n in range(3000)]
    plain = write(tmp_path / "log.tsv", rows)
    path = tmp_path / f"log.tsv{suffix}"
    with pa.CompressedOutputStream(str(path), text.COMPRESSION[suffix]) as stream:
        stream.write(plain.read_bytes())
    assert read_whole(path, CRITEO, 1000).columns == read_whole(plain, CRITEO, 1000).columns
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(
        UserError, match=rf"log.tsv\{suffix}: (damaged after [\d,]+ bytes|cannot be read).*fetch the file"
    ):
        read_whole(path, CRITEO, 1000)


def test_uncompressed_and_empty_gz_files_are_errors(tmp_path):
    path = tmp_path / "log.tsv.gz"
    path.write_text(GOOD)
    with pytest.raises(UserError, match="cannot be read"):
        TextFile(path, CRITEO)
    path.write_bytes(gzip.compress(b""))
    with pytest.raises(UserError, match="the file is empty"):
        TextFile(path, CRITEO)


def test_empty_files_and_wrong_headers_are_errors(tmp_path):
    schema = Schema(label="click", categories=("site",))
    for name, data, message in (
        ("empty.csv", "", "the file is empty"),
        ("blank.csv", "\n\n", "the file is empty"),
        ("other.csv", "click,sites\n1,a\n", 'other.csv: no column "site"; did you mean "sites"'),
        ("twice.csv", "click,site,site\n", 'the header names column "site" twice'),
    ):
        path = tmp_path / name
        path.write_text(data)
        with pytest.raises(UserError, match=message):
            read_whole(path, schema)


def test_quotes_in_csv(tmp_path):
    schema = Schema(label="click", categories=("site",))
    path = write(tmp_path / "a.csv", ["click,site", '1,"a,b"', '0,"say ""hi"""', '1,"two\nlines"', "0,plain"])
    result = read_whole(path, schema)
    assert result.columns["site"] == [hash_value(value) for value in (b"a,b", b'say "hi"', b"two\nlines", b"plain")]
    path = write(tmp_path / "b.csv", ["click,site", '1,"a"b', "0,c", '1,"never closed', "0,d"])
    result = read_whole(path, schema)
    assert result.faults[0] == (2, 'column "site": text after the closing quote: \'"a"b\'')
    assert result.faults[1] == (4, 'column "site": a quote is opened and never closed')
    assert result.columns["site"] == [hash_value(b"c")]


def test_an_open_quote_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MAX_ROW_BYTES", 1 << 16)
    monkeypatch.setattr(text, "BLOCK_BYTES", 1 << 14)
    path = write(tmp_path / "a.csv", ["click,site", '1,"open', *["0,plain"] * 20_000])
    with pytest.raises(UserError, match="line 2: a row of over 0 MB; is a quote not closed"):
        read_whole(path, Schema(label="click", categories=("site",)))


def test_lists_and_the_last_characters_of_a_column(tmp_path):
    schema = Schema(
        label="l", categories=("hour",), lists=("genres",), tail=(("hour", 2),), columns=("l", "hour", "genres")
    )
    path = write(tmp_path / "a.csv", ["1,14102113,a|b||c", "0,13,", "1,,a"])
    result = read_whole(path, schema, rows=2)
    assert result.columns["hour"] == [hash_value(b"13"), hash_value(b"13"), 0]
    assert result.columns["genres"] == [[hash_value(item) for item in (b"a", b"b", b"c")], [], [hash_value(b"a")]]


def test_a_list_longer_than_the_buffer_is_an_error(tmp_path, monkeypatch):
    schema = Schema(label="l", lists=("ids",), columns=("l", "ids"))
    path = write(tmp_path / "a.csv", ["1,a", "1," + "|".join("b" for _ in range(300)), "0,c"])
    assert [len(ids) for ids in read_whole(path, schema, rows=8).columns["ids"]] == [1, 300, 1]
    with pytest.raises(UserError, match="the list has more items than the parser's buffer"):
        read_whole(path, schema, rows=4)


def test_labels_from_a_threshold_weights_and_times(tmp_path):
    schema = Schema(label="rating", positive=4.0, weight="w", time="t", categories=("user",))
    rows = ["user,rating,w,t", "a,5,0.5,3", "b,3.5,2,1", "c,4,0,2", "d,5,-1,9", "e,5,1,late", "f,,1,1"]
    result = read_whole(write(tmp_path / "a.csv", rows), schema)
    assert result.columns["rating"] == [1.0, 0.0, 1.0]
    assert result.columns["w"] == [0.5, 2.0, 0.0] and result.columns["t"] == [3.0, 1.0, 2.0]
    assert [fault.line for fault in result.faults] == [5, 6, 7]
