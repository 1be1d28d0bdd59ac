"""A FuxiCTR dataset as a recipe's section [data]: its files, and the schema of their columns."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardwright.config.fuxictr.keys import Keys
from shardwright.errors import UserError, did_you_mean

IGNORED = ("data_root", "rebuild_dataset", "data_block_size", "dataset_id")
IGNORED_OF_COLUMNS = ("source", "remap")
DTYPES = ("str", "int", "float")
MEAN_POOLING = "layers.MaskedAveragePooling()"
DEFAULT_SPLITTER = "^"
FILES = MappingProxyType({"path": "train_data", "valid": "valid_data", "test": "test_data"})  # by key of [data]


@dataclass(frozen=True)
class Dataset:
    """The section [data] of a recipe, and what models and metrics need to know of its columns."""

    data: dict[str, Any]
    labels: tuple[str, ...]
    features: tuple[str, ...]  # with one id per sample
    histories: Mapping[str, str]  # by sequence: the column whose ids it has
    num_numbers: int
    unpooled: tuple[str, ...]  # sequences without a feature encoder


@dataclass
class _Columns:
    """Columns by meaning, as they are read."""

    numbers: list[str] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    histories: dict[str, str] = field(default_factory=dict)
    unpooled: list[str] = field(default_factory=list)
    scaled: list[bool] = field(default_factory=list)  # of each numeric column: whether it has mean 0 and deviation 1
    splitters: set[str] = field(default_factory=set)
    lengths: set[int] = field(default_factory=set)  # the longest sequences, 0: all


def read_dataset(keys: Keys, folder: Path) -> Dataset:
    """Read a dataset; paths are those of the current directory, or else relative to `folder`."""
    keys.ignore(IGNORED)
    keys.require("data_format", ("csv", "parquet"), "csv and parquet are supported")
    files = {name: _find_file(keys, key, folder) for name, key in FILES.items()}
    for name in ("path", "valid"):
        if not files[name]:
            raise UserError(f"{keys.where}.{FILES[name]} is missing")
    labels, min_count = _read_labels(keys), keys.integer("min_categr_count", 1)
    columns = _Columns()
    for column in _each_column(keys):
        _read_column(column, columns, min_count)
    keys.check_all_used()
    encoding = {"log": False, "normalize": _is_scaled(keys, columns), "min_count": min_count}
    return Dataset(
        {
            "kind": "log",
            **{name: path for name, path in files.items() if path},
            "schema": _schema(keys, columns, labels),
            "encoding": encoding,
        },
        labels,
        tuple(columns.categories),
        columns.histories,
        len(columns.numbers),
        tuple(columns.unpooled),
    )


def _find_file(keys: Keys, name: str, folder: Path) -> str:
    """The path of a file, or of a folder of Parquet files; empty if the dataset has none."""
    if keys.take(name) is None:
        return ""
    path = keys.text(name)
    for candidate in (path, str(folder / path)):
        if glob(candidate):
            return candidate
    raise UserError(f"{keys.where}.{name}={path}: no such file, neither from here nor from {folder.resolve()}")


def _read_labels(keys: Keys) -> tuple[str, ...]:
    """The columns of the labels."""
    value = keys.take("label_col")
    columns = value if isinstance(value, list) else [value]
    if not columns or not all(isinstance(column, dict) and isinstance(column.get("name"), str) for column in columns):
        raise UserError(f"{keys.where}.label_col={value}: wanted a column such as {{name: clk, dtype: float}}")
    for column in columns:
        label = Keys(f"{keys.where}.label_col", column)
        label.ignore(("name", "dtype"))
        label.check_all_used()
    return tuple(column["name"] for column in columns)


def _each_column(keys: Keys) -> Iterator[Keys]:
    """The active columns, one by one: a list of names stands for as many columns."""
    columns = keys.take("feature_cols")
    if not isinstance(columns, list) or not all(isinstance(column, dict) and "name" in column for column in columns):
        raise UserError(f"{keys.where}.feature_cols: wanted a list of columns, each with a name, a type and a dtype")
    for column in columns:
        names = column["name"] if isinstance(column["name"], list) else [column["name"]]
        for name in names:
            each = Keys(f"{keys.where}.{name}", column | {"name": str(name)})
            if each.flag("active", True):
                yield each


def _read_column(column: Keys, columns: _Columns, min_count: int) -> None:
    """Read a column by its type."""
    name, kind = column.text("name"), column.text("type")
    column.ignore(IGNORED_OF_COLUMNS)
    column.require("dtype", DTYPES, "str, int and float are supported")
    column.require("preprocess", ("",), "compute the column in the file, and drop preprocess")
    match kind:
        case "numeric":
            _read_numeric(column, columns)
            columns.numbers.append(name)
        case "categorical":
            _read_ids(column, min_count)
            columns.categories.append(name)
        case "sequence":
            _read_ids(column, min_count)
            _read_sequence(column, columns, name)
            columns.lists.append(name)
        case "meta":
            column.ignore(("fill_na", "na_value"))
        case _:
            raise column.error("type", "numeric, categorical, sequence and meta are supported")
    column.check_all_used()


def _read_numeric(column: Keys, columns: _Columns) -> None:
    for name in ("fill_na", "na_value"):
        if column.number(name, 0):
            raise column.error(name, "a missing number is 0; write another value into the file")
    column.require("normalizer", ("StandardScaler",), "StandardScaler is supported, or scale the column in the file")
    columns.scaled.append(column.take("normalizer") is not None)


def _read_ids(column: Keys, min_count: int) -> None:
    """Read the keys that categories and sequences share; a missing value has a row of its own, whatever replaces it."""
    column.ignore(("fill_na", "na_value"))
    column.require("min_categr_count", (min_count,), "one count for the dataset is supported")


def _read_sequence(column: Keys, columns: _Columns, name: str) -> None:
    shared, length = column.take("share_embedding"), column.integer("max_len", 0)
    columns.splitters.add(column.text("splitter", DEFAULT_SPLITTER))
    column.require("feature_encoder", (MEAN_POOLING,), f"null and {MEAN_POOLING} are supported")
    if column.take("feature_encoder", MEAN_POOLING) is None:
        columns.unpooled.append(name)
    if shared is not None:
        columns.histories[name] = column.text("share_embedding")
        columns.lengths.add(length)
    elif length:
        raise column.error("max_len", "only a sequence with share_embedding is cut; drop max_len to use all its ids")
    column.require("padding", ("pre", "post"), "pre and post are supported")
    if length and column.text("padding", "post") == "post":
        raise column.error("max_len", "only the last ids can be kept: set padding: pre, or drop max_len to use all ids")


def _is_scaled(keys: Keys, columns: _Columns) -> bool:
    if len(set(columns.scaled)) > 1:
        raise UserError(
            f"{keys.where}.feature_cols: normalizer=StandardScaler is set for some numeric columns only; set it for "
            "all of them or for none"
        )
    return any(columns.scaled)


def _schema(keys: Keys, columns: _Columns, labels: tuple[str, ...]) -> dict[str, Any]:
    """The section [data.schema]."""
    for name, shared in columns.histories.items():
        if shared not in columns.categories:
            raise UserError(
                f"{keys.where}.{name}.share_embedding={shared} is no active categorical column"
                f"{did_you_mean(shared, columns.categories)}"
            )
    for name, values in (("splitter", columns.splitters), ("max_len", columns.lengths)):
        if len(values) > 1:
            raise UserError(
                f"{keys.where}.feature_cols: sequences have {name} {', '.join(map(str, sorted(values)))}; one for all "
                "of them is supported"
            )
    schema: dict[str, Any] = {"label": labels[0]} if len(labels) == 1 else {"labels": {name: name for name in labels}}
    for name in ("numbers", "categories", "lists", "histories"):
        schema |= {name: getattr(columns, name)} if getattr(columns, name) else {}
    if columns.splitters:
        schema["separator"] = columns.splitters.pop()
    if any(columns.lengths):
        schema["history_length"] = columns.lengths.pop()
    return schema
