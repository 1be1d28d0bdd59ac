"""Asynchronous collectives over the ranks of a `Group`, on its lane; each returns a Pending.

Rows are split along the first dimension; splits and sizes are row counts by rank of the group and may be zero. A
reduce-scatter is an all-to-all, then a sum on each rank in rank order: Gloo's own runs one all-reduce per rank. Ranks
of one host exchange rows through shared memory (shared_memory.py); in a group inside one host all-gathers and small
all-reduces use it too. All-reduces over several hosts: hierarchical.py.

Shape legend: R ranks, K segments per rank, H hosts, L local ranks of a host, P local ranks as senders.
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
from shardwright.spec.wire import DIRECT_REDUCE_BYTES

T = TypeVar("T")
PLAIN = Plain()
SUMMABLE_DTYPES = frozenset((torch.float32, torch.float64, torch.int32, torch.int64))
CROSS_HOST_REDUCE_BYTES = 1 << 17  # DIRECT_REDUCE_BYTES over several hosts; above, only the sums of each host cross


class CollectiveMismatch(UserError):
    """The ranks of a group issue different collectives, or splits that do not match."""


def all_reduce(x: Tensor, group: Group) -> Pending[Tensor]:
    """All-reduce (sum) over the group, on its lane; in place: `wait()` returns `x`."""
    _check_contiguous(x, "all_reduce")
    check_collective(group, "all_reduce", x)
    if x.dtype in SUMMABLE_DTYPES and (group.shares_memory or group.hierarchical_groups):
        if x.nbytes * (group.size - 1) <= (DIRECT_REDUCE_BYTES if group.shares_memory else CROSS_HOST_REDUCE_BYTES):
            return _direct_all_reduce(x, group)
        if group.hierarchical_groups:
            return hierarchical_all_reduce(x, group.next_hierarchical_group())
    group.sent.add_to_next(group.lane, group.ranks, group.index, 2 * x.nbytes * (group.size - 1) // group.size)
    return issue_works(group, lambda: x, lambda: group.all_reduce(x))


def all_reduce_bf16(x: Tensor, group: Group, residual: Tensor | None = None) -> Pending[Tensor]:
    """All-reduce (sum) over the group, on its lane, sent in bf16; in place: `wait()` returns `x`.

    Numbers are summed in the dtype of `x`. Each is rounded twice, before it is sent and after it is summed; over
    several hosts, above CROSS_HOST_REDUCE_BYTES, only what crosses hosts is rounded, with two hosts once. With
    `residual` (like `x`, initially zero) this rank's rounding errors are added to its next sum (error feedback), so
    that none accumulates over the steps. An all-to-all is in flight on return and `wait()` issues the all-gather after
    it, so all ranks must wait for several of these all-reduces in the same order.
    """
    first_phase = two_phase_all_reduce_bf16(x, group, residual)
    return Pending(lambda: first_phase.wait().wait())


def two_phase_all_reduce_bf16(x: Tensor, group: Group, residual: Tensor | None = None) -> Pending[Pending[Tensor]]:
    """`all_reduce_bf16` in two phases: `wait()` issues the second and returns its Pending."""
    _check_contiguous(x, "all_reduce_bf16")
    if not x.is_floating_point():
        raise UserError(f"all_reduce_bf16 rounds to bf16 and would change {x.dtype}; use all_reduce")
    if residual is not None and (
        residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous()
    ):
        raise UserError(
            f"all_reduce_bf16 of {x.dtype} {tuple(x.shape)} has the residual {residual.dtype} {tuple(residual.shape)}; "
            "wanted a contiguous tensor of the same dtype and shape"
        )
    flat = x.view(-1)
    if group.size == 1:
        return Pending(lambda: Pending(lambda: x))
    if residual is not None:
        flat += residual.view(-1)
    if group.hierarchical_groups and x.nbytes * (group.size - 1) > CROSS_HOST_REDUCE_BYTES:
        check_collective(group, "all_reduce_bf16", x)
        pending = hierarchical_all_reduce(
            x,
            group.next_hierarchical_group(),
            bf16_across_hosts=True,
            residual=None if residual is None else residual.zero_(),
        )
        return Pending(lambda: pending)
    wire = flat.bfloat16()
    sizes = [len(flat) * (member + 1) // group.size - len(flat) * member // group.size for member in range(group.size)]
    start, own_size = sum(sizes[: group.index]), sizes[group.index]
    parts = all_to_all(wire, sizes, [own_size] * group.size, group)

    def sum_and_gather() -> Pending[Tensor]:
        total = parts.wait().view(group.size, own_size).to(x.dtype).sum(0)
        total_bf16 = total.bfloat16()
        if residual is not None:
            residual.view(-1).copy_(flat - wire)
            residual.view(-1)[start : start + own_size] += total - total_bf16
            residual.nan_to_num_(0.0, 0.0, 0.0)
        return all_gather(total_bf16, sizes, group).then(lambda reduced: flat.copy_(reduced).view_as(x))

    return Pending(sum_and_gather)


def broadcast(x: Tensor, source: int, group: Group) -> Pending[Tensor]:
    """Broadcast `x` of member `source` over the group, on its lane; in place: `wait()` returns `x`."""
    _check_contiguous(x, "broadcast")
    check_collective(group, f"broadcast from {source}", x)
    return issue_works(group, lambda: x, lambda: group.broadcast(x, source))


def all_gather(x: Tensor, sizes: Sequence[int], group: Group) -> Pending[Tensor]:
    """All-gather rows over the group, on its lane; `wait()` returns a new tensor, in rank order."""
    _check_own_rows(x, sizes, group, "all_gather")
    check_collective(group, f"all_gather of {list(sizes)} rows of {x.dtype} {tuple(x.shape[1:])}")
    if group.shares_memory:
        x = x.detach().contiguous()
        out = x.new_empty(sum(sizes), *x.shape[1:])
        inputs, outputs = [x] * group.size, _split_rows(out, sizes)
        return issue_works(group, lambda: out, lambda: _send_and_receive(inputs, outputs, group))
    longest = max(sizes)
    padded = x.new_zeros(longest, *x.shape[1:])
    padded[: len(x)] = x
    parts = [torch.empty_like(padded) for _ in range(group.size)] if group.size > 1 else [padded]
    group.sent.add_to_next(group.lane, group.ranks, group.index, padded.nbytes * (group.size - 1))
    return issue_works(
        group,
        lambda: torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]),
        lambda: group.all_gather(parts, padded),
    )


def all_gather_into(tensors: Sequence[Tensor], group: Group) -> Pending[Sequence[Tensor]]:
    """All-gather rank r's `tensors[r]` over the group, on its lane, in place; `wait()` returns `tensors`."""
    inputs = [tensors[group.index]] * group.size
    return issue_works(group, lambda: tensors, lambda: _send_and_receive(inputs, tensors, group))


def reduce_scatter(x: Tensor, sizes: Sequence[int], group: Group) -> Pending[Tensor]:
    """Reduce-scatter (sum) over the group, on its lane; `wait()` returns this rank's rows of the sum.

    Not in place. One all-to-all; `wait()` adds the rows in rank order. `sizes`: rows for each rank.
    """
    own_rows = sizes[group.index]
    pending = all_to_all(x, sizes, [own_rows] * group.size, group)

    def sum_parts() -> Tensor:
        rows = pending.wait()
        total = rows[:own_rows].clone()
        for member in range(1, group.size if own_rows else 0):
            total += rows[member * own_rows : (member + 1) * own_rows]
        return total

    return Pending(sum_parts)


def all_to_all(
    x: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], group: Group, codec: Codec = PLAIN
) -> Pending[Tensor]:
    """All-to-all of rows over the group, on its lane; `wait()` returns the received rows, in rank order.

    Not in place; in a group of one rank `wait()` returns `x` itself. The codec encodes the rows that are sent.
    """
    if len(input_splits) != group.size or len(output_splits) != group.size or sum(input_splits) != len(x):
        raise UserError(
            f"all_to_all of {len(x)} rows over {group.size} ranks: input splits are {list(input_splits)}, output "
            f"splits {list(output_splits)}; wanted one per rank, and input splits that sum to {len(x)}"
        )
    if input_splits[group.index] != output_splits[group.index]:
        raise UserError(
            f"all_to_all: rank {group.index} sends itself {input_splits[group.index]} rows and expects "
            f"{output_splits[group.index]}"
        )
    if not isinstance(codec, Plain) and not x.is_floating_point():
        raise UserError(f"the codec {type(codec).__name__} would change {x.dtype}; use Plain for all but floats")
    if group.size == 1:
        return Pending(lambda: x)
    wire = codec.encode(x.detach()).contiguous()
    out = wire.new_empty(sum(output_splits), *wire.shape[1:])
    check_collective(
        group, f"all_to_all of rows of {x.dtype} {tuple(x.shape[1:])}", None, (list(input_splits), list(output_splits))
    )
    return issue_works(
        group,
        lambda: codec.decode(out, x.dtype),
        lambda: _send_and_receive(_split_rows(wire, input_splits), _split_rows(out, output_splits), group),
    )


def all_to_all_rows(x: Tensor, group: Group) -> Pending[Tensor]:
    """All-to-all of one row per rank over the group, on its lane; `wait()` returns the received rows.
    Not in place. For headers and lengths: `output_lengths_RK = all_to_all_rows(input_lengths_RK, group).wait()`."""
    return all_to_all(x, [1] * group.size, [1] * group.size, group)


def all_to_all_jagged(
    values: Tensor, input_lengths_RK: Tensor, output_lengths_RK: Tensor, group: Group
) -> Pending[Tensor]:
    """All-to-all of K segments per rank over the group, on its lane; `wait()` returns received values.
    Not in place. `output_lengths_RK`: lengths of the received segments, which `all_to_all_rows` exchanges first."""
    return all_to_all(values, input_lengths_RK.sum(1).tolist(), output_lengths_RK.sum(1).tolist(), group)


def one_to_many(x: Tensor, sizes: Sequence[int], source: int, group: Group) -> Pending[Tensor]:
    """Scatter rows of member `source` over the group, on its lane; `wait()` returns this rank's rows.
    Sends only where `sizes` is above zero; not in place. On other members `x` gives dtype and row shape."""
    if group.index == source:
        _check_total_rows(x, sizes, "one_to_many")
    input_splits = sizes if group.index == source else [0] * group.size
    output_splits = [sizes[group.index] if rank == source else 0 for rank in range(group.size)]
    return _exchange(x, input_splits, output_splits, group, f"one_to_many from {source}")


def many_to_one(x: Tensor, sizes: Sequence[int], target: int, group: Group) -> Pending[Tensor]:
    """Gather rows over the group at member `target`, on its lane; `wait()` returns all rows there.
    Only ranks with rows send; not in place. On other members `wait()` returns no rows."""
    _check_own_rows(x, sizes, group, "many_to_one")
    input_splits = [sizes[group.index] if rank == target else 0 for rank in range(group.size)]
    output_splits = sizes if group.index == target else [0] * group.size
    return _exchange(x, input_splits, output_splits, group, f"many_to_one to {target}")


def hierarchical_all_to_all(
    x: Tensor,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    intra_host: Group,
    inter_host: Group,
    codec: Codec = PLAIN,
) -> Pending[Tensor]:
    """All-to-all of rows over hosts x local ranks, with one message per pair of hosts and local index.

    First an all-gather of row counts and an all-to-all over `intra_host`, on its lane, bring each row to the local rank
    with its destination's local index; both end before this returns. Then an all-to-all over `inter_host`, on its lane,
    between ranks of one local index: `wait()` returns the received rows. Not in place. Ranks are numbered host by host.
    """
    num_hosts, num_local = inter_host.size, intra_host.size
    counts_HL = torch.tensor(input_splits).view(num_hosts, num_local)
    counts_PHL = all_gather(counts_HL.view(1, num_hosts, num_local), [1] * num_local, intra_host).wait()
    counts_PH = counts_PHL[:, :, intra_host.index]
    rows_by_index = _transpose_blocks(x, counts_HL.flatten().tolist(), (num_hosts, num_local))
    rows = all_to_all(rows_by_index, counts_HL.sum(0).tolist(), counts_PH.sum(1).tolist(), intra_host, codec).wait()
    rows_by_host = _transpose_blocks(rows, counts_PH.flatten().tolist(), (num_local, num_hosts))
    output_HL = torch.tensor(output_splits).view(num_hosts, num_local)
    return all_to_all(rows_by_host, counts_PH.sum(0).tolist(), output_HL.sum(1).tolist(), inter_host, codec)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, input_splits, output_splits, group, codecs):
        ctx.splits, ctx.group, ctx.codecs = (input_splits, output_splits), group, codecs
        return all_to_all(x, input_splits, output_splits, group, codecs[0]).wait()

    @staticmethod
    def backward(ctx, gradient):
        input_splits, output_splits = ctx.splits
        x_grad = _AllToAll.apply(gradient.contiguous(), output_splits, input_splits, ctx.group, ctx.codecs[::-1])
        return x_grad, None, None, None, None


def all_to_all_autograd(
    x: Tensor,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    group: Group,
    codecs: tuple[Codec, Codec] = (PLAIN, PLAIN),
) -> Tensor:
    """All-to-all of rows over the group, on its lane, with autograd; returns the received rows.

    Blocking, not in place. The backward pass is the all-to-all in the other direction. `codecs`: of rows, of gradients.
    """
    return _AllToAll.apply(x, tuple(input_splits), tuple(output_splits), group, codecs)  # pyright: ignore[reportReturnType]


def issue_works(group: Group, finish: Callable[[], T], start: Callable[[], Any]) -> Pending[T]:
    """Issue works with `start`; the Pending keeps `start`, and the buffers it refers to, until they end."""
    if group.size == 1:
        return Pending(finish)
    try:
        works = start()
    except RuntimeError as error:
        raise explain_comm_error(error, group.heartbeat) from error
    if isinstance(works, list):
        return Pending(finish, works, group.heartbeat, buffers=start, waiter=group.waiter)
    return Pending(finish, [works], group.heartbeat, buffers=start)


def _exchange(x: Tensor, send: Sequence[int], recv: Sequence[int], group: Group, name: str) -> Pending[Tensor]:
    """Exchange rows between ranks that have any; `send` and `recv`: row counts to and from each rank."""
    check_collective(group, f"{name} of rows of {x.dtype} {tuple(x.shape[1:])}", None, (list(send), list(recv)))
    x = x.detach().contiguous()
    if group.size == 1:
        return Pending(lambda: x)
    out = x.new_empty(sum(recv), *x.shape[1:])
    return issue_works(
        group, lambda: out, lambda: _send_and_receive(_split_rows(x, send), _split_rows(out, recv), group)
    )


def _send_and_receive(inputs: Sequence[Tensor], outputs: Sequence[Tensor], group: Group) -> list[Any]:
    """Send `inputs[r]` to each rank r and receive its rows into `outputs[r]`, on the group's lane.

    Receives are posted first: Gloo announces each to its sender, on the connection that carries this rank's rows. After
    the rows (as in Gloo's own all-to-all) the announcement could be so late that the two directions are serialized.
    """
    outputs[group.index].copy_(inputs[group.index])
    peers = [(group.index + step) % group.size for step in range(1, group.size)]
    if group.sends_from_device(inputs[0]):
        for peer in peers:
            group.sent.add(group.lane, group.ranks[peer], inputs[peer].nbytes)
        ops = [
            dist.P2POp(dist.irecv, outputs[peer], group.ranks[peer], group.process_group)
            for peer in peers
            if outputs[peer].numel()
        ]
        ops += [
            dist.P2POp(dist.isend, inputs[peer], group.ranks[peer], group.process_group)
            for peer in peers
            if inputs[peer].numel()
        ]
        return dist.batch_isend_irecv(ops) if ops else []
    works = [group.receive(peer, outputs[peer]) for peer in reversed(peers) if outputs[peer].numel()]
    works += [group.send(peer, inputs[peer]) for peer in peers if inputs[peer].numel()]
    if group.waiter is not None:
        is_small = sum(x.nbytes for x in (*inputs, *outputs)) <= RETAINED_WORK_BYTES
        group.waiter.retained_works = works if is_small else []
    return works


def _direct_all_reduce(x: Tensor, group: Group) -> Pending[Tensor]:
    """All-reduce in place: every rank receives the tensors of all ranks and adds them in rank order."""
    own = x.detach()
    parts = list(own.new_empty(group.size - 1, *x.shape))
    parts.insert(group.index, own)

    def sum_parts() -> Tensor:
        total = parts[0]
        for part in parts[1:]:
            total.add_(part)
        own.copy_(total)  # on the first rank they are the same
        return x

    return issue_works(group, sum_parts, lambda: _send_and_receive([own] * group.size, parts, group))


def _split_rows(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [x[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]


def _transpose_blocks(x: Tensor, counts: Sequence[int], shape: tuple[int, int]) -> Tensor:
    """Reorder blocks of `counts` rows: row-major to column-major order of a matrix of blocks of `shape`."""
    blocks = x.split(list(counts))
    return torch.cat([blocks[row * shape[1] + column] for column in range(shape[1]) for row in range(shape[0])])


def check_collective(
    group: Group, name: str, x: Tensor | None = None, splits: tuple[list[int], list[int]] | None = None
) -> None:
    """Fail if the group is closed; with `group.check`, all-gather the call and fail if ranks differ.

    `splits`: row counts that this rank sends to and receives from each rank; they must match, too. Blocking.
    """
    group.check_open()
    if not group.check or group.size == 1:
        return
    call = f"{name} as call {next(group.call_counter)}" + ("" if x is None else f" of {x.dtype} {tuple(x.shape)}")
    try:
        calls = all_gather_json((call, splits), group.size, group.process_group)
    except RuntimeError as error:
        raise explain_comm_error(error, group.heartbeat) from error
    if len({text for text, _ in calls}) > 1:
        listing = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in zip(group.ranks, calls, strict=True))
        raise CollectiveMismatch(f"the ranks of lane {group.lane} issue different collectives: {listing}")
    for source, target in product(range(group.size), repeat=2) if splits else ():
        num_sent, num_expected = calls[source][1][0][target], calls[target][1][1][source]
        if num_sent != num_expected:
            pair = f"rank {group.ranks[source]} sends {num_sent} rows to rank {group.ranks[target]}"
            raise CollectiveMismatch(f"{call} on lane {group.lane}: {pair}, which expects {num_expected}")


def _check_contiguous(x: Tensor, name: str) -> None:
    if not x.is_contiguous():
        raise UserError(f"{name} works in place: the tensor has strides {x.stride()}; wanted a contiguous one")


def _check_total_rows(x: Tensor, sizes: Sequence[int], name: str) -> None:
    if sum(sizes) != len(x):
        raise UserError(f"{name} of {len(x)} rows: sizes {list(sizes)} sum to {sum(sizes)}; wanted {len(x)}")


def _check_own_rows(x: Tensor, sizes: Sequence[int], group: Group, name: str) -> None:
    if len(sizes) != group.size or sizes[group.index] != len(x):
        raise UserError(
            f"{name} of {len(x)} rows on rank {group.index} of {group.size}: sizes {list(sizes)} must be rows by rank"
        )
