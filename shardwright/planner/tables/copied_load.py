"""The load of a table whose rows ranks read from copies: with bounded staleness, or of rows on table servers."""

from dataclasses import dataclass

from shardwright.spec.plan import Bounded


@dataclass(frozen=True, slots=True)
class CopiedLoad:
    """Distinct rows that a sample reads, and the shares of them that are validated, sent by owners, and whose
    updates are pushed; bytes of a rank's copies. `is_served`: table servers own the rows."""

    sync: Bounded
    rows_per_sample: float
    validated: float
    sent: float
    pushed: float
    bytes_: float
    is_served: bool = False
