"""Render pages as self-contained HTML files; layout and script are in frame.html.j2."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from shardwright.report.plots import Figure


@dataclass(frozen=True, slots=True)
class Grid:
    """A text table; the first `num_text_columns` columns are text, the others numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_text_columns: int = 1
    total: tuple[str, ...] = ()


def render_template(template: str, *, title: str, figures: Sequence[Figure], **values: Any) -> str:
    """Render a template to HTML text; `values` are its variables."""
    text = (
        _templates()
        .get_template(template)
        .render(
            title=title,
            plots={figure.name: {"data": figure.data, "layout": figure.layout} for figure in figures},
            plotly=get_plotlyjs().replace("</script", "<\\/script"),
            **values,
        )
    )
    return text.encode(errors="replace").decode()


@cache
def _templates() -> Environment:
    loader = PackageLoader("shardwright.report", "")
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return jinja
