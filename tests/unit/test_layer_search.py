"""Steps of models of layers, and the search: closed forms of the schedules, hosts that groups do not fill, and what
more memory and faster links may not do."""

import json
from dataclasses import replace

import pytest

from benchmarks import results_file
from benchmarks.layer_calibration import Constants
from benchmarks.published_layers import LIMIT, PUBLISHED
from shardwright.planner.layers.degrees import Degrees, SequenceBatch, even_cuts
from shardwright.planner.layers.layer_search import LayerSplit, SplitPins, Training, search
from shardwright.planner.layers.layer_time import LayerTimer, Overheads, PassSeconds
from shardwright.planner.layers.rank_groups import group_links, ring_seconds
from shardwright.planner.layers.step_time import simulate_passes, step_seconds
from shardwright.spec import presets
from shardwright.spec.cluster import Cluster
from shardwright.spec.transformer import load_transformer

CLUSTER = presets.load_cluster("h800-256")


@pytest.mark.parametrize("ranks, chunks, micro_batches", [(1, 1, 3), (4, 1, 8), (4, 2, 8), (8, 5, 16), (3, 4, 9)])
def test_simulated_schedules_have_the_published_bubble(ranks, chunks, micro_batches):
    degrees = Degrees((1,) * ranks * chunks, pipeline=ranks)
    simulated = simulate_passes([PassSeconds(1.0, 2.0)] * ranks * chunks, degrees, micro_batches)
    assert max(each.end for each in simulated) == pytest.approx(3 * (micro_batches * chunks + ranks - 1))


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.model} on {row.ranks}")
def test_published_bubbles(row):
    """To the printed digit, as a share of the passes' time, with chunks of equal time."""
    degrees, micro_batches = row.degrees, row.degrees.micro_batches(row.batch)
    seconds = max(
        each.end for each in simulate_passes([PassSeconds(1.0, 2.0)] * len(degrees.cuts), degrees, micro_batches)
    )
    bubble = 1 - 3 * micro_batches * degrees.num_chunks / seconds
    assert 100 * bubble == pytest.approx(row.bubble, abs=0.006)


def test_simulated_messages_delay_the_first_and_the_last_passes():
    degrees = Degrees((1,) * 4, pipeline=4)
    simulated = simulate_passes([PassSeconds(1.0, 2.0)] * 4, degrees, 8, 0.25)
    assert max(each.end for each in simulated) > 3 * (8 + 3) + 2 * 3 * 0.25 - 1e-9


def test_groups_that_do_not_fill_hosts_use_fewer_cards():
    """Hosts have 8 ranks; 6 groups of 6 data ranks whose tensor ranks are neighbors, and so on."""
    assert group_links(CLUSTER, 8, 1, 4).cards == 0
    assert group_links(CLUSTER, 8, 2, 6).cards == 4
    assert group_links(CLUSTER, 6, 4, 6).cards == 2
    assert group_links(CLUSTER, 5, 4, 6).cards == 1
    assert group_links(CLUSTER, 3, 2, 8).cards == 1  # two in one host, one in the next
    links = group_links(CLUSTER, 8, 2, 6)
    network = CLUSTER.levels[1]
    assert ring_seconds(links, 8e9) == pytest.approx(7 * network.latency_seconds + 7e9 / (4 * network.bytes_per_second))


def test_tensor_parallelism_without_sequence_parallelism():
    """No all-gather of inputs for the gradients of weights; norms run on all tokens on each tensor rank."""
    model, batch = load_transformer("llama-7b"), SequenceBatch(8, 4096)
    split, whole = (
        LayerTimer(model, batch, Degrees((32,), tensor=8, sequence_parallel=is_split), CLUSTER).layer(0)
        for is_split in (True, False)
    )
    assert whole["tensor"].forward == split["tensor"].forward
    assert whole["tensor"].backward == pytest.approx(split["tensor"].backward * 4 / 6)
    assert whole["memory"].forward > 2 * split["memory"].forward
    assert whole["products"] == split["products"]


def training(cluster: Cluster = CLUSTER, memory: float = 40e9, host: float = 0.0) -> Training:
    return Training(load_transformer("llama-7b"), 64, 4096, 16, cluster, memory, host)


def best(cluster: Cluster = CLUSTER, memory: float = 40e9, host: float = 0.0) -> LayerSplit:
    return search(training(cluster, memory, host)).splits[0]


def best_of_zero_1(cluster: Cluster) -> LayerSplit:
    """The best whose reduce-scatter of gradients is not hidden."""
    return search(replace(training(cluster), pins=SplitPins(zero=1))).splits[0]


def test_more_memory_and_faster_links_never_make_the_best_step_longer():
    slow, fast = best().step.total, best(memory=70e9).step.total
    assert fast <= slow <= best(memory=25e9).step.total
    assert best(host=60e9).step.total <= slow
    inner, outer = CLUSTER.levels
    doubled = replace(CLUSTER, levels=(inner, replace(outer, bytes_per_second=2 * outer.bytes_per_second)))
    assert best(doubled).step.total <= slow
    assert best_of_zero_1(doubled).step.total < best_of_zero_1(CLUSTER).step.total


def test_splits_that_are_found_fit():
    splits = search(training(memory=25e9, host=60e9)).splits
    assert len(splits) > 10 and all(split.fullest.total <= 25e9 * (1 + 1e-9) for split in splits)
    assert any(split.fullest.offload for split in splits)
    assert not search(training(memory=4e9)).splits


def test_a_published_optimum_is_among_the_first_five():
    row = next(row for row in PUBLISHED if row.model == "65B" and row.ranks == 32)
    host = CLUSTER.device.tiers[1].bytes_
    splits = search(Training(row.transformer, row.sequences, row.length, row.ranks, CLUSTER, LIMIT, host)).splits
    published = replace(row.degrees, cuts=even_cuts(80, 40))
    assert published in [replace(split.degrees, offload=()) for split in splits[:5]]


def test_the_preset_has_the_fitted_constants():
    *_, last = results_file.FOLDER.joinpath("layer_calibration.json").read_text().splitlines()
    fitted, prices = Constants(**json.loads(last)["constants"]), CLUSTER.device.prices
    expected = fitted.cluster()
    for price in expected.device.prices:
        own = next(each for each in prices if each.op == price.op)
        assert own.seconds_per_flop == pytest.approx(price.seconds_per_flop, rel=2e-3)
        assert own.seconds_per_byte == pytest.approx(price.seconds_per_byte, rel=2e-3)
    assert CLUSTER.levels[1].bytes_per_second == pytest.approx(expected.levels[1].bytes_per_second, rel=2e-3)
    assert Overheads().exposed == pytest.approx(fitted.exposed, rel=2e-3)
    assert Overheads().chunk_seconds == pytest.approx(1e-3 * fitted.chunk_ms, rel=5e-3)


def test_steps_of_published_configurations():
    """With the preset's prices, which are fitted to them (benchmarks.layer_calibration)."""
    for row in PUBLISHED:
        timer = LayerTimer(row.transformer, row.batch, row.degrees, CLUSTER)
        assert step_seconds(timer).total == pytest.approx(row.seconds, rel=0.02), row
