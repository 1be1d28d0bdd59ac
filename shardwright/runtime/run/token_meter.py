"""Metrics of runs on sequences of tokens: perplexity, tokens per second, MFU."""

import math
from collections.abc import Mapping

from torch import nn

from shardwright.comm.mesh import DEFAULT_LANE, Mesh
from shardwright.config import Settings
from shardwright.data.sources.source import Source
from shardwright.layers.loss import NextTokenLoss
from shardwright.measure.model_flops import cluster_peak, count_products, measure_peak
from shardwright.spec import presets
from shardwright.spec.model_flops import ModelFlops
from shardwright.spec.plan import Plan

MEASURED_SOURCES = ("measured", "emulated")  # of clusters whose rates are those of this machine


class TokenMeter:
    """Derives the metrics of tokens from loss and samples per second; nothing for models of other data."""

    def __init__(self, loss: nn.Module, length: int, flops: ModelFlops | None) -> None:
        """`length`: tokens of a sequence, 0: unknown. `flops`: None if MFU's formula does not cover the model."""
        self._has_tokens = isinstance(loss, NextTokenLoss)
        self._length, self._flops = length, flops

    def derive(self, values: Mapping[str, float]) -> dict[str, float]:
        derived: dict[str, float] = {}
        if self._has_tokens and "loss" in values:
            derived["perplexity"] = math.exp(min(values["loss"], 700.0))  # exp(710) is not a float
        if self._has_tokens and self._length and "samples_per_second" in values:
            derived["tokens_per_second"] = values["samples_per_second"] * self._length
            derived |= self._flops.utilization(derived["tokens_per_second"]) if self._flops else {}
        return derived


def describe_model_flops(
    settings: Settings, source: Source, model: nn.Module, plan: Plan, mesh: Mesh
) -> ModelFlops | None:
    """What a run's MFU is computed from; None for a model that is not a transformer on sequences of one length.

    The peak is the fastest product of the cluster file, if that was measured and has the dtype of training; else all
    ranks measure it here, at the same time.
    """
    (weights, width), length = count_products(model), getattr(source, "length", 0)
    if not (width and length and isinstance(model.loss, NextTokenLoss)):
        return None
    dtype = plan.dense.dtype
    peak, origin = _read_peak(settings.plan.cluster, dtype)
    if peak is None:
        peak = measure_peak(mesh.group(lane=DEFAULT_LANE), mesh.device, dtype)
        origin = f"fastest {dtype} product, measured at the start of the run"
    return ModelFlops(1, weights, width, length, mesh.size, peak, origin)


def _read_peak(name: str, dtype: str) -> tuple[float | None, str]:
    """The peak of a cluster file that was measured on this machine, and its name."""
    if not name or (cluster := presets.load_cluster(name)).source not in MEASURED_SOURCES:
        return None, ""
    return cluster_peak(cluster, dtype), f"fastest {dtype} product of the cluster {cluster.name}"
