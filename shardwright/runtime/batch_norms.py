"""Batch normalization over the ranks that a batch is split among."""

from torch import Tensor, nn

from shardwright.comm.collective import all_gather, all_reduce
from shardwright.comm.mesh import Group, Mesh
from shardwright.errors import UserError
from shardwright.layers.batch_norm import BatchNorm
from shardwright.spec.lanes import IDS
from shardwright.spec.plan import Plan


class SampleGroup:
    """The ranks of a group; they exchange on its lane, and wait."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def all_gather(self, x: Tensor) -> Tensor:
        return all_gather(x.unsqueeze(0), [1] * self._group.size, self._group).wait()

    def all_reduce(self, x: Tensor) -> Tensor:
        return all_reduce(x.contiguous(), self._group).wait()


def share_batch_norms(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Let the model's batch norms normalize over all samples of a batch.

    They use lane `ids`, whose other messages are small. torch's own batch norms, which would see only the samples of
    their rank, are refused.
    """
    if mesh.size == 1:
        return
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise UserError(
                f'"{path}" is torch\'s {type(module).__name__}, which normalizes over the samples of one rank; use '
                "shardwright.layers.batch_norm.BatchNorm, or train on one rank"
            )
        if isinstance(module, BatchNorm) and mesh.position(plan.sample_axes)[1] > 1:
            module.ranks = SampleGroup(mesh.group(plan.sample_axes, IDS))
