"""A split from flags of Megatron-LM, as in a user's command line or script.

Defaults are Megatron-LM's. Flags that this model of memory and time does not know, but that change either, are listed
as ignored; all other unknown flags are skipped.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from shardwright.errors import UserError
from shardwright.planner.engines.engine_flags import FlagValues, parse_flags
from shardwright.planner.engines.megatron import FSDP_STRATEGIES, OVERLAP, recomputed_modules
from shardwright.planner.engines.megatron_layout import EXPERT_PATTERN, LAYOUT, parse_dense_layers, parse_layout
from shardwright.planner.layers.degrees import Degrees, Recomputation, SequenceBatch, degree_errors
from shardwright.spec.checks import raise_if_any
from shardwright.spec.transformer import ExpertLayers, LatentAttention, Transformer

# Flags that change memory or time and are not modelled.
NOT_MODELLED = re.compile(
    r"""--(
    # precision and optimizer
    (fp8|fp4|megatron-fsdp)-.* | fp16 | use-precision-aware-optimizer | main-grads-dtype | main-params-dtype
    | exp-avg-dtype | exp-avg-sq-dtype | grad-reduce-in-bf16 | outer-dp-sharding-strategy | fp32-residual-connection
    | output-logit-dtype
    # offload and recomputation
    | optimizer-cpu-offload | optimizer-offload-fraction | cpu-offloading-num-layers | distribute-saved-activations
    | fine-grained-activation-offloading | moe-layer-recompute | moe-paged-stash
    # overlap and communication
    | overlap-.* | tp-comm-overlap | delay-wgrad-compute | moe-shared-expert-overlap
    | hierarchical-context-parallel-sizes | hybrid-context-parallel | no-overlap-p2p-communication
    | moe-flex-dispatcher-backend | moe-enable-deepep | use-tp-pp-dp-mapping | tensor-parallel-num-weight-shards
    | expert-tensor-parallel-num-weight-shards | microbatch-group-size-per-virtual-pipeline-stage
    # model and batch
    | (mtp|mamba|hybrid|linear)-.* | window-size | heterogeneous-layers-config-path | experimental-attention-variant
    | moe-latent-size | moe-expert-capacity-factor | moe-pad-expert-input-to-capacity
    | cross-entropy-loss-fusion | defer-embedding-wgrad-compute | cuda-graph-.*
    | rampup-batch-size | step-batch-size-schedule
    )""",
    re.VERBOSE,
)
# Flags with the values that are modelled, Megatron-LM's default first.
MODELLED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "--recompute-method": ("uniform",),
        "--recompute-num-layers": ("1",),
        "--optimizer": ("adam",),
        "--attention-backend": ("auto", "flash", "fused"),
        "--transformer-impl": ("transformer_engine",),
        "--cp-comm-type": ("p2p", "all_gather"),
    }
)


@dataclass(frozen=True, slots=True)
class MegatronJob:
    """`ignored`: flags that change memory or time in a way that is not modelled, with their values. `hides_gradients`:
    collectives of gradients overlap with the backward."""

    model: Transformer
    batch: SequenceBatch
    degrees: Degrees
    ignored: tuple[str, ...]
    hides_gradients: bool


def read_megatron_flags(tokens: Sequence[str], world_size: int) -> MegatronJob:
    """`tokens`: arguments as a program receives them, entries of EngineFlags, or words of a script (shlex.split with
    comments=True). Raises UserError if a size is missing or the split is not possible."""
    flags = parse_flags(tokens)
    model = _read_model(flags)
    model.verify()
    degrees = _read_degrees(flags, model, world_size)
    micro = flags.degree("--micro-batch-size")
    batch = SequenceBatch(
        flags.degree("--global-batch-size", micro * degrees.data), flags.degree("--seq-length"), micro
    )
    raise_if_any(degree_errors(model, batch, degrees))
    return MegatronJob(model, batch, degrees, tuple(_ignored(flags, model, degrees)), flags.has(OVERLAP))


def _read_model(flags: FlagValues) -> Transformer:
    hidden, heads = flags.degree("--hidden-size"), flags.degree("--num-attention-heads")
    is_gated, latent = flags.has("--swiglu") or flags.has("--quick-geglu"), _read_latent(flags)
    groups = flags.degree("--num-query-groups", 1) if flags.has("--group-query-attention") else heads
    head_channels = flags.degree("--kv-channels", hidden // heads)
    if latent is not None:
        groups, head_channels = heads, flags.degree("--qk-head-dim", 128) + latent.rotary_channels
    intermediate = flags.degree("--ffn-hidden-size", 4 * hidden * 2 // 3 // 64 * 64 if is_gated else 4 * hidden)
    layers = flags.degree("--num-layers")
    return Transformer(
        version=1,
        name="megatron",
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        key_value_heads=groups,
        vocabulary=_read_vocabulary(flags),
        head_channels=head_channels,
        gated=is_gated,
        tied=not flags.has("--untie-embeddings-and-output-weights"),
        experts=_read_experts(flags, layers, intermediate),
        latent=latent,
    )


def _read_vocabulary(flags: FlagValues) -> int:
    name = "--padded-vocab-size" if flags.has("--padded-vocab-size") else "--vocab-size"
    if not flags.has(name):
        raise UserError(f"no {name}; add it: tokenizers are not read")
    return flags.degree(name)


def _read_latent(flags: FlagValues) -> LatentAttention | None:
    if not flags.has("--multi-latent-attention"):
        return None
    return LatentAttention(
        query_rank=flags.number("--q-lora-rank", 0),
        key_value_rank=flags.degree("--kv-lora-rank", 32),
        rotary_channels=flags.number("--qk-pos-emb-head-dim", 64),
        value_channels=flags.degree("--v-head-dim", 128),
    )


def _read_experts(flags: FlagValues, layers: int, intermediate: int) -> ExpertLayers | None:
    if not flags.number("--num-experts", 0):
        return None
    width = flags.degree("--moe-ffn-hidden-size", intermediate)
    shared = flags.number("--moe-shared-expert-intermediate-size", 0)
    if shared % width:
        raise UserError(
            f"--moe-shared-expert-intermediate-size is {shared}; wanted a multiple of the {width} of an expert"
        )
    return ExpertLayers(
        num=flags.degree("--num-experts"),
        chosen=flags.degree("--moe-router-topk", 2),
        intermediate=width,
        shared=shared // width,
        dense_layers=parse_dense_layers(flags.text(EXPERT_PATTERN, "1"), layers),
    )


def _read_degrees(flags: FlagValues, model: Transformer, world_size: int) -> Degrees:
    tensor, context, pipeline = (
        flags.degree(f"--{kind}-parallel-size", 1) for kind in ("tensor-model", "context", "pipeline-model")
    )
    data, rest = divmod(world_size, tensor * context * pipeline)
    if rest or not data:
        raise UserError(
            f"{world_size} ranks do not divide by tensor {tensor} times context {context} times pipeline {pipeline}"
        )
    instances = flags.degree("--num-distributed-optimizer-instances", 1)
    if data * context % instances:
        raise UserError(
            f"--num-distributed-optimizer-instances is {instances}; wanted a divisor of {data * context} data and "
            "context ranks"
        )
    zero = _read_zero(flags)
    return Degrees(
        cuts=_read_cuts(flags, model.layers, pipeline),
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        data=data,
        expert=flags.degree("--expert-model-parallel-size", 1) if model.experts else 1,
        zero=zero,
        shard=data * context // instances if zero and instances > 1 else 0,
        sequence_parallel=tensor == 1 or flags.has("--sequence-parallel"),
        recompute=_read_recompute(flags),
    )


def _read_zero(flags: FlagValues) -> Literal[0, 1, 2, 3]:
    if flags.has("--use-torch-fsdp2"):
        return 2 if flags.has("--torch-fsdp2-no-reshard-after-forward") else 3
    if flags.has("--use-megatron-fsdp"):
        strategy = flags.text("--data-parallel-sharding-strategy", "optim_grads_params")
        if strategy not in FSDP_STRATEGIES:
            raise UserError(f"--data-parallel-sharding-strategy is {strategy!r}; wanted {', '.join(FSDP_STRATEGIES)}")
        return FSDP_STRATEGIES[strategy]
    return 1 if flags.has("--use-distributed-optimizer") else 0


def _read_cuts(flags: FlagValues, layers: int, pipeline: int) -> tuple[int, ...]:
    """Layers of each chunk, in the order of the model. Where they do not divide, the sum is not that of the model."""
    if flags.has(LAYOUT):
        return parse_layout(flags.text(LAYOUT))
    first, last = (flags.number(f"--decoder-{end}-pipeline-num-layers", 0) for end in ("first", "last"))
    has_embedding, has_loss = (flags.has(f"--account-for-{part}-in-pipeline-split") for part in ("embedding", "loss"))
    inner = (layers + has_embedding + has_loss - first - last) // max(1, pipeline - bool(first) - bool(last))
    ranks = [inner] * pipeline
    ranks[0], ranks[-1] = first or ranks[0], last or ranks[-1]
    per_chunk = flags.degree("--num-layers-per-virtual-pipeline-stage", max(1, inner))
    chunks = flags.degree("--num-virtual-stages-per-pipeline-rank", max(1, inner // per_chunk))
    if chunks > layers:
        raise UserError(f"{chunks} virtual stages on each pipeline rank; the model has {layers} layers")
    cuts = [ranks[chunk % pipeline] // chunks for chunk in range(pipeline * chunks)]
    cuts[0] -= has_embedding
    cuts[-1] -= has_loss
    if min(cuts) < 0:
        raise UserError(f"{layers} layers are too few for pipeline stages of {cuts}")
    return tuple(cuts)


def _read_recompute(flags: FlagValues) -> Recomputation:
    granularity = flags.text("--recompute-granularity")
    if granularity == "full":
        return "full"
    if granularity != "selective" and not flags.has("--recompute-activations"):
        return "none"
    modules = _modules(flags)
    return (
        "memory-bound" if modules & {"layernorm", "moe_act", "mlp"} else "scores" if "core_attn" in modules else "none"
    )


def _modules(flags: FlagValues) -> set[str]:
    return set(flags.values.get("--recompute-modules", ("core_attn",)))


def _ignored(flags: FlagValues, model: Transformer, degrees: Degrees) -> Iterator[str]:
    """Flags with their values."""
    approximate = dict(_approximate(flags, model, degrees))
    for name, values in flags.values.items():
        is_overlap = name in (OVERLAP, "--overlap-param-gather")
        if (NOT_MODELLED.fullmatch(name) and not is_overlap) or name in approximate:
            yield " ".join([name, *values])
    yield from (f"{name} {value} (default)" for name, value in approximate.items() if not flags.has(name))


def _approximate(flags: FlagValues, model: Transformer, degrees: Degrees) -> Iterator[tuple[str, str]]:
    """Flags that are read, with values that are not modelled exactly."""
    for name, values in MODELLED.items():
        if (own := flags.text(name, values[0])) not in values:
            yield name, own
    for name in ("--attention-dropout", "--hidden-dropout"):
        if (own := flags.text(name, "0.1")).strip("0."):
            yield name, own
    own = flags.text("--expert-tensor-parallel-size", str(degrees.tensor))
    if model.experts is not None and own != "1":
        yield "--expert-tensor-parallel-size", own
    exact: dict[Recomputation, set[str]] = {"memory-bound": {*recomputed_modules(model)}, "scores": {"core_attn"}}
    if flags.text("--recompute-granularity") == "selective" and _modules(flags) != exact.get(degrees.recompute, set()):
        yield "--recompute-modules", ""
