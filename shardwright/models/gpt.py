"""Decoder-only transformers: token embedding, causal blocks, a head.

A batch holds the tokens as the feature "tokens", with the same length in every sample.

Shape legend: B samples, T positions, C channels.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwright.config import fill_dataclass
from shardwright.errors import UserError, did_you_mean
from shardwright.jagged import Batch
from shardwright.layers.decoder import GPT2, LLAMA, NORMS, QWEN2, QWEN3, DecoderBlock, DecoderForm, ExpertForm
from shardwright.layers.loss import NextTokenLoss
from shardwright.layers.moe import LinearExperts

INITIAL_STD = 0.02
FORMS = MappingProxyType({"gpt2": GPT2, "llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3})


class TokenSource(Protocol):
    """Interface of a source of token sequences: number of ids, and tokens of a sequence."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def length(self) -> int: ...


def gpt(
    source: TokenSource,
    *,
    channels: int,
    num_blocks: int,
    num_heads: int,
    num_kv_heads: int = 0,
    hidden: int = 0,
    form: str = "llama",
    context: int = 0,
) -> "GPT":
    """GPT for the ids of a source; `context`: the longest sequence, 0: that of the source."""
    return GPT(
        vocabulary=_vocabulary(source, "gpt"),
        context=_context(source, context),
        channels=channels,
        num_blocks=num_blocks,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        hidden=hidden,
        form=_form(form),
    )


def moe_gpt(
    source: TokenSource,
    *,
    channels: int,
    num_blocks: int,
    num_heads: int,
    experts: Mapping[str, Any],
    num_kv_heads: int = 0,
    form: str = "llama",
    context: int = 0,
) -> "GPT":
    """GPT with experts in place of the MLPs; `experts` has the arguments of `ExpertForm`."""
    return GPT(
        vocabulary=_vocabulary(source, "moe_gpt"),
        context=_context(source, context),
        channels=channels,
        num_blocks=num_blocks,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        form=replace(_form(form), experts=fill_dataclass("model.experts", ExpertForm, experts)),
    )


def _vocabulary(source: TokenSource, kind: str) -> int:
    if not hasattr(source, "vocabulary"):
        raise UserError(f"model.kind={kind} trains on tokens, and this data has none; set data.kind=tokens")
    return source.vocabulary


def _context(source: TokenSource, context: int) -> int:
    if 0 < context < source.length:
        raise UserError(
            f"data.length={source.length}: the model's context is {context}; lower data.length or raise model.context"
        )
    return context or source.length


def _form(name: str) -> DecoderForm:
    if name not in FORMS:
        raise UserError(f'model.form="{name}"{did_you_mean(name, FORMS)}')
    return FORMS[name]


class GPT(nn.Module):
    """A transformer of a `form`: GPT2, LLAMA, QWEN2, QWEN3 of layers/decoder.py, or your own `DecoderForm`.

    `num_kv_heads`: heads of keys and values; 0: as many as heads. `hidden`: channels inside the MLP; 0: four times
    `channels`.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        context: int,
        channels: int,
        num_blocks: int,
        num_heads: int,
        num_kv_heads: int = 0,
        hidden: int = 0,
        form: DecoderForm = GPT2,
    ) -> None:
        super().__init__()
        self.form = form
        self.embed = TokenEmbedding(vocabulary, context, channels, learned_positions=not form.rotary_base)
        self.blocks = nn.ModuleList(
            DecoderBlock(channels, num_heads, num_kv_heads, hidden, form) for _ in range(num_blocks)
        )
        self.head = Head(channels, vocabulary, form)
        if form.tied:
            self.head.linear.weight = self.embed.token.weight
        self.loss = NextTokenLoss()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | LinearExperts):
                nn.init.normal_(module.weight, std=INITIAL_STD)
            if isinstance(module, nn.Linear | LinearExperts) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        """The logits; with experts also the penalties of samples."""
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TokenEmbedding(nn.Module):
    def __init__(self, vocabulary: int, context: int, channels: int, *, learned_positions: bool) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, channels)
        self.position = nn.Embedding(context, channels) if learned_positions else None

    def forward(self, batch: Batch) -> Tensor:
        ids = batch.features.values
        ids_BT = ids.view(batch.batch_size, len(ids) // max(1, batch.batch_size))  # a local batch may have no samples
        if ids_BT.shape[1] > self.context:
            raise UserError(f"sequences of {ids_BT.shape[1]} tokens; this model takes at most {self.context}")
        if ids.device.type == "cpu" and len(ids) and int(ids.max()) >= self.token.num_embeddings:
            raise UserError(
                f"token {int(ids.max())}, but this model has {self.token.num_embeddings:,} ids; "
                "train it on tokens of its own tokenizer"
            )
        x_BTC = self.token(ids_BT)
        if self.position is None:
            return x_BTC
        return x_BTC + self.position(torch.arange(ids_BT.shape[1], device=ids_BT.device))


class Head(nn.Module):
    def __init__(self, channels: int, vocabulary: int, form: DecoderForm) -> None:
        super().__init__()
        self.norm = NORMS[form.norm](channels, eps=form.norm_eps)
        self.linear = nn.Linear(channels, vocabulary, bias=False)

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        """The logits of x, or of the first of a pair; then the second is handed on."""
        if isinstance(x, tuple):
            return self.linear(self.norm(x[0])), x[1]
        return self.linear(self.norm(x))
