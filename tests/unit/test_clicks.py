"""Click logs as sources: what is read equals a slow reading, whatever the order, the chunks and the processes."""

import multiprocessing
import pickle
from collections import Counter as Count
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_text import code

from shardwright.data.features import statistics
from shardwright.data.features.transforms import Encoding
from shardwright.data.loading.loader import Loader
from shardwright.data.logs import convert
from shardwright.data.logs.click_log import open_log
from shardwright.data.sources import clicks
from shardwright.data.sources.clicks import ClickLog, Split
from shardwright.errors import UserError
from shardwright.kernels.hashing import LossyCounter
from shardwright.spec import files

ROWS = 500
SCHEMA = """
label = "click"
numbers = ["age"]
categories = ["site", "device"]
lists = ["tags"]
weight = "w"
"""


def rows(num: int = ROWS, seed: int = 0) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    return [
        {
            "click": int(draw.random() < 0.3),
            "age": "" if draw.random() < 0.1 else str(draw.integers(-3, 90)),
            "site": f"s{min(draw.zipf(1.5), 99)}",
            "device": "" if draw.random() < 0.2 else f"d{draw.integers(4)}",
            "tags": "|".join(f"t{tag}" for tag in draw.integers(0, 6, draw.integers(0, 4))),
            "w": f"{draw.integers(1, 4) / 2}",
            "time": str(draw.integers(0, 1000)),
        }
        for _ in range(num)
    ]


@pytest.fixture
def log(tmp_path, monkeypatch):
    """log(**settings) -> the source of a CSV file of `rows()`; chunks are small so that there are several."""
    monkeypatch.chdir(tmp_path)
    for module in (clicks, convert):
        monkeypatch.setattr(module, "ROW_GROUP_SIZE", 64)
    lines = [",".join(rows(1)[0]), *(",".join(map(str, row.values())) for row in rows())]
    Path("log.csv").write_text("\n".join(lines) + "\n")
    Path("schema.toml").write_text(SCHEMA)

    def make(more: str = "", **settings: Any) -> ClickLog:
        if more:
            Path("schema.toml").write_text(SCHEMA + more)
        return open_log("log", "log.csv", schema="schema.toml", **settings)

    return make


def slow(raw: list[dict[str, Any]], training: list[dict[str, Any]], least: int) -> dict[str, Any]:
    """Ids, numbers, labels and weights of these rows, in plain Python."""
    entries = {}
    for name in ("site", "device", "tags"):
        count = Count(value for row in training for value in row[name].split("|" if name == "tags" else None) if value)
        kept = sorted((-num, code(value.encode())) for value, num in count.items() if num >= least)
        entries[name] = {one: 2 + place for place, (_, one) in enumerate(kept)}
    logs_ = [np.sign(float(r["age"])) * np.log1p(abs(float(r["age"]))) for r in training if r["age"]]
    mean, deviation = np.mean(logs_), np.std(logs_)

    def row_of(name: str, value: str) -> int:
        return entries[name].get(code(value.encode()), 1) if value else 0

    def number(value: str) -> float:
        plain = float(value or "nan")
        return 0.0 if not value else (np.sign(plain) * np.log1p(abs(plain)) - mean) / deviation

    return {
        "site": [[row_of("site", row["site"])] for row in raw],
        "device": [[row_of("device", row["device"])] for row in raw],
        "tags": [[row_of("tags", tag) for tag in row["tags"].split("|") if tag] for row in raw],
        "age": [number(row["age"]) for row in raw],
        "click": [row["click"] for row in raw],
        "w": [float(row["w"]) for row in raw],
        "rows": {name: 2 + len(found) for name, found in entries.items()},
    }


def bags(taken: Any) -> dict[str, list[list[int]]]:
    found, start = {}, 0
    for name, lengths in zip(taken.features, taken.lengths.tolist(), strict=True):
        found[name] = []
        for length in lengths:
            found[name].append(taken.values[start : start + length].tolist())
            start += length
    assert start == len(taken.values)
    return found


def check(source: ClickLog, raw: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert source.size == len(raw)
    order = np.random.default_rng(1).permutation(len(raw))
    taken = source.take(order)
    for name in ("site", "device", "tags"):
        assert bags(taken)[name] == [expected[name][place] for place in order]
    np.testing.assert_allclose(taken.dense[:, 0], np.array(expected["age"])[order], rtol=1e-5, atol=1e-6)
    assert taken.labels["click"].tolist() == [expected["click"][place] for place in order]
    assert taken.weights.tolist() == [expected["w"][place] for place in order]
    assert {name: size for name, size, _ in source.features} == expected["rows"]
    assert len(source.take(np.empty(0, np.int64)).values) == 0


def test_split_by_time_equals_a_slow_reading(log):
    raw = rows()
    source = log(split={"test": 0.2, "validation": 0.1}, encoding={"min_count": 5})
    training = raw[:350]
    for part, mine in ((source, training), (source.evaluation(), raw[350:400]), (source.test(), raw[400:])):
        check(part, mine, slow(mine, training, 5))
    assert [multi for _, _, multi in source.features] == [False, False, True]


def test_rows_are_put_in_the_order_of_time(log):
    raw = sorted(rows(), key=lambda row: int(row["time"]))
    source = log('time = "time"\n', split={"test": 0.2})
    check(source, raw[:400], slow(raw[:400], raw[:400], 4))


def test_a_random_split_takes_every_row_once(log):
    source = log(split={"by": "random", "test": 0.3, "seed": 7})
    parts = [part.take(np.arange(part.size)) for part in (source, source.evaluation())]
    weights = np.concatenate([part.weights for part in parts])
    assert sorted(weights.tolist()) == sorted(float(row["w"]) for row in rows())
    other = replace(source, split=replace(source.split, seed=8))
    assert other.take(np.arange(50)).weights.tolist() != source.take(np.arange(50)).weights.tolist()


def test_hashing_is_seeded_and_by_column(log):
    one = log(encoding={"rows": 50})
    ids = bags(one.take(np.arange(400)))
    assert {rows_ for _, rows_, _ in one.features} == {50}
    assert all(0 <= row < 50 for name in ids for bag in ids[name] for row in bag)
    missing = [row["device"] == "" for row in rows()[:400]]
    assert [bag == [0] for bag in ids["device"]] == missing
    assert bags(log(encoding={"rows": 50}).take(np.arange(400))) == ids
    assert bags(log(encoding={"rows": 50, "seed": 1}).take(np.arange(400))) != ids


def test_little_memory_gives_the_same_samples(log):
    source = log()
    order = np.random.default_rng(0).permutation(source.size)
    small = replace(source, memory=1)
    assert source.span is None and small.span == 128
    expected = bags(source.take(order))
    assert bags(small.take(order)) == expected and len(small._chunks) == 2


@pytest.mark.parametrize("reordered", [{"split": {"by": "random"}}, {"more": 'time = "time"\n'}])
def test_rows_in_another_order_must_fit_in_memory(log, reordered):
    source = replace(log(**reordered), memory=1)
    with pytest.raises(UserError, match=r"another order than they are read in .*set data.memory=\d"):
        Loader(source, batch_size=32)
    assert Loader(replace(source, memory=1 << 30), batch_size=32).peek().batch_size == 32


def test_a_constant_number_stays_small(log):
    lines = Path("log.csv").read_text().splitlines()
    fixed = [line.split(",") for line in lines[1:]]
    kept = [",".join([row[0], "3.7" if place < 350 else "5.0", *row[2:]]) for place, row in enumerate(fixed)]
    Path("log.csv").write_text("\n".join([lines[0], *kept]) + "\n")
    source = log(split={"test": 0.3})
    assert np.abs(source.take(np.arange(10)).dense).max() < 1e-5
    assert np.abs(source.evaluation().take(np.arange(10)).dense).max() < 2


def test_processes_that_meet_at_a_cache_all_get_it(log):
    source = log()
    spawn = multiprocessing.get_context("spawn")
    for made in Path(source.cache).glob("statistics-*"):
        made.unlink()
    with spawn.Pool(3) as pool:
        found = pool.map(_sizes, [(source.cache, "log.csv")] * 6, chunksize=1)
    assert len(set(found)) == 1
    assert not list(Path(convert.CACHE_DIRECTORY).rglob(".*"))


def _sizes(where: tuple[str, str]) -> str:
    again = open_log("log", where[1], schema="schema.toml", cache="elsewhere")
    return f"{again.features} {ClickLog(where[0]).features}"


def test_strict_reading_stops_at_the_first_malformed_row(log, monkeypatch):
    with open("log.csv", "a") as file:
        file.write("1,5,s1\n" + "1,5,s1,d1,t1,1.0,3\n" * 400_000)
    parts = []
    monkeypatch.setattr(convert.RowGroupWriter, "add", lambda self, part: parts.append(part))
    with pytest.raises(UserError, match="fix it"):
        log()
    assert len(parts) < 100


def test_hopeless_files_are_given_up_early(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(convert, "MAX_MALFORMED_ROWS", 1000)
    Path("log.tsv").write_text("a,b,c\n" * 300_000)
    with pytest.raises(UserError, match=r"[\d,]+ of [\d,]+ rows are malformed") as error:
        open_log("criteo", "log.tsv", strict=False)
    assert "300,000" not in str(error.value)


def test_parts_of_any_size_become_whole_row_groups(log):
    lines = Path("log.csv").read_text().splitlines()
    spoiled = [line if place % 7 else "bad" for place, line in enumerate(lines[1:])]
    Path("log.csv").write_text("\n".join([lines[0], *spoiled]) + "\n")
    source = log(strict=False, split={"test": 0})
    raw = [row for place, row in enumerate(rows()) if place % 7]
    sizes = np.diff(source._starts)
    assert set(sizes[:-1].tolist()) == {64} and sizes.sum() == len(raw)
    check(source, raw, slow(raw, raw, 4))


def test_a_directory_may_hold_other_things(log):
    raw = pa.table({"click": [0, 1] * 20, "site": ["a", "b"] * 20})
    Path("here").mkdir()
    Path("schema.toml").write_text('label = "click"\ncategories = ["site"]\n')
    pq.write_table(raw, "here/0.parquet")
    first = open_log("log", "here", schema="schema.toml", cache="here/.cache")
    assert open_log("log", "here", schema="schema.toml", cache="here/.cache").cache == first.cache
    pq.write_table(raw.drop_columns("site"), "here/1.parquet")
    with pytest.raises(UserError, match='1.parquet: column "site" is missing; in the first file it is string'):
        open_log("log", "here", schema="schema.toml")
    Path("here/1.parquet").write_bytes(Path("here/0.parquet").read_bytes()[:-40])
    with pytest.raises(UserError, match="not readable as Parquet"):
        open_log("log", "here", schema="schema.toml")


def test_the_loader_shuffles_among_neighbours_where_memory_is_short(log):
    source = replace(log(), memory=1)
    with Loader(source, batch_size=32, seed=3) as loader:
        order = [loader._order.indices(0, batch) for batch in range(len(loader))]
        assert sum(batch.batch_size for batch in loader) == source.size
    for window in range(0, len(order), 4):
        found = np.concatenate(order[window : window + 4])
        assert sorted(found) == list(range(window * 32, window * 32 + len(found)))
        assert found.tolist() != sorted(found)


def test_workers_read_the_same(log):
    source = log()
    alone = [batch.features.values.tolist() for batch in Loader(source, batch_size=64)]
    with Loader(source, batch_size=64, workers=2) as loader:
        assert [batch.features.values.tolist() for batch in loader] == alone


def test_what_was_read_does_not_travel(log):
    source = log()
    source.take(np.arange(3))
    again = pickle.loads(pickle.dumps(source))
    assert again == source and repr(again) == repr(source)
    assert len(pickle.dumps(source)) < 1000


def test_a_cache_is_made_once_and_anew_when_the_file_changes(log):
    first = log()
    made = Path(first.cache, "rows.parquet").stat().st_mtime_ns
    assert log().cache == first.cache and Path(first.cache, "rows.parquet").stat().st_mtime_ns == made
    with open("log.csv", "a") as file:
        file.write("1,5,s1,d1,t1,1.0,3\n")
    assert log().cache != first.cache
    assert log().size + log().evaluation().size == ROWS + 1


def test_a_conversion_cut_short_leaves_no_cache(log, monkeypatch):
    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert.pq.ParquetWriter, "write_table", full_disk)
    with pytest.raises(UserError, match="the cache cannot be written .*No space left.*data.cache"):
        log()
    assert not list(Path(convert.CACHE_DIRECTORY).iterdir())
    monkeypatch.undo()


def test_malformed_rows_are_counted_or_refused(log, capsys):
    with open("log.csv", "a") as file:
        file.write("1,5,s1\nmaybe,5,s1,d1,t1,1.0,3\n")
    with pytest.raises(UserError, match=f"log.csv: line {ROWS + 2}: the row has 3 columns, wanted 7; fix it, or skip"):
        log()
    source = log(strict=False)
    assert source.size + source.evaluation().size == ROWS
    said = capsys.readouterr().err
    assert f"2 of {ROWS + 2} rows are malformed and skipped; the first, line {ROWS + 2}: the row has 3" in said
    with pytest.raises(UserError, match="fix it"):
        log()


def test_a_file_of_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("log.tsv").write_text("a,b,c\n" * 30)
    with pytest.raises(UserError, match="30 of 30 rows are malformed, so the format is probably another"):
        open_log("criteo", "log.tsv", strict=False)


def test_parquet_reads_like_text(log):
    raw = rows()
    table = {
        "click": pa.array([row["click"] for row in raw]),
        "age": pa.array([int(row["age"]) if row["age"] else None for row in raw]),
        "site": pa.array([row["site"] for row in raw]).dictionary_encode(),
        "device": pa.array([row["device"] or None for row in raw]),
        "tags": pa.array([[tag for tag in row["tags"].split("|") if tag] for row in raw]),
        "w": pa.array([float(row["w"]) for row in raw]),
    }
    Path("parts").mkdir()
    whole = pa.table(table)
    pq.write_table(whole[:200], "parts/0.parquet")
    pq.write_table(whole[200:], "parts/1.parquet", row_group_size=70)
    text = log()
    source = open_log("log", "parts", schema="schema.toml")
    mine, theirs = (one.take(np.arange(one.size)) for one in (source, text))
    assert bags(mine) == bags(theirs)
    np.testing.assert_array_equal(mine.dense, theirs.dense)


def test_parquet_with_wrong_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("schema.toml").write_text('label = "click"\ncategories = ["site"]\nnumbers = ["age"]\n')
    pq.write_table(pa.table({"click": [0, 1, 2, None], "site": ["a"] * 4, "age": [1.0, 2.0, 3.0, 4.0]}), "a.parquet")
    with pytest.raises(UserError, match='line 3: column "click": 2.0 is not a valid label'):
        open_log("log", "a.parquet", schema="schema.toml")
    assert open_log("log", "a.parquet", schema="schema.toml", strict=False, split={"test": 0}).size == 2
    pq.write_table(pa.table({"click": [0], "site": [["a"]], "age": ["x"]}), "b.parquet")
    with pytest.raises(UserError, match='column "age" is string; wanted numbers'):
        open_log("log", "b.parquet", schema="schema.toml")
    Path("c.parquet").write_text("none")
    with pytest.raises(UserError, match="c.parquet: not readable as Parquet"):
        open_log("log", "c.parquet", schema="schema.toml")


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"split": {"by": "day"}}, 'split is "day"; allowed: time, random'),
        ({"split": {"test": 1.5}}, "test share of the split is 1.5"),
        ({"split": {"test": 0.5, "validation": 0.5}}, "leave no training rows"),
        ({"split": {"tset": 0.5}}, 'data.split: tset: unknown key; did you mean "test"'),
        ({"encoding": {"rows": 1}}, "rows is 1; wanted 0 for a vocabulary, or 2"),
        ({"encoding": {"min_count": 0}}, "min_count is 0"),
        ({"schema": ""}, 'key "data.schema" is missing'),
        ({"schema": "gone.toml"}, "gone.toml: cannot be read"),
    ],
)
def test_wrong_settings_are_named(log, settings, said):
    log()
    with pytest.raises(UserError, match=said):
        open_log("log", "log.csv", **({"schema": "schema.toml"} | settings))


@pytest.mark.parametrize(
    "schema, said",
    [
        ('label = "click"\n', "a model would have no features"),
        ('label = "click"\ncategories = ["click"]\n', 'column "click" appears 2 times'),
        ('label = "click"\ncategories = ["site"]\ndelimiter = "ab"\n', "delimiter is 'ab'; wanted one character"),
        ('label = "click"\ncategorys = ["site"]\n', 'schema.toml: categorys: unknown key; did you mean "categories"'),
        ('label = "click"\ncategories = ["site"]\ntail = [["sit", 2]]\n', 'tail of "sit", which is not in categories'),
        ('label = "click"\ncategories = ["sit"]\n', 'no column "sit"; did you mean "site"'),
    ],
)
def test_wrong_schemas_are_named(log, schema, said):
    log()
    Path("schema.toml").write_text(schema)
    with pytest.raises(UserError, match=said):
        open_log("log", "log.csv", schema="schema.toml")


def test_no_path_and_no_file():
    with pytest.raises(UserError, match="data=FILE"):
        open_log("criteo", "")
    with pytest.raises(UserError, match="data.path=gone: no such file"):
        open_log("criteo", "gone")


def test_statistics_tell_what_the_rows_are(log):
    source = log(split={"test": 0.2})
    found = source.training_statistics
    raw = rows()[:400]
    sites = Count(row["site"] for row in raw)
    assert found.rows == 400 and found.base_rate == np.mean([row["click"] for row in raw])
    assert found.counts["site"].counts.tolist() == sorted(sites.values(), reverse=True)
    assert found.counts["device"].missing == pytest.approx(np.mean([not row["device"] for row in raw]))
    for entry in source.statistics:
        assert entry.popularity[-1][1] == pytest.approx(1.0) and 0 < entry.distinct_share <= 1
    drawn = np.random.default_rng(0).choice(list(sites.elements()), (2000, 50))
    distinct = np.mean([len(set(batch)) for batch in drawn]) / 50
    assert found.counts["site"].distinct_share(50) == pytest.approx(distinct, rel=0.02)
    assert statistics._load(next(Path(source.cache).glob("statistics-*.npz"))).counts.keys() == found.counts.keys()


def test_counting_in_little_memory_errs_by_no_more_than_it_says():
    draw = np.random.default_rng(0)
    values = (draw.zipf(1.2, 200_000) % 1_000_003 + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    true = Count(values.tolist())
    counter = LossyCounter(5000)
    for part in np.array_split(values, 37):
        counter.add(part)
    codes, counts = counter.most_common()
    assert len(codes) <= 5000 and counter.max_error > 0
    assert all(
        0 <= count - true[one] <= counter.max_error for one, count in zip(codes.tolist(), counts.tolist(), strict=True)
    )
    assert {one for one, count in true.items() if count > counter.max_error} <= set(codes.tolist())
    assert counter.num_distinct == pytest.approx(len(true), rel=0.03)
    exact = LossyCounter(1_000_000)
    exact.add(values)
    assert dict(zip(*(array.tolist() for array in exact.most_common()), strict=True)) == true
    assert exact.max_error == 0 and exact.num_distinct == len(true)


def test_what_a_cache_says_of_itself(log):
    found = files.read(convert.ConvertedLog, Path(log().cache, "log.json"))
    assert (found.rows, found.malformed, found.in_time_order, found.origin) == (ROWS, 0, True, "log.csv")


def test_encodings_and_splits_are_values():
    assert Encoding() == Encoding(rows=0) and Split().bounds(70, "test") == (60, 70)
