"""Flags of Megatron-LM for a split.

A model with a gated MLP is taken for one of Llama's kind: SwiGLU, RMSNorm, rotary positions, no biases. Another is
taken for one of GPT's kind, as Megatron-LM does without flags. Names and checks are those of Megatron-LM d98e8a64.
"""

import shlex
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal

from shardwright.planner.engines.engine_flags import EngineFlags, offload_notes
from shardwright.planner.engines.megatron_layout import EXPERT_PATTERN, LAYOUT, layout_text, pattern_text
from shardwright.planner.layers.degrees import Degrees, SequenceBatch
from shardwright.planner.layers.layer_search import LayerSplit, Training
from shardwright.spec.checks import raise_if_any
from shardwright.spec.transformer import Transformer

OVERLAP = "--overlap-grad-reduce"
VOCABULARY_MULTIPLE = 128  # --make-vocab-size-divisible-by, of each tensor rank
FSDP_STRATEGIES: Mapping[str, Literal[0, 1, 2, 3]] = MappingProxyType(
    {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
)
OFFLOAD = "Megatron-LM offloads groups of modules (--fine-grained-activation-offloading), not a share of the bytes"


def megatron_flags(training: Training, split: LayerSplit) -> EngineFlags:
    """Arguments of pretrain_gpt.py. Raises UserError if Megatron-LM cannot run the split."""
    model, batch, degrees = training.model, split.batch, split.degrees
    raise_if_any(_errors(model, degrees))
    flags = [
        *_model_flags(model),
        *_batch_flags(batch),
        *_degree_flags(model, degrees),
        *_sharding_flags(degrees),
        *([OVERLAP, "--overlap-param-gather"] if degrees.zero == 1 and training.overheads.hides_gradients else []),
        *_recompute_flags(model, degrees),
    ]
    return EngineFlags(tuple(flags), tuple(_notes(training, split)))


def recomputed_modules(model: Transformer) -> list[str]:
    """The nearest to recomputing norms and activation functions: an MLP without experts is recomputed as a whole."""
    modules = ["layernorm"]
    if model.experts is not None:
        modules.append("moe_act")
    if not model.has_experts(0):
        modules.append("mlp")
    return modules


def optimizer_instances(degrees: Degrees) -> int:
    """Groups of data and context ranks that each hold all the optimizer's state."""
    return degrees.replicas // degrees.num_shards


def _flag(name: str, *values: int | str) -> str:
    return " ".join([name, *(shlex.quote(str(value)) for value in values)])


def _model_flags(model: Transformer) -> Iterator[str]:
    yield _flag("--num-layers", model.layers)
    yield _flag("--hidden-size", model.hidden)
    yield _flag("--ffn-hidden-size", model.intermediate)
    yield _flag("--num-attention-heads", model.heads)
    yield from _attention_flags(model)
    yield _flag("--vocab-size", model.vocabulary)
    if model.gated:
        yield "--swiglu"
        yield "--normalization RMSNorm"
        yield "--position-embedding-type rope"
        yield "--disable-bias-linear"
    if not model.tied:
        yield "--untie-embeddings-and-output-weights"
    yield "--attention-dropout 0.0"
    yield "--hidden-dropout 0.0"
    yield from _expert_flags(model)


def _attention_flags(model: Transformer) -> Iterator[str]:
    latent = model.latent
    if latent is None:
        yield _flag("--kv-channels", model.head_channels)
        if model.key_value_heads != model.heads:
            yield "--group-query-attention"
            yield _flag("--num-query-groups", model.key_value_heads)
        return
    yield "--multi-latent-attention"
    if latent.query_rank:
        yield _flag("--q-lora-rank", latent.query_rank)
    yield _flag("--kv-lora-rank", latent.key_value_rank)
    yield _flag("--qk-head-dim", model.head_channels - latent.rotary_channels)
    yield _flag("--qk-pos-emb-head-dim", latent.rotary_channels)
    yield _flag("--v-head-dim", latent.value_channels)
    yield _flag("--kv-channels", latent.value_channels)


def _expert_flags(model: Transformer) -> Iterator[str]:
    experts = model.experts
    if experts is None:
        return
    yield _flag("--num-experts", experts.num)
    yield _flag("--moe-router-topk", experts.chosen)
    yield _flag("--moe-ffn-hidden-size", experts.intermediate)
    if experts.shared:
        yield _flag("--moe-shared-expert-intermediate-size", experts.shared * experts.intermediate)
    if experts.dense_layers:
        yield _flag(EXPERT_PATTERN, pattern_text(model.layers, experts))
    yield "--moe-grouped-gemm"
    yield "--moe-token-dispatcher-type alltoall"


def _batch_flags(batch: SequenceBatch) -> Iterator[str]:
    yield _flag("--seq-length", batch.length)
    yield _flag("--max-position-embeddings", batch.length)
    yield _flag("--micro-batch-size", batch.micro_sequences)
    yield _flag("--global-batch-size", batch.sequences)
    yield "--bf16"


def _degree_flags(model: Transformer, degrees: Degrees) -> Iterator[str]:
    yield _flag("--tensor-model-parallel-size", degrees.tensor)
    if degrees.tensor > 1 and degrees.sequence_parallel:
        yield "--sequence-parallel"
    yield _flag("--context-parallel-size", degrees.context)
    yield _flag("--pipeline-model-parallel-size", degrees.pipeline)
    if len(set(degrees.cuts)) > 1:
        yield _flag(LAYOUT, layout_text(degrees.cuts))
    elif degrees.num_chunks > 1:
        yield _flag("--num-layers-per-virtual-pipeline-stage", degrees.cuts[0])
    if model.experts is not None:
        yield _flag("--expert-model-parallel-size", degrees.expert)
        yield "--expert-tensor-parallel-size 1"


def _sharding_flags(degrees: Degrees) -> Iterator[str]:
    if degrees.zero:
        yield "--use-distributed-optimizer"
    if degrees.zero >= 2:
        yield "--use-megatron-fsdp"
        strategy = next(name for name, zero in FSDP_STRATEGIES.items() if zero == degrees.zero)
        yield _flag("--data-parallel-sharding-strategy", strategy)
        yield "--ckpt-format fsdp_dtensor"
    if degrees.zero and optimizer_instances(degrees) > 1:
        yield _flag("--num-distributed-optimizer-instances", optimizer_instances(degrees))


def _recompute_flags(model: Transformer, degrees: Degrees) -> Iterator[str]:
    if degrees.recompute == "full":
        yield "--recompute-granularity full"
        yield "--recompute-method uniform"
        yield "--recompute-num-layers 1"
    elif degrees.recompute != "none":
        modules = ["core_attn"] if degrees.recompute == "scores" else recomputed_modules(model)
        yield "--recompute-granularity selective"
        yield _flag("--recompute-modules", *modules)


def _errors(model: Transformer, degrees: Degrees) -> Iterator[str]:
    tensor, groups, instances = degrees.tensor, model.key_value_heads, optimizer_instances(degrees)
    if degrees.pipeline == 1 and degrees.num_chunks > 1:
        yield f"{degrees.num_chunks} chunks on one pipeline rank; Megatron-LM interleaves on 2 or more"
    if groups % tensor and tensor % groups:
        yield f"{groups} groups of key-value heads on {tensor} tensor ranks; Megatron-LM wants a multiple or divisor"
    if model.experts is not None and tensor > 1 and not degrees.sequence_parallel:
        yield "experts on tensor ranks without sequence parallelism; Megatron-LM wants sequence parallelism"
    if model.experts is not None and degrees.zero and degrees.expert_replicas % instances:
        yield (
            f"{degrees.expert_replicas} ranks hold the same experts; Megatron-LM wants a multiple of the {instances} "
            "groups that shard states"
        )


def _notes(training: Training, split: LayerSplit) -> Iterator[str]:
    model, degrees = training.model, split.degrees
    yield (
        "add data, tokenizer, optimizer settings and training length, and what the model has of --qk-layernorm, "
        "--rotary-base and --norm-epsilon"
    )
    multiple = VOCABULARY_MULTIPLE * degrees.tensor
    if rest := -model.vocabulary % multiple:
        yield f"Megatron-LM pads the vocabulary of {model.vocabulary} to {model.vocabulary + rest}"
    if degrees.zero >= 2:
        yield "CUDA_DEVICE_MAX_CONNECTIONS must not be 1"
    elif degrees.tensor > 1 or degrees.context > 1:
        yield "set CUDA_DEVICE_MAX_CONNECTIONS=1 on GPUs before Blackwell"
    if degrees.zero == 1 and degrees.replicas > 1 and not training.overheads.hides_gradients:
        yield "--overlap-grad-reduce and --overlap-param-gather hide collectives that the plan counts in full"
    yield from _expert_sharding_notes(model, degrees)
    if degrees.recompute == "memory-bound":
        yield from _recompute_notes(model)
    yield from offload_notes(split, OFFLOAD)


def _expert_sharding_notes(model: Transformer, degrees: Degrees) -> Iterator[str]:
    if model.experts is None or not degrees.zero:
        return
    planned = min(degrees.num_shards, degrees.expert_replicas)
    own = degrees.expert_replicas // optimizer_instances(degrees)
    if own != planned:
        yield f"Megatron-LM shards states of experts over {own} ranks; the plan over {planned}"


def _recompute_notes(model: Transformer) -> Iterator[str]:
    """Where --recompute-modules are not the norms and activation functions."""
    if not model.has_experts(0):
        yield (
            "of an MLP without experts Megatron-LM recomputes the products too (--recompute-modules mlp): it saves "
            "less than planned, and its backward takes longer"
        )
        yield "Megatron-LM does not recompute a norm that Transformer Engine fuses with a product"
    if model.experts is not None and model.experts.shared:
        yield "activation functions of shared experts are not recomputed (--recompute-modules shared_experts: all)"
