"""Small values between all ranks, as bytes of JSON: torch's object collectives unpickle what arrives."""

import json
from typing import Any

import torch
import torch.distributed as dist


def all_gather_json(value: Any, size: int, group: Any) -> list[Any]:
    """The JSON value of each of the `size` members of torch's process group, in their order; tuples become lists.

    Blocking. Two all-gathers over the group: lengths, then bytes, padded to the longest.
    """
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(mine)], device=device), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(mine)] = mine
    gathered = [torch.zeros_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded, group=group)
    found = zip(gathered, lengths, strict=True)
    return [json.loads(bytes(part[: int(length)].tolist())) for part, length in found]
