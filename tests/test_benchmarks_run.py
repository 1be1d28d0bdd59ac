"""The smallest case of every benchmark runs, without TorchRec and FBGEMM. Minutes each; part of `make nightly`."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from benchmarks import results_file
from benchmarks.dependencies import ROOT
from benchmarks.scripts import SCRIPTS

NEEDS_LAB = (
    "cost_model",
    "drawn_layers",
    "exchange",
    "het",
    "het_graphs",
    "het_servers",
    "hsdp",
    "ingest",
    "moe",
    "moe_hosts",
    "moe_prefetch",
    "moe_peers",
    "pipeline",
    "precision",
    "recipes",
    "serving",
    "sharding",
)
PICTURES = {
    "sharding_picture": "sharding-2cores.json",
    "dhen_picture": "dhen_published-simulated.json",
    "fastermoe_picture": "fastermoe.json",
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_smallest_case_runs(name):
    if name in NEEDS_LAB and (os.geteuid() != 0 or not shutil.which("tc")):
        pytest.skip("a lab needs root and iproute2")
    if name == "serving" and not shutil.which("wrk"):
        pytest.skip("wrk is not installed")
    command = [sys.executable, "-m", f"benchmarks.{name}", "--smoke"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    cases = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert cases, f"no case was printed: {result.stdout}"
    if "skipped" in cases[0]:
        pytest.skip(cases[0]["skipped"])


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_from_the_committed_results(name, tmp_path):
    picture = tmp_path / "picture.svg"
    command = [sys.executable, "-m", f"benchmarks.{name}", str(results_file.FOLDER / PICTURES[name]), str(picture)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert picture.read_text().startswith("<svg")


def test_every_benchmark_has_a_smallest_case():
    """All modules except shared code, plotting, and workers that run in environments of peers."""
    shared = {
        *("__init__", "__main__", "criteo_like", "dependencies", "dhen_cases", "dhen_data", "dhen_summary"),
        *(
            "embedding_peers",
            "fastermoe_claims",
            "fastermoe_models",
            "fastermoe_runs",
            "fastermoe_schedule",
            "gpu_timing",
            "graph_streams",
            "het_sides",
            "hsdp_model",
            "live_memory",
            "moe_peer_turns",
            "moe_policies",
            "moe_rivals",
            "moe_routing",
            "moe_sides",
            "moe_summary",
            "moe_torchtitan",
            "moe_worker",
            "pipeline_sides",
            "placement_torchrec",
            "plain_click_models",
            "published_layers",
            "published_runs",
            "results_file",
            "scripts",
            "stale_workers",
        ),
        *("sharding_tables", "sharding_torchrec", "tiers_side", "turns", *PICTURES),
    }
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - shared == {*SCRIPTS}
