"""Clipping of dense gradients by global norm, over sharded and replicated parameters.

Embedding tables take no part: their update is fused, so their gradients are never materialized. Their optimizers can
clip each row instead (`clip`).

Phases: sum this rank's squares, in float64; all-reduce over each group; scale all gradients by one factor.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.errors import UserError
from shardwright.kernels.native import sum_of_squares

# This rank's shards, and the groups over which they are sharded; without groups, full parameters.
Sharded = tuple[Sequence[nn.Parameter], Sequence[Group]]
EPSILON = 1e-6  # added to the norm, as by torch.nn.utils.clip_grad_norm_


@torch.no_grad()
def clip_grad_norm(
    parameters: Sequence[Sharded],
    max_norm: float,
    pipeline_groups: Sequence[Group] = (),
) -> float:
    """Clip all gradients together to an L2 norm of at most `max_norm`; returns the norm before clipping.

    The ranks of `pipeline_groups` have other parameters. All ranks of all groups must call it: one all-reduce over each
    group.
    """
    device = next((parameter.device for sharded, _ in parameters for parameter in sharded), None)
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for sharded, groups in parameters:
        squares = _sum_of_squares(sharded)
        for group in groups:
            squares = collective.all_reduce(squares.to(group.device), group).wait()
        total += squares.to(total.device)
    for group in pipeline_groups:
        total = collective.all_reduce(total.to(group.device), group).wait()
    norm = float(total.sqrt())
    factor = max_norm / (norm + EPSILON)
    if not factor >= 1:
        for parameter in (parameter for sharded, _ in parameters for parameter in sharded):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
    return norm


def register_clip_hook(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Sharded],
    max_norm: float,
    pipeline_groups: Sequence[Group] = (),
) -> None:
    """Call `clip_grad_norm` before every step of this optimizer."""
    if not max_norm > 0:
        raise UserError(f"clip={max_norm}: the maximum global norm of the dense gradients must be above 0")

    def clip_gradients(*_: object) -> None:
        clip_grad_norm(parameters, max_norm, pipeline_groups)

    optimizer.register_step_pre_hook(clip_gradients)


def _sum_of_squares(parameters: Sequence[nn.Parameter]) -> Tensor:
    device = parameters[0].device if parameters else None
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None:
            total += torch.as_tensor(sum_of_squares(parameter.grad), dtype=total.dtype, device=device)
    return total
