"""Click logs as sources: samples equal those of plain Python, for any order, chunk size and number of processes."""

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
from test_text_parser import hash_value

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


def make_rows(num_rows: int = ROWS, seed: int = 0) -> list[dict[str, Any]]:
    generator = np.random.default_rng(seed)
    return [
        {
            "click": int(generator.random() < 0.3),
            "age": "" if generator.random() < 0.1 else str(generator.integers(-3, 90)),
            "site": f"s{min(generator.zipf(1.5), 99)}",
            "device": "" if generator.random() < 0.2 else f"d{generator.integers(4)}",
            "tags": "|".join(f"t{tag}" for tag in generator.integers(0, 6, generator.integers(0, 4))),
            "w": f"{generator.integers(1, 4) / 2}",
            "time": str(generator.integers(0, 1000)),
        }
        for _ in range(num_rows)
    ]


@pytest.fixture
def log(tmp_path, monkeypatch):
    """log(**settings) -> the source of a CSV file of `make_rows()`; chunks are small so that there are several."""
    monkeypatch.chdir(tmp_path)
    for module in (clicks, convert):
        monkeypatch.setattr(module, "ROW_GROUP_SIZE", 64)
    lines = [",".join(make_rows(1)[0]), *(",".join(map(str, row.values())) for row in make_rows())]
    Path("log.csv").write_text("\n".join(lines) + "\n")
    Path("schema.toml").write_text(SCHEMA)

    def make(extra_schema: str = "", **settings: Any) -> ClickLog:
        if extra_schema:
            Path("schema.toml").write_text(SCHEMA + extra_schema)
        return open_log("log", "log.csv", schema="schema.toml", **settings)

    return make


def expected_samples(raw: list[dict[str, Any]], training: list[dict[str, Any]], min_count: int) -> dict[str, Any]:
    """Ids, numbers, labels and weights of raw rows, in plain Python; the vocabulary is that of the training rows."""
    vocabularies = {}
    for name in ("site", "device", "tags"):
        count = Count(value for row in training for value in row[name].split("|" if name == "tags" else None) if value)
        frequent = sorted((-num, hash_value(value.encode())) for value, num in count.items() if num >= min_count)
        vocabularies[name] = {code_: 2 + rank for rank, (_, code_) in enumerate(frequent)}
    logs = [np.sign(float(r["age"])) * np.log1p(abs(float(r["age"]))) for r in training if r["age"]]
    mean, deviation = np.mean(logs), np.std(logs)

    def row_of(name: str, value: str) -> int:
        return vocabularies[name].get(hash_value(value.encode()), 1) if value else 0

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
        "rows": {name: 2 + len(vocabulary) for name, vocabulary in vocabularies.items()},
    }


def ids_by_feature(batch: Any) -> dict[str, list[list[int]]]:
    ids, start = {}, 0
    for name, lengths in zip(batch.features, batch.lengths.tolist(), strict=True):
        ids[name] = []
        for length in lengths:
            ids[name].append(batch.values[start : start + length].tolist())
            start += length
    assert start == len(batch.values)
    return ids


def assert_source_equals(source: ClickLog, raw: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert source.size == len(raw)
    order = np.random.default_rng(1).permutation(len(raw))
    batch = source.take(order)
    for name in ("site", "device", "tags"):
        assert ids_by_feature(batch)[name] == [expected[name][index] for index in order]
    np.testing.assert_allclose(batch.dense[:, 0], np.array(expected["age"])[order], rtol=1e-5, atol=1e-6)
    assert batch.labels["click"].tolist() == [expected["click"][index] for index in order]
    assert batch.weights.tolist() == [expected["w"][index] for index in order]
    assert {name: size for name, size, _ in source.features} == expected["rows"]
    assert len(source.take(np.empty(0, np.int64)).values) == 0


def test_samples_of_a_split_by_time_equal_those_of_plain_python(log):
    raw = make_rows()
    source = log(split={"test": 0.2, "validation": 0.1}, encoding={"min_count": 5})
    training = raw[:350]
    for part, rows in ((source, training), (source.evaluation(), raw[350:400]), (source.test(), raw[400:])):
        assert_source_equals(part, rows, expected_samples(rows, training, 5))
    assert [multi for _, _, multi in source.features] == [False, False, True]


def test_rows_are_sorted_by_the_time_column(log):
    raw = sorted(make_rows(), key=lambda row: int(row["time"]))
    source = log('time = "time"\n', split={"test": 0.2})
    assert_source_equals(source, raw[:400], expected_samples(raw[:400], raw[:400], 4))


def test_a_random_split_takes_every_row_once(log):
    source = log(split={"by": "random", "test": 0.3, "seed": 7})
    parts = [part.take(np.arange(part.size)) for part in (source, source.evaluation())]
    weights = np.concatenate([part.weights for part in parts])
    assert sorted(weights.tolist()) == sorted(float(row["w"]) for row in make_rows())
    other = replace(source, split=replace(source.split, seed=8))
    assert other.take(np.arange(50)).weights.tolist() != source.take(np.arange(50)).weights.tolist()


def test_hashed_ids_depend_on_the_seed(log):
    source = log(encoding={"rows": 50})
    ids = ids_by_feature(source.take(np.arange(400)))
    assert {rows_ for _, rows_, _ in source.features} == {50}
    assert all(0 <= row < 50 for name in ids for bag in ids[name] for row in bag)
    missing = [row["device"] == "" for row in make_rows()[:400]]
    assert [bag == [0] for bag in ids["device"]] == missing
    assert ids_by_feature(log(encoding={"rows": 50}).take(np.arange(400))) == ids
    assert ids_by_feature(log(encoding={"rows": 50, "seed": 1}).take(np.arange(400))) != ids


def test_a_small_memory_limit_gives_the_same_samples(log):
    source = log()
    order = np.random.default_rng(0).permutation(source.size)
    small = replace(source, memory=1)
    assert source.span is None and small.span == 128
    expected = ids_by_feature(source.take(order))
    assert ids_by_feature(small.take(order)) == expected and len(small._chunks) == 2


@pytest.mark.parametrize("reordered", [{"split": {"by": "random"}}, {"extra_schema": 'time = "time"\n'}])
def test_sorted_or_random_splits_must_fit_in_memory(log, reordered):
    source = replace(log(**reordered), memory=1)
    with pytest.raises(UserError, match=r"another order than they are stored in .*set data.memory=\d"):
        Loader(source, batch_size=32)
    assert Loader(replace(source, memory=1 << 30), batch_size=32).peek().batch_size == 32


def test_a_constant_numeric_feature_stays_small(log):
    lines = Path("log.csv").read_text().splitlines()
    cells = [line.split(",") for line in lines[1:]]
    changed_lines = [",".join([row[0], "3.7" if index < 350 else "5.0", *row[2:]]) for index, row in enumerate(cells)]
    Path("log.csv").write_text("\n".join([lines[0], *changed_lines]) + "\n")
    source = log(split={"test": 0.3})
    assert np.abs(source.take(np.arange(10)).dense).max() < 1e-5
    assert np.abs(source.evaluation().take(np.arange(10)).dense).max() < 2


def test_processes_that_open_a_log_at_once_share_one_cache(log):
    source = log()
    spawn = multiprocessing.get_context("spawn")
    for path in Path(source.cache).glob("statistics-*"):
        path.unlink()
    with spawn.Pool(3) as pool:
        results = pool.map(_feature_sizes, [(source.cache, "log.csv")] * 6, chunksize=1)
    assert len(set(results)) == 1
    assert not list(Path(convert.CACHE_DIRECTORY).rglob(".*"))


def _feature_sizes(paths: tuple[str, str]) -> str:
    reopened = open_log("log", paths[1], schema="schema.toml", cache="elsewhere")
    return f"{reopened.features} {ClickLog(paths[0]).features}"


def test_strict_reading_stops_at_the_first_malformed_row(log, monkeypatch):
    with open("log.csv", "a") as file:
        file.write("1,5,s1\n" + "1,5,s1,d1,t1,1.0,3\n" * 400_000)
    parts = []
    monkeypatch.setattr(convert.RowGroupWriter, "add", lambda self, part: parts.append(part))
    with pytest.raises(UserError, match="fix it"):
        log()
    assert len(parts) < 100


def test_reading_stops_early_at_too_many_malformed_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(convert, "MAX_MALFORMED_ROWS", 1000)
    Path("log.tsv").write_text("a,b,c\n" * 300_000)
    with pytest.raises(UserError, match=r"[\d,]+ of [\d,]+ rows are malformed") as error:
        open_log("criteo", "log.tsv", strict=False)
    assert "300,000" not in str(error.value)


def test_skipped_rows_leave_full_row_groups(log):
    lines = Path("log.csv").read_text().splitlines()
    with_bad_lines = [line if index % 7 else "bad" for index, line in enumerate(lines[1:])]
    Path("log.csv").write_text("\n".join([lines[0], *with_bad_lines]) + "\n")
    source = log(strict=False, split={"test": 0})
    raw = [row for index, row in enumerate(make_rows()) if index % 7]
    sizes = np.diff(source._starts)
    assert set(sizes[:-1].tolist()) == {64} and sizes.sum() == len(raw)
    assert_source_equals(source, raw, expected_samples(raw, raw, 4))


def test_a_parquet_directory_may_contain_its_cache_and_bad_files_are_named(log):
    raw = pa.table({"click": [0, 1] * 20, "site": ["a", "b"] * 20})
    Path("logs").mkdir()
    Path("schema.toml").write_text('label = "click"\ncategories = ["site"]\n')
    pq.write_table(raw, "logs/0.parquet")
    first = open_log("log", "logs", schema="schema.toml", cache="logs/.cache")
    assert open_log("log", "logs", schema="schema.toml", cache="logs/.cache").cache == first.cache
    pq.write_table(raw.drop_columns("site"), "logs/1.parquet")
    with pytest.raises(UserError, match='1.parquet: column "site" is missing; in the first file it is string'):
        open_log("log", "logs", schema="schema.toml")
    Path("logs/1.parquet").write_bytes(Path("logs/0.parquet").read_bytes()[:-40])
    with pytest.raises(UserError, match="not readable as Parquet"):
        open_log("log", "logs", schema="schema.toml")


def test_the_loader_shuffles_within_windows_when_memory_is_short(log):
    source = replace(log(), memory=1)
    with Loader(source, batch_size=32, seed=3) as loader:
        order = [loader._order.indices(0, batch) for batch in range(len(loader))]
        assert sum(batch.batch_size for batch in loader) == source.size
    for start in range(0, len(order), 4):
        indices = np.concatenate(order[start : start + 4])
        assert sorted(indices) == list(range(start * 32, start * 32 + len(indices)))
        assert indices.tolist() != sorted(indices)


def test_worker_processes_read_the_same_batches(log):
    source = log()
    without_workers = [batch.features.values.tolist() for batch in Loader(source, batch_size=64)]
    with Loader(source, batch_size=64, workers=2) as loader:
        assert [batch.features.values.tolist() for batch in loader] == without_workers


def test_a_pickled_source_does_not_contain_its_rows(log):
    source = log()
    source.take(np.arange(3))
    copy = pickle.loads(pickle.dumps(source))
    assert copy == source and repr(copy) == repr(source)
    assert len(pickle.dumps(source)) < 1000


def test_a_cache_is_reused_until_the_file_changes(log):
    first = log()
    written_at = Path(first.cache, "rows.parquet").stat().st_mtime_ns
    assert log().cache == first.cache and Path(first.cache, "rows.parquet").stat().st_mtime_ns == written_at
    with open("log.csv", "a") as file:
        file.write("1,5,s1,d1,t1,1.0,3\n")
    assert log().cache != first.cache
    assert log().size + log().evaluation().size == ROWS + 1


def test_a_failed_conversion_leaves_no_cache(log, monkeypatch):
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
    warning = capsys.readouterr().err
    assert f"2 of {ROWS + 2} rows are malformed and skipped; the first, line {ROWS + 2}: the row has 3" in warning
    with pytest.raises(UserError, match="fix it"):
        log()


def test_a_file_of_a_different_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("log.tsv").write_text("a,b,c\n" * 30)
    with pytest.raises(UserError, match="30 of 30 rows are malformed, so its format probably differs"):
        open_log("criteo", "log.tsv", strict=False)


def test_parquet_gives_the_same_samples_as_csv(log):
    raw = make_rows()
    table = {
        "click": pa.array([row["click"] for row in raw]),
        "age": pa.array([int(row["age"]) if row["age"] else None for row in raw]),
        "site": pa.array([row["site"] for row in raw]).dictionary_encode(),
        "device": pa.array([row["device"] or None for row in raw]),
        "tags": pa.array([[tag for tag in row["tags"].split("|") if tag] for row in raw]),
        "w": pa.array([float(row["w"]) for row in raw]),
    }
    Path("parts").mkdir()
    full_table = pa.table(table)
    pq.write_table(full_table[:200], "parts/0.parquet")
    pq.write_table(full_table[200:], "parts/1.parquet", row_group_size=70)
    text = log()
    source = open_log("log", "parts", schema="schema.toml")
    parquet_batch, text_batch = (log_.take(np.arange(log_.size)) for log_ in (source, text))
    assert ids_by_feature(parquet_batch) == ids_by_feature(text_batch)
    np.testing.assert_array_equal(parquet_batch.dense, text_batch.dense)


def test_wrong_values_in_parquet_are_refused(tmp_path, monkeypatch):
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
    "settings, message",
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
def test_wrong_settings_are_named(log, settings, message):
    log()
    with pytest.raises(UserError, match=message):
        open_log("log", "log.csv", **({"schema": "schema.toml"} | settings))


@pytest.mark.parametrize(
    "schema, message",
    [
        ('label = "click"\n', "a model would have no features"),
        ('label = "click"\ncategories = ["click"]\n', 'column "click" appears 2 times'),
        ('label = "click"\ncategories = ["site"]\ndelimiter = "ab"\n', "delimiter is 'ab'; wanted one character"),
        ('label = "click"\ncategorys = ["site"]\n', 'schema.toml: categorys: unknown key; did you mean "categories"'),
        ('label = "click"\ncategories = ["site"]\ntail = [["sit", 2]]\n', 'tail of "sit", which is not in categories'),
        ('label = "click"\ncategories = ["sit"]\n', 'no column "sit"; did you mean "site"'),
    ],
)
def test_wrong_schemas_are_named(log, schema, message):
    log()
    Path("schema.toml").write_text(schema)
    with pytest.raises(UserError, match=message):
        open_log("log", "log.csv", schema="schema.toml")


def test_a_missing_path_and_a_missing_file_are_refused():
    with pytest.raises(UserError, match="data=FILE"):
        open_log("criteo", "")
    with pytest.raises(UserError, match="data.path=gone: no such file"):
        open_log("criteo", "gone")


def test_statistics_equal_counts_in_plain_python(log):
    source = log(split={"test": 0.2})
    log_stats = source.training_statistics
    raw = make_rows()[:400]
    sites = Count(row["site"] for row in raw)
    assert log_stats.rows == 400 and log_stats.base_rate == np.mean([row["click"] for row in raw])
    assert log_stats.counts["site"].counts.tolist() == sorted(sites.values(), reverse=True)
    assert log_stats.counts["device"].missing == pytest.approx(np.mean([not row["device"] for row in raw]))
    for entry in source.statistics:
        assert entry.popularity[-1][1] == pytest.approx(1.0) and 0 < entry.distinct_share <= 1
    batches = np.random.default_rng(0).choice(list(sites.elements()), (2000, 50))
    distinct = np.mean([len(set(batch)) for batch in batches]) / 50
    assert log_stats.counts["site"].distinct_share(50) == pytest.approx(distinct, rel=0.02)
    assert statistics._load(next(Path(source.cache).glob("statistics-*.npz"))).counts.keys() == log_stats.counts.keys()


def test_lossy_counting_stays_within_its_error_bound():
    generator = np.random.default_rng(0)
    values = (generator.zipf(1.2, 200_000) % 1_000_003 + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    true = Count(values.tolist())
    counter = LossyCounter(5000)
    for part in np.array_split(values, 37):
        counter.add(part)
    codes, counts = counter.most_common()
    assert len(codes) <= 5000 and counter.max_error > 0
    assert all(
        0 <= count - true[id_] <= counter.max_error for id_, count in zip(codes.tolist(), counts.tolist(), strict=True)
    )
    assert {id_ for id_, count in true.items() if count > counter.max_error} <= set(codes.tolist())
    assert counter.num_distinct == pytest.approx(len(true), rel=0.03)
    exact = LossyCounter(1_000_000)
    exact.add(values)
    assert dict(zip(*(array.tolist() for array in exact.most_common()), strict=True)) == true
    assert exact.max_error == 0 and exact.num_distinct == len(true)


def test_a_cache_describes_its_log(log):
    entry = files.read(convert.ConvertedLog, Path(log().cache, "log.json"))
    assert (entry.rows, entry.malformed, entry.in_time_order, entry.origin) == (ROWS, 0, True, "log.csv")


def test_encodings_compare_by_value_and_splits_have_bounds():
    assert Encoding() == Encoding(rows=0) and Split().bounds(70, "test") == (60, 70)
