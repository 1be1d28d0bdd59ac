"""GPT: token and position embeddings, pre-norm causal blocks, a head tied to the token embedding.

A batch holds the tokens as the feature "tokens", with the same length in every sample.

Shape legend: B samples, T positions, C channels.
"""

import torch
from torch import Tensor, nn

from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.layers.attention import TransformerBlock
from shardwright.layers.loss import NextTokenLoss


class GPT(nn.Module):
    def __init__(self, *, vocabulary: int, context: int, channels: int, num_blocks: int, num_heads: int) -> None:
        super().__init__()
        self.embed = TokenEmbedding(vocabulary, context, channels)
        self.blocks = nn.ModuleList(TransformerBlock(channels, num_heads) for _ in range(num_blocks))
        self.head = Head(channels, vocabulary)
        self.head.linear.weight = self.embed.token.weight
        self.loss = NextTokenLoss()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, batch: Batch) -> Tensor:
        x_BTC = self.embed(batch)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(x_BTC)


class TokenEmbedding(nn.Module):
    def __init__(self, vocabulary: int, context: int, channels: int) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, channels)
        self.position = nn.Embedding(context, channels)

    def forward(self, batch: Batch) -> Tensor:
        ids = batch.features.values
        ids_BT = ids.view(batch.batch_size, len(ids) // max(1, batch.batch_size))  # a local batch may have no samples
        if ids_BT.shape[1] > self.context:
            raise UserError(f"sequences of {ids_BT.shape[1]} tokens; this model takes at most {self.context}")
        return self.token(ids_BT) + self.position(torch.arange(ids_BT.shape[1], device=ids_BT.device))


class Head(nn.Module):
    def __init__(self, channels: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.linear = nn.Linear(channels, vocabulary, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.linear(self.norm(x_BTC))
