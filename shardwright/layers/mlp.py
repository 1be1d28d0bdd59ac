"""Multi-layer perceptrons, and the form of their hidden layers and of the output's bias.

Shape legend: B samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, nn

from shardwright.errors import UserError, did_you_mean
from shardwright.layers.batch_norm import BatchNorm
from shardwright.layers.dropout import Dropout
from shardwright.layers.interaction import NumericEmbedding

ACTIVATIONS = MappingProxyType(
    {
        "relu": nn.ReLU,
        "leaky_relu": nn.LeakyReLU,
        "prelu": nn.PReLU,
        "gelu": nn.GELU,
        "silu": nn.SiLU,
        "sigmoid": nn.Sigmoid,
        "tanh": nn.Tanh,
        "none": nn.Identity,
    }
)
NORMS = MappingProxyType({"none": nn.Identity, "batch": BatchNorm, "layer": nn.LayerNorm})


@dataclass(frozen=True, slots=True)
class MLPForm:
    """A hidden layer is linear, norm, activation, dropout; `dropout` is the share of its outputs set to 0 in training.

    `output_bias`: where the bias of the model's output begins, such as the logit of the base rate; None: as torch does.
    `number_vectors`: the inputs have a vector for each numeric feature, times its value, in place of the value.
    """

    activation: str = "relu"
    norm: str = "none"
    dropout: float = 0.0
    output_bias: float | None = None
    number_vectors: bool = False

    def __post_init__(self) -> None:
        for key, name, allowed in (("activation", self.activation, ACTIVATIONS), ("norm", self.norm, NORMS)):
            if name not in allowed:
                hint = did_you_mean(name, allowed) or f"; allowed: {', '.join(sorted(allowed))}"
                raise UserError(f'{key}="{name}" is unknown{hint}')
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout={self.dropout}; wanted at least 0, less than 1")

    def number_embedding(self, num_dense: int, dim: int) -> NumericEmbedding | None:
        """The vectors of the numeric features; None if the inputs have their values."""
        return NumericEmbedding(num_dense, dim) if self.number_vectors else None

    def number_width(self, num_dense: int, dim: int) -> int:
        """Columns of the numeric features in the inputs."""
        return num_dense * dim if self.number_vectors else num_dense

    def refuse_number_vectors(self, model: str) -> None:
        """Raise an error if number_vectors is set, for a model that reads the numeric features as they are."""
        if self.number_vectors:
            raise UserError(f"{model}: number_vectors=true, but it reads the numeric features as they are; drop it")

    def after_linear(self, width: int) -> list[nn.Module]:
        """The modules that follow the linear map of a hidden layer of this width."""
        norm = [] if self.norm == "none" else [NORMS[self.norm](width)]
        activation = nn.PReLU(width) if self.activation == "prelu" else ACTIVATIONS[self.activation]()
        return [*norm, activation, *([Dropout(self.dropout)] if self.dropout else [])]

    def output(self, width: int) -> nn.Linear:
        """The linear map from `width` columns to the model's output."""
        return nn.Linear(width, 1) if self.output_bias is None else OutputLinear(width, self.output_bias)


PLAIN = MLPForm()


class OutputLinear(nn.Linear):
    """A linear map to one logit whose bias begins at a given value."""

    def __init__(self, in_features: int, start: float) -> None:
        self.start = start
        super().__init__(in_features, 1)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.bias, self.start)


class MLP(nn.Module):
    """Hidden layers of the given widths; without `activate_last`, the last one is linear only."""

    def __init__(
        self,
        in_features: int,
        widths: Sequence[int],
        *,
        activate_last: bool = True,
        bias: bool = True,
        form: MLPForm = PLAIN,
    ) -> None:
        super().__init__()
        sizes = (in_features, *widths)
        steps: list[nn.Module] = []
        for wide, narrow in zip(sizes, sizes[1:], strict=False):
            steps += [nn.Linear(wide, narrow, bias=bias), *form.after_linear(narrow)]
        if not activate_last:
            steps = steps[: -len(form.after_linear(1))]
        self.steps = nn.Sequential(*steps)

    def forward(self, x: Tensor, is_counted_B: Tensor | None = None) -> Tensor:
        """`is_counted_B`: the samples of the statistics of batch norms; None: all."""
        if is_counted_B is None:
            return self.steps(x)
        for step in self.steps:
            x = step(x, is_counted_B) if isinstance(step, BatchNorm) else step(x)
        return x


def logit_mlp(in_features: int, hidden: Sequence[int], form: MLPForm = PLAIN) -> MLP:
    """An MLP to one logit."""
    mlp = MLP(in_features, hidden, form=form)
    mlp.steps.append(form.output(hidden[-1] if hidden else in_features))
    return mlp
