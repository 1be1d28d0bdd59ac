"""The numbers of a model's MFU: its matrix products, and the peak of the machine."""

import torch
from torch import nn

from shardwright.comm.mesh import Group
from shardwright.layers.decoder import DecoderAttention
from shardwright.layers.moe import LinearExperts, MoE
from shardwright.measure.device import matmul_call
from shardwright.measure.timing import Clock
from shardwright.spec.cluster import Cluster, Sample

# The largest products of those that `shardwright measure` times. A line fitted to all of them would be a worse peak: on
# a busy machine its slope was 20 times too small in one of three measurements.
PEAK_SHAPES = ((1024, 1024, 1024), (4096, 512, 256), (2048, 256, 256))
WINDOW_SECONDS = 0.12


def count_products(model: nn.Module) -> tuple[int, int]:
    """Weights of all linear layers, and heads times channels of a head summed over all attention layers.

    Weights of experts count in proportion to the experts of a token: active parameters.
    """
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    for mixture in (module for module in model.modules() if isinstance(module, MoE)):
        of_all = sum(module.weight.numel() for module in mixture.modules() if isinstance(module, LinearExperts))
        weights += of_all * mixture.gate.num_chosen // mixture.gate.scores.out_features
    widths = (module.query.out_features for module in model.modules() if isinstance(module, DecoderAttention))
    return weights, sum(widths)


def measure_peak(group: Group, device: torch.device, dtype: str) -> float:
    """Flops per second of the fastest of PEAK_SHAPES, measured on all ranks of the group at once."""
    clock = Clock(group, device, WINDOW_SECONDS, retry_seconds=WINDOW_SECONDS)
    calls = ((shape, matmul_call(*shape, getattr(torch, dtype), device)) for shape in PEAK_SHAPES)
    return max(flops_per_second(clock.sample(shape, call)) for shape, call in calls)


def cluster_peak(cluster: Cluster, dtype: str) -> float | None:
    """Flops per second of the fastest product in a cluster file; None if it has no product of this dtype."""
    prices = (price for price in cluster.device.prices if (price.op, price.dtype) == ("matmul", dtype))
    return max((flops_per_second(sample) for price in prices for sample in price.samples), default=None)


def flops_per_second(sample: Sample) -> float:
    """The rate of a product of (m, k) by (k, n) matrices."""
    m, k, n = sample.sizes
    return 2 * m * k * n / sample.seconds
