"""Citation graphs as texts, such as Cora and Citeseer: NAME.content and NAME.cites.

A line of the first is a paper, its words (0 or 1 for each word of the vocabulary) or other numeric features, and its
class. A line of the second is a cited paper and a citing one. Papers and classes are names: papers are numbered in the
order of lines, classes in the order of names. Citations of papers without a line are left out.

Planetoid's other form, ind.NAME.x and others, are pickles. To read a pickle may run any code; they are refused.
"""

from pathlib import Path

import numpy as np

from shardwright.data.graphs.graph import Contents
from shardwright.errors import UserError


def is_citation_folder(folder: Path) -> bool:
    names = [path.name for path in folder.iterdir()]
    if pickles := sorted(name for name in names if name.startswith("ind.")):
        raise UserError(
            f"{folder}: {pickles[0]} is a pickle, which could run code when read; use the texts NAME.content and "
            "NAME.cites, or convert it to .npz"
        )
    return any(name.endswith(".content") for name in names)


def paths(folder: Path) -> list[Path]:
    """The files that are read: of papers and of citations."""
    return [_only(folder, ending) for ending in (".content", ".cites")]


def read(folder: Path) -> Contents:
    content, cites = paths(folder)
    lines = [line.split() for line in content.read_text().splitlines() if line.strip()]
    widths = {len(line) for line in lines}
    if len(widths) != 1 or min(widths) < 2:
        raise UserError(f"{content}: lines of {sorted(widths)} columns; wanted a paper, its features and its class")
    papers = {line[0]: number for number, line in enumerate(lines)}
    if len(papers) < len(lines):
        raise UserError(f"{content}: {len(lines):,} lines of {len(papers):,} papers; wanted one line of each")
    names = sorted({line[-1] for line in lines})
    labels = np.array([names.index(line[-1]) for line in lines], np.int64)
    try:
        numbers = np.array([line[1:-1] for line in lines], np.float32)
    except ValueError as error:
        raise UserError(f"{content}: a feature is not a number: {error}") from error
    pairs = [line.split() for line in cites.read_text().splitlines() if line.strip()]
    if wrong := next((number for number, pair in enumerate(pairs, start=1) if len(pair) != 2), None):
        raise UserError(f"{cites}: citation {wrong} has {len(pairs[wrong - 1])} papers; wanted two")
    edges = [(papers[a], papers[b]) for a, b in pairs if a in papers and b in papers]
    edges_E2 = np.array(edges, np.int64).reshape(-1, 2)
    if np.isin(numbers, (0, 1)).all():
        return Contents(edges_E2, labels, np.argwhere(numbers).astype(np.int64))
    return Contents(edges_E2, labels, numbers=numbers)


def _only(folder: Path, ending: str) -> Path:
    paths = sorted(path for path in folder.iterdir() if path.name.endswith(ending))
    if len(paths) != 1:
        raise UserError(f"{folder}: {len(paths)} files NAME{ending}; wanted one")
    return paths[0]
