"""A whole run: recipe, run directory, training loop, metrics, evaluation."""
