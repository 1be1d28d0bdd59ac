"""Schema of a click log: the kind of each column, from a TOML file; and the schemas of known logs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from shardwright.errors import UserError, did_you_mean
from shardwright.kernels.text_rows import ColumnKind
from shardwright.spec import files
from shardwright.spec.checks import check_unique, raise_if_any

ALL_OTHERS = "*"
# Fields that came after the first version: caches and digests have them only if they are set.
LATER_FIELDS = ("histories", "sides", "history_length", "history_times", "labels", "positives")
CLICK = "click"  # the name of the label in column `label`


@dataclass(frozen=True, slots=True)
class Schema:
    """Columns by meaning; other columns are not read. `categories = ["*"]` means all other columns.

    A history is a list of ids in order of time, oldest first. Its ids have the vocabulary, and the table, of the column
    that it is a history of. A side column has one id for each id of its history.
    """

    label: str = ""  # the column of the label "click", which every row has; empty: see `labels`
    positive: float | str | None = None  # a label of at least this value, or of this text, is a click; None: 0 or 1
    numbers: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()  # each field holds several categories
    weight: str | None = None  # sample weight
    time: str | None = None  # a number, or a date and time; rows are sorted by it
    ignore: tuple[str, ...] = ()  # excluded from "*"
    columns: tuple[str, ...] = ()  # column names of a file without header
    delimiter: str = ","
    quoted: bool = True
    separator: str = "|"  # between the items of a list
    hexadecimal: bool = False  # categories are eight hex digits or missing
    tail: tuple[tuple[str, int], ...] = ()  # (category, number of its last bytes that are used)
    histories: Mapping[str, str] = field(default_factory=dict)  # by list: the category or list whose ids it has
    sides: Mapping[str, str] = field(default_factory=dict)  # by list: its history
    history_length: int = 0  # ids of a history that are used, the last ones; 0: all
    history_times: Mapping[str, str] = field(default_factory=dict)  # by history: list of times, to check the order
    labels: dict[str, str] = field(default_factory=dict)  # by name, the column of a label; it may be missing: NaN
    positives: dict[str, float] = field(default_factory=dict)  # by name in `labels`, as `positive`

    def verify(self) -> None:
        raise_if_any(_validation_errors(self))

    @property
    def used_columns(self) -> tuple[str, ...]:
        """All columns that are read."""
        single = (*self.label_columns.values(), *(name for name in (self.weight, self.time) if name))
        return (*single, *self.numbers, *self.categories, *self.lists, *self.history_times.values())

    @property
    def label_columns(self) -> dict[str, str]:
        """The column of each label, by the label's name in a batch."""
        return ({CLICK: self.label} if self.label else {}) | self.labels

    def features_only(self) -> "Schema":
        """The schema of a file to score: without labels, weights and times."""
        return replace(self, label="", positive=None, labels={}, positives={}, weight=None, time=None, history_times={})

    def identity_text(self) -> str:
        """The representation that identifies a schema in digests; its fields are those of `plain`."""
        return f"Schema({', '.join(f'{name}={getattr(self, name)!r}' for name in self.plain())})"

    @property
    def columns_by_kind(self) -> dict[ColumnKind, tuple[str, ...]]:
        """Column names by the kind that the parser reads them as."""
        return {
            "label": (self.label,) if self.label else (),
            "weight": () if self.weight is None else (self.weight,),
            "time": () if self.time is None else (self.time,),
            "number": (*self.numbers, *self.labels.values()),
            "hexadecimal" if self.hexadecimal else "category": self.categories,
            "list": self.lists,
        }

    def plain(self) -> dict[str, Any]:
        """The fields that identify a schema in caches."""
        return {name: value for name, value in asdict(self).items() if value or name not in LATER_FIELDS}

    def resolve(self, columns: Sequence[str], origin: str) -> "Schema":
        """Expand "*" for a file with `columns`; raises UserError if a column is missing."""
        available, schema = set(columns), self
        if self.categories == (ALL_OTHERS,):
            excluded = {*replace(self, categories=()).used_columns, *self.ignore}
            schema = replace(self, categories=tuple(name for name in columns if name not in excluded))
        for name in schema.used_columns:
            if name not in available:
                raise UserError(f'{origin}: no column "{name}"{did_you_mean(name, available)}')
        return schema


def _validation_errors(schema: Schema) -> Iterator[str]:
    yield from _label_errors(schema)
    yield from check_unique("column", schema.used_columns)
    yield from check_unique("column", schema.columns)
    for key in ("delimiter", "separator"):
        if len(getattr(schema, key).encode()) != 1:
            yield f"{key} is {getattr(schema, key)!r}; wanted one character"
    if not (schema.categories or schema.lists or schema.numbers):
        yield "no numbers, categories or lists: a model would have no features; list at least one column"
    for name, num_bytes in schema.tail:
        if name not in schema.categories and schema.categories != (ALL_OTHERS,):
            yield f'tail of "{name}", which is not in categories{did_you_mean(name, schema.categories)}'
        if num_bytes < 1:
            yield f'tail of "{name}" is {num_bytes}; wanted 1 or more'
    yield from _history_errors(schema)


def _history_errors(schema: Schema) -> Iterator[str]:
    columns = {*schema.categories, *schema.lists} - {*schema.histories}
    for name in (*schema.histories, *schema.sides):
        if name not in schema.lists:
            yield f'"{name}" has ids in order and is not in lists{did_you_mean(name, schema.lists)}; add it to lists'
    for name, column in schema.histories.items():
        if column not in columns and schema.categories != (ALL_OTHERS,):
            suggestion = did_you_mean(column, columns)
            yield f'history "{name}" has the ids of "{column}", which is no category or list{suggestion}'
    for name, history in schema.sides.items():
        if history not in schema.histories or history in schema.sides:
            yield f'side "{name}" of "{history}", which is no history{did_you_mean(history, schema.histories)}'
    for name in schema.history_times:
        if name not in schema.histories:
            yield f'history_times of "{name}", which is no history{did_you_mean(name, schema.histories)}'
    if schema.history_length < 0 or (schema.history_length and not schema.histories):
        yield f"history_length is {schema.history_length}; wanted 0 for all ids, or more with at least one history"


def _label_errors(schema: Schema) -> Iterator[str]:
    if not schema.label_columns:
        yield 'no label: give `label`, the column of clicks, or `labels`, such as {click = "clicked", buy = "bought"}'
    if schema.label and CLICK in schema.labels:
        yield f'label and labels.{CLICK} both name the column of the label "{CLICK}"; drop one of them'
    for name in schema.labels:
        if not name.isidentifier():
            yield f'labels: "{name}" is not a name of letters, digits and underscores'
    for name in schema.positives:
        if name not in schema.labels:
            yield f'positives: "{name}" is not in labels{did_you_mean(name, schema.labels)}'
    if schema.positive == "":
        yield 'positive is ""; wanted the text of a label that is a click, or a number'
    if schema.positive is not None and not schema.label:
        yield "positive is of `label`, which is not given; write positives, by name in `labels`"


_INTEGERS = tuple(f"I{number}" for number in range(1, 14))
_HASHES = tuple(f"C{number}" for number in range(1, 27))

SCHEMAS = MappingProxyType(
    {
        "criteo": Schema(
            label="label",
            numbers=_INTEGERS,
            categories=_HASHES,
            columns=("label", *_INTEGERS, *_HASHES),
            delimiter="\t",
            quoted=False,
            hexadecimal=True,
        ),
        "avazu": Schema(label="click", categories=(ALL_OTHERS,), ignore=("id",), tail=(("hour", 2),)),
    }
)


def read_schema(name: str | Mapping[str, Any]) -> Schema:
    """The schema of a known log by name, of a TOML or JSON file, or of a recipe's section [data.schema], verified."""
    if isinstance(name, Mapping):
        schema = files.from_plain(Schema, dict(name), "data.schema")
        schema.verify()
        return schema
    if name not in SCHEMAS and not name.endswith((".toml", ".json")):
        raise UserError(f'data.schema="{name}" is unknown{did_you_mean(name, SCHEMAS)}; or give a .toml file')
    schema = SCHEMAS.get(name) or files.read(Schema, name)
    schema.verify()
    return schema
