"""Cluster measurements: samples become prices, files are merged, and a measured cluster is complete."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.comm.mesh import Mesh
from shardwright.errors import UserError
from shardwright.measure import device, machine, network, timing
from shardwright.planner.price import primitives
from shardwright.report import cluster as page
from shardwright.spec import files, presets
from shardwright.spec.cluster import Beside, Cluster, Device, Price, Sample, Tier


def use_small_sizes(monkeypatch) -> None:
    """Use small tables and few sizes: tests check which parts there are, not the times."""
    monkeypatch.setattr(device, "TABLE_BYTES", 1 << 20)
    monkeypatch.setattr(device, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(device, "MATMUL_SHAPES", ((16, 16, 16), (64, 16, 32), (32, 64, 64), (64, 64, 64)))
    monkeypatch.setattr(machine, "WINDOW_SECONDS", 1e-4)


def test_measure_one_process(monkeypatch, tmp_path):
    use_small_sizes(monkeypatch)
    messages: list[str] = []
    cluster = machine.measure_cluster("here", tmp_path, messages.append, window_seconds=1e-4)
    cluster.verify()
    assert (cluster.source, cluster.levels, cluster.collectives, cluster.num_ranks) == ("measured", (), (), 1)
    assert [tier.name for tier in cluster.device.tiers] == ["dram", "ssd"]
    ops = {(price.op, price.dtype) for price in cluster.device.prices}
    assert {("matmul", "float32"), ("gather", "float32"), ("update", "float32"), ("codec", "int8")} <= ops
    assert primitives.matmul_cost(cluster.device, 48, 48, 48).basis == "measured"
    assert primitives.row_access_cost(cluster.device, "lookup", 10, 100_000).basis == "beyond"
    assert list(tmp_path.iterdir()) == []  # the file for disk measurements is deleted
    files.write(cluster, tmp_path / "here.toml")
    assert files.read(Cluster, tmp_path / "here.toml") == cluster
    assert messages == ["products, random rows, codecs", "memory and disk"]


def test_measure_command_writes_merges_and_draws(monkeypatch, tmp_path):
    use_small_sizes(monkeypatch)
    path = tmp_path / "mine.toml"
    result = CliRunner().invoke(app, ["measure", "-o", str(path)], catch_exceptions=False)
    assert result.exit_code == 0 and "matmul float32" in result.output and "measured in" in result.output
    assert "Random rows" in (tmp_path / "mine.html").read_text()
    first = files.read(Cluster, path)
    more = replace(first.device, prices=(*first.device.prices, Price(op="columns", call_seconds=1.0)))
    files.write(replace(first, device=more), path)
    assert CliRunner().invoke(app, ["measure", "-o", str(path)], catch_exceptions=False).exit_code == 0
    prices = {price.op: price for price in files.read(Cluster, path).device.prices}
    assert prices["columns"].samples == () and len(prices["gather"].samples[0].times) == 2
    with pytest.raises(UserError, match=r"mine.json: a cluster is a .toml file"):
        CliRunner().invoke(app, ["measure", "-o", str(tmp_path / "mine.json")], catch_exceptions=False)


def cluster(name: str = "core", num: int = 2, seconds: tuple[float, float] = (1.0, 2.0), **changes) -> Cluster:
    samples = [Sample((1024,), seconds[:1]), Sample((4096,), seconds[1:])]
    links = [network.fit_collective(op, ("net",), (num,), samples) for op in ("all_reduce", *network.LINK_PATTERNS)]
    price = Price(op="codec", dtype="fp16", call_seconds=1.0, samples=(Sample((64,), (1.0,)),))
    device_ = Device(name, "cpu", (Tier("dram", 1, 1.0, 1.0),), (price,))
    result = Cluster(1, "x", "measured", device_, tuple(network.fit_levels([("net", num)], links)), tuple(links))
    return replace(result, **changes)


def test_merging_keeps_what_was_not_measured_again():
    fewer = cluster(collectives=cluster().collectives[1:])
    merged = machine.merge_clusters(cluster(), fewer)
    assert {collective.op for collective in merged.collectives} == {"all_reduce", *network.LINK_PATTERNS}
    for other, message in (
        (cluster("other"), 'measured hardware "core", 2 net, this is measured hardware "other", 2 net'),
        (cluster(source="emulated"), 'this is emulated hardware "core", 2 net'),
        (cluster(num=4), 'this is measured hardware "core", 4 net'),
        (cluster(levels=(), collectives=()), 'this is measured hardware "core", one rank; choose another file'),
    ):
        with pytest.raises(UserError, match=message):
            machine.merge_clusters(cluster(), other)


def test_merging_averages_repeated_measurements():
    slower = cluster(seconds=(3.0, 6.0))
    twice = machine.merge_clusters(cluster(), slower)
    assert twice.collectives[0].samples == (Sample((1024,), (1.0, 3.0)), Sample((4096,), (2.0, 6.0)))
    thrice = machine.merge_clusters(twice, cluster(seconds=(8.0, 10.0)))
    assert [sample.seconds for sample in thrice.collectives[0].samples] == [3.0, 6.0]
    assert thrice.levels[0].latency_seconds == 3.0
    assert thrice.levels[0].bytes_per_second == pytest.approx(3072 / 3.0)
    assert len(thrice.device.prices[0].samples[0].times) == 3
    pairs = [
        Beside(op="x", levels=("net",), bytes_=1, collective_seconds=t, matmul_seconds=t, together_seconds=t)
        for t in (1.0, 4.0)
    ]
    mean = machine.merge_clusters(cluster(beside=(pairs[0],)), cluster(beside=(pairs[1],))).beside
    assert [(pair.together_seconds, pair.num) for pair in mean] == [(2.5, 2)]


def test_the_page_warns_of_poor_fits(tmp_path):
    collective = replace(cluster().collectives[0], error=0.5)
    text = page.render(cluster(collectives=(collective,)), tmp_path / "x.html").read_text()
    assert "A straight line fits all_reduce over net poorly" in text and "50 %" in text
    assert not [*page.notes(cluster())]
    emulated = page.render(cluster(source="emulated"), tmp_path / "y.html").read_text()
    assert "emulated" in emulated


def test_logarithmic_axes_have_titles_and_base_units():
    """SI prefixes of ticks belong to the axis unit: "600µ" on an axis in ms would be 600 ns."""
    for figure in page.cluster_figures(presets.load_cluster("two-cores")):
        for side in ("x", "y"):
            axis = figure.layout[f"{side}axis"]
            assert axis["title"]["text"]
            assert (axis["tickformat"] == "~s") == bool(axis["ticksuffix"])
        if figure.name.startswith("over-"):
            assert figure.layout["yaxis"]["ticksuffix"] == "s"
            assert max(value for trace in figure.data for value in trace["y"]) < 10, "seconds"


def test_fitting_recovers_a_price():
    true = Price(op="matmul", dtype="float32", call_seconds=1e-5, seconds_per_flop=1e-10, seconds_per_byte=1e-9)
    samples = []
    for m, k, n in device.MATMUL_SHAPES:
        seconds = 1e-5 + 2 * m * k * n * 1e-10 + 4 * (m * k + k * n + m * n) * 1e-9
        samples.append(Sample((m, k, n), (seconds,)))
    fitted = device.fit_price("matmul", "float32", samples)
    assert fitted.seconds_per_flop == pytest.approx(true.seconds_per_flop, rel=1e-6)
    assert fitted.seconds_per_byte == pytest.approx(true.seconds_per_byte, rel=1e-6)
    assert fitted.error < 1e-6


def test_the_clock_times_as_many_calls_as_fit_in_its_window():
    clock = timing.Clock(Mesh().group(), torch.device("cpu"), 0.01)
    calls: list[int] = []
    clock.sample((1,), lambda: calls.append(1), expected_seconds=0.001)
    assert len(calls) == 25 + 3 * (10 // 3)
    clock.sample((1,), lambda: calls.append(1), expected_seconds=1.0)
    assert len(calls) == 34 + 1


def test_random_row_calls_read_or_write_rows():
    memory = torch.ones(1 << 14)
    for op, is_write in (
        *(("gather", False), ("rewrite", True), ("lookup", False), ("update", True)),
        *(("lookup.single", False), ("update.single", True)),
    ):
        memory.fill_(1.0)
        device.random_row_calls(op, memory, 64, 64)()
        touched_rows = (memory.view(-1, 16) != 1.0).any(1).sum()
        assert (0 < touched_rows <= 64) == is_write


def test_single_ids_make_a_vector_each():
    for op, shape in (("lookup", (8, 16)), ("lookup.single", (4, 16 * 16))):
        looked_up = device.random_row_calls(op, torch.ones(1 << 14), 64, 64)()
        assert isinstance(looked_up, list)
        assert [vectors.shape for vectors in looked_up] == [shape]


def test_the_folder_must_be_writeable(monkeypatch):
    use_small_sizes(monkeypatch)
    with pytest.raises(UserError, match="not a folder that every rank may write to"):
        machine.measure_cluster("x", Path("/nowhere/at/all"), lambda what: None, window_seconds=1e-4)
