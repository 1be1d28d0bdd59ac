"""A growing directory as a source: same order of rows for all readers, whenever files are added."""

import contextlib
import errno
import fcntl
import gzip
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from reading import reader
from test_click_logs import SCHEMA, expected_samples, ids_by_feature, make_rows

from shardwright.data.loading.loader import Loader
from shardwright.data.loading.worker import RowsNotReady
from shardwright.data.logs import convert
from shardwright.data.readers.client import Readers
from shardwright.data.sources import clicks, journal, stream
from shardwright.data.sources.journal import JOURNAL_FILE
from shardwright.data.sources.source import NumpyBatch
from shardwright.data.sources.stream import GrowingLog, open_stream
from shardwright.errors import UserError
from shardwright.jagged import Jagged
from shardwright.runtime.run import setup

RAW = make_rows(600)
NAMES = ("1.csv", "2.csv.gz", "3.parquet", "4.csv")  # 150 rows each


@pytest.fixture(autouse=True)
def growing_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (clicks, convert, stream):
        monkeypatch.setattr(module, "ROW_GROUP_SIZE", 64)
    for module in (journal, stream):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    Path("schema.toml").write_text(SCHEMA)
    Path("in").mkdir()


def csv(raw: list[dict[str, Any]]) -> str:
    return "\n".join([",".join(RAW[0]), *(",".join(map(str, row.values())) for row in raw)]) + "\n"


def add_files(*names: str, raw: list[dict[str, Any]] | None = None) -> None:
    """Add files with RAW's rows or `raw` as producers should: write under another name, then rename."""
    for name in names:
        file_rows = RAW[150 * NAMES.index(name) :][:150] if raw is None else raw
        draft = Path("in", f".{name}")
        if name.endswith(".gz"):
            draft.write_bytes(gzip.compress(csv(file_rows).encode()))
        elif name.endswith(".parquet"):
            table = {
                "click": pa.array([row["click"] for row in file_rows]),
                "age": pa.array([int(row["age"]) if row["age"] else None for row in file_rows]),
                "site": pa.array([row["site"] for row in file_rows]),
                "device": pa.array([row["device"] or None for row in file_rows]),
                "tags": pa.array([[tag for tag in row["tags"].split("|") if tag] for row in file_rows]),
                "w": pa.array([float(row["w"]) for row in file_rows]),
            }
            pq.write_table(pa.table(table), draft)
        else:
            draft.write_text(csv(file_rows))
        draft.rename(Path("in", name))


def open_source(**options: Any) -> GrowingLog:
    return open_stream("in", **{"schema": "schema.toml"} | options)


def check(batch: NumpyBatch, raw: list[dict[str, Any]], training: list[dict[str, Any]] = RAW[:150]) -> None:
    expected = expected_samples(raw, training, 4)
    for name in ("site", "device", "tags"):
        assert ids_by_feature(batch)[name] == expected[name]
    assert batch.dense is not None and batch.weights is not None
    np.testing.assert_allclose(batch.dense[:, 0], expected["age"], rtol=1e-5, atol=1e-6)
    assert batch.labels["click"].tolist() == expected["click"]
    assert batch.weights.tolist() == expected["w"]


def weights(source: GrowingLog, num: int) -> list[float]:
    return source.take(np.arange(num)).weights.tolist()  # pyright: ignore[reportOptionalMemberAccess]


def expected(num: int) -> list[float]:
    return [float(row["w"]) for row in RAW[:num]]


def entries(source: GrowingLog | None = None) -> list[dict[str, Any]]:
    (path,) = (
        Path(convert.CACHE_DIRECTORY).glob("in-*/journal.jsonl")
        if source is None
        else [Path(source.folder, JOURNAL_FILE)]
    )
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_of_all_formats_are_ordered_by_file_name():
    add_files(*reversed(NAMES))
    source = open_source()
    assert source.size is None and source.num_dense == 1
    assert {name: size for name, size, _ in source.features} == expected_samples(RAW, RAW[:150], 4)["rows"]
    assert [statistics.feature for statistics in source.statistics] == ["site", "device", "tags"]
    check(source.take(np.arange(600)), RAW)
    order = np.random.default_rng(0).permutation(600)
    check(source.take(order), [RAW[index] for index in order])
    small = GrowingLog(**{**source.__getstate__(), "memory": 1})
    check(small.take(order), [RAW[index] for index in order])
    assert len(small._chunks) == 2 and small == pickle.loads(pickle.dumps(small)) and repr(small) == repr(source)
    assert len(source.take(np.empty(0, np.int64)).values) == 0
    assert [entry["name"] for entry in entries()] == list(NAMES) and {entry["rows"] for entry in entries()} == {150}


def test_reading_waits_for_later_rows(capsys, monkeypatch):
    monkeypatch.setattr(journal, "WAIT_NOTICE_SECONDS", 0.05)

    def add_one_by_one() -> None:
        for name in NAMES:
            time.sleep(0.25)
            add_files(name)

    thread = threading.Thread(target=add_one_by_one)
    thread.start()
    source = open_source()
    loader = Loader(source, batch_size=100, shuffle=False)
    batches = [batch.weights.tolist() for batch in islice(loader, 6)]
    thread.join()
    assert sum(batches, []) == expected(600)
    notices = capsys.readouterr().err.splitlines()
    assert notices[:2] == [
        "in: waiting for 1 samples; there are 0 in 0 files",
        "in: waiting for 200 samples; there are 150 in 1 files; last file: 1.csv",
    ]
    assert len(notices) == 4


def test_ranks_wait_for_the_whole_batch():
    add_files("1.csv")
    loader = Loader(open_source(), batch_size=200, shuffle=False, shard=(0, 4))
    threading.Timer(0.3, add_files, ["2.csv.gz"]).start()
    start = time.monotonic()
    assert loader.peek().weights.tolist() == expected(50)
    assert time.monotonic() - start >= 0.25


def test_errors_name_a_file_added_out_of_order():
    add_files("1.csv", "3.parquet")
    source = open_source()
    assert weights(source, 300)[:150] == expected(150)
    add_files("2.csv.gz")
    with pytest.raises(UserError, match="^in/2.csv.gz: appeared after 3.parquet had been read"):
        source.wait(301)
    with pytest.raises(UserError, match="appeared after"):
        open_source()
    assert weights(source, 300)[:150] == expected(150), "rows already in the journal need no new listing"


def test_a_listing_that_misses_a_file_keeps_the_order(monkeypatch):
    """Listing is not atomic: of two files that are added during it, it may see only the second."""
    add_files("1.csv")
    source = open_source()
    add_files("2.csv.gz", "3.parquet")
    list_files, missed = journal._list_files, []

    def list_without_second(directory: Path) -> set[str]:
        names = list_files(directory)
        if not missed:
            names.remove("2.csv.gz")
            missed.append(True)
        return names

    monkeypatch.setattr(journal, "_list_files", list_without_second)
    assert weights(source, 450) == expected(450) and missed


def test_errors_name_a_changed_file(monkeypatch):
    add_files("1.csv")
    source = open_source()
    with open("in/1.csv", "a") as file:
        file.write("1,5,s1,d1,t1,1.0,3\n")
    for read in (lambda: source.wait(151), open_source):
        with pytest.raises(UserError, match="^in/1.csv: changed after its [0-9,]+ rows were read"):
            read()
    add_files("1.csv")
    convert_file = convert.convert
    for broken in (False, True):

        def change_during_conversion(path: Path, *arguments: Any, broken: bool = broken, **options: Any) -> Path:
            output = convert_file(path, *arguments, **options)
            path.write_text("half")
            if broken:
                raise UserError("line 2 is half a line")
            return output

        monkeypatch.setattr(journal, "convert", change_during_conversion)
        with pytest.raises(UserError, match="^in/1.csv: changed while it was read; write it elsewhere"):
            open_source(cache=f"other{broken}")
        Path("in/1.csv").unlink()
        add_files("1.csv")


def test_a_file_renamed_during_reading_is_read_under_its_new_name(monkeypatch):
    add_files("1.csv")
    source, convert_file = open_source(), convert.convert
    add_files("2.csv.inprogress", raw=RAW[150:200])

    def rename_during_conversion(path: Path, *arguments: Any, **options: Any) -> Path:
        output = convert_file(path, *arguments, **options)
        if path.suffix == ".inprogress":
            path.unlink()
            add_files("2.csv", raw=RAW[150:300])
        return output

    monkeypatch.setattr(journal, "convert", rename_during_conversion)
    assert weights(source, 300) == expected(300)
    add_files("3.parquet")
    assert weights(source, 450) == expected(450)
    assert [entry["name"] for entry in entries()] == ["1.csv", "2.csv", "3.parquet"]
    assert len(list(Path(source.folder, "files").iterdir())) == 3, "rows of the incomplete file are dropped"


def test_errors_tell_what_to_do_about_a_file_filled_in_place():
    Path("in/0.csv").touch()
    add_files("1.csv")
    source = open_source()
    Path("in/0.csv").write_text(csv(RAW[:10]))
    with pytest.raises(UserError, match="its 0 rows were read; .*restore its content .*name that sorts after 1.csv"):
        source.wait(151)


def test_names_of_incomplete_files_are_ignored():
    add_files("1.csv")
    for name in (".2.csv", "_SUCCESS", "2.csv.tmp", "2.csv.part"):
        Path("in", name).write_text("half a fi")
    Path("in/0").mkdir()
    source = open_source()
    assert weights(source, 150) == expected(150)
    add_files("2.csv.gz")
    assert weights(source, 300) == expected(300)


def test_files_without_rows_are_in_the_journal():
    Path("in/0.csv").touch()
    Path("in/1-.parquet").touch()
    add_files("1.csv")
    add_files("1_.csv", raw=[])
    Path("in/1b.csv.gz").write_bytes(gzip.compress(b""))
    add_files("1c.parquet", raw=[])
    add_files("2.csv.gz")
    source = open_source()
    assert weights(source, 300) == expected(300) and source.first == "0.csv"
    assert [(entry["name"], entry["rows"]) for entry in entries()] == [
        *(("0.csv", 0), ("1-.parquet", 0), ("1.csv", 150), ("1_.csv", 0), ("1b.csv.gz", 0)),
        *(("1c.parquet", 0), ("2.csv.gz", 150)),
    ]


def test_deleted_files_keep_their_row_numbers(monkeypatch):
    add_files("1.csv", "2.csv.gz", "3.parquet")
    source = open_source()
    assert weights(source, 450) == expected(450)
    for name in NAMES[:3]:
        Path("in", name).unlink()
    assert weights(open_source(), 450) == expected(450)
    add_files("4.csv")
    assert weights(open_source(), 600) == expected(600), "caches of the first files are kept"
    monkeypatch.setattr(journal, "PINNED_ROWS", 200)
    draft = Path(source.folder, "files/.half-made")
    draft.mkdir()
    add_files("5.csv", raw=RAW[:10])
    source = open_source()
    source.wait(601)
    assert not draft.exists()
    for start, end in ((0, 300), (450, 610)):
        assert source.take(np.arange(start, end)).weights.tolist() == (expected(600) + expected(10))[start:end]
    with pytest.raises(
        UserError,
        match=r"in/3.parquet: was deleted or changed, .*samples 300 to 449 .*later checkpoint, or .*another data.cache",
    ):
        source.take(np.arange(440, 460))


def test_a_lost_cache_is_recreated_and_a_damaged_one_reported():
    add_files("1.csv", "2.csv.gz")
    source = open_source()
    assert weights(source, 300) == expected(300)
    (cache,) = Path(source.folder, "files").glob("2-*")
    shutil.rmtree(cache)
    assert weights(open_source(), 300) == expected(300)
    os.truncate(cache / "rows.parquet", 100)
    with pytest.raises(UserError, match=f"{cache}: damaged .*remove it: it is created again if 2.csv.gz still exists"):
        weights(open_source(), 300)
    shutil.rmtree(cache)
    assert weights(open_source(), 300) == expected(300)


def test_a_run_does_not_resume_on_other_rows_after_a_lost_journal():
    add_files(*NAMES[:3])
    loader = Loader(open_source(), batch_size=50, shuffle=False)
    states = [loader.state_dict() for _ in islice(loader, 8)]
    assert [state["counted"][0] for state in states] == [1, 1, 1, 2, 2, 2, 3, 3]
    shutil.rmtree(".shardwright")

    def resume(state: dict[str, Any]) -> list[float]:
        loader = Loader(open_source(), batch_size=50, shuffle=False)
        loader.load_state_dict(json.loads(json.dumps(state)))
        return loader.peek().weights.tolist()

    assert resume(states[7]) == expected(450)[400:], "all files still exist"
    shutil.rmtree(".shardwright")
    Path("in/2.csv.gz").unlink()
    for names in (["4.csv"], []):
        for state in (states[3], states[7]):
            with pytest.raises(UserError, match="files of its journal are not the files that the run was trained on"):
                resume(state)
        add_files(*names)
    assert resume(states[1]) == expected(150)[100:]
    del states[7]["counted"]
    resume(states[7])  # saved by an earlier version


def test_removing_or_replacing_the_journal_in_use_is_an_error(monkeypatch):
    add_files("1.csv", "2.csv.gz")
    source, convert_file = open_source(), convert.convert
    path = Path(source.folder, "journal.jsonl")
    source.wait(150)
    content = path.read_bytes()

    def remove_during_conversion(*arguments: Any, **options: Any) -> Path:
        path.unlink()
        return convert_file(*arguments, **options)

    monkeypatch.setattr(journal, "convert", remove_during_conversion)
    message = "journal.jsonl: was removed or replaced while it was in use"
    for _ in range(2):
        with pytest.raises(UserError, match=message):
            source.wait(300)
    assert not path.exists()
    for text in (b"", content * 2):
        path.with_name("other").write_bytes(text)
        path.with_name("other").rename(path)
        with pytest.raises(UserError, match=message):
            source.wait(300)
        assert path.read_bytes() == text


def test_rows_are_synced_before_their_journal_line(monkeypatch):
    Path("schema.toml").write_text(SCHEMA + 'time = "time"\n')
    names, real_fsync = [], os.fsync

    def fsync(handle: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name.partition("-")[0])
        real_fsync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    add_files("1.csv")
    open_source()
    line = names.index("journal.jsonl")
    assert {"rows.parquet", "order.npy", "log.json", "1", "files"} <= set(names[:line]) and "in" in names[line:]


def test_listings_do_not_grow_with_the_number_of_files(monkeypatch):
    listings, stats = [], []
    for calls, name in ((listings, "_list_files"), (stats, "_size_and_mtime")):
        function = getattr(journal, name)
        monkeypatch.setattr(journal, name, lambda path, log=calls, real=function: log.append(path) or real(path))
    for number in range(40):
        add_files(f"{number:02}.csv", raw=RAW[:2])
    source = open_source()
    for num in range(2, 82, 2):
        source.wait(num)
    assert len(entries()) == 40 and len(listings) < 10 and len(stats) < 40 * 2 + 10 * journal.NUM_RECENT_FILES
    monkeypatch.setattr(journal, "SETTLE_SECONDS", 0.05)
    threading.Timer(0.4, add_files, ["41.csv"], {"raw": RAW[:2]}).start()
    listings.clear()
    source.wait(82)
    assert 3 <= len(listings) < 10


def test_repeated_waits_print_one_notice(capsys, monkeypatch):
    monkeypatch.setattr(journal, "WAIT_NOTICE_SECONDS", 0.0)
    add_files("1.csv")
    source = open_source()

    def pause(seconds: float) -> None:
        raise RowsNotReady("")

    for _ in range(3):
        with pytest.raises(RowsNotReady):
            source.wait(151, pause)
    assert capsys.readouterr().err == "in: waiting for 151 samples; there are 150 in 1 files; last file: 1.csv\n"


def test_a_disk_without_locks_is_an_error(monkeypatch):
    add_files("1.csv")

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match=r"lock: cannot be locked \(No locks available\); set data.cache to a disk"):
        open_source()


def test_hot_ids_are_counted_in_at_most_the_batches_of_the_run(monkeypatch):
    def make_batches(*arguments: object) -> Any:
        for _ in range(4):
            yield SimpleNamespace(features=Jagged(("f",), torch.tensor([3, 3, 1]), torch.tensor([[1, 2]])))
        raise AssertionError("reads more batches than the run has, which may never be written")

    sparse = SimpleNamespace(
        tables=[SimpleNamespace(name="t", rows=5)],
        features=[SimpleNamespace(table="t")],
        read=lambda features: features,
        check=lambda _: None,
    )
    monkeypatch.setattr(setup, "sparse_of", lambda _: sparse)
    monkeypatch.setattr(setup.recipe, "make_loader", make_batches)
    settings: Any = SimpleNamespace(train=SimpleNamespace(steps=2, accumulate=2))
    plan: Any = SimpleNamespace(tables=[SimpleNamespace(table="t", order="load")])
    assert setup.hottest_ids(settings, Any, Any, plan)["t"].tolist() == [3, 1]


def test_learned_transforms_survive_the_first_files_deletion():
    add_files("1.csv")
    source = open_source()
    Path("in/1.csv").unlink()
    add_files("2.csv.gz")
    assert open_source() == source
    check(open_source().take(np.arange(300)), RAW[:300])
    other = open_source(encoding={"rows": 50})
    assert other.learned != source.learned and {rows for _, rows, _ in other.features} == {50}
    strict = open_source(strict=False)
    assert strict.folder != source.folder and strict.first == "2.csv.gz", "`strict` is part of the cache key"


def test_incomplete_journal_lines_are_ignored():
    add_files("1.csv", "2.csv.gz")
    source = open_source()
    source.wait(300)
    path = Path(source.folder, "journal.jsonl")
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    assert weights(open_source(), 300) == expected(300)
    assert path.read_bytes() == content
    add_files("3.parquet")
    with path.open("ab") as file:
        file.write(b'{"name": "3.par')
    assert weights(source, 450) == expected(450)
    assert len(entries()) == 3
    path.write_text("what?\n" + path.read_text())
    with pytest.raises(UserError, match="journal.jsonl: damaged: b'what.*then read again"):
        open_source()


def test_concurrent_processes_read_each_file_once():
    add_files(*NAMES[:2])
    threading.Timer(1.0, add_files, NAMES[2:]).start()
    workers = [subprocess.Popen([sys.executable, "-c", READ_ALL], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate()[0] for process in workers]
    assert outputs == [f"{open_source()!r} {expected(600)}\n"] * 3
    assert [entry["name"] for entry in entries()] == list(NAMES)
    (folder,) = Path(convert.CACHE_DIRECTORY).iterdir()
    assert len(list((folder / "files").iterdir())) == 4 and not list(folder.rglob(".*"))


READ_ALL = """
import sys
import numpy as np
from shardwright.data.sources.stream import open_stream
source = open_stream("in", schema="schema.toml")
weights = source.take(np.arange(600)).weights.tolist()
assert "torch" not in sys.modules
print(source, weights)
"""


def test_transforms_of_an_earlier_log():
    add_files(*NAMES[:2])
    earlier = clicks.ClickLog(
        str(next(Path(open_source().folder, "files").glob("1-*"))), clicks.Split(test=0.5), clicks.Encoding(min_count=2)
    )
    Path("run/transforms").mkdir(parents=True)
    earlier.transforms.write(Path("run/transforms"))
    source = open_source(schema="", like="run")
    assert source.features == earlier.features and source != open_source()
    assert ids_by_feature(source.take(np.arange(70))) == ids_by_feature(earlier.take(np.arange(70)))
    assert open_source(schema="", like="run/transforms") == source
    assert source.statistics == open_source().statistics
    with pytest.raises(UserError, match="data.schema and data.like=run are both set"):
        open_source(like="run")
    with pytest.raises(UserError, match="data.encoding and data.like"):
        open_source(schema="", like="run", encoding={"rows": 9})
    with pytest.raises(UserError, match="data.like=in: neither it nor in/transforms holds transforms.json"):
        open_source(schema="", like="in")


def test_time_orders_the_rows_of_each_file():
    Path("schema.toml").write_text(SCHEMA + 'time = "time"\n')
    add_files("1.csv", "2.csv.gz")
    raw = [row for part in (RAW[:150], RAW[150:300]) for row in sorted(part, key=lambda row: int(row["time"]))]
    check(open_source().take(np.arange(300)), raw)


def test_malformed_rows_are_errors_or_skipped(capsys):
    add_files("1.csv")
    text = csv(RAW[150:300]).splitlines()
    add_files("2.csv", raw=[])
    Path("in/2.csv").write_text("\n".join([*text[:11], "1,5,s1", *text[11:]]) + "\n")
    source = open_source()
    with pytest.raises(UserError, match="^in/2.csv: line 12: the row has 3 columns, wanted 7; fix it"):
        source.wait(151)
    lenient = open_source(strict=False)
    assert weights(lenient, 300) == expected(300)
    assert "in/2.csv: 1 of 151 rows are malformed and skipped; the first, line 12" in capsys.readouterr().err
    assert [entry["malformed"] for entry in entries(lenient)] == [0, 1]
    assert open_source(strict=False) == lenient
    assert "journal.jsonl: 1 malformed rows were skipped in the files so far" in capsys.readouterr().err
    Path("in/2.csv").write_text("\n".join(text) + "\n")
    assert weights(source, 300) == expected(300), "the file was repaired before it was read"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": ""}, 'key "data.path" is missing'),
        ({"path": "nowhere"}, "data.path=nowhere: no such directory"),
        ({"schema": ""}, 'key "data.schema" is missing: criteo, avazu, a TOML file, or a section'),
        ({"encoding": {"rows": 1}}, "rows is 1; wanted 0 for"),
        ({"encoding": {"row": 9}}, "data.encoding: row: unknown key"),
        ({"memory": 0}, "data.memory=0; wanted more"),
        ({"cache": "schema.toml"}, "cannot be written .*; set data.cache"),
    ],
)
def test_errors_in_settings(options, message):
    with pytest.raises(UserError, match=message):
        open_stream(**{"path": "in", "schema": "schema.toml"} | options)


def test_shuffling_is_refused():
    add_files("1.csv")
    with pytest.raises(UserError, match=r"GrowingLog cannot be shuffled: .*set data.shuffle=false"):
        Loader(open_source(), batch_size=10)


def batches(loader: Loader, num: int) -> list[Any]:
    return [(batch.features.values.tolist(), batch.weights.tolist()) for batch in islice(loader, num)]


def test_workers_give_the_same_batches_and_close_while_waiting():
    add_files("1.csv", "2.csv.gz")
    source = open_source()
    threading.Timer(1.0, add_files, NAMES[2:]).start()
    with Loader(source, batch_size=50, shuffle=False, workers=2) as loader:
        expected_batches = batches(loader, 12)
        loader.close()
        loader.load_state_dict(loader.state_dict() | {"batch": 6})
        assert batches(loader, 6) == expected_batches[6:]
        start = time.monotonic()  # both workers wait for rows that nobody writes
        loader.close()
        assert time.monotonic() - start < 0.8
    assert expected_batches == batches(Loader(open_source(), batch_size=50, shuffle=False), 12)


def test_errors_in_workers_reach_the_loader():
    add_files("1.csv", "3.parquet")
    with Loader(open_source(), batch_size=50, shuffle=False, workers=1) as loader:
        batches(loader, 4)
        add_files("2.csv.gz")
        with pytest.raises(UserError, match="appeared after"):
            batches(loader, 4)


def test_trainers_of_a_waiting_reader_do_not_time_out():
    add_files("1.csv")
    source = open_source()
    with reader(source, batch_size=50, seed=0, shuffle=False, workers=2) as address:
        readers = Readers((address,), timeout_seconds=0.6)
        with Loader(source, batch_size=50, shuffle=False, readers=readers, prefetch=2) as loader:
            threading.Timer(2.0, add_files, ["2.csv.gz"]).start()
            received = batches(loader, 6)
        start = time.monotonic()
    assert time.monotonic() - start < 0.8, "the reader ends while its workers wait"
    assert received == batches(Loader(source, batch_size=50, shuffle=False), 6)


def test_a_waiting_trainer_does_not_block_others():
    """Rank 0 has prefetched all rows that exist, and the reader has one worker."""
    add_files("1.csv")
    source, order = open_source(), {"batch_size": 50, "shuffle": False}
    local = [batches(Loader(source, **order, shard=(rank, 2)), 3) for rank in (0, 1)]
    with reader(source, seed=0, **order) as address:
        first, second = (Loader(source, **order, shard=(rank, 2), readers=Readers((address,))) for rank in (0, 1))
        assert batches_within_10_seconds(first, 3) == local[0]
        assert batches_within_10_seconds(second, 3) == local[1]
        second.close()
        second.load_state_dict(second.state_dict() | {"batch": 0})
        assert batches_within_10_seconds(second, 3) == local[1], "open requests of a closed trainer block no other"
        add_files("2.csv.gz")
        assert batches_within_10_seconds(first, 1)[0][1] == expected(175)[150:]
        first.close()
        second.close()


def batches_within_10_seconds(loader: Loader, num: int) -> list[Any]:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.extend(batches(loader, num)), daemon=True)
    thread.start()
    thread.join(10)
    return result


PRINT_WORKERS = """
import multiprocessing
from shardwright.data.loading.loader import Loader
from shardwright.data.sources.stream import open_stream
if __name__ == "__main__":
    with Loader(open_stream("in", schema="schema.toml"), batch_size=100, shuffle=False, workers={workers}) as loader:
        for batch in loader:
            print(*(child.pid for child in multiprocessing.active_children()), flush=True)
"""


@pytest.mark.parametrize(("signal_number", "workers"), [(signal.SIGKILL, 1), (signal.SIGINT, 0)])
def test_waiting_workers_end_with_their_parent(signal_number, workers):
    add_files("1.csv")
    Path("waits.py").write_text(PRINT_WORKERS.format(workers=workers))
    with subprocess.Popen([sys.executable, "waits.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == workers
        time.sleep(0.2)
        process.send_signal(signal_number)
        assert process.wait(3) == -signal_number
        deadline = time.monotonic() + 3
        while any(map(_is_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(_is_alive, pids))
        assert (b"KeyboardInterrupt" in process.stderr.read()) == (signal_number == signal.SIGINT)


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
