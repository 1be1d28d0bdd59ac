"""Rival policies of copies for benchmarks/moe.py: how many rows of each expert every rank computes, from their counts.

Each returns what planner/experts.py `decide` returns: rows by rank and expert, or None for no copies. They are written
from the published descriptions, and run inside our dispatch: an expert that a rank computes and does not own is copied
for one iteration.

Shape legend: R ranks, E experts; P physical experts: each expert and its replicas.
"""

import math

import numpy as np

from shardwright.spec.expert_rows import IntArray, owners_of

LLEP_THRESHOLD, LLEP_CAPACITY, LLEP_ROWS = 1.3, 1.1, 1024  # the defaults of its released code


def eplb(chosen_RE: IntArray, previous_RE: IntArray, spare: int = 1) -> IntArray:
    """DeepSeek's EPLB: a placement from the counts of the previous iteration, with `spare` replicas a rank.

    Its packs have no order: each becomes the rank that already owns most of its experts, which saves copies.
    """
    num_ranks, num_experts = chosen_RE.shape
    replicas_E = _replicate(previous_RE.sum(0), num_ranks * spare)
    packs = _pack(previous_RE.sum(0) / replicas_E, replicas_E, num_ranks)
    computed_RE = np.zeros_like(chosen_RE)
    given_E = np.zeros(num_experts, np.int64)  # replicas that have their rows
    for rank, experts in enumerate(_place(packs, owners_of(num_experts, num_ranks))):
        for expert in experts:
            rows, extra = divmod(int(chosen_RE[:, expert].sum()), int(replicas_E[expert]))
            computed_RE[rank, expert] += rows + (given_E[expert] < extra)
            given_E[expert] += 1
    return computed_RE


def _replicate(loads_E: IntArray, num_spare: int) -> IntArray:
    """Replicas of each expert: one more for the expert with most rows a replica, `num_spare` times."""
    replicas_E = np.ones(len(loads_E), np.int64)
    for _ in range(num_spare):
        replicas_E[np.argmax(loads_E / replicas_E)] += 1
    return replicas_E


def _pack(weights_E: np.ndarray, replicas_E: IntArray, num_packs: int) -> list[list[int]]:
    """As many physical experts in every pack, the heaviest first, each into the lightest pack that has room."""
    experts_P = np.repeat(np.arange(len(replicas_E)), replicas_E)
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    loads, size = [0.0] * num_packs, len(experts_P) // num_packs
    for expert in experts_P[np.argsort(-weights_E[experts_P], kind="stable")].tolist():
        pack = min((p for p in range(num_packs) if len(packs[p]) < size), key=lambda p: loads[p])
        packs[pack].append(expert)
        loads[pack] += float(weights_E[expert])
    return packs


def _place(packs: list[list[int]], owners_E: IntArray) -> list[list[int]]:
    """The packs by rank: pairs of a pack and a rank in descending order of the pack's experts that the rank owns."""
    num = len(packs)
    shared = [[len({e for e in pack if owners_E[e] == rank}) for rank in range(num)] for pack in packs]
    by_rank: dict[int, list[int]] = {}
    placed = set[int]()
    for pack, rank in sorted(np.ndindex(num, num), key=lambda pair: -shared[pair[0]][pair[1]]):
        if pack not in placed and rank not in by_rank:
            by_rank[rank] = packs[pack]
            placed.add(pack)
    return [by_rank[rank] for rank in range(num)]


def llep(chosen_RE: IntArray) -> IntArray | None:
    """Least-loaded expert parallelism (2601.17111): above a threshold of max / mean, spill rows with weights.

    Experts in descending order of rows (LPT). The owner keeps what fits beside its experts still to come; the rest goes
    to the least loaded ranks, in parts of at least `LLEP_ROWS`, and stays with the owner where parts are smaller.
    """
    num_ranks, num_experts = chosen_RE.shape
    owners_E, totals_E = owners_of(num_experts, num_ranks), chosen_RE.sum(0)
    loads_R = np.bincount(owners_E, totals_E, num_ranks).astype(np.int64)  # assigned, or still to come on the owner
    if loads_R.max(initial=0) <= LLEP_THRESHOLD * loads_R.mean():
        return None
    limit = int(LLEP_CAPACITY * loads_R.mean())
    computed_RE = np.zeros_like(chosen_RE)
    for expert in np.argsort(-totals_E, kind="stable").tolist():
        owner, rest = int(owners_E[expert]), int(totals_E[expert])
        spill = min(rest, int(loads_R[owner]) - limit)
        while spill >= LLEP_ROWS:
            others_R = np.where(np.arange(num_ranks) == owner, np.iinfo(np.int64).max, loads_R)
            target = int(others_R.argmin())
            part = min(spill, limit - int(loads_R[target]))
            if part < LLEP_ROWS:
                break
            computed_RE[target, expert] += part
            loads_R[target] += part
            loads_R[owner] -= part
            spill, rest = spill - part, rest - part
        computed_RE[owner, expert] += rest
    return computed_RE


def quota(chosen_RE: IntArray) -> IntArray:
    """As UltraEP (2606.04101): each rank's quota is the mean of the exact counts, rounded up.

    Ranks above it, the most loaded first, give rows of their most popular experts to the rank with most room.
    """
    num_ranks, num_experts = chosen_RE.shape
    owners_E, totals_E = owners_of(num_experts, num_ranks), chosen_RE.sum(0)
    computed_RE = np.where(np.arange(num_ranks)[:, None] == owners_E, totals_E, 0)
    loads_R = computed_RE.sum(1)
    room_R = math.ceil(totals_E.sum() / num_ranks) - loads_R
    for giver in np.argsort(-loads_R, kind="stable").tolist():
        for expert in sorted(np.flatnonzero(owners_E == giver).tolist(), key=lambda e: -totals_E[e]):
            while room_R[giver] < 0 < computed_RE[giver, expert]:
                taker = int(room_R.argmax())
                rows = min(-room_R[giver], room_R[taker], computed_RE[giver, expert])
                computed_RE[[giver, taker], expert] += (-rows, rows)
                room_R[[giver, taker]] += (rows, -rows)
    return computed_RE
