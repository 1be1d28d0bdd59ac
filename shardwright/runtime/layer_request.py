"""Requests for plans of models of layers: a transformer by name or config.json, a cluster, and keys such as `ranks=64`,
`length=8192`, `pins.tensor=8`.

Shape legend: S source ranks, E experts.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.config.overrides import apply_overrides
from shardwright.config.sections import parse_bytes
from shardwright.errors import UserError, check_regular_file
from shardwright.planner.engines.megatron_reader import MegatronJob, read_megatron_flags
from shardwright.planner.layers.layer_search import SplitPins, Training
from shardwright.planner.layers.layer_time import DTYPE, Overheads
from shardwright.spec import files, presets
from shardwright.spec.checks import check_positive, raise_if_any
from shardwright.spec.cluster import Cluster, Price
from shardwright.spec.routing_trace import read_trace
from shardwright.spec.transformer import Transformer, load_transformer, transformer_names
from shardwright.spec.transformer_config import is_config, read_transformer

STEP_TOKENS = 1 << 22  # of a step without --batch: 4 M, as Llama's
MEMORY_SHARE = 0.85  # of a device: what Kuaishou's search leaves free of 80 GB for kernels, buffers and fragments
ATTENTION_RATE = 0.376  # of the products' rate, where attention was not measured: as on H800


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """The keys of a plan of a model of layers. `ranks`: 0: all of the cluster; another number changes the number of
    hosts. `length`: tokens of a sequence. `memory`, `host_memory`: of a rank, such as "60 GB". `offload`: whether
    activations may be moved to host memory. `overlap`: whether the engine hides collectives of gradients and weights
    behind the passes. `routing`: a file of recorded routing. `pins`: degrees that are given."""

    ranks: int = 0
    length: int = 4096
    memory: str = ""
    host_memory: str = ""
    offload: bool = True
    overlap: bool = True
    routing: str = ""
    pins: SplitPins = SplitPins()


def is_layer_model(source: str) -> bool:
    """Whether a source names a transformer, or is a config.json."""
    return source in transformer_names() or is_config(Path(source))


def read_model(source: str) -> Transformer:
    return read_transformer(Path(source)) if is_config(Path(source)) else load_transformer(source)


def read_layer_request(
    source: str, overrides: Sequence[str], cluster_name: str, sequences: int, *, can_offload: bool = True
) -> tuple[Training, tuple[str, ...]]:
    """The training to plan, and what is assumed of the cluster. `sequences`: of a step; 0: 4 M tokens. `can_offload`:
    whether the engine that will run the plan can offload activations."""
    settings = files.from_plain(LayerSettings, apply_overrides({}, overrides), f"{source}: keys")
    raise_if_any(check_positive(source, length=settings.length))
    cluster, notes = complete_prices(with_ranks(presets.load_cluster(cluster_name), settings.ranks))
    model = read_model(source)
    memory, host = memory_limits(cluster, settings)
    if not sequences:
        sequences = max(1, STEP_TOKENS // settings.length // cluster.num_ranks) * cluster.num_ranks
        notes = (*notes, f"{sequences} sequences of {settings.length} tokens a step; set --batch for another number")
    training = Training(
        model,
        sequences,
        settings.length,
        cluster.num_ranks,
        cluster,
        memory,
        host if settings.offload and can_offload else 0.0,
        Overheads(hides_gradients=settings.overlap),
        expert_shares=_read_shares(settings.routing, model) if settings.routing else (),
        pins=settings.pins,
    )
    return training, notes


def read_megatron_request(
    path: Path, overrides: Sequence[str], cluster_name: str
) -> tuple[Training, MegatronJob, tuple[str, ...]]:
    """The training of a script or a list of arguments for Megatron-LM, its own split, and what is assumed."""
    check_regular_file(path)
    settings = files.from_plain(LayerSettings, apply_overrides({}, overrides), f"{path}: keys")
    for name in ("length", "overlap", "offload", "host_memory"):
        if getattr(settings, name) != getattr(LayerSettings(), name):
            raise UserError(f"{path}: key {name} is for a model; the script's own arguments count, drop it")
    cluster, notes = complete_prices(with_ranks(presets.load_cluster(cluster_name), settings.ranks))
    try:
        words = shlex.split(path.read_text(), comments=True)
    except ValueError as error:
        raise UserError(f"{path}: not arguments of a shell ({error})") from None
    try:
        job = read_megatron_flags(words, cluster.num_ranks)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    memory, _ = memory_limits(cluster, settings)
    training = Training(
        job.model,
        job.batch.sequences,
        job.batch.length,
        cluster.num_ranks,
        cluster,
        memory,
        overheads=Overheads(hides_gradients=job.hides_gradients),
        expert_shares=_read_shares(settings.routing, job.model) if settings.routing else (),
        pins=settings.pins,
    )
    ignored = (f"not modelled: {', '.join(job.ignored)}",) if job.ignored else ()
    return training, job, (*notes, *ignored)


def with_ranks(cluster: Cluster, num_ranks: int) -> Cluster:
    """The cluster with another number of hosts; with one host, of ranks."""
    if num_ranks in (0, cluster.num_ranks):
        return cluster
    per_host = cluster.ranks_per_host
    if 0 < num_ranks <= per_host:
        return replace(cluster, levels=(replace(cluster.levels[0], num=num_ranks),))
    if num_ranks < 0 or num_ranks % per_host:
        raise UserError(f"ranks={num_ranks}: hosts of {cluster.name} have {per_host} ranks; use a multiple")
    if len(cluster.levels) != 2:
        raise UserError(
            f"ranks={num_ranks}: {cluster.name} has {len(cluster.levels)} network levels; wanted 2, in a host and "
            "between hosts: measure two hosts or more"
        )
    inner, outer = cluster.levels
    return replace(cluster, levels=(inner, replace(outer, num=num_ranks // per_host)))


def complete_prices(cluster: Cluster) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster with a price of attention and of copies to the host, and what was assumed for them."""
    device, notes = cluster.device, list[str]()
    priced = {(price.op, price.dtype): price for price in device.prices}
    matmul = priced.get(("matmul", DTYPE))
    if matmul is None:
        raise UserError(
            f"{cluster.name} has no price of matrix products in {DTYPE}, which plans of layers need; measure it with "
            "shardwright measure --layers, or take a preset such as h800-256"
        )
    added: list[Price] = []
    if ("attention", DTYPE) not in priced:
        added.append(Price(op="attention", dtype=DTYPE, seconds_per_flop=matmul.seconds_per_flop / ATTENTION_RATE))
        notes.append(
            f"attention: not measured on {cluster.name}; {ATTENTION_RATE:.0%} of the rate of products, as on H800"
        )
    for op in ("device_to_host", "host_to_device"):
        if (op, "") not in priced and len(device.tiers) > 1:
            rate = device.tiers[1].read_bytes_per_second
            added.append(Price(op=op, seconds_per_byte=1 / rate))
    return replace(cluster, device=replace(device, prices=(*device.prices, *added))), tuple(notes)


def memory_limits(cluster: Cluster, settings: LayerSettings) -> tuple[float, float]:
    """Bytes of a rank that states and activations may use, and of host memory for offload."""
    own, *slower = cluster.device.tiers
    host = MEMORY_SHARE * slower[0].bytes_ if slower and cluster.device.kind == "cuda" else 0.0
    limits = [MEMORY_SHARE * own.bytes_, host]
    for number, (key, text) in enumerate((("memory", settings.memory), ("host_memory", settings.host_memory))):
        if text:
            try:
                limits[number] = parse_bytes(text)
            except ValueError as error:
                raise UserError(f"{key}: {error}") from None
    if limits[0] > own.bytes_:
        raise UserError(f"memory={settings.memory}: a rank of {cluster.name} has {own.bytes_ / 1e9:.0f} GB")
    return limits[0], limits[1]


def _read_shares(path: str, model: Transformer) -> tuple[tuple[float, ...], ...]:
    """Shares of the rows, by expert, of each recorded pass and mixture."""
    if model.experts is None:
        raise UserError(f"routing={path}: {model.name} has no experts")
    trace = read_trace(path, model.experts.num)
    shares: list[tuple[float, ...]] = []
    for rows_SE in (rows for each in trace.passes for rows in each.values()):
        rows_E = rows_SE.sum(0)
        if len(rows_E) != model.experts.num:
            raise UserError(
                f"routing={path}: {len(rows_E)} experts were recorded; {model.name} has {model.experts.num}"
            )
        shares.append(tuple((rows_E / rows_E.sum()).tolist()))
    return tuple(shares)
