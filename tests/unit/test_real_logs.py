"""Real click logs and texts, if shared/data next to the repository has them; they are not part of the product."""

from pathlib import Path

import numpy as np
import pytest

from shardwright.data.logs.click_log import open_log
from shardwright.data.tokens.sequences import open_tokens

DATA = Path(__file__).parents[3] / "shared" / "data"


def path_or_skip(name: str) -> str:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} of the development data does not exist")
    return str(path)


def test_criteo(tmp_path):
    source = open_log("criteo", path_or_skip("criteo_kaggle/sample_0p3pct_chrono.tsv.zst"), cache=str(tmp_path))
    assert source.size + source.evaluation().size == 137_139
    assert round(source.training_statistics.base_rate, 4) == 0.2561
    batch = source.take(np.arange(source.size))
    np.testing.assert_allclose(batch.dense.mean(0), 0, atol=1e-3)
    assert batch.values.max() < max(rows for _, rows, _ in source.features)


def test_avazu(tmp_path):
    source = open_log("avazu", path_or_skip("avazu/random15k_21f.csv.zst"), cache=str(tmp_path), split={"by": "random"})
    assert source.size + source.evaluation().size == 15_000 and source.num_dense == 0
    hours = next(rows for name, rows, _ in source.features if name.startswith("hour"))
    assert hours == 26
    clicks = [part.take(np.arange(part.size)).labels["click"].sum() for part in (source, source.evaluation())]
    assert round(sum(clicks) / 15_000, 4) == 0.1706


def test_shakespeare(tmp_path):
    source = open_tokens(path_or_skip("text/tinyshakespeare.txt.zst"), length=128, cache=str(tmp_path))
    assert source.file.manifest.num_tokens == 1_115_395 and source.file.manifest.num_documents == 1
    assert source.tokenizer.decode(source.take(np.arange(1)).values).startswith("First Citizen:\nBefore we proceed")
    assert source.size + source.evaluation().size == 1_115_394 // 128


def test_movielens(tmp_path):
    source = open_log("movielens", path_or_skip("movielens_100k"), cache=str(tmp_path))
    assert source.size + source.evaluation().size == 100_000
    features = {name: rows for name, rows, _ in source.features}
    assert features["gender"] == 4 and features["occupation"] == 23 and features["genres"] == 21
    assert source.training_statistics.counts["genres"].num_distinct == 19
