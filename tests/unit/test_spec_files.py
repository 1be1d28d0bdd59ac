"""Spec types survive JSON and TOML exactly; errors in a file are one line with file and key."""

import dataclasses
import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import UserError
from shardwright.spec import files
from shardwright.spec.axes import Axis
from shardwright.spec.cluster import Cluster
from shardwright.spec.plan import Plan, Stage
from shardwright.spec.timeline import Timeline
from shardwright.spec.workload import Workload

SPECS = (Cluster, Workload, Plan, Timeline)
SCALARS = types.MappingProxyType(
    {
        str: st.text(max_size=8),
        int: st.integers(-(2**62), 2**62),
        float: st.floats(allow_nan=False, allow_infinity=False),
        type(None): st.none(),
    }
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a type, legal or not: reading a file checks only types."""
    args = get_args(hint)
    if hint in SCALARS:
        return SCALARS[hint]
    if hint is Stage:
        names = st.lists(st.text(max_size=5), max_size=2).map(tuple)
        leaf = st.builds(Stage, st.text(), st.text(), names, names, st.integers(0, 3))
        return st.builds(dataclasses.replace, leaf, body=st.lists(leaf, max_size=2).map(tuple))
    if get_origin(hint) is Annotated:
        return values(args[0])
    if get_origin(hint) is Literal:
        return st.sampled_from(args)
    if get_origin(hint) in (Union, types.UnionType):
        return st.one_of([values(arg) for arg in args])
    if get_origin(hint) is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=2).map(tuple)
    if get_origin(hint) is tuple:
        return st.tuples(*map(values, args))
    hints = get_type_hints(hint, include_extras=True)
    return st.builds(hint, **{name: values(inner) for name, inner in hints.items()})


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_round_trip(spec, suffix, tmp_path_factory):
    path = tmp_path_factory.mktemp("specs") / f"spec{suffix}"

    @settings(max_examples=60)
    @given(values(spec))
    def check(value):
        files.write(value, path)
        read_back = files.read(spec, path)
        assert read_back == value
        assert files.digest(read_back) == files.digest(value)

    check()


def test_digests_depend_on_values_but_not_on_number_types():
    workload = files.from_plain(Workload, dict(WORKLOAD), "test")
    assert len(workload.digest()) == 16
    statistics = dataclasses.replace(workload.statistics[0], ids_per_sample=3)
    same = dataclasses.replace(workload, statistics=(statistics,))
    other = dataclasses.replace(workload, batch_size=65)
    assert same.digest() == workload.digest() != other.digest()


WORKLOAD = types.MappingProxyType(
    {
        "version": 1,
        "batch_size": 64,
        "tables": [{"name": "user", "rows": 10, "dim": 4}],
        "features": [{"name": "clicked", "table": "user"}],
        "statistics": [{"feature": "clicked", "ids_per_sample": 3.0, "distinct_share": 0.5}],
        "optimizer": {"kind": "adagrad", "lr": 0.1},
    }
)
STATISTICS = WORKLOAD["statistics"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batchsize": 3}, 'batchsize: unknown key; did you mean "batch_size"?'),
        ({"version": 2, "new": 1}, 'version: "2" is not allowed; allowed: 1 (and 1 more)'),
        ({"batch_size": "64"}, 'batch_size: wanted a valid integer, got "64"'),
        ({"batch_size": 64.0}, "batch_size: wanted a valid integer, got 64.0"),
        ({"batch_size": True}, "batch_size: wanted a valid integer, got true"),
        ({"tables": {}}, "tables: wanted a valid array, got {}"),
        ({"tables": [{"name": "user", "rows": 10}]}, "tables.0.dim: missing key"),
        (
            {"features": [{"name": "clicked", "tabel": "user"}]},
            'features.0.tabel: unknown key; did you mean "table"? (and 1 more)',
        ),
        (
            {"features": [{"name": "clicked", "table": "user", "pooling": "sun"}]},
            'features.0.pooling: "sun" is not allowed; did you mean "sum"?',
        ),
        (
            {"statistics": [STATISTICS | {"ids_per_sample": float("inf")}]},
            "statistics.0.ids_per_sample: wanted a finite number, got Infinity",
        ),
        ({"optimizer": {"lr": 0.1}}, "optimizer.kind: missing key; allowed: adagrad, adam, lamb, "),
        (
            {"optimizer": {"kind": "adagard", "lr": 0.1}},
            'optimizer.kind: "adagard" is not allowed; did you mean "adagrad"?',
        ),
        ({"optimizer": {"kind": "sgd", "lr": "x"}}, 'optimizer.lr: wanted a valid number, got "x"'),
        (
            {"optimizer": {"kind": "sgd", "lr": 0.1, "momentun": 0}},
            'optimizer.momentun: unknown key; did you mean "momentum"?',
        ),
    ],
)
def test_errors_in_a_file_are_one_line(change, message):
    with pytest.raises(UserError) as caught:
        files.from_plain(Workload, {**WORKLOAD, **change}, "w.json")
    assert str(caught.value).startswith(f"w.json: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("w.json", b'{"version": 1,\n "x" 3}', "bad JSON: expected `:` at line 2 column 6"),
        ("w.json", b"", "bad JSON: EOF while parsing a value at line 1 column 0"),
        ("w.json", b"null", "wanted an object, got null"),
        ("w.json", b"[3]", "wanted an object, got [3]"),
        ("w.json", b'{"\xff": 1}', "bad JSON: invalid unicode code point at line 1 column 3"),
        (
            "w.toml",
            b"version = 1\nbatch_size 64",
            "bad TOML: Expected '=' after a key in a key/value pair (at line 2",
        ),
        ("w.toml", b"version = 1\nx = ", "bad TOML: Invalid value (at line 2, column 5)"),
        ("w.toml", b"x = '\xff'", "not UTF-8 at byte 5"),
        (
            "w.toml",
            b"version = 1\nbatch_size = 2020-01-01",
            'batch_size: wanted a valid integer, got "2020-01-01"',
        ),
        ("w.yaml", b"", 'unknown file format ".yaml"; allowed: .json, .toml'),
    ],
)
def test_broken_files(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        files.read(Workload, path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_missing_file_and_a_missing_folder(tmp_path):
    with pytest.raises(UserError, match=r"no\.toml: cannot be read \(No such file or directory\)"):
        files.read(Workload, tmp_path / "no.toml")
    with pytest.raises(UserError, match=r"w\.json: cannot be written \(No such file or directory\)"):
        files.write(files.from_plain(Workload, dict(WORKLOAD), "test"), tmp_path / "no" / "w.json")


@dataclasses.dataclass(frozen=True)
class Numbered:
    number: float
    items: tuple[int, ...] = ()
    limit: int | None = 5


@pytest.mark.parametrize(
    ("value", "name", "message"),
    [
        (Numbered(float("nan")), "odd.json", "number: wanted a finite number, got NaN"),
        (Numbered(1, items=[2]), "odd.json", "items: its value would not read back equal"),  # pyright: ignore
        (Numbered(1, limit=None), "odd.toml", "limit: its value would not read back equal"),
        (Numbered(1, limit="x"), "odd.json", 'limit: wanted a valid integer, got "x"'),  # pyright: ignore
    ],
)
def test_values_that_would_not_read_back_are_not_written(value, name, message, tmp_path):
    path = tmp_path / name
    path.write_text("before")
    with pytest.raises(UserError) as caught:
        files.write(value, path)
    assert str(caught.value) == f"{path}: not written: {message}"
    assert path.read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_json_has_one_line_per_small_object(tmp_path):
    files.write(files.from_plain(Workload, dict(WORKLOAD), "test"), tmp_path / "w.json")
    table = '    {"name": "user", "rows": 10, "dim": 4, "dtype": "float32", "init": null, "growth": null}'
    text = (tmp_path / "w.json").read_text()
    assert table.strip() in text
    assert max(map(len, text.splitlines())) <= files.LINE_WIDTH


@pytest.mark.parametrize("version", [1, 2])
def test_plans_of_earlier_versions_have_axes_of_the_data_role(version, tmp_path):
    old = {
        **{"version": version, "workload_digest": "0", "axes": [["host", 2], ["local", 4]], "lanes": ["main"]},
        **{"tables": [], "stages": [], "dense": {"replicate": ["host"], "shard": ["local"]}},
    }
    (tmp_path / "plan.json").write_text(json.dumps(old))
    plan = files.read(Plan, tmp_path / "plan.json")
    plan.verify()
    assert plan.axes == (Axis("data", "host", 2), Axis("data", "local", 4)) and plan.num_ranks == 8
    assert (plan.dense.replicate, plan.dense.shard) == (("data@host",), ("data@local",))
    assert plan.sample_axes == ("data@host", "data@local")
    for axes in ([["host"]], [2], "host"):
        (tmp_path / "plan.json").write_text(json.dumps(old | {"axes": axes}))
        with pytest.raises(UserError, match="axes"):
            files.read(Plan, tmp_path / "plan.json")
