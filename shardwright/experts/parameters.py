"""The experts that a rank owns: rows of every parameter of a mixture's experts, on the ranks of a group."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwright.comm import collective
from shardwright.comm.mesh import Group
from shardwright.errors import UserError
from shardwright.layers.moe import MoE
from shardwright.parameter_shard import ParameterShard
from shardwright.spec.expert_rows import split_experts


class OwnedExperts:
    """Keeps the rows of this rank's experts of all parameters of `moe.experts`, whose first dimension is the expert.

    All ranks start from the values of the first rank of `broadcast_group`. `is_writer`: of the ranks with the same
    experts, this one writes them to checkpoints. `name`: of the mixture, for errors.
    """

    def __init__(
        self, name: str, moe: MoE, group: Group, broadcast_group: Group | None = None, *, is_writer: bool = True
    ) -> None:
        self._group = group
        self._ranges = split_experts(moe.num_experts, group.size)
        self.shards: list[nn.Parameter] = []
        for path, module in moe.experts.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if not parameter.dim() or parameter.shape[0] != moe.num_experts:
                    raise UserError(
                        f'expert parallelism of "{name}": its parameter "{f"{path}." if path else ""}{key}" has shape '
                        f"{tuple(parameter.shape)}; wanted {moe.num_experts} experts as the first dimension"
                    )
                module._parameters[key] = self._shard(parameter, broadcast_group, is_writer)

    def all_gather_tensors(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """All-gather full tensors from `parts`, shaped like this rank's shards; a blocking collective for each."""
        sizes = [end - start for start, end in self._ranges]
        return [collective.all_gather(part, sizes, self._group).wait() for part in parts]

    @torch.no_grad()
    def _shard(self, parameter: nn.Parameter, broadcast_group: Group | None, is_writer: bool) -> nn.Parameter:
        values = parameter.detach().contiguous()
        if broadcast_group is not None and values.numel():
            collective.broadcast(values.view(-1).view(torch.uint8), 0, broadcast_group).wait()
        rows = self._ranges[self._group.index]
        shard = ParameterShard(rows, tuple(values.shape), self, len(self.shards), is_writer)
        self.shards.append(shard.mark(nn.Parameter(values[slice(*rows)].clone(), parameter.requires_grad)))
        return self.shards[-1]
