"""Sizes of the messages of a step: the planner predicts their time from them, the runtime packs messages with them."""

from collections.abc import Iterable

# The header of a lookup request, from every rank to every rank: number of samples, words of the message, weight of the
# samples, `max_replica_values`, number of ids with weights and without, stop signal of the sending rank (0: none). A
# model without tables sends the number of micro-batches that it announces in place of that of samples.
REQUEST_HEADER_NUMBERS = 7
REQUEST_HEADER_BYTES = 8 * REQUEST_HEADER_NUMBERS
ID_BYTES = 4  # of an id in a request
LENGTH_BYTES = 4  # of the length of a bag in a request
ROW_ID_BYTES = 8  # of a row id that replicas exchange
GRADIENT_BUCKET_BYTES = 1 << 20  # size of the buckets in which dense gradients are all-reduced
DIRECT_REDUCE_BYTES = 1 << 22  # up to this many received bytes, ranks of one host receive tensors whole and sum them
MAX_RECEIVED_BUCKETS = 4  # of gradients, at once, during the backward pass of a rank that is ahead of its host's others
EXPERT_PART_BYTES = 1 << 19  # of the parts in which gradients of a copied expert are handed on from rank to rank
MAX_UNNAMED_BUCKETS = 2  # with more, each is a stage of the plan, named after the block whose backward pass fills it


def gradient_buckets(block_bytes: Iterable[tuple[str, int]]) -> dict[str, tuple[str, ...]]:
    """The blocks of each bucket, by the last of them. `block_bytes`: of their parameters, in the order of backward."""
    buckets: dict[str, tuple[str, ...]] = {}
    names, bytes_ = (), 0
    for name, size in block_bytes:
        if size:
            names, bytes_ = (*names, name), bytes_ + size
        if bytes_ >= GRADIENT_BUCKET_BYTES:
            buckets[name], names, bytes_ = names, (), 0
    return buckets | ({names[-1]: names} if names else {})
