"""Quality of HET's models under bounded staleness: 8 workers simulated in one process, on synthetic clicks.

    python -m benchmarks.het_quality [--model MODEL ...] [--modes MODE ...] [--steps N] [--seeds N] [--rates F ...]
        [--write NAME]

A simulation: one process computes what 8 workers with 128 samples a step each would compute; nothing is sent. HET's
models (Wide & Deep, DeepFM, DCN, with narrower layers) train with SGD on 26 tables of 4,000 rows and 16 columns; a
tenth of the rows has nine tenths of the lookups. Clicks are drawn from known probabilities, whose AUC is `best_auc`.
All modes of a seed use the same weights and samples, and the gradient of each sample has the same rate:
    synchronous           the gradient of all workers' samples, applied to the tables at once
    bounded N             the rules of docs/staleness.md with pull and push of N; each worker owns an eighth of the rows
                          and has a copy of every other row. "bounded 0" trains 500 steps, as a check
    bounded batches N     the same, but a batch counts once, however often it uses the row
    HET's protocol N      Algorithms 1 to 3 of the paper with s = N, with caches that hold all rows. In a step all
                          workers check their rows, then evict, then fetch
    asynchronous          workers take turns. Each applies the gradient of its 128 samples alone; it was computed on
                          tables and dense weights without the last 7 turns, those of the other workers
    asynchronous, rate x8 the same with 8 times the rate: what one worker's mean gradient would get
Except in the asynchronous modes, dense gradients are averaged over the workers in each step. Metrics are those of the
owners' rows with all unpushed updates applied, as after a flush; training goes on without that flush.

A JSON line for each model, seed and mode: `auc` on 1,000,000 samples after training, `auc_change` from synchronous in
points (hundredths), the same along the training on the first 200,000 of these samples, by samples trained (`curve`),
and `missed`: how many reads of distinct rows missed 0, 1, 2 to 3, 4 to 7, ... updates. `largest_missed` above `bound`
(pull + 7 push) is an error. `sent` and `pushed`: of the rows that workers read and do not own, the percentage that an
owner sent and whose updates were pushed.

Shape legend: B samples, F features, N numeric features, R rows of a table, E rows of all tables, T tables, K values of
an id, P pairs of features, U distinct pairs of a worker and a row, W workers, D columns of a vector, C of a row.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import isfinite
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from benchmarks import results_file
from benchmarks.stale_workers import AsynchronousRows, BoundedRows, HetRows, Reads, SynchronousRows, find_reads
from shardwright.jagged import Batch, Jagged, Vectors
from shardwright.models.het import HetDCN, HetDeepFM, HetWideDeep
from shardwright.runtime.run.metrics import auc, log_loss

MODELS = {"het_wide_deep": HetWideDeep, "het_deepfm": HetDeepFM, "het_dcn": HetDCN}
MODES = (
    "synchronous",
    "bounded 0",
    "bounded 10",
    "bounded 100",
    "bounded 10000",
    "bounded batches 100",
    "HET's protocol 100",
    "asynchronous",
    "asynchronous, rate x8",
)
# By model, of rows and of dense weights.
RATES = {"het_wide_deep": (20.0, 0.2), "het_deepfm": (2.0, 0.04), "het_dcn": (10.0, 0.1)}
CHECK_STEPS = 500  # of "bounded 0"
TABLES, NUMBERS = 26, 13
EXPONENT = 1.25  # of the power law
DRAWS = 1 << 20  # equally likely draws of an id
BIAS, SPREAD = -1.6, 1.65  # of the logit of clicks: mean and standard deviation
VARIANCE_SHARES = {"first": 0.6, "linear": 0.07, "square": 0.08, "second": 0.25}
PAIRS, LATENT = 6, 4  # table 2k and table 2k + 1, for k below PAIRS, have products of LATENT values
SEED_STRIDE = 1_000_003  # between the seeds of the samples of two runs
CHUNK = 32  # steps whose samples are drawn at once
NUM_POINTS = 10  # of the curve
NO_IDS = Jagged((), torch.empty(0, dtype=torch.int64), torch.empty(0, 0, dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes of a run. `rate`: of rows and of dense weights, times the gradient of the mean loss of all samples."""

    model: str
    seed: int = 1
    steps: int = 20_000
    rows: int = 4_000  # of each table
    dim: int = 16
    hidden: int = 64
    num_workers: int = 8
    local_batch: int = 128
    test_samples: int = 1_000_000
    curve_samples: int = 200_000
    rate: tuple[float, float] = (10.0, 0.1)
    dtype: torch.dtype = torch.float32

    @property
    def num_rows(self) -> int:
        return TABLES * self.rows

    @property
    def columns(self) -> int:
        """Of a row: DeepFM also has a weight of each id."""
        return self.dim + (self.model == "het_deepfm")


class Samples(NamedTuple):
    """B samples with F = 26 ids, as rows of all tables one after another, and 13 numeric features."""

    rows_BF: Tensor
    numbers_BN: Tensor
    clicks_B: Tensor
    logits_B: Tensor  # of the true probabilities


class Clicks:
    """A stream of clicks whose probabilities are known. The logit is a sum of values of ids, of products of the values
    of two ids, and of linear and squared terms of the numeric features."""

    def __init__(self, rows: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        share_R = torch.arange(1, rows + 1, dtype=torch.float64) ** -EXPONENT
        share_R /= share_R.sum()
        draws = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
        self._row_of_draw = torch.searchsorted(share_R.cumsum(0), draws).clamp(max=rows - 1)
        values_TRK = torch.randn(TABLES, rows, 1 + LATENT, generator=generator, dtype=torch.float64)
        values_TRK -= (values_TRK * share_R[:, None]).sum(1, keepdim=True)
        values_TRK /= (values_TRK**2 * share_R[:, None]).sum(1, keepdim=True).sqrt()
        values_EK = values_TRK.flatten(0, 1).to(dtype)
        self._first_E, self._latent_EK = values_EK[:, 0].contiguous(), values_EK[:, 1:].contiguous()
        self._numeric_2N = functional.normalize(torch.randn(2, NUMBERS, generator=generator, dtype=torch.float64)).to(
            dtype
        )
        self._starts_F = torch.arange(TABLES) * rows
        self._dtype = dtype

    def draw(self, num: int, seed: int) -> Samples:
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randint(DRAWS, (num * TABLES,), generator=generator, dtype=torch.int32)
        rows_BF = self._row_of_draw.index_select(0, draws).view(num, TABLES) + self._starts_F
        numbers_BN = torch.randn(num, NUMBERS, generator=generator, dtype=self._dtype)
        logits_B = self._logits(rows_BF, numbers_BN)
        clicks_B = torch.rand(num, generator=generator) < torch.sigmoid(logits_B)
        return Samples(rows_BF, numbers_BN, clicks_B.to(self._dtype), logits_B)

    def _logits(self, rows_BF: Tensor, numbers_BN: Tensor) -> Tensor:
        latent_BPK = self._latent_EK.index_select(0, rows_BF[:, : 2 * PAIRS].flatten()).view(-1, PAIRS, 2, LATENT)
        linear_N, square_N = self._numeric_2N
        terms = {
            "first": self._first_E.index_select(0, rows_BF.flatten()).view_as(rows_BF).sum(1) * TABLES**-0.5,
            "linear": numbers_BN @ linear_N,
            "square": (numbers_BN**2 - 1) @ square_N * 2**-0.5,
            "second": latent_BPK.prod(2).flatten(1).sum(1) * (PAIRS * LATENT) ** -0.5,
        }
        scaled = [share**0.5 * terms[name] for name, share in VARIANCE_SHARES.items()]
        return BIAS + SPREAD * torch.stack(scaled).sum(0)


def training_samples(case: Case, clicks: Clicks) -> Iterator[Samples]:
    """The samples of each step, worker after worker."""
    size = case.num_workers * case.local_batch
    for first in range(0, case.steps, CHUNK):
        chunk = clicks.draw(size * CHUNK, SEED_STRIDE * case.seed + first)
        for parts in islice(zip(*(part.split(size) for part in chunk), strict=True), case.steps - first):
            yield Samples(*parts)


class ClickModel(nn.Module):
    """A dense model of HET over the vectors of samples, and where a row has them, the weights of their ids."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.dims = (case.dim,) * TABLES + (1,) * (case.columns - case.dim) * TABLES
        hidden = (case.hidden,) * (2 if case.model == "het_deepfm" else 3)
        self.dense = MODELS[case.model](self.dims, NUMBERS, hidden)

    def forward(self, rows_BFC: Tensor, numbers_BN: Tensor) -> Tensor:
        vectors_BFD, weights_BF1 = rows_BFC.tensor_split([self.dims[0]], dim=2)
        pooled = torch.cat([vectors_BFD.flatten(1), weights_BF1.flatten(1)], 1)
        names = tuple(map(str, range(len(self.dims))))
        return self.dense(Batch(NO_IDS, numbers_BN, {}), Vectors(names, self.dims, pooled, {}))


class SharedDense:
    """Dense weights of all workers, whose gradients are averaged in each step."""

    def __init__(self, model: ClickModel, rate: float) -> None:
        self.model, self.rate = model, rate
        self.optimizer = torch.optim.SGD(model.parameters(), rate)

    def train(self, rows_UC: Tensor, reads: Reads, samples: Samples) -> Tensor:
        """Train on the samples of all workers; returns the gradients of the rows."""
        rows_UC.requires_grad_()
        rows_BFC = rows_UC.index_select(0, reads.index_BF.flatten()).view(*reads.index_BF.shape, -1)
        logits_B = self.model(rows_BFC, samples.numbers_BN)
        functional.binary_cross_entropy_with_logits(logits_B, samples.clicks_B).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert rows_UC.grad is not None
        return rows_UC.grad


class AsynchronousDense(SharedDense):
    """Dense weights that workers update in turns; a worker has those after its turn in the step before."""

    def __init__(self, model: ClickModel, rate: float, num_workers: int) -> None:
        super().__init__(model, rate)
        self.num_workers = num_workers
        values = {name: value.detach() for name, value in model.named_parameters()}
        self.weights = {name: value.expand(num_workers, *value.shape).clone() for name, value in values.items()}

    def train(self, rows_UC: Tensor, reads: Reads, samples: Samples) -> Tensor:
        rows_UC.requires_grad_()
        index_WBF = reads.index_BF.unflatten(0, (self.num_workers, -1))
        rows_WBFC = rows_UC.index_select(0, index_WBF.flatten()).view(*index_WBF.shape, -1)
        weights = {name: value.requires_grad_() for name, value in self.weights.items()}

        def logits(weights: dict[str, Tensor], rows_BFC: Tensor, numbers_BN: Tensor) -> Tensor:
            return functional_call(self.model, weights, (rows_BFC, numbers_BN))

        logits_WB = vmap(logits)(weights, rows_WBFC, samples.numbers_BN.unflatten(0, index_WBF.shape[:2]))
        functional.binary_cross_entropy_with_logits(logits_WB.flatten(), samples.clicks_B).backward()
        with torch.no_grad():
            self.weights = {name: self._take_turns(value) for name, value in weights.items()}
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.weights[name][-1])
        assert rows_UC.grad is not None
        return rows_UC.grad

    def _take_turns(self, weights: Tensor) -> Tensor:
        """The weights after each worker's turn."""
        assert weights.grad is not None
        return weights[-1] - self.rate * weights.grad.cumsum(0)


def make_workers(mode: str, case: Case) -> tuple[SynchronousRows, SharedDense]:
    """Rows and dense weights of a mode, with the first values of the seed."""
    torch.manual_seed(case.seed)
    weight_EC = 0.01 * torch.randn(case.num_rows, case.columns, dtype=torch.float64).to(case.dtype)
    model = ClickModel(case).to(case.dtype)
    rate, dense_rate = case.rate
    name, _, number = mode.rpartition(" ")
    if mode.startswith("asynchronous"):
        factor = case.num_workers if number == "x8" else 1
        rows = AsynchronousRows(weight_EC, factor * rate, case.num_workers)
        return rows, AsynchronousDense(model, factor * dense_rate, case.num_workers)
    if name.startswith("bounded"):
        rows = BoundedRows(weight_EC, rate, case.num_workers, (int(number), int(number)))
        rows.counts_uses = name != "bounded batches"
    elif name == "HET's protocol":
        rows = HetRows(weight_EC, rate, case.num_workers, int(number))
    else:
        rows = SynchronousRows(weight_EC, rate, case.num_workers)
    return rows, SharedDense(model, dense_rate)


@torch.no_grad()
def predict(model: ClickModel, rows_EC: Tensor, samples: Samples) -> Tensor:
    parts = zip(samples.rows_BF.split(8192), samples.numbers_BN.split(8192), strict=True)
    return torch.cat([model(rows_EC[rows_BF], numbers_BN) for rows_BF, numbers_BN in parts])


def exact_auc(logits_B: Tensor, samples: Samples) -> float:
    area = auc(logits_B, samples.clicks_B)
    assert area is not None
    return area


def curve_steps(case: Case) -> list[int]:
    """After which steps the model is evaluated."""
    tenths = {case.steps * point // NUM_POINTS for point in range(1, NUM_POINTS + 1)}
    return sorted(tenths | {min(CHECK_STEPS, case.steps)} - {0})


def train(mode: str, case: Case, clicks: Clicks, test: Samples) -> dict[str, Any]:
    """Train a mode; returns its line, without the comparison with synchronous training."""
    rows, dense = make_workers(mode, case)
    few = Samples(*(part[: case.curve_samples] for part in test))
    points, curve, seconds, start = curve_steps(case), {}, 0.0, perf_counter()
    last = min(points[-1], CHECK_STEPS) if mode == "bounded 0" else points[-1]
    for step, samples in enumerate(islice(training_samples(case, clicks), last), start=1):
        reads = find_reads(samples.rows_BF, case.num_workers, case.num_rows)
        rows.update(reads, dense.train(rows.read(reads), reads, samples))
        if step in points:
            seconds += perf_counter() - start
            area = exact_auc(predict(dense.model, rows.flushed(), few), few)
            curve[step * len(samples.clicks_B)] = area
            print(f"{case.model} {mode}: step {step}, AUC {area:.5f}, {step / seconds:.1f} steps/s", file=sys.stderr)
            start = perf_counter()
    check_bound(mode, rows)
    logits_B = predict(dense.model, rows.flushed(), test)
    line = {"model": case.model, "seed": case.seed, "mode": mode, "steps": last}
    line |= {"rows": case.rows, "dim": case.dim, "hidden": case.hidden, "rate": case.rate}
    line |= {"auc": exact_auc(logits_B, test), "log_loss": log_loss(logits_B, test.clicks_B)}
    return line | {"curve": curve, "steps_per_second": round(last / seconds, 1)} | counts(rows)


def check_bound(mode: str, rows: SynchronousRows) -> None:
    if rows.bound is not None and rows.largest_missed > rows.bound:
        raise RuntimeError(f"{mode}: a read missed {rows.largest_missed} updates; the bound is {rows.bound}")


def counts(rows: SynchronousRows) -> dict[str, Any]:
    missed = rows.missed.tolist()
    while len(missed) > 1 and not missed[-1]:
        missed.pop()
    line: dict[str, Any] = {"largest_missed": rows.largest_missed, "bound": rows.bound, "missed": missed}
    if rows.num_read:
        percent = {"sent": rows.num_sent, "pushed": rows.num_pushed}
        line |= {name: round(100 * number / rows.num_read, 1) for name, number in percent.items()}
    return line


def compare(line: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Add differences from synchronous training, in points; curves become lists."""
    first, curve = reference["curve"], line["curve"]
    rows = [[samples, round(area, 6), round(100 * (area - first[samples]), 4)] for samples, area in curve.items()]
    is_complete = line["steps"] == reference["steps"]
    change = round(100 * (line["auc"] - reference["auc"]), 4) if is_complete else None
    rounded = {name: round(line[name], 6) if isfinite(line[name]) else None for name in ("auc", "log_loss")}
    return line | rounded | {"auc_change": change, "curve": rows}


def run(case: Case, modes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A line for each mode; synchronous training comes first."""
    clicks = Clicks(case.rows, case.dtype)
    test = clicks.draw(case.test_samples, SEED_STRIDE * case.seed + SEED_STRIDE - 1)
    start = {"benchmark": "het_quality", "simulated": f"{case.num_workers} workers in one process"}
    best = round(exact_auc(test.logits_B, test), 6)
    reference: dict[str, Any] = {}
    for mode in ("synchronous", *(mode for mode in modes if mode != "synchronous")):
        line = train(mode, case, clicks, test)
        reference = reference or line
        yield start | compare(line, reference) | {"best_auc": best}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES)
    parser.add_argument("--steps", type=int, default=Case("").steps)
    parser.add_argument("--rates", type=float, nargs="*", default=[1.0], help="factors of the learning rates")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds of weights and samples: 1, 2, ...")
    parser.add_argument("--write", default="", help="name of a file in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="the smallest case, to see that it runs")
    args = parser.parse_args(arguments)
    lines: list[dict[str, Any]] = []
    for name in args.model:
        for seed, factor in [(seed, factor) for seed in range(1, args.seeds + 1) for factor in args.rates]:
            case = Case(name, seed, args.steps, rate=(factor * RATES[name][0], factor * RATES[name][1]))
            if args.smoke:
                case = replace(case, steps=10, rows=200, test_samples=4000, curve_samples=2000)
            for line in run(case, args.modes):
                lines.append(line)
                print(json.dumps(line), flush=True)
    if args.write:
        results_file.write(args.write, "het_quality", lines)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
