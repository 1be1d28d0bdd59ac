"""Kuaishou's best configurations of Llamas on H800, and what they measured (Megatron-Kwai, USENIX ATC 2024)."""

from typing import Any, NamedTuple

from shardwright.planner.layers.degrees import Degrees, Recomputation, SequenceBatch, even_cuts
from shardwright.spec.transformer import Transformer

LIMIT = 65_000 * 2**20  # bytes that a rank may use by the formula
UNMODELLED = 1.25e9  # bytes that they used besides
PEAK_FLOPS = 989e12  # of an H800, dense bfloat16


def llama(layers: int, hidden: int, intermediate: int, heads: int, groups: int = 0) -> Transformer:
    return Transformer(1, "llama", layers, hidden, intermediate, heads, groups or heads, 32_004, hidden // heads)


MODELS = {
    "7B": llama(32, 4096, 11_008, 32),
    "65B": llama(80, 8192, 22_016, 64),
    "175B": llama(96, 12_288, 32_768, 96),
    "70B": llama(80, 8192, 28_672, 64, 8),
}


class Published(NamedTuple):
    """`layers`: of a chunk. `offload`: share of the saved activations. `gb`, `host_gb`: of a rank."""

    model: str
    length: int
    ranks: int
    sequences: int
    tensor: int
    context: int
    pipeline: int
    layers: int
    data: int
    recompute: Recomputation
    offload: float
    tokens_per_second: float
    mfu: float
    bubble: float
    gb: float
    host_gb: float

    @property
    def transformer(self) -> Transformer:
        return MODELS[self.model]

    @property
    def batch(self) -> SequenceBatch:
        return SequenceBatch(self.sequences, self.length)

    @property
    def degrees(self) -> Degrees:
        layers = self.transformer.layers
        cuts = even_cuts(layers, layers // self.layers)
        sizes: dict[str, Any] = {"tensor": self.tensor, "context": self.context, "pipeline": self.pipeline}
        return Degrees(cuts, data=self.data, recompute=self.recompute, **sizes)

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.sequences * self.length / self.tokens_per_second


PUBLISHED = [
    Published("175B", 4096, 256, 256, 2, 2, 16, 1, 4, "none", 0.522, 97577, 41.4, 3.76, 69.4, 26.2),
    Published("175B", 4096, 192, 240, 2, 2, 24, 1, 2, "none", 0.41, 76130, 43.1, 4.57, 69.4, 22.1),
    Published("175B", 4096, 144, 252, 4, 1, 6, 2, 6, "memory-bound", 0.746, 56637, 42.8, 1.47, 69.4, 20.9),
    Published("175B", 4096, 120, 270, 4, 1, 6, 2, 5, "memory-bound", 0.851, 45761, 41.5, 1.14, 69.4, 23.8),
    Published("175B", 4096, 64, 272, 4, 1, 8, 1, 2, "memory-bound", 0.979, 27708, 47.1, 0.43, 69.4, 27.6),
    Published("65B", 4096, 256, 256, 2, 1, 8, 2, 16, "none", 0.355, 233981, 37.5, 8.05, 69.4, 19.2),
    Published("65B", 4096, 200, 250, 4, 1, 5, 4, 10, "none", 0.0, 179819, 36.9, 3.85, 55.2, 0.0),
    Published("65B", 4096, 160, 240, 2, 1, 10, 2, 8, "none", 0.331, 158984, 40.8, 6.98, 69.4, 18.7),
    Published("65B", 4096, 120, 240, 2, 1, 5, 2, 12, "memory-bound", 0.383, 121488, 41.6, 2.44, 69.4, 11.7),
    Published("65B", 4096, 96, 240, 2, 1, 8, 2, 6, "memory-bound", 0.035, 96758, 41.4, 3.38, 69.4, 1.1),
    Published("65B", 4096, 64, 256, 2, 1, 8, 2, 4, "memory-bound", 0.162, 71884, 46.1, 2.14, 69.4, 5.3),
    Published("65B", 4096, 48, 264, 2, 1, 8, 2, 3, "memory-bound", 0.29, 51124, 43.7, 1.57, 69.4, 9.5),
    Published("65B", 4096, 32, 272, 2, 1, 8, 2, 2, "memory-bound", 0.544, 36740, 47.2, 1.02, 69.4, 17.9),
    Published("70B", 8192, 240, 270, 2, 4, 10, 2, 3, "none", 0.0, 217316, 40.7, 2.44, 59.4, 0.0),
    Published("70B", 8192, 200, 250, 2, 2, 5, 2, 10, "memory-bound", 0.368, 182038, 40.9, 1.96, 69.4, 11.1),
    Published("70B", 8192, 160, 260, 2, 4, 10, 2, 2, "none", 0.0, 148456, 41.7, 1.70, 61.2, 0.0),
    Published("70B", 8192, 128, 256, 2, 2, 8, 2, 4, "memory-bound", 0.012, 122265, 42.9, 2.14, 69.4, 0.4),
    Published("70B", 8192, 112, 252, 2, 2, 4, 2, 7, "memory-bound", 0.811, 100242, 40.2, 0.83, 69.4, 23.9),
    Published("70B", 8192, 80, 260, 2, 2, 10, 2, 2, "memory-bound", 0.024, 78698, 44.2, 1.70, 69.4, 0.8),
    Published("70B", 8192, 48, 264, 2, 1, 8, 2, 3, "memory-bound", 0.722, 47755, 44.7, 1.57, 69.4, 46.9),
    Published("70B", 8192, 32, 272, 2, 1, 8, 2, 2, "memory-bound", 0.858, 33262, 46.7, 1.02, 69.4, 55.7),
]
