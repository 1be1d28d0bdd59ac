"""`shardwright check-scheme MODULE`: check a module's sharding schemes before models depend on them.

Each scheme shards small float64 tables over four ranks of this machine, planned as two hosts of two ranks. The trained
weights must equal the weights of nn.EmbeddingBag with torch.optim.SGD. The checkpoint must load in one process and
export. `python -m shardwright.check_scheme FOLDER` runs a rank, which trains all plans in a folder.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from shardwright.errors import UserError
from shardwright.jagged import Batch, Jagged, Vectors, narrow
from shardwright.layers.convert import to_torch
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.loss import BinaryLoss
from shardwright.measure.describe import describe
from shardwright.planner.plan import PlanningResult, make_plan
from shardwright.planner.tables.schemes import Scheme, find_scheme, register_scheme
from shardwright.report.torchrec_export import plan_source
from shardwright.runtime.build import build
from shardwright.runtime.launch.launcher import launch_ranks
from shardwright.runtime.planning import plan_single_process
from shardwright.serving.export import export
from shardwright.serving.predictor import Predictor
from shardwright.spec import files, presets
from shardwright.spec.optimizer import SGD
from shardwright.spec.plan import ExchangeMode, Plan, Wire
from shardwright.spec.workload import Feature, Table

NUM_HOSTS, RANKS_PER_HOST = 2, 2
MEMORY_BYTES = 1 << 30  # per rank
BATCH_SIZE, NUM_STEPS, RATE = 24, 4, 0.1
TABLES = (Table("a", 1000, 64), Table("b", 37, 128))
FEATURES = (Feature("a0", "a", "sum"), Feature("a1", "a", "mean"), Feature("b0", "b", "sum"))
MAX_ERROR = 1e-9  # the reference adds in another order
Case = tuple[str, PlanningResult]


class _Linear(nn.Linear):
    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        return super().forward(torch.cat(vectors.tensors(), 1)).squeeze(1)


class _Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(1)
        tables = [replace(table, dtype=str(dtype).removeprefix("torch.")) for table in TABLES]
        self.sparse = EmbeddingBags(tables, FEATURES, SGD(lr=RATE))
        self.dense = _Linear(sum(self.sparse.dims), 1, dtype=dtype)
        self.loss = BinaryLoss()


def load_schemes(module: str) -> list[Scheme]:
    """Import a module from the working directory or PYTHONPATH, and register its schemes."""
    if (working_directory := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, working_directory)
    try:
        values = vars(import_module(module)).values()
    except ImportError as error:
        raise UserError(f"{module}: {error}; give a module in this directory or on PYTHONPATH, without .py") from None
    schemes = list({value.name: value for value in values if isinstance(value, Scheme)}.values())
    if not schemes:
        raise UserError(f"{module}: defines no Scheme (see shardwright/planner/tables/schemes.py)")
    for scheme in schemes:
        register_scheme(scheme)
    return schemes


def check_schemes(schemes: Sequence[Scheme]) -> Iterator[str]:
    """Check schemes in four new processes; yields a line for each result. Call it from the main thread."""
    cases = [case for scheme in schemes for case in _plan_cases(scheme)]
    for name, result in cases:
        yield f"{name}: {dict(result.plan.why)['table a']}"
    with TemporaryDirectory(prefix="shardwright-check-") as folder:
        for number, (_, result) in enumerate(cases):
            files.write(result.plan, Path(folder, f"{number}.json"))
        if launch_ranks(NUM_HOSTS * RANKS_PER_HOST, ["-m", "shardwright.check_scheme", folder]):
            raise UserError("the ranks failed; their messages above show why")
        for number, (name, result) in enumerate(cases):
            yield f"{name}: {_check_checkpoint(Path(folder, str(number)), result)}"


def _plan_cases(scheme: Scheme) -> Iterator[Case]:
    """Plan all tables with the scheme: every number of column shards, with vector and with row exchange."""
    workload = describe(_Model(torch.float32), _make_batch(0))
    cluster = presets.unmeasured_cluster(NUM_HOSTS, RANKS_PER_HOST, MEMORY_BYTES)
    result = make_plan(workload, cluster, pins={table.name: scheme.name for table in TABLES})
    shardings = scheme.shardings(result.candidate.problem.table_loads[0], cluster)
    column_shards = sorted({sharding.column_shards for sharding in shardings} - {1})
    for pin in (scheme.name, *(f"{scheme.name}:{num}" for num in column_shards)):
        result = make_plan(workload, cluster, pins={table.name: pin for table in TABLES})
        if wrong := [table.table for table in result.plan.tables if table.scheme != scheme.name]:
            raise UserError(f'table "{wrong[0]}" is pinned to {pin}, but its sharding has another scheme; correct it')
        for exchange in ("vectors", "rows"):
            plan = _in_float64(result.plan, exchange)
            plan.verify(describe(_Model(), _make_batch(0)))
            yield f"{pin}, {exchange} exchanged", replace(result, plan=plan)


def _in_float64(plan: Plan, exchange: ExchangeMode) -> Plan:
    """Convert a plan to the float64 model, which cannot be planned: rates of float64 products are unknown."""
    return replace(
        plan,
        workload_digest=describe(_Model(), _make_batch(0)).digest(),
        tables=tuple(
            replace(
                table,
                travel=exchange,
                placement=replace(table.placement, weight_dtype="float64", state_dtype="float64"),
            )
            for table in plan.tables
        ),
        wire=Wire("float64", "float64", "float64"),
        dense=replace(plan.dense, dtype="float64", state="float64"),
    )


def _make_batch(step: int) -> Batch:
    """A global batch with bags of 0 to 4 ids, some of them repeated."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 5, (len(FEATURES), BATCH_SIZE), generator=generator)
    rows = {table.name: table.rows for table in TABLES}
    ids = [
        torch.randint(0, rows[feature.table], (int(lengths[i].sum()),), generator=generator) ** 2 % rows[feature.table]
        for i, feature in enumerate(FEATURES)
    ]
    features = Jagged(tuple(feature.name for feature in FEATURES), torch.cat(ids), lengths)
    labels = torch.randint(0, 2, (BATCH_SIZE,), generator=generator).double()
    return Batch(features, None, {"click": labels})


def _train_reference() -> dict[str, Tensor]:
    """Weights after the same steps with nn.EmbeddingBag and torch.optim.SGD."""
    model = _Model()
    bags = nn.ModuleList(to_torch(model.sparse))
    optimizer = torch.optim.SGD({*bags.parameters(), *model.dense.parameters()}, lr=RATE)
    for step in range(NUM_STEPS):
        batch = _make_batch(step)
        values = batch.features.values.split(batch.features.lengths.sum(1).tolist())
        offsets = batch.features.lengths.cumsum(1) - batch.features.lengths
        pooled = [bag(ids, starts) for bag, ids, starts in zip(bags, values, offsets, strict=True)]
        optimizer.zero_grad()
        model.loss(nn.Linear.forward(model.dense, torch.cat(pooled, 1)).squeeze(1), batch).backward()
        optimizer.step()
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def _check_checkpoint(folder: Path, result: PlanningResult) -> str:
    """Load the ranks' checkpoint in one process, compare it with the reference, and export it."""
    model, reference = _Model(), _train_reference()
    checkpoint = json.loads((folder / "checkpoint").read_text())
    plan = plan_single_process(model, describe(model, _make_batch(0)), ())
    job = build(model, plan, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE))
    job.load(checkpoint)
    state = model.state_dict()
    error = max(float((state[name] - weight).abs().max()) for name, weight in reference.items())
    if not error <= MAX_ERROR:
        raise UserError(f"weights differ from nn.EmbeddingBag by up to {error:.3g} after {NUM_STEPS} steps")
    batch = _make_batch(NUM_STEPS)
    export(model, checkpoint, folder / "served", example=batch)
    expected = model.dense(batch, model.sparse(batch)).detach().sigmoid()
    with closing(Predictor(folder / "served")) as predictor:
        score_error = float((predictor.scores(batch) - expected).abs().max())
    if not score_error <= 1e-6:
        raise UserError(f"scores of the export differ from those of the model by up to {score_error:.3g}")
    text = f"weights within {error:.1e} of nn.EmbeddingBag after {NUM_STEPS} steps; loaded in one process; exported"
    if not find_scheme(result.plan.tables[0].scheme).torchrec or result.plan.tables[0].travel == "rows":
        return text
    compile(plan_source(result), "torchrec", "exec")
    return f"{text}, also as a TorchRec plan"


def _train_rank(folder: Path) -> None:
    """Train all plans of a folder on this rank, and save a checkpoint of each."""
    for path in sorted(folder.glob("*.json"), key=lambda path: int(path.stem)):
        model = _Model()
        job = build(model, files.read(Plan, path), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE))
        ends = [BATCH_SIZE * rank // job.mesh.size for rank in range(job.mesh.size + 1)]
        start, stop = ends[job.mesh.rank], ends[job.mesh.rank + 1]
        batches = (_select(_make_batch(step), start, stop) for step in range(NUM_STEPS))
        for _ in job.run(batches):
            pass
        checkpoint = job.save(folder / path.stem)
        if job.mesh.rank == 0:
            (folder / path.stem / "checkpoint").write_text(json.dumps(str(checkpoint)))
        job.mesh.close()


def _select(batch: Batch, start: int, stop: int) -> Batch:
    labels = {name: label[start:stop] for name, label in batch.labels.items()}
    return Batch(narrow(batch.features, start, stop), None, labels)


if __name__ == "__main__":
    try:
        _train_rank(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(f"shardwright: {error}")
