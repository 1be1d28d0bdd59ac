"""Tokenizers: documents to token ids and back. Bytes need no library; others are files of the library tokenizers."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardwright.errors import UserError, check_regular_file, did_you_mean

BYTES = "bytes"
NUM_BYTES = 256
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "[SEP]")  # that end a document


class Tokenizer(Protocol):
    """Ids 0 to vocabulary - 1; `end` is the id that follows each document."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def end(self) -> int: ...

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]: ...

    def decode(self, tokens: np.ndarray) -> str: ...


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """One id for each byte, and one that ends a document."""

    name: str = BYTES
    digest: str = BYTES
    vocabulary: int = NUM_BYTES + 1
    end: int = NUM_BYTES

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(document, np.uint8) for document in documents]

    def decode(self, tokens: np.ndarray) -> str:
        """The text of the tokens; ends of documents are line breaks, and bytes that are not UTF-8 are replaced."""
        text = np.where(tokens < NUM_BYTES, tokens, ord("\n")).astype(np.uint8)
        return text.tobytes().decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json of the library tokenizers; `end` names the token that ends a document."""

    def __init__(self, path: str, end: str = "") -> None:
        check_regular_file(path)
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"tokenizer {path}: cannot be read ({error.strerror})") from None
        self._tokenizer = _load(path, content)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        names = [name for name in ((end,) if end else END_TOKENS) if name in ids]
        if not names:
            problem = f'no token "{end}"{did_you_mean(end, ids)}' if end else f"none of {', '.join(END_TOKENS)}"
            raise UserError(f"tokenizer {path}: {problem}; name the token that ends a document with end=TOKEN")
        self.name = Path(path).name
        self.digest = sha256(content + names[0].encode()).hexdigest()[:16]
        self.vocabulary = max(ids.values()) + 1
        self.end = ids[names[0]]
        self.content = content

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        try:
            texts = [document.decode() for document in documents]
        except UnicodeDecodeError as error:
            raise UserError(
                f"a document is not UTF-8 at byte {error.start}; convert it, or tokenize bytes (no tokenizer)"
            ) from None
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def decode(self, tokens: np.ndarray) -> str:
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


def open_tokenizer(path: str = "", end: str = "") -> ByteTokenizer | FileTokenizer:
    """The tokenizer of a file; bytes without one."""
    if path and path != BYTES:
        return FileTokenizer(path, end)
    if end:
        raise UserError(f"end={end} is for a tokenizer file; bytes have an id of their own for it: drop it")
    return ByteTokenizer()


def _load(path: str, content: bytes) -> Any:
    try:
        from tokenizers import Tokenizer as LibraryTokenizer
    except ImportError:
        raise UserError(
            f"tokenizer {path} needs the library tokenizers: pip install tokenizers (or shardwright[tokens])"
        ) from None
    try:
        return LibraryTokenizer.from_buffer(content)
    except Exception as error:  # the library raises Exception itself
        reason = str(error).splitlines()[0]
        raise UserError(f"tokenizer {path}: not a file of the library tokenizers ({reason})") from None
