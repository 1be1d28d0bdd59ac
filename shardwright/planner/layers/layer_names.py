"""Names of splits of a model of layers, and of the parts of their steps, in tables and figures."""

from collections.abc import Mapping
from types import MappingProxyType

from shardwright.planner.layers.degrees import Degrees, Recomputation
from shardwright.planner.layers.layer_search import LayerSplit
from shardwright.planner.layers.step_time import Part

PART_NAMES: Mapping[Part, str] = MappingProxyType(
    {
        "products": "matrix products",
        "attention": "attention kernel",
        "memory": "norms and activation functions",
        "tensor": "tensor-parallel collectives, exposed",
        "context": "context-parallel collectives, exposed",
        "experts": "expert-parallel all-to-all",
        "sharded weights": "ZeRO-3 collectives, exposed",
        "chunks": "launch overhead",
        "offload": "offload, exposed",
        "bubble": "pipeline bubble",
        "gradients": "gradient and weight collectives, exposed",
        "optimizer": "optimizer",
    }
)
RECOMPUTE_TEXTS: Mapping[Recomputation, str] = MappingProxyType(
    {
        "none": "no recomputation",
        "scores": "recomputes attention scores",
        "memory-bound": "recomputes norms and activation functions",
        "full": "recomputes whole layers",
    }
)


def degrees_name(degrees: Degrees) -> str:
    """Such as "TP2 PP8x5 DP16": the degrees above 1, and chunks of a pipeline rank."""
    pipeline = f"{degrees.pipeline}" + (f"x{degrees.num_chunks}" if degrees.num_chunks > 1 else "")
    names = (
        ("TP", degrees.tensor, f"{degrees.tensor}"),
        ("CP", degrees.context, f"{degrees.context}"),
        ("PP", degrees.pipeline, pipeline),
        ("DP", degrees.data, f"{degrees.data}"),
        ("EP", degrees.expert, f"{degrees.expert}"),
    )
    return " ".join(f"{name}{text}" for name, degree, text in names if degree > 1) or "1 rank"


def sharding_name(degrees: Degrees) -> str:
    """What data and context parallel ranks shard."""
    if degrees.zero == 3 and 0 < degrees.shard < degrees.replicas:
        return f"HSDP {degrees.shard}"
    return f"ZeRO-{degrees.zero}" if degrees.zero else "replicated"


def max_offload(split: LayerSplit) -> float:
    """The share of the saved activations that the pipeline rank that offloads most moves to host memory."""
    return max(stage.offload for stage in split.memory)


def describe_split(split: LayerSplit) -> str:
    """All that distinguishes a split from others, in one line."""
    micro, share = split.batch.micro_sequences, max_offload(split)
    parts = [degrees_name(split.degrees), f"micro-batch {micro}", sharding_name(split.degrees)]
    parts.append(RECOMPUTE_TEXTS[split.degrees.recompute])
    if share:
        parts.append(f"offloads up to {share:.0%}")
    return ", ".join(parts)
