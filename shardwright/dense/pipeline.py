"""Pipeline parallelism: a rank holds some chunks of the model and exchanges activations with its neighbours.

Phases, for each micro-batch: receive the activations of the chunk before -> run this chunk -> send them to the next
chunk; later receive the gradients of what was sent -> run backward -> send the gradients of what was received. The
order over micro-batches is a schedule (spec/pipeline.py).

What a chunk sends is freed once it has been sent: the backward pass keeps only its gradient edges. The shapes of
messages follow from the batch: the model's chunks run on the meta device once for each shape of batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardwright.comm import point_to_point
from shardwright.comm.mesh import Group
from shardwright.comm.pending import Pending, ready
from shardwright.comm.point_to_point import TensorSpec
from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.spec.pipeline import Chunk


class AbsentModule(nn.Module):
    """In place of a module that another rank of the pipeline has."""

    def forward(self, *_: Any, **__: Any) -> Any:
        raise UserError("this part of the model is on another rank of the pipeline: train it with job.run")


@dataclass(frozen=True, slots=True)
class Boundary:
    """What is sent from a chunk to the next: tensors, and the structure that they are part of."""

    specs: tuple[TensorSpec, ...]
    structure: TreeSpec

    def with_gradients(self) -> tuple[TensorSpec, ...]:
        """What is sent back."""
        return tuple(spec._replace(requires_grad=False) for spec in self.specs if spec.requires_grad)


class Boundaries:
    """The boundary before each chunk of a model, by the shape of a batch."""

    def __init__(self, meta_model: Any, starts: Sequence[int]) -> None:
        """`meta_model`: the whole model on the meta device; `starts`: the first block of each chunk."""
        self._model, self._starts = meta_model, starts
        self._cache: dict[tuple[torch.Size, ...], dict[int, Boundary]] = {}

    def before(self, chunk: int, batch: Batch) -> Boundary:
        key = (batch.features.lengths.shape, batch.features.values.shape, batch.numbers.shape)
        if key not in self._cache:
            self._cache[key] = self._trace(batch.to("meta"))
        return self._cache[key][chunk]

    def _trace(self, batch: Batch) -> dict[int, Boundary]:
        boundaries: dict[int, Boundary] = {}
        with torch.enable_grad():
            x = self._model.embed(batch)
            for number, block in enumerate(self._model.blocks):
                if number and number in self._starts:
                    boundaries[self._starts.index(number)] = _boundary_of(x)
                x = block(x)
        return boundaries


class PipelineRank:
    """This rank's chunks."""

    def __init__(
        self, model: Any, chunks: Sequence[Chunk], groups: tuple[Group, Group], boundaries: Boundaries
    ) -> None:
        """`groups`: the ranks of the pipeline, on the lane of activations and on that of gradients."""
        self._model, self._boundaries = model, boundaries
        self._forward_group, self._backward_group = groups
        self.chunks = {chunk.index: chunk for chunk in chunks}
        self.is_last = any(chunk.is_last for chunk in chunks)

    def receive(self, chunk: Chunk, batch: Batch) -> Pending[Any]:
        """Receive the activations that this chunk reads, as leaves that require gradients."""
        boundary, group = self._boundaries.before(chunk.number, batch), self._forward_group
        pending = point_to_point.receive(boundary.specs, (group.index - 1) % group.size, group)
        return pending.then(lambda tensors: tree_unflatten(tensors, boundary.structure))

    def forward(self, chunk: Chunk, x: Any) -> Any:
        """The activations after this chunk, or the logits. `x`: the batch, or the activations before this chunk."""
        x = self._model.embed(x) if chunk.is_first else x
        for number in range(*chunk.blocks):
            x = self._model.blocks[number](x)
        return self._model.head(x) if chunk.is_last else x

    def send(self, output: Any) -> Pending[None]:
        """Send the activations of a chunk to the next."""
        group = self._forward_group
        return point_to_point.send(tree_flatten(output)[0], (group.index + 1) % group.size, group)

    def receive_gradients(self, chunk: Chunk, batch: Batch) -> Pending[list[Tensor]]:
        """Receive the gradients of what this chunk has sent."""
        specs = self._boundaries.before(chunk.number + 1, batch).with_gradients()
        group = self._backward_group
        return point_to_point.receive(specs, (group.index + 1) % group.size, group) if specs else ready([])

    def send_gradients(self, gradients: Sequence[Tensor]) -> Pending[None]:
        """Send the gradients of what a chunk has received."""
        group = self._backward_group
        return point_to_point.send(gradients, (group.index - 1) % group.size, group)


def gradient_edges(output: Any) -> list[GradientEdge]:
    """Where the backward pass of a chunk starts; unlike its output, they hold no values."""
    return [get_gradient_edge(x) for x in tree_flatten(output)[0] if x.requires_grad]


def input_gradients(inputs: Any) -> list[Tensor]:
    """The gradients of received activations; zeros where a loss does not depend on them."""
    leaves = [x for x in tree_flatten(inputs)[0] if x.requires_grad]
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


def cut_model(model: Any, chunks: Sequence[Chunk]) -> None:
    """Remove the modules that are not in these chunks; their indices, and thus the names of others, stay."""
    kept = {number for chunk in chunks for number in range(*chunk.blocks)}
    for number in range(len(model.blocks)):
        if number not in kept:
            model.blocks[number] = AbsentModule()
    if not any(chunk.is_first for chunk in chunks):
        model.embed = AbsentModule()
    if not any(chunk.is_last for chunk in chunks):
        model.head = AbsentModule()


def check_cuttable(model: nn.Module) -> None:
    """Raise if the model cannot be cut between its blocks."""
    name = type(model).__name__
    children = {child for child, module in model.named_children() if [*module.parameters()]}
    if not isinstance(getattr(model, "blocks", None), nn.ModuleList) or not children <= {"embed", "blocks", "head"}:
        raise UserError(
            f"a pipeline needs a model of embed(batch), `blocks` and head(x); {name} has {', '.join(sorted(children))}"
        )
    own = [key for key, _ in (*model.named_parameters(recurse=False), *model.named_buffers(recurse=False))]
    if own:
        raise UserError(f'a pipeline cannot cut "{own[0]}" of {name}: move it into embed, a block or head')
    owners: dict[int, str] = {}
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            first = owners.setdefault(id(parameter), f"{path}.{key}")
            if _part(first) != _part(f"{path}.{key}"):
                raise UserError(
                    f'a pipeline cannot cut tied weights: "{path}.{key}" is "{first}"; give each its own weight '
                    "(for GPT: a form with tied=False)"
                )


def _part(name: str) -> str:
    """The part of the model that a parameter belongs to: embed, a block, or head."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]


def _boundary_of(x: Any) -> Boundary:
    leaves, structure = tree_flatten(x)
    return Boundary(tuple(TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) for leaf in leaves), structure)
