"""Damaged, misplaced and invalid input: always a one-line error, never a hang or a read outside the folder."""

import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clicks import batch, dlrm
from test_cli import SMALL, shardwright
from torch.optim import Adam

from shardwright.checkpoint import step_directories
from shardwright.checkpoint.manifest import Manifest
from shardwright.checkpoint.reading import Checkpoint
from shardwright.errors import UserError
from shardwright.report.run_record import read_record
from shardwright.runtime.build import build
from shardwright.runtime.planning import plan_for
from shardwright.serving.export import export
from shardwright.serving.predictor import Predictor
from shardwright.spec import files, optimizer, presets
from shardwright.spec.cluster import Beside, Collective, Price, Sample
from shardwright.spec.plan import Plan, Rect

assert shardwright  # a fixture of test_cli
HUGE = "x" * 100_000
SCHEMA = 'label = "y"\ncategories = ["a"]\n'


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint."""
    model = dlrm()
    job = build(model, plan_for(model, batch()), optimizer=lambda p: Adam(p, 0.01))
    list(job.run([batch()]))
    return job.save(tmp_path / "checkpoint")


def write_manifest(path: Path, manifest: Manifest) -> None:
    files.write(manifest.with_digest(), path / step_directories.MANIFEST)


# Files and directories that cannot be read


@pytest.mark.timeout(60)
def test_a_fifo_is_refused_wherever_a_file_is_read(shardwright, tmp_path):
    Path("s.toml").write_text(SCHEMA)
    Path("log.csv").write_text("y,a\n0,x\n1,y\n")
    for name in ("f.csv", "f.csv.gz", "f.parquet", "f.toml", "f.json", "f.keys"):
        os.mkfifo(name)
    Path("logs").mkdir()
    os.mkfifo("logs/part.parquet")
    inspect = ("data", "inspect")
    for args in (
        (*inspect, "f.csv", "schema=s.toml"),
        (*inspect, "f.csv"),
        (*inspect, "f.csv.gz", "schema=s.toml"),
        (*inspect, "f.parquet", "schema=s.toml"),
        (*inspect, "logs", "schema=s.toml"),
        (*inspect, "log.csv", "schema=f.toml"),
        ("train", "f.toml"),
        ("plan", "f.json", "--cluster", "two-cores"),
        ("plan", "synthetic-dlrm", "--cluster", "f.toml"),
        ("report", "f.toml"),
        ("reader", "serve", "synthetic-dlrm", "--keys", "f.keys"),
    ):
        code, _, err = shardwright(*args)
        assert code == 2 and err.count("\n") == 1 and "a FIFO; wanted a regular file" in err, (args, err)


@pytest.mark.timeout(60)
def test_a_fifo_in_a_checkpoint_or_run_is_refused(checkpoint, tmp_path):
    (checkpoint / "rank0.safetensors").rename(tmp_path / "kept")
    os.mkfifo(checkpoint / "rank0.safetensors")
    with pytest.raises(UserError, match="rank0.safetensors: a FIFO"):
        Checkpoint(checkpoint).read_tensor(next(iter(step_directories.read_manifest(checkpoint).tensors)))
    with pytest.raises(UserError, match="rank0.safetensors: a FIFO"):
        Checkpoint(checkpoint).verify()
    (checkpoint / step_directories.MANIFEST).unlink()
    os.mkfifo(checkpoint / step_directories.MANIFEST)
    with pytest.raises(UserError, match="manifest.json: a FIFO"):
        Checkpoint(checkpoint)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").touch()
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(UserError, match="metrics.jsonl: a FIFO"):
        read_record(run)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("data", "inspect", "texts", "schema=s.toml"),
            "texts: a directory without .parquet files; give a text file",
        ),
        (("data", "inspect", "log.csv", "schema=texts"), 'data.schema="texts" is unknown; allowed: avazu, criteo; or'),
        (("train", "d.toml"), "d.toml: a directory; wanted a regular file"),
        (("train", "texts"), 'no recipe "texts"; `shardwright train` lists them; or give a .toml file'),
        (("data", "inspect", "bad.csv", "schema=s.toml"), "bad.csv: the header is not UTF-8 at byte 2"),
        (("data", "inspect", os.fsdecode(b"\xff.csv"), "schema=s.toml"), r"'\udcff.csv': the name is not UTF-8"),
        (("train", "synthetic-dlrm", "run.directory=" + os.fsdecode(b"\xff")), "the name is not UTF-8; rename it"),
    ],
)
def test_an_unreadable_path_is_a_one_line_error(shardwright, args, message):
    Path("texts").mkdir()
    Path("texts/a.csv").write_text("y,a\n0,x\n")
    Path("log.csv").write_text("y,a\n0,x\n1,y\n")
    Path(os.fsdecode(b"\xff.csv")).write_text("y,a\n0,x\n1,y\n")
    Path("bad.csv").write_bytes(b"y,\xff\n0,x\n")
    Path("s.toml").write_text(SCHEMA)
    Path("d.toml").mkdir()
    code, _, err = shardwright(*args)
    assert code == 2 and message in err and err.count("\n") == 1, err


def test_a_file_name_that_is_not_utf8_in_a_directory_is_a_one_line_error(shardwright):
    Path("logs").mkdir()
    table = pa.table({"y": pa.array([0, 1]), "a": pa.array(["p", "q"])})
    pq.write_table(table, "logs/a.parquet")
    shutil.copy("logs/a.parquet", os.fsdecode(b"logs/\xff.parquet"))
    Path("s.toml").write_text(SCHEMA)
    code, _, err = shardwright("data", "inspect", "logs", "schema=s.toml")
    assert code == 2 and "the name is not UTF-8" in err and err.count("\n") == 1, err
    keys = ("data.kind=stream", "data.path=logs", "data.schema=s.toml", "data.shuffle=false", "data.encoding.rows=9")
    code, _, err = shardwright("train", "criteo-logistic", *keys, *SMALL, "train.eval_samples=0", "train.epochs=0")
    assert code == 2 and "the name is not UTF-8" in err and err.count("\n") == 1, err


@pytest.mark.parametrize("label", [0, 1])
def test_labels_that_are_all_equal_are_reported(shardwright, label):
    Path("log.csv").write_text("y,a\n" + "".join(f"{label},{'pq'[i % 2]}\n" for i in range(200)))
    Path("s.toml").write_text(SCHEMA)
    warning = f"training labels are {label}: nothing can be learned, and NE and AUC are undefined"
    code, out, err = shardwright("data", "inspect", "log.csv", "schema=s.toml")
    assert code == 0 and f"all 200 {warning}" in out, err
    keys = ("data.kind=log", "data.path=log.csv", "data.schema=s.toml", "data.split.test=0.2")
    code, out, err = shardwright("train", "criteo-logistic", *keys, *SMALL)
    assert code == 0 and f"log.csv: all 160 {warning}" in out, err


# Long values


@pytest.mark.parametrize(
    "args",
    [
        ("train", HUGE),
        ("train", f"{HUGE}.toml"),
        ("train", "synthetic-dlrm", HUGE),
        ("train", "synthetic-dlrm", f"{HUGE}=1"),
        ("train", "synthetic-dlrm", f"train.steps={HUGE}"),
        ("train", "synthetic-dlrm", f"train.steps={'x ' * 50_000}"),
        ("train", "synthetic-dlrm", f"train.{HUGE}=1"),
        ("train", "synthetic-dlrm", f"run.name=/{HUGE}"),
        ("train", "synthetic-dlrm", f"run.directory={HUGE}"),
        ("train", "synthetic-dlrm", f"run.name={HUGE}", "run.resume=true"),
        ("train", "synthetic-dlrm", f"run.start={HUGE}"),
        ("train", "synthetic-dlrm", f"model.kind={HUGE}"),
        ("train", "synthetic-dlrm", f"model.kind={HUGE}:x"),
        ("train", "synthetic-dlrm", f"model.dim={HUGE}"),
        ("train", "synthetic-dlrm", f"tables.kind={HUGE}"),
        ("train", "synthetic-dlrm", f"tables.lr={HUGE}"),
        ("train", "synthetic-dlrm", f"dense.kind={HUGE}"),
        ("train", "synthetic-dlrm", f'allow=["{HUGE}"]'),
        ("train", "criteo-dlrm", f"data.path={HUGE}"),
        ("train", "criteo-dlrm", "data.path=.", f"data.kind={HUGE}"),
        ("train", "criteo-dlrm", "data.kind=stream", f"data.path={HUGE}"),
        ("data", "inspect", HUGE, "schema=criteo"),
        ("data", "inspect", HUGE),
        ("data", "inspect", ".", f"schema={HUGE}"),
        ("data", "inspect", ".", f"{HUGE}=1"),
        ("plan", "synthetic-dlrm", "--cluster", HUGE),
        ("plan", "synthetic-dlrm", "--cluster", f"{HUGE}.toml"),
        ("plan", f"{HUGE}.json", "--cluster", "two-cores"),
        ("report", HUGE),
        ("serve", HUGE),
        ("export", HUGE, "out"),
        ("recipe", HUGE),
        ("checkpoint", "verify", HUGE),
        ("reader", "serve", "synthetic-dlrm", "--keys", HUGE),
    ],
    ids=lambda words: " ".join(word[:20] for word in words),
)
def test_a_value_of_100_kb_is_truncated_in_the_message(shardwright, args):
    code, _, err = shardwright(*args)
    assert code == 2 and len(err) < 2000 and err.count("\n") <= 2, err[:1000]
    assert not Path("runs").exists()


def test_a_truncated_message_keeps_both_ends():
    line = str(UserError(f'key "a{HUGE}z" is wrong; wanted another'))
    assert line.startswith('key "ax') and line.endswith('xz" is wrong; wanted another') and "characters)" in line
    assert str(UserError("short; allowed: " + ", ".join("abc" * 20))).endswith("c")


# Checkpoints and exports


def test_verify_finds_any_flipped_bit_of_a_header(checkpoint):
    path = checkpoint / "rank0.safetensors"
    original = path.read_bytes()
    end = 8 + int.from_bytes(original[:8], "little")
    generator = np.random.default_rng(0)
    assert Checkpoint(checkpoint).verify() > 0
    for bit in {*range(0, 64), *generator.integers(64, 8 * end, 300).tolist()}:
        damaged = bytearray(original)
        damaged[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"rank0.safetensors: its header differs from what was written"):
            Checkpoint(checkpoint).verify()
    path.write_bytes(original + b"\0")
    with pytest.raises(UserError, match="its header differs"):
        Checkpoint(checkpoint).verify()


@pytest.mark.parametrize("stored", ["", "int8"])
def test_verify_finds_a_flipped_bit_in_the_header_of_an_export(checkpoint, tmp_path, stored):
    export(dlrm(), checkpoint, tmp_path / "out", example=batch(), stored=stored)
    Predictor(tmp_path / "out", verify=True).close()
    path = tmp_path / "out/tables.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b"site")] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(UserError, match="tables.safetensors: its header differs from what was written; export"):
        Predictor(tmp_path / "out", verify=True)


@pytest.mark.parametrize("base", ["../elsewhere/step-00000001", "..", "/etc", "step-1/../..", "step-00000001"])
def test_a_base_outside_the_folder_is_refused(checkpoint, base):
    write_manifest(checkpoint, replace(step_directories.read_manifest(checkpoint), base=base))
    with pytest.raises(UserError, match=r'manifest.json: base is ".*"; wanted the name of another checkpoint'):
        Checkpoint(checkpoint)


@pytest.mark.parametrize("file", ["../kept.safetensors", "/etc/passwd", "..", ""])
def test_a_file_outside_the_folder_is_refused(checkpoint, file):
    manifest = step_directories.read_manifest(checkpoint)
    name, entry = next(iter(manifest.tensors.items()))
    piece = replace(entry.pieces[0], values=replace(entry.pieces[0].values, file=file))
    write_manifest(checkpoint, replace(manifest, tensors=manifest.tensors | {name: replace(entry, pieces=(piece,))}))
    with pytest.raises(UserError, match=r'manifest.json: names file ".*"; wanted a file in the same folder'):
        Checkpoint(checkpoint)


def test_an_export_names_only_its_own_files(checkpoint, tmp_path):
    export(dlrm(), checkpoint, tmp_path / "out", example=batch())
    manifest_path = tmp_path / "out/served.json"
    manifest = json.loads(manifest_path.read_text())
    manifest_path.write_text(json.dumps(manifest | {"digests": {"../checkpoint/x": "0"}}))
    with pytest.raises(UserError, match=r'served.json: names file "../checkpoint/x"'):
        Predictor(tmp_path / "out")
    manifest["arrays"]["site"]["file"] = "../x"
    manifest_path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r'served.json: table "site" is in "../x"; wanted tables.safetensors'):
        Predictor(tmp_path / "out")


# Invalid numbers and names


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "lamb"])
def test_a_weight_decay_above_1_over_lr_is_refused(kind):
    with pytest.raises(UserError, match=r"weight_decay is 9.2\d+e\+18; wanted at most 1 / lr = 10"):
        optimizer.sparse_optimizer(kind, lr=0.1, weight_decay=2**63)
    optimizer.sparse_optimizer(kind, lr=0.1, weight_decay=10)


CLUSTER = presets.load_cluster("two-cores")
SAMPLES = (Sample((8,), (1.0,)),)
LINK = Collective(
    op="all_reduce",
    levels=(CLUSTER.levels[0].name,),
    nums=(2,),
    latency_seconds=0.0,
    bytes_per_second=1.0,
    error=0.0,
    samples=SAMPLES,
)
PAIR = Beside(
    op="all_reduce", levels=LINK.levels, bytes_=1, collective_seconds=1.0, matmul_seconds=1.0, together_seconds=1.0
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"collectives": (replace(LINK, error=-1.0),)}, "error is -1.0; wanted 0 or more"),
        (
            {"collectives": (replace(LINK, op="../../etc/passwd"),)},
            'collective "../../etc/passwd": unknown op; allowed',
        ),
        ({"collectives": (replace(LINK, nums=(-2,)),)}, "nums is -2; wanted more than 0"),
        ({"beside": (replace(PAIR, op="al_reduce"),)}, 'unknown op; did you mean "all_reduce"?'),
        ({"beside": (replace(PAIR, num=0),)}, "num is 0; wanted more than 0"),
        ({"stolen_share": -0.5}, "stolen_share is -0.5; wanted 0 to 1"),
        (
            {"device": replace(CLUSTER.device, prices=(Price(op="../../etc/passwd", call_seconds=1.0),))},
            'price "../../etc/passwd": unknown op; allowed: ',
        ),
        (
            {"device": replace(CLUSTER.device, prices=(Price(op="calls", call_seconds=1.0, error=-1.0),))},
            'price "calls": error is -1.0; wanted 0 or more',
        ),
    ],
)
def test_invalid_numbers_and_names_in_a_cluster_are_refused(change, message):
    replace(CLUSTER, collectives=(LINK,), beside=(PAIR,)).verify()
    with pytest.raises(UserError) as error:
        replace(CLUSTER, **change).verify()
    assert message in str(error.value)


def test_report_refuses_a_plan_that_does_not_cover_its_tables(shardwright):
    code, _, err = shardwright("train", "synthetic-logistic", *SMALL, "run.name=mine")
    assert code == 0, err
    path = Path("runs/mine/plan.json")
    plan = files.read(Plan, path)
    first, *other_tables = plan.tables
    outside = Rect(first.table, first.rects[0].rows, (-3, -1), (0,))
    for tables, message in (
        (tuple(other_tables), f'table "{first.table}" is not planned'),
        ((replace(first, rects=(outside,)), *other_tables), "is empty or not inside rows"),
        ((replace(first, rects=()), *other_tables), f'table "{first.table}": no rect holds rows 0..'),
    ):
        files.write(replace(plan, tables=tables), path)
        code, _, err = shardwright("report", "runs/mine")
        assert code == 2 and "runs/mine/plan.json: " in err and message in err and err.count("\n") == 1, err
    files.write(replace(plan, workload_digest="0" * 16), path)
    assert shardwright("report", "runs/mine")[0] == 0, "an older version may have computed another digest"


# Run directories


def test_a_run_directory_is_private_on_request(shardwright):
    previous_umask = os.umask(0o022)
    try:
        assert shardwright("train", "synthetic-logistic", *SMALL, "run.name=open")[0] == 0
        assert shardwright("train", "synthetic-logistic", *SMALL, "run.name=mine", "run.private=true")[0] == 0
        assert shardwright("train", "synthetic-logistic", *SMALL, "run.private=true")[0] == 0
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in Path("runs").iterdir()}
        assert modes == {"open": 0o755, "mine": 0o700, "synthetic-logistic-001": 0o700}
        args = ("train", "runs/open/config.toml", "run.resume=true", "run.private=true", "train.steps=12")
        code, _, err = shardwright(*args)
        assert code == 0 and stat.S_IMODE(Path("runs/open").stat().st_mode) == 0o700, err
    finally:
        os.umask(previous_umask)
