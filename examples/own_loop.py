"""Keep your model and training loop, and replace its nn.EmbeddingBags by one EmbeddingBags.

    python examples/own_loop.py

The tables are updated inside `loss.backward()`, with an optimizer of their own; yours has the other parameters.
"""

from itertools import islice

import torch
from torch import nn

import shardwright as sw


class Clicks(nn.Module):
    """A model as you may have it today: a list of nn.EmbeddingBag and an MLP."""

    def __init__(self, bags: list[nn.EmbeddingBag], names: list[str], num_dense: int) -> None:
        super().__init__()
        # This is the swapped line; before: self.bags = nn.ModuleList(bags). Weights and their names stay.
        self.bags = sw.from_torch(bags, sw.AdaGrad(lr=0.1), names=names)
        width = num_dense + sum(bag.embedding_dim for bag in bags)
        self.top = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: sw.Batch) -> torch.Tensor:
        vectors_BD = self.bags(batch).pooled_BD  # before: a call per bag and torch.cat
        return self.top(torch.cat([batch.numbers, vectors_BD], dim=1)).squeeze(1)


torch.manual_seed(1)
stream = sw.ClickStream()  # of your data: any object with Batches of ids, numbers and labels (docs/data.md)
names = [name for name, _, _ in stream.features]
model = Clicks([nn.EmbeddingBag(rows, 8, mode="mean") for _, rows, _ in stream.features], names, stream.num_dense)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)  # skips the tables

for step, batch in enumerate(islice(sw.Loader(stream, batch_size=1024), 150), start=1):
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels["click"])
    optimizer.zero_grad()
    loss.backward()  # when this returns, the tables have taken their step
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}  loss {loss:.4f}")
