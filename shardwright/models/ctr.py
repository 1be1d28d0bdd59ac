"""Click models beside DLRM."""

from torch import Tensor, nn

from shardwright.errors import UserError
from shardwright.jagged import Batch, Vectors
from shardwright.layers.embedding import EmbeddingBags
from shardwright.layers.loss import BinaryLoss


class LogisticRegression(nn.Module):
    """One weight per id and per dense feature, and a bias: tables of dim 1."""

    def __init__(self, sparse: EmbeddingBags, num_dense: int) -> None:
        super().__init__()
        dims = {table.dim for table in sparse.tables}
        if dims != {1}:
            raise UserError(f"logistic regression wants tables of dim 1, these have dims {sorted(dims)}")
        self.sparse = sparse
        self.dense = LinearDense(num_dense)
        self.loss = BinaryLoss()

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(batch, self.sparse(batch))


class LinearDense(nn.Module):
    def __init__(self, num_dense: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_dense, 1)

    def forward(self, batch: Batch, vectors: Vectors) -> Tensor:
        return self.linear(batch.dense).squeeze(1) + vectors.pooled_BD.sum(1)
