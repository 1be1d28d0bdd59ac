"""The load of a table whose rows ranks read from copies, with bounded staleness."""

from dataclasses import dataclass

from shardwright.spec.plan import Bounded


@dataclass(frozen=True, slots=True)
class CopiedLoad:
    """Distinct rows that a sample reads, and the shares of them that owners are asked about, send, and get updates of;
    bytes of a rank's copies."""

    sync: Bounded
    rows_per_sample: float
    asked: float
    received: float
    updated: float
    bytes_: float
