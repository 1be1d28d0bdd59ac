"""Sequences of tokens as a source: sample i is the i-th stretch of `length` tokens of a token file.

Documents are packed: a sequence may contain the end of one and the start of the next. The label "next" has the token
that follows each. The order of sequences is the loader's: a permutation that is a pure function of (seed, epoch) and
is never materialized, so (epoch, batch) tells every token of a batch, for any number of ranks.

Shape legend: B samples, T tokens of a sequence.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardwright.data.logs.click_log import show_progress
from shardwright.data.logs.convert import CACHE_DIRECTORY, fingerprint
from shardwright.data.sources.source import NumpyBatch
from shardwright.data.tokens.documents import list_documents, read_documents
from shardwright.data.tokens.grammar import Grammar
from shardwright.data.tokens.token_file import TokenFile, is_token_file, write_token_file
from shardwright.data.tokens.tokenizer import Tokenizer, open_tokenizer
from shardwright.errors import UserError
from shardwright.layers.loss import IGNORED
from shardwright.spec import files

VERSION = 1  # of the conversion; another one converts texts again
DEFAULT_VALIDATION = 0.1


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How text becomes tokens: a tokenizer file (empty: bytes), the name of its end token, the field of JSON lines."""

    tokenizer: str = ""
    end: str = ""
    field: str = "text"


@dataclass(frozen=True)
class TokenSequences:
    """The training or validation part of a token file, as sequences; the last `validation` share is held out.

    `mask_boundaries`: no loss where the next token belongs to another document.
    """

    path: str = field(repr=False)  # the digest identifies the tokens, wherever they are
    digest: str
    length: int
    validation: float = DEFAULT_VALIDATION
    mask_boundaries: bool = False
    part: Literal["train", "validation"] = "train"

    def __reduce__(self) -> tuple[Any, ...]:
        """Workers map the file themselves."""
        fields = (self.path, self.digest, self.length, self.validation, self.mask_boundaries, self.part)
        return TokenSequences, fields

    @property
    def size(self) -> int:
        return self._bounds[1] - self._bounds[0]

    @property
    def vocabulary(self) -> int:
        return self.file.manifest.vocabulary

    @property
    def tokenizer(self) -> Tokenizer:
        return self.file.open_tokenizer()

    @cached_property
    def file(self) -> TokenFile:
        return TokenFile(Path(self.path))

    def evaluation(self) -> "TokenSequences":
        """The validation part."""
        return replace(self, part="validation")

    def take(self, indices: np.ndarray) -> NumpyBatch:
        starts_B = (indices + self._bounds[0]) * self.length
        positions_BT = starts_B[:, None] + np.arange(self.length + 1)
        tokens_BT = np.asarray(self.file.tokens[positions_BT], np.int64)
        if tokens_BT.size and tokens_BT.max() >= self.vocabulary:
            raise UserError(f"{self.path}: damaged: token {tokens_BT.max()} of {self.vocabulary}; tokenize it again")
        next_BT = tokens_BT[:, 1:].copy()
        if self.mask_boundaries:
            next_BT[self.is_document_start(positions_BT[:, 1:])] = IGNORED
        lengths = np.full((1, len(indices)), self.length, np.int64)
        return NumpyBatch(("tokens",), tokens_BT[:, :-1].ravel(), lengths, None, {"next": next_BT})

    def is_document_start(self, positions: np.ndarray) -> np.ndarray:
        """Whether a document before the one at each of these positions of the file ends there."""
        ends = self.file.ends
        return ends[np.minimum(np.searchsorted(ends, positions), len(ends) - 1)] == positions

    @cached_property
    def _bounds(self) -> tuple[int, int]:
        """First and end sequence of this part; every target but the last is inside the file."""
        num = (self.file.manifest.num_tokens - 1) // self.length
        held_out = min(num, max(1, round(num * self.validation))) if self.validation else 0
        return (0, num - held_out) if self.part == "train" else (num - held_out, num)


def open_tokens(
    path: str = "",
    *,
    seed: int = 0,
    length: int = 128,
    text: Mapping[str, Any] | None = None,
    validation: float = DEFAULT_VALIDATION,
    mask_boundaries: bool = False,
    cache: str = CACHE_DIRECTORY,
) -> TokenSequences | Grammar:
    """Open a token file, a text file or a folder of texts as training sequences; without a path, a generated grammar.

    Texts are tokenized once, into `cache`.
    """
    if length < 1:
        raise UserError(f"data.length={length}; wanted at least 1")
    if not path:
        _check_unused(text=text, validation=validation != DEFAULT_VALIDATION, mask_boundaries=mask_boundaries)
        return Grammar(seed, length=length)
    if not 0 <= validation < 1:
        raise UserError(f"data.validation={validation}; wanted a share of the tokens from 0 to below 1")
    options = files.from_plain(TextOptions, dict(text or {}), "data.text")
    token_file = open_token_file(path, options, cache)
    source = TokenSequences(
        str(token_file.path), token_file.manifest.tokens_digest[:16], length, validation, mask_boundaries
    )
    if source.size < 1:
        raise UserError(
            f"{path}: {token_file.manifest.num_tokens:,} tokens are too few for sequences of {length} and a validation "
            f"share of {validation:g}; lower data.length, or give more text"
        )
    return source


def open_token_file(path: str, options: TextOptions, cache: str) -> TokenFile:
    """Open and verify a token file, or tokenize texts into `cache` first."""
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        raise UserError(f"data.path={path}: no such file")
    tokenizer = open_tokenizer(options.tokenizer, options.end)
    if is_token_file(Path(path)):
        token_file = TokenFile(Path(path))
        check_tokenizer(token_file, tokenizer)
    else:
        token_file = TokenFile(_convert(Path(path), options, tokenizer, Path(cache)))
    token_file.verify()
    return token_file


def check_tokenizer(token_file: TokenFile, tokenizer: Tokenizer) -> None:
    """Raise UserError for tokens of another tokenizer."""
    manifest = token_file.manifest
    if manifest.tokenizer_digest != tokenizer.digest:
        remedy = (
            "remove data.text.tokenizer"
            if manifest.tokenizer == "bytes"
            else f"set data.text.tokenizer={token_file.path / 'tokenizer.json'}"
        )
        raise UserError(
            f"{token_file.path}: tokens of the tokenizer {manifest.tokenizer} ({manifest.vocabulary:,} ids), but this "
            f"run has {tokenizer.name} ({tokenizer.vocabulary:,} ids); {remedy}, or tokenize the text again"
        )


def tokenize(path: Path, options: TextOptions, tokenizer: Tokenizer, final: Path) -> None:
    """Write the token file `final` of a text file or of a folder of texts."""
    paths = list_documents(path)
    with show_progress(str(path)) as progress:
        documents = read_documents(paths, options.field, progress)
        write_token_file(documents, tokenizer, final, origin=str(path), end_token=options.end)


def _convert(path: Path, options: TextOptions, tokenizer: Tokenizer, cache: Path) -> Path:
    """Tokenize texts unless they are cached; returns the token file."""
    identity = [VERSION, tokenizer.digest, options.field, fingerprint(list_documents(path))]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    final = cache / f"{path.resolve().name.partition('.')[0]}-{digest}"
    if not is_token_file(final):
        tokenize(path, options, tokenizer, final)
    return final


def _check_unused(**given: object) -> None:
    for name, value in given.items():
        if value:
            raise UserError(f"data.{name} is for text, and this run has a generated grammar; set data=PATH, or drop it")
