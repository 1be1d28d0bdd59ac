"""Decoder-only transformers: token embedding, causal blocks, a head.

A batch holds the tokens as the feature "tokens", with the same length in every sample.

Shape legend: B samples, T positions, C channels.
"""

import torch
from torch import Tensor, nn

from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.layers.decoder import GPT2, NORMS, DecoderBlock, DecoderForm
from shardwright.layers.loss import NextTokenLoss

INITIAL_STD = 0.02


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
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, batch: Batch) -> Tensor:
        x_BTC = self.embed(batch)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(x_BTC)


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
        x_BTC = self.token(ids_BT)
        if self.position is None:
            return x_BTC
        return x_BTC + self.position(torch.arange(ids_BT.shape[1], device=ids_BT.device))


class Head(nn.Module):
    def __init__(self, channels: int, vocabulary: int, form: DecoderForm) -> None:
        super().__init__()
        self.norm = NORMS[form.norm](channels, eps=form.norm_eps)
        self.linear = nn.Linear(channels, vocabulary, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.linear(self.norm(x_BTC))
