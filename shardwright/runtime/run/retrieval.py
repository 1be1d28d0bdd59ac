"""Recall@k and NDCG@k of two towers: how many of a user's held-out positives are among its k best items.

Phases: each rank reads its share of the held-out and of the training samples, once per run, and all-gathers the ids of
items and the positives; each evaluation then computes the vectors of items and users with the tables and towers of all
ranks (`Job.evaluate`), all-gathers them, and each rank ranks the positives of its blocks of users. A rank holds the
vectors of all items and of the users with held-out positives, 24 bytes per item and per positive of these users, and a
block of scores. All collectives are all-gathers on the first lane.

Shape legend: S samples, U users, N items, P positives, X excluded pairs, D columns of a vector.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shardwright.data.loading.loader import Loader
from shardwright.data.sources.source import NumpyBatch, Source, make_order
from shardwright.errors import UserError
from shardwright.layers.in_batch_softmax import ITEM, USER
from shardwright.models.two_tower import TwoTower
from shardwright.runtime.job import Job
from shardwright.runtime.rank_group import RankGroup

CUTOFFS = (10, 100)
SAMPLES_AT_ONCE = 1 << 16  # read at a time
SCORES_AT_ONCE = 1 << 24  # of users and items, held at a time


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Samples of a source, by index, in this order, without weights: those of a batch may all be 0."""

    source: Source
    indices: np.ndarray

    @property
    def size(self) -> int:
        return len(self.indices)

    def take(self, indices: np.ndarray) -> NumpyBatch:
        return replace(self.source.take(self.indices[indices]), weights=None)


@dataclass(frozen=True, slots=True, eq=False)
class ItemList:
    """The distinct items of a source and of held-out samples, and the first sample of each."""

    ids_N: np.ndarray  # ascending
    selections: tuple[Selection, ...]  # one sample of each item
    order_N: np.ndarray  # positions of `ids_N` among the samples of the selections


@dataclass(frozen=True, slots=True, eq=False)
class Questions:
    """Held-out positives, and what is needed to rank them. Pairs are (2, any): positions of users and of items."""

    items: ItemList
    users: Selection  # the first held-out positive of each user
    positives_2P: np.ndarray  # ordered by user
    excluded_2X: np.ndarray  # positives of the training samples, which are no candidates


class RetrievalMeter:
    """Computes the metrics of a run's two-tower model; no metrics for other models and for sources without an end."""

    def __init__(self, job: Job, source: Source, batch_size: int) -> None:
        """`source`: of the training samples; `batch_size`: of evaluations, over all ranks."""
        self._job, self._source, self._batch_size = job, source, batch_size
        self._ranks = RankGroup(job.mesh)
        self._read_questions: tuple[str, Questions | None] = ("", None)  # of the last held-out samples, by their repr

    def scores(self, held_out: Source) -> dict[str, float]:
        """The metrics on held-out samples; none without an item or a positive to rank. All ranks call it."""
        if not isinstance(self._job.model, TwoTower) or self._source.size is None or held_out.size is None:
            return {}
        if self._read_questions[0] != repr(held_out):
            self._read_questions = repr(held_out), read_questions(self._job, self._source, held_out, self._ranks)
        questions = self._read_questions[1]
        if questions is None:
            return {}
        items_ND = compute_item_vectors(self._job, questions.items, self._batch_size)
        users_UD = compute_vectors(self._job, questions.users, self._batch_size, USER)
        places_P = rank_positives(users_UD, items_ND, questions.positives_2P, questions.excluded_2X, self._ranks)
        return ranking_metrics(questions.positives_2P[0], places_P)


def read_questions(job: Job, source: Source, held_out: Source, ranks: RankGroup) -> Questions | None:
    """Read the items, and the positives of users that have held-out ones; None if there is none to rank.

    Samples whose user or item is missing or has no row of its own are left out, and so are held-out positives that are
    training positives of the same user. All ranks call it.
    """
    reader = SampleReader(job.model, getattr(source, "unknown_ids", ()), ranks)
    asked = reader.read(held_out)
    users_U, first_U, users_P = np.unique(asked.pairs_P3[:, 0], return_index=True, return_inverse=True)
    trained = reader.read(source, users_U)
    items = join_items((source, trained), (held_out, asked))
    num_items = len(items.ids_N)

    def make_keys(users: np.ndarray, item_ids: np.ndarray) -> np.ndarray:
        return np.unique(users * num_items + np.searchsorted(items.ids_N, item_ids))

    keys_P = make_keys(users_P, asked.pairs_P3[:, 1])
    keys_X = make_keys(np.searchsorted(users_U, trained.pairs_P3[:, 0]), trained.pairs_P3[:, 1])
    keys_P = np.setdiff1d(keys_P, keys_X, assume_unique=True)
    if not len(keys_P):
        return None
    users = Selection(held_out, asked.pairs_P3[first_U, 2])
    return Questions(items, users, np.stack(np.divmod(keys_P, num_items)), np.stack(np.divmod(keys_X, num_items)))


@dataclass(frozen=True, slots=True, eq=False)
class SampleList:
    """What a source has, in order of its samples."""

    items_N2: np.ndarray  # id and first sample of each distinct item, by id
    pairs_P3: np.ndarray  # user, item and sample of each positive


@dataclass(frozen=True, slots=True, eq=False)
class SampleReader:
    """Lists the items and positives of a source, each rank from its share of the samples."""

    model: TwoTower
    unknown_ids: Sequence[int]  # ids that several users or items share
    ranks: RankGroup

    def read(self, source: Source, users: np.ndarray | None = None) -> SampleList:
        """List the items and the positives, with `users` only of these. All ranks call it."""
        items_N2, pairs = np.empty((0, 2), np.int64), [np.empty((0, 3), np.int64)]
        for samples_S in self._shares(source.size or 0):
            batch = source.take(samples_S)
            items_S, users_S = single_ids(batch, self.model.item), single_ids(batch, self.model.user)
            is_known_S = ~np.isin(items_S, self.unknown_ids)
            items_N2 = _first_of_each(np.concatenate([items_N2, np.stack([items_S, samples_S], 1)[is_known_S]]))
            is_kept_S = is_known_S & (positive_weights(batch, self.model.loss.label) > 0)
            is_kept_S &= ~np.isin(users_S, self.unknown_ids) if users is None else np.isin(users_S, users)
            pairs.append(np.stack([users_S, items_S, samples_S], 1)[is_kept_S])
        items, positives = (self.ranks.concat(torch.from_numpy(x)).numpy() for x in (items_N2, np.concatenate(pairs)))
        return SampleList(_first_of_each(items), positives)

    def _shares(self, size: int) -> Iterator[np.ndarray]:
        """The samples of this rank, consecutive ones, in parts."""
        start, end = (size * rank // self.ranks.size for rank in (self.ranks.rank, self.ranks.rank + 1))
        for lo in range(start, end, SAMPLES_AT_ONCE):
            yield np.arange(lo, min(lo + SAMPLES_AT_ONCE, end))


def single_ids(batch: NumpyBatch, feature: str) -> np.ndarray:
    """The ids of a feature that has one per sample."""
    index = batch.features.index(feature)
    if not (batch.lengths[index] == 1).all():
        raise UserError(f'feature "{feature}" has samples with none or several ids; wanted one id per sample')
    start = int(batch.lengths[:index].sum())
    return batch.values[start : start + batch.lengths.shape[1]].astype(np.int64)


def positive_weights(batch: NumpyBatch, label: str) -> np.ndarray:
    """The weights of samples, 0 of those that are no positives."""
    return batch.labels[label] if batch.weights is None else batch.labels[label] * batch.weights


def _first_of_each(items_N2: np.ndarray) -> np.ndarray:
    """The first row of each distinct item, by id."""
    return items_N2[np.unique(items_N2[:, 0], return_index=True)[1]]


def join_items(*lists: tuple[Source, SampleList]) -> ItemList:
    """The distinct items of several sources, each from the first source that has it."""
    ids, selections = np.empty(0, np.int64), []
    for source, samples in lists:
        new_N2 = samples.items_N2[~np.isin(samples.items_N2[:, 0], ids)]
        ids = np.concatenate([ids, new_N2[:, 0]])
        selections += [Selection(source, new_N2[:, 1])] if len(new_N2) else []
    order = np.argsort(ids)
    return ItemList(ids[order], tuple(selections), order)


def compute_item_vectors(job: Job, items: ItemList, batch_size: int) -> Tensor:
    """(N, D) the vectors of all items, by id. All ranks call it."""
    vectors = [compute_vectors(job, selection, batch_size, ITEM) for selection in items.selections]
    return torch.cat(vectors)[torch.from_numpy(items.order_N)]


def compute_vectors(job: Job, selection: Selection, batch_size: int, side: int) -> Tensor:
    """(S, D) the vectors of users or items of samples, computed and all-gathered by all ranks."""
    shard = job.plan.position(job.mesh.rank, job.plan.sample_axes)
    with closing(Loader(selection, batch_size=batch_size, shuffle=False, shard=shard)) as loader:
        vectors = torch.cat([output.logits[:, side].cpu() for output in job.evaluate(loader)])
    order = make_order(selection, batch_size, 0, False, shard)
    samples = np.concatenate([order.indices(0, batch) for batch in range(order.num_batches or 0)])
    ranks = RankGroup(job.mesh)
    gathered_S, gathered_SD = ranks.concat(torch.from_numpy(samples)), ranks.concat(vectors)
    return torch.empty_like(gathered_SD[: selection.size]).index_copy_(0, gathered_S, gathered_SD)


def rank_positives(
    users_UD: Tensor, items_ND: Tensor, positives_2P: np.ndarray, excluded_2X: np.ndarray, ranks: RankGroup
) -> np.ndarray:
    """(P,) how many candidates come before each positive: those with a higher score, or the same and a lower position.

    Both pairs are ordered by user. Blocks of users are the same for any number of ranks, so that scores are. All ranks
    call it.
    """
    step = max(1, SCORES_AT_ONCE // len(items_ND))
    places = []
    for start in range(step * ranks.rank, len(users_UD), step * ranks.size):
        block = slice(start, start + step)
        scores_UN = users_UD[block] @ items_ND.t()
        (users_X, items_X), _ = _pairs_of(excluded_2X, start, step)
        scores_UN[users_X, items_X] = -torch.inf
        (users_P, items_P), numbers_P = _pairs_of(positives_2P, start, step)
        places.append(torch.stack([numbers_P, _count_before(scores_UN, users_P, items_P)], 1))
    gathered_P2 = ranks.concat(torch.cat(places) if places else torch.empty(0, 2, dtype=torch.int64))
    return gathered_P2[gathered_P2[:, 0].argsort(), 1].numpy()


def _pairs_of(pairs_2P: np.ndarray, start: int, num: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The pairs of `num` users from `start` on, with users counted from there; and the pairs' numbers."""
    lo, hi = np.searchsorted(pairs_2P[0], (start, start + num))
    users, items = torch.from_numpy(pairs_2P[:, lo:hi])
    return (users - start, items), torch.arange(int(lo), int(hi))


def _count_before(scores_UN: Tensor, users_P: Tensor, items_P: Tensor) -> Tensor:
    """(P,) the number of items that come before each pair's item among those of its user."""
    positions_N, counts = torch.arange(scores_UN.shape[1]), [torch.empty(0, dtype=torch.int64)]
    step = max(1, SCORES_AT_ONCE // scores_UN.shape[1])
    for users, items in zip(users_P.split(step), items_P.split(step), strict=True):
        others_PN, own_P1 = scores_UN[users], scores_UN[users, items].unsqueeze(1)
        is_before_PN = (others_PN > own_P1) | ((others_PN == own_P1) & (positions_N < items.unsqueeze(1)))
        counts.append(is_before_PN.sum(1))
    return torch.cat(counts)


def ranking_metrics(users_P: np.ndarray, places_P: np.ndarray) -> dict[str, float]:
    """Recall@k and NDCG@k, means over users. `places_P`: number of candidates before each positive of a user.

    Recall@k: share of a user's positives that are among the first k. NDCG@k: the sum of 1 / log2(place + 2) of these,
    over the largest possible sum.
    """
    _, user_of_P, num_positives_U = np.unique(users_P, return_inverse=True, return_counts=True)
    best_P = np.concatenate([[0.0], (1 / np.log2(np.arange(max(CUTOFFS)) + 2)).cumsum()])
    metrics = {}
    for cutoff in CUTOFFS:
        is_hit_P = places_P < cutoff
        gains_P = is_hit_P / np.log2(places_P + 2.0)
        metrics[f"recall@{cutoff}"] = float((np.bincount(user_of_P, is_hit_P) / num_positives_U).mean())
        largest_U = best_P[np.minimum(num_positives_U, cutoff)]
        metrics[f"ndcg@{cutoff}"] = float((np.bincount(user_of_P, gains_P) / largest_U).mean())
    return metrics
