"""Sections of a run's page about tables that are read from caches, copies and servers; runs with known numbers."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_planner import make_cluster, make_workload
from test_staleness import skewed_workload

from shardwright.kernels.cache_index import BatchRows, CacheIndex, place_rows, release_many
from shardwright.planner.plan import make_plan
from shardwright.planner.tables import cache_hits
from shardwright.planner.tables.sharding import TableLoad, make_table_loads
from shardwright.report import communication, popularity, render
from shardwright.report.caches_page import describe_caches
from shardwright.report.copies_page import describe_copies
from shardwright.report.run_record import read_record
from shardwright.runtime.placements import allow_staleness, keep_on_disk, keep_on_servers
from shardwright.spec import files
from shardwright.spec.cache_record import CACHES_FILE, COPIES_FILE, CacheWindow, CopyWindow
from shardwright.spec.plan import Bounded
from shardwright.spec.row_cache import HALF_LIFE_BATCHES
from shardwright.spec.timeline import Event, Timeline
from shardwright.spec.workload import Table

PINS = {"t0": "row", "t1": "row"}


def write_run(path, plan, workload, **windows):
    (path / "config.toml").write_text("")
    files.write(plan, path / "plan.json")
    files.write(workload, path / "workload.json")
    for name, lines in windows.items():
        (path / f"{name}.jsonl").write_text(
            "".join(line if isinstance(line, str) else line.to_line() for line in lines)
        )
    return read_record(path)


def plan_of(workload, ranks=2):
    return make_plan(workload, make_cluster(ranks, rate=1e9), pins=PINS).plan


def one_rank_plan(workload):
    return make_plan(workload, make_cluster(1, rate=1e9)).plan


def cells(grid, row=0):
    return dict(zip([f"{index} {column}" for index, column in enumerate(grid.columns)], grid.rows[row], strict=True))


@pytest.mark.parametrize(
    "move, place",
    (
        (lambda plan: keep_on_disk(plan, {"t0": 5000}), "on disk"),
        (lambda plan: keep_on_servers(plan, {"t0": 5000}), "on table servers"),
    ),
)
def test_caches_say_where_rows_are_and_count_rows_and_lookups(tmp_path, move, place):
    workload = skewed_workload()
    windows = [CacheWindow(10 * k, 10, "t0", 1000, 400, 0, 7, 5120, 0, 600, 60) for k in range(1, 5)]
    section = describe_caches(write_run(tmp_path, move(one_rank_plan(workload)), workload, caches=windows))
    assert section is not None and section.title == f"Tables with rows {place}"
    assert f"1 table has rows {place}, and lines of a cache in memory" in section.text
    assert f"bytes of rows {place}; ids are counted in one batch of 16" in section.note
    row = cells(section.tables)
    assert (row["3 hits, % of rows"], row["5 hits, % of lookups"]) == ("60.0", "90.0")
    assert 0 < float(row["4 predicted"]) < float(row["6 predicted"]) < 100  # popular rows have more ids
    assert (row["7 rows written back"], row["8 read"]) == ("1", "512 B")
    rows, _, lookups = section.figure.data
    assert rows["y"] == pytest.approx([60.0] * 4) and lookups["y"] == pytest.approx([90.0] * 4)
    assert f"<h2>Tables with rows {place}</h2>" in render(tmp_path).read_text()


def test_caches_recorded_before_ids_were_counted(tmp_path):
    line = CacheWindow(10, 10, "t0", 1000, 400, 0, 7, 5120, 0).to_line()
    old = re.sub(',"lookups".*}', "}", line)
    assert "lookups" not in old
    workload = skewed_workload()
    run = write_run(tmp_path, keep_on_disk(one_rank_plan(workload), {"t0": 5000}), workload, caches=[old])
    section = describe_caches(run)
    assert section is not None and cells(section.tables)["5 hits, % of lookups"] == "" and "of 16" not in section.note
    assert cells(section.tables)["6 predicted"] and len(section.figure.data) == 2


def test_hits_without_a_plan_name_no_place(tmp_path):
    (tmp_path / "config.toml").write_text("")
    (tmp_path / CACHES_FILE).write_text(CacheWindow(10, 10, "t0", 10, 4, 0, 0, 0, 0).to_line())
    section = describe_caches(read_record(tmp_path))
    assert section is not None and section.title == "Tables with rows in slower memory"


@pytest.mark.parametrize("lines", (800, 1600))
def test_predicted_hits_of_lookups_are_those_of_a_simulated_stream(lines):
    """Ids are drawn independently from a power law; the cache holds the rows of several batches."""
    rows, num_ids, steps = 4000, 200, 400
    weights = np.arange(1, rows + 1) ** -1.1
    shares = np.cumsum(weights) / weights.sum()
    points = np.unique(np.geomspace(1, rows - 1, 80).astype(int))
    load = TableLoad(Table("t", rows, 4), popularity=tuple((int(k), float(shares[k - 1])) for k in points))
    index, generator = CacheIndex(lines, HALF_LIFE_BATCHES, adapts=True), np.random.default_rng(0)
    for _ in range(steps):
        ids = torch.from_numpy(np.searchsorted(shares, generator.random(num_ids))).clamp(max=rows - 1)
        rows_U, inverse_N = ids.unique(return_inverse=True)
        placed = place_rows([index], BatchRows(rows_U, [len(rows_U)], inverse_N))
        release_many([index], placed.lines_U, [len(rows_U)], [False])
    counts = index.counts
    found, found_rows = cache_hits.found_lookups_share(load, lines, num_ids), 1 - counts.missing / counts.rows
    assert found == pytest.approx(1 - counts.missing_lookups / counts.lookups, abs=0.03)
    assert found > found_rows + 0.05
    assert cache_hits.found_lookups_share(load, rows, num_ids) == pytest.approx(1.0)
    assert cache_hits.found_lookups_share(replace(load, hits=((lines, 0.5),)), lines, num_ids) is None


@pytest.mark.parametrize(
    "change, title, words",
    (
        (
            lambda plan: allow_staleness(plan, {"t0": Bounded(10, 2, 4096), "t1": Bounded(10, 2, 64)}),
            "Tables with bounded staleness",
            ("rows that another rank owns", "when its lease has expired", "read from other ranks"),
        ),
        (
            lambda plan: keep_on_servers(plan, {"t0": Bounded(0, 0, 4096), "t1": Bounded(0, 0, 4096)}),
            "Tables on table servers",
            ("rows that a table server owns", "Training is exact", "in every batch", "read from table servers"),
        ),
        (
            lambda plan: keep_on_servers(plan, {"t0": Bounded(10, 2, 4096), "t1": Bounded(10, 2, 4096)}),
            "Tables on table servers, with bounded staleness",
            ("rows that a table server owns", "when its lease has expired", "read from table servers"),
        ),
    ),
)
def test_copies_say_who_owns_the_rows(tmp_path, change, title, words):
    workload = skewed_workload()
    missed = (50, 30, *[0] * 31)
    windows = [CopyWindow(10 * k, 10, "t0, t1", 1000, 400, 100, 300, missed, 5000, 200) for k in range(1, 5)]
    section = describe_copies(write_run(tmp_path, change(plan_of(workload)), workload, copies=windows))
    assert section is not None and section.title == title
    assert cells(section.tables)["2 hits, % of lookups"] == "96.0" and cells(section.tables)["5 sent, %"] == "10.0"
    for part in words:
        assert part in section.text + section.note
    assert f"<h2>{title}</h2>" in render(tmp_path).read_text()


def test_one_rank_that_reads_from_servers_has_a_page(tmp_path):
    workload = skewed_workload()
    plan = keep_on_servers(one_rank_plan(workload), {"t0": Bounded(0, 0, 4096)})
    run = write_run(tmp_path, plan, workload, copies=[CopyWindow(10, 10, "t0", 1000, 400, 100, 300, (0,) * 33)])
    section = describe_copies(run)
    assert (
        section is not None
        and cells(section.tables)["4 predicted"] == "" == cells(section.tables)["2 hits, % of lookups"]
    )
    assert (tmp_path / COPIES_FILE).exists() and "exact" not in section.text


def test_popularity_of_tables_with_known_shares(tmp_path):
    """Table t0: a tenth of the rows has 0.8 of its lookups; t1, with a third of the lookups, 0.5."""
    workload = make_workload((1000, 8, 2.0), (1000, 8, 1.0))
    first, second = workload.statistics
    curves = ((100, 0.8),), ((100, 0.5),)
    statistics = tuple(replace(e, popularity=curve) for e, curve in zip((first, second), curves, strict=True))
    workload = replace(workload, statistics=statistics)
    total = popularity.popularity_curve(make_table_loads(workload))
    # Most popular first: 100 rows with 1.6 of 3 lookups, 100 with 0.5, then 900 with 0.5 and 900 with 0.4.
    assert total.row_shares.tolist() == pytest.approx([0, 0.05, 0.1, 0.55, 1])
    assert total.lookup_shares.tolist() == pytest.approx([0, 1.6 / 3, 2.1 / 3, 2.6 / 3 - 0.1 / 3, 1], abs=0.04)
    assert total.lookups_of(0.1) == pytest.approx(0.7) and total.rows_with(0.7) == pytest.approx(0.1)
    section = popularity.describe_popularity(workload)
    assert section is not None and len(section.figure.data) == 3
    assert "10% of the rows have 70.0% of the lookups" in section.text
    assert "from 50.0% (t1) to 80.0% (t0)" in section.text
    write_run(tmp_path, plan_of(workload), workload)
    assert "Popularity of rows" in render(tmp_path).read_text()


def test_popularity_that_is_not_known(tmp_path):
    workload = make_workload((1000, 8, 2.0), (1000, 8, 1.0))
    unknown = replace(workload, statistics=tuple(replace(entry, popularity=()) for entry in workload.statistics))
    assert popularity.describe_popularity(unknown) is None is popularity.describe_popularity(None)
    first, second = unknown.statistics
    one = replace(unknown, statistics=(replace(first, popularity=((100, 0.9),)), second))
    section = popularity.describe_popularity(one)
    assert section is not None and len(section.figure.data) == 1
    assert "The popularity of the rows of 1 of 2 tables is not known." in section.text


def timeline_of(source, events):
    """Steps of 10 s, each with these events: (name, kind, lane, start, end)."""
    return Timeline(
        source,
        tuple(
            Event(
                id=10 * step + i,
                name=n,
                kind=k,
                rank=0,
                lane=lane,
                step=step,
                start=10.0 * step + a,
                end=10.0 * step + b,
            )
            for step in range(4)
            for i, (n, k, lane, a, b) in enumerate(events)
        ),
    )


MEASURED = timeline_of(
    "measured",
    (
        ("forward", "stage", "main", 0, 5),
        ("vectors", "flight", "wire", 0, 3),
        ("vectors", "wait", "main", 1, 3),  # 2 s of messages
        ("prefetch", "flight", "host", 3, 4),
        ("prefetch", "wait", "main", 3, 4),  # 1 s of slower memory
        ("read", "flight", "read", 5, 6),
        ("read", "wait", "main", 5, 6),  # data: neither
        ("update", "stage", "main", 6, 10),
    ),
)
PREDICTED = timeline_of(
    "predicted",
    (
        ("top", "compute", "main", 0, 4),
        ("vectors", "collective", "wire", 3, 6),  # 2 s with nothing else to do
        ("reduce", "collective", "dense", 5, 7),  # 1 s more
        ("prefetch", "copy", "host", 5, 8),  # 1 s more: to 8
        ("update", "compute", "main", 8, 10),
    ),
)


def test_waits_for_messages_and_for_rows_of_slower_memory():
    waits = communication.measured_waits(MEASURED)
    assert (waits.step, waits.messages, waits.rows) == (10.0, 2.0, 1.0)
    waits = communication.predicted_waits(PREDICTED)
    assert (waits.step, waits.messages, waits.rows) == (10.0, 3.0, 1.0)


def test_the_page_has_waits_measured_and_predicted(tmp_path):
    workload = skewed_workload()
    exact = plan_of(workload)
    bounded = allow_staleness(exact, {"t0": Bounded(10, 2, 4096), "t1": Bounded(10, 2, 64)})
    (tmp_path / "trace.json").write_text(MEASURED.to_chrome())
    (tmp_path / "predicted.json").write_text(PREDICTED.to_chrome())
    for plan, name in ((exact, "exact"), (bounded, "rows from copies")):
        section = communication.describe_communication(write_run(tmp_path, plan, workload))
        assert section is not None
        assert "are 20.0% of a step; the plan predicted 30.0%." in section.text
        assert section.shares.rows == (
            (f"measured, {name}", "10 s", "2 s", "20.0", "1 s", "10.0"),
            (f"predicted, {name}", "10 s", "3 s", "30.0", "1 s", "10.0"),
        )
    assert "Waits of a step" in render(tmp_path).read_text()


def test_one_process_waits_only_for_its_caches(tmp_path):
    workload = skewed_workload()
    (tmp_path / "trace.json").write_text(MEASURED.to_chrome())
    plan = one_rank_plan(workload)
    assert communication.describe_communication(write_run(tmp_path, plan, workload)) is None
    section = communication.describe_communication(write_run(tmp_path, keep_on_disk(plan, {"t0": 5000}), workload))
    assert section is not None and "messages" not in section.text and "are 10.0%" in section.text
    assert section.shares.rows[0][2:4] == ("0 ms", "0.0")
