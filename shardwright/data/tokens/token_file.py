"""Token files: a directory with the packed tokens of many documents, memory-mapped when it is read.

tokens.json      the manifest: tokenizer, numbers of tokens and documents, digests
tokens.bin       all tokens; each document is followed by the tokenizer's id for its end
documents.bin    for each document, the position of the first token after it
tokenizer.json   the tokenizer, unless tokens are bytes
"""

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np

from shardwright.data.tokens.tokenizer import BYTES, FileTokenizer, Tokenizer, open_tokenizer
from shardwright.errors import UserError
from shardwright.spec import files

MANIFEST, TOKENS, DOCUMENTS, TOKENIZER = "tokens.json", "tokens.bin", "documents.bin", "tokenizer.json"
BATCH_BYTES = 4 << 20  # text that is encoded at once
NARROW_VOCABULARY = 1 << 16  # ids below it are stored in two bytes


@dataclass(frozen=True, slots=True)
class TokenManifest:
    """Contents of tokens.json."""

    version: Literal[1]
    origin: str
    tokenizer: str
    tokenizer_digest: str
    end_token: str  # that the tokenizer was opened with
    vocabulary: int
    dtype: Literal["uint16", "uint32"]
    num_tokens: int
    num_documents: int
    tokens_digest: str
    documents_digest: str


class TokenFile:
    """An opened token file: its manifest, `tokens`, and the `ends` of its documents, both memory-mapped."""

    def __init__(self, path: Path) -> None:
        """Check the sizes of all files, but not their contents."""
        if not (path / MANIFEST).is_file():
            raise UserError(f"{path}: no token file: it has no {MANIFEST}; write one with `shardwright data tokenize`")
        self.path = path
        self.manifest = manifest = files.read(TokenManifest, path / MANIFEST)
        self.tokens = _map(path / TOKENS, manifest.dtype, manifest.num_tokens)
        self.ends = _map(path / DOCUMENTS, "int64", manifest.num_documents)

    def verify(self) -> None:
        """Raise UserError if the tokens or the documents are not those that were written."""
        manifest = self.manifest
        for name, expected in ((TOKENS, manifest.tokens_digest), (DOCUMENTS, manifest.documents_digest)):
            with (self.path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    raise UserError(f"{self.path / name}: damaged: its digest is not the manifest's; tokenize it again")

    def open_tokenizer(self) -> Tokenizer:
        if self.manifest.tokenizer == BYTES:
            return open_tokenizer()
        tokenizer = FileTokenizer(str(self.path / TOKENIZER), self.manifest.end_token)
        if tokenizer.digest != self.manifest.tokenizer_digest:
            raise UserError(f"{self.path / TOKENIZER}: not the tokenizer of these tokens; tokenize the text again")
        return tokenizer


def is_token_file(path: Path) -> bool:
    return path.is_dir() and (path / MANIFEST).exists()


def write_token_file(
    documents: Iterator[bytes], tokenizer: Tokenizer, final: Path, *, origin: str, end_token: str = ""
) -> None:
    """Write a token file into a temporary directory and rename it. Safe in concurrent processes: the first one wins."""
    draft = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
        manifest = _write_arrays(documents, tokenizer, draft, origin, end_token)
        if isinstance(tokenizer, FileTokenizer):
            (draft / TOKENIZER).write_bytes(tokenizer.content)
        files.write(manifest, draft / MANIFEST)
        with suppress(OSError):
            draft.rename(final)
        if not is_token_file(final):
            raise OSError(f"{draft} could not be renamed")
    except OSError as error:
        raise UserError(f"{final}: cannot be written ({error}); choose another directory") from None
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)


def _write_arrays(
    documents: Iterator[bytes], tokenizer: Tokenizer, draft: Path, origin: str, end_token: str
) -> TokenManifest:
    dtype = "uint16" if tokenizer.vocabulary <= NARROW_VOCABULARY else "uint32"
    num_tokens = num_documents = 0
    with (draft / TOKENS).open("wb") as token_stream, (draft / DOCUMENTS).open("wb") as document_stream:
        digests = hashlib.sha256(), hashlib.sha256()
        for batch in _batches(documents):
            encoded = [np.append(tokens, tokenizer.end).astype(dtype) for tokens in tokenizer.encode(batch)]
            ends = num_tokens + np.cumsum([len(tokens) for tokens in encoded])
            _append(token_stream, np.concatenate(encoded), digests[0])
            _append(document_stream, ends.astype(np.int64), digests[1])
            num_tokens, num_documents = int(ends[-1]), num_documents + len(ends)
    if not num_documents:
        raise UserError(f"{origin}: no text: all of its documents are empty; give a file with text")
    return TokenManifest(
        version=1,
        origin=origin,
        tokenizer=tokenizer.name,
        tokenizer_digest=tokenizer.digest,
        end_token=end_token,
        vocabulary=tokenizer.vocabulary,
        dtype=dtype,
        num_tokens=num_tokens,
        num_documents=num_documents,
        tokens_digest=digests[0].hexdigest(),
        documents_digest=digests[1].hexdigest(),
    )


def _batches(documents: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Documents in lists of about BATCH_BYTES."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _append(stream: IO[bytes], values: np.ndarray, digest: "hashlib._Hash") -> None:
    data = values.astype(values.dtype.newbyteorder("<")).tobytes()
    stream.write(data)
    digest.update(data)


def _map(path: Path, dtype: str, num: int) -> np.ndarray:
    """Map the file's `num` values; another size is an error."""
    expected = num * np.dtype(dtype).itemsize
    try:
        size = path.stat().st_size
        if size == expected:
            return np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); tokenize the text again") from None
    raise UserError(
        f"{path}: {'truncated' if size < expected else 'damaged'}: it has {size:,} bytes, the manifest says "
        f"{expected:,}; tokenize the text again"
    )
