"""Train a recipe from Python, change its settings, and watch it with a callback of your own.

    python examples/first_run.py

Writes runs/synthetic-dlrm-001 (and -002, ... if you run it again); `shardwright report runs/synthetic-dlrm-001` makes
its page.
"""

import shardwright as sw
from shardwright import config


class BestAUC(sw.Callback):
    """Keeps the best evaluation. A callback defines the methods that it needs; all others do nothing."""

    def __init__(self) -> None:
        self.auc, self.step_of_best = 0.0, 0

    def line(self, line) -> None:
        # The lines of metrics.jsonl: `kind` is train for a window of training, eval or test for an evaluation.
        if line["kind"] == "eval" and line["auc"] > self.auc:
            self.auc, self.step_of_best = line["auc"], line["step"]

    def end(self, result) -> None:
        if result is not None:  # None: the run has failed
            print(f"best AUC {self.auc:.4f}, at step {self.step_of_best}; the run is in {result.path}")


# The same keys and values as on the command line: `shardwright recipe synthetic-dlrm` prints those of the recipe.
settings = config.load(
    "synthetic-dlrm",
    [
        "train.steps=200",
        "train.eval_every=50",
        "train.eval_samples=5000",
        "data.workers=0",  # batches are prepared in this process
        'run.loggers=["tensorboard"]',  # and "wandb", or "module:attribute" of yours
    ],
)

result = sw.train(settings, callbacks=[BestAUC()])
print(f"last evaluation: NE {result.evaluation['ne']:.4f}; {result.samples_per_second:,.0f} samples/s")
