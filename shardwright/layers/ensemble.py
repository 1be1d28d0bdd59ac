"""A layer of a hierarchical ensemble: Y = Norm(Ensemble_i(Interaction_i(X)) + ShortCut(X)).

Shape legend: B samples, M input embeddings, L output embeddings, D columns, N numeric features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from shardwright.errors import UserError, did_you_mean
from shardwright.layers.mixing import InteractionBuilder, Mix, build_interaction

ENSEMBLES = ("concat", "sum", "weighted_sum", "softmax_sum")
NORMS = MappingProxyType({"layer": nn.LayerNorm, "rms": nn.RMSNorm, "none": nn.Identity})  # over an embedding's columns


@dataclass(frozen=True, slots=True)
class EnsembleSpec:
    """Interaction modules and settings of a layer.

    A layer outputs `num_out` embeddings (0: as many as it has inputs), so that layers stack. With "concat" they are
    divided among the modules, the first modules getting the remainder; with a sum each module outputs all of them.
    With `raw` the modules also read the sample's numeric features, as one more embedding.
    """

    modules: tuple[InteractionBuilder, ...]
    num_out: int = 0
    ensemble: str = "concat"
    norm: str = "layer"
    raw: bool = False

    def __post_init__(self) -> None:
        for setting, name, allowed in (("ensemble", self.ensemble, ENSEMBLES), ("norm", self.norm, NORMS)):
            if name not in allowed:
                raise UserError(f'{setting}="{name}" is unknown{did_you_mean(name, allowed)}')
        if not self.modules:
            raise UserError("a layer without modules; pass at least one")

    def outputs_per_module(self, num_out: int) -> tuple[int, ...]:
        """How many embeddings each module outputs."""
        num = len(self.modules)
        if self.ensemble != "concat":
            return (num_out,) * num
        if num_out < num:
            raise UserError(f"{num} modules cannot share {num_out} embeddings; raise num_out, or use a sum ensemble")
        return tuple(num_out // num + (i < num_out % num) for i in range(num))


class EnsembleLayer(nn.Module):
    """(B, M, D) -> (B, L, D): combine the modules' outputs, add the shortcut, normalize each embedding."""

    def __init__(self, num_in: int, dim: int, spec: EnsembleSpec, num_dense: int = 0) -> None:
        super().__init__()
        self.num_out = spec.num_out or num_in
        raw = spec.raw and num_dense > 0
        self.numbers = nn.Linear(num_dense, dim) if raw else None
        self.interactions = nn.ModuleList(
            build_interaction(builder, num_in + raw, dim, num_out)
            for builder, num_out in zip(spec.modules, spec.outputs_per_module(self.num_out), strict=True)
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
        inputs_BMD = x_BMD
        if self.numbers is not None and numbers_BN is not None:
            inputs_BMD = torch.cat([x_BMD, self.numbers(numbers_BN).unsqueeze(1)], dim=1)
        outputs = [module(inputs_BMD) for module in self.interactions]
        return self.norm(self._combine(outputs) + self.shortcut(x_BMD))

    def _combine(self, outputs: Sequence[Tensor]) -> Tensor:
        if self.concat:
            return torch.cat(list(outputs), dim=1)
        if self.ensemble is not None:
            outputs = [weight * output for weight, output in zip(self.ensemble(), outputs, strict=True)]
        return sum(outputs[1:], outputs[0])


class EnsembleWeights(nn.Module):
    """One learned weight per module: initially 1, or equal shares of 1 with `softmax`."""

    def __init__(self, num: int, *, softmax: bool) -> None:
        super().__init__()
        self.softmax = softmax
        self.weight = nn.Parameter(torch.empty(num))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self) -> Tensor:
        return self.weight.softmax(0) if self.softmax else self.weight
