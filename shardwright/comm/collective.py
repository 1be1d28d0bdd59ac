"""The collectives, each under way until its Pending is waited for. Rows are cut along the first dimension.

Splits are numbers of rows by rank of the group and may be zero. A reduce-scatter is an all-to-all and a sum here in the
order of ranks: Gloo's own is one all-reduce for each rank. Between two ranks of one host rows go through its memory
(`memory`); where a group has no others, gathers and small sums do too. Sums over several hosts: `hosts`.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, product
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.all_gather_json import all_gather_json
from shardwright.comm.codec import Codec, Plain
from shardwright.comm.heartbeat import explain_comm_error
from shardwright.comm.hierarchical import hierarchical_all_reduce
from shardwright.comm.mesh import Group
from shardwright.comm.pending import RETAINED_WORK_BYTES, Pending
from shardwright.errors import UserError

T = TypeVar("T")
PLAIN = Plain()
SUMMABLE_DTYPES = frozenset((torch.float32, torch.float64, torch.int32, torch.int64))
DIRECT_REDUCE_BYTES = 1 << 22  # that reach a rank up to which all get all there is to sum; beyond, a ring moves less
CROSS_HOST_REDUCE_BYTES = 1 << 17  # the same where hosts lie between them; beyond, the sum of each host crosses


class CollectiveMismatch(UserError):
    """The ranks of a group are about to do different things."""


def all_reduce(x: Tensor, group: Group) -> Pending[Tensor]:
    """The sum over ranks, in place."""
    _in_one_piece(x, "all_reduce")
    check_collective(group, "all_reduce", x)
    if x.dtype in SUMMABLE_DTYPES and (group.shares_memory or group.hierarchical_groups):
        if x.nbytes * (group.size - 1) <= (DIRECT_REDUCE_BYTES if group.shares_memory else CROSS_HOST_REDUCE_BYTES):
            return _sum_of_all(x, group)
        if group.hierarchical_groups:
            return hierarchical_all_reduce(x, group.next_hierarchical_group())
    return _under_way(group, lambda: x, lambda: dist.all_reduce(x, group=group.process_group, async_op=True))


def all_reduce_bf16(x: Tensor, group: Group, residual: Tensor | None = None) -> Pending[Tensor]:
    """The sum over ranks, in place, at half the bytes of float32: numbers travel in bf16, and are added in full.

    Each is rounded twice, where it starts and where it was summed; over hosts only what crosses, of two of them once.
    With `kept` (like `x`, zero at first) what rounding takes away at this rank is added the next time, so that over
    many steps nothing is lost. The first half is under way; the second is issued by `wait`: ranks must wait for several
    of these in one order.
    """
    half = two_phase_all_reduce_bf16(x, group, residual)
    return Pending(lambda: half.wait().wait())


def two_phase_all_reduce_bf16(x: Tensor, group: Group, residual: Tensor | None = None) -> Pending[Pending[Tensor]]:
    """The same in two halves: waiting for the first issues the second."""
    _in_one_piece(x, "all_reduce_bf16")
    if not x.is_floating_point():
        raise UserError(f"all_reduce_bf16 of {x.dtype}, which it would change; all_reduce keeps it")
    if residual is not None and (
        residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous()
    ):
        raise UserError(
            f"all_reduce_bf16 of {x.dtype} {tuple(x.shape)} with kept {residual.dtype} {tuple(residual.shape)}"
        )
    flat = x.view(-1)
    if group.size == 1:
        return Pending(lambda: Pending(lambda: x))
    if residual is not None:
        flat += residual.view(-1)
    if group.hierarchical_groups and x.nbytes * (group.size - 1) > CROSS_HOST_REDUCE_BYTES:
        check_collective(group, "all_reduce_bf16", x)
        under_way = hierarchical_all_reduce(
            x,
            group.next_hierarchical_group(),
            bf16_across_hosts=True,
            residual=None if residual is None else residual.zero_(),
        )
        return Pending(lambda: under_way)
    wire = flat.bfloat16()
    sizes = [len(flat) * (at + 1) // group.size - len(flat) * at // group.size for at in range(group.size)]
    start, mine = sum(sizes[: group.index]), sizes[group.index]
    parts = all_to_all(wire, sizes, [mine] * group.size, group)

    def summed() -> Pending[Tensor]:
        total = parts.wait().view(group.size, mine).to(x.dtype).sum(0)
        rounded = total.bfloat16()
        if residual is not None:
            residual.view(-1).copy_(flat - wire)
            residual.view(-1)[start : start + mine] += total - rounded
            residual.nan_to_num_(0.0, 0.0, 0.0)
        return all_gather(rounded, sizes, group).then(lambda whole: flat.copy_(whole).view_as(x))

    return Pending(summed)


def broadcast(x: Tensor, source: int, group: Group) -> Pending[Tensor]:
    """`x` of the group's member `source`, in place."""
    _in_one_piece(x, "broadcast")
    check_collective(group, f"broadcast from {source}", x)
    root = group.ranks[source]
    return _under_way(group, lambda: x, lambda: dist.broadcast(x, root, group=group.process_group, async_op=True))


def all_gather(x: Tensor, sizes: Sequence[int], group: Group) -> Pending[Tensor]:
    """The rows of all ranks, `sizes` of each."""
    _own(x, sizes, group, "all_gather")
    check_collective(group, f"all_gather of {list(sizes)} rows of {x.dtype} {tuple(x.shape[1:])}")
    if group.shares_memory:
        x = x.detach().contiguous()
        whole = x.new_empty(sum(sizes), *x.shape[1:])
        sent, places = [x] * group.size, _cut(whole, sizes)
        return _under_way(group, lambda: whole, lambda: _sent_and_received(sent, places, group))
    longest = max(sizes)
    padded = x.new_zeros(longest, *x.shape[1:])
    padded[: len(x)] = x
    parts = [torch.empty_like(padded) for _ in range(group.size)] if group.size > 1 else [padded]
    return _under_way(
        group,
        lambda: torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]),
        lambda: dist.all_gather(parts, padded, group=group.process_group, async_op=True),
    )


def all_gather_into(tensors: Sequence[Tensor], group: Group) -> Pending[Sequence[Tensor]]:
    """This rank's own of the places to each of the others, and theirs into the places of these."""
    sent = [tensors[group.index]] * group.size
    return _under_way(group, lambda: tensors, lambda: _sent_and_received(sent, tensors, group))


def reduce_scatter(x: Tensor, sizes: Sequence[int], group: Group) -> Pending[Tensor]:
    """This rank's rows of the sum over ranks; `sizes` says how many rows each gets."""
    mine = sizes[group.index]
    parts = all_to_all(x, sizes, [mine] * group.size, group)

    def summed() -> Tensor:
        arrived = parts.wait()
        total = arrived[:mine].clone()
        for member in range(1, group.size if mine else 0):
            total += arrived[member * mine : (member + 1) * mine]
        return total

    return Pending(summed)


def all_to_all(
    x: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], group: Group, codec: Codec = PLAIN
) -> Pending[Tensor]:
    """Rows of `x` to each rank, and theirs for this one, in the order of ranks."""
    if len(input_splits) != group.size or len(output_splits) != group.size or sum(input_splits) != len(x):
        raise UserError(
            f"all_to_all of {len(x)} rows: splits {list(input_splits)} and {list(output_splits)} for {group.size} ranks"
        )
    if input_splits[group.index] != output_splits[group.index]:
        raise UserError(
            f"all_to_all: rank {group.index} sends itself {input_splits[group.index]} rows and expects "
            f"{output_splits[group.index]}"
        )
    if not isinstance(codec, Plain) and not x.is_floating_point():
        raise UserError(f"{type(codec).__name__} is for vectors; these are {x.dtype}, which it would change")
    if group.size == 1:
        return Pending(lambda: x)
    wire = codec.encode(x.detach()).contiguous()
    arrived = wire.new_empty(sum(output_splits), *wire.shape[1:])
    check_collective(
        group, f"all_to_all of rows of {x.dtype} {tuple(x.shape[1:])}", None, (list(input_splits), list(output_splits))
    )
    return _under_way(
        group,
        lambda: codec.decode(arrived, x.dtype),
        lambda: _sent_and_received(_cut(wire, input_splits), _cut(arrived, output_splits), group),
    )


def all_to_all_rows(x: Tensor, group: Group) -> Pending[Tensor]:
    """Row r to rank r, and from rank r into row r: what a jagged all-to-all has to know first."""
    return all_to_all(x, [1] * group.size, [1] * group.size, group)


def all_to_all_jagged(
    values: Tensor, input_lengths_RK: Tensor, output_lengths_RK: Tensor, group: Group
) -> Pending[Tensor]:
    """Segments by rank and place: `sent_RK` are their lengths here, `received_RK` what `lengths` gave for them."""
    return all_to_all(values, input_lengths_RK.sum(1).tolist(), output_lengths_RK.sum(1).tolist(), group)


def one_to_many(x: Tensor, sizes: Sequence[int], source: int, group: Group) -> Pending[Tensor]:
    """Rows of the member `source`, `sizes` of them to each rank; elsewhere `x` says only what rows are like."""
    if group.index == source:
        _whole(x, sizes, "one_to_many")
    sent = sizes if group.index == source else [0] * group.size
    received = [sizes[group.index] if rank == source else 0 for rank in range(group.size)]
    return _pairwise(x, sent, received, group, f"one_to_many from {source}")


def many_to_one(x: Tensor, sizes: Sequence[int], target: int, group: Group) -> Pending[Tensor]:
    """The rows of all ranks at the member `target`, none elsewhere."""
    _own(x, sizes, group, "many_to_one")
    sent = [sizes[group.index] if rank == target else 0 for rank in range(group.size)]
    received = sizes if group.index == target else [0] * group.size
    return _pairwise(x, sent, received, group, f"many_to_one to {target}")


def hierarchical_all_to_all(
    x: Tensor,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    intra_host: Group,
    inter_host: Group,
    codec: Codec = PLAIN,
) -> Pending[Tensor]:
    """An all-to-all over hosts x ranks that crosses once for each pair of hosts and local index.

    Inside a host, rows are gathered at the local rank of their destination's index; then each index exchanges with its
    like. Ranks are numbered host by host. The first half runs before this returns.
    """
    hosts, locals_ = inter_host.size, intra_host.size
    counts_HL = torch.tensor(input_splits).view(hosts, locals_)
    at_PHL = all_gather(counts_HL.view(1, hosts, locals_), [1] * locals_, intra_host).wait()
    mine_PH = at_PHL[:, :, intra_host.index]
    by_index = _reordered(x, counts_HL.flatten().tolist(), (hosts, locals_))
    gathered = all_to_all(by_index, counts_HL.sum(0).tolist(), mine_PH.sum(1).tolist(), intra_host, codec).wait()
    by_host = _reordered(gathered, mine_PH.flatten().tolist(), (locals_, hosts))
    from_HL = torch.tensor(output_splits).view(hosts, locals_)
    return all_to_all(by_host, mine_PH.sum(0).tolist(), from_HL.sum(1).tolist(), inter_host, codec)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received, group, codecs):
        ctx.splits, ctx.group, ctx.codecs = (sent, received), group, codecs
        return all_to_all(x, sent, received, group, codecs[0]).wait()

    @staticmethod
    def backward(ctx, gradient):
        sent, received = ctx.splits
        back = _Exchange.apply(gradient.contiguous(), received, sent, ctx.group, ctx.codecs[::-1])
        return back, None, None, None, None


def all_to_all_autograd(
    x: Tensor,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    group: Group,
    codecs: tuple[Codec, Codec] = (PLAIN, PLAIN),
) -> Tensor:
    """An all-to-all whose gradients travel back the same way; codecs of the way there and the way back."""
    return _Exchange.apply(x, tuple(input_splits), tuple(output_splits), group, codecs)  # pyright: ignore[reportReturnType]


def _under_way(group: Group, finish: Callable[[], T], start: Callable[[], Any]) -> Pending[T]:
    """`start` holds the buffers that are under way, and is held until then."""
    if group.size == 1:
        return Pending(finish)
    try:
        found = start()
    except RuntimeError as error:
        raise explain_comm_error(error, group.heartbeat) from error
    if isinstance(found, list):
        return Pending(finish, found, group.heartbeat, buffers=start, waiter=group.waiter)
    return Pending(finish, [found], group.heartbeat, buffers=start)


def _pairwise(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group, name: str) -> Pending[Tensor]:
    """Rows between pairs of ranks, only where there are any."""
    check_collective(group, f"{name} of rows of {x.dtype} {tuple(x.shape[1:])}", None, (list(sent), list(received)))
    x = x.detach().contiguous()
    if group.size == 1:
        return Pending(lambda: x)
    arrived = x.new_empty(sum(received), *x.shape[1:])
    return _under_way(group, lambda: arrived, lambda: _sent_and_received(_cut(x, sent), _cut(arrived, received), group))


def _sent_and_received(pieces: Sequence[Tensor], wanted: Sequence[Tensor], group: Group) -> list[Any]:
    """The works of a piece on its way to each rank, and of each rank's into its place.

    Receives come first: Gloo tells the sender of each, on the connection that the rows of this rank are to take. Were
    they sent before it (as Gloo's own all-to-all does), the two directions could pass one after the other.
    """
    wanted[group.index].copy_(pieces[group.index])
    others = [(group.index + step) % group.size for step in range(1, group.size)]
    if pieces[0].is_cuda:
        pairs = [
            dist.P2POp(dist.irecv, wanted[at], group.ranks[at], group.process_group)
            for at in others
            if wanted[at].numel()
        ]
        pairs += [
            dist.P2POp(dist.isend, pieces[at], group.ranks[at], group.process_group)
            for at in others
            if pieces[at].numel()
        ]
        return dist.batch_isend_irecv(pairs) if pairs else []
    works = [group.receive(at, wanted[at]) for at in reversed(others) if wanted[at].numel()]
    works += [group.send(at, pieces[at]) for at in others if pieces[at].numel()]
    if group.waiter is not None:
        small = sum(one.nbytes for one in (*pieces, *wanted)) <= RETAINED_WORK_BYTES
        group.waiter.retained_works = works if small else []
    return works


def _sum_of_all(x: Tensor, group: Group) -> Pending[Tensor]:
    """Every rank gets what all have, and sums it in the order of ranks."""
    total = x.detach()
    parts = list(total.new_empty(group.size, *x.shape))

    def summed() -> Tensor:
        total.copy_(parts[0])
        for part in parts[1:]:
            total.add_(part)
        return x

    return _under_way(group, summed, lambda: _sent_and_received([total] * group.size, parts, group))


def _cut(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [x[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]


def _reordered(x: Tensor, counts: Sequence[int], shape: tuple[int, int]) -> Tensor:
    """Pieces of these lengths, laid out as rows and columns, column by column."""
    pieces = x.split(list(counts))
    return torch.cat([pieces[row * shape[1] + column] for column in range(shape[1]) for row in range(shape[0])])


def check_collective(
    group: Group, name: str, x: Tensor | None = None, splits: tuple[list[int], list[int]] | None = None
) -> None:
    """Whether all ranks are about to do this, and each expects from every other what that sends."""
    group.check_open()
    if not group.check or group.size == 1:
        return
    mine = f"{name} as call {next(group.call_counter)}" + ("" if x is None else f" of {x.dtype} {tuple(x.shape)}")
    try:
        said = all_gather_json((mine, splits), group.size, group.process_group)
    except RuntimeError as error:
        raise explain_comm_error(error, group.heartbeat) from error
    if len({what for what, _ in said}) > 1:
        told = "; ".join(f"rank {rank}: {what}" for rank, (what, _) in zip(group.ranks, said, strict=True))
        raise CollectiveMismatch(f"the ranks of lane {group.lane} are about to do different things: {told}")
    for source, target in product(range(group.size), repeat=2) if splits else ():
        sent, expected = said[source][1][0][target], said[target][1][1][source]
        if sent != expected:
            names = f"rank {group.ranks[source]} sends {sent} rows to rank {group.ranks[target]}"
            raise CollectiveMismatch(f"{mine} on lane {group.lane}: {names}, which expects {expected}")


def _in_one_piece(x: Tensor, name: str) -> None:
    if not x.is_contiguous():
        raise UserError(f"{name} in place of a tensor with strides {x.stride()}; wanted one in one piece")


def _whole(x: Tensor, sizes: Sequence[int], name: str) -> None:
    if sum(sizes) != len(x):
        raise UserError(f"{name} of {len(x)} rows in pieces of {list(sizes)}")


def _own(x: Tensor, sizes: Sequence[int], group: Group, name: str) -> None:
    if len(sizes) != group.size or sizes[group.index] != len(x):
        raise UserError(f"{name} of {len(x)} rows by member {group.index} of {group.size}; sizes are {list(sizes)}")
