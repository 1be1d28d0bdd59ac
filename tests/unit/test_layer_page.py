"""Page of a plan of a model of layers: tables that add up, figures that leave out nothing that they claim to show."""

import re
from dataclasses import replace

import pytest
from rich.console import Console

from shardwright.planner.layers.degrees import Degrees, SequenceBatch
from shardwright.planner.layers.layer_names import degrees_name, describe_split, sharding_name
from shardwright.planner.layers.layer_search import SearchResult, SplitPins, Training, search
from shardwright.planner.layers.layer_time import layer_products
from shardwright.report import layer_figures, layer_plan
from shardwright.report.html_template import Grid
from shardwright.report.layer_roofline import device_roofs, layer_works, product_names
from shardwright.report.layer_timeline import MAX_PASSES, MAX_ROWS, shown_ranks, step_windows, timeline_figure
from shardwright.report.terminal import rich_table
from shardwright.spec import presets
from shardwright.spec.transformer import load_transformer, transformer_names

CLUSTER = presets.load_cluster("h800-256")
SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


def training(name="llama-7b", ranks=16, memory=40e9, host=60e9, **pins) -> Training:
    return Training(load_transformer(name), 64, 4096, ranks, CLUSTER, memory, host, pins=SplitPins(**pins))


@pytest.fixture(scope="module")
def dense() -> SearchResult:
    """With a pipeline, chunks and offload."""
    return search(training(memory=25e9, pipeline=4))


@pytest.fixture(scope="module")
def mixture() -> SearchResult:
    """With experts on other ranks."""
    return search(training("qwen3-30b-a3b", 64, 70e9, 0.0, pipeline=8, expert=4))


@pytest.fixture(params=["dense", "mixture"])
def result(request) -> SearchResult:
    return request.getfixturevalue(request.param)


def column(grid: Grid, name: str) -> list[str]:
    return [row[grid.columns.index(name)] for row in grid.rows]


def to_seconds(text: str) -> float:
    number, _, unit = text.partition(" (")[0].partition(" ")
    return float(number.replace(",", "")) * SECONDS[unit] if unit else float(number)


def test_the_best_splits_have_their_degrees_and_speed(result):
    grid = layer_plan.split_grid(result.training, result.splits[:5])
    best = result.splits[0]
    tokens_per_second = result.training.tokens_per_second(best.step)
    row = dict(zip(grid.columns, grid.rows[0], strict=True))
    assert len(grid.rows) == 5 and ("EP" in row) == (result.training.model.experts is not None)
    assert row["PP"] == f"{best.degrees.pipeline}x{best.degrees.num_chunks}"
    assert row["tokens/s"] == f"{tokens_per_second:,.0f}"
    assert float(row["MFU"][:-1]) < float(row["MFU, full"][:-1])
    assert ("offload" in row) == any(split.host_bytes for split in result.splits[:5])


def test_parts_add_up_to_the_step_and_none_is_zero_in_all_splits(result):
    grid = layer_plan.part_grid(result.training, result.splits[:5])
    for number in range(1, 6):
        cells = column(grid, f"split {number}")
        assert sum(map(to_seconds, cells)) == pytest.approx(to_seconds(grid.total[number]), rel=0.01)
    assert all(any(to_seconds(cell) for cell in row[1:]) for row in grid.rows)
    assert ("expert-parallel all-to-all" in column(grid, "part")) == (result.training.model.experts is not None)


def test_memory_has_a_row_for_each_pipeline_rank_and_one_for_equal_neighbors(dense):
    split = dense.splits[0]
    assert len(layer_plan.memory_grid(split).rows) <= split.degrees.pipeline
    first, *_, last = split.memory
    grid = layer_plan.memory_grid(replace(split, memory=(first, last, last, last)))
    assert [row[0] for row in grid.rows] == ["0", "1 to 3"]
    assert "gathered weights" not in grid.columns and "logits" in grid.columns


def test_tables_fit_on_a_terminal(result):
    console = Console(width=200)
    for _, grid in layer_plan.grids(result):
        assert console.measure(rich_table("", grid)).maximum <= 130


def test_memory_bars_reach_the_total(dense):
    split = dense.splits[0]
    bars = [bar for bar in layer_figures.memory_figure(dense.training, split).data if "base" in bar]
    for stage, memory in enumerate(split.memory):
        assert sum(bar["y"][stage] for bar in bars) * layer_figures.GIB == pytest.approx(memory.total)
        assert all(
            after["base"][stage] == pytest.approx(before["base"][stage] + before["y"][stage])
            for before, after in zip(bars, bars[1:], strict=False)
        )


def test_the_frontier_is_what_no_split_beats(result):
    splits = (*result.splits, *result.oversized)
    frontier = layer_figures.frontier_splits(splits)
    for split in splits:
        assert any(
            best.fullest.total <= split.fullest.total and best.step.total <= split.step.total for best in frontier
        )
    times = [split.step.total for split in frontier]
    assert times == sorted(times, reverse=True) and len(set(times)) == len(times)


def test_a_large_search_is_thinned_but_not_its_frontier(dense, monkeypatch):
    points = {trace["name"]: trace["x"] for trace in layer_figures.search_figure(dense).data}
    monkeypatch.setattr(layer_figures, "MAX_POINTS", 20)
    figure = layer_figures.search_figure(dense)
    few = {trace["name"]: trace["x"] for trace in figure.data}
    assert len(points["fits"]) == len(dense.splits) > 40
    assert len(few["fits"]) + len(few.get("does not fit", ())) <= 22
    assert few["least time for each memory"] == points["least time for each memory"]
    assert few["split 1"] == points["split 1"] and "is drawn" in figure.caption


def test_a_short_timeline_has_all_passes_and_ends_with_the_step(dense):
    split = min(dense.splits[:50], key=lambda split: split.degrees.num_chunks)
    figure = timeline_figure(dense.training, split)
    bars = {trace["name"]: trace for trace in figure.data}
    num = split.degrees.micro_batches(split.batch) * len(split.degrees.cuts)
    assert len(bars["forward"]["x"]) == len(bars["backward"]["x"]) == num
    end = max(base + length for bar in figure.data for base, length in zip(bar["base"], bar["x"], strict=True))
    assert end == pytest.approx(figure.layout["xaxis"]["range"][1])
    assert not re.search("left out|are drawn", figure.caption)


def test_a_long_timeline_has_only_the_beginning_and_the_end():
    pins = {"tensor": 8, "pipeline": 32, "data": 1, "micro": 1, "chunks": 1}
    long = replace(training("gpt-175b", 256, 70e9, **pins), sequences=128)
    split = search(long).splits[0]
    figure = timeline_figure(long, split)
    assert split.degrees.micro_batches(split.batch) * 2 > MAX_PASSES
    assert {trace["xaxis"] for trace in figure.data} == {"x", "x2"}
    assert sum(len(trace["x"]) for trace in figure.data) < MAX_ROWS * MAX_PASSES * 1.5
    assert sum(trace["showlegend"] for trace in figure.data) == len({trace["name"] for trace in figure.data})
    assert "left out" in figure.caption and "16 of 32 pipeline ranks" in figure.caption


@pytest.mark.parametrize("num, has_numbers", [(24, True), (25, False)])
def test_bars_have_the_numbers_of_micro_batches_where_there_is_room(num, has_numbers):
    few = replace(training(pipeline=1, data=1, tensor=8, context=2, micro=1), sequences=num)
    bars = timeline_figure(few, search(few).splits[0]).data[0]
    assert bars["text"] == ([f"{micro}" for micro in range(num)] if has_numbers else "")


def test_rows_and_windows_of_a_timeline():
    assert shown_ranks(3) == [0, 1, 2]
    assert len(set(shown_ranks(64))) == MAX_ROWS and shown_ranks(64)[-1] == 63
    assert [window[:2] for window in step_windows(5.0, 4.0, MAX_PASSES)] == [(0.0, 5.0)]
    begin, end = step_windows(5.0, 4.0, 4 * MAX_PASSES)
    assert (begin.start, begin.end, end.start, end.end) == (0.0, 0.5, 4.5, 5.0)


@pytest.mark.parametrize("name", transformer_names())
def test_products_have_names(name):
    model = load_transformer(name)
    for layer, _ in model.layer_kinds(range(model.layers)):
        products = layer_products(model, layer, 4096, Degrees((model.layers,)))
        names = product_names(model, layer)
        assert len(names) == len(products) == len(set(names))


def test_work_of_a_layer_is_below_the_roofs(result):
    peak, bytes_per_second = device_roofs(result.training)
    works = list(layer_works(result.training, result.splits[0]))
    assert all(work.rate < min(peak, work.intensity * bytes_per_second) for work in works)
    assert {"attention kernel", "head"} < {work.name for work in works}


def test_names_of_splits():
    degrees = Degrees((2,) * 16, tensor=2, pipeline=4, data=8)
    assert degrees_name(degrees) == "TP2 PP4x4 DP8" and degrees_name(Degrees((1,))) == "1 rank"
    assert [sharding_name(replace(degrees, zero=zero)) for zero in (0, 1, 3)] == ["replicated", "ZeRO-1", "ZeRO-3"]
    assert sharding_name(replace(degrees, zero=3, shard=4)) == "HSDP 4"


def test_a_split_is_described_with_all_its_choices(dense):
    split = next(split for split in dense.splits if split.host_bytes and split.degrees.recompute == "memory-bound")
    text = describe_split(replace(split, batch=SequenceBatch(64, 4096, 1)))
    choices = "micro-batch 1, ZeRO-1, recomputes norms and activation functions, offloads up to"
    assert re.fullmatch(rf"[TCDP\d x]+, {choices} \d+%", text)


def test_the_page_has_notes_figures_and_tables(result, tmp_path):
    path = layer_plan.render(result, tmp_path / "plan.html", ["The first note."])
    text = path.read_text()
    figures = layer_plan.figures(result)
    assert len(figures) == 5 and all(f'id="{figure.name}"' in text for figure in figures)
    assert "The first note." in text
    assert f"{result.training.model.name} on {result.training.num_ranks} ranks of h800-256" in text


def test_without_a_split_that_fits_the_page_has_the_search(tmp_path):
    result = search(training(memory=4e9, host=0.0))
    assert layer_plan.figures(replace(result, oversized=())) == ()
    assert not result.splits and layer_plan.grids(result) == ()
    assert [figure.name for figure in layer_plan.figures(result)] == ["layer_search"]
    assert 'id="layer_search"' in layer_plan.render(result, tmp_path / "plan.html", []).read_text()
