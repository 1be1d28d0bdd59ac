"""The models of FasterMoE's table 2, routing for them, and variants of their settings."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks import moe_routing
from benchmarks.fastermoe_schedule import FloatArray, Setting
from benchmarks.moe_routing import IntArray
from shardwright.spec.cluster import Cluster
from shardwright.spec.presets import load_cluster

NUM_CHOSEN = 2  # experts of a token
RECORDED_LAYERS, RECORDED_EXPERTS = 12, 32


@dataclass(frozen=True)
class Model:
    """A model of table 2; `tokens`: of a GPU, as its artifact has them."""

    name: str
    cluster_name: str
    num_layers: int
    num_experts: int
    channels: int
    tokens: int

    @property
    def setting(self) -> Setting:
        cluster = load_cluster(self.cluster_name)
        return Setting(cluster, self.num_experts, self.channels, 2 * self.channels, NUM_CHOSEN * self.tokens)


MODELS = (
    Model("MoE-GPT-S", "johnny", 12, 16, 1024, 1024),
    Model("MoE-GPT", "johnny", 12, 16, 2048, 1024),
    Model("MoE-GPT-L", "johnny", 12, 16, 4096, 1024),
    Model("MoE-BERT-Deep", "johnny", 24, 16, 1024, 2048),
    Model("MoE-BERT-Deep-L", "johnny", 24, 16, 4096, 2048),
    Model("MoE-BERT-Wide", "trevor", 12, 64, 1024, 2048),
    Model("MoE-BERT-Wide-L", "trevor", 12, 64, 2048, 2048),
)


@dataclass(frozen=True)
class Routings:
    """Rows by rank and expert of iterations and layers: a recorded run's, or with `trace` empty those of a Zipf law."""

    trace: str
    num_iterations: int
    num_layers: int = RECORDED_LAYERS
    exponent: float = 1.2

    @property
    def text(self) -> str:
        if not self.trace:
            return f"no trace: Zipf law, exponent {self.exponent:g}, another order in each iteration and layer"
        return "recorded by SmartMoE: 32 experts, top-2, 16 ranks x 4 micro-batches, 12 layers, steps 1 to 5,001"

    def samples(self, setting: Setting) -> Iterator[tuple[int, int, IntArray]]:
        """Iterations spread over the whole run, each with its layers."""
        for number in range(self.num_iterations):
            for layer in range(0, RECORDED_LAYERS, RECORDED_LAYERS // self.num_layers):
                yield number, layer, self.rows(setting, number, layer)

    def rows(self, setting: Setting, number: int, layer: int) -> IntArray:
        num, experts = setting.num_ranks, setting.num_experts
        if not self.trace:
            draw = RECORDED_LAYERS * number + layer
            return moe_routing.zipf_routing(draw, num, experts, setting.rows, self.exponent)
        trace = moe_routing.read_trace(self.trace)
        at = (2 * number + 1) * len(trace) // (2 * self.num_iterations)
        return recorded_rows(trace[at], layer, setting)


@dataclass(frozen=True)
class Figure4Routings(Routings):
    """Routing as the text describes figure 4b: a quarter of the experts has 20 of 25 parts of the rows, evenly."""

    @property
    def text(self) -> str:
        return "figure 4b: 4 of 16 experts with 20 % of the rows each"

    def rows(self, setting: Setting, number: int, layer: int) -> IntArray:
        draw = np.random.default_rng(moe_routing.SEED + RECORDED_LAYERS * number + layer)
        experts = setting.num_experts
        shares_E = np.where(np.arange(experts) < experts // 4, 3.2, 0.8 / 3) / experts
        shares_RE = draw.permutation(shares_E) * draw.uniform(0.9, 1.1, (setting.num_ranks, experts))
        return moe_routing.scale_rows(shares_RE / shares_RE.sum(1, keepdims=True), setting.rows)


def recorded_rows(counts: IntArray, layer: int, setting: Setting) -> IntArray:
    """A recorded iteration (ranks, layers, micro-batches, experts) for as many ranks and experts as the setting has.

    Ranks: micro-batches of a recorded rank are ranks, or are added up. Experts: neighbours are added up; for more than
    32, the experts of the following layers are added, all layers with equal shares.
    """
    num, experts = setting.num_ranks, setting.num_experts
    shares = list[FloatArray]()
    for after in range(max(1, experts // RECORDED_EXPERTS)):
        micro = counts[:, (layer + after) % RECORDED_LAYERS].reshape(-1, RECORDED_EXPERTS)
        rows_RE = micro.reshape(num, -1, RECORDED_EXPERTS).sum(1)
        rows_RE = rows_RE.reshape(num, min(experts, RECORDED_EXPERTS), -1).sum(2)
        shares.append(rows_RE / rows_RE.sum(1, keepdims=True))
    return moe_routing.scale_rows(np.concatenate(shares, 1) / len(shares), setting.rows)


def with_rates(setting: Setting, factor: float) -> Setting:
    """The setting with all links `factor` times as fast."""
    levels = tuple(
        replace(
            level,
            bytes_per_second=factor * level.bytes_per_second,
            both_bytes_per_second=level.both_bytes_per_second and factor * level.both_bytes_per_second,
            group_bytes_per_second=level.group_bytes_per_second and factor * level.group_bytes_per_second,
        )
        for level in setting.cluster.levels
    )
    return replace(setting, cluster=replace(setting.cluster, levels=levels))


def with_one_level(setting: Setting) -> Setting:
    """Every rank with the network card's rate for itself, as Equations 7 to 10 have it."""
    level = replace(
        setting.cluster.levels[-1],
        num=setting.num_ranks,
        bytes_per_second=setting.network_rate,
        both_bytes_per_second=None,
        group_bytes_per_second=None,
    )
    return replace(setting, cluster=replace(setting.cluster, levels=(level,)))


def johnny_with_hosts(num_hosts: int) -> Cluster:
    cluster = load_cluster("johnny")
    local, host = cluster.levels
    return replace(cluster, name=f"johnny, {num_hosts} hosts", levels=(local, replace(host, num=num_hosts)))


def rack(num_ranks: int = 64) -> Cluster:
    """H200s that are all on NVLink with the rate of h200-64's hosts: 450 GB/s in each direction."""
    cluster = load_cluster("h200-64")
    return replace(cluster, name=f"rack of {num_ranks} H200", levels=(replace(cluster.levels[0], num=num_ranks),))
