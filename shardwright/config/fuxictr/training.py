"""Keys of a FuxiCTR experiment about training, as the sections [tables], [dense] and [train] of a recipe."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from shardwright.config.evaluations import HIGHER, MONITORED
from shardwright.config.fuxictr.dataset import Dataset
from shardwright.config.fuxictr.keys import Keys
from shardwright.errors import UserError

# Keys without a meaning here: devices, processes, logs and files of FuxiCTR.
IGNORED = (
    "gpu",
    "num_workers",
    "verbose",
    "model_root",
    "model_id",
    "pickle_feature_encoder",
    "save_best_only",
    "rebuild_dataset",
    "debug_mode",
    "data_root",
    "data_block_size",
    "version",
)
OPTIMIZERS = MappingProxyType({"adam": ("Adam", "adam"), "adagrad": ("Adagrad", "adagrad"), "sgd": ("SGD", "sgd")})
METRICS = MappingProxyType(
    {"AUC": "auc", "logloss": "log_loss", "binary_crossentropy": "log_loss", "gAUC": "grouped_auc"}
)
GRADIENT_NORM = 10.0  # that FuxiCTR clips to, where a configuration does not say
PATIENCE = 2
ALL_SAMPLES = 1_000_000_000  # an evaluation reads all rows of its file


def read_training(keys: Keys, dataset: Dataset) -> dict[str, Any]:
    """The sections of a recipe about training, and `shuffle` of its data."""
    keys.ignore(IGNORED)
    _refuse_other_kinds(keys)
    dense, tables = _read_optimizers(keys)
    training: dict[str, Any] = {"shuffle": keys.flag("shuffle", True), "tables": tables, "dense": dense}
    if keys.take("seed") is not None:
        training["seed"] = keys.integer("seed")
    group = _read_group(keys, dataset)
    train = {
        "batch_size": keys.integer("batch_size"),
        "epochs": keys.integer("epochs", 1),
        **_evaluations(keys),
        "eval_samples": ALL_SAMPLES,
        "patience": keys.integer("early_stop_patience", PATIENCE),
        "monitor": _read_monitor(keys, dataset),
        **({"group": group} if group else {}),
    }
    if train["patience"] < 1:
        raise keys.error("early_stop_patience", "wanted 1 or more evaluations")
    return training | {"train": train}


def _refuse_other_kinds(keys: Keys) -> None:
    """Raise an error for other tasks and losses than binary ones, and for features chosen by the model."""
    for name, wanted in (("task", "binary_classification"), ("loss", "binary_crossentropy")):
        if keys.same_for_all(name, wanted) != wanted:
            raise keys.error(name, f"only {wanted} is")
    for name in ("use_features", "feature_specs", "feature_config"):
        keys.require(name, (), "choose features by active: false in the dataset")
    keys.require("reduce_lr_on_plateau", (True, False), "wanted true or false")


def _read_optimizers(keys: Keys) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sections [dense] and [tables]."""
    name, rate = keys.text("optimizer", "adam"), keys.number("learning_rate")
    if name.lower() not in OPTIMIZERS:
        raise keys.error("optimizer", f"{', '.join(OPTIMIZERS)} are supported")
    dense_kind, tables_kind = OPTIMIZERS[name.lower()]
    dense = {"kind": dense_kind, "lr": rate, "clip": keys.number("max_gradient_norm", GRADIENT_NORM)}
    tables = {"kind": tables_kind, "lr": rate}
    is_linear = keys.text("model") == "LR"  # which has one key for both
    for section, key in ((dense, "net_regularizer"), (tables, "embedding_regularizer")):
        if decay := _read_regularizer(keys, "regularizer" if is_linear else key):
            section["weight_decay"] = decay
    return dense, tables


def _read_regularizer(keys: Keys, name: str) -> float:
    """The factor of L2 regularization: a number, or l2(number)."""
    value = keys.take(name)
    if value is None or value == "":
        return 0.0
    match = re.fullmatch(r"l2\((.*)\)", str(value).strip())
    try:
        return float(match[1] if match else value)
    except (TypeError, ValueError):
        raise keys.error(name, "a number and l2(number) are supported") from None


def _evaluations(keys: Keys) -> dict[str, int]:
    """How often a run evaluates: every `eval_steps` steps, or after each epoch."""
    if keys.take("eval_steps") is not None:
        return {"eval_every": keys.integer("eval_steps")}
    return {"eval_every": 0, "eval_epochs": 1}


def _read_group(keys: Keys, dataset: Dataset) -> str:
    """The feature that groups samples, if a metric needs it."""
    group, metrics = keys.take("group_id"), keys.names("metrics")
    for name in metrics:
        if name not in METRICS:
            raise keys.error("metrics", f"{', '.join(METRICS)} are supported")
    if "gAUC" not in (*metrics, *_monitor_weights(keys)):
        return ""
    if group is None:
        raise UserError(f"{keys.where}.metrics: gAUC needs group_id, the column that groups samples")
    if group not in dataset.features:
        raise keys.error("group_id", "gAUC needs a categorical column: change its type from meta, or drop gAUC")
    return str(group)


def _monitor_weights(keys: Keys) -> dict[str, float]:
    """The weight of each metric in the value that says which state is the best."""
    value = keys.take("monitor") or "AUC"
    weights = value if isinstance(value, Mapping) else {str(value): 1.0}
    if not all(isinstance(weight, int | float) for weight in weights.values()):
        raise keys.error("monitor", "wanted a metric, or weights such as {AUC: 1, logloss: -1}")
    return {str(name): float(weight) for name, weight in weights.items() if weight}


def _read_monitor(keys: Keys, dataset: Dataset) -> str:
    """The key train.monitor, a sum of metrics such as auc-log_loss."""
    keys.require("monitor_mode", ("max", "min"), "wanted max or min")
    weights, mode = _monitor_weights(keys), keys.take("monitor_mode") or "max"
    if len({abs(weight) for weight in weights.values()}) != 1:
        raise keys.error("monitor", "weights of 1 and -1 are supported")
    names = [term for name, weight in weights.items() for term in _monitor_terms(name, weight, dataset.labels)]
    for sign, name in names:
        metric = MONITORED.get(name.rpartition(".")[2])
        if metric is None:
            raise keys.error("monitor", f"{', '.join(METRICS)} are supported")
        if (mode == "max") != ((sign == "+") == (metric == HIGHER)):
            raise keys.error("monitor_mode", f"then a worse {name} would be the best; is the mode or a sign wrong?")
    return "".join(f"{sign}{name}" for sign, name in names).removeprefix("+")


def _monitor_terms(name: str, weight: float, labels: tuple[str, ...]) -> list[tuple[str, str]]:
    """(sign, metric) of each term that a metric stands for: with several labels, the sum over them."""
    sign = "+" if weight > 0 else "-"
    if len(labels) == 1:
        return [(sign, METRICS.get(name, name))]
    label, _, metric = name.rpartition("_")
    if label in labels:
        return [(sign, f"{label}.{METRICS.get(metric, metric)}")]
    return [(sign, f"{label}.{METRICS.get(name, name)}") for label in labels]
