"""A generated language whose best loss is known: a few words may follow each word, with fixed probabilities.

A regular grammar with a rule for each pair of words: word -> spelling " " next word. Tokens are the bytes of the text;
a sample starts with the id that ends documents. Every draw is a hash of (seed, sample index), so a sample is the same
in any batch and in any process. The probability of a byte, given all before it, is the sum over the words that it may
still become; so the loss of the true probabilities can be computed exactly.

Shape legend: B samples, T tokens of a sequence, W words and the start (the last), K words that may follow, L letters.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from shardwright.data.sources.source import NumpyBatch, draw_bits, stream_keys
from shardwright.data.tokens.tokenizer import ByteTokenizer
from shardwright.errors import UserError

WORDS = (
    *("a", "all", "and", "are", "at", "be", "bird", "but", "by", "city", "cold", "day", "do", "down", "every", "far"),
    *("field", "fire", "for", "from", "garden", "go", "had", "has", "he", "her", "his", "house", "in", "is", "it"),
    *("light", "like", "long", "moon", "morning", "night", "no", "not", "of", "old", "on", "one", "or", "people"),
    *("rain", "river", "road", "sea", "she", "sky", "small", "stone", "sun", "that", "the", "they", "to", "tree"),
    *("under", "was", "water", "we", "wind"),
)
PROBABILITIES = (0.5, 0.25, 0.15, 0.1)  # of the K words that may follow a word
SAMPLES, WORLD = 3, 4  # first word of every hash key, so that equal seeds of rules and samples stay unrelated
RULES_SEED = 1
CHUNK = 1024  # samples whose bound is computed at once


@dataclass(frozen=True, slots=True)
class Grammar:
    """Endless samples of `length` tokens; `seed` draws the samples, the rules are always the same."""

    seed: int = 0
    length: int = 128

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UserError(f"grammar: length = {self.length}; wanted at least 1")

    @property
    def size(self) -> None:
        return None

    @property
    def vocabulary(self) -> int:
        return self.tokenizer.vocabulary

    @property
    def tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer()

    def evaluation(self) -> "Grammar":
        """Samples of the same grammar that are not trained on."""
        return replace(self, seed=~self.seed)

    def take(self, indices: np.ndarray) -> NumpyBatch:
        tokens_BT, _ = self._generate(indices)
        lengths = np.full((1, len(indices)), self.length, np.int64)
        return NumpyBatch(("tokens",), tokens_BT[:, :-1].ravel(), lengths, None, {"next": tokens_BT[:, 1:].copy()})

    def bound(self, lo: int, hi: int) -> float:
        """The loss of the true probabilities on samples lo to hi - 1: no model can be expected to have less."""
        total = 0.0
        for start in range(lo, hi, CHUNK):
            _, information_BT = self._generate(np.arange(start, min(start + CHUNK, hi)))
            total += float(information_BT.sum())
        return total / ((hi - lo) * self.length)

    def _generate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (B, T + 1), and -log of the probability of each but the first (B, T)."""
        rules = make_rules()
        num, samples_B = len(indices), np.arange(len(indices))
        tokens_BT = np.full((num, self.length + 1 + rules.letters.shape[1]), self.tokenizer.end, np.int64)
        information_BT = np.zeros(tokens_BT.shape)
        word_B, end_B = np.full(num, len(WORDS)), np.ones(num, np.int64)
        step, keys = 0, stream_keys(SAMPLES, self.seed, num=self.length)  # a word has at least one letter and a space
        letters_L = np.arange(rules.letters.shape[1])
        while num and end_B.min() <= self.length:
            draws_B = (draw_bits(keys[step : step + 1], indices)[0] >> 11) * 2.0**-53
            choice_B = np.searchsorted(np.cumsum(PROBABILITIES[:-1]), draws_B, side="right")
            next_B = rules.successors[word_B, choice_B]
            active_B = end_B <= self.length
            rows, columns = samples_B[active_B, None], end_B[active_B, None] + letters_L
            tokens_BT[rows, columns] = rules.letters[next_B[active_B]]
            information_BT[rows, columns] = rules.information[word_B[active_B], choice_B[active_B]]
            word_B, end_B, step = next_B, end_B + rules.lengths[next_B] * active_B, step + 1
        return tokens_BT[:, : self.length + 1], information_BT[:, 1 : self.length + 1]


@dataclass(frozen=True, slots=True)
class Rules:
    """The grammar as arrays. A word's letters include the space after it; unused ones are 0."""

    letters: np.ndarray  # (W - 1, L)
    lengths: np.ndarray  # (W - 1,)
    successors: np.ndarray  # (W, K): the words that may follow
    information: np.ndarray  # (W, K, L): -log of the probability of each letter of such a word

    @property
    def entropy(self) -> float:
        """Nats per byte of an endless text."""
        share_W = np.full(len(WORDS), 1 / len(WORDS))
        for _ in range(1000):
            after_W = np.zeros(len(WORDS))
            np.add.at(after_W, self.successors[:-1], share_W[:, None] * PROBABILITIES)
            share_W = (share_W + after_W) / 2
        nats_per_word = -sum(p * math.log(p) for p in PROBABILITIES)
        return nats_per_word / float(share_W @ self.lengths)


@cache
def make_rules() -> Rules:
    """Draw which words may follow each word, and spell them."""
    spellings = [f"{word} ".encode() for word in WORDS]
    longest = max(map(len, spellings))
    letters = np.array([list(spelling.ljust(longest, b"\0")) for spelling in spellings])
    keys = stream_keys(WORLD, RULES_SEED, num=len(WORDS) + 1)
    hashes = draw_bits(keys, np.arange(len(WORDS)))
    successors = np.argsort(hashes, axis=1, kind="stable")[:, : len(PROBABILITIES)]
    information = np.zeros((len(WORDS) + 1, len(PROBABILITIES), longest))
    for row, words in enumerate(successors):
        for choice, word in enumerate(words):
            candidates = [spellings[other] for other in words]
            information[row, choice] = _letter_information(spellings[word], candidates, longest)
    return Rules(letters, np.array([*map(len, spellings)]), successors, information)


def _letter_information(spelling: bytes, candidates: list[bytes], longest: int) -> np.ndarray:
    """-log of the probability of each letter of a word, given those before it and the words that it may be."""

    def mass(prefix: bytes) -> float:
        pairs = zip(candidates, PROBABILITIES, strict=True)
        return sum(probability for candidate, probability in pairs if candidate.startswith(prefix))

    masses = [mass(spelling[:num]) for num in range(len(spelling) + 1)]
    information = -np.diff(np.log(masses))
    return np.pad(information, (0, longest - len(information)))
