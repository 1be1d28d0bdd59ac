"""Training runs: recipe, run directory, training loop, metrics, evaluation."""
