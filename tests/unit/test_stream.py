"""A directory that grows, as a source: its rows in order, whoever reads them, whenever they come."""

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
from test_clicks import SCHEMA, bags, rows, slow

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

RAW = rows(600)
NAMES = ("1.csv", "2.csv.gz", "3.parquet", "4.csv")  # 150 rows each


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (clicks, convert, stream):
        monkeypatch.setattr(module, "ROW_GROUP_SIZE", 64)
    for module in (journal, stream):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    Path("schema.toml").write_text(SCHEMA)
    Path("in").mkdir()


def csv(raw: list[dict[str, Any]]) -> str:
    return "\n".join([",".join(RAW[0]), *(",".join(map(str, row.values())) for row in raw)]) + "\n"


def put(*names: str, raw: list[dict[str, Any]] | None = None) -> None:
    """Files of RAW, or of these rows, as others should write them: under another name, then renamed."""
    for name in names:
        mine = RAW[150 * NAMES.index(name) :][:150] if raw is None else raw
        draft = Path("in", f".{name}")
        if name.endswith(".gz"):
            draft.write_bytes(gzip.compress(csv(mine).encode()))
        elif name.endswith(".parquet"):
            table = {
                "click": pa.array([row["click"] for row in mine]),
                "age": pa.array([int(row["age"]) if row["age"] else None for row in mine]),
                "site": pa.array([row["site"] for row in mine]),
                "device": pa.array([row["device"] or None for row in mine]),
                "tags": pa.array([[tag for tag in row["tags"].split("|") if tag] for row in mine]),
                "w": pa.array([float(row["w"]) for row in mine]),
            }
            pq.write_table(pa.table(table), draft)
        else:
            draft.write_text(csv(mine))
        draft.rename(Path("in", name))


def opened(**more: Any) -> GrowingLog:
    return open_stream("in", **{"schema": "schema.toml"} | more)


def check(taken: NumpyBatch, raw: list[dict[str, Any]], training: list[dict[str, Any]] = RAW[:150]) -> None:
    expected = slow(raw, training, 4)
    for name in ("site", "device", "tags"):
        assert bags(taken)[name] == expected[name]
    assert taken.dense is not None and taken.weights is not None
    np.testing.assert_allclose(taken.dense[:, 0], expected["age"], rtol=1e-5, atol=1e-6)
    assert taken.labels["click"].tolist() == expected["click"]
    assert taken.weights.tolist() == expected["w"]


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


def test_rows_of_all_forms_in_the_order_of_their_names():
    put(*reversed(NAMES))
    source = opened()
    assert source.size is None and source.num_dense == 1
    assert {name: size for name, size, _ in source.features} == slow(RAW, RAW[:150], 4)["rows"]
    assert [one.feature for one in source.statistics] == ["site", "device", "tags"]
    check(source.take(np.arange(600)), RAW)
    order = np.random.default_rng(0).permutation(600)
    check(source.take(order), [RAW[place] for place in order])
    small = GrowingLog(**{**source.__getstate__(), "memory": 1})
    check(small.take(order), [RAW[place] for place in order])
    assert len(small._chunks) == 2 and small == pickle.loads(pickle.dumps(small)) and repr(small) == repr(source)
    assert len(source.take(np.empty(0, np.int64)).values) == 0
    assert [entry["name"] for entry in entries()] == list(NAMES) and {entry["rows"] for entry in entries()} == {150}


def test_rows_that_come_later_are_waited_for(capsys, monkeypatch):
    monkeypatch.setattr(journal, "WAIT_NOTICE_SECONDS", 0.05)

    def later() -> None:
        for name in NAMES:
            time.sleep(0.25)
            put(name)

    thread = threading.Thread(target=later)
    thread.start()
    source = opened()
    loader = Loader(source, batch_size=100, shuffle=False)
    found = [batch.weights.tolist() for batch in islice(loader, 6)]
    thread.join()
    assert sum(found, []) == expected(600)
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == [
        "in: waiting for 1 samples; there are 0 in 0 files",
        "in: waiting for 200 samples; there are 150 in 1 files, the last 1.csv",
    ]
    assert len(said) == 4


def test_ranks_wait_for_the_whole_batch():
    put("1.csv")
    first = Loader(opened(), batch_size=200, shuffle=False, shard=(0, 4))
    threading.Timer(0.3, put, ["2.csv.gz"]).start()
    since = time.monotonic()
    assert first.peek().weights.tolist() == expected(50)
    assert time.monotonic() - since >= 0.25


def test_a_file_that_comes_late_is_named():
    put("1.csv", "3.parquet")
    source = opened()
    assert weights(source, 300)[:150] == expected(150)
    put("2.csv.gz")
    with pytest.raises(UserError, match="^in/2.csv.gz: came late: 3.parquet was read before"):
        source.wait(301)
    with pytest.raises(UserError, match="came late"):
        opened()
    assert weights(source, 300)[:150] == expected(150), "what is there is not looked for"


def test_a_look_that_misses_a_file_does_no_harm(monkeypatch):
    """A directory is not listed in one moment: of two files that come meanwhile the second may be seen alone."""
    put("1.csv")
    source = opened()
    put("2.csv.gz", "3.parquet")
    real, missed = journal._list_files, []

    def present(directory: Path) -> set[str]:
        found = real(directory)
        if not missed:
            found.remove("2.csv.gz")
            missed.append(True)
        return found

    monkeypatch.setattr(journal, "_list_files", present)
    assert weights(source, 450) == expected(450) and missed


def test_a_file_that_changes_is_named(monkeypatch):
    put("1.csv")
    source = opened()
    with open("in/1.csv", "a") as file:
        file.write("1,5,s1,d1,t1,1.0,3\n")
    for look in (lambda: source.wait(151), opened):
        with pytest.raises(UserError, match="^in/1.csv: changed after it was read"):
            look()
    put("1.csv")
    made = convert.convert
    for broken in (False, True):

        def meanwhile(path: Path, *words: Any, broken: bool = broken, **more: Any) -> Path:
            done = made(path, *words, **more)
            path.write_text("half")
            if broken:
                raise UserError("line 2 is half a line")
            return done

        monkeypatch.setattr(journal, "convert", meanwhile)
        with pytest.raises(UserError, match="^in/1.csv: changed while it was read; write it elsewhere"):
            opened(cache=f"other{broken}")
        Path("in/1.csv").unlink()
        put("1.csv")


def test_a_file_that_is_renamed_while_it_is_read_is_read_under_its_name(monkeypatch):
    put("1.csv")
    source, made = opened(), convert.convert
    put("2.csv.inprogress", raw=RAW[150:200])

    def meanwhile(path: Path, *words: Any, **more: Any) -> Path:
        done = made(path, *words, **more)
        if path.suffix == ".inprogress":
            path.unlink()
            put("2.csv", raw=RAW[150:300])
        return done

    monkeypatch.setattr(journal, "convert", meanwhile)
    assert weights(source, 300) == expected(300)
    put("3.parquet")
    assert weights(source, 450) == expected(450)
    assert [entry["name"] for entry in entries()] == ["1.csv", "2.csv", "3.parquet"]
    assert len(list(Path(source.folder, "files").iterdir())) == 3, "the half file's rows are dropped"


def test_a_file_that_was_filled_in_its_place_is_told_what_to_do():
    Path("in/0.csv").touch()
    put("1.csv")
    source = opened()
    Path("in/0.csv").write_text(csv(RAW[:10]))
    with pytest.raises(UserError, match="as 0 rows; .*restore its content or delete it, .*name that sorts after 1.csv"):
        source.wait(151)


def test_names_of_files_that_are_not_complete_are_left_alone():
    put("1.csv")
    for name in (".2.csv", "_SUCCESS", "2.csv.tmp", "2.csv.part"):
        Path("in", name).write_text("half a fi")
    Path("in/0").mkdir()
    source = opened()
    assert weights(source, 150) == expected(150)
    put("2.csv.gz")
    assert weights(source, 300) == expected(300)


def test_files_without_rows_have_a_place():
    Path("in/0.csv").touch()
    Path("in/1-.parquet").touch()
    put("1.csv")
    put("1_.csv", raw=[])
    Path("in/1b.csv.gz").write_bytes(gzip.compress(b""))
    put("1c.parquet", raw=[])
    put("2.csv.gz")
    source = opened()
    assert weights(source, 300) == expected(300) and source.first == "0.csv"
    assert [(entry["name"], entry["rows"]) for entry in entries()] == [
        *(("0.csv", 0), ("1-.parquet", 0), ("1.csv", 150), ("1_.csv", 0), ("1b.csv.gz", 0)),
        *(("1c.parquet", 0), ("2.csv.gz", 150)),
    ]


def test_deleted_files_keep_their_place(monkeypatch):
    put("1.csv", "2.csv.gz", "3.parquet")
    source = opened()
    assert weights(source, 450) == expected(450)
    for name in NAMES[:3]:
        Path("in", name).unlink()
    assert weights(opened(), 450) == expected(450)
    put("4.csv")
    assert weights(opened(), 600) == expected(600), "of the head all caches stay"
    monkeypatch.setattr(journal, "PINNED_ROWS", 200)
    draft = Path(source.folder, "files/.half-made")
    draft.mkdir()
    put("5.csv", raw=RAW[:10])
    source = opened()
    source.wait(601)
    assert not draft.exists()
    for lo, hi in ((0, 300), (450, 610)):
        assert source.take(np.arange(lo, hi)).weights.tolist() == (expected(600) + expected(10))[lo:hi]
    with pytest.raises(
        UserError,
        match=r"in/3.parquet: was deleted or changed, .*\(300 to 449\).*later checkpoint, or .*another data.cache",
    ):
        source.take(np.arange(440, 460))


def test_a_cache_that_is_lost_or_damaged_is_made_again():
    put("1.csv", "2.csv.gz")
    source = opened()
    assert weights(source, 300) == expected(300)
    (cache,) = Path(source.folder, "files").glob("2-*")
    shutil.rmtree(cache)
    assert weights(opened(), 300) == expected(300)
    os.truncate(cache / "rows.parquet", 100)
    with pytest.raises(UserError, match=f"{cache}: damaged .*remove it: it is made again if 2.csv.gz still exists"):
        weights(opened(), 300)
    shutil.rmtree(cache)
    assert weights(opened(), 300) == expected(300)


def test_a_lost_journal_is_not_resumed_on_other_rows():
    put(*NAMES[:3])
    loader = Loader(opened(), batch_size=50, shuffle=False)
    states = [loader.state_dict() for _ in islice(loader, 8)]
    assert [state["counted"][0] for state in states] == [1, 1, 1, 2, 2, 2, 3, 3]
    shutil.rmtree(".shardwright")

    def resume(state: dict[str, Any]) -> list[float]:
        again = Loader(opened(), batch_size=50, shuffle=False)
        again.load_state_dict(json.loads(json.dumps(state)))
        return again.peek().weights.tolist()

    assert resume(states[7]) == expected(450)[400:], "all files are there still"
    shutil.rmtree(".shardwright")
    Path("in/2.csv.gz").unlink()
    for more in (["4.csv"], []):
        for state in (states[3], states[7]):
            with pytest.raises(UserError, match="files of its journal are not those that the run was trained on"):
                resume(state)
        put(*more)
    assert resume(states[1]) == expected(150)[100:]
    del states[7]["counted"]
    resume(states[7])  # saved by an earlier version


def test_a_journal_that_is_removed_or_replaced_in_use_is_told(monkeypatch):
    put("1.csv", "2.csv.gz")
    source, made = opened(), convert.convert
    path = Path(source.folder, "journal.jsonl")
    source.wait(150)
    first = path.read_bytes()

    def meanwhile(*words: Any, **more: Any) -> Path:
        path.unlink()
        return made(*words, **more)

    monkeypatch.setattr(journal, "convert", meanwhile)
    told = "journal.jsonl: was removed or replaced while it was in use"
    for _ in range(2):
        with pytest.raises(UserError, match=told):
            source.wait(300)
    assert not path.exists()
    for text in (b"", first * 2):
        path.with_name("other").write_bytes(text)
        path.with_name("other").rename(path)
        with pytest.raises(UserError, match=told):
            source.wait(300)
        assert path.read_bytes() == text


def test_rows_are_on_the_disk_before_the_line_that_speaks_of_them(monkeypatch):
    Path("schema.toml").write_text(SCHEMA + 'time = "time"\n')
    synced, real = [], os.fsync

    def fsync(handle: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name.partition("-")[0])
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    put("1.csv")
    opened()
    line = synced.index("journal.jsonl")
    assert {"rows.parquet", "order.npy", "log.json", "1", "files"} <= set(synced[:line]) and "in" in synced[line:]


def test_a_look_costs_little_however_many_files_there_are(monkeypatch):
    looks, states = [], []
    for log, name in ((looks, "_list_files"), (states, "_size_and_mtime")):
        real = getattr(journal, name)
        monkeypatch.setattr(journal, name, lambda path, log=log, real=real: log.append(path) or real(path))
    for number in range(40):
        put(f"{number:02}.csv", raw=RAW[:2])
    source = opened()
    for num in range(2, 82, 2):
        source.wait(num)
    assert len(entries()) == 40 and len(looks) < 10 and len(states) < 40 * 2 + 10 * journal.NUM_RECENT_FILES
    monkeypatch.setattr(journal, "SETTLE_SECONDS", 0.05)
    threading.Timer(0.4, put, ["41.csv"], {"raw": RAW[:2]}).start()
    looks.clear()
    source.wait(82)
    assert 3 <= len(looks) < 10


def test_who_waits_says_so_once_however_often_it_asks(capsys, monkeypatch):
    monkeypatch.setattr(journal, "WAIT_NOTICE_SECONDS", 0.0)
    put("1.csv")
    source = opened()

    def pause(seconds: float) -> None:
        raise RowsNotReady("")

    for _ in range(3):
        with pytest.raises(RowsNotReady):
            source.wait(151, pause)
    assert capsys.readouterr().err == "in: waiting for 151 samples; there are 150 in 1 files, the last 1.csv\n"


def test_a_disk_that_cannot_be_locked_is_told(monkeypatch):
    put("1.csv")

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match=r"lock: cannot be locked \(No locks available\); set data.cache to a disk"):
        opened()


def test_hot_ids_are_counted_in_no_more_batches_than_a_run_has(monkeypatch):
    def few(*arguments: object) -> Any:
        for _ in range(4):
            yield SimpleNamespace(features=Jagged(("f",), torch.tensor([3, 3, 1]), torch.tensor([[1, 2]])))
        raise AssertionError("more are asked for, which may never come")

    sparse = SimpleNamespace(
        tables=[SimpleNamespace(name="t", rows=5)],
        features=[SimpleNamespace(table="t")],
        read=lambda features: features,
        check=lambda _: None,
    )
    monkeypatch.setattr(setup, "sparse_of", lambda _: sparse)
    monkeypatch.setattr(setup.recipe, "make_loader", few)
    settings: Any = SimpleNamespace(train=SimpleNamespace(steps=2, accumulate=2))
    plan: Any = SimpleNamespace(tables=[SimpleNamespace(table="t", order="load")])
    assert setup.hottest_ids(settings, Any, Any, plan)["t"].tolist() == [3, 1]


def test_what_was_learned_outlives_the_first_file():
    put("1.csv")
    source = opened()
    Path("in/1.csv").unlink()
    put("2.csv.gz")
    assert opened() == source
    check(opened().take(np.arange(300)), RAW[:300])
    other = opened(encoding={"rows": 50})
    assert other.learned != source.learned and {rows for _, rows, _ in other.features} == {50}
    strict = opened(strict=False)
    assert strict.folder != source.folder and strict.first == "2.csv.gz", "another count"


def test_a_torn_line_of_the_journal_is_none():
    put("1.csv", "2.csv.gz")
    source = opened()
    source.wait(300)
    path = Path(source.folder, "journal.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert weights(opened(), 300) == expected(300)
    assert path.read_bytes() == whole
    put("3.parquet")
    with path.open("ab") as file:
        file.write(b'{"name": "3.par')
    assert weights(source, 450) == expected(450)
    assert len(entries()) == 3
    path.write_text("what?\n" + path.read_text())
    with pytest.raises(UserError, match="journal.jsonl: damaged: b'what.*then read again"):
        opened()


def test_processes_that_meet_read_each_file_once():
    put(*NAMES[:2])
    threading.Timer(1.0, put, NAMES[2:]).start()
    crew = [subprocess.Popen([sys.executable, "-c", MEETING], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = [process.communicate()[0] for process in crew]
    assert found == [f"{opened()!r} {expected(600)}\n"] * 3
    assert [entry["name"] for entry in entries()] == list(NAMES)
    (folder,) = Path(convert.CACHE_DIRECTORY).iterdir()
    assert len(list((folder / "files").iterdir())) == 4 and not list(folder.rglob(".*"))


MEETING = """
import sys
import numpy as np
from shardwright.data.sources.stream import open_stream
source = open_stream("in", schema="schema.toml")
found = source.take(np.arange(600)).weights.tolist()
assert "torch" not in sys.modules
print(source, found)
"""


def test_like_an_earlier_log():
    put(*NAMES[:2])
    earlier = clicks.ClickLog(
        str(next(Path(opened().folder, "files").glob("1-*"))), clicks.Split(test=0.5), clicks.Encoding(min_count=2)
    )
    Path("run/transforms").mkdir(parents=True)
    earlier.transforms.write(Path("run/transforms"))
    source = opened(schema="", like="run")
    assert source.features == earlier.features and source != opened()
    assert bags(source.take(np.arange(70))) == bags(earlier.take(np.arange(70)))
    assert opened(schema="", like="run/transforms") == source
    assert source.statistics == opened().statistics
    with pytest.raises(UserError, match="data.schema and data.like=run are both set"):
        opened(like="run")
    with pytest.raises(UserError, match="data.encoding and data.like"):
        opened(schema="", like="run", encoding={"rows": 9})
    with pytest.raises(UserError, match="data.like=in: neither it nor in/transforms holds transforms.json"):
        opened(schema="", like="in")


def test_time_orders_the_rows_of_each_file():
    Path("schema.toml").write_text(SCHEMA + 'time = "time"\n')
    put("1.csv", "2.csv.gz")
    raw = [row for part in (RAW[:150], RAW[150:300]) for row in sorted(part, key=lambda row: int(row["time"]))]
    check(opened().take(np.arange(300)), raw)


def test_malformed_rows_are_told_or_left_out(capsys):
    put("1.csv")
    text = csv(RAW[150:300]).splitlines()
    put("2.csv", raw=[])
    Path("in/2.csv").write_text("\n".join([*text[:11], "1,5,s1", *text[11:]]) + "\n")
    source = opened()
    with pytest.raises(UserError, match="^in/2.csv: line 12: the row has 3 columns, wanted 7; fix it"):
        source.wait(151)
    loose = opened(strict=False)
    assert weights(loose, 300) == expected(300)
    assert "in/2.csv: 1 of 151 rows are malformed and skipped; the first, line 12" in capsys.readouterr().err
    assert [entry["malformed"] for entry in entries(loose)] == [0, 1]
    assert opened(strict=False) == loose
    assert "journal.jsonl: 1 malformed rows were skipped in the files so far" in capsys.readouterr().err
    Path("in/2.csv").write_text("\n".join(text) + "\n")
    assert weights(source, 300) == expected(300), "mended before it was read"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"path": ""}, 'key "data.path" is missing'),
        ({"path": "nowhere"}, "data.path=nowhere: no such directory"),
        ({"schema": ""}, 'key "data.schema" is missing: criteo, avazu, or a TOML file'),
        ({"encoding": {"rows": 1}}, "rows is 1; wanted 0 for"),
        ({"encoding": {"row": 9}}, "data.encoding: row: unknown key"),
        ({"memory": 0}, "data.memory=0; wanted more"),
        ({"cache": "schema.toml"}, "cannot be written .*; set data.cache"),
    ],
)
def test_mistakes(words, message):
    with pytest.raises(UserError, match=message):
        open_stream(**{"path": "in", "schema": "schema.toml"} | words)


def test_shuffling_is_refused():
    put("1.csv")
    with pytest.raises(UserError, match=r"GrowingLog cannot be shuffled: .*set data.shuffle=false"):
        Loader(opened(), batch_size=10)


def batches(loader: Loader, num: int) -> list[Any]:
    return [(batch.features.values.tolist(), batch.weights.tolist()) for batch in islice(loader, num)]


def test_workers_give_the_same_and_end_at_once():
    put("1.csv", "2.csv.gz")
    source = opened()
    threading.Timer(1.0, put, NAMES[2:]).start()
    with Loader(source, batch_size=50, shuffle=False, workers=2) as loader:
        found = batches(loader, 12)
        loader.close()
        loader.load_state_dict(loader.state_dict() | {"batch": 6})
        assert batches(loader, 6) == found[6:]
        since = time.monotonic()  # both workers wait for what never comes
        loader.close()
        assert time.monotonic() - since < 0.8
    assert found == batches(Loader(opened(), batch_size=50, shuffle=False), 12)


def test_an_error_in_a_worker_is_told():
    put("1.csv", "3.parquet")
    with Loader(opened(), batch_size=50, shuffle=False, workers=1) as loader:
        batches(loader, 4)
        put("2.csv.gz")
        with pytest.raises(UserError, match="came late"):
            batches(loader, 4)


def test_a_reader_keeps_its_trainers_patient():
    put("1.csv")
    source = opened()
    with reader(source, batch_size=50, seed=0, shuffle=False, workers=2) as address:
        readers = Readers((address,), timeout_seconds=0.6)
        with Loader(source, batch_size=50, shuffle=False, readers=readers, prefetch=2) as loader:
            threading.Timer(2.0, put, ["2.csv.gz"]).start()
            found = batches(loader, 6)
        since = time.monotonic()
    assert time.monotonic() - since < 0.8, "ended while its workers wait"
    assert found == batches(Loader(source, batch_size=50, shuffle=False), 6)


def test_who_waits_for_rows_keeps_no_other_trainer_from_them():
    """Rank 0 has read ahead to the end of what is there, and the reader has one worker."""
    put("1.csv")
    source, order = opened(), {"batch_size": 50, "shuffle": False}
    plain = [batches(Loader(source, **order, shard=(rank, 2)), 3) for rank in (0, 1)]
    with reader(source, seed=0, **order) as address:
        first, second = (Loader(source, **order, shard=(rank, 2), readers=Readers((address,))) for rank in (0, 1))
        assert soon(first, 3) == plain[0]
        assert soon(second, 3) == plain[1]
        second.close()
        second.load_state_dict(second.state_dict() | {"batch": 0})
        assert soon(second, 3) == plain[1], "whose questions are open, and who is gone, is in nobody's way"
        put("2.csv.gz")
        assert soon(first, 1)[0][1] == expected(175)[150:]
        first.close()
        second.close()


def soon(loader: Loader, num: int) -> list[Any]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(batches(loader, num)), daemon=True)
    thread.start()
    thread.join(10)
    return found


PROGRAM = """
import multiprocessing
from shardwright.data.loading.loader import Loader
from shardwright.data.sources.stream import open_stream
if __name__ == "__main__":
    with Loader(open_stream("in", schema="schema.toml"), batch_size=100, shuffle=False, workers={workers}) as loader:
        for batch in loader:
            print(*(one.pid for one in multiprocessing.active_children()), flush=True)
"""


@pytest.mark.parametrize(("how", "workers"), [(signal.SIGKILL, 1), (signal.SIGINT, 0)])
def test_who_waits_ends_with_its_parent(how, workers):
    put("1.csv")
    Path("waits.py").write_text(PROGRAM.format(workers=workers))
    with subprocess.Popen([sys.executable, "waits.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        crew = [int(pid) for pid in process.stdout.readline().split()]
        assert len(crew) == workers
        time.sleep(0.2)
        process.send_signal(how)
        assert process.wait(3) == -how
        until = time.monotonic() + 3
        while any(map(_lives, crew)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not any(map(_lives, crew))
        assert (b"KeyboardInterrupt" in process.stderr.read()) == (how == signal.SIGINT)


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
