"""Arguments of torchtitan: by value and, where TORCHTITAN_PATH names a checkout, by its own parser."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.errors import UserError
from shardwright.planner.engines.engine_flags import EngineFlags
from shardwright.planner.engines.torchtitan import FLAVORS, find_flavor, torchtitan_config
from shardwright.planner.layers.degrees import Degrees, SequenceBatch, even_cuts
from shardwright.planner.layers.layer_search import LayerSplit, Training, all_degrees
from shardwright.planner.layers.memory import stage_memory
from shardwright.planner.layers.step_time import StepSeconds
from shardwright.spec import presets
from shardwright.spec.transformer import load_transformer

CLUSTER = presets.load_cluster("h800-256")
MODELS = ("llama3-8b", "llama3-70b", "qwen3-32b", "qwen3-30b-a3b", "deepseek-v3")


def flags_of(name: str, degrees: Degrees, batch: SequenceBatch | None = None) -> EngineFlags:
    batch = batch or SequenceBatch(512, 4096)
    training = Training(load_transformer(name), batch.sequences, batch.length, degrees.num_ranks, CLUSTER, 65e9)
    memory = tuple(stage_memory(training.model, batch, degrees, 65e9)) if degrees.offload else ()
    return torchtitan_config(training, LayerSplit(degrees, batch, memory, StepSeconds(1.0, 0.0, 0.0, 0.0)))


def test_flags_of_a_pipeline():
    degrees = Degrees((19, 21, 21, 19), tensor=4, context=2, pipeline=2, data=8, recompute="full")
    assert flags_of("llama3-70b", degrees).flags == (
        "--module llama3",
        "--config llama3_70b",
        "--training.max_context_length 4096",
        "--training.num_tokens_per_microbatch_per_dp_rank 4096",
        "--training.num_tokens_per_train_step 2097152",
        "--training.disable_cuda_graphs",
        "--parallelism.data_parallel_replicate_degree 1",
        "--parallelism.data_parallel_shard_degree 8",
        "--parallelism.fsdp_reshard_after_forward never",
        "--parallelism.tensor_parallel_degree 4",
        "--parallelism.context_parallel_degree 2",
        "--parallelism.expert_parallel_degree 1",
        "--parallelism.pipeline_parallel_degree 2",
        "--parallelism.pipeline_parallel_schedule Interleaved1F1B",
        "--parallelism.num_pp_microbatches 64",
        "--parallelism.pipeline_parallel_layers_per_stage 21",
        "--parallelism.pipeline_parallel_first_stage_less_layers 2",
        "--parallelism.pipeline_parallel_last_stage_less_layers 2",
        "activation-checkpoint:full",
    )


def test_flags_of_uneven_cuts():
    flags = flags_of("llama3-8b", Degrees((2, 14, 15, 1), pipeline=4, data=8)).flags
    modules = next(flag for flag in flags if "module_fqns" in flag).split()
    assert modules[:2] == ["--parallelism.module_fqns_per_model_part", "tok_embeddings,layers.0,layers.1"]
    assert modules[-1] == "layers.31,norm,lm_head" and len(modules) == 5
    assert not any("layers_per_stage" in flag for flag in flags)


def test_flags_of_sharded_weights():
    flags = flags_of("qwen3-30b-a3b", Degrees((48,), tensor=2, context=2, data=16, zero=3, shard=4, expert=8))
    for flag in (
        "--parallelism.data_parallel_replicate_degree 8",
        "--parallelism.data_parallel_shard_degree 2",
        "--parallelism.fsdp_reshard_after_forward always",
        "--parallelism.expert_parallel_degree 8",
        "activation-checkpoint:none",
    ):
        assert flag in flags.flags
    assert flags.notes == ("torchtitan shards states of experts over 1 ranks; the plan over 4",)
    assert not any("pp_" in flag or "schedule" in flag for flag in flags.flags)


def test_notes_say_what_differs():
    degrees = Degrees(even_cuts(80, 8), tensor=4, pipeline=8, data=2, recompute="memory-bound", offload=(0.5,) * 8)
    model, zero, checkpointing, offload = flags_of("llama2-70b", degrees).notes
    assert "no model of these sizes" in model and "FSDP in place of ZeRO-1" in zero
    assert "every second matrix product" in checkpointing and "moves" in offload
    notes = flags_of("qwen3-235b-a22b", Degrees((94,), tensor=4, data=16, zero=3), SequenceBatch(64, 65536)).notes
    assert 'model_registry("235B-A22B")' in notes[0] and "positions for 40960 tokens" in notes[1]
    assert notes[2] == "without expert parallelism torchtitan splits each expert over 4 tensor ranks"
    assert "float8" in flags_of("llama3-405b", Degrees((126,), tensor=8, data=8, zero=3)).notes[0]
    replicated = flags_of("llama3-8b", Degrees((32,), context=2, data=4, zero=0, tensor=2, sequence_parallel=False))
    assert replicated.notes == ("torchtitan shards states over the 2 context ranks; the plan does not",)
    assert "--parallelism.no_enable_sequence_parallel" in replicated.flags


@pytest.mark.parametrize(
    "name, degrees, message",
    [
        ("gpt-175b", Degrees(even_cuts(96, 8), tensor=8, pipeline=8), "wants an untied model"),
        ("llama3-70b", Degrees((80,), tensor=16, data=8), "8 key-value heads on 16 tensor ranks"),
        ("llama3-8b", Degrees(even_cuts(32, 4), data=8), "4 chunks on one pipeline rank"),
        ("llama3-8b", Degrees((32,), context=4, data=4, zero=3, shard=2), "a multiple of 4 context ranks"),
        ("qwen3-30b-a3b", Degrees((48,), data=32, zero=3, shard=8, expert=16), "torchtitan wants a divisor of 8"),
    ],
)
def test_splits_that_torchtitan_cannot_run(name, degrees, message):
    with pytest.raises(UserError, match=message):
        flags_of(name, degrees)


def test_flavors():
    found = {name: find_flavor(load_transformer(name)) for name in (*MODELS, "llama-7b", "qwen3-235b-a22b")}
    names = [flavor and flavor.name for flavor in found.values()]
    assert names == ["8B", "70B", "32B", "30B-A3B", "671B", None, "235B-A22B"]
    assert find_flavor(replace(load_transformer("llama3-8b"), gated=False)) is None


@pytest.mark.skipif("TORCHTITAN_PATH" not in os.environ, reason="TORCHTITAN_PATH names no checkout of torchtitan")
def test_torchtitan_accepts_the_flags():
    jobs, splits = list[dict](), list[tuple[str, Degrees, SequenceBatch]]()
    for name in MODELS:
        choices = [*all_degrees(Training(load_transformer(name), 64, 4096, 64, CLUSTER, 65e9))]
        uneven = Degrees((3, 9, 8, load_transformer(name).layers - 20), pipeline=4, data=16)
        choices.append((uneven, SequenceBatch(64, 4096)))
        for degrees, batch in [*choices[:: len(choices) // 12], choices[-1]]:
            try:
                flags = flags_of(name, degrees, batch)
            except UserError:
                continue
            jobs.append({"tokens": flags.tokens, "world_size": 64})
            splits.append((name, degrees, batch))
    script = Path(__file__).parents[1] / "torchtitan_parser.py"
    command = [sys.executable, str(script), os.environ["TORCHTITAN_PATH"]]
    run = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    answer = json.loads(run.stdout)
    for (name, degrees, batch), job, own in zip(splits, jobs, answer["jobs"], strict=True):
        assert "error" not in own, (job, own["error"])
        assert own["cuts"] == list(degrees.cuts), job
        assert own["dp_replicate"] * own["dp_shard"] == degrees.data
        assert own["dp_shard"] * own["cp"] == (degrees.num_shards if degrees.zero else degrees.context)
        assert own["passes"] == degrees.micro_batches(batch), name
        assert degrees.pipeline == 1 or own["pp_microbatches"] == degrees.micro_batches(batch)
        assert (own["tp"], own["pp"], own["ep"]) == (degrees.tensor, degrees.pipeline, degrees.expert)
        expected = {"none": "none", "memory-bound": "SelectiveAC.Config", "full": "FullAC.Config"}
        assert own["checkpointing"] == expected[degrees.recompute]
    flavors = {tuple(flavor) for flavor in answer["flavors"] if "debug" not in flavor[1]}
    assert flavors == {(flavor.module, flavor.name, *flavor[3:]) for flavor in FLAVORS}
