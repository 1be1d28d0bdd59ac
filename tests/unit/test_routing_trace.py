"""Recorded routing: formats, sampling, ranks that recorded it, shares in a workload, errors that name the line."""

import json
from dataclasses import replace

import numpy as np
import pytest

from shardwright.errors import UserError
from shardwright.planner.routing_gains import fold_ranks
from shardwright.spec import routing_trace
from shardwright.spec.routing import RoutedRows
from shardwright.spec.routing_trace import is_trace, read_trace, with_recorded_shares
from shardwright.spec.workload import Block, Mixture, Workload


def write_ours(path, passes):
    """`passes`: of each, rows_SE by mixture."""
    lines = [
        RoutedRows(step, module, tuple(map(tuple, rows_SE))).to_line()
        for step, by_module in enumerate(passes)
        for module, rows_SE in by_module.items()
    ]
    path.write_text("".join(lines))
    return str(path)


def megatron_line(step, layer, rank, top_indices, **more):
    return json.dumps(
        {
            "step": step,
            "stage": "pre_dispatch",
            "block": "decoder",
            "layer": layer,
            "rank": rank,
            "num_tokens": len(top_indices),
            "topk": 2,
            "top_indices": top_indices,
            **more,
        }
    )


def write_megatron(folder):
    """Two ranks, layers 1 and 2, of which only the first has a third pass of rank 0."""
    folder.mkdir()
    for rank in range(2):
        lines = [megatron_line(step, layer, rank, [[0, rank], [0, 3]]) for step in range(2) for layer in (1, 2)]
        if rank == 0:
            lines.append(megatron_line(2, 1, 0, [[1, 2]]))
        (folder / f"router_trace_rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


def test_our_format(tmp_path):
    path = write_ours(tmp_path / "r.jsonl", [{"a": [[3, 1], [0, 4]]}, {"a": [[1, 1], [1, 1]]}])
    trace = read_trace(path)
    assert (trace.format, trace.num_passes, len(trace.passes)) == ("Shardwright", 2, 2)
    assert trace.passes[0]["a"].tolist() == [[3, 1], [0, 4]]
    assert trace.shares["a"].tolist() == [5 / 12, 7 / 12]


def test_a_folder_of_megatrons_router_trace(tmp_path):
    path = write_megatron(tmp_path / "traces")
    assert is_trace(path) and not is_trace(str(tmp_path))
    trace = read_trace(path)
    assert trace.format == "Megatron-LM" and trace.num_passes == 3
    assert len(trace.passes) == 2  # the other rank did not record the third
    assert trace.passes[0]["decoder.layers.1"].tolist() == [[3, 0, 0, 1], [2, 1, 0, 1]]
    assert read_trace(path, num_experts=6).passes[0]["decoder.layers.2"].tolist()[0] == [3, 0, 0, 1, 0, 0]


def test_layers_for_later_tokens_and_dropped_choices(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(megatron_line(0, 0, 5, [[0, -1], [1, 1]], block="mtp", mtp_idx=0) + "\n")
    assert read_trace(str(path)).passes[0]["mtp.0.layers.0"].tolist() == [[1, 2]]


def test_passes_are_sampled_evenly_and_shares_are_of_all(tmp_path):
    num = 3 * routing_trace.MAX_RECORDS
    trace = read_trace(write_ours(tmp_path / "r.jsonl", [{"a": [[number, 1]]} for number in range(num)]))
    sampled = [int(each["a"][0, 0]) for each in trace.passes]
    assert trace.num_passes == num and routing_trace.MAX_RECORDS / 2 <= len(sampled) <= routing_trace.MAX_RECORDS
    assert len({*np.diff(sampled).tolist()}) == 1 and sampled[-1] > 0.99 * num
    assert trace.shares["a"][1] == pytest.approx(num / (num + num * (num - 1) / 2))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{}"], r"r\.jsonl, line 1: no record of routing; .* rows \(Shardwright\), .* top_indices \(Megatron-LM"),
        (["nothing"], r"r\.jsonl, line 1: no record of routing"),
        (["[1, 2]"], r"r\.jsonl, line 1: no record of routing"),
        ([], r"r\.jsonl: no recorded routing in it"),
        ([RoutedRows(0, "a", ((1, 2),)).to_line(), '{"step":1,"module":"a","rows":[[1,-2]]}'], "line 2: rows: wanted"),
        (
            [RoutedRows(0, "a", ((1, 2),)).to_line(), megatron_line(0, 0, 0, [[1, 2]])],
            "line 2: a record of Megatron-LM",
        ),
        (
            [RoutedRows(0, "a", ((1, 2),)).to_line(), RoutedRows(1, "a", ((1, 2), (3, 4))).to_line()],
            'line 2: mixture "a" has 2 experts on 2 ranks, and before 2 on 1',
        ),
        ([megatron_line(0, 0, 0, [[1, 2], [3]])], "line 1: wanted whole numbers layer and rank"),
        ([megatron_line(0, "first", 0, [[1, 2]])], "line 1: wanted whole numbers layer and rank"),
        ([RoutedRows(0, "a", ((0, 0),)).to_line()], "no pass with rows that all ranks recorded"),
    ],
)
def test_errors_name_the_line(tmp_path, lines, message):
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(line.strip() for line in lines) + "\n")
    with pytest.raises(UserError, match=message):
        read_trace(str(path))


def test_a_wrong_number_of_experts_is_refused(tmp_path):
    ours = write_ours(tmp_path / "r.jsonl", [{"a": [[1, 2, 3]]}])
    for path, num in ((ours, 4), (ours, 2), (write_megatron(tmp_path / "m"), 3)):
        with pytest.raises(UserError, match=f"experts were recorded; drop experts.num_experts={num}"):
            read_trace(path, num)


def test_ranks_are_summed_or_spread():
    rows = np.array([[4, 1], [0, 3], [2, 2], [6, 0]])
    assert fold_ranks(rows, 4).tolist() == rows.tolist()
    assert fold_ranks(rows, 2).tolist() == [[4, 4], [8, 2]]
    assert fold_ranks(rows, 3).tolist() == [[4, 2], [4, 2], [4, 2]]
    assert fold_ranks(rows[:1], 2).tolist() == [[2, 0], [2, 1]]
    assert fold_ranks(rows, 2, 0.5).tolist() == [[2, 2], [4, 1]]


def make_workload() -> Workload:
    block = Block("blocks.0", 1, 4, 1, 1, 0)
    mixture = Mixture("blocks.0.mlp", "blocks.0", 2, 8, 4, 4, block)
    return Workload(1, 4, (), (), (), blocks=(block,), experts=(mixture,))


def test_a_workload_gets_the_recorded_shares(tmp_path):
    trace = read_trace(write_ours(tmp_path / "r.jsonl", [{"blocks.0.mlp": [[3, 1], [0, 4]]}]))
    workload = with_recorded_shares(make_workload(), trace)
    workload.verify()
    assert workload.experts[0].shares == (3 / 8, 5 / 8)


def test_traces_of_other_models_are_refused(tmp_path):
    trace = read_trace(write_ours(tmp_path / "r.jsonl", [{"blocks.1.mlp": [[3, 1]]}]))
    with pytest.raises(UserError, match=r'"blocks\.1\.mlp" is not in the model; did you mean "blocks\.0\.mlp"'):
        with_recorded_shares(make_workload(), trace)
    with pytest.raises(UserError, match="not in the model, which has no mixture of experts"):
        with_recorded_shares(replace(make_workload(), experts=()), trace)
    trace = read_trace(write_ours(tmp_path / "r.jsonl", [{"blocks.0.mlp": [[3, 1, 2]]}]))
    with pytest.raises(UserError, match=r'"blocks\.0\.mlp" was recorded with 3 experts, and has 2 in the model'):
        with_recorded_shares(make_workload(), trace)
