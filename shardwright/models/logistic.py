"""Logistic regression: one weight per id and per numeric feature, and a bias. Tables have dim 1."""

from torch import Tensor, nn

from shardwright.errors import UserError
from shardwright.jagged import Batch, Vectors
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.interaction import NumericLinear
from shardwright.layers.loss import BinaryLoss
from shardwright.layers.mlp import PLAIN, MLPForm


class LogisticRegression(nn.Module):
    def __init__(self, sparse: EmbeddingBags, num_dense: int, *, form: MLPForm = PLAIN) -> None:
        super().__init__()
        dims = {table.dim for table in sparse.tables}
        if dims != {1}:
            raise UserError(f"logistic regression needs tables of dim 1; these tables have dims {sorted(dims)}")
        self.sparse = sparse
        self.dense = LogisticDense(num_dense, form.output_bias or 0.0)
        self.loss = BinaryLoss()

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(batch, self.sparse(batch))


class LogisticDense(nn.Module):
    """The dense model of logistic regression."""

    def __init__(self, num_dense: int, output_bias: float) -> None:
        super().__init__()
        self.numbers = NumericLinear(num_dense, output_bias)

    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        return self.numbers(batch.numbers) + vectors.pooled_BD.sum(1)
