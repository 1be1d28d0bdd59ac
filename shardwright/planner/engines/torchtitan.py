"""Arguments of torchtitan for a split.

torchtitan shards weights with FSDP where a plan has ZeRO-1, and offloads no activations. Names, values and checks are
those of torchtitan b5bcd76.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from shardwright.planner.engines.engine_flags import EngineFlags, offload_notes
from shardwright.planner.layers.degrees import Degrees, Recomputation, SequenceBatch
from shardwright.planner.layers.layer_search import LayerSplit, Training
from shardwright.spec.checks import raise_if_any
from shardwright.spec.transformer import Transformer

RESHARDING = ("never", "never", "never", "always")  # of weights, after a forward, by ZeRO stage
CHECKPOINTING: Mapping[Recomputation, str] = MappingProxyType(
    {"none": "none", "scores": "none", "memory-bound": "selective", "full": "full"}  # attention stores no scores
)
POSITIONS: Mapping[str, int] = MappingProxyType({"llama3": 131072, "qwen3": 40960, "deepseek_v3": 16384})  # rotary ones


class Flavor(NamedTuple):
    """A model of torchtitan. `config`: the function that configures a run of it, if there is one. `intermediate`: of an
    expert, if the model has experts."""

    module: str
    name: str
    config: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    vocabulary: int
    tied: bool = False
    experts: int = 0


FLAVORS = (
    Flavor("llama3", "1B", "", 16, 2048, 8192, 32, 8, 128256, tied=True),
    Flavor("llama3", "3B", "", 28, 3072, 8192, 24, 8, 128256, tied=True),
    Flavor("llama3", "8B", "llama3_8b", 32, 4096, 14336, 32, 8, 128256),
    Flavor("llama3", "70B", "llama3_70b", 80, 8192, 28672, 64, 8, 128256),
    Flavor("llama3", "405B", "llama3_405b", 126, 16384, 53248, 128, 8, 128256),
    Flavor("qwen3", "0.6B", "qwen3_0_6b", 28, 1024, 3072, 16, 8, 151936, tied=True),
    Flavor("qwen3", "1.7B", "qwen3_1_7b", 28, 2048, 6144, 16, 8, 151936, tied=True),
    Flavor("qwen3", "4B", "", 36, 2560, 9728, 32, 8, 151936, tied=True),
    Flavor("qwen3", "8B", "", 36, 4096, 12288, 32, 8, 151936),
    Flavor("qwen3", "14B", "qwen3_14b", 40, 5120, 17408, 40, 8, 151936),
    Flavor("qwen3", "32B", "qwen3_32b", 64, 5120, 25600, 64, 8, 151936),
    Flavor("qwen3", "30B-A3B", "qwen3_30b_a3b", 48, 2048, 768, 32, 4, 151936, experts=128),
    Flavor("qwen3", "235B-A22B", "", 94, 4096, 1536, 64, 4, 151936, experts=128),
    Flavor("deepseek_v3", "16B", "deepseek_v3_16b", 27, 2048, 1408, 16, 16, 102400, experts=64),
    Flavor("deepseek_v3", "236B", "", 60, 5120, 1536, 128, 128, 102400, experts=160),
    Flavor("deepseek_v3", "671B", "deepseek_v3_671b", 61, 7168, 2048, 128, 128, 129280, experts=256),
)


def torchtitan_config(training: Training, split: LayerSplit) -> EngineFlags:
    """Arguments of torchtitan's train.py. Raises UserError if torchtitan cannot run the split."""
    model, batch, degrees = training.model, split.batch, split.degrees
    raise_if_any(_errors(model, degrees))
    flavor = find_flavor(model)
    flags = [
        *_flavor_flags(flavor),
        *_training_flags(batch, degrees),
        *_degree_flags(degrees),
        *_pipeline_flags(batch, degrees),
        f"activation-checkpoint:{CHECKPOINTING[degrees.recompute]}",
    ]
    return EngineFlags(tuple(flags), (*_flavor_notes(flavor, batch), *_notes(model, split)))


def find_flavor(model: Transformer) -> Flavor | None:
    """The model of torchtitan with these sizes."""
    sizes = (
        *(model.layers, model.hidden, model.experts.intermediate if model.experts else model.intermediate),
        *(model.heads, model.key_value_heads, model.vocabulary, model.tied, model.experts.num if model.experts else 0),
    )
    return next((flavor for flavor in FLAVORS if model.gated and flavor[3:] == sizes), None)


def shard_ranks(degrees: Degrees) -> int:
    """Data and context ranks that shard states; context ranks always do."""
    return degrees.num_shards if degrees.zero else degrees.context


def _flavor_flags(flavor: Flavor | None) -> Iterator[str]:
    if flavor is not None:
        yield f"--module {flavor.module}"
    if flavor is not None and flavor.config:
        yield f"--config {flavor.config}"


def _training_flags(batch: SequenceBatch, degrees: Degrees) -> Iterator[str]:
    yield f"--training.max_context_length {batch.length}"
    yield f"--training.num_tokens_per_microbatch_per_dp_rank {batch.micro_sequences * batch.length}"
    yield f"--training.num_tokens_per_train_step {batch.sequences * batch.length}"
    if degrees.pipeline > 1 or degrees.expert > 1:
        yield "--training.disable_cuda_graphs"


def _degree_flags(degrees: Degrees) -> Iterator[str]:
    values = {
        "data_parallel_replicate_degree": degrees.replicas // shard_ranks(degrees),
        "data_parallel_shard_degree": shard_ranks(degrees) // degrees.context,
        "fsdp_reshard_after_forward": RESHARDING[degrees.zero],
        "tensor_parallel_degree": degrees.tensor,
        "context_parallel_degree": degrees.context,
        "expert_parallel_degree": degrees.expert,
        "pipeline_parallel_degree": degrees.pipeline,
    }
    yield from (f"--parallelism.{name} {value}" for name, value in values.items())
    if degrees.tensor > 1 and not degrees.sequence_parallel:
        yield "--parallelism.no_enable_sequence_parallel"


def _pipeline_flags(batch: SequenceBatch, degrees: Degrees) -> Iterator[str]:
    if degrees.pipeline == 1:
        return
    schedule = "Interleaved1F1B" if degrees.num_chunks > 1 else "1F1B"
    yield f"--parallelism.pipeline_parallel_schedule {schedule}"
    yield f"--parallelism.num_pp_microbatches {degrees.micro_batches(batch)}"
    first, *inner, last = degrees.cuts
    most = max(degrees.cuts)
    if {*inner} <= {most}:
        yield f"--parallelism.pipeline_parallel_layers_per_stage {most}"
        yield f"--parallelism.pipeline_parallel_first_stage_less_layers {most - first}"
        yield f"--parallelism.pipeline_parallel_last_stage_less_layers {most - last}"
    else:
        yield " ".join(["--parallelism.module_fqns_per_model_part", *_chunk_modules(degrees)])


def _chunk_modules(degrees: Degrees) -> list[str]:
    """Names of the modules of each chunk."""
    chunks = [[f"layers.{layer}" for layer in degrees.chunk_layers(number)] for number in range(len(degrees.cuts))]
    chunks[0].insert(0, "tok_embeddings")
    chunks[-1] += ["norm", "lm_head"]
    return [",".join(names) for names in chunks]


def _errors(model: Transformer, degrees: Degrees) -> Iterator[str]:
    shards, tensor = shard_ranks(degrees), degrees.tensor
    if degrees.pipeline == 1 and degrees.num_chunks > 1:
        yield f"{degrees.num_chunks} chunks on one pipeline rank; torchtitan interleaves on 2 or more"
    if degrees.pipeline > 1 and model.tied:
        yield "a pipeline of a model whose head shares the embedding's weights; torchtitan wants an untied model"
    if model.key_value_heads % tensor:
        groups = model.key_value_heads
        yield f"{groups} key-value heads on {tensor} tensor ranks; torchtitan wants a multiple of the ranks"
    if shards % degrees.context:
        yield f"states sharded over {shards} ranks; torchtitan wants a multiple of {degrees.context} context ranks"
    if shards * tensor % degrees.expert:
        yield (
            f"experts split over {degrees.expert} ranks; torchtitan wants a divisor of {shards * tensor}: tensor ranks "
            "times ranks that shard states"
        )


def _flavor_notes(flavor: Flavor | None, batch: SequenceBatch) -> Iterator[str]:
    if flavor is None:
        yield "torchtitan has no model of these sizes: write a configuration, and add --module and --config"
    elif not flavor.config:
        yield (
            f"torchtitan has no configuration of its model {flavor.name}: write one with "
            f'model_registry("{flavor.name}"), and add --config'
        )
    elif flavor.config == "llama3_405b":
        yield "llama3_405b computes in float8, and compiles; the plan does neither"
    if flavor is not None and batch.length > POSITIONS[flavor.module]:
        positions = POSITIONS[flavor.module]
        yield f"{flavor.module} has rotary positions for {positions} tokens: raise max_context_length of its RoPE"


def _notes(model: Transformer, split: LayerSplit) -> Iterator[str]:
    degrees = split.degrees
    if degrees.zero == 1 and degrees.replicas > 1:
        yield (
            "torchtitan has FSDP in place of ZeRO-1: weights are kept after a forward, but gradients are sharded: less "
            "memory than planned, and without a pipeline they are reduced in each micro-batch"
        )
    if degrees.zero == 0 and degrees.context > 1:
        yield f"torchtitan shards states over the {degrees.context} context ranks; the plan does not"
    yield from _expert_notes(model, degrees)
    if degrees.recompute == "memory-bound":
        yield (
            "selective activation checkpointing recomputes every second matrix product, too: it saves less than "
            "planned, and its backward takes longer"
        )
    yield from offload_notes(split, "torchtitan offloads weights and optimizer state alone")


def _expert_notes(model: Transformer, degrees: Degrees) -> Iterator[str]:
    if model.experts is None:
        return
    if degrees.expert == 1 and degrees.tensor > 1:
        yield f"without expert parallelism torchtitan splits each expert over {degrees.tensor} tensor ranks"
        return
    ranks = shard_ranks(degrees)
    planned, own = min(ranks, degrees.expert_replicas), ranks * degrees.tensor // degrees.expert
    if degrees.zero and own != planned:
        yield f"torchtitan shards states of experts over {own} ranks; the plan over {planned}"
