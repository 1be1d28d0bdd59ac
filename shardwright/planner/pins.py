"""Pins: the sharding that a user sets for a table, as text such as "row" or "column:2@0,1"."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.errors import UserError, did_you_mean
from shardwright.planner.problem import Problem, ServerRequest
from shardwright.planner.tables.schemes import all_schemes, find_scheme
from shardwright.planner.tables.sharding import Sharding
from shardwright.spec.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Pin:
    """A parsed pin, SCHEME[:COLUMN_SHARDS][@RANK,...]."""

    scheme: str
    column_shards: int = 0  # 0: any
    ranks: tuple[int, ...] = ()


def parse_pin(text: str) -> Pin:
    """Parse a pin such as `column:4`, `table@3` or `row`."""
    sharding, _, ranks = text.partition("@")
    name, _, column_shards = sharding.partition(":")
    if name not in all_schemes():
        raise UserError(f'pin "{text}": no scheme "{name}"{did_you_mean(name, all_schemes())}')
    try:
        pin = Pin(name, int(column_shards or 0), tuple(int(rank) for rank in ranks.split(",") if ranks))
    except ValueError:
        raise UserError(f'pin "{text}": wanted SCHEME[:COLUMN_SHARDS][@RANK,...], as column:2@0,1') from None
    if pin.ranks and (where := find_scheme(name).forbids_ranks):
        raise UserError(f'pin "{text}": shards of "{name}" are {where}; remove @ and the ranks')
    return pin


def pinned_ranks(problem: Problem, pins: Mapping[str, Pin]) -> dict[int, tuple[int, ...]]:
    """The ranks of tables that are pinned to ranks, by table number."""
    by_number = {number: pins.get(load.table.name) for number, load in enumerate(problem.table_loads)}
    return {number: pin.ranks for number, pin in by_number.items() if pin and pin.ranks}


def matches_pin(sharding: Sharding, pin: Pin, cluster: Cluster) -> bool:
    """Whether a sharding is the pinned one; if the pin has no number of column shards, its ranks determine it."""
    column_shards = pin.column_shards or len(pin.ranks) // sharding.num_row_shards(cluster)
    return sharding.scheme == pin.scheme and column_shards in (0, sharding.column_shards)


def pin_text(pin: Pin) -> str:
    return f"{pin.scheme}:{pin.column_shards}" if pin.column_shards else pin.scheme


@dataclass(frozen=True, slots=True)
class LayerRequest:
    """What the user pins of a model of layers; 0 and "": the planner chooses.

    `pipeline`: the ranks of a pipeline, 1: none. `experts`: the ranks that experts are split over, 1: all experts on
    every rank. `expert_groups`: steps of their exchange; `expert_copies`: a CopyPolicy; `expert_exchange`: an
    ExpertExchangeMode. `dense`: the parallelism strategy of the dense model.
    """

    pipeline: int = 0
    micro_batches: int = 0
    experts: int = 0
    expert_groups: int = 0
    expert_copies: str = ""
    expert_exchange: str = ""
    dense: str = ""


@dataclass(frozen=True, slots=True)
class TableRequest:
    """What the user sets for all embedding tables. `balance`: the weights of work and of bytes sent that they are
    placed by; None: several are tried. `accumulate`: batches of an optimizer step, whose rows are in memory at once.
    `servers`: None: there are none."""

    balance: tuple[float, float] | None = None
    accumulate: int = 1
    servers: ServerRequest | None = None
