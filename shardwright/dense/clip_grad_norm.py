"""Gradients of dense parameters, shortened together where they are too long.

Tables take no part: their update is fused, so that no gradient of theirs exists to be measured; their optimizers have a
clip of their own, row by row.

Phases: squares of this rank's gradients, in float64; their sums along each group; one factor for all gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.errors import UserError


@torch.no_grad()
def clip_grad_norm(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    groups: Sequence[Group] = (),
    replicated: Sequence[nn.Parameter] = (),
) -> float:
    """How long all gradients are together, as one vector; if longer than `most`, they are made that long.

    Of pieces, whose others lie on the ranks of `groups`, each rank passes its own as `parameters`, and as `alike` those
    that all these ranks have whole. All of them must call it.
    """
    total = _squares(parameters)
    for group in groups:
        total = collective.all_reduce(total, group).wait()
    length = float((total + _squares(replicated)).sqrt())
    if length > max_norm:
        for parameter in (*parameters, *replicated):
            if parameter.grad is not None:
                parameter.grad.mul_(max_norm / length)
    return length


def register_clip_hook(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    groups: Sequence[Group] = (),
    replicated: Sequence[nn.Parameter] = (),
) -> None:
    """Have that done before every step of this optimizer, whoever takes it."""
    if not max_norm > 0:
        raise UserError(f"clip={max_norm}; wanted the longest that all dense gradients may be together, above 0")

    def shorten(*_: object) -> None:
        clip_grad_norm(parameters, max_norm, groups, replicated)

    optimizer.register_step_pre_hook(shorten)


def _squares(parameters: Sequence[nn.Parameter]) -> Tensor:
    device = parameters[0].device if parameters else None
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None:
            total += torch.linalg.vector_norm(parameter.grad, dtype=torch.float64) ** 2
    return total
