"""Properties of the search over drawn models, clusters and limits: what may never make the best step longer, and that
every split is a valid plan."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planner.layers.layer_plan import make_layer_plan
from shardwright.planner.layers.layer_search import SearchResult, SplitPins, Training, search
from shardwright.runtime.layer_request import with_ranks
from shardwright.spec import presets
from shardwright.spec.cluster import Cluster
from shardwright.spec.transformer import load_transformer

MODELS = ("llama-7b", "llama3-8b", "qwen3-30b-a3b")
CLUSTERS = ("h800-256", "a100", "b200")
PINS = (
    *(SplitPins(tensor=2), SplitPins(pipeline=2), SplitPins(zero=1), SplitPins(zero=3), SplitPins(micro=1)),
    *(SplitPins(recompute="full"), SplitPins(data=4, recompute="none"), SplitPins(context=2), SplitPins(chunks=2)),
)


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    ranks = draw(st.sampled_from([4, 8, 16, 24]))
    cluster = with_ranks(presets.load_cluster(draw(st.sampled_from(CLUSTERS))), ranks)
    return Training(
        model=load_transformer(draw(st.sampled_from(MODELS))),
        sequences=ranks * draw(st.sampled_from([2, 4])),
        length=draw(st.sampled_from([2048, 4096])),
        num_ranks=ranks,
        cluster=cluster,
        memory_bytes=1e9 * draw(st.integers(16, 70)),
        host_bytes=1e9 * draw(st.sampled_from([0, 40])),
    )


def best_seconds(result: SearchResult) -> float:
    return result.splits[0].step.total if result.splits else float("inf")


def scale_links(cluster: Cluster, level: int, factor: float) -> Cluster:
    """The cluster with one level's links so many times as fast; a host alone has one level."""
    levels, level = list(cluster.levels), min(level, len(cluster.levels) - 1)
    levels[level] = replace(levels[level], bytes_per_second=factor * levels[level].bytes_per_second)
    return replace(cluster, levels=tuple(levels))


@settings(max_examples=10)
@given(trainings(), st.floats(1.05, 3.0), st.sampled_from([0.0, 40e9]))
def test_more_memory_never_makes_the_best_slower(training, factor, host_bytes):
    more = replace(training, memory_bytes=factor * training.memory_bytes, host_bytes=training.host_bytes + host_bytes)
    assert best_seconds(search(more)) <= best_seconds(search(training)) * (1 + 1e-9)


@settings(max_examples=10)
@given(trainings(), st.integers(0, 1), st.floats(1.05, 4.0))
def test_faster_links_never_make_the_best_slower(training, level, factor):
    faster = replace(training, cluster=scale_links(training.cluster, level, factor))
    assert best_seconds(search(faster)) <= best_seconds(search(training)) * (1 + 1e-9)


@settings(max_examples=10)
@given(trainings(), st.sampled_from(PINS))
def test_a_subset_of_options_is_never_better(training, pins):
    pinned, free = search(replace(training, pins=pins)), search(training)
    assert best_seconds(pinned) >= best_seconds(free) * (1 - 1e-9)
    assert all(pins.allow(split.degrees, split.batch) for split in pinned.splits)


@settings(max_examples=10)
@given(trainings(), st.data())
def test_every_split_fits_and_is_a_valid_plan(training, data):
    splits = search(training).splits
    if not splits:
        return
    for split in data.draw(st.lists(st.sampled_from(splits), min_size=1, max_size=12)):
        assert split.fullest.total <= training.memory_bytes * (1 + 1e-9) and split.host_bytes <= training.host_bytes
        plan = make_layer_plan(training, split, [])
        plan.verify()
        assert plan.num_ranks == training.num_ranks
