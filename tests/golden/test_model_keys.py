"""Tables of model keys in docs, from signatures and shardwright/models/keys.toml; `make bless` writes them."""

import re
import tomllib
from inspect import signature
from pathlib import Path

import pytest

from shardwright.models import keys
from shardwright.models.names import MODELS

DOCS = Path(__file__).parents[2] / "docs"
HEADING = re.compile(r"^## Keys of (`\w+`(?:, `\w+`)*)$", re.MULTILINE)
PAGES = [path for path in sorted((DOCS / "models").glob("*.md")) if HEADING.search(path.read_text())]


def test_every_key_has_a_text_and_every_text_a_key():
    texts = tomllib.loads(Path(keys.__file__).with_name("keys.toml").read_text())
    parameters = {kind: {*signature(make).parameters} - {*keys.FILLED} for kind, make in MODELS.items()}
    general = {name for name, text in texts.items() if isinstance(text, str)}
    missing = {f"{kind}.{name}" for kind in MODELS for name in parameters[kind] - general - {*texts.get(kind, {})}}
    assert not missing, f"shardwright/models/keys.toml has no text of {sorted(missing)}"
    used = {name for kind in MODELS for name in parameters[kind] - {*texts.get(kind, {})}}
    assert general <= used, f"no kind uses these texts of keys.toml: {sorted(general - used)}"
    for kind in texts.keys() - general:
        assert kind in MODELS and texts[kind].keys() <= parameters[kind], f"[{kind}] of keys.toml has unknown keys"


def test_every_kind_has_its_keys_on_one_page():
    listed = [kind for path in PAGES for kind in kinds_of(path)]
    assert sorted(listed) == sorted(MODELS), "give each kind a section `## Keys of `KIND`` in docs/models/*.md"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_keys_of_a_model_page(path, request):
    assert_table(path, HEADING.search(path.read_text())[0], kinds_of(path), "../", request)


def test_keys_of_all_models(request):
    assert_table(DOCS / "recipe-keys.md", "## [model]", list(MODELS), "", request)


def kinds_of(path: Path) -> list[str]:
    return re.findall(r"`(\w+)`", HEADING.search(path.read_text())[1])


def assert_table(path: Path, heading: str, kinds: list[str], root: str, request) -> None:
    """The first table below a heading is the generated one; with --bless, write it."""
    before, _, after = path.read_text().partition(f"{heading}\n")
    table = re.search(r"<!-- settings -->\n((?:\|.*\n)*)", after.partition("\n## ")[0])
    assert table, f"{path.name}: no `<!-- settings -->` below {heading}"
    expected = keys.markdown_table(kinds, root)
    if request.config.getoption("--bless"):
        after = after[: table.start(1)] + expected + after[table.end(1) :]
        path.write_text(f"{before}{heading}\n{after}")
    else:
        assert table[1] == expected, f"{path.name} differs from the signatures or keys.toml: run `make bless`"
