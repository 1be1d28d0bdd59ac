"""All-gather of small values as JSON, because torch's object collectives unpickle received data."""

import json
from typing import Any

import torch
import torch.distributed as dist


def all_gather_json(value: Any, size: int, group: Any) -> list[Any]:
    """All-gather a JSON value over a process group of `size` ranks, in rank order; tuples become lists.

    Blocking. Two all-gathers over the group: lengths, then bytes, padded to the longest.
    """
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(encoded)], device=device), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(encoded)] = encoded
    parts = [torch.zeros_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    values = zip(parts, lengths, strict=True)
    return [json.loads(bytes(part[: int(length)].tolist())) for part, length in values]
