"""Synthetic files of any size in Criteo's format: ids follow a power law, in some columns almost all are unique."""

from pathlib import Path

import numpy as np

HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
ROWS = 32_768  # per block
SKEWED, FRESH = range(20), range(20, 26)  # id columns: power law; almost all unique
WIDTH = 2 + 13 * 4 + 26 * 9


def write(path: Path, num_bytes: int, *, seed: int = 0) -> int:
    """Write about `num_bytes` bytes; returns the number of rows."""
    generator = np.random.default_rng(seed)
    vocabulary = generator.integers(0, 16, (26, 200_000, 8), dtype=np.uint8)
    rows = 0
    with path.open("wb") as file:
        while rows * WIDTH < num_bytes:
            file.write(block(generator, vocabulary).tobytes())
            rows += ROWS
    return rows


def block(generator: np.random.Generator, vocabulary: np.ndarray) -> np.ndarray:
    """(ROWS, WIDTH) bytes: a label, 13 numbers of three digits, 26 ids of eight, tabs between, then a line break."""
    text = np.full((ROWS, WIDTH), ord("\t"), np.uint8)
    text[:, 0] = ord("0") + (generator.random(ROWS) < 0.25)
    numbers = text[:, 2 : 2 + 13 * 4].reshape(ROWS, 13, 4)
    numbers[:, :, :3] = ord("0") + generator.integers(0, 10, (ROWS, 13, 3), dtype=np.uint8)
    ids = text[:, 2 + 13 * 4 :].reshape(ROWS, 26, 9)
    for column in SKEWED:
        rank = np.minimum(generator.zipf(1.3, ROWS) - 1, len(vocabulary[0]) - 1)
        ids[:, column, :8] = HEX[vocabulary[column, rank]]
    ids[:, list(FRESH), :8] = HEX[generator.integers(0, 16, (ROWS, len(FRESH), 8), dtype=np.uint8)]
    text[:, -1] = ord("\n")
    return text
