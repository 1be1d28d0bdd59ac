"""A user-defined data source, named in recipes of tests, with samples that can be corrupted."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwright.data.sources.source import NumpyBatch


@dataclass(frozen=True)
class ClickLog:
    """40 site ids, 30 item ids in bags, 2 numeric features; from sample `at` on corrupted as `wrong` says."""

    samples: int = 4096
    wrong: str = ""
    at: int = 0
    seed: int = 0

    num_dense = 2
    features = (("site", 40, False), ("item", 30, True))

    @property
    def size(self) -> int:
        return self.samples

    def evaluation(self) -> "ClickLog":
        return replace(self, seed=self.seed + 1, samples=256)

    def take(self, indices: np.ndarray) -> NumpyBatch:
        noise = (indices.astype(np.uint64) + np.uint64(self.seed)) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(33)
        site, size = (noise % 40).astype(np.int64), (noise // 40 % 4).astype(np.int64)
        item = (np.repeat(noise, size) // 160 % 30).astype(np.int64)
        lengths = np.stack([np.ones_like(site), size])
        dense = np.stack([noise % 7 / 7.0, noise % 11 / 11.0], axis=1).astype(np.float32)
        click = ((site + noise // 7 % 20) % 40 < 12).astype(np.float32)
        rows = NumpyBatch(("site", "item"), np.concatenate([site, item]), lengths, dense, {"click": click})
        return self._corrupt(rows) if (indices >= self.at).any() else rows

    def _corrupt(self, rows: NumpyBatch) -> NumpyBatch:
        change: dict[str, Any] = {}
        match self.wrong:
            case "id":
                rows.values[0] = 40
            case "negative length":
                rows.lengths[1, 0] = -1
            case "lengths":
                rows.lengths[1, 0] += 5
            case "dense":
                assert rows.dense is not None
                rows.dense[0, 1] = np.nan
            case "label":
                rows.labels["click"][0] = 2
        return replace(rows, **change)
