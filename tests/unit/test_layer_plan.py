"""Plans of models of layers: axes, pins, reasons, the cluster that is assumed, and wrong input in one line."""

import json
from dataclasses import replace
from math import prod

import pytest

from shardwright.errors import UserError
from shardwright.planner.engines.megatron import megatron_flags
from shardwright.planner.layers import layer_reasons
from shardwright.planner.layers.degrees import Degrees, even_cuts
from shardwright.planner.layers.layer_plan import make_layer_plan, split_axes, untrained_roles
from shardwright.planner.layers.layer_search import (
    LayerSplit,
    SearchResult,
    SplitPins,
    Training,
    all_degrees,
    price_split,
    search,
)
from shardwright.planner.layers.rank_groups import group_links, ring_seconds
from shardwright.planner.layers.step_time import chunk_seconds, gradient_seconds, step_parts
from shardwright.runtime.layer_request import complete_prices, is_layer_model, read_layer_request, with_ranks
from shardwright.runtime.supported import check_supported
from shardwright.spec import files, presets
from shardwright.spec.plan import Plan
from shardwright.spec.transformer import load_transformer

CLUSTER = presets.load_cluster("h800-256")


def request(*keys: str, source: str = "llama-7b", cluster: str = "h800-256", sequences: int = 64) -> Training:
    return read_layer_request(source, keys, cluster, sequences)[0]


def small(**changes: object) -> SearchResult:
    return search(replace(request("ranks=16", 'memory="40 GB"', "offload=false"), **changes))


RESULT = small()


def test_axes_number_the_ranks_as_the_degrees():
    """The innermost ranks are those of tensor parallelism; sizes multiply to the ranks; hosts have 8."""
    for degrees, _ in all_degrees(request("ranks=48", source="qwen3-30b-a3b", sequences=48)):
        axes = split_axes(CLUSTER, degrees)
        assert prod(axis.size for axis in axes) == degrees.num_ranks == 48
        sizes = {role: prod(a.size for a in axes if a.role == role) for role in ("tensor", "context", "pipe")}
        assert sizes == {"tensor": degrees.tensor, "context": degrees.context, "pipe": degrees.pipeline}
        assert prod(axis.size for axis in axes if axis.role in ("data", "expert")) == degrees.data
        assert prod(axis.size for axis in axes if axis.level == "local") <= 8
        assert [axis.role for axis in axes] == sorted(
            (axis.role for axis in axes), key=("pipe", "data", "expert", "context", "tensor").index
        )


def test_every_split_is_a_plan_that_is_valid(tmp_path):
    training = request("ranks=32", source="qwen3-30b-a3b", sequences=64)
    result = search(training)
    for number, split in enumerate(result.splits[:: max(1, len(result.splits) // 60)]):
        plan = make_layer_plan(training, split, [("split", "a reason")])
        plan.verify()
        assert plan.num_ranks == 32 and plan.num_pipeline_ranks == split.degrees.pipeline
        sharded = prod(axis.size for axis in plan.axes if axis.name in plan.dense.shard)
        assert sharded == (split.degrees.num_shards if split.degrees.zero == 3 else 1)
        experts = {prod(dict(plan.mesh_axes)[name] for name in each.axes) for each in plan.experts}
        assert experts == ({split.degrees.expert} if split.degrees.expert > 1 else set())
        if number == 0:
            files.write(plan, tmp_path / "plan.json")
            assert files.read(Plan, tmp_path / "plan.json") == plan


def test_what_cannot_be_trained_yet_is_said_and_refused():
    split = next(split for split in RESULT.splits if split.degrees.tensor > 1 and split.degrees.zero == 1)
    plan = make_layer_plan(RESULT.training, split, [])
    assert untrained_roles(plan)[0] == "tensor parallelism" and "ZeRO-1" in untrained_roles(plan)
    with pytest.raises(UserError, match="tensor parallelism"):
        check_supported(plan, ())
    ddp = replace(plan, axes=(("data", "local", 16),), dense=replace(plan.dense, shard_optimizer=("data@local",)))
    with pytest.raises(UserError, match="shard_optimizer"):
        check_supported(replace(ddp, axes=RESULT.training.cluster.axes, pipeline=None), ())


def test_parts_add_up_to_the_step():
    for split in RESULT.splits[:40]:
        parts = step_parts(RESULT.training.timer(split.degrees, split.batch), split.step)
        assert sum(parts.values()) == pytest.approx(split.step.total) and min(parts.values()) > -1e-9


def test_pins_keep_what_they_name():
    for pins in (SplitPins(tensor=4), SplitPins(pipeline=2, chunks=4), SplitPins(recompute="full", micro=2)):
        for split in small(pins=pins).splits:
            assert pins.allow(split.degrees, split.batch)
    assert small(pins=SplitPins(zero=3)).splits[0].degrees.zero == 3


def test_a_subset_of_options_is_never_better():
    best = RESULT.splits[0].step.total
    for pins in (SplitPins(tensor=2), SplitPins(zero=1), SplitPins(pipeline=4), SplitPins(recompute="full")):
        assert small(pins=pins).splits[0].step.total >= best * (1 - 1e-9)


def test_reasons_name_what_takes_longer():
    lines = [*layer_reasons.split_reasons(RESULT)]
    assert len(lines) == 5 and lines[0].startswith("1: ") and "the shortest step of" in lines[0]
    tight = small(memory_bytes=20e9)
    line = next(layer_reasons.split_reasons(tight))
    assert "would save" in line and "needs" in line
    pinned = small(pins=SplitPins(tensor=8))
    (line, *_) = layer_reasons.explain_pins(RESULT, pinned)
    assert "tensor 8: its best is number" in line and "tensor-parallel collectives, exposed +" in line


def test_what_does_not_fit_says_by_how_much():
    (line,) = layer_reasons.split_reasons(small(memory_bytes=4e9))
    assert "configurations fit;" in line and "of 3.7 GiB (" in line and "use more ranks" in line
    lines = [*layer_reasons.explain_pins(RESULT, small(memory_bytes=4e9, pins=SplitPins(tensor=8)))]
    assert "tensor 8: none of" in lines[0] and lines[1].startswith("without pins the best is ")
    (line,) = layer_reasons.split_reasons(small(pins=SplitPins(tensor=3)))
    assert "no way to split llama-7b over 16 ranks with 64 sequences of 4096 and pins.tensor=3" in line


def test_recorded_routing_makes_the_busiest_rank_slower_and_fuller():
    model = load_transformer("qwen3-30b-a3b")
    skewed = (4.0, *[124 / 127] * 127)
    training = request("ranks=16", source="qwen3-30b-a3b")
    split = search(training).splits[0]
    uneven = replace(training, expert_shares=(tuple(share / 128 for share in skewed),))
    degrees = replace(split.degrees, expert=8)
    assert model.experts and uneven.imbalance(degrees.expert) == pytest.approx(8 * (4 + 15 * 124 / 127) / 128)
    assert training.imbalance(degrees.expert) == 1.0
    even, skewed_split = (price_split(each, degrees, split.batch) for each in (training, uneven))
    assert skewed_split.step.total > even.step.total
    assert skewed_split.fullest.activations > 1.01 * even.fullest.activations


@pytest.mark.parametrize(
    "keys, message",
    [
        (["ranks=12"], "ranks=12: hosts of h800-256 have 8 ranks; use a multiple"),
        (["ranks=-8"], "ranks=-8"),
        (["length=0"], "length is 0"),
        (['memory="lots"'], "memory: .*not a number of bytes"),
        (['memory="90 GB"'], "a rank of h800-256 has 80 GB"),
        (["pin.tensor=8"], "pin"),
        (["routing=none.jsonl"], "llama-7b has no experts"),
    ],
)
def test_wrong_keys_are_one_line(keys, message):
    with pytest.raises(UserError, match=message) as error:
        request(*keys)
    assert "\n" not in str(error.value)


def test_clusters_without_prices_of_layers():
    device = CLUSTER.device
    bare = replace(CLUSTER, device=replace(device, prices=tuple(p for p in device.prices if p.op == "matmul")))
    completed, notes = complete_prices(bare)
    assert {price.op for price in completed.device.prices} == {price.op for price in device.prices}
    assert "attention: not measured on h800-256" in notes[0]
    with pytest.raises(UserError, match="no price of matrix products in bfloat16.*measure --layers"):
        complete_prices(presets.load_cluster("het-a"))


def test_other_numbers_of_ranks():
    assert with_ranks(CLUSTER, 64).num_ranks == 64 and with_ranks(CLUSTER, 4).num_ranks == 4
    assert with_ranks(CLUSTER, 0) is CLUSTER
    with pytest.raises(UserError, match="1 network levels"):
        with_ranks(with_ranks(CLUSTER, 8), 16)


def test_names_and_config_files_are_models_of_layers(tmp_path):
    assert is_layer_model("llama-65b") and not is_layer_model("synthetic-dlrm")
    assert not is_layer_model(str(tmp_path / "missing.json"))
    config = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1000}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(config | {"intermediate_size": 2048, "hidden_act": "silu"}))
    assert is_layer_model(str(path)) and request("ranks=8", source=str(path)).model.layers == 4
    path.write_text(json.dumps({"tables": []}))
    assert not is_layer_model(str(path))
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "num_attention_heads"}))
    with pytest.raises(UserError, match="no num_attention_heads"):
        request(source=str(path))


def test_the_default_step_has_4_million_tokens():
    training, notes = read_layer_request("llama-7b", ["ranks=64", "length=8192"], "h800-256", 0)
    assert training.sequences * training.length == 1 << 22 and "512 sequences" in notes[-1]


def test_uneven_first_and_last_chunks():
    cuts = {degrees.cuts for degrees, _ in all_degrees(request("ranks=32", source="qwen3-235b-a22b"))}
    assert (5, *[6] * 14, 5) in cuts and even_cuts(94, 2) in cuts


def test_oversized_splits_exceed_the_limit():
    result = small(memory_bytes=20e9)
    assert result.oversized and all(split.fullest.total > 20e9 for split in result.oversized)
    assert isinstance(result.oversized[0], LayerSplit) and isinstance(result.oversized[0].degrees, Degrees)


def exposed_time(timer):
    return gradient_seconds(timer, 0, chunk_seconds(timer))


def test_hidden_collectives_of_gradients_are_no_part_of_the_step():
    hidden, exposed = (
        request("ranks=16", "pins.zero=1", "pins.pipeline=1", "pins.tensor=1", f"overlap={text}")
        for text in ("true", "false")
    )
    split = search(exposed).splits[0]
    seconds = [each.timer(split.degrees, split.batch) for each in (hidden, exposed)]
    assert exposed_time(seconds[0]) < exposed_time(seconds[1]) == split.step.gradients
    inner, outer = CLUSTER.levels
    slow = replace(hidden.cluster, levels=(inner, replace(outer, num=2, bytes_per_second=1e8)))
    exposed_seconds = [replace(each, cluster=slow) for each in seconds]
    assert 0.0 < exposed_time(exposed_seconds[0]) < exposed_time(exposed_seconds[1])
    assert "--overlap-grad-reduce" in megatron_flags(hidden, split).flags
    assert "--overlap-grad-reduce" not in megatron_flags(exposed, split).flags


def test_pins_may_name_what_is_not_searched_without_them():
    assert all(split.batch.micro_sequences == 8 for split in small(pins=SplitPins(micro=8)).splits)
    assert small(pins=SplitPins(micro=8)).splits
    assert {split.degrees.context for split in small(pins=SplitPins(context=8)).splits} == {8}


def test_one_rank_and_hosts_that_share_a_link(tmp_path):
    device = CLUSTER.device
    alone = replace(CLUSTER, levels=(), device=replace(device, tiers=(replace(device.tiers[0], bytes_=400 * 10**9),)))
    result = search(Training(load_transformer("llama-7b"), 4, 2048, 1, alone, 380e9))
    assert result.splits[0].degrees.num_ranks == 1
    make_layer_plan(result.training, result.splits[0], []).verify()
    inner, outer = CLUSTER.levels
    shared = replace(CLUSTER, levels=(inner, replace(outer, group_bytes_per_second=outer.bytes_per_second)))
    own, common = (group_links(each, 16, 1, 2) for each in (CLUSTER, shared))
    seconds = [ring_seconds(links, 1e9) - ring_seconds(links, 0.0) for links in (common, own)]  # without latency
    assert seconds[0] == pytest.approx(8 * seconds[1])


def test_sequences_of_odd_length_need_no_context_parallelism():
    assert search(request("ranks=8", "length=1001", "pins.tensor=1")).splits
    assert not search(request("ranks=8", "length=1001", "pins.tensor=2")).splits
