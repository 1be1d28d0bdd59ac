"""What sections of a recipe have in common."""

import re
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict

BYTE_UNITS = MappingProxyType({"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12})


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class OpenSection(BaseModel):
    """A section with a `kind`; its other keys are the arguments of the class or function of that kind."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    kind: str = Field(description='a built-in name, or "module:attribute" of your code')

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def parse_bytes(text: str) -> int:
    """A number of bytes from text such as "4 GB"; raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(kB|MB|GB|TB)", text.strip())
    if match is None:
        raise ValueError(f'"{text}" is not a number of bytes; wanted one with a unit (kB, MB, GB, TB), as "4 GB"')
    return int(float(match[1]) * BYTE_UNITS[match[2]])


def _check_bytes(text: str) -> str:
    """Raise unless it is empty, or a number of bytes with a unit."""
    if text:
        parse_bytes(text)
    return text


Files = str | Annotated[tuple[str, ...], Strict(False)]  # paths or globs
ByteText = Annotated[str, AfterValidator(_check_bytes)]
