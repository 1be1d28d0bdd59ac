"""A layer of a hierarchical ensemble: Y = Norm(Ensemble_i(Interaction_i(X)) + ShortCut(X)).

Shape legend: B samples, M embeddings in, L embeddings out, D columns, N numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from shardwright.errors import UserError, did_you_mean
from shardwright.layers.mixing import InteractionBuilder, Mix, build_interaction

ENSEMBLES = ("concat", "sum", "weighted_sum", "softmax_sum")
NORMS = MappingProxyType({"layer": nn.LayerNorm, "rms": nn.RMSNorm, "none": nn.Identity})  # of an embedding


@dataclass(frozen=True, slots=True)
class EnsembleSpec:
    """What a layer is made of.

    `num_out` embeddings come out whatever the ensemble, so that layers stack: with "concat" the modules share them,
    the first ones one more where they do not divide; with a sum each gives all. 0: as many as come in.
    With `raw` the modules see the sample's numbers too, as one more embedding.
    """

    modules: tuple[InteractionBuilder, ...]
    num_out: int = 0
    ensemble: str = "concat"
    norm: str = "layer"
    raw: bool = False

    def __post_init__(self) -> None:
        for what, name, known in (("ensemble", self.ensemble, ENSEMBLES), ("norm", self.norm, NORMS)):
            if name not in known:
                raise UserError(f'{what}="{name}" is unknown{did_you_mean(name, known)}')
        if not self.modules:
            raise UserError("a layer without modules; give it at least one")

    def outputs_per_module(self, num_out: int) -> tuple[int, ...]:
        """How many embeddings each module gives."""
        num = len(self.modules)
        if self.ensemble != "concat":
            return (num_out,) * num
        if num_out < num:
            raise UserError(f"{num} modules cannot share {num_out} embeddings; raise it, or add modules up")
        return tuple(num_out // num + (at < num_out % num) for at in range(num))


class EnsembleLayer(nn.Module):
    """(B, M, D) -> (B, L, D): modules side by side, brought together, the shortcut added, each embedding normed."""

    def __init__(self, num_in: int, dim: int, spec: EnsembleSpec, num_dense: int = 0) -> None:
        super().__init__()
        self.num_out = spec.num_out or num_in
        raw = spec.raw and num_dense > 0
        self.numbers = nn.Linear(num_dense, dim) if raw else None
        self.interactions = nn.ModuleList(
            build_interaction(make, num_in + raw, dim, share)
            for make, share in zip(spec.modules, spec.outputs_per_module(self.num_out), strict=True)
        )
        weighted = spec.ensemble in ("weighted_sum", "softmax_sum")
        self.ensemble = EnsembleWeights(len(spec.modules), softmax=spec.ensemble == "softmax_sum") if weighted else None
        self.concat = spec.ensemble == "concat"
        self.shortcut = nn.Identity() if self.num_out == num_in else Mix(num_in, self.num_out)
        self.norm = NORMS[spec.norm](dim)

    @property
    def reads_numbers(self) -> bool:
        return self.numbers is not None

    def forward(self, x_BMD: Tensor, numbers_BN: Tensor | None = None) -> Tensor:
        seen_BMD = x_BMD
        if self.numbers is not None and numbers_BN is not None:
            seen_BMD = torch.cat([x_BMD, self.numbers(numbers_BN).unsqueeze(1)], dim=1)
        parts = [module(seen_BMD) for module in self.interactions]
        return self.norm(self._together(parts) + self.shortcut(x_BMD))

    def _together(self, parts: Sequence[Tensor]) -> Tensor:
        if self.concat:
            return torch.cat(list(parts), dim=1)
        if self.ensemble is not None:
            parts = [weight * part for weight, part in zip(self.ensemble(), parts, strict=True)]
        return sum(parts[1:], parts[0])


class EnsembleWeights(nn.Module):
    """One learned weight per module; free ones begin at 1, those of a softmax are equal at first."""

    def __init__(self, num: int, *, softmax: bool) -> None:
        super().__init__()
        self.softmax = softmax
        self.weight = nn.Parameter(torch.empty(num))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self) -> Tensor:
        return self.weight.softmax(0) if self.softmax else self.weight
