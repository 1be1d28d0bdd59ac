"""The columns that scores are written as: the one place that names them.

Shape legend: B samples.
"""

import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.jagged import Batch
from shardwright.serving.predictor import Predictor

SCORE = "score"  # of a model with one output


def column_names(predictor: Predictor) -> tuple[str, ...]:
    """Names of the columns of scores, in order."""
    del predictor  # every exported model has one output
    return (SCORE,)


def score_columns(predictor: Predictor, batch: Batch) -> list[tuple[str, Tensor]]:
    """The scores of a batch: for each output of the model its name and its values (B,)."""
    scores = predictor.scores(batch)
    if scores.shape != (batch.batch_size,):
        raise UserError(f"{predictor.path}: a sample has {tuple(scores.shape[1:])} scores; predict writes one number")
    return [(SCORE, scores.to(torch.float32) if scores.dtype == torch.bfloat16 else scores)]
