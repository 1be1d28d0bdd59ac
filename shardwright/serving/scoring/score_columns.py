"""The columns that scores are written as: the one place that names them.

Shape legend: B samples.
"""

import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.serving.predictor import Predictor

SCORE = "score"  # of a model with one label; of several, score_TASK for each


def column_names(predictor: Predictor) -> tuple[str, ...]:
    """Names of the columns of scores, in order."""
    return tuple(f"{SCORE}_{task}" for task in predictor.served.tasks) or (SCORE,)


def score_columns(predictor: Predictor, batch: Batch) -> list[tuple[str, Tensor]]:
    """The scores of a batch: for each output of the model its name and its values (B,)."""
    names, scores = column_names(predictor), predictor.scores(batch)
    columns = scores.unsqueeze(1) if scores.dim() == 1 else scores
    if columns.shape != (batch.batch_size, len(names)):
        raise UserError(f"{predictor.path}: a sample has {tuple(scores.shape[1:])} scores; predict writes one number")
    columns = columns.to(torch.float32) if columns.dtype == torch.bfloat16 else columns
    return [(name, columns[:, index]) for index, name in enumerate(names)]
