"""FuxiCTR configurations and data for tests: files as FuxiCTR's own, written into the current directory."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

# The defaults that FuxiCTR's own files begin with.
BASE = {
    "model_root": "./checkpoints/",
    "num_workers": 3,
    "verbose": 1,
    "early_stop_patience": 2,
    "pickle_feature_encoder": True,
    "save_best_only": True,
    "eval_steps": None,
    "debug_mode": False,
    "group_id": None,
    "use_features": None,
    "feature_specs": None,
    "feature_config": None,
}
# What experiments of BARS have in common.
COMMON = {
    "dataset_id": "tiny",
    "loss": "binary_crossentropy",
    "metrics": ["logloss", "AUC"],
    "task": "binary_classification",
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "batch_size": 64,
    "embedding_dim": 4,
    "epochs": 2,
    "shuffle": True,
    "seed": 2019,
    "monitor": "AUC",
    "monitor_mode": "max",
}
CATEGORIES = {"name": ["user", "item"], "active": True, "dtype": "str", "type": "categorical"}
NUMBERS = {"name": ["price", "age"], "active": True, "dtype": "float", "type": "numeric", "fill_na": 0}
HISTORY = {
    "name": "history",
    "active": True,
    "dtype": "str",
    "type": "sequence",
    "splitter": "^",
    "max_len": 3,
    "padding": "pre",
    "share_embedding": "item",
}
DATASET = {
    "data_root": "../data/",
    "data_format": "csv",
    "train_data": "data/train.csv",
    "valid_data": "data/valid.csv",
    "test_data": "data/test.csv",
    "min_categr_count": 2,
    "feature_cols": [CATEGORIES, NUMBERS, {"name": "buy", "active": False, "dtype": "float", "type": "numeric"}],
    "label_col": {"name": "clk", "dtype": "float"},
}


def write_data(num: int = 0) -> None:
    """Write data/train.csv of `num` rows, and validation and test rows; 0 rows: files that only exist."""
    Path("data").mkdir(exist_ok=True)
    draw = random.Random(1)
    for part, share in (("train", 1.0), ("valid", 0.3), ("test", 0.3)):
        lines = ["clk,buy,price,age,user,item,history"]
        for _ in range(round(num * share)):
            item = draw.randrange(12)
            click, buy = int(draw.random() < 0.1 + item / 15), int(draw.random() < 0.5)
            age = "" if draw.random() < 0.2 else draw.randrange(60)
            history = "^".join(str(draw.randrange(12)) for _ in range(draw.randrange(5)))
            lines.append(f"{click},{buy},{draw.random():.3f},{age},u{draw.randrange(9)},{item},{history}")
        Path("data", f"{part}.csv").write_text("\n".join(lines) + "\n")


def write_configuration(
    experiments: Mapping[str, Mapping[str, Any]], dataset: Mapping[str, Any] | None = None, folder: str = "config"
) -> str:
    """Write model_config.yaml, where experiments have COMMON, and dataset_config.yaml; returns the recipe's name."""
    Path(folder).mkdir(exist_ok=True)
    sections = {"Base": BASE} | {name: COMMON | keys for name, keys in experiments.items()}
    path = Path(folder, "model_config.yaml")
    path.write_text(yaml.safe_dump(sections))
    if dataset is not None:
        Path(folder, "dataset_config.yaml").write_text(yaml.safe_dump({"tiny": dict(dataset)}))
    return f"fuxictr:{path}"
