"""Summary of a token file: its tokenizer, tokens and documents, their lengths, and its first text."""

from collections.abc import Iterator

import numpy as np

from shardwright.data.tokens.token_file import TokenFile

SHOWN_TOKENS = 200
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def format_tokens(token_file: TokenFile) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Yield tables of text: title, column names, rows."""
    manifest, lengths = token_file.manifest, document_lengths(token_file)
    facts = [
        ("tokens", f"{manifest.num_tokens:,}"),
        ("documents", f"{manifest.num_documents:,}"),
        ("tokenizer", f"{manifest.tokenizer} ({manifest.tokenizer_digest})"),
        ("vocabulary", f"{manifest.vocabulary:,}"),
        ("bytes per token", str(np.dtype(manifest.dtype).itemsize)),
        ("digest", manifest.tokens_digest[:16]),
    ]
    yield manifest.origin, ("", ""), facts
    names = ("shortest", *(f"{share:.0%}" for share in QUANTILES[1:-1]), "longest", "mean")
    values = (*(f"{length:,.0f}" for length in np.quantile(lengths, QUANTILES)), f"{lengths.mean():,.1f}")
    yield "tokens of a document, its end included", names, [values]
    text = token_file.open_tokenizer().decode(np.asarray(token_file.tokens[:SHOWN_TOKENS]))
    yield f"first {min(SHOWN_TOKENS, manifest.num_tokens)} tokens", ("",), [(line,) for line in text.splitlines()]


def document_lengths(token_file: TokenFile) -> np.ndarray:
    return np.diff(token_file.ends, prepend=0)
