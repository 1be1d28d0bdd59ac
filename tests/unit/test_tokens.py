"""Texts to token files and back; sequences of tokens: order, resumption, boundaries; every damage is one line."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardwright.data.loading.loader import Loader
from shardwright.data.tokens.documents import list_documents, read_documents
from shardwright.data.tokens.grammar import PROBABILITIES, Grammar, make_rules
from shardwright.data.tokens.sequences import IGNORED, TextOptions, TokenSequences, open_tokens, tokenize
from shardwright.data.tokens.summary import document_lengths, format_tokens
from shardwright.data.tokens.token_file import TokenFile, write_token_file
from shardwright.data.tokens.tokenizer import ByteTokenizer, open_tokenizer
from shardwright.errors import UserError

DOCUMENTS = [b"one", "zwei \u00e4\u00f6".encode(), b"three\nlines\n", b"4" * 50]


@pytest.fixture
def cache(tmp_path) -> str:
    return str(tmp_path / "cache")


def write(folder: Path, documents=DOCUMENTS, **options) -> TokenFile:
    write_token_file(iter(documents), ByteTokenizer(), folder, origin="test", **options)
    return TokenFile(folder)


def read_back(token_file: TokenFile) -> list[bytes]:
    parts = np.split(np.asarray(token_file.tokens), token_file.ends)[:-1]
    assert all(part[-1] == 256 for part in parts)
    return [part[:-1].astype(np.uint8).tobytes() for part in parts]


def test_documents_survive_a_round_trip(tmp_path):
    token_file = write(tmp_path / "tokens")
    token_file.verify()
    assert read_back(token_file) == DOCUMENTS
    assert document_lengths(token_file).tolist() == [len(document) + 1 for document in DOCUMENTS]
    text = token_file.open_tokenizer().decode(np.asarray(token_file.tokens))
    assert text == "".join(document.decode() + "\n" for document in DOCUMENTS)


def test_every_format_gives_the_same_documents(tmp_path):
    for name in ("text", "lines", "table", "mixed"):
        (tmp_path / name / "inner").mkdir(parents=True)
    for index, document in enumerate(DOCUMENTS):
        (tmp_path / "text/inner" / f"{index}.txt").write_bytes(document)
    (tmp_path / "text/.hidden.txt").write_text("not this")
    (tmp_path / "text/picture.png").write_bytes(b"not this")
    lines = "\n".join(json.dumps({"body": document.decode(), "id": 1}) for document in [b"", *DOCUMENTS])
    (tmp_path / "lines/a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    texts = pa.table({"id": [0, 1, 2, 3, 4], "body": [*(document.decode() for document in DOCUMENTS), None]})
    pq.write_table(texts, tmp_path / "table/a.parquet")
    for name in ("text", "lines", "table"):
        assert [*read_documents(list_documents(tmp_path / name), "body")] == DOCUMENTS, name
    tokenize(tmp_path / "table", TextOptions(field="body"), ByteTokenizer(), tmp_path / "tokens")
    assert read_back(TokenFile(tmp_path / "tokens")) == DOCUMENTS


def test_a_tokenizer_file_is_copied_and_decodes(tmp_path, cache):
    path = train_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text("low lower lowest " * 40)
    options = TextOptions(str(path))
    tokenize(tmp_path / "a.txt", options, open_tokenizer(str(path)), tmp_path / "tokens")
    token_file = TokenFile(tmp_path / "tokens")
    assert token_file.manifest.num_tokens < 200 and token_file.tokens[-1] == token_file.open_tokenizer().end
    assert token_file.open_tokenizer().decode(np.asarray(token_file.tokens[:3])).startswith("low")
    source = open_tokens(
        str(tmp_path / "tokens"), length=8, text={"tokenizer": str(tmp_path / "tokens/tokenizer.json")}, cache=cache
    )
    assert source.vocabulary == token_file.manifest.vocabulary
    with pytest.raises(
        UserError, match=r"tokens of the tokenizer tokenizer.json .* this run has bytes .* set data.text"
    ):
        open_tokens(str(tmp_path / "tokens"), cache=cache)
    other = train_tokenizer(tmp_path / "other.json", end="</s>")
    with pytest.raises(UserError, match="this run has other.json"):
        open_tokens(str(tmp_path / "tokens"), text={"tokenizer": str(other)}, cache=cache)
    with pytest.raises(UserError, match='no token "<none>"; .*name the token that ends a document with end=TOKEN'):
        open_tokenizer(str(path), "<none>")


def train_tokenizer(path: Path, end: str = "<|endoftext|>") -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=[end], show_progress=False)
    tokenizer.train_from_iterator(["low lower lowest low"], trainer)
    tokenizer.save(str(path))
    return path


def test_a_missing_library_names_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "t.json").write_text("{}")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UserError, match="needs the library tokenizers: pip install tokenizers"):
        open_tokenizer(str(tmp_path / "t.json"))


@pytest.fixture
def numbered(tmp_path, cache) -> TokenSequences:
    """1,020 tokens: byte i is i % 251, in documents of 50 bytes."""
    text = bytes(i % 251 for i in range(1000))
    write(tmp_path / "numbered", [text[i : i + 50] for i in range(0, 1000, 50)])
    source = open_tokens(str(tmp_path / "numbered"), length=10, validation=0.2, cache=cache)
    assert isinstance(source, TokenSequences)
    return source


def test_parts_cover_the_file_and_share_no_target(numbered):
    held_out = numbered.evaluation()
    assert (numbered.size, held_out.size) == (81, 20)  # (1020 - 1) // 10 sequences
    batches = [part.take(np.arange(part.size)) for part in (numbered, held_out)]
    tokens = np.asarray(numbered.file.tokens, np.int64)
    assert np.concatenate([batch.values for batch in batches]).tolist() == tokens[:1010].tolist()
    targets = np.concatenate([batch.labels["next"].ravel() for batch in batches])
    assert targets.tolist() == tokens[1:1011].tolist()


def test_targets_in_another_document_can_be_masked(numbered):
    masked = TokenSequences(numbered.path, numbered.digest, 10, mask_boundaries=True)
    plain, hidden = (source.take(np.arange(20)) for source in (numbered, masked))
    after_end = plain.values.reshape(20, 10) == 256
    assert after_end.sum() == 3
    assert np.array_equal(hidden.labels["next"] == IGNORED, after_end)
    assert np.array_equal(hidden.labels["next"][~after_end], plain.labels["next"][~after_end])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_global_order_is_the_same_for_any_number_of_ranks(numbered, num_ranks, workers):
    def batches(shard):
        with Loader(numbered, batch_size=8, seed=3, shard=shard, workers=workers) as loader:
            return [batch.features.values.tolist() for _ in range(2) for batch in loader]

    expected = batches((0, 1))
    parts = [batches((rank, num_ranks)) for rank in range(num_ranks)]
    assert [sum(tokens, []) for tokens in zip(*parts, strict=True)] == expected
    assert sorted(sum(expected[:11], [])) == sorted(sum(expected[11:], []))
    assert expected[:11] != expected[11:]


def test_a_loader_resumes_at_the_exact_token(numbered):
    whole = Loader(numbered, batch_size=8, seed=3)
    expected = [batch.features.values.tolist() for _ in range(2) for batch in whole]
    for stop in (0, 5, 11, 13):
        first = Loader(numbered, batch_size=8, seed=3)
        batches = (batch for _ in range(2) for batch in first)
        assert [next(batches).features.values.tolist() for _ in range(stop)] == expected[:stop]
        second = Loader(numbered, batch_size=8, seed=3, shard=(0, 1))
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert next(iter(second)).features.values.tolist() == expected[stop]


def test_another_seed_gives_another_order_and_other_tokens_cannot_be_resumed(numbered, tmp_path, cache):
    first, second = (Loader(numbered, batch_size=8, seed=seed).peek().features.values for seed in (1, 2))
    assert first.tolist() != second.tolist()
    write(tmp_path / "other", [b"x" * 1019])
    other = open_tokens(str(tmp_path / "other"), length=10, validation=0.2, cache=cache)
    with pytest.raises(UserError, match="source is .*TokenSequences.* but the saved state has"):
        Loader(other, batch_size=8).load_state_dict(Loader(numbered, batch_size=8).state_dict())


def test_a_text_is_tokenized_once_and_again_after_a_change(tmp_path, cache):
    (tmp_path / "a.txt").write_text("some text " * 30)
    first = open_tokens(str(tmp_path / "a.txt"), length=16, cache=cache)
    assert open_tokens(str(tmp_path / "a.txt"), length=16, cache=cache).path == first.path
    (tmp_path / "a.txt").write_text("other text " * 30)
    assert open_tokens(str(tmp_path / "a.txt"), length=16, cache=cache).path != first.path


def damage(path: Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("tokens.bin", lambda data: data[:-2], r"tokens.bin: truncated: it has 154 bytes, the manifest says 156"),
        ("tokens.bin", lambda data: data + b"\0", r"tokens.bin: damaged: it has 157 bytes"),
        ("tokens.bin", lambda data: b"\1" + data[1:], r"tokens.bin: damaged: its digest is not the manifest's"),
        ("documents.bin", lambda data: data[:8], r"documents.bin: truncated"),
        ("documents.bin", lambda data: data[:-1] + b"\1", r"documents.bin: damaged"),
        ("tokens.json", lambda data: data[:40], r"tokens.json: bad JSON"),
    ],
)
def test_damage_is_named(tmp_path, cache, file, change, message):
    write(tmp_path / "tokens")
    damage(tmp_path / "tokens" / file, change)
    with pytest.raises(UserError, match=message) as error:
        open_tokens(str(tmp_path / "tokens"), length=4, cache=cache)
    assert "\n" not in str(error.value)


def test_wrong_texts_and_settings_are_named(tmp_path, cache):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    (tmp_path / "named.jsonl").write_text('{"content": "a"}\n')
    (tmp_path / "none").mkdir()
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "a.parquet")
    for path, message in (
        ("empty.txt", "no text: all of its documents are empty; give a file with text"),
        ("short.txt", "6 tokens are too few for sequences of 16 .*; lower data.length, or give more text"),
        ("bad.jsonl", 'bad.jsonl: line 2: no text in field "text"; set field=NAME'),
        ("named.jsonl", 'line 1: no text in field "text"; did you mean "content"|allowed: content'),
        ("none", "no text in this folder; its files need one of the suffixes .txt"),
        ("a.parquet", 'no column "text"'),
        ("gone.txt", "no such file"),
    ):
        with pytest.raises(UserError, match=message):
            open_tokens(str(tmp_path / path), length=16, cache=cache)
    for options, message in (
        ({"length": 0}, "data.length=0"),
        ({"validation": 0.2}, "data.validation is for text, and this run has a generated grammar"),
        ({"text": {"field": "x"}}, "data.text is for text"),
    ):
        with pytest.raises(UserError, match=message):
            open_tokens("", **options)


def test_inspection_shows_documents_and_text(tmp_path):
    tables = {title: rows for title, _, rows in format_tokens(write(tmp_path / "tokens"))}
    assert ("tokens", "78") in tables["test"] and ("documents", "4") in tables["test"]
    assert tables["tokens of a document, its end included"][0][0] == "4"
    assert tables["first 78 tokens"][0] == ("one",)


def test_samples_of_the_grammar_are_a_pure_function_of_their_index():
    grammar = Grammar(seed=5, length=60)
    all_values = grammar.take(np.arange(10)).values.reshape(10, 60)
    assert np.array_equal(grammar.take(np.array([7, 2])).values.reshape(2, 60), all_values[[7, 2]])
    assert not np.array_equal(Grammar(seed=6, length=60).take(np.arange(10)).values.reshape(10, 60), all_values)
    assert grammar.take(np.arange(0)).labels["next"].shape == (0, 60)
    assert (all_values[:, 0] == grammar.tokenizer.end).all()


def test_the_bound_of_the_grammar_is_its_entropy():
    """The probabilities of letters multiply to those of words, and long samples reach the entropy of the chain."""
    rules = make_rules()
    products = np.exp(-rules.information.sum(2))
    assert products == pytest.approx(np.broadcast_to(PROBABILITIES, products.shape))
    assert Grammar(length=4000).bound(0, 200) == pytest.approx(rules.entropy, rel=0.01)
