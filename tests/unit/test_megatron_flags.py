"""Flags of Megatron-LM: by value, back to the split, and, where MEGATRON_PATH names a checkout, by its own parser."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwright.errors import UserError
from shardwright.planner.engines import megatron, megatron_reader
from shardwright.planner.engines.engine_flags import EngineFlags
from shardwright.planner.engines.megatron import megatron_flags
from shardwright.planner.engines.megatron_layout import layout_text, parse_dense_layers, parse_layout
from shardwright.planner.engines.megatron_reader import NOT_MODELLED, read_megatron_flags
from shardwright.planner.layers.degrees import Degrees, SequenceBatch, even_cuts
from shardwright.planner.layers.layer_search import LayerSplit, Training, all_degrees
from shardwright.planner.layers.memory import stage_memory
from shardwright.planner.layers.step_time import StepSeconds
from shardwright.spec import presets
from shardwright.spec.transformer import load_transformer

CLUSTER = presets.load_cluster("h800-256")
MODELS = ("llama-65b", "llama2-70b", "gpt-175b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")
DEEPSEEK_DEGREES = Degrees((3, *(4,) * 14, 2), tensor=2, pipeline=16, data=16, expert=32, recompute="memory-bound")
LLAMA = (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --vocab-size 32000 --seq-length 4096 --micro-batch-size 1 --global-batch-size 256 --swiglu "
    "--untie-embeddings-and-output-weights --use-distributed-optimizer --attention-dropout 0.0 --hidden-dropout 0"
)
DEEPSEEK_FLAGS = """
--num-layers 61
--hidden-size 7168
--ffn-hidden-size 18432
--num-attention-heads 128
--multi-latent-attention
--q-lora-rank 1536
--kv-lora-rank 512
--qk-head-dim 128
--qk-pos-emb-head-dim 64
--v-head-dim 128
--kv-channels 128
--vocab-size 129280
--swiglu
--normalization RMSNorm
--position-embedding-type rope
--disable-bias-linear
--untie-embeddings-and-output-weights
--attention-dropout 0.0
--hidden-dropout 0.0
--num-experts 256
--moe-router-topk 8
--moe-ffn-hidden-size 2048
--moe-shared-expert-intermediate-size 2048
--moe-layer-freq '([0]*3+[1]*58)'
--moe-grouped-gemm
--moe-token-dispatcher-type alltoall
--seq-length 4096
--max-position-embeddings 4096
--micro-batch-size 1
--global-batch-size 512
--bf16
--tensor-model-parallel-size 2
--sequence-parallel
--context-parallel-size 1
--pipeline-model-parallel-size 16
--pipeline-model-parallel-layout 'Et*3|(t*4|)*14t*2L'
--expert-model-parallel-size 32
--expert-tensor-parallel-size 1
--use-distributed-optimizer
--recompute-granularity selective
--recompute-modules layernorm moe_act mlp
"""


COUNTED = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
USER_CUTS = [  # of 80 layers, where flags give no other number
    ("--pipeline-model-parallel-size 4", (20,) * 4),
    ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5", (5,) * 16),
    ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2", (10,) * 8),
    (
        "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 18 --decoder-last-pipeline-num-layers 22",
        (18, 20, 20, 22),
    ),
    (
        "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 20 "
        "--decoder-last-pipeline-num-layers 24 --num-virtual-stages-per-pipeline-rank 2",
        (10, 9, 9, 12) * 2,
    ),
    ("--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 38", (42, 38)),
    ("--pipeline-model-parallel-layout E|(t*20|)*4L --pipeline-model-parallel-size 2", (0, 20, 20, 20, 20, 0)),
    (f"--num-layers 78 --pipeline-model-parallel-size 4 {COUNTED}", (19, 20, 20, 19)),
    (
        f"--num-layers 78 --pipeline-model-parallel-size 4 {COUNTED} --num-layers-per-virtual-pipeline-stage 10",
        (9, *(10,) * 6, 9),
    ),
]


def flag_names() -> set[str]:
    """Names of the flags that are written or read."""
    source = "".join(Path(module.__file__).read_text() for module in (megatron, megatron_reader))
    return {*re.findall(r'"(--[a-z0-9-]*[a-z0-9])[" ]', source)}


def make_split(name: str, degrees: Degrees, batch: SequenceBatch) -> tuple[Training, LayerSplit]:
    training = Training(load_transformer(name), batch.sequences, batch.length, degrees.num_ranks, CLUSTER, 65e9)
    memory = tuple(stage_memory(training.model, batch, degrees, 65e9)) if degrees.offload else ()
    return training, LayerSplit(degrees, batch, memory, StepSeconds(1.0, 0.0, 0.0, 0.0))


def flags_of(name: str, degrees: Degrees, sequences: int = 512) -> EngineFlags:
    return megatron_flags(*make_split(name, degrees, SequenceBatch(sequences, 4096)))


def read_llama(flags: str, num_ranks: int = 64) -> megatron_reader.MegatronJob:
    return read_megatron_flags(shlex.split(f"{LLAMA} {flags}"), num_ranks)


@lru_cache
def every_split(name: str, num_ranks: int) -> list[tuple[Degrees, SequenceBatch]]:
    return [*all_degrees(Training(load_transformer(name), 64, 4096, num_ranks, CLUSTER, 65e9))]


def test_flags_of_a_model_with_experts_and_latent_attention():
    flags = flags_of("deepseek-v3", DEEPSEEK_DEGREES)
    assert list(flags.flags) == DEEPSEEK_FLAGS.strip().splitlines()
    notes = "\n".join(flags.notes)
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in notes and "--recompute-modules mlp" in notes and "pads" not in notes
    assert "--moe-layer-freq" in flags.tokens and "([0]*3+[1]*58)" in flags.tokens


def test_flags_of_dense_models():
    degrees = Degrees(even_cuts(80, 16), tensor=4, context=2, pipeline=4, data=2, recompute="scores")
    flags = flags_of("llama2-70b", degrees)
    for flag in (
        "--kv-channels 128",
        "--num-query-groups 8",
        "--num-layers-per-virtual-pipeline-stage 5",
        "--context-parallel-size 2",
        "--recompute-modules core_attn",
    ):
        assert flag in flags.flags
    assert not any("expert" in flag or "layout" in flag for flag in flags.flags)
    assert "Megatron-LM pads the vocabulary of 32000 to 32256" in flags.notes
    gpt = flags_of("gpt-175b", Degrees(even_cuts(96, 8), tensor=8, pipeline=8, zero=0, recompute="full"))
    assert not {"--swiglu", "--normalization RMSNorm", "--use-distributed-optimizer"} & {*gpt.flags}
    assert "--untie-embeddings-and-output-weights" not in gpt.flags
    assert gpt.flags[-3:] == ("--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1")


def test_flags_of_sharded_weights():
    flags = flags_of("llama3-8b", Degrees((32,), data=64, zero=3, shard=8))
    assert flags.flags[-5:] == (
        "--use-distributed-optimizer",
        "--use-megatron-fsdp",
        "--data-parallel-sharding-strategy optim_grads_params",
        "--ckpt-format fsdp_dtensor",
        "--num-distributed-optimizer-instances 8",
    )
    assert "CUDA_DEVICE_MAX_CONNECTIONS must not be 1" in flags.notes


def test_offload_is_a_note():
    flags = flags_of("llama-65b", Degrees(even_cuts(80, 8), tensor=4, pipeline=8, data=2, offload=(0.5,) * 8))
    assert not any("offload" in flag for flag in flags.flags)
    assert re.search(r"moves (\d+\.\d, ){7}\d+\.\d GB", flags.notes[-1])


@pytest.mark.parametrize(
    "name, degrees, message",
    [
        ("llama-7b", Degrees(even_cuts(32, 4), data=8), "4 chunks on one pipeline rank"),
        ("qwen3-30b-a3b", Degrees((48,), data=64, zero=3, shard=8, expert=64), "1 ranks hold the same experts"),
        ("mixtral-8x7b", Degrees((32,), tensor=2, data=8, sequence_parallel=False), "wants sequence parallelism"),
    ],
)
def test_splits_that_megatron_cannot_run(name, degrees, message):
    with pytest.raises(UserError, match=message):
        flags_of(name, degrees)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_flags_give_back_the_split(data):
    name = data.draw(st.sampled_from(MODELS))
    splits = every_split(name, data.draw(st.sampled_from((8, 16, 48))))
    degrees, batch = splits[data.draw(st.integers(0, len(splits) - 1))]
    training, split = make_split(name, degrees, batch)
    try:
        flags = megatron_flags(training, split)
    except UserError:
        assume(False)
    job = read_megatron_flags(data.draw(st.sampled_from((flags.tokens, flags.flags))), degrees.num_ranks)
    assert (job.degrees, job.batch, job.ignored) == (degrees, batch, ())
    assert job.model == replace(training.model, name="megatron")


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40))
def test_layouts_give_back_the_cuts(cuts):
    assert parse_layout(layout_text(cuts)) == tuple(cuts)


def test_layouts():
    assert layout_text((5, *(6,) * 14, 5)) == "Et*5|(t*6|)*14t*5L"
    assert parse_layout("Ettt|(tt|)*29,m|L") == (3, *(2,) * 29, 0, 0)
    with pytest.raises(UserError, match="got x"):
        parse_layout("Et|x|tL")


@pytest.mark.parametrize(
    "text, dense", [("1", 0), ("[1]*4", 0), ("([0]*1+[1]*3)", 1), ("[0,0]+[1,1]", 2), ("[0]+[1]*3", 1)]
)
def test_layers_without_experts(text, dense):
    assert parse_dense_layers(text, 4) == dense


@pytest.mark.parametrize("text", ["2", "([1]*3+[0]*1)", "[0]*99999999", "[1]*5", "__import__('os')", "[1", "[a]*4"])
def test_patterns_of_experts_that_are_not_modelled(text):
    with pytest.raises(UserError, match="--moe-layer-freq is .*; wanted 1, or a list of 4 layers"):
        parse_dense_layers(text, 4)


@pytest.mark.parametrize("flags, cuts", USER_CUTS)
def test_cuts_of_megatron(flags, cuts):
    assert read_llama(flags).degrees.cuts == cuts


def test_a_command_of_a_user():
    command = """torchrun --nproc_per_node 8 pretrain_gpt.py \\
        --tensor-model-parallel-size=8 --sequence-parallel --pipeline-model-parallel-size 2 \\
        --data-path /data/a /data/b --fp8-format hybrid --tp-comm-overlap --lr 3.0e-4 --hidden-dropout 0.1 \\
        --recompute-activations --optimizer adam --num-layers 80"""
    job = read_llama(command)
    assert (job.degrees.tensor, job.degrees.pipeline, job.degrees.data) == (8, 2, 4)
    assert job.degrees.sequence_parallel and job.degrees.zero == 1 and job.degrees.recompute == "scores"
    assert {*job.ignored} == {"--fp8-format hybrid", "--tp-comm-overlap", "--hidden-dropout 0.1"}
    assert not read_llama("--tensor-model-parallel-size 8").degrees.sequence_parallel


def test_a_script_of_a_user():
    script = f"""#!/bin/bash
    export TP=4
    CP=${{CP:-"2"}}  # from outside, or this
    OLD_STYLE="
        --bf16
        --pipeline-model-parallel-size 2
    "
    MODEL_ARGS=({LLAMA}
        --tensor-model-parallel-size $TP --context-parallel-size ${{CP}}
        --overlap-grad-reduce
    )
    MODEL_ARGS+=("--fp8-format hybrid")
    torchrun --nnodes 8 pretrain_gpt.py ${{MODEL_ARGS[@]}} $OLD_STYLE --save $1
    """
    job = read_megatron_flags(shlex.split(script, comments=True), 64)
    degrees = job.degrees
    assert (degrees.tensor, degrees.context, degrees.pipeline, degrees.data) == (4, 2, 2, 4)
    assert job.ignored == ("--fp8-format hybrid",)


def test_values_that_are_read_only_nearly_are_listed():
    job = read_llama("--recompute-granularity full --recompute-method block --recompute-num-layers 4 --optimizer muon")
    assert job.degrees.recompute == "full" and len(job.ignored) == 3
    job = read_llama("--recompute-granularity selective --recompute-modules mlp moe")
    assert (job.degrees.recompute, job.ignored) == ("memory-bound", ("--recompute-modules mlp moe",))
    experts = "--num-experts 8 --tensor-model-parallel-size 4 --sequence-parallel"
    assert read_llama(experts).ignored == ("--expert-tensor-parallel-size 4 (default)",)
    assert read_llama(f"{experts} --expert-tensor-parallel-size 1").ignored == ()
    without = shlex.split(LLAMA.replace("--hidden-dropout 0", ""))
    assert read_megatron_flags(without, 64).ignored == ("--hidden-dropout 0.1 (default)",)


@pytest.mark.parametrize(
    "flags, zero, shard",
    [
        ("", 1, 0),
        ("--num-distributed-optimizer-instances 4", 1, 16),
        ("--use-megatron-fsdp", 3, 0),
        ("--use-megatron-fsdp --num-distributed-optimizer-instances 8", 3, 8),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", 2, 0),
        ("--use-torch-fsdp2", 3, 0),
    ],
)
def test_sharding_of_megatron(flags, zero, shard):
    degrees = read_llama(flags).degrees
    assert (degrees.zero, degrees.shard) == (zero, shard)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--tensor-model-parallel-size $TP", r"--tensor-model-parallel-size is '\$TP'; wanted a whole number"),
        ("--context-parallel-size 0", "--context-parallel-size is 0; wanted 1 or more"),
        ("--tensor-model-parallel-size 3", "64 ranks do not divide by tensor 3"),
        ("--num-distributed-optimizer-instances 5", "wanted a divisor of 64 data and context ranks"),
        ("--pipeline-model-parallel-size 64 --num-layers 81", "chunks of 64 layers; megatron has 81"),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 60 "
            "--decoder-last-pipeline-num-layers 40",
            "80 layers are too few",
        ),
        ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 81", "81 virtual stages"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy all", "wanted no_shard, optim"),
        (
            "--num-experts 8 --moe-ffn-hidden-size 1000 --moe-shared-expert-intermediate-size 1500",
            "multiple of the 1000",
        ),
    ],
)
def test_flags_that_are_wrong(flags, message):
    with pytest.raises(UserError, match=message):
        read_llama(flags)


@pytest.mark.parametrize(
    "flag",
    ["--num-layers", "--hidden-size", "--num-attention-heads", "--vocab-size", "--seq-length", "--micro-batch-size"],
)
def test_sizes_that_are_missing(flag):
    tokens = shlex.split(re.sub(rf"{flag} \d+", "", LLAMA))
    with pytest.raises(UserError, match=f"no {flag}; add it"):
        read_megatron_flags(tokens, 64)


def drawn_jobs() -> list[tuple[str, Degrees, SequenceBatch]]:
    """Some splits of each model, spread over all that there are, and splits with uneven cuts."""
    jobs = [
        (name, *splits[number * len(splits) // 4])
        for name in MODELS
        for splits in [every_split(name, 64)]
        for number in range(4)
    ]
    return [*jobs, ("deepseek-v3", DEEPSEEK_DEGREES, SequenceBatch(512, 4096))]


@pytest.mark.skipif("MEGATRON_PATH" not in os.environ, reason="MEGATRON_PATH names no checkout of Megatron-LM")
def test_megatron_accepts_the_flags():
    jobs, splits = list[dict](), list[tuple[str, Degrees]]()
    for name, degrees, batch in drawn_jobs():
        try:
            flags = megatron_flags(*make_split(name, degrees, batch))
        except UserError:
            continue
        jobs.append({"tokens": flags.tokens, "world_size": degrees.num_ranks})
        splits.append((name, degrees))
    own_flags = "--max-position-embeddings 4096 --position-embedding-type rope"
    jobs += [{"tokens": shlex.split(f"{LLAMA} {own_flags} {flags}"), "world_size": 64} for flags, _ in USER_CUTS]
    script = Path(__file__).parents[1] / "megatron_parser.py"
    command = [sys.executable, str(script), os.environ["MEGATRON_PATH"]]
    run = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    answer = json.loads(run.stdout)
    read_cuts = [own.get("layers", own) for own in answer["jobs"][len(splits) :]]
    assert read_cuts == [[*cuts] for _, cuts in USER_CUTS]
    for (name, degrees), job, own in zip(splits, jobs, answer["jobs"], strict=False):
        assert "error" not in own, (name, degrees, own["error"])
        assert own["layers"] == list(degrees.cuts), job
        assert own["data_parallel_size"] == degrees.data and own["ffn_hidden_size"]
        assert own["sequence_parallel"] == (degrees.tensor > 1)
    names = flag_names() | names_not_modelled()
    assert len(names) > 90 and names <= {*answer["options"]}, names - {*answer["options"]}


def names_not_modelled() -> set[str]:
    """Without those that are patterns."""
    alternatives = re.sub(r"(?m)^ *#.*$", "", NOT_MODELLED.pattern).removeprefix("--(").rstrip(" )\n")
    names = (name.strip() for name in re.sub(r"\([^()]*\)", "*", alternatives).split("|"))
    return {f"--{name}" for name in names if re.fullmatch("[a-z0-9-]+", name)}
