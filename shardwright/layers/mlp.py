"""Multi-layer perceptrons."""

from collections.abc import Sequence

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers of the given widths with ReLU between them, and after the last if `activate_last`."""

    def __init__(
        self, in_features: int, widths: Sequence[int], *, activate_last: bool = True, bias: bool = True
    ) -> None:
        super().__init__()
        sizes = (in_features, *widths)
        steps: list[nn.Module] = []
        for wide, narrow in zip(sizes, sizes[1:], strict=False):
            steps += [nn.Linear(wide, narrow, bias=bias), nn.ReLU()]
        self.steps = nn.Sequential(*(steps if activate_last else steps[:-1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(x)
