"""Results files: benchmarks/results/NAME.json, one JSON object per line.

The first line, {"taken": {...}}, is a header: the benchmark, the commit whose code was measured, the files that had
changed since that commit, and the machine. `python -m benchmarks --stale` uses it to find results that are out of date.
"""

import ast
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.dependencies import ROOT, dependencies

FOLDER = ROOT / "benchmarks/results"
NOT_MEASURED_CODE = {"benchmarks/results_file.py", "benchmarks/dependencies.py"}
Line = dict[str, Any]


def write(name: str, benchmark: str, lines: Iterable[Mapping[str, Any]]) -> Path:
    """Write results/NAME.json; `benchmark` is the module in benchmarks/ that measured them."""
    path = FOLDER / f"{name}.json"
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"taken": make_header(benchmark)}, *lines]))
    return path


def read(path: Path) -> list[Line]:
    """The measurements of a results file."""
    return [line for line in _lines(path) if "taken" not in line]


def read_header(path: Path) -> Line:
    """The header of a results file: benchmark, commit and machine; empty if it has none."""
    return next((line["taken"] for line in _lines(path) if "taken" in line), {})


def _lines(path: Path) -> list[Line]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def make_header(benchmark: str) -> Line:
    """Make the header of a results file for this checkout and machine."""
    commit = _git("rev-parse", "HEAD").strip()
    model = [line.partition(":")[2] for line in _cpuinfo() if line.startswith("model name")]
    return {
        "benchmark": benchmark,
        "commit": commit,
        "modified": changed_since(benchmark, commit),
        "processor": model[0].strip() if model else "unknown",
        "cores": os.cpu_count(),
    }


def changed_since(benchmark: str, commit: str) -> list[str]:
    """Files that the benchmark depends on whose code differs from that commit.

    Docstrings, comments, imports and the command line (`main`) of a benchmark do not count.
    """
    dependency_paths = {path.relative_to(ROOT).as_posix() for path in dependencies(f"benchmarks.{benchmark}")}
    changed = _git("diff", "--name-only", commit, "--", "benchmarks", "shardwright", "csrc").splitlines()
    untracked = _git(
        "ls-files", "--others", "--exclude-standard", "--", "benchmarks", "shardwright", "csrc"
    ).splitlines()
    candidates = sorted((dependency_paths - NOT_MEASURED_CODE) & {*changed, *untracked})
    before = _texts(commit, candidates)
    return [path for path in candidates if _code_differs(path, before[path])]


def _texts(commit: str, paths: list[str]) -> dict[str, str | None]:
    """The files' texts at a commit, read in one call of git; None for files that it does not have."""
    names = "".join(f"{commit}:{path}\n" for path in paths).encode()
    process = subprocess.run(["git", "cat-file", "--batch"], cwd=ROOT, input=names, capture_output=True, check=True)
    texts, remaining = {}, process.stdout
    for path in paths:
        header, _, remaining = remaining.partition(b"\n")
        if header.endswith(b" missing"):
            texts[path] = None
            continue
        size = int(header.split()[-1])
        texts[path], remaining = remaining[:size].decode(), remaining[size + 1 :]
    return texts


def _code_differs(path: str, before: str | None) -> bool:
    now = (ROOT / path).read_text()
    if before is None or not path.endswith(".py"):
        return before != now
    ignored = "main" if path.startswith("benchmarks/") else ""
    return _code(before, ignored) != _code(now, ignored)


@cache
def _code(text: str, ignored: str) -> str:
    """A Python file as a syntax tree without docstrings, imports and the function named `ignored`."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [child for child in body if not _is_ignored(child, ignored)]  # pyright: ignore[reportAttributeAccessIssue]
    return ast.dump(tree)


def _is_ignored(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.FunctionDef) and node.name == name):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def find_stale() -> dict[str, list[str]]:
    """By name of each stale results file: the files whose code has changed since it was measured."""
    stale_files = {}
    for path in sorted(FOLDER.glob("*.json")):
        header = read_header(path)
        changed = [*header["modified"]]
        try:
            changed += changed_since(header["benchmark"], header["commit"])
        except subprocess.CalledProcessError:
            changed.append(f"(commit {header['commit'][:10]} is not in this repository)")
        if changed:
            stale_files[path.name] = sorted(set(changed))
    return stale_files


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
