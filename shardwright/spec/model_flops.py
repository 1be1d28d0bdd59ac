"""FLOPs that training a language model needs by definition, and the share of the machine's peak that a run reaches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardwright.spec.checks import check_positive, raise_if_any

FORMULA = "MFU = tokens/s x (6 N + 6 A s) / (ranks x peak)"
FULL_FORMULA = "MFU, full matrix = tokens/s x (6 N + 12 A s) / (ranks x peak)"


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of a trained token: 2 forward and 4 backward for each multiplication, without recomputation.

    Attention multiplies each query with the keys before it, half of the matrix; the other convention counts all of it.
    """

    version: Literal[1]
    matrix_parameters: int  # N: weights of matrix products, the head included, the input embedding not
    attention_width: int  # A: heads times channels of a head, summed over the blocks
    length: int  # s: tokens of a sequence
    num_ranks: int
    peak_flops_per_second: float  # of matrix products on one rank
    peak_source: str  # how the peak was measured

    @property
    def per_token(self) -> int:
        """FLOPs with the causal half of attention."""
        return 6 * self.matrix_parameters + 6 * self.attention_width * self.length

    @property
    def per_token_full(self) -> int:
        """FLOPs with the full attention matrix."""
        return self.per_token + 6 * self.attention_width * self.length

    def utilization(self, tokens_per_second: float) -> dict[str, float]:
        """Model FLOPs utilization (MFU) in both conventions."""
        tokens_per_peak = tokens_per_second / (self.num_ranks * self.peak_flops_per_second)
        return {"mfu": tokens_per_peak * self.per_token, "mfu_full": tokens_per_peak * self.per_token_full}

    def verify(self) -> None:
        raise_if_any(self._errors())

    def _errors(self) -> Iterator[str]:
        yield from check_positive(
            "model flops",
            matrix_parameters=self.matrix_parameters,
            length=self.length,
            num_ranks=self.num_ranks,
            peak_flops_per_second=self.peak_flops_per_second,
        )
