"""The training step as a list of stages, the duration of each, and its simulation over ranks and lanes."""
